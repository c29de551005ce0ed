// Rows of a residual by blocks of ROW_THREADS threads: sums over a row, experts' results, and values as float16.
#pragma once

#include "prompt_tile.cuh"

namespace strata {

constexpr int ROW_THREADS = 256;

// The sum over a block of ROW_THREADS threads, the same bits in every thread. `sums` float [ROW_THREADS / 32] is shared
// memory that nobody uses before or after.
__device__ __forceinline__ float block_sum(float v, float* sums) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < ROW_THREADS / 32; ++warp) sum += sums[warp];
  return sum;
}

__device__ __forceinline__ float square_of(float4 v) { return v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w); }

__device__ __forceinline__ float4 times(float4 v, float factor, float4 w) {
  return make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
}

// Four neighbours as float16, aligned to 8 bytes.
__device__ __forceinline__ void store_halves(__half* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_halves(clamp_to_half(v.x), clamp_to_half(v.y)),
                                             pack_halves(clamp_to_half(v.z), clamp_to_half(v.w)));
}

// before + the sum over the ranks of weight * y, `stride` between the ranks' y.
__device__ __forceinline__ float4 combined(float4 before, const float4* y, int stride, const float* weights, int top_k) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int rank = 0; rank < top_k; ++rank) {
    const float weight = weights[rank];
    const float4 v = y[static_cast<int64_t>(rank) * stride];
    sum = make_float4(sum.x + weight * v.x, sum.y + weight * v.y, sum.z + weight * v.z, sum.w + weight * v.w);
  }
  return make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
}

}  // namespace strata
