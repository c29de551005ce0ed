// What a step does to the rows of its sequences, one token of each, between the matrix products.
//
// begin_rows    the step's number, and the turns of each row's position     reference.rope
// route_rows    normed rows; each row's experts and their weights;
//               the rows of each expert (prompt_groups.cuh)                 reference.rms_norm, reference.router
// combine_rows  x += sum over the ranks of weight * y; normed rows          reference.expert_ffn, reference.rms_norm
//
// Shapes: x float32 [n][d], d a multiple of 32; n at most TILE_TOKENS, so each expert's rows are one tile.
// Launch geometry: stands at each kernel. Accumulation: float32; a row's squares by thread, then by warp, then over the warps.
#include "eights.cuh"
#include "heat.cuh"
#include "prompt_groups.cuh"
#include "rope.cuh"
#include "routing.cuh"
#include "row_norm.cuh"
#include "rows.cuh"
#include "step.cuh"

namespace strata {

constexpr int ROUTE_EXPERTS = ROW_THREADS / 32;  // of a block: one a warp

// Whether this is the last of `n` blocks that come here; for all threads of a block. It sees what the others have stored.
__device__ __forceinline__ bool is_last_of(uint32_t* arrived, uint32_t n) {
  __syncthreads();
  int is_last = 0;
  if (threadIdx.x == 0) {
    is_last = count_arrival(arrived) == n - 1;
    if (is_last) *arrived = 0;
  }
  return __syncthreads_or(is_last) != 0;
}

// Fills `groups` with the experts in their order, for experts int32 [n_pairs] by pair, and adds to the heat unless it
// has no counts. `counts` int [EXPERTS_MAX] is shared memory. The rows of an expert come in any order: nothing depends on it.
__device__ __forceinline__ void group(const int* experts, int n_pairs, int n_experts, const Groups& groups, const Heat& heat,
                                      int* counts) {
  for (int i = threadIdx.x; i < n_experts; i += ROW_THREADS) counts[i] = 0;
  __syncthreads();
  for (int pair = threadIdx.x; pair < n_pairs; pair += ROW_THREADS) atomicAdd(counts + __ldcg(experts + pair), 1);
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int rows = 0, tiles = 0;
    for (int first = 0; first < n_experts; first += 32) {
      const int expert = first + lane, count = expert < n_experts ? counts[expert] : 0;
      int sum = count;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
        if (lane >= offset) sum += other;
      }
      const uint32_t chosen = __ballot_sync(0xFFFFFFFFu, count > 0);
      const int tile = tiles + __popc(chosen & ((1u << lane) - 1u)), first_row = rows + sum - count;
      if (expert < n_experts) {
        groups.first_tiles[expert] = tile;
        counts[expert] = first_row;  // where the next of its pairs goes
      }
      if (count > 0) {
        groups.tiles[tile] = {expert, expert, first_row, count};
        if (heat.counts != nullptr) {
          const uint64_t all = heat.counts[expert] + static_cast<uint64_t>(count);
          heat.counts[expert] = all;
          heat.shared[expert] = all;
        }
      }
      rows += __shfl_sync(0xFFFFFFFFu, sum, 31);
      tiles += __popc(chosen);
    }
    if (lane == 0) groups.first_tiles[n_experts] = tiles;
  }
  __syncthreads();
  for (int pair = threadIdx.x; pair < n_pairs; pair += ROW_THREADS) {
    groups.pairs[atomicAdd(counts + __ldcg(experts + pair), 1)] = pair;
  }
}

}  // namespace strata

using namespace strata;

// steps [n] get the number of `step`; table float2 [n][head_dim / 2].
// Launch: n blocks of head_dim / 2 threads.
extern "C" __global__ void begin_rows(float2* table, const Step* step, Step* steps, double freq_base, double scale,
                                      int head_dim) {
  wait_for_previous();
  let_next_start();
  const int row = blockIdx.x, pair = threadIdx.x;
  table[row * (head_dim / 2) + pair] = turn_of(steps[row].position, pair, freq_base, scale, head_dim);
  if (pair == 0) steps[row].number = step->number;
}

