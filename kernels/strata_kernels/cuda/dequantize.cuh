// Blocks of GGUF tensors to float32, a group of values at a time: what every kernel that reads weights is built on.
//
// Operation: `F::dequantize(block, group, out, grid)` decodes group `group` of the block at `block` of type F, for F in
//   F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, IQ3_S, IQ3_XXS,
//   IQ2_S, IQ2_XS, IQ2_XXS, MXFP4
// Must match: strata_kernels.reference.dequantize, bit for bit.
// Source: the block layouts of the GGUF format, as the `gguf` package (gguf.quants) decodes them.
//
// Shapes. A block holds `F::BLOCK_VALUES` values in `F::BLOCK_BYTES` bytes. A group is what one thread decodes from
// few, wide loads. Where a byte holds bits of values far apart, so are the values of a group: `F::RUNS` runs of
// `F::RUN` neighbours each, one run every `F::STRIDE` values. `out[r * RUN + i]` is the value
//     F::first(group) + r * STRIDE + i
// of the block, and groups 0 .. F::GROUPS - 1 cover it. Consecutive groups read consecutive bytes, so give them to
// consecutive lanes. Index `out` with constants (unrolled loops) alone, and it stays in registers.
//
// Alignment. A block must be aligned to `F::ALIGNMENT` bytes: the largest power of two, at most 16, that divides its
// size, which is what a tensor that begins on 16 bytes gives each of its blocks. No load is wider than that, and none
// reaches past the block. `block` may point to global or to shared memory.
//
// Grids. The IQ2 and IQ3 types look values up in a table of `F::GRID_WORDS` words (0: the type has none). Pass
// `F::grid()`, or the address of a copy in shared memory, aligned to 8 bytes. Grid-less types ignore the argument.
//
// Rounding. Scales are float16 (11 significant bits, no smaller than 2^-24), the integers that they are multiplied with
// have at most 12 bits together, MXFP4's scales are powers of two: every product below is exact in float32, and only a
// subtraction or addition after it rounds. A compiler that contracts the two to one FMA hence changes no bit. Flushing
// subnormals to zero would (MXFP4), and so would any "fast math".
#pragma once

#include <cuda_fp16.h>

#include "integers.cuh"
#include "iq_grids.cuh"

namespace strata {

// Shapes of a type.
template <int BLOCK_VALUES_, int BLOCK_BYTES_, int RUNS_, int RUN_, int STRIDE_, int GRID_WORDS_ = 0>
struct Format {
  static constexpr int BLOCK_VALUES = BLOCK_VALUES_;
  static constexpr int BLOCK_BYTES = BLOCK_BYTES_;
  static constexpr int RUNS = RUNS_;
  static constexpr int RUN = RUN_;
  static constexpr int STRIDE = STRIDE_;
  static constexpr int GRID_WORDS = GRID_WORDS_;

  static constexpr int VALUES = RUNS * RUN;  // of a group
  static constexpr int GROUPS = BLOCK_VALUES / VALUES;
  static constexpr int GROUPS_A_STRIDE = STRIDE / RUN;
  static constexpr int LOWEST_BIT = BLOCK_BYTES & -BLOCK_BYTES;
  static constexpr int ALIGNMENT = LOWEST_BIT < 16 ? LOWEST_BIT : 16;

