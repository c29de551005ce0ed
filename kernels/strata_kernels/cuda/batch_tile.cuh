// Products of a few tokens with 16 rows of a matrix of any type, by one warp: what batch_matmul.cu is made of.
//
// Tensor cores multiply 16 rows of weights (m) with 8 tokens (n), 16 columns at a time (k). A weight is decoded once for all
// tokens, in the registers that the instruction takes it from: lane 4 g + t decodes whole groups (dequantize.cuh) of the rows g
// and g + 8, and hands on four neighbours of a group a time. Which columns meet is free as long as weights and tokens
// agree: so what a lane takes of a token's row are neighbours too, read where they lie.
//
// Weights are one float16 each. Integers become the low bits of 1024 and, less that, themselves, exactly; scale and
// minimum are rounded to float16, then one fused multiply-add rounds again. That is done at 2^8 times the weight's size, so that
// small scales keep their bits: weights of integers beyond +-255 are infinite here. Floats beyond float16's range
// become its largest number. Sums are float32.
#pragma once

#include "eights.cuh"
#include "prompt_tile.cuh"
#include "rows.cuh"

namespace strata {

constexpr int BATCH_THREADS = 256;
constexpr int BATCH_WARPS = BATCH_THREADS / 32;

// What a weight is multiplied by when it becomes a float16.
template <typename F>
struct Magnified {
  static constexpr float BY = F::INTEGER ? 256.0f : 1.0f;
};

// The values of a group as float16, two a word; zeros without `exists`.
template <typename F>
__device__ __forceinline__ void decode_magnified(const typename F::Raw& raw, int group, bool exists,
                                                 uint32_t (&out)[F::VALUES / 2]) {
  if constexpr (F::INTEGER) {
    // Those with a bias or a minimum are not negative.
    constexpr bool SIGNED = F::BIAS == 0 && !F::HAS_MINIMUM;
    const __half2 zero = __float2half2_rn(1024.0f + (SIGNED ? 128.0f : static_cast<float>(F::BIAS)));
    const float magnify = exists ? Magnified<F>::BY : 0.0f;
    uint32_t q[F::WORDS];
    float scale[F::RUNS], minimum[F::RUNS];
    F::integers(raw, group, F::grid(), q, scale, minimum);
#pragma unroll
    for (int run = 0; run < F::RUNS; ++run) {
      const float wide = magnify * scale[run];
      const __half2 by = __floats2half2_rn(wide, wide);
      __half2 less;
      if constexpr (F::HAS_MINIMUM) less = __floats2half2_rn(-magnify * minimum[run], -magnify * minimum[run]);
#pragma unroll
      for (int i = run * (F::RUN / 4); i < (run + 1) * (F::RUN / 4); ++i) {
        const uint32_t word = SIGNED ? q[i] ^ 0x80808080u : q[i];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // 0x6400 | u is 1024 + u
          const uint32_t biased = __byte_perm(word, 0x64646464u, half == 0 ? 0x4140u : 0x4342u);
          __half2 pair;
          memcpy(&pair, &biased, sizeof pair);
          pair = __hsub2(pair, zero);
          if constexpr (F::HAS_MINIMUM) {
            pair = __hfma2(pair, by, less);
          } else {
            pair = __hmul2(pair, by);
          }
          memcpy(out + 2 * i + half, &pair, sizeof pair);
        }
      }
    }
  } else {
    float values[F::VALUES];
    F::values(raw, values);
#pragma unroll
    for (int i = 0; i < F::VALUES / 2; ++i) {
      out[i] = exists ? pack_halves(clamp_to_half(values[2 * i]), clamp_to_half(values[2 * i + 1])) : 0;
    }
  }
}

// A warp's products: lane 4 g + t has of rows g (0, 1) and g + 8 (2, 3) those with tokens 2 t and 2 t + 1 of each eight.
template <int EIGHTS>
using FewSums = float[EIGHTS][4];

