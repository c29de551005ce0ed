// One token through the layers of Qwen3-MoE, attention apart (attend.cu): docs/kernels.md tells how the kernels follow
// each other and what an Activation is.
//
// embed       x = a row of the embedding                                    reference.embedding
// qkv         q, k, v = W h                                                 reference.matmul
// attend_out  x += W a                                                      reference.matmul
// route       scores = W h                                                  reference.matmul
// gate_up     silu(W_gate h) * (W_up h) of the chosen experts               reference.router, reference.expert_ffn
// down        x += sum over the chosen experts of weight * W_down g         reference.expert_ffn
// head        logits = W h                                                  reference.matmul
//
// where h is RMS-normed x (reference.rms_norm), as an activation of x * norm weight and the factor from its squares.
// Shapes: x float32 [d_model]; matrices as GGUF lays them out, rows of blocks. d_model, d_expert and n_heads * head_dim
// are multiples of 32 and of the types' block sizes.
// Launch geometry: stands at each kernel; all blocks are of one dimension. A block takes 16 rows, a group of an
// activation, and a warp two of them. Dynamic shared memory: that of strata_kernels.decode; decode_in_place.cu has the
// same kernels for matrices that do not suit it, and needs none.
// Accumulation: float32 over a row; integers are summed exactly within a run of a block.
#include "activation.cuh"
#include "heat.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "routing.cuh"
#include "step.cuh"

// Registers: so few that blocks of the next kernel find room beside these; in place, enough to have loads in flight.
#ifdef STRATA_IN_PLACE
#define ROWS_BOUNDS __launch_bounds__(256, 2)
#define GATE_UP_BOUNDS __launch_bounds__(256, 2)
#else
#define ROWS_BOUNDS __launch_bounds__(256, 4)
#define GATE_UP_BOUNDS __launch_bounds__(1024, 1)
#endif

namespace strata {

// The group of an activation that a block's 16 results are, from shared memory; for one thread.
// `weights` are the norm's, float32, or null.
__device__ __forceinline__ void store_group(const Activation& out, int group, const float* results,
                                            const float* weights) {
  float values[ACTIVATION_GROUP];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < ACTIVATION_GROUP; ++i) {
    const float v = results[i];
    square += v * v;
    values[i] = weights == nullptr ? v : v * weights[i];
  }
  out.store(group, values, square);
}

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// The group of an activation that a block's 16 results are, from shared memory; for its first warp. `square` is that of
// lane % 16, to be summed up.
__device__ __forceinline__ void store_results(const Activation& out, int group, float value, float square) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, offset);
  out.store_lane(group, value, square);
}

}  // namespace strata

using namespace strata;

// x float32 [d_model] = row `step->token` of the table; out = the activation of x * weight.
// Launch: 1 block of 256 threads, d_model * 4 bytes of shared memory.
extern "C" __global__ void __launch_bounds__(256)
    embed(Matrix table, const Step* step, float* x, const float* weight, Activation out, int d_model) {
  DYNAMIC_SHARED(shared);
  float* row = reinterpret_cast<float*>(shared);
  wait_for_previous();
  let_next_start();
  const int token = step->token;
  if (token < 0 || token >= table.rows) return;  // a sampler's word that the logits are not finite
  with_type(table.type, [&](auto format) {
    using F = decltype(format);
    const uint8_t* blocks = table.blocks + token * row_bytes<F>(d_model);
    for (int i = threadIdx.x; i < d_model / F::VALUES; i += blockDim.x) {
      float values[F::VALUES];
      const int group = i % F::GROUPS;
      dequantize_group<F>(blocks + static_cast<int64_t>(i / F::GROUPS) * F::BLOCK_BYTES, group, values, F::grid());
      float* to = row + i / F::GROUPS * F::BLOCK_VALUES + F::first(group);
#pragma unroll
      for (int run = 0; run < F::RUNS; ++run) {
#pragma unroll
        for (int j = 0; j < F::RUN; ++j) to[run * F::STRIDE + j] = values[run * F::RUN + j];
      }
    }
  });
  __syncthreads();
  for (int group = threadIdx.x; group < d_model / ACTIVATION_GROUP; group += blockDim.x) {
    const float* values = row + ACTIVATION_GROUP * group;
    for (int i = 0; i < ACTIVATION_GROUP; ++i) x[ACTIVATION_GROUP * group + i] = values[i];
    store_group(out, group, values, weight + ACTIVATION_GROUP * group);
  }
}

