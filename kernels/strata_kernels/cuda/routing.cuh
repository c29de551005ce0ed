// Chooses a token's experts from the router's scores; every block of a kernel for itself.
//
// Must match: strata_kernels.reference.router.
#pragma once

#include "intrinsics.cuh"

namespace strata {

constexpr int TOP_K_MAX = 16;
constexpr int EXPERTS_MAX = 512;

// The chosen experts, likeliest first and the lower number first of equals, with weights that sum up to 1.
struct Routing {
  int experts[TOP_K_MAX];
  float weights[TOP_K_MAX];
  uint32_t keys[EXPERTS_MAX];

  // Fills this, in shared memory, from scores float32 [n_experts]; for all threads of a block, which may read it then.
  // An expert's rank is the number of experts before it. Whatever the scores, every rank is given once.
  __device__ __forceinline__ void choose(const float* scores, int n_experts, int top_k) {
    for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) keys[expert] = key_of(scores[expert]);
    __syncthreads();
    // Two threads an expert, each against half of the others.
    const int half = threadIdx.x % 2;
    for (int expert = threadIdx.x / 2; expert < n_experts; expert += blockDim.x / 2) {
      const uint32_t key = keys[expert];
      int rank = 0;
#pragma unroll 8
      for (int other = half; other < n_experts; other += 2) {
        rank += keys[other] > key || (keys[other] == key && other < expert);
      }
      rank += __shfl_xor_sync(3u << (threadIdx.x % 32 & 30u), rank, 1);
      if (rank < top_k && half == 0) {
        experts[rank] = expert;
        weights[rank] = scores[expert];
      }
    }
    __syncthreads();
    // Softmax over all experts and then a share of the chosen ones' sum: softmax over the chosen.
    if (threadIdx.x < 32) {
      const int rank = threadIdx.x;
      const float weight = rank < top_k ? expf(weights[rank] - weights[0]) : 0.0f;
      float sum = weight;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
      __syncwarp();
      if (rank < top_k) weights[rank] = weight / sum;
    }
    __syncthreads();
  }

 private:
  // Orders as the float does, without exception: what is not a number has a place too. Zeros are equal.
  static __device__ __forceinline__ uint32_t key_of(float score) {
    const uint32_t bits = __float_as_uint(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
};

}  // namespace strata
