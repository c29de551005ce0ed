// Attention of one token.
//
// attend_TYPE_DIM_HEADS: for cells of TYPE f16, bf16 or q8_0, heads of DIM values, up to HEADS (8 or 16) query heads to
//   a K/V head.
// Operation: norms and rotates q and k, stores k and v into the cell `position`, attends over the cells 0 .. position.
// Must match: strata_kernels.reference.rms_norm, rope, kv_store (rounded to the cells' type) and attention.
// Shapes: q float32 [n_heads, DIM], k and v float32 [n_kv_heads, DIM], raw as products leave them; q_norm and k_norm
//   float32 [DIM]; rope float32 [DIM / 2][2]; out an activation of n_heads * DIM values, squares 0.
// Layout: cells as kv.cuh says, `position` less than they hold. `workspace`: strata_kernels.attention.workspace_bytes,
//   aligned to 16, zero before the first launch; launches that share one must not overlap.
// Launch geometry: (n_kv_heads, n_splits) blocks, threads and shared memory of strata_kernels.attention.attend_shape.
//   How many of the n_splits blocks (1024 at most) of a K/V head have cells follows from `position` alone (see Splits);
//   the others end at once. With more shared memory, more tiles are in flight.
// Accumulation: float32; order fixed by `position` and n_splits. Queries are multiplied as the sum of two 16-bit
//   numbers; weights as one float16, in bf16 as the sum of two.
// Before it waits for the kernel before it, it reads `step->position` and the cells below: kernels that wrote those
//   must have ended when the kernel before it began.
//
// How. A warp takes every WARPS-th tile of 16 cells of its block, with its own copies in flight and its own softmax; no
// warp waits for another until all are done. Scores are [16 rows][16 cells]: 8 query heads, upper and lower part. What
// they are turned into in registers is, as it lies, the right operand of [values][cells] * [cells][8 heads], where the
// left one is V, transposed as it comes from shared memory. int8 of q8_0 are turned into float16 exactly; the scales of
// K multiply sums of 32 products, those of V its float16 values.
#pragma once

#include "activation.cuh"
#include "attention.cuh"
#include "step.cuh"

// Registers: where kernels overlap, a block is to fit beside two of `qkv` or one of `attend_out`, which leave 96 a
// thread; that is what a bound of 320 threads, twice, comes to. Scales need more.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
#define ATTEND_IS_SMALL(DIM, HEADS) (HEADS <= 8 && DIM <= 128)
#define ATTEND_BOUNDS(KV, DIM, HEADS)                                                               \
  __launch_bounds__(ATTEND_IS_SMALL(DIM, HEADS) && strata::KV::VALUE_BYTES == 2 ? 320 : 256,        \
                    ATTEND_IS_SMALL(DIM, HEADS) ? 2 : 1)
#else
#define ATTEND_BOUNDS(KV, DIM, HEADS) __launch_bounds__(256)
#endif

namespace strata {

constexpr int TILE = 16;          // cells
constexpr int TILES_ALONE = 16;   // so many need no second block: it would cost more than it saves
constexpr int TILES_A_SPLIT = 8;  // at least, where there are several

// How the tiles of a K/V head are shared among its blocks.
struct Splits {
  int n_tiles;
  int active;  // blocks that have tiles: the first ones

  __device__ __forceinline__ Splits(int position, int n_splits) : n_tiles(position / TILE + 1) {
    active = n_tiles <= TILES_ALONE ? 1 : min(n_tiles / TILES_A_SPLIT, n_splits);
  }