// out float32 [q.rows + k.rows + v.rows] = rms * (W a). Rows come in even numbers.
// Launch: ceil(rows / 16) blocks of 256 threads.
extern "C" __global__ void ROWS_BOUNDS
    qkv(Activation a, Matrix q, Matrix k, Matrix v, float* out, int n, float eps) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, at = ACTIVATION_GROUP * blockIdx.x + PAIR * warp;
  int row = at;
  Matrix m = q;
  if (row >= m.rows) {
    row -= m.rows;
    m = k;
    if (row >= m.rows) {
      row -= m.rows;
      m = v;
    }
  }
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const int64_t stride = row_bytes<F>(n);
    const bool exists = row < m.rows;
    const uint8_t* rows = nullptr;
    if (exists) rows = Stage{shared + warp * room_of(PAIR * stride)}.ask(m.blocks + row * stride, PAIR * stride);
    commit_copies();
    wait_for_previous();
    let_next_start();
    if (!exists) return;
    const float rms = inverse_rms(a, n, eps);
    wait_for_rows<0>();
    float sums[PAIR] = {0.0f, 0.0f};
    multiply<F>(rows, stride, n, threadIdx.x % 32, a, sums);
    const float2 result = make_float2(rms * warp_sum(sums[0]), rms * warp_sum(sums[1]));
    if (threadIdx.x % 32 == 0) *reinterpret_cast<float2*>(out + at) = result;
  });
}

// x float32 [m.rows] += W a; out = the activation of x * weight.
// Launch: m.rows / 16 blocks of 256 threads.
extern "C" __global__ void ROWS_BOUNDS
    attend_out(Activation a, Matrix m, float* x, const float* weight, Activation out, int n) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(8) float results[ACTIVATION_GROUP];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = ACTIVATION_GROUP * blockIdx.x, mine = PAIR * warp;
  const float norm = weight[first + lane % ACTIVATION_GROUP];
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const int64_t stride = row_bytes<F>(n);
    Stage stage{shared + warp * room_of(PAIR * stride)};
    const uint8_t* rows = stage.ask(m.blocks + (first + mine) * stride, PAIR * stride);
    commit_copies();
    wait_for_previous();
    let_next_start();
    const float2 before = *reinterpret_cast<const float2*>(x + first + mine);
    wait_for_rows<0>();
    float sums[PAIR] = {0.0f, 0.0f};
    multiply<F>(rows, stride, n, lane, a, sums);
    const float2 after = make_float2(before.x + warp_sum(sums[0]), before.y + warp_sum(sums[1]));
    if (lane == 0) {
      *reinterpret_cast<float2*>(results + mine) = after;
      *reinterpret_cast<float2*>(x + first + mine) = after;
    }
  });
  __syncthreads();
  if (mine != 0) return;
  const float result = results[lane % ACTIVATION_GROUP];
  store_results(out, blockIdx.x, result * norm, result * result);
}

// scores float32 [m.rows] = rms * (W a), in the order of sums that a row of floats has.
// Launch: m.rows blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(128) route(Activation a, Matrix m, float* scores, int n, float eps) {
  DYNAMIC_SHARED(shared);
  __shared__ float sums_of_warps[4];
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const int64_t stride = row_bytes<F>(n);
    const uint8_t* row = Stage{shared}.ask(m.blocks + blockIdx.x * stride, stride, threadIdx.x, blockDim.x);
    commit_copies();
    wait_for_previous();
    let_next_start();
    wait_for_copies<0>();
    __syncthreads();
    float sums[1] = {0.0f};
    multiply<F, 1, 128>(row, 0, n, threadIdx.x, a, sums);
    const float sum = warp_sum(sums[0]);
    if (threadIdx.x % 32 == 0) sums_of_warps[threadIdx.x / 32] = sum;
  });
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const float rms = inverse_rms(a, n, eps);
  if (threadIdx.x == 0) {
    scores[blockIdx.x] = rms * (sums_of_warps[0] + sums_of_warps[1] + sums_of_warps[2] + sums_of_warps[3]);
  }
}