// The products of up to 16 rows of k values, `count` of them, with 8 EIGHTS tokens. Lane 4 g + t gives where the row of float16
// [k] of token g of each eight begins, aligned to 16 bytes; PITCH times 8 values from each 8 of its columns to the next. `parts`
// warps share the columns; this is number `part`.
template <typename F, int PITCH, int EIGHTS>
__device__ __forceinline__ void multiply_few(const uint8_t* strip, int count, int k, int part, int parts,
                                             const __half* const (&tokens)[EIGHTS], FewSums<EIGHTS>& sums) {
  // A lane takes two neighbouring groups where these may share their scales, which are then decoded once.
  constexpr int NEAR = F::PAIRED ? 2 : 1, NEARS = F::GROUPS / NEAR;
  const int64_t stride = row_bytes<F>(k);
  const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, n_nears = k / F::BLOCK_VALUES * NEARS;
  // Rows that do not exist are others again.
  const int last = count - 1, lower = g, upper = g + 8;
  const uint8_t* const rows[2] = {strip + min(lower, last) * stride, strip + min(upper, last) * stride};
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[eight][i] = 0.0f;
  }
#pragma unroll 1
  for (uint32_t first = 4 * part; first < n_nears; first += 4 * parts) {
    const bool exists = first + t < n_nears;
    const uint32_t at = exists ? first + t : 0, block = at / NEARS, in_block = at % NEARS * NEAR;
#pragma unroll
    for (uint32_t near = 0; near < NEAR; ++near) {
      uint32_t weights[2][F::VALUES / 2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        decode_magnified<F>(F::load(rows[r] + block * F::BLOCK_BYTES, in_block + near), in_block, exists, weights[r]);
      }
      const int column = block * F::BLOCK_VALUES + F::first(in_block + near);
#pragma unroll
      for (int run = 0; run < F::RUNS; ++run) {
        uint32_t values[EIGHTS][F::RUN / 2];
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
          static_assert(F::RUN % 8 == 0, "runs are read by eights");
#pragma unroll
          for (int i = 0; i < F::RUN; i += 8) {
            const uint4 v = *reinterpret_cast<const uint4*>(tokens[eight] + (column + run * F::STRIDE + i) * PITCH);
            values[eight][i / 2] = v.x;
            values[eight][i / 2 + 1] = v.y;
            values[eight][i / 2 + 2] = v.z;
            values[eight][i / 2 + 3] = v.w;
          }
        }
#pragma unroll
        for (int i = 0; i < F::RUN / 2; i += 2) {
          const int word = run * (F::RUN / 2) + i;
          const uint32_t a[4] = {weights[0][word], weights[1][word], weights[0][word + 1], weights[1][word + 1]};
#pragma unroll
          for (int eight = 0; eight < EIGHTS; ++eight) mma_f16(sums[eight], a, {values[eight][i], values[eight][i + 1]});
        }
      }
    }
  }
#pragma unroll
  for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[eight][i] *= 1.0f / Magnified<F>::BY;
  }
}

// The products of a block's warps, in shared memory; barriers are the caller's.
template <int EIGHTS>
struct SumsOfWarps {
  static constexpr int PITCH = STRIP_ROWS + 4;  // stores of a warp meet different banks

  float values[BATCH_WARPS][EIGHTS * EIGHT][PITCH];

  __device__ __forceinline__ void store(const FewSums<EIGHTS>& sums) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float(*mine)[PITCH] = values[threadIdx.x / 32];
#pragma unroll
    for (int eight = 0; eight < EIGHTS; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[eight * EIGHT + 2 * t + i % 2][g + i / 2 * 8] = sums[eight][i];
    }
  }

  // The sum over WARPS warps from `first` on.
  template <int WARPS>
  __device__ __forceinline__ float add(int first, int token, int row) const {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += values[first + warp][token][row];
    return sum;
  }
};

}  // namespace strata
