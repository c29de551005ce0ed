// Which experts the tokens of a chunk go to.
//
// router_prompt  scores = W x                                            reference.matmul
// route_prompt   the experts of each token and their weights             reference.router
// group_prompt   the tokens of each expert (prompt_groups.cuh)           a stable sort of the pairs by place
//
// Shapes: x float32 [n][k], k a multiple of 32; scores float32 [splits][n][n_experts], to be added up.
// Launch geometry: stands at each kernel.
// Accumulation: float32 fused multiply-adds in the order of k, each split by itself.
#include "heat.cuh"
#include "prompt_groups.cuh"
#include "routing.cuh"

namespace strata {

constexpr int ROUTER_THREADS = 128;
constexpr int ROUTER_TOKENS = 16;
constexpr int ROUTER_ROWS = 32;
constexpr int ROUTER_COLUMNS = 128;
constexpr int ROUTER_PITCH = ROUTER_COLUMNS + 4;

constexpr int GROUP_THREADS = 256;

}  // namespace strata

using namespace strata;

// A split takes every splits-th 128 columns.
// Launch: (ceil(m.rows / 32), ceil(n / 16), splits) blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS)
    router_prompt(const float* x, Matrix m, float* scores, int n, int k) {
  __shared__ __align__(16) float tokens[ROUTER_TOKENS * ROUTER_PITCH], rows[ROUTER_ROWS * ROUTER_PITCH];
  wait_for_previous();
  let_next_start();
  const int first_token = blockIdx.y * ROUTER_TOKENS, first_row = blockIdx.x * ROUTER_ROWS;
  if (first_token >= n) return;
  const int token = threadIdx.x / 16, row = threadIdx.x % 16;  // and 8 tokens, 16 rows further
  float sums[2][2] = {};
  for (int column = blockIdx.z * ROUTER_COLUMNS; column < k; column += gridDim.z * ROUTER_COLUMNS) {
    for (int i = threadIdx.x; i < ROUTER_TOKENS * ROUTER_COLUMNS / 4; i += ROUTER_THREADS) {
      const int at = i / (ROUTER_COLUMNS / 4), value = i % (ROUTER_COLUMNS / 4) * 4;
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (first_token + at < n && column + value < k) {
        v = *reinterpret_cast<const float4*>(x + static_cast<int64_t>(first_token + at) * k + column + value);
      }
      *reinterpret_cast<float4*>(tokens + at * ROUTER_PITCH + value) = v;
    }
    with_type(m.type, [&](auto format) {
      using F = decltype(format);
      constexpr int A_ROW = ROUTER_COLUMNS / F::VALUES;
#pragma unroll
      for (int i = 0; i < ROUTER_ROWS * A_ROW / ROUTER_THREADS; ++i) {
        const int part = threadIdx.x + i * ROUTER_THREADS, at = part / A_ROW;
        const int group = column / F::VALUES + part % A_ROW, in_block = group % F::GROUPS;
        float values[F::VALUES];
        if (first_row + at < m.rows && group < k / F::VALUES) {
          const int64_t block = static_cast<int64_t>(first_row + at) * (k / F::BLOCK_VALUES) + group / F::GROUPS;
          dequantize_group<F>(m.blocks + block * F::BLOCK_BYTES, in_block, values, F::grid());
        } else {
#pragma unroll
          for (int j = 0; j < F::VALUES; ++j) values[j] = 0.0f;
        }
        float* to = rows + at * ROUTER_PITCH + group / F::GROUPS * F::BLOCK_VALUES + F::first(in_block) - column;
#pragma unroll
        for (int j = 0; j < F::VALUES; j += 4) {
          *reinterpret_cast<float4*>(to + j / F::RUN * F::STRIDE + j % F::RUN) =
              make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
        }
      }
    });
    __syncthreads();
#pragma unroll 4
    for (int value = 0; value < ROUTER_COLUMNS; value += 4) {
      float4 a[2], b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[i] = *reinterpret_cast<const float4*>(tokens + (token + 8 * i) * ROUTER_PITCH + value);
        b[i] = *reinterpret_cast<const float4*>(rows + (row + 16 * i) * ROUTER_PITCH + value);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          sums[i][j] = fmaf(a[i].x, b[j].x, sums[i][j]);
          sums[i][j] = fmaf(a[i].y, b[j].y, sums[i][j]);
          sums[i][j] = fmaf(a[i].z, b[j].z, sums[i][j]);
          sums[i][j] = fmaf(a[i].w, b[j].w, sums[i][j]);
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = first_token + token + 8 * i;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int r = first_row + row + 16 * j;
      if (t < n && r < m.rows) scores[(static_cast<int64_t>(blockIdx.z) * n + t) * m.rows + r] = sums[i][j];
    }
  }
}

