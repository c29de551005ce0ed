// Matrix products for one token of each of several sequences: dense ones, and those of the routed experts.
// docs/kernels.md tells how the kernels follow each other; batch_tile.cuh how a warp multiplies.
//
// matmul_rows   y = x W^T                                          reference.matmul
// gate_up_rows  h = silu(W_gate x) * (W_up x), by expert           reference.expert_ffn
// down_rows     y = W_down h, by expert                            reference.expert_ffn
//
// Shapes: x and h float16, matrices as GGUF lays them out, y float32, all row by row but for x of matmul_rows, aligned to 16
// bytes. Rows are multiples of 32 values and of the types' block sizes; d_model is a multiple of 32, d_expert of 16.
// `groups` as route_rows leaves them.
// h is HIDDEN_SCALE times what it stands for: so it reaches as far as a million.
// Launch geometry: stands at each kernel; blocks of 256 threads. Dynamic shared memory: that of strata_kernels.batch, for
// rows that are copied there, whole and at once, and multiplied when they have come; batch_matmul_in_place.cu has the same
// kernels for matrices that do not suit it, and needs none.
// Accumulation: float32, of products of float16; by warp, then over the warps, in an order that depends on the shapes
// alone. A token's results do not depend on the tokens beside it.
#include "batch_tile.cuh"
#include "prompt_groups.cuh"

namespace strata {

constexpr float HIDDEN_SCALE = 1.0f / 16.0f;
constexpr int EXPERT_STRIPS = 2;                           // of a block over experts
constexpr int EXPERT_PARTS = BATCH_WARPS / EXPERT_STRIPS;  // warps that share a strip's columns
constexpr int STAGES_MAX = 4;                              // items of a block over experts that are on their way or there
constexpr int DENSE_EIGHTS = 2;                            // of tokens, for which weights are decoded once

// Where rows are that were asked for, as one thread tells the others: in shared memory, and then so that the compiler
// knows it, or where they lie.
struct StripPlace {
#ifdef STRATA_IN_PLACE
  const uint8_t* at;

  __device__ __forceinline__ StripPlace(const uint8_t* rows, const uint8_t*) : at(rows) {}
  __device__ __forceinline__ const uint8_t* find(const uint8_t*) const { return at; }
#else
  uint32_t at;

  __device__ __forceinline__ StripPlace(const uint8_t* rows, const uint8_t* memory)
      : at(static_cast<uint32_t>(rows - memory)) {}
  __device__ __forceinline__ const uint8_t* find(const uint8_t* memory) const { return memory + at; }
#endif
  StripPlace() = default;
};

// What a block over experts does at a time: some rows of one expert's matrices, for all of its tokens.
struct ExpertItem {
  GroupTile tile;
  int32_t first_row;
  StripPlace strips[EXPERT_STRIPS];
};

// Waits until the oldest of `stages` groups of copies has arrived.
__device__ __forceinline__ void wait_for_oldest(int stages) {
  if (stages == 1) {
    wait_for_copies<0>();
  } else if (stages == 2) {
    wait_for_copies<1>();
  } else if (stages == 3) {
    wait_for_copies<2>();
  } else {
    wait_for_copies<3>();
  }
}

// Shares items 0 .. n_items - 1 among all blocks. `ask(item number, stage)` begins to copy an item and returns it, in every
// thread; `stages` of them are ahead, `stage_bytes` of memory apart. `before()` is called once when the first are asked for;
// `compute(item)` for each that has come: it ends with a barrier.
template <typename Ask, typename Before, typename Compute>
__device__ __forceinline__ void each_item(uint8_t* memory, int stages, int stage_bytes, int n_items, Ask ask,
                                          Before before, Compute compute) {
  __shared__ ExpertItem items[STAGES_MAX];
  const auto begin = [&](int item, int stage) {
    if (item < n_items) {
      const ExpertItem found = ask(item, Stage{memory + stage * stage_bytes});
      if (threadIdx.x == 0) items[stage] = found;
    }
    commit_copies();
  };
  const int step = gridDim.x;
  for (int stage = 0; stage < stages; ++stage) begin(blockIdx.x + stage * step, stage);
  before();
  int stage = 0;
#pragma unroll 1
  for (int item = blockIdx.x; item < n_items; item += step) {
    wait_for_oldest(stages);
    __syncthreads();
    compute(items[stage]);
    begin(item + stages * step, stage);
    stage = stage + 1 < stages ? stage + 1 : 0;
  }
}

}  // namespace strata

