// What passes between a computing device and a peer without a path between them, through host memory that both reach.
//
// carry         copies                                                                       exactly
// combine_part  (x +) sum over the ranks that are here of weight * y, and others' sums       reference.expert_ffn, weighted
//
// Accumulation: float32, in the order of the ranks.
#include "mixture.cuh"

namespace strata {

constexpr int CARRY_THREADS = 256;
constexpr int ROW_THREADS = 256;

// `n` times 16 bytes, aligned to 16.
struct Piece {
  const uint4* from;
  uint4* to;
  int64_t n;
};

}  // namespace strata

using namespace strata;

// Copies two pieces, of which one may be empty.
// Launch: any number of blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(CARRY_THREADS) carry(Piece first, Piece second) {
  wait_for_previous();
  let_next_start();
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * CARRY_THREADS + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * CARRY_THREADS;
  for (int64_t i = begin; i < first.n; i += step) first.to[i] = first.from[i];
  for (int64_t i = begin; i < second.n; i += step) second.to[i] = second.from[i];
}

// x float32 [n][d], with `add` added to: the sum over the ranks whose experts have addresses of
// weights[n][top_k] * y[n][top_k][d], and each row's sums `elsewhere`, whose vectors are [n][d].
// `experts` int32 [n][top_k]; `addresses` uint64 [n_experts][3]. d is a multiple of 4.
// Launch: n blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    combine_part(float* x, const float* y, const float* weights, const int* experts, const uint64_t* addresses,
                 Sums elsewhere, int n, int d, int top_k, int add) {
  __shared__ float shares[TOP_K_MAX];
  __shared__ bool are_here[TOP_K_MAX];
  wait_for_previous();
  let_next_start();
  if (blockIdx.x >= n) return;
  const int64_t token = blockIdx.x;
  if (threadIdx.x < top_k) {
    shares[threadIdx.x] = weights[token * top_k + threadIdx.x];
    are_here[threadIdx.x] = addresses[3 * experts[token * top_k + threadIdx.x]] != 0;
  }
  __syncthreads();
  float4* row = reinterpret_cast<float4*>(x + token * d);
  const float4* results = reinterpret_cast<const float4*>(y + token * top_k * d);
  for (int i = threadIdx.x; i < d / 4; i += ROW_THREADS) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int rank = 0; rank < top_k; ++rank) {
      if (!are_here[rank]) continue;
      const float weight = shares[rank];
      const float4 v = results[static_cast<int64_t>(rank) * (d / 4) + i];
      sum = make_float4(sum.x + weight * v.x, sum.y + weight * v.y, sum.z + weight * v.z, sum.w + weight * v.w);
    }
    for (int other = 0; other < elsewhere.n; ++other) {
      const float4 v = reinterpret_cast<const float4*>(elsewhere.values + other * elsewhere.stride + token * d)[i];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    const float4 before = add ? row[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    row[i] = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
  }
}
