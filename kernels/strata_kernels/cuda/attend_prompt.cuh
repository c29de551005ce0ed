// Attention of a prompt's tokens.
//
// attend_prompt_TYPE_DIM: for cells of TYPE f16, bf16 or q8_0 and heads of DIM values.
// Operation: each of n tokens attends over the cells from 0 to its own, position + i.
// Must match: strata_kernels.reference.attention.
// Shapes: q float16 [n, n_heads, DIM], normed and rotated; out float16 [n, n_heads, DIM]. K and V of all position + n
//   cells are stored (store_kv.cu).
// Layout: q and out contiguous, aligned to 16 bytes; cells as kv.cuh says.
// Launch geometry: strata_kernels.attention.attend_prompt_grid, (n_kv_heads, ceil(n * group / 64)) blocks with group =
//   n_heads / n_kv_heads; threads and shared memory of attend_prompt_shape there.
// Accumulation: float32. Weights are multiplied as float16, in bf16 as bfloat16, there with queries as the sum of two.
//   K and V of q8_0 are multiplied as scale * int8 rounded to float16.
//
// How. A block takes 64 rows, each one query head of one token; the heads that share a K/V head stand side by side, so
// a tile of cells is loaded once for all of them. A warp has 16 rows, and for them the softmax and the sums in
// registers. The next tile is copied while one is multiplied. Blocks of later tokens have more cells: they come first.
#pragma once

#include "attention.cuh"

namespace strata {

struct PromptArguments {
  const __half* q;
  __half* out;
  KvCells cells;
  int32_t layer;
  int32_t n_heads;
  int32_t position;
  int32_t n;
};

template <typename Kv, int DIM>
struct PromptShape {
  static constexpr bool Q8 = Kv::TYPE == KV_Q8_0;
  static constexpr int WARPS = 4;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int ROWS = 16 * WARPS;
  static constexpr int CELLS = DIM <= 128 ? 64 : 32;       // of a tile
  static constexpr int ROW_BYTES = DIM * 2 + 16;           // 16 bytes more: rows of a column lie in different banks
  static constexpr int TILE_BYTES = CELLS * ROW_BYTES;     // of K or V
  static constexpr int RAW_BYTES = Q8 ? CELLS * DIM : 0;   // the same as int8
  static constexpr bool Q_IN_REGISTERS = DIM <= 128;
  static constexpr int Q_BYTES = Q_IN_REGISTERS ? 0 : ROWS * ROW_BYTES;
  // K and V twice, or once and their int8.
  static constexpr int SHARED_BYTES = (Q8 ? 2 : 4) * TILE_BYTES + 2 * RAW_BYTES + Q_BYTES;

  static_assert(DIM % 16 == 0 && DIM >= 32 && DIM <= 256, "see docs/kernels.md");
  static_assert(SHARED_BYTES <= 99 * 1024, "what every GPU from sm_80 on gives a block");
};

// Brings tiles of cells to shared memory as 16-bit values, [K or V][CELLS] rows of ROW_BYTES.
template <typename Kv, int DIM>
struct PromptTiles {
  using Shape = PromptShape<Kv, DIM>;
  static constexpr int CHUNKS = DIM * Kv::VALUE_BYTES / 16;  // of a row
  static constexpr int PARTS = Shape::CELLS / 16;            // that lie in one slab each
  static constexpr int STEPS = (16 * CHUNKS + Shape::THREADS - 1) / Shape::THREADS;
  static constexpr int SCALES = Shape::Q8 ? PARTS * STEPS : 1;

  KvCells cells;
  int layer, kv_head, n_cells;
  uint8_t* shared;
  uint32_t scales[2][SCALES];  // of what this thread copies

  __device__ __forceinline__ uint8_t* tile(int stage, int k_or_v) const {
    return shared + (2 * stage + k_or_v) * Shape::TILE_BYTES;
  }

  __device__ __forceinline__ uint8_t* raw(int k_or_v) const {
    return shared + 2 * Shape::TILE_BYTES + k_or_v * Shape::RAW_BYTES;
  }

