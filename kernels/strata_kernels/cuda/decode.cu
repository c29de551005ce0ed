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
#include "mixture.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "step.cuh"

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
// Launch: as `multiply_gate_up` says.
extern "C" __global__ void GATE_UP_BOUNDS
    gate_up(Activation a, const float* scores, const uint64_t* addresses, Activation out, Heat heat, int n_experts,
            int top_k, int gate_type, int up_type, int n, int d_expert, float eps) {
  DYNAMIC_SHARED(shared);
  multiply_gate_up<true>(shared, a, scores, addresses, out, heat, n_experts, top_k, gate_type, up_type, n, d_expert, eps);
}

// x float32 [d_model] += sum over the ranks of weight * (W_down a[rank]); out = the activation of x * weight.
// Launch: d_model / 16 blocks of 256 threads.
extern "C" __global__ void ROWS_BOUNDS
    down(Activation a, const float* scores, const uint64_t* addresses, float* x, const float* weight, Activation out,
         int n_experts, int top_k, int type, int d_expert) {
  DYNAMIC_SHARED(shared);
  multiply_down<true>(shared, a, scores, addresses, x, weight, out, {}, n_experts, top_k, type, d_expert);
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