using namespace strata;

// y float32 [n][y_stride] = x W^T for the rows of up to three matrices, one after the other; with `add`, y += x W^T.
// Matrices that are not there have no rows. x lies in eights (eights.cuh), with room for whole 16 rows, whatever is there.
// Launch: sum of ceil(rows / 16) blocks.
extern "C" __global__ void __launch_bounds__(BATCH_THREADS, 2)
    matmul_rows(const __half* x, Matrix first, Matrix second, Matrix third, float* y, int n, int k, int y_stride,
                int add) {
  DYNAMIC_SHARED(shared);
  __shared__ SumsOfWarps<DENSE_EIGHTS> of_warps;
  int block = blockIdx.x, column = 0;
  Matrix m = first;
  if (block >= (m.rows + STRIP_ROWS - 1) / STRIP_ROWS) {
    block -= (m.rows + STRIP_ROWS - 1) / STRIP_ROWS;
    column += m.rows;
    m = second;
    if (block >= (m.rows + STRIP_ROWS - 1) / STRIP_ROWS) {
      block -= (m.rows + STRIP_ROWS - 1) / STRIP_ROWS;
      column += m.rows;
      m = third;
    }
  }
  const int first_row = block * STRIP_ROWS, count = min(STRIP_ROWS, m.rows - first_row);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const int64_t stride = row_bytes<F>(k);
    const uint8_t* strip = Stage{shared}.ask(m.blocks + first_row * stride, count * stride, threadIdx.x, BATCH_THREADS);
    commit_copies();
    wait_for_previous();
    let_next_start();
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll 1
    for (int begin = 0; begin < n; begin += DENSE_EIGHTS * EIGHT) {
      const __half* tokens[DENSE_EIGHTS];
#pragma unroll
      for (int eight = 0; eight < DENSE_EIGHTS; ++eight) tokens[eight] = x + place_in_eights(begin + eight * EIGHT + g, 0, k);
      FewSums<DENSE_EIGHTS> sums;
      multiply_few<F, EIGHT>(strip, count, k, warp, BATCH_WARPS, tokens, sums);
      of_warps.store(sums);
      __syncthreads();
      static_assert(DENSE_EIGHTS * EIGHT * STRIP_ROWS == BATCH_THREADS, "a result for each thread");
      const int token = threadIdx.x / STRIP_ROWS, row = threadIdx.x % STRIP_ROWS;
      if (begin + token < n && row < count) {
        const float sum = of_warps.add<BATCH_WARPS>(0, token, row);
        float* at = y + static_cast<int64_t>(begin + token) * y_stride + column + first_row + row;
        *at = add ? *at + sum : sum;
      }
      __syncthreads();
    }
  });
}

// h float16 [n * top_k][d_expert] = HIDDEN_SCALE * silu(W_gate x) * (W_up x), in the order of the groups' rows.
// `addresses` uint64 [n_experts][3]: gate, up and down of the layer's experts.
// Launch: any number of blocks; they share the strips of 16 rows of all chosen experts. `stages` times `stage_bytes` of shared
// memory.
extern "C" __global__ void __launch_bounds__(BATCH_THREADS, 2)
    gate_up_rows(const __half* x, Groups groups, const uint64_t* addresses, int gate_type, int up_type, __half* h,
                 int n_experts, int top_k, int d_model, int d_expert, int stages, int stage_bytes) {
  DYNAMIC_SHARED(shared);
  __shared__ SumsOfWarps<1> of_warps;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int matrix = warp / EXPERT_PARTS, type = matrix == 0 ? gate_type : up_type;
  const int64_t gate_stride = row_bytes(gate_type, d_model), up_stride = row_bytes(up_type, d_model);
  const int n_strips = d_expert / STRIP_ROWS;
  wait_for_previous();
  let_next_start();
  const auto ask = [&](int item, Stage stage) {
    const GroupTile tile = groups.tiles[item / n_strips];
    const int first_row = item % n_strips * STRIP_ROWS;
    const auto strip = [&](int which, int64_t stride) {
      const uint8_t* from = reinterpret_cast<const uint8_t*>(addresses[3 * tile.expert + which]) + first_row * stride;
      return stage.ask(from, STRIP_ROWS * stride, threadIdx.x, BATCH_THREADS);
    };
    const uint8_t* gates = strip(0, gate_stride);
    return ExpertItem{tile, first_row, {{gates, shared}, {strip(1, up_stride), shared}}};
  };
  const auto compute = [&](const ExpertItem& item) {
    const int count = item.tile.count, first_row_of_tile = item.tile.first_row;
    const uint8_t* strip = item.strips[matrix].find(shared);
#pragma unroll 1
    for (int begin = 0; begin < count; begin += EIGHT) {
      const int pair = groups.pairs[first_row_of_tile + min(begin + g, count - 1)];
      const __half* const tokens[1] = {x + static_cast<int64_t>(pair / top_k) * d_model};
      FewSums<1> sums;
      with_type(type, [&](auto format) {
        multiply_few<decltype(format), 1>(strip, STRIP_ROWS, d_model, warp % EXPERT_PARTS, EXPERT_PARTS, tokens,
                                       sums);
      });
      of_warps.store(sums);
      __syncthreads();
      const int token = begin + threadIdx.x / STRIP_ROWS, row = threadIdx.x % STRIP_ROWS;
      if (threadIdx.x < EIGHT * STRIP_ROWS && token < count) {
        const float gate = of_warps.add<EXPERT_PARTS>(0, token - begin, row);
        const float up = of_warps.add<EXPERT_PARTS>(EXPERT_PARTS, token - begin, row);
        const float value = HIDDEN_SCALE * (__fdividef(gate, 1.0f + expf(-gate)) * up);
        h[static_cast<int64_t>(first_row_of_tile + token) * d_expert + item.first_row + row] =
            __float2half_rn(clamp_to_half(value));
      }
      __syncthreads();
    }
  };
  each_item(shared, stages, stage_bytes, groups.first_tiles[n_experts] * n_strips, ask, [] {}, compute);
}