  // Calls body(part, step, row, chunk) for the chunks of 16 bytes that are this thread's, the same in each call.
  template <typename Body>
  static __device__ __forceinline__ void each(Body body) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int index = threadIdx.x + step * Shape::THREADS;
        if (16 * CHUNKS % Shape::THREADS == 0 || index < 16 * CHUNKS) {
          body(part, step, index / CHUNKS, index % CHUNKS);
        }
      }
    }
  }

  // One group of copies. Cells from `n_cells` on become zeros.
  __device__ __forceinline__ void copy(int first, int stage) {
    const int stride = cells.n_kv_heads * (DIM * Kv::VALUE_BYTES);
#pragma unroll
    for (int k_or_v = 0; k_or_v < 2; ++k_or_v) {
      each([&](int part, int step, int row, int chunk) {
        const int cell = first + 16 * part;
        const bool valid = cell + row < n_cells;
        const uint8_t* from = cells.values(layer, k_or_v, cell, kv_head) + (row * stride + chunk * 16);
        if constexpr (!Shape::Q8) {
          copy_async(tile(stage, k_or_v) + (16 * part + row) * Shape::ROW_BYTES + chunk * 16, from, valid);
        } else {
          copy_async(raw(k_or_v) + (16 * part + row) * DIM + chunk * 16, from, valid);
          const uint16_t* at = reinterpret_cast<const uint16_t*>(cells.scales(layer, k_or_v, cell, kv_head)) +
                               (row * cells.n_kv_heads * (DIM / Q8_BLOCK) + chunk / 2);
          scales[k_or_v][part * STEPS + step] = valid ? *at : 0;
        }
      });
    }
    commit_copies();
  }

  // q8_0: makes 16-bit values of what this thread copied.
  __device__ __forceinline__ void convert() const {
#pragma unroll
    for (int k_or_v = 0; k_or_v < 2; ++k_or_v) {
      each([&](int part, int step, int row, int chunk) {
        const uint4 from = *reinterpret_cast<const uint4*>(raw(k_or_v) + (16 * part + row) * DIM + chunk * 16);
        const uint32_t scale = scales[k_or_v][part * STEPS + step] * 0x10001u;
        uint4* to = reinterpret_cast<uint4*>(tile(0, k_or_v) + (16 * part + row) * Shape::ROW_BYTES + chunk * 32);
        const auto lower = [&](uint32_t word) { return multiply_halves(to_halves<0x4140>(word), scale); };
        const auto upper = [&](uint32_t word) { return multiply_halves(to_halves<0x4342>(word), scale); };
        to[0] = make_uint4(lower(from.x), upper(from.x), lower(from.y), upper(from.y));
        to[1] = make_uint4(lower(from.z), upper(from.z), lower(from.w), upper(from.w));
      });
    }
  }
};

template <typename Kv, int DIM>
__device__ __forceinline__ void attend_prompt(const PromptArguments& a) {
  using Shape = PromptShape<Kv, DIM>;
  using Number = typename Kv::Number;
  constexpr int STEPS = DIM / 16, CELLS = Shape::CELLS;
  constexpr int Q_PARTS = Kv::TYPE == KV_BF16 ? 2 : 1;  // float16 is the sum of two bfloat16

  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int kv_head = blockIdx.x, group = a.n_heads / gridDim.x;
  const int n_rows = a.n * group, first_row = (gridDim.y - 1 - blockIdx.y) * Shape::ROWS;
  const int first_token = first_row / group, last_token = (min(first_row + Shape::ROWS, n_rows) - 1) / group;
  const int n_cells = a.position + last_token + 1;
  const int n_tiles = (n_cells + CELLS - 1) / CELLS;

  PromptTiles<Kv, DIM> tiles;
  tiles.cells = a.cells;
  tiles.cells.n_kv_heads = gridDim.x;
  tiles.cells.head_dim = DIM;
  tiles.cells.type = Kv::TYPE;
  tiles.layer = a.layer;
  tiles.kv_head = kv_head;
  tiles.n_cells = n_cells;
  tiles.shared = shared;

  wait_for_previous();
  let_next_start();
  tiles.copy(0, 0);

  // This lane's two rows: g and g + 8 of the warp's.
  int token[2];
  int64_t at[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + 16 * warp + g + 8 * i;
    token[i] = row / group;
    at[i] = row < n_rows ? (static_cast<int64_t>(token[i]) * a.n_heads + kv_head * group + row % group) * DIM : -1;
  }
  uint8_t* const q_shared = shared + Shape::SHARED_BYTES - Shape::Q_BYTES;
  uint32_t q[Shape::Q_IN_REGISTERS ? STEPS : 1][Q_PARTS][4];
  const auto parted = [&](uint32_t (&to)[Q_PARTS][4]) {
    if constexpr (Q_PARTS == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 wide = Half::unpack(to[0][i]);
        pack_in_two<Number>(wide.x, wide.y, to[0][i], to[1][i]);
      }
    }
  };
  if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t row = at[i % 2];
        q[step][0][i] = row < 0 ? 0 : *reinterpret_cast<const uint32_t*>(a.q + row + 16 * step + i / 2 * 8 + 2 * t);
      }
      parted(q[step]);
    }
  } else {
    for (int index = threadIdx.x; index < Shape::ROWS * (DIM / 8); index += Shape::THREADS) {
      const int row = first_row + index / (DIM / 8), chunk = index % (DIM / 8);
      const int64_t from = (static_cast<int64_t>(row / group) * a.n_heads + kv_head * group + row % group) * DIM;
      uint4* to = reinterpret_cast<uint4*>(q_shared + index / (DIM / 8) * Shape::ROW_BYTES + chunk * 16);
      *to = row < n_rows ? *reinterpret_cast<const uint4*>(a.q + from + chunk * 8) : make_uint4(0, 0, 0, 0);
    }
  }

  // Of rows g and g + 8: the largest score, this lane's share of the sum of weights, sums of weighted values.
  float largest[2] = {minus_infinity(), minus_infinity()}, weights[2] = {0.0f, 0.0f}, out[DIM / 8][4];