  // The first tile of a block.
  __device__ __forceinline__ int begin(int split) const {
    if (active == 1) return split * n_tiles;
    return static_cast<uint32_t>(split * n_tiles) / static_cast<uint32_t>(active);
  }
};

// `Out` takes results as an activation's store_quad does.
template <typename Out>
struct AttendInputs {
  const float* q;
  const float* k;
  const float* v;
  const float* q_norm;
  const float* k_norm;
  const float* rope;
  const Step* step;
  KvCells cells;
  Out out;
  uint8_t* workspace;
  int32_t layer;
  int32_t n_heads;
  float eps;
};

using AttendArguments = AttendInputs<Activation>;

// Shared memory of a block: a ring of tiles for each warp, q, the new cell's k and v, the warps' maxima and sums.
template <typename Kv, int DIM, int HEADS>
struct AttendShape {
  static constexpr int WARPS = DIM <= 128 ? 8 : 4;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int GROUPS = HEADS / 8;
  // 16 bytes more: rows of a column lie in different banks.
  static constexpr int ROW_BYTES = DIM * Kv::VALUE_BYTES + 16;
  static constexpr int TILE_BYTES = TILE * ROW_BYTES;
  static constexpr int STAGE_BYTES = 2 * TILE_BYTES;  // K and V
  static constexpr int STAGES_MAX = 4;                // of a ring; as many as fit
  static constexpr int Q_ROW_BYTES = DIM * 2 + 16;
  static constexpr int Q_BYTES = GROUPS * 16 * Q_ROW_BYTES;
  static constexpr int SCALES_BYTES = (DIM / 32 * 2 + 15) / 16 * 16;
  static constexpr int NEW_BYTES = 2 * (ROW_BYTES + SCALES_BYTES);
  static constexpr int WIDE_BYTES = Kv::TYPE == KV_Q8_0 ? 2 * DIM * 4 : 0;  // k and v before they are rounded
  static constexpr int SUMS_BYTES = WARPS * HEADS * 8 > WIDE_BYTES ? WARPS * HEADS * 8 : WIDE_BYTES;
  static constexpr int REST_BYTES = Q_BYTES + NEW_BYTES + SUMS_BYTES;
  static constexpr int OUT_ROW = DIM + 4;  // floats; 4 more for the banks
  // A warp's results, float32 [HEADS][OUT_ROW], replace its tiles.
  static constexpr int STAGES_MIN = (HEADS * OUT_ROW * 4 + STAGE_BYTES - 1) / STAGE_BYTES;

  static_assert(DIM % 16 == 0 && DIM >= 32 && DIM <= 256 && HEADS % 8 == 0, "see docs/kernels.md");
  static_assert(STAGES_MIN <= STAGES_MAX, "the ring holds a warp's results");
  static_assert(WARPS * STAGES_MIN * STAGE_BYTES + REST_BYTES <= 99 * 1024, "what every GPU gives a block");
};

// Copies that a warp has in flight for the tiles first, first + WARPS, ... below `end`.
template <typename Kv, int DIM, int HEADS>
struct Tiles {
  using Shape = AttendShape<Kv, DIM, HEADS>;
  static constexpr int CHUNKS = DIM * Kv::VALUE_BYTES / 16;  // of a row

  KvCells cells;
  int layer, kv_head, position, end, lane;
  uint8_t* ring;

  __device__ __forceinline__ uint8_t* place(int stage, int k_or_v) const {
    return ring + (2 * stage + k_or_v) * Shape::TILE_BYTES;
  }

  // One group of copies, an empty one from `end` on. Cells from `position` on become zeros.
  __device__ __forceinline__ void copy(int tile, int k_or_v, int stage) const {
    if (tile < end) {
      uint8_t* to = place(stage, k_or_v);
      const uint8_t* from = cells.values(layer, k_or_v, tile * TILE, kv_head);
      const int stride = cells.n_kv_heads * (DIM * Kv::VALUE_BYTES);
#pragma unroll
      for (int j = 0; j < TILE * CHUNKS / 32; ++j) {
        const int row = (lane + 32 * j) / CHUNKS, chunk = (lane + 32 * j) % CHUNKS;
        copy_async(to + row * Shape::ROW_BYTES + chunk * 16, from + (row * stride + chunk * 16),
                   tile * TILE + row < position);
      }
    }
    commit_copies();
  }
};

// Of the 2 * stages groups of copies in flight.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 1) {
    wait_for_copies<1>();
  } else if (stages == 2) {
    wait_for_copies<3>();
  } else if (stages == 3) {
    wait_for_copies<5>();
  } else {
    wait_for_copies<7>();
  }
}

// q8_0: the scales of the four cells of a tile that a lane multiplies, 2 t, 2 t + 1, 2 t + 8, 2 t + 9, t = lane % 4.
template <int BLOCKS>
struct Scales {
  static constexpr int WORDS = (BLOCKS + 1) / 2;
  uint32_t words[4][WORDS];