// y float32 [n * top_k][d_model] = W_down h, by pair: token * top_k + rank.
// Launch: any number of blocks; they share the strips of 32 rows of all chosen experts. Shared memory as for gate_up_rows.
extern "C" __global__ void __launch_bounds__(BATCH_THREADS, 2)
    down_rows(const __half* h, Groups groups, const uint64_t* addresses, int type, float* y, int n_experts, int d_model,
              int d_expert, int stages, int stage_bytes) {
  DYNAMIC_SHARED(shared);
  __shared__ SumsOfWarps<1> of_warps;
  constexpr int ROWS = EXPERT_STRIPS * STRIP_ROWS;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, mine = warp / EXPERT_PARTS;
  const int64_t stride = row_bytes(type, d_expert);
  const int n_strips = d_model / ROWS;
  const auto ask = [&](int item, Stage stage) {
    const GroupTile tile = groups.tiles[item / n_strips];  // two kernels old: nothing to wait for
    const int first_row = item % n_strips * ROWS;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(addresses[3 * tile.expert + 2]) + first_row * stride;
    const uint8_t* strip = stage.ask(from, ROWS * stride, threadIdx.x, BATCH_THREADS);
    return ExpertItem{tile, first_row, {{strip, shared}, {strip + STRIP_ROWS * stride, shared}}};
  };
  const auto before = [] {
    wait_for_previous();
    let_next_start();
  };
  const auto compute = [&](const ExpertItem& item) {
    const int count = item.tile.count, first_row_of_tile = item.tile.first_row;
    const uint8_t* strip = item.strips[mine].find(shared);
#pragma unroll 1
    for (int begin = 0; begin < count; begin += EIGHT) {
      const __half* const tokens[1] = {h + static_cast<int64_t>(first_row_of_tile + min(begin + g, count - 1)) * d_expert};
      FewSums<1> sums;
      with_type(type, [&](auto format) {
        multiply_few<decltype(format), 1>(strip, STRIP_ROWS, d_expert, warp % EXPERT_PARTS, EXPERT_PARTS, tokens,
                                       sums);
      });
      of_warps.store(sums);
      __syncthreads();
      const int half = threadIdx.x / (EIGHT * STRIP_ROWS), row = threadIdx.x % STRIP_ROWS;
      const int token = begin + threadIdx.x / STRIP_ROWS % EIGHT;
      if (token < count) {
        const float sum = of_warps.add<EXPERT_PARTS>(half * EXPERT_PARTS, token - begin, row);
        const int64_t pair = groups.pairs[first_row_of_tile + token];
        y[pair * d_model + item.first_row + half * STRIP_ROWS + row] = sum * (1.0f / HIDDEN_SCALE);
      }
      __syncthreads();
    }
  };
  each_item(shared, stages, stage_bytes, groups.first_tiles[n_experts] * n_strips, ask, before, compute);
}