  static_assert(RUN % 4 == 0, "a run is stored and multiplied as float4");
  static_assert(BLOCK_VALUES % (STRIDE * RUNS) == 0 && STRIDE % RUN == 0, "groups cover a block exactly");

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

// Four bytes that are aligned to two.
__device__ __forceinline__ uint32_t load_u32_from_u16(const uint8_t* p) { return load_u16(p) | load_u16(p + 2) << 16; }

// Four bytes at any address.
__device__ __forceinline__ uint32_t load_u32_from_u8(const uint8_t* p) {
  return p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
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
__device__ __forceinline__ float signed_byte_value(uint32_t word, int i) {
  return byte_value(word ^ 0x80808080u, i, 128.0f);
}

// Nibble `i` of a byte as a float.
__device__ __forceinline__ float nibble_value(uint32_t byte, int i) { return byte_value(byte >> (4 * i) & 15u, 0); }

// ---- Bits of several values at once: a word holds one byte for each of four values.

__device__ __forceinline__ uint32_t nibbles(uint32_t word, int high) { return word >> (4 * high) & 0x0F0F0F0Fu; }

// Bit i of the low four bits, for i = 0 .. 3, to bit 4 of byte i. The product puts it at 7 j + i for every j = 0 .. 3,
// all different, so nothing carries; the mask keeps j = i.
__device__ __forceinline__ uint32_t fifth_bits(uint32_t bits) {
  return ((bits & 15u) * 0x00204081u & 0x01010101u) << 4;
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

// `scale`, negated where bit `i` of `signs` is set.
__device__ __forceinline__ float signed_scale(float scale, uint32_t signs, int i) {
  return __uint_as_float(__float_as_uint(scale) ^ (signs << (31 - i) & 0x80000000u));
}

// Eight signs from seven stored bits: the eighth makes the number of negative ones even.
__device__ __forceinline__ uint32_t eight_signs(uint32_t seven) { return seven | (__popc(seven) & 1u) << 7; }

// Eight values: scale times magnitudes, four in each word, with signs.
__device__ __forceinline__ void signed_magnitudes(float scale, uint32_t first, uint32_t second, uint32_t signs,
                                                  float (&out)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = signed_scale(scale, signs, i) * byte_value(first, i);
    out[4 + i] = signed_scale(scale, signs, 4 + i) * byte_value(second, i);
  }
}

// ---- Plain types, as blocks of eight values.

struct F32 : Format<8, 32, 1, 8, 8> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int, float (&out)[VALUES], const uint32_t*) {
    const uint4 a = load_u128(block), b = load_u128(block + 16);
    const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __uint_as_float(words[i]);
  }
};

struct F16 : Format<8, 16, 1, 8, 8> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int, float (&out)[VALUES], const uint32_t*) {
    const uint4 a = load_u128(block);
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = half_value(words[i] & 0xFFFFu);
      out[2 * i + 1] = half_value(words[i] >> 16);
    }
  }
};

struct BF16 : Format<8, 16, 1, 8, 8> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int, float (&out)[VALUES], const uint32_t*) {
    const uint4 a = load_u128(block);
    const uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
};

// ---- Blocks of 32 values with one scale.

// d float16, 32 int8: d * q.
struct Q8_0 : Format<32, 34, 1, 8, 8> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const float d = half_value(load_u16(block));
    const uint8_t* q = block + 2 + 8 * group;
    const uint32_t words[2] = {load_u32_from_u16(q), load_u32_from_u16(q + 4)};
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = d * signed_byte_value(words[i / 4], i % 4);
  }
};

// In the types of 4 and 5 bits below, byte i of 16 holds value i in its low nibble and value 16 + i in its high one.

// d float16, 16 bytes of nibbles: d * (q - 8).
struct Q4_0 : Format<32, 18, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const float d = half_value(load_u16(block));
    const uint8_t* q = block + 2 + 8 * group;
    const uint32_t words[2] = {load_u32_from_u16(q), load_u32_from_u16(q + 4)};
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = d * byte_value(nibbles(words[i / 4 % 2], i / 8), i % 4, 8.0f);
  }
};

// d and m float16, 16 bytes of nibbles: d * q + m.
struct Q4_1 : Format<32, 20, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const uint32_t scales = load_u32(block);
    const float d = half_value(scales & 0xFFFFu), m = half_value(scales >> 16);
    const uint8_t* q = block + 4 + 8 * group;
    const uint32_t words[2] = {load_u32(q), load_u32(q + 4)};
#pragma unroll
    for (int i = 0; i < 16; ++i) out[i] = d * byte_value(nibbles(words[i / 4 % 2], i / 8), i % 4) + m;
  }
};

// d float16, a fifth bit for each value (4 bytes), 16 bytes of nibbles: d * (q - 16).
struct Q5_0 : Format<32, 22, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const float d = half_value(load_u16(block));
    const uint32_t fifth = load_u32_from_u16(block + 2) >> (8 * group);
    const uint8_t* q = block + 6 + 8 * group;
    const uint32_t words[2] = {load_u32_from_u16(q), load_u32_from_u16(q + 4)};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int word = i / 4 % 2, high = i / 8;
      out[i] = d * byte_value(nibbles(words[word], high) | fifth_bits(fifth >> (16 * high + 4 * word)), i % 4, 16.0f);
    }
  }
};

// d and m float16, a fifth bit for each value (4 bytes), 16 bytes of nibbles: d * q + m.
struct Q5_1 : Format<32, 24, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const uint2 head = load_u64(block);
    const float d = half_value(head.x & 0xFFFFu), m = half_value(head.x >> 16);
    const uint32_t fifth = head.y >> (8 * group);
    const uint2 q = load_u64(block + 8 + 8 * group);
    const uint32_t words[2] = {q.x, q.y};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int word = i / 4 % 2, high = i / 8;
      out[i] = d * byte_value(nibbles(words[word], high) | fifth_bits(fifth >> (16 * high + 4 * word)), i % 4) + m;
    }
  }
};