// out = the activation of silu(rms * W_gate a) * (rms * W_up a), for each chosen expert [top_k, d_expert].
// `addresses` uint64 [n_experts][3]: gate, up and down of the layer's experts.
// Launch: (d_expert / rows, top_k) blocks of 16 threads for each of their rows, 16 to 64, or 16 in place. So few blocks as there are
// multiprocessors are shared among them evenly, whatever runs there when they come.
extern "C" __global__ void GATE_UP_BOUNDS
    gate_up(Activation a, const float* scores, const uint64_t* addresses, Activation out, Heat heat, int n_experts,
            int top_k, int gate_type, int up_type, int n, int d_expert, float eps) {
  DYNAMIC_SHARED(shared);
  __shared__ Routing routing;
  __shared__ __align__(8) float products[2][64];
  __shared__ const uint8_t* blocks[2];
  constexpr int MINE = EXPERTS_MAX / 256;  // experts whose addresses a thread keeps until one is chosen
  uint64_t gates[MINE], ups[MINE];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int expert = threadIdx.x + 256 * i;
    if (threadIdx.x < 256 && expert < n_experts) {
      gates[i] = addresses[3 * expert];
      ups[i] = addresses[3 * expert + 1];
    }
  }
  // The activation is two kernels old: nothing to wait for.
  Stage stage{shared};
  const Activation near = ask_activation(stage, a, n);
  commit_copies();
  const float rms = inverse_rms(a, n, eps);
  const int64_t gate_stride = row_bytes(gate_type, n), up_stride = row_bytes(up_type, n);
  const int n_rows = blockDim.x / 16, first = n_rows * blockIdx.x;
  wait_for_copies<0>();  // whoever passes one of the barriers in `choose` has all of it
  wait_for_previous();
  let_next_start();
  routing.choose(scores, n_experts, top_k);
  const int expert = routing.experts[blockIdx.y];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (threadIdx.x < 256 && threadIdx.x + 256 * i == expert) {
      blocks[0] = reinterpret_cast<const uint8_t*>(gates[i]);
      blocks[1] = reinterpret_cast<const uint8_t*>(ups[i]);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = PAIR * warp;
  stage.place += warp * (room_of(PAIR * gate_stride) + room_of(PAIR * up_stride));
  const uint8_t* rows[2];
  rows[0] = stage.ask(blocks[0] + (first + mine) * gate_stride, PAIR * gate_stride);
  commit_copies();
  rows[1] = stage.ask(blocks[1] + (first + mine) * up_stride, PAIR * up_stride);
  commit_copies();
  if (blockIdx.x == 0 && threadIdx.x == 0 && heat.counts != nullptr) {
    const uint64_t count = heat.counts[expert] + 1;
    heat.counts[expert] = count;
    heat.shared[expert] = count;
  }
#pragma unroll
  for (int matrix = 0; matrix < 2; ++matrix) {
    if (matrix == 0) {
      wait_for_rows<1>();
    } else {
      wait_for_rows<0>();
    }
    with_type(matrix == 0 ? gate_type : up_type, [&](auto format) {
      using F = decltype(format);
      const int64_t stride = row_bytes<F>(n);
      float sums[PAIR] = {0.0f, 0.0f};
      multiply<F>(rows[matrix], stride, n, lane, near, sums);
      const float2 found = make_float2(rms * warp_sum(sums[0]), rms * warp_sum(sums[1]));
      if (lane == 0) *reinterpret_cast<float2*>(products[matrix] + mine) = found;
    });
  }
  __syncthreads();
  // A warp for each group of 16 results.
  const int at = ACTIVATION_GROUP * warp + lane % ACTIVATION_GROUP;
  if (ACTIVATION_GROUP * warp >= n_rows) return;
  const float result = silu(products[0][at]) * products[1][at];
  store_results(out, (blockIdx.y * d_expert + first) / ACTIVATION_GROUP + warp, result, result * result);
}