  static __device__ __forceinline__ int cell(int i, int lane) { return 2 * (lane % 4) + i % 2 + i / 2 * 8; }

  static __device__ __forceinline__ void read(const uint8_t* from, uint32_t (&to)[WORDS]) {
    if constexpr (BLOCKS % 8 == 0) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (BLOCKS % 4 == 0) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      to[0] = v.x, to[1] = v.y;
    } else if constexpr (BLOCKS % 2 == 0) {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) to[w] = reinterpret_cast<const uint32_t*>(from)[w];
    } else {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        to[w] = halves[2 * w] | (2 * w + 1 < BLOCKS ? static_cast<uint32_t>(halves[2 * w + 1]) << 16 : 0u);
      }
    }
  }

  // Of the tile that begins at cell `first`; those of the cell `position` are at `new_scales`, or left out where that
  // is null. Zeros for later cells.
  __device__ __forceinline__ void load(const KvCells& cells, int layer, int k_or_v, int kv_head, int first,
                                       int position, const uint8_t* new_scales, int lane) {
    const uint8_t* from = cells.scales(layer, k_or_v, first, kv_head);
    const int stride = cells.n_kv_heads * (2 * BLOCKS);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = cell(i, lane);
      const uint8_t* at = first + row < position ? from + row * stride : new_scales;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) words[i][w] = 0;
      if (first + row <= position && at != nullptr) read(at, words[i]);
    }
  }

  // Puts in those of the cell at a row of the tile.
  __device__ __forceinline__ void replace(int row, const uint8_t* new_scales, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (cell(i, lane) == row) read(new_scales, words[i]);
    }
  }

  // Two neighbouring cells' scales of a block: cells 2 t and 2 t + 1, or 8 later.
  __device__ __forceinline__ uint32_t pair(int upper, int block) const {
    return __byte_perm(words[2 * upper][block / 2], words[2 * upper + 1][block / 2], block % 2 ? 0x7632 : 0x5410);
  }
};