// d float16, 16 bytes of nibbles, each an index: d * table[q].
struct IQ4_NL : Format<32, 18, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const float d = half_value(load_u16(block));
    const uint8_t* q = block + 2 + 8 * group;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t low, high;
      iq4_table().eight(load_u32_from_u16(q + 4 * word), low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[4 * word + i] = d * signed_byte_value(low, i);
        out[8 + 4 * word + i] = d * signed_byte_value(high, i);
      }
    }
  }
};

// e, a byte: the scale 2^(e - 128); 16 bytes of nibbles, each an E2M1 number: scale * twice the number. 17 bytes, so
// that every load is one byte.
struct MXFP4 : Format<32, 17, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const uint32_t e = block[0];  // 0 and 1 give subnormals
    const float d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    const uint8_t* q = block + 1 + 8 * group;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t low, high;
      mxfp4_table().eight(load_u32_from_u8(q + 4 * word), low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[4 * word + i] = d * signed_byte_value(low, i);
        out[8 + 4 * word + i] = d * signed_byte_value(high, i);
      }
    }
  }
};

// ---- Blocks of 256 values in sub-blocks with scales of their own.

// A scale and a minimum (low and high nibble) for each 16 values (16 bytes), 2 bits a value (64 bytes), d and dmin
// float16: d * scale * q - dmin * minimum. Byte 32 h + i holds the values 128 h + 32 r + i for r = 0 .. 3, two bits
// each.
struct Q2_K : Format<256, 84, 4, 4, 32> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const int half = group / 8, part = group % 8;
    const uint32_t scales = load_u32(block + 80);
    const float d = half_value(scales & 0xFFFFu), dmin = half_value(scales >> 16);
    const uint32_t q = load_u32(block + 16 + 32 * half + 4 * part);
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const uint32_t scale = block[8 * half + 2 * run + part / 4];
      const float dl = d * nibble_value(scale, 0), ml = dmin * nibble_value(scale, 1);
      const uint32_t two = q >> (2 * run) & 0x03030303u;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[4 * run + i] = dl * byte_value(two, i) - ml;
    }
  }
};

// A third bit for each value (32 bytes), 2 bits a value (64 bytes, as in Q2_K), 16 scales of 6 bits (12 bytes),
// d float16: d * (scale - 32) * (q - 4). Byte i of the first 32 holds the third bit of the values 32 b + i as bit b.
// Scale s has its low bits in nibble s / 8 of byte s % 8, its high ones in pair s / 4 of byte 8 + s % 4.
struct Q3_K : Format<256, 110, 4, 4, 32> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const int half = group / 8, part = group % 8;
    const float d = half_value(load_u16(block + 108));
    const uint32_t third = load_u32_from_u16(block + 4 * part) >> (4 * half);
    const uint32_t q = load_u32_from_u16(block + 32 + 32 * half + 4 * part);
    const uint8_t* scales = block + 96;
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const int s = 8 * half + 2 * run + part / 4;
      const uint32_t scale = (scales[s % 8] >> (4 * half) & 15u) | (scales[8 + s % 4] >> (s / 4 * 2) & 3u) << 4;
      const float dl = d * byte_value(scale, 0, 32.0f);
      const uint32_t three = (q >> (2 * run) & 0x03030303u) | (third >> run & 0x01010101u) << 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[4 * run + i] = dl * byte_value(three, i, 4.0f);
    }
  }
};

// The first 16 bytes of Q4_K and Q5_K: d and dmin float16, then 8 scales and 8 minima of 6 bits in three words. Those
// of the sub-blocks 0 .. 3 are the low 6 bits of the bytes of the first word (scales) and the second (minima). Those
// of 4 .. 7 have their low 4 bits in the nibbles of the third word's bytes (scale low), and their high 2 bits as the
// high ones of the first two words' bytes.
struct ScalesAndMinima {
  float d, dmin;
  uint32_t scales, minima;  // of the four sub-blocks among which `pair` is

  __device__ __forceinline__ ScalesAndMinima(const uint8_t* block, int pair) {
    const uint4 head = load_u128(block);
    d = half_value(head.x & 0xFFFFu);
    dmin = half_value(head.x >> 16);
    scales = pair < 2 ? head.y & 0x3F3F3F3Fu : (head.w & 0x0F0F0F0Fu) | (head.y >> 2 & 0x30303030u);
    minima = pair < 2 ? head.z & 0x3F3F3F3Fu : (head.w >> 4 & 0x0F0F0F0Fu) | (head.z >> 2 & 0x30303030u);
    scales >>= pair % 2 * 16;
    minima >>= pair % 2 * 16;
  }