// experts int32 [n][top_k], likeliest first, and weights float32 [n][top_k].
// Launch: n blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS)
    route_prompt(const float* scores, int splits, int* experts, float* weights, int n, int n_experts, int top_k) {
  __shared__ float sums[EXPERTS_MAX];
  __shared__ Routing routing;
  wait_for_previous();
  let_next_start();
  if (blockIdx.x >= n) return;
  const int64_t token = blockIdx.x;
  for (int expert = threadIdx.x; expert < n_experts; expert += ROUTER_THREADS) {
    float sum = 0.0f;
    for (int split = 0; split < splits; ++split) sum += scores[(split * static_cast<int64_t>(n) + token) * n_experts + expert];
    sums[expert] = sum;
  }
  __syncthreads();
  routing.choose(sums, n_experts, top_k);
  if (threadIdx.x < top_k) {
    experts[token * top_k + threadIdx.x] = routing.experts[threadIdx.x];
    weights[token * top_k + threadIdx.x] = routing.weights[threadIdx.x];
  }
}

// Fills `groups` for experts int32 [n][top_k] in the order int32 [n_experts], and adds to the heat unless it has no counts.
// Launch: n_experts blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    group_prompt(const int* experts, const int* order, Groups groups, Heat heat, int n, int n_experts, int top_k) {
  __shared__ int counts[EXPERTS_MAX];      // by expert
  __shared__ int of_warps[GROUP_THREADS / 32];  // this expert's pairs in each warp's share
  __shared__ int before[2];                // rows and tiles of the places before this one
  wait_for_previous();
  let_next_start();
  const int place = blockIdx.x, expert = order[place], warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < n_experts; i += GROUP_THREADS) counts[i] = 0;
  if (threadIdx.x < 2) before[threadIdx.x] = 0;
  __syncthreads();

  // Each warp has a share of the pairs, of whole 32.
  const int n_pairs = n * top_k, share = (n_pairs + GROUP_THREADS - 1) / GROUP_THREADS * 32;
  const int first = warp * share, last = first + share < n_pairs ? first + share : n_pairs;
  int mine = 0;
  for (int at = first; at < last; at += 32) {
    const int found = at + lane < last ? experts[at + lane] : -1;
    if (found >= 0) atomicAdd(counts + found, 1);
    mine += __popc(__ballot_sync(0xFFFFFFFFu, found == expert));
  }
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();

  int rows = 0, tiles = 0;
  for (int i = threadIdx.x; i < place; i += GROUP_THREADS) {
    const int count = counts[order[i]];
    rows += count;
    tiles += (count + TILE_TOKENS - 1) / TILE_TOKENS;
  }
  atomicAdd(before, rows);
  atomicAdd(before + 1, tiles);
  __syncthreads();

  const int count = counts[expert], n_tiles = (count + TILE_TOKENS - 1) / TILE_TOKENS;
  int row = before[0];
  for (int i = threadIdx.x; i < n_tiles; i += GROUP_THREADS) {
    const int left = count - i * TILE_TOKENS;
    groups.tiles[before[1] + i] = {place, expert, row + i * TILE_TOKENS, left < TILE_TOKENS ? left : TILE_TOKENS};
  }
  if (threadIdx.x == 0) {
    groups.first_tiles[place] = before[1];
    if (place == n_experts - 1) groups.first_tiles[n_experts] = before[1] + n_tiles;
    if (count > 0 && heat.counts != nullptr) {
      const uint64_t sum = heat.counts[expert] + static_cast<uint64_t>(count);
      heat.counts[expert] = sum;
      heat.shared[expert] = sum;
    }
  }
  for (int i = 0; i < warp; ++i) row += of_warps[i];
  for (int at = first; at < last; at += 32) {
    const bool is_mine = at + lane < last && experts[at + lane] == expert;
    const uint32_t all = __ballot_sync(0xFFFFFFFFu, is_mine);
    if (is_mine) groups.pairs[row + __popc(all & ((1u << lane) - 1u))] = at + lane;
    row += __popc(all);
  }
}
