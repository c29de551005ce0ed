// Matrix products of prompt processing: dense ones, and those of the routed experts. docs/kernels.md tells how the kernels
// follow each other; prompt_tile.cuh how a block multiplies.
//
// matmul_prompt   y = x W^T                                          reference.matmul
// gate_up_prompt  h = silu(W_gate x) * (W_up x), by expert           reference.expert_ffn
// down_prompt     y = W_down h, by expert                            reference.expert_ffn
//
// Shapes: x and h float16 with scales (HalfRows), matrices as GGUF lays them out, y float32, all row by row. k is a
// multiple of 8 and of the types' block sizes, d_model and d_expert of 8.
// Launch geometry: stands at each kernel; blocks of TILE_THREADS threads with TILE_SHARED_BYTES of dynamic shared memory.
// A block takes up to 64 tokens, and 128 rows (gate_up: 64 of each matrix). Blocks that find nothing to do end.
// Accumulation: float32, of products of float16.
#include "prompt_groups.cuh"
#include "prompt_tile.cuh"

namespace strata {

constexpr int BLOCK_ROWS = TILE_WARPS * STRIP_ROWS;
constexpr int SCALE_WIDTH = BLOCK_ROWS / 2;  // of gate_up's output: the values that one block makes of a token

// The strip of the rows from `first` on.
__device__ __forceinline__ Strip strip_of(const uint8_t* blocks, int type, int rows, int k, int first) {
  int64_t offset = 0;
  with_type(type, [&](auto format) {
    using F = decltype(format);
    offset = static_cast<int64_t>(first) * (k / F::BLOCK_VALUES) * F::BLOCK_BYTES;
  });
  const int left = rows - first;
  return {blocks + offset, type, left < 0 ? 0 : left > STRIP_ROWS ? STRIP_ROWS : left};
}

// The power of two, 1 or more, that brings a value below 32768. Of what is not finite as well.
__device__ __forceinline__ float scale_for(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return exponent < 15 ? 1.0f : __uint_as_float(static_cast<uint32_t>(exponent - 14 + 127) << 23);
}

}  // namespace strata

using namespace strata;

// y float32 [n][y_stride] = x W^T for the rows of up to three matrices, one after the other; with `add`, y += x W^T.
// Matrices that are not there have no rows.
// Launch: (sum of ceil(rows / 128), ceil(n / 64)) blocks, more tokens' are allowed.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    matmul_prompt(HalfRows x, Matrix first, Matrix second, Matrix third, float* y, int n, int y_stride, int add) {
  DYNAMIC_SHARED(shared);
  wait_for_previous();
  let_next_start();
  const int first_token = blockIdx.y * TILE_TOKENS;
  if (first_token >= n) return;
  int block = blockIdx.x, column = 0;
  Matrix m = first;
  if (block >= (m.rows + BLOCK_ROWS - 1) / BLOCK_ROWS) {
    block -= (m.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    column += m.rows;
    m = second;
    if (block >= (m.rows + BLOCK_ROWS - 1) / BLOCK_ROWS) {
      block -= (m.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
      column += m.rows;
      m = third;
    }
  }
  const int first_row = block * BLOCK_ROWS + threadIdx.x / 32 * STRIP_ROWS;
  const Strip strip = strip_of(m.blocks, m.type, m.rows, x.k, first_row);
  const int count = n - first_token < TILE_TOKENS ? n - first_token : TILE_TOKENS;
  const auto tokens = make_tokens(x, count, [&](int i) { return first_token + i; });
  Sums sums;
  multiply_tile(TileMemory{shared}, tokens, strip, sums);
  float* to = y + static_cast<int64_t>(first_token) * y_stride + column + first_row;
  const bool are_even = (y_stride | column | strip.count) % 2 == 0;
  each_pair(sums, count, [&](int token, int row, float2 v) {
    if (row >= strip.count) return;
    float* at = to + static_cast<int64_t>(token) * y_stride + row;
    if (are_even) {
      float2* pair = reinterpret_cast<float2*>(at);
      *pair = add ? make_float2(pair->x + v.x, pair->y + v.y) : v;
    } else {
      at[0] = add ? at[0] + v.x : v.x;
      if (row + 1 < strip.count) at[1] = add ? at[1] + v.y : v.y;
    }
  });
}

// h [rows][d_expert] = silu(W_gate x) * (W_up x) of each row's token and expert, with h.scales [rows][ceil(d_expert / 64)];
// h.k is d_expert and h.scale_width 64.
// Launch: (ceil(d_expert / 64), tiles) blocks, more tiles than there are is allowed: last - first + n * top_k / 64.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    gate_up_prompt(HalfRows x, Groups groups, Experts experts, int gate_type, int up_type, __half* h, float* scales,
                   int d_expert, int top_k) {
  DYNAMIC_SHARED(shared);
  wait_for_previous();
  let_next_start();
  GroupTile tile;
  if (!find_tile(groups, experts, blockIdx.y, tile)) return;
  const int warp = threadIdx.x / 32, matrix = warp / (TILE_WARPS / 2);
  const int row_in_block = warp % (TILE_WARPS / 2) * STRIP_ROWS, first_column = blockIdx.x * SCALE_WIDTH;
  const Strip strip = strip_of(experts.matrix(tile, matrix), matrix == 0 ? gate_type : up_type, d_expert, x.k,
                               first_column + row_in_block);
  const auto tokens = make_tokens(x, tile.count, [&](int i) { return groups.pairs[tile.first_row + i] / top_k; });
  Sums sums;
  multiply_tile(TileMemory{shared}, tokens, strip, sums);

  // The gates' products meet the ups', then each quarter of a warp has tokens' values side by side.
  constexpr int PITCH = SCALE_WIDTH + 8;
  static_assert(2 * TILE_TOKENS * PITCH * 4 <= TILE_SHARED_BYTES, "both are kept in shared memory");
  float* gates = reinterpret_cast<float*>(shared);
  float* ups = gates + TILE_TOKENS * PITCH;
  __syncthreads();
  each_pair(sums, tile.count, [&](int token, int row, float2 v) {
    *reinterpret_cast<float2*>((matrix == 0 ? gates : ups) + token * PITCH + row_in_block + row) = v;
  });
  __syncthreads();
  constexpr int LANES = TILE_THREADS / TILE_TOKENS, VALUES = SCALE_WIDTH / LANES;
  const int token = threadIdx.x / LANES, part = threadIdx.x % LANES * VALUES;
  const int n_values = d_expert - first_column - part;  // of this thread's; the matrices' rows come by eights
  float values[VALUES], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    const float gate = gates[token * PITCH + part + i], up = ups[token * PITCH + part + i];
    values[i] = gate / (1.0f + expf(-gate)) * up;
    if (i < n_values) largest = fmaxf(largest, fabsf(values[i]));
  }