  // Of the first or second sub-block of the pair.
  __device__ __forceinline__ float scale(int second) const { return d * byte_value(scales, second); }
  __device__ __forceinline__ float minimum(int second) const { return dmin * byte_value(minima, second); }
};

// 16 bytes of scales and minima, 128 bytes of nibbles: d * scale * q - dmin * minimum. Byte 32 p + i holds the values
// 64 p + i and 64 p + 32 + i: a pair of sub-blocks.
struct Q4_K : Format<256, 144, 2, 8, 32> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const int pair = group / 4, part = group % 4;
    const ScalesAndMinima sub(block, pair);
    const uint2 q = load_u64(block + 16 + 32 * pair + 8 * part);
    const uint32_t words[2] = {q.x, q.y};
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const float dl = sub.scale(high), ml = sub.minimum(high);
#pragma unroll
      for (int i = 0; i < 8; ++i) out[8 * high + i] = dl * byte_value(nibbles(words[i / 4], high), i % 4) - ml;
    }
  }
};

// As Q4_K with a fifth bit for each value between the two (32 bytes): byte i holds that of the values 32 b + i as
// bit b.
struct Q5_K : Format<256, 176, 2, 8, 32> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const int pair = group / 4, part = group % 4;
    const ScalesAndMinima sub(block, pair);
    const uint2 q = load_u64(block + 48 + 32 * pair + 8 * part);
    const uint2 fifth = load_u64(block + 16 + 8 * part);
    const uint32_t words[2] = {q.x, q.y};
    const uint32_t bits[2] = {fifth.x >> (2 * pair), fifth.y >> (2 * pair)};
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const float dl = sub.scale(high), ml = sub.minimum(high);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t five = nibbles(words[i / 4], high) | (bits[i / 4] >> high & 0x01010101u) << 4;
        out[8 * high + i] = dl * byte_value(five, i % 4) - ml;
      }
    }
  }
};

// Low 4 bits (128 bytes), high 2 bits (64 bytes), 16 int8 scales, d float16: d * scale * (q - 32). The values
// 128 h + 32 r + i, r = 0 .. 3, have their low bits in nibble r / 2 of byte 64 h + 32 (r % 2) + i, and their high
// ones in pair r of byte 32 h + i of the 64.
struct Q6_K : Format<256, 210, 4, 4, 32> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const int half = group / 8, part = group % 8;
    const float d = half_value(load_u16(block + 208));
    const uint8_t* low = block + 64 * half + 4 * part;
    const uint32_t words[2] = {load_u32_from_u16(low), load_u32_from_u16(low + 32)};
    const uint32_t high = load_u32_from_u16(block + 128 + 32 * half + 4 * part);
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      const float dl = d * signed_byte_value(block[192 + 8 * half + 2 * run + part / 4], 0);
      const uint32_t six = nibbles(words[run % 2], run / 2) | (high >> (2 * run) & 0x03030303u) << 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) out[4 * run + i] = dl * byte_value(six, i, 32.0f);
    }
  }
};

// d float16, high 2 bits of 8 scales (2 bytes), their low 4 bits (4 bytes), then each sub-block's 16 bytes of nibbles
// as in IQ4_NL: d * (scale - 32) * table[q].
struct IQ4_XS : Format<256, 136, 2, 8, 16> {
  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t*) {
    const int sub = group / 2;
    const uint2 head = load_u64(block);
    const uint32_t scale = (head.y >> (4 * sub) & 15u) | (head.x >> (16 + 2 * sub) & 3u) << 4;
    const float dl = half_value(head.x & 0xFFFFu) * byte_value(scale, 0, 32.0f);
    const uint2 q = load_u64(block + 8 + 8 * group);
    const uint32_t words[2] = {q.x, q.y};
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t low, high;
      iq4_table().eight(words[word], low, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[4 * word + i] = dl * signed_byte_value(low, i);
        out[8 + 4 * word + i] = dl * signed_byte_value(high, i);
      }
    }
  }
};

// ---- Blocks of 256 values that are grid entries with signs. A group is eight values.

