// Blocks of GGUF tensors, a group of values at a time, as integers and as float32: what every kernel that reads weights
// is built on.
//
// Operation: for a type F in
//   F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, IQ3_S, IQ3_XXS,
//   IQ2_S, IQ2_XS, IQ2_XXS, MXFP4
//   `F::load(block, group)` reads what group `group` of the block at `block` needs into a `F::Raw`, registers; loads
//   alone, so that a kernel can have those of several groups in flight before it computes.
//   `F::integers(raw, group, grid, q, scale, minimum)`, where F::INTEGER (all but F32, F16, BF16), decodes that to
//   int8, four in a word, and for each run of the group a scale and, where F::HAS_MINIMUM, a minimum:
//       value = scale[run] * (q - F::BIAS) - minimum[run]
//   Where F::PAIRED, a group and the next after an even one are decoded alike: the even one's number does for both.
//   `decode_group<F>(raw, group, out, grid)` decodes it to float32; `dequantize_group<F>(block, group, out, grid)` also
//   loads.
// Must match: strata_kernels.reference.dequantize, bit for bit in float32.
// Source: the block layouts of the GGUF format, as the `gguf` package (gguf.quants) decodes them.
//
// Shapes. A block holds `F::BLOCK_VALUES` values in `F::BLOCK_BYTES` bytes. A group is what one thread decodes from
// few, wide loads. Where a byte holds bits of values far apart, so are the values of a group: `F::RUNS` runs of
// `F::RUN` neighbours each, one run every `F::STRIDE` values. `out[r * RUN + i]` is the value
//     F::first(group) + r * STRIDE + i
// of the block (in `q`, byte i % 4 of word r * RUN / 4 + i / 4), and groups 0 .. F::GROUPS - 1 cover it. A run lies in
// one aligned group of 16 values. Consecutive groups read consecutive bytes, so give them to consecutive lanes. Index
// `out`, `q`, `scale` and `minimum` with constants (unrolled loops) alone, and they stay in registers.
//
// Alignment. A block must be aligned to `F::ALIGNMENT` bytes: the largest power of two, at most 16, that divides its
// size, which is what a tensor that begins on 16 bytes gives each of its blocks. No load is wider than 16 bytes; blocks
// that are aligned to less than 4 are read in aligned words of 4 bytes, of which the first and the last may hold bytes
// of a neighbour. No load reaches past the aligned 4-byte words that the block touches. `block` may point to global or
// to shared memory.
//
// Grids. The IQ2 and IQ3 types look values up in a table of `F::GRID_WORDS` words (0: the type has none). Pass
// `F::grid()`, or the address of a copy in shared memory, aligned to 8 bytes. Grid-less types ignore the argument.
//
// Rounding. Scales are float16 (11 significant bits, no smaller than 2^-24), the integers that they are multiplied with
// have at most 12 bits together, MXFP4's scales are powers of two: every product below is exact in float32, and only a
// subtraction or addition after it rounds. A compiler that contracts the two to one FMA hence changes no bit. Flushing
// subnormals to zero would (MXFP4), and so would any "fast math".
#pragma once

#include "format.cuh"
#include "format_32.cuh"
#include "format_iq.cuh"
#include "format_k.cuh"

namespace strata {

// ---- Plain types, as blocks of eight values.

struct F32 : Format<8, 32, 1, 8, 8> {
  static constexpr bool INTEGER = false;

  struct Raw {
    uint4 first, second;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) {
    return {load_u128(block), load_u128(block + 16)};
  }

  static __device__ __forceinline__ void values(const Raw& raw, float (&out)[VALUES]) {
    const uint32_t words[8] = {raw.first.x,  raw.first.y,  raw.first.z,  raw.first.w,
                               raw.second.x, raw.second.y, raw.second.z, raw.second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = __uint_as_float(words[i]);
  }
};

struct F16 : Format<8, 16, 1, 8, 8> {
  static constexpr bool INTEGER = false;

  struct Raw {
    uint4 all;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) { return {load_u128(block)}; }

  static __device__ __forceinline__ void values(const Raw& raw, float (&out)[VALUES]) {
    const uint32_t words[4] = {raw.all.x, raw.all.y, raw.all.z, raw.all.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = half_value(words[i] & 0xFFFFu);
      out[2 * i + 1] = half_value(words[i] >> 16);
    }
  }
};

struct BF16 : Format<8, 16, 1, 8, 8> {
  static constexpr bool INTEGER = false;

  using Raw = F16::Raw;

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) { return {load_u128(block)}; }

  static __device__ __forceinline__ void values(const Raw& raw, float (&out)[VALUES]) {
    const uint32_t words[4] = {raw.all.x, raw.all.y, raw.all.z, raw.all.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
};

// ---- All types to float32.

template <typename F>
__device__ __forceinline__ void decode_group(const typename F::Raw& raw, int group, float (&out)[F::VALUES],
                                             const uint32_t* grid) {
  if constexpr (F::INTEGER) {
    uint32_t q[F::WORDS];
    float scale[F::RUNS], minimum[F::RUNS];
    F::integers(raw, group, grid, q, scale, minimum);
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) {
      out[i] = scale[i / F::RUN] * signed_byte_value(q[i / 4], i % 4, static_cast<float>(F::BIAS));
      if constexpr (F::HAS_MINIMUM) out[i] -= minimum[i / F::RUN];
    }
  } else {
    F::values(raw, out);
  }
}

template <typename F>
__device__ __forceinline__ void dequantize_group(const uint8_t* block, int group, float (&out)[F::VALUES],
                                                 const uint32_t* grid) {
  decode_group<F>(F::load(block, group), group, out, grid);
}

}  // namespace strata