template <typename Kv, int DIM, int HEADS, typename Out>
__device__ __forceinline__ void attend(AttendInputs<Out> a) {
  using Shape = AttendShape<Kv, DIM, HEADS>;
  using Number = typename Kv::Number;
  constexpr bool Q8 = Kv::VALUE_BYTES == 1;
  constexpr int WARPS = Shape::WARPS, GROUPS = Shape::GROUPS, STEPS = DIM / 16;
  constexpr int Q8_BLOCKS = Q8 ? DIM / Q8_BLOCK : 1;
  constexpr int PAIRS = (DIM + 127) / 128;

  DYNAMIC_SHARED(shared);
  const int stages = min(static_cast<int>(dynamic_shared_bytes() - Shape::REST_BYTES) / (WARPS * Shape::STAGE_BYTES),
                         Shape::STAGES_MAX);
  const int ring_bytes = stages * Shape::STAGE_BYTES;
  uint8_t* const q_shared = shared + WARPS * ring_bytes;
  uint8_t* const new_shared = q_shared + Shape::Q_BYTES;  // k, v, scales of k, scales of v
  uint8_t* const new_scales = new_shared + 2 * Shape::ROW_BYTES;
  float2* const sums = reinterpret_cast<float2*>(new_shared + Shape::NEW_BYTES);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const int kv_head = blockIdx.x, split = blockIdx.y, n_splits = gridDim.y;
  const int group = a.n_heads / gridDim.x;
  const int position = __ldcg(&a.step->position);
  const Splits splits(position, n_splits);
  if (split >= splits.active) return;
  const int begin = splits.begin(split), end = splits.begin(split + 1);
  const bool has_new = end == splits.n_tiles;

  KvCells cells = a.cells;
  cells.n_kv_heads = gridDim.x;
  cells.head_dim = DIM;
  cells.type = Kv::TYPE;
  uint8_t* const ring = shared + warp * ring_bytes;
  const Tiles<Kv, DIM, HEADS> tiles{cells, a.layer, kv_head, position, end, lane, ring};
  for (int stage = 0; stage < stages; ++stage) {
    tiles.copy(begin + warp + stage * WARPS, 0, stage);
    tiles.copy(begin + warp + stage * WARPS, 1, stage);
  }
  Scales<Q8_BLOCKS> k_scales, v_scales;
  if constexpr (Q8) {
    if (begin + warp < end) {
      k_scales.load(cells, a.layer, 0, kv_head, (begin + warp) * TILE, position, nullptr, lane);
      v_scales.load(cells, a.layer, 1, kv_head, (begin + warp) * TILE, position, nullptr, lane);
    }
  }

  // Rows of q: of head 8 g + i the upper part at 16 g + i, the lower part at 16 g + 8 + i. After them k and v.
  wait_for_previous();
  let_next_start();
  {
    constexpr int TASKS = (HEADS + 2 + WARPS - 1) / WARPS;
    const int n_tasks = HEADS + (has_new ? 2 : 0);
    Head<PAIRS> x[TASKS], weight[TASKS];
    float4 turns[PAIRS];
    Head<PAIRS>(DIM, lane).load_turns(a.rope, turns);
#pragma unroll
    for (int i = 0; i < TASKS; ++i) {
      x[i] = weight[i] = Head<PAIRS>(DIM, lane);
      const int task = warp + i * WARPS;
      if (task >= n_tasks || (task >= group && task < HEADS)) continue;
      x[i].load(task < HEADS    ? a.q + (static_cast<int64_t>(kv_head) * group + task) * DIM
                : task == HEADS ? a.k + static_cast<int64_t>(kv_head) * DIM
                                : a.v + static_cast<int64_t>(kv_head) * DIM);
      weight[i].load(task < HEADS ? a.q_norm : a.k_norm);
    }
    float squares[TASKS];
#pragma unroll
    for (int i = 0; i < TASKS; ++i) squares[i] = x[i].square();
    sum_over_warp(squares);
#pragma unroll
    for (int i = 0; i < TASKS; ++i) {
      const int task = warp + i * WARPS;
      if (task >= n_tasks) continue;
      if (task < HEADS) {
        const bool exists = task < group;  // the others are zeros
        if (exists) {
          x[i].norm(weight[i], squares[i], a.eps);
          x[i].rotate(turns);
        }
        uint8_t* row = q_shared + (task / 8 * 16 + task % 8) * Shape::Q_ROW_BYTES;
        const float scale = exists ? LOG2_E * rsqrtf(static_cast<float>(DIM)) : 0.0f;
        x[i].each([&](int at, float first, float second) {
          // In q8_0 the products of four neighbours are those of columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
          const int column = !Q8 ? at : at / 16 * 16 + at % 16 / 4 * 2 + at % 4 / 2 * 8;
          uint32_t high = 0, low = 0;
          if (exists) pack_in_two<Number>(first * scale, second * scale, high, low);
          *reinterpret_cast<uint32_t*>(row + 2 * column) = high;
          *reinterpret_cast<uint32_t*>(row + 8 * Shape::Q_ROW_BYTES + 2 * column) = low;
        });
        continue;
      }
      const int k_or_v = task - HEADS;
      if (k_or_v == 0) {
        x[i].norm(weight[i], squares[i], a.eps);
        x[i].rotate(turns);
      }
      uint8_t* near = new_shared + k_or_v * Shape::ROW_BYTES;
      uint8_t* far = cells.values(a.layer, k_or_v, position, kv_head);
      if constexpr (!Q8) {
        x[i].each([&](int at, float first, float second) {
          const uint32_t word = Number::pack(first, second);
          *reinterpret_cast<uint32_t*>(near + 2 * at) = word;
          *reinterpret_cast<uint32_t*>(far + 2 * at) = word;
        });
      } else {
        float* wide = reinterpret_cast<float*>(sums) + k_or_v * DIM;  // not needed yet
        x[i].each([&](int at, float first, float second) {
          *reinterpret_cast<float2*>(wide + at) = make_float2(first, second);
        });
        __syncwarp();
        __half* near_scales = reinterpret_cast<__half*>(new_scales + k_or_v * Shape::SCALES_BYTES);
        __half* far_scales = reinterpret_cast<__half*>(cells.scales(a.layer, k_or_v, position, kv_head));
#pragma unroll
        for (int block = 0; block < Q8_BLOCKS; ++block) {
          __half scale;
          const int q = quantize(wide[block * Q8_BLOCK + lane], scale);
          near[block * Q8_BLOCK + lane] = far[block * Q8_BLOCK + lane] = static_cast<uint8_t>(q);
          if (lane == 0) near_scales[block] = far_scales[block] = scale;
        }
      }
    }
  }
  __syncthreads();
  if constexpr (Q8) {
    if (begin + warp == splits.n_tiles - 1) {  // asked for too early to have the new cell
      k_scales.replace(position % TILE, new_scales, lane);
      v_scales.replace(position % TILE, new_scales + Shape::SCALES_BYTES, lane);
    }
  }

  // Where a lane finds its row of q and of a tile, for load_matrices.
  const uint8_t* const q_row = q_shared + lane % 16 * Shape::Q_ROW_BYTES + lane / 16 * 16;
  const int row = lane % 8 + lane / 16 * 8, row_offset = lane / 8 % 2 * 16;

  // Of head lane / 4 of each group: the largest score and this lane's share of the sum of weights. Of heads 2 t and
  // 2 t + 1: sums of weighted values.
  float largest[GROUPS], weights[GROUPS], out[GROUPS][STEPS][4];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    largest[g] = minus_infinity();
    weights[g] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[g][step][i] = 0.0f;
    }
  }

  int stage = 0;
  for (int tile = begin + warp; tile < end; tile += WARPS) {
    const bool last = tile == splits.n_tiles - 1;
    const int new_row = last ? position % TILE : TILE;  // where the new cell stands, if in this tile

    wait_for_oldest(stages);
    __syncwarp();
    const uint8_t* from = row == new_row ? new_shared : tiles.place(stage, 0) + row * Shape::ROW_BYTES;
    from += row_offset;
    float scores[GROUPS][2][2];  // of cells 2 t and 2 t + 1, and 8 later
    if constexpr (!Q8) {
      float parts[GROUPS][2][2][4] = {};  // two sums in turn: a product waits for the one before the last
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32_t k[4];
        load_matrices(k, from + step * 32);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          uint32_t left[4];
          load_matrices(left, q_row + g * 16 * Shape::Q_ROW_BYTES + step * 32);
          Number::mma(parts[g][0][step % 2], left, {k[0], k[1]});
          Number::mma(parts[g][1][step % 2], left, {k[2], k[3]});
        }
      }
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&p)[2][4] = parts[g][i / 2];
          scores[g][i / 2][i % 2] = (p[0][i % 2] + p[1][i % 2]) + (p[0][i % 2 + 2] + p[1][i % 2 + 2]);
        }
      }
    } else {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) scores[g][0][0] = scores[g][0][1] = scores[g][1][0] = scores[g][1][1] = 0.0f;