// d float16, low 8 bits of 64 indices, their ninth bits (8 bytes), signs (32 bytes), 8 scales of 4 bits (4 bytes):
// d * (1 + 2 scale) * entry * sign.
struct IQ3_S : Format<256, 110, 1, 8, 8, 512> {
  static __device__ __forceinline__ const uint32_t* grid() { return IQ3_S_GRID; }

  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t* grid) {
    const uint32_t scale = block[106 + group / 8] >> (group / 4 % 2 * 4) & 15u;
    const float dl = half_value(load_u16(block)) * byte_value(1u + 2u * scale, 0);
    const uint32_t low = load_u16(block + 2 + 2 * group);
    const uint32_t ninth = block[66 + group / 4] >> (group % 4 * 2);
    const uint32_t first = grid[(low & 255u) | (ninth & 1u) << 8], second = grid[low >> 8 | (ninth & 2u) << 7];
    signed_magnitudes(dl, first, second, block[74 + group], out);
  }
};

// d float16, 64 indices of 8 bits, then for each 32 values a word: four times 7 bits of signs, and the scale in its
// top 4 bits: d * (0.5 + scale) * 0.5 * entry * sign.
struct IQ3_XXS : Format<256, 98, 1, 8, 8, 256> {
  static __device__ __forceinline__ const uint32_t* grid() { return IQ3_XXS_GRID; }

  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t* grid) {
    const uint32_t indices = load_u16(block + 2 + 2 * group);
    const uint32_t word = load_u32_from_u16(block + 66 + group / 4 * 4);
    const float dl = half_value(load_u16(block)) * (0.5f + byte_value(word >> 28, 0)) * 0.5f;
    const uint32_t signs = eight_signs(word >> (group % 4 * 7) & 127u);
    signed_magnitudes(dl, grid[indices & 255u], grid[indices >> 8], signs, out);
  }
};

// An entry of the IQ2 types' grids.
__device__ __forceinline__ uint2 load_entry(const uint32_t* grid, uint32_t index) {
  return reinterpret_cast<const uint2*>(grid)[index];
}

// d float16, low 8 bits of 32 indices, signs (32 bytes), high 2 bits of the indices (8 bytes), 16 scales of 4 bits
// (8 bytes): d * (0.5 + scale) * 0.25 * entry * sign.
struct IQ2_S : Format<256, 82, 1, 8, 8, 2048> {
  static __device__ __forceinline__ const uint32_t* grid() { return IQ2_S_GRID; }

  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t* grid) {
    const float scale = nibble_value(block[74 + group / 4], group / 2 % 2);
    const float dl = half_value(load_u16(block)) * (0.5f + scale) * 0.25f;
    const uint32_t high = block[66 + group / 4] >> (group % 4 * 2) & 3u;
    const uint2 entry = load_entry(grid, block[2 + group] | high << 8);
    signed_magnitudes(dl, entry.x, entry.y, block[34 + group], out);
  }
};

// d float16, 32 times 9 bits of index and 7 bits of signs (64 bytes), 16 scales of 4 bits (8 bytes):
// d * (0.5 + scale) * 0.25 * entry * sign.
struct IQ2_XS : Format<256, 74, 1, 8, 8, 1024> {
  static __device__ __forceinline__ const uint32_t* grid() { return IQ2_XS_GRID; }

  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t* grid) {
    const float scale = nibble_value(block[66 + group / 4], group / 2 % 2);
    const float dl = half_value(load_u16(block)) * (0.5f + scale) * 0.25f;
    const uint32_t q = load_u16(block + 2 + 2 * group);
    const uint2 entry = load_entry(grid, q & 511u);
    signed_magnitudes(dl, entry.x, entry.y, eight_signs(q >> 9), out);
  }
};

// d float16, then for each 32 values four indices of 8 bits and a word as in IQ3_XXS:
// d * (0.5 + scale) * 0.25 * entry * sign.
struct IQ2_XXS : Format<256, 66, 1, 8, 8, 512> {
  static __device__ __forceinline__ const uint32_t* grid() { return IQ2_XXS_GRID; }

  static __device__ __forceinline__ void dequantize(const uint8_t* block, int group, float (&out)[VALUES],
                                                    const uint32_t* grid) {
    const uint8_t* sub = block + 2 + group / 4 * 8;
    const uint32_t word = load_u32_from_u16(sub + 4);
    const float dl = half_value(load_u16(block)) * (0.5f + byte_value(word >> 28, 0)) * 0.25f;
    const uint2 entry = load_entry(grid, sub[group % 4]);
    signed_magnitudes(dl, entry.x, entry.y, eight_signs(word >> (group % 4 * 7) & 127u), out);
  }
};

}  // namespace strata