#pragma unroll
  for (int lane = 1; lane < LANES; lane *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, lane));
  if (token >= tile.count) return;
  const float scale = scale_for(largest), inverse = 1.0f / scale;
  const int64_t row = tile.first_row + token;
  if (part == 0) scales[row * ((d_expert + SCALE_WIDTH - 1) / SCALE_WIDTH) + blockIdx.x] = scale;
  __half* to = h + row * d_expert + first_column + part;
#pragma unroll
  for (int i = 0; i < VALUES; i += 8) {
    if (i < n_values) {
      *reinterpret_cast<uint4*>(to + i) = make_uint4(
          pack_halves(values[i] * inverse, values[i + 1] * inverse), pack_halves(values[i + 2] * inverse, values[i + 3] * inverse),
          pack_halves(values[i + 4] * inverse, values[i + 5] * inverse), pack_halves(values[i + 6] * inverse, values[i + 7] * inverse));
    }
  }
}

// y float32 [n * top_k][d_model] = W_down h, by pair: token * top_k + rank.
// Launch: (ceil(d_model / 128), tiles) blocks, as for gate_up_prompt.
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 2)
    down_prompt(HalfRows h, Groups groups, Experts experts, int type, float* y, int d_model) {
  DYNAMIC_SHARED(shared);
  wait_for_previous();
  let_next_start();
  GroupTile tile;
  if (!find_tile(groups, experts, blockIdx.y, tile)) return;
  const int first_row = blockIdx.x * BLOCK_ROWS + threadIdx.x / 32 * STRIP_ROWS;
  const Strip strip = strip_of(experts.matrix(tile, 2), type, d_model, h.k, first_row);
  const auto tokens = make_tokens(h, tile.count, [&](int i) { return tile.first_row + i; });
  Sums sums;
  multiply_tile(TileMemory{shared}, tokens, strip, sums);
  each_pair(sums, tile.count, [&](int token, int row, float2 v) {
    if (row >= strip.count) return;
    const int64_t pair = groups.pairs[tile.first_row + token];
    *reinterpret_cast<float2*>(y + pair * d_model + first_row + row) = v;
  });
}