#pragma unroll
      for (int block = 0; block < Q8_BLOCKS; ++block) {
        uint32_t k[4];
        load_matrices(k, from + block * 32);
        float parts[GROUPS][2][4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t lower[2] = {to_halves<0x4140>(k[step]), to_halves<0x4342>(k[step])};
          const uint32_t upper[2] = {to_halves<0x4140>(k[step + 2]), to_halves<0x4342>(k[step + 2])};
#pragma unroll
          for (int g = 0; g < GROUPS; ++g) {
            uint32_t left[4];
            load_matrices(left, q_row + g * 16 * Shape::Q_ROW_BYTES + (2 * block + step) * 32);
            Number::mma(parts[g][0], left, lower);
            Number::mma(parts[g][1], left, upper);
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 scale = Half::unpack(k_scales.pair(half, block));
#pragma unroll
          for (int g = 0; g < GROUPS; ++g) {
            scores[g][half][0] += scale.x * (parts[g][half][0] + parts[g][half][2]);
            scores[g][half][1] += scale.y * (parts[g][half][1] + parts[g][half][3]);
          }
        }
      }
    }
    __syncwarp();
    tiles.copy(tile + stages * WARPS, 0, stage);
    if constexpr (Q8) {
      if (tile + WARPS < end) {
        k_scales.load(cells, a.layer, 0, kv_head, (tile + WARPS) * TILE, position, new_scales, lane);
      }
    }

    // Weights: the right operand's columns are heads, its rows cells.
    constexpr int PARTS = Kv::TYPE == KV_BF16 ? 2 : 1;
    uint32_t right[GROUPS][PARTS][2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      if (last) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (Scales<1>::cell(i, lane) > new_row) scores[g][i / 2][i % 2] = minus_infinity();
        }
      }
      float now = fmaxf(fmaxf(scores[g][0][0], scores[g][0][1]), fmaxf(scores[g][1][0], scores[g][1][1]));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
      now = fmaxf(now, largest[g]);
      const float factor = exp2_fast(largest[g] - now);
      largest[g] = now;
      float w[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i / 2][i % 2] = exp2_fast(scores[g][i / 2][i % 2] - now);
      weights[g] = weights[g] * factor + ((w[0][0] + w[0][1]) + (w[1][0] + w[1][1]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (PARTS == 1) {
          right[g][0][half] = Number::pack(w[half][0], w[half][1]);
        } else {
          pack_in_two<Number>(w[half][0], w[half][1], right[g][0][half], right[g][PARTS - 1][half]);
        }
      }
      const float first = __shfl_sync(ALL_LANES, factor, 8 * t), second = __shfl_sync(ALL_LANES, factor, 8 * t + 4);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[g][step][i] *= i % 2 ? second : first;
      }
    }

    wait_for_oldest(stages);
    __syncwarp();
    from = row == new_row ? new_shared + Shape::ROW_BYTES : tiles.place(stage, 1) + row * Shape::ROW_BYTES;
    from += row_offset;
    if constexpr (!Q8) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        uint32_t v[4];
        load_matrices_transposed(v, from + step * 32);
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
          for (int part = 0; part < PARTS; ++part) Number::mma(out[g][step], v, right[g][part]);
        }
      }
    } else {
#pragma unroll
      for (int block = 0; block < Q8_BLOCKS; ++block) {
        // Words of two values of a cell: transposed, row i has the values 2 i and 2 i + 1.
        uint32_t v[4];
        load_matrices_transposed(v, from + block * 32);
        const uint32_t lower = v_scales.pair(0, block), upper = v_scales.pair(1, block);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t left[4] = {
              multiply_halves(to_halves<0x4240>(v[step]), lower), multiply_halves(to_halves<0x4341>(v[step]), lower),
              multiply_halves(to_halves<0x4240>(v[step + 2]), upper),
              multiply_halves(to_halves<0x4341>(v[step + 2]), upper)};
#pragma unroll
          for (int g = 0; g < GROUPS; ++g) Number::mma(out[g][2 * block + step], left, right[g][0]);
        }
      }
      if (tile + WARPS < end) {
        v_scales.load(cells, a.layer, 1, kv_head, (tile + WARPS) * TILE, position, new_scales + Shape::SCALES_BYTES,
                      lane);
      }
    }
    __syncwarp();
    tiles.copy(tile + stages * WARPS, 1, stage);
    stage = stage + 1 < stages ? stage + 1 : 0;
  }

  // The warps' results, into their rings: float32 [HEADS][OUT_ROW].
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    float sum = weights[g];
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    if (t == 0) sums[warp * HEADS + 8 * g + lane / 4] = make_float2(largest[g], sum);
    float* to = reinterpret_cast<float*>(ring) + (8 * g + 2 * t) * Shape::OUT_ROW;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int first = 16 * step + (Q8 ? lane / 4 * 2 : lane / 4), second = first + (Q8 ? 1 : 8);
      to[first] = out[g][step][0];
      to[Shape::OUT_ROW + first] = out[g][step][1];
      to[second] = out[g][step][2];
      to[Shape::OUT_ROW + second] = out[g][step][3];
    }
  }
  __syncthreads();

  // Four values a thread.
  constexpr int QUADS = DIM / 4;
  const int n_quads = group * QUADS;
  const int64_t head_at = static_cast<int64_t>(kv_head) * group;
  uint32_t* const counter = reinterpret_cast<uint32_t*>(a.workspace) + kv_head;
  // [n_heads][n_splits][QUADS] and [n_heads][n_splits]
  float4* const parts = reinterpret_cast<float4*>(a.workspace + (gridDim.x * 4 + 15) / 16 * 16);
  float2* const part_sums = reinterpret_cast<float2*>(parts + static_cast<int64_t>(a.n_heads) * n_splits * QUADS);
  for (int first = 0; first < n_quads; first += Shape::THREADS) {
    const int quad = first + threadIdx.x, head = quad / QUADS;
    const bool valid = quad < n_quads;
    float total_largest = minus_infinity(), total = 0.0f;
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (valid) {  // a warp without tiles has zeros
      float2 sum[WARPS];
      float4 part[WARPS];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        sum[w] = sums[w * HEADS + head];
        const float* from = reinterpret_cast<const float*>(shared + w * ring_bytes) + head * Shape::OUT_ROW;
        part[w] = reinterpret_cast<const float4*>(from)[quad % QUADS];
        total_largest = fmaxf(total_largest, sum[w].x);
      }
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float factor = exp2_fast(sum[w].x - total_largest);
        total += factor * sum[w].y;
        value.x += factor * part[w].x;
        value.y += factor * part[w].y;
        value.z += factor * part[w].z;
        value.w += factor * part[w].w;
      }
    }
    if (splits.active == 1) {
      const float inverse = __fdividef(1.0f, total);
      const float result[4] = {value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse};
      a.out.store_quad(static_cast<int>(head_at * QUADS) + quad, result, 0.0f, valid);
    } else if (valid) {
      const int64_t part = (head_at + head) * n_splits + split;
      parts[part * QUADS + quad % QUADS] = value;
      if (quad % QUADS == 0) part_sums[part] = make_float2(total_largest, total);
    }
  }
  if (splits.active == 1) return;

  // The last block of the K/V head adds the blocks up, in their order.
  __syncthreads();
  int is_last = 0;
  if (threadIdx.x == 0) {
    is_last = count_arrival(counter) == static_cast<uint32_t>(splits.active) - 1u;
    if (is_last) *counter = 0;
  }
  if (!__syncthreads_or(is_last)) return;
  // A quad's parts are asked for before it is known what they are worth.
  constexpr int BATCH = 17;
  float4 some[BATCH];
  const auto ask = [&](int quad, int first_part) {
    const float4* from = parts + ((head_at + quad / QUADS) * n_splits + first_part) * QUADS + quad % QUADS;
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const bool exists = quad < n_quads && first_part + i < splits.active;
      some[i] = exists ? __ldcg(from + i * QUADS) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  };
  ask(threadIdx.x, 0);
  float* const worth = reinterpret_cast<float*>(shared);  // [group][active], in place of the tiles
  for (int head = warp; head < group; head += WARPS) {
    const float2* from = part_sums + (head_at + head) * n_splits;
    float* const factors = worth + head * splits.active;
    float mine = minus_infinity(), total = 0.0f;
#pragma unroll 4
    for (int part = lane; part < splits.active; part += 32) {
      const float2 sum = __ldcg(from + part);
      const float now = fmaxf(mine, sum.x);
      total = total * exp2_fast(mine - now) + sum.y * exp2_fast(sum.x - now);
      mine = now;
      factors[part] = sum.x;
    }
    float all = mine;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) all = fmaxf(all, __shfl_xor_sync(ALL_LANES, all, offset));
    total *= exp2_fast(mine - all);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(ALL_LANES, total, offset);
    const float inverse = __fdividef(1.0f, total);
    for (int part = lane; part < splits.active; part += 32) factors[part] = exp2_fast(factors[part] - all) * inverse;
  }
  __syncthreads();
  for (int quad = threadIdx.x; quad - static_cast<int>(threadIdx.x) < n_quads; quad += Shape::THREADS) {
    float result[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int first = 0; first < splits.active; first += BATCH) {
      if (first > 0 || quad >= Shape::THREADS) ask(quad, first);
      const float* factors = worth + quad / QUADS * splits.active + first;
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (quad >= n_quads || first + i >= splits.active) continue;
        const float factor = factors[i];
        result[0] += factor * some[i].x;
        result[1] += factor * some[i].y;
        result[2] += factor * some[i].z;
        result[3] += factor * some[i].w;
      }
    }
    a.out.store_quad(static_cast<int>(head_at * QUADS) + quad, result, 0.0f, quad < n_quads);
  }
}

}  // namespace strata

#define ATTEND(NAME, KV, DIM, HEADS)                               \
  extern "C" __global__ void ATTEND_BOUNDS(KV, DIM, HEADS)         \
      attend_##NAME##_##DIM##_##HEADS(strata::AttendArguments a) { \
    strata::attend<strata::KV, DIM, HEADS>(a);                     \
  }