// normed float16 [n][k] = rms_norm(x) * weight; scores float32 [n][m.rows] of that, in float32; experts int32 [n][top_k],
// likeliest first, and weights float32 [n][top_k]; `groups`. `arrived` uint32 [n + 1] is zero before and after.
// Launch: (ceil(m.rows / 8), n) blocks of 256 threads, k * 4 bytes of shared memory; with more, for 8 rows of m, these are copied
// there before the kernel waits.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2)
    route_rows(const float* x, const float* weight, Matrix m, __half* normed, float* scores, uint32_t* arrived,
               int* experts, float* weights, Groups groups, Heat heat, int k, int top_k, float eps) {
  DYNAMIC_SHARED(shared);
  __shared__ float sums[ROW_THREADS / 32];
  __shared__ float of_row[EXPERTS_MAX];
  __shared__ int counts[EXPERTS_MAX];
  __shared__ Routing routing;
  float* const values = reinterpret_cast<float*>(shared);  // x times weight
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, n_experts = m.rows;
  const int first = blockIdx.x * ROUTE_EXPERTS, count = min(ROUTE_EXPERTS, n_experts - first);
  const int64_t stride = row_bytes(m.type, k);
  const uint8_t* rows = m.blocks + first * stride;
  if (dynamic_shared_bytes() > 4 * k) rows = Stage{shared + 4 * k}.ask(rows, count * stride, threadIdx.x, ROW_THREADS);
  commit_copies();
  wait_for_previous();
  let_next_start();
  const float4* from = reinterpret_cast<const float4*>(x + static_cast<int64_t>(row) * k);
  float square = 0.0f;
  for (int i = threadIdx.x; i < k / 4; i += ROW_THREADS) {
    const float4 v = from[i];
    square += square_of(v);
    reinterpret_cast<float4*>(values)[i] = times(v, 1.0f, reinterpret_cast<const float4*>(weight)[i]);
  }
  wait_for_copies<0>();  // the sum has a barrier
  const float factor = rsqrtf(__fdividef(block_sum(square, sums), static_cast<float>(k)) + eps);
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < k / 4; i += ROW_THREADS) {
      const float4 v = reinterpret_cast<const float4*>(values)[i];
      store_halves(normed + static_cast<int64_t>(row) * k + 4 * i, times(v, factor, make_float4(1.0f, 1.0f, 1.0f, 1.0f)));
    }
  }
  if (warp < count) {
    with_type(m.type, [&](auto format) {
      using F = decltype(format);
      float sum = 0.0f;
#pragma unroll 4
      for (int group = lane; group < k / F::VALUES; group += 32) {
        const int block = group / F::GROUPS, in_block = group % F::GROUPS;
        float w[F::VALUES];
        dequantize_group<F>(rows + warp * stride + static_cast<int64_t>(block) * F::BLOCK_BYTES, in_block, w, F::grid());
        const float* v = values + block * F::BLOCK_VALUES + F::first(in_block);
#pragma unroll
        for (int i = 0; i < F::VALUES; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(v + i / F::RUN * F::STRIDE + i % F::RUN);
          sum += w[i] * four.x + w[i + 1] * four.y + (w[i + 2] * four.z + w[i + 3] * four.w);
        }
      }
      sum = factor * warp_sum(sum);
      if (lane == 0) scores[row * n_experts + first + warp] = sum;
    });
  }
  if (!is_last_of(arrived + 1 + row, gridDim.x)) return;
  for (int expert = threadIdx.x; expert < n_experts; expert += ROW_THREADS) {
    of_row[expert] = __ldcg(scores + row * n_experts + expert);
  }
  __syncthreads();
  routing.choose(of_row, n_experts, top_k);
  if (threadIdx.x < top_k) {
    experts[row * top_k + threadIdx.x] = routing.experts[threadIdx.x];
    weights[row * top_k + threadIdx.x] = routing.weights[threadIdx.x];
  }
  if (!is_last_of(arrived, gridDim.y)) return;
  group(experts, static_cast<int>(gridDim.y) * top_k, n_experts, groups, heat, counts);
}

// x float32 [n][d] += sum over rank of weights[n][top_k] * y[n][top_k][d], in the order of the ranks; normed float16 [n][d] in
// eights = rms_norm(x) * norm. With a top_k of 0 the rows are normed as they are.
// Launch: n blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    combine_rows(float* x, const float* y, const float* weights, const float* norm, __half* normed, int d, int top_k,
                 float eps) {
  __shared__ float sums[ROW_THREADS / 32];
  wait_for_previous();
  let_next_start();
  const int row = blockIdx.x;
  float4* values = reinterpret_cast<float4*>(x + row * d);
  const float4* results = reinterpret_cast<const float4*>(y + static_cast<int64_t>(row) * top_k * d);
  float square = 0.0f;
  for (int i = threadIdx.x; i < d / 4; i += ROW_THREADS) {
    const float4 after = combined(values[i], results + i, d / 4, weights + row * top_k, top_k);
    values[i] = after;
    square += square_of(after);
  }
  const float factor = rsqrtf(__fdividef(block_sum(square, sums), static_cast<float>(d)) + eps);
  for (int i = threadIdx.x; i < d / 4; i += ROW_THREADS) {
    store_halves(normed + place_in_eights(row, 4 * i, d), times(values[i], factor, reinterpret_cast<const float4*>(norm)[i]));
  }
}
