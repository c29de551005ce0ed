// Products of a matrix's rows with an activation: what decode spends its time on.
//
// The threads that share a row take its groups in turn. Their loads of weights are all issued before the first is
// used, and, since weights depend on no kernel, before the kernel waits for the one before it: so memory is busy
// while that one ends.
#pragma once

#include "activation.cuh"
#include "dot.cuh"
#include "intrinsics.cuh"
#include "types.cuh"

namespace strata {

// The sum over a warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  return v;
}

// 1 / RMS of a vector of n values, from the sums of squares in its activation; for a whole warp.
__device__ __forceinline__ float inverse_rms(const Activation& a, int n, float eps) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < n / ACTIVATION_GROUP; i += 32) sum += a.squares[i];
  return rsqrtf(warp_sum(sum) / static_cast<float>(n) + eps);
}

// Bytes of a row of n values.
template <typename F>
__device__ __forceinline__ int64_t row_bytes(int n) {
  return static_cast<int64_t>(n) / F::BLOCK_VALUES * F::BLOCK_BYTES;
}

// ROWS rows shared by STEP threads, of which this is number `at`. A thread has LANE_BYTES of each row in registers.
template <typename F, int ROWS, int LANE_BYTES, int STEP = 32>
struct Rows {
  static constexpr int FIT = LANE_BYTES / static_cast<int>(sizeof(typename F::Raw));
  static constexpr int BATCH = FIT > 1 ? FIT : 1;

  const uint8_t* row[ROWS];
  int at;
  int n_groups;  // of a row
  typename F::Raw raw[ROWS][BATCH];

  __device__ __forceinline__ Rows(int n_values, int at_) : at(at_), n_groups(n_values / F::VALUES) {}

  // Asks for the first groups of this thread.
  __device__ __forceinline__ void load() { load_from(at); }

  // Adds this thread's share of the products to `sums`. Asks for what load() did not.
  __device__ __forceinline__ void multiply(const Activation& a, float (&sums)[ROWS]) {
    const uint32_t* grid = F::grid();
    for (int first = at;; load_from(first)) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int group = first + STEP * i;
        if (group < n_groups) {
          const int in_block = group % F::GROUPS;
          const ActivationPart<F> part(a, group / F::GROUPS * F::BLOCK_VALUES + F::first(in_block));
#pragma unroll
          for (int r = 0; r < ROWS; ++r) sums[r] += dot<F>(raw[r][i], in_block, grid, part);
        }
      }
      first += STEP * BATCH;
      if (first >= n_groups) break;
    }
  }

 private:
  __device__ __forceinline__ void load_from(int first) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int group = first + STEP * i;
      if (group < n_groups) {
        const int64_t offset = static_cast<int64_t>(group / F::GROUPS) * F::BLOCK_BYTES;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) raw[r][i] = F::load(row[r] + offset, group % F::GROUPS);
      }
    }
  }
};

}  // namespace strata