// x float32 [d_model] += sum over the ranks of weight * (W_down a[rank]); out = the activation of x * weight.
// Launch: d_model / 16 blocks of 256 threads.
extern "C" __global__ void ROWS_BOUNDS
    down(Activation a, const float* scores, const uint64_t* addresses, float* x, const float* weight, Activation out,
         int n_experts, int top_k, int type, int d_expert) {
  DYNAMIC_SHARED(shared);
  __shared__ Routing routing;
  __shared__ const uint8_t* experts[TOP_K_MAX];
  __shared__ __align__(8) float results[ACTIVATION_GROUP];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = ACTIVATION_GROUP * blockIdx.x, mine = PAIR * warp;
  const float norm = weight[first + lane % ACTIVATION_GROUP];
  routing.choose(scores, n_experts, top_k);  // two kernels old: nothing to wait for
  if (threadIdx.x < top_k) {
    experts[threadIdx.x] = reinterpret_cast<const uint8_t*>(addresses[3 * routing.experts[threadIdx.x] + 2]);
  }
  __syncthreads();
  with_type(type, [&](auto format) {
    using F = decltype(format);
    // The ranks in two halves, so that the first is multiplied while the second arrives.
    const int64_t stride = row_bytes<F>(d_expert);
    const int row_groups = d_expert / F::VALUES, half = (top_k + 1) / 2;
    const float inverse = 1.0f / static_cast<float>(row_groups);
    const uint32_t room = room_of(PAIR * stride);
    Stage stage{shared + warp * top_k * room};
    for (int rank = 0; rank < top_k; ++rank) {
      stage.ask(experts[rank] + (first + mine) * stride, PAIR * stride);
      if (rank == half - 1) commit_copies();
    }
    commit_copies();
    wait_for_previous();
    let_next_start();
    const float2 before = *reinterpret_cast<const float2*>(x + first + mine);
    float sums[PAIR] = {0.0f, 0.0f};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 0) {
        wait_for_rows<1>();
      } else {
        wait_for_rows<0>();
      }
      const int end = (part == 0 ? half : top_k) * row_groups;
#pragma unroll 1
      for (int at = part * half * row_groups + lane; at < end; at += 32) {
        const int rank = static_cast<int>((static_cast<float>(at) + 0.5f) * inverse), group = at - rank * row_groups;
        const int in_block = group % F::GROUPS, block = group / F::GROUPS;
        const ActivationPart<F> values(a, rank * d_expert + block * F::BLOCK_VALUES + F::first(in_block));
#ifdef STRATA_IN_PLACE
        const uint8_t* row = experts[rank] + (first + mine) * stride + block * F::BLOCK_BYTES;
#else  // experts are aligned to 16
        const uint8_t* row = shared + (warp * top_k + rank) * room + (first + mine) * stride % 16 + block * F::BLOCK_BYTES;
#endif
        const float weight_of_rank = routing.weights[rank];
#pragma unroll
        for (int r = 0; r < PAIR; ++r) {
          sums[r] += weight_of_rank * dot<F>(F::load(row + r * stride, in_block), in_block, F::grid(), values);
        }
      }
    }
    const float2 after = make_float2(before.x + warp_sum(sums[0]), before.y + warp_sum(sums[1]));
    if (lane == 0) {
      *reinterpret_cast<float2*>(results + mine) = after;
      *reinterpret_cast<float2*>(x + first + mine) = after;
    }
  });
  __syncthreads();
  if (mine != 0) return;
  const float result = results[lane % ACTIVATION_GROUP];
  store_results(out, blockIdx.x, result * norm, result * result);
}

// logits float32 [m.rows] = rms * (W a).
// Launch: ceil(m.rows / 16) blocks of 256 threads.
extern "C" __global__ void ROWS_BOUNDS head(Activation a, Matrix m, float* logits, int n, float eps) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, row = ACTIVATION_GROUP * blockIdx.x + PAIR * warp;
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const int64_t stride = row_bytes<F>(n);
    const int n_rows = min(PAIR, m.rows - row);
    const uint8_t* rows = nullptr;
    if (n_rows > 0) rows = Stage{shared + warp * room_of(PAIR * stride)}.ask(m.blocks + row * stride, n_rows * stride);
    commit_copies();
    wait_for_previous();
    let_next_start();
    if (n_rows <= 0) return;
    const float rms = inverse_rms(a, n, eps);
    wait_for_rows<0>();
    const bool both = n_rows == PAIR;
    float sums[PAIR] = {0.0f, 0.0f};
    multiply<F>(rows, both ? stride : 0, n, threadIdx.x % 32, a, sums);
    const float one = rms * warp_sum(sums[0]), other = rms * warp_sum(sums[1]);
    if (threadIdx.x % 32 == 0) {
      logits[row] = one;
      if (both) logits[row + 1] = other;
    }
  });
}

// Ends a step that chose no token: `n` cells further, and retired.
// Launch: 1 block of 32 threads.
extern "C" __global__ void end_step(Step* step, int n, uint64_t* retired) {
  wait_for_previous();
  if (threadIdx.x != 0) return;
  step->position += n;
  const uint64_t number = step->number;
  step->number = number + 1;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(retired) = number;
}

// table float2 [head_dim / 2]: cosine and sine of the angles that the step's position turns q and k by.
// Must match: strata_kernels.reference.rope.
// Launch: 1 block of head_dim / 2 threads.
extern "C" __global__ void rope_table(float2* table, const Step* step, double freq_base, double scale, int head_dim) {
  wait_for_previous();
  let_next_start();
  const int pair = threadIdx.x;
  table[pair] = turn_of(step->position, pair, freq_base, scale, head_dim);
}