#pragma unroll
  for (int i = 0; i < DIM / 8; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.0f;
  const float scale = LOG2_E * rsqrtf(static_cast<float>(DIM));

  for (int tile = 0; tile < n_tiles; ++tile) {
    const int stage = Shape::Q8 ? 0 : tile % 2, first = tile * CELLS;
    wait_for_copies<0>();
    __syncthreads();
    if constexpr (Shape::Q8) {
      tiles.convert();
      __syncthreads();
    }
    if (tile + 1 < n_tiles) tiles.copy(first + CELLS, 1 - stage);

    float scores[CELLS / 8][4];
#pragma unroll
    for (int i = 0; i < CELLS / 8; ++i) scores[i][0] = scores[i][1] = scores[i][2] = scores[i][3] = 0.0f;
    const uint8_t* k_row = tiles.tile(stage, 0) + (lane % 8 + lane / 16 * 8) * Shape::ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t left[Q_PARTS][4];
      if constexpr (Shape::Q_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < 4 * Q_PARTS; ++i) left[i / 4][i % 4] = q[step][i / 4][i % 4];
      } else {
        load_matrices(left[0], q_shared + (16 * warp + lane % 16) * Shape::ROW_BYTES + lane / 16 * 16 + step * 32);
        parted(left);
      }
#pragma unroll
      for (int i = 0; i < CELLS / 16; ++i) {
        uint32_t k[4];
        load_matrices(k, k_row + i * 16 * Shape::ROW_BYTES + step * 32);
#pragma unroll
        for (int part = 0; part < Q_PARTS; ++part) {
          Number::mma(scores[2 * i], left[part], {k[0], k[1]});
          Number::mma(scores[2 * i + 1], left[part], {k[2], k[3]});
        }
      }
    }

    if (first + CELLS - 1 > a.position + first_token) {
#pragma unroll
      for (int i = 0; i < CELLS / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (first + 8 * i + 2 * t + j % 2 > a.position + token[j / 2]) scores[i][j] = minus_infinity();
        }
      }
    }
    float factor[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float now = largest[r];
#pragma unroll
      for (int i = 0; i < CELLS / 8; ++i) now = fmaxf(now, fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
      factor[r] = exp2_fast((largest[r] - now) * scale);
      largest[r] = now;
      shift[r] = now * scale;
      weights[r] *= factor[r];
    }
#pragma unroll
    for (int i = 0; i < CELLS / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = exp2_fast(fmaf(scores[i][j], scale, -shift[j / 2]));
        weights[j / 2] += scores[i][j];
      }
    }
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] *= factor[j / 2];
    }

    const uint8_t* v_row = tiles.tile(stage, 1) + lane % 16 * Shape::ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int i = 0; i < CELLS / 16; ++i) {
      const float(&lower)[4] = scores[2 * i];
      const float(&upper)[4] = scores[2 * i + 1];
      const uint32_t left[4] = {Number::pack(lower[0], lower[1]), Number::pack(lower[2], lower[3]),
                                Number::pack(upper[0], upper[1]), Number::pack(upper[2], upper[3])};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32_t v[4];
        load_matrices_transposed(v, v_row + i * 16 * Shape::ROW_BYTES + step * 32);
        Number::mma(out[2 * step], left, {v[0], v[1]});
        Number::mma(out[2 * step + 1], left, {v[2], v[3]});
      }
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = weights[r];
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (at[r] < 0) continue;
    const float inverse = 1.0f / sum;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) {
      *reinterpret_cast<uint32_t*>(a.out + at[r] + 8 * i + 2 * t) =
          Half::pack(out[i][2 * r] * inverse, out[i][2 * r + 1] * inverse);
    }
  }
}

}  // namespace strata

#define ATTEND_PROMPT(NAME, KV, DIM)                                                                \
  extern "C" __global__ void __launch_bounds__(strata::PromptShape<strata::KV, DIM>::THREADS, 2)    \
      attend_prompt_##NAME##_##DIM(strata::PromptArguments a) {                                     \
    strata::attend_prompt<strata::KV, DIM>(a);                                                      \
  }
