// What the structs of tensor types are made of: shapes, loads, and bits to bytes. dequantize.cuh says what they are for.
#pragma once

#include <cuda_fp16.h>

#include "integers.cuh"

namespace strata {

// Shapes of a type, and what a struct says of its integers unless it says otherwise.
template <int BLOCK_VALUES_, int BLOCK_BYTES_, int RUNS_, int RUN_, int STRIDE_, int GRID_WORDS_ = 0>
struct Format {
  static constexpr int BLOCK_VALUES = BLOCK_VALUES_;
  static constexpr int BLOCK_BYTES = BLOCK_BYTES_;
  static constexpr int RUNS = RUNS_;
  static constexpr int RUN = RUN_;
  static constexpr int STRIDE = STRIDE_;
  static constexpr int GRID_WORDS = GRID_WORDS_;

  static constexpr bool INTEGER = true;
  static constexpr bool HAS_MINIMUM = false;
  static constexpr int BIAS = 0;
  static constexpr bool PAIRED = false;

  static constexpr int VALUES = RUNS * RUN;  // of a group
  static constexpr int WORDS = VALUES / 4;   // that hold its integers
  static constexpr int GROUPS = BLOCK_VALUES / VALUES;
  static constexpr int GROUPS_A_STRIDE = STRIDE / RUN;
  static constexpr int LOWEST_BIT = BLOCK_BYTES & -BLOCK_BYTES;
  static constexpr int ALIGNMENT = LOWEST_BIT < 16 ? LOWEST_BIT : 16;

  static_assert(BLOCK_VALUES % (STRIDE * RUNS) == 0 && STRIDE % RUN == 0, "groups cover a block exactly");
  static_assert((RUN == 4 || RUN == 8 || RUN == 16) && (RUNS == 1 || STRIDE % 16 == 0),
                "a run lies in one aligned group of 16 values, as the scales of an activation do");

  static __device__ __forceinline__ int first(int group) {
    return group / GROUPS_A_STRIDE * (STRIDE * RUNS) + group % GROUPS_A_STRIDE * RUN;
  }

  static __device__ __forceinline__ const uint32_t* grid() { return nullptr; }
};

// ---- Loads: the name says the alignment that is needed.

__device__ __forceinline__ uint32_t load_u16(const uint8_t* p) { return *reinterpret_cast<const uint16_t*>(p); }

__device__ __forceinline__ uint32_t load_u32(const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); }

__device__ __forceinline__ uint2 load_u64(const uint8_t* p) { return *reinterpret_cast<const uint2*>(p); }

__device__ __forceinline__ uint4 load_u128(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

// A block that begins `skew` bytes after an aligned word is read in aligned words, counted from that one: `load_words`
// reads some, and `word_after` takes four bytes from two of them. To have N words from byte `at + ahead` of a block
// (`at` a multiple of 4, `ahead` 0 .. 3, skew + ahead at most 4), load the N + 1 words from `at` and take each pair
// `skew + ahead` bytes on. All N + 1 touch the block as long as byte `at + 4 N` is one of its own.

__device__ __forceinline__ uint32_t skew_of(const uint8_t* block) {
  return static_cast<uint32_t>(reinterpret_cast<uint64_t>(block)) & 3u;
}

template <int N>
__device__ __forceinline__ void load_words(uint32_t (&words)[N], const uint8_t* block, int at) {
  const uint8_t* from = block - skew_of(block) + at;
#pragma unroll
  for (int i = 0; i < N; ++i) words[i] = load_u32(from + 4 * i);
}

// The four bytes that begin with byte `skip`, 0 .. 4, of two words.
__device__ __forceinline__ uint32_t word_after(uint32_t first, uint32_t second, uint32_t skip) {
  return __byte_perm(first, second, 0x3210u + 0x1111u * skip);
}

// ---- Integers to float.

__device__ __forceinline__ float half_value(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Byte `i` of a word as a float, less `bias` (a constant integer). The byte becomes the low mantissa bits of 2^23, and
// an exact subtraction takes 2^23 and the bias away: a byte permute and an addition, where the conversion instruction
// has a quarter of their rate on most architectures.
__device__ __forceinline__ float byte_value(uint32_t word, int i, float bias = 0.0f) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7650u | i)) - (8388608.0f + bias);
}

// The same for signed bytes.
__device__ __forceinline__ float signed_byte_value(uint32_t word, int i, float bias = 0.0f) {
  return byte_value(word ^ 0x80808080u, i, 128.0f + bias);
}

// ---- Bits of several values at once: a word holds one byte for each of four values.

__device__ __forceinline__ uint32_t low_nibbles(uint32_t word) { return word & 0x0F0F0F0Fu; }

__device__ __forceinline__ uint32_t high_nibbles(uint32_t word) { return word >> 4 & 0x0F0F0F0Fu; }

// Bit i of the low four bits, for i = 0 .. 3, to bit 4 of byte i. The product puts it at 7 j + i + 4 for every
// j = 0 .. 3, all different, so nothing carries; the mask keeps j = i.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) { return (bits & 15u) * 0x02040810u & 0x10101010u; }

// Four magnitudes of 1 .. 127, those negated whose bit of the low four of `signs` is set. A product as above takes the
// bits to the bytes; a byte of ones less than the next power is all ones; -m is ~m + 1, and does not carry.
__device__ __forceinline__ uint32_t with_signs(uint32_t magnitudes, uint32_t signs) {
  const uint32_t ones = (signs & 15u) * 0x10204080u >> 7 & 0x01010101u;
  return (magnitudes ^ ((ones << 8) - ones)) + ones;
}

// A table of 16 bytes in four words, looked up in registers.
struct Table16 {
  uint32_t words[4];

  // The bytes that the low four nibbles of `indices` stand for. A permute picks from eight bytes by three bits, so
  // both halves of the table are tried, and the fourth bit chooses.
  __device__ __forceinline__ uint32_t four(uint32_t indices) const {
    const uint32_t lower = __byte_perm(words[0], words[1], indices & 0x7777u);
    const uint32_t upper = __byte_perm(words[2], words[3], indices & 0x7777u);
    return __byte_perm(lower, upper, 0x3210u | (indices & 0x8888u) >> 1);
  }

  // The bytes for the low nibbles and for the high nibbles of a word's four bytes.
  __device__ __forceinline__ void eight(uint32_t word, uint32_t& low, uint32_t& high) const {
    const uint32_t front = four(word), back = four(word >> 16);
    low = __byte_perm(front, back, 0x6420u);
    high = __byte_perm(front, back, 0x7531u);
  }
};

// IQ4_NL, IQ4_XS: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113.
__device__ __forceinline__ Table16 iq4_table() { return {{0xBFAD9881u, 0xF6EADDCFu, 0x26190D01u, 0x71594535u}}; }

// MXFP4, twice the value of an E2M1 number: 0 1 2 3, 4 6 8 12, and the same negative.
__device__ __forceinline__ Table16 mxfp4_table() { return {{0x03020100u, 0x0C080604u, 0xFDFEFF00u, 0xF4F8FAFCu}}; }

}  // namespace strata
