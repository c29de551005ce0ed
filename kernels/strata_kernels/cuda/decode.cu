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
// Launch geometry: stands at each kernel; all blocks are of one dimension. One warp takes one row or two; a block whose
// output is an activation has 16 rows, a group of it.
// Accumulation: float32 over a row; integers are summed exactly within a run of a block.
#include "activation.cuh"
#include "rows.cuh"
#include "routing.cuh"
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

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// The products of two neighbouring rows with an activation, by one warp.
template <typename F>
__device__ __forceinline__ float2 two_rows(const uint8_t* first, int n, const Activation& a) {
  Rows<F, 2, 64> rows(n, threadIdx.x % 32);
  rows.row[0] = first;
  rows.row[1] = first + row_bytes<F>(n);
  rows.load();
  float sums[2] = {0.0f, 0.0f};
  rows.multiply(a, sums);
  return make_float2(warp_sum(sums[0]), warp_sum(sums[1]));
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
extern "C" __global__ void __launch_bounds__(256, 3)
    qkv(Activation a, Matrix q, Matrix k, Matrix v, float* out, int n, float eps) {
  const int at = 2 * (blockIdx.x * 8 + threadIdx.x / 32);
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
  if (row >= m.rows) {
    let_next_start();
    return;
  }
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    Rows<F, 2, 64> rows(n, threadIdx.x % 32);
    rows.row[0] = m.blocks + row * row_bytes<F>(n);
    rows.row[1] = rows.row[0] + row_bytes<F>(n);
    rows.load();
    wait_for_previous();
    let_next_start();
    const float rms = inverse_rms(a, n, eps);
    float sums[2] = {0.0f, 0.0f};
    rows.multiply(a, sums);
    const float2 result = make_float2(rms * warp_sum(sums[0]), rms * warp_sum(sums[1]));
    if (threadIdx.x % 32 == 0) *reinterpret_cast<float2*>(out + at) = result;
  });
}

// x float32 [m.rows] += W a; out = the activation of x * weight.
// Launch: m.rows / 16 blocks of 512 threads.
extern "C" __global__ void __launch_bounds__(512, 1)
    attend_out(Activation a, Matrix m, float* x, const float* weight, Activation out, int n) {
  __shared__ float results[ACTIVATION_GROUP];
  const int warp = threadIdx.x / 32, row = blockIdx.x * ACTIVATION_GROUP + warp;
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    Rows<F, 1, 128> rows(n, threadIdx.x % 32);
    rows.row[0] = m.blocks + row * row_bytes<F>(n);
    rows.load();
    wait_for_previous();
    let_next_start();
    const float before = x[row];
    float sums[1] = {0.0f};
    rows.multiply(a, sums);
    const float sum = before + warp_sum(sums[0]);
    if (threadIdx.x % 32 == 0) results[warp] = x[row] = sum;
  });
  __syncthreads();
  if (threadIdx.x == 0) store_group(out, blockIdx.x, results, weight + blockIdx.x * ACTIVATION_GROUP);
}

// scores float32 [m.rows] = rms * (W a), in the order of sums that a row of floats has.
// Launch: m.rows blocks of 128 threads.
extern "C" __global__ void __launch_bounds__(128) route(Activation a, Matrix m, float* scores, int n, float eps) {
  __shared__ float sums_of_warps[4];
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    Rows<F, 1, 64, 128> rows(n, threadIdx.x);
    rows.row[0] = m.blocks + blockIdx.x * row_bytes<F>(n);
    rows.load();
    wait_for_previous();
    let_next_start();
    float sums[1] = {0.0f};
    rows.multiply(a, sums);
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

// Where a layer's experts are counted: uint64 [n_experts] on the device, and in the page that is shared with the daemon,
// which gets the sums of the counts that changed.
struct Heat {
  uint64_t* counts;
  volatile uint64_t* shared;
};

// out = the activation of silu(rms * W_gate a) * (rms * W_up a), for each chosen expert [top_k, d_expert].
// `addresses` uint64 [n_experts][3]: gate, up and down of the layer's experts.
// Launch: (d_expert / 16, top_k) blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(256, 3)
    gate_up(Activation a, const float* scores, const uint64_t* addresses, Activation out, Heat heat, int n_experts,
            int top_k, int gate_type, int up_type, int n, int d_expert, float eps) {
  __shared__ Routing routing;
  __shared__ float products[2][ACTIVATION_GROUP], results[ACTIVATION_GROUP];
  __shared__ uint64_t gates[EXPERTS_MAX], ups[EXPERTS_MAX];
  for (int expert = threadIdx.x; expert < n_experts; expert += blockDim.x) {
    gates[expert] = addresses[3 * expert];
    ups[expert] = addresses[3 * expert + 1];
  }
  const float rms = inverse_rms(a, n, eps);  // two kernels old: nothing to wait for
  wait_for_previous();
  let_next_start();
  routing.choose(scores, n_experts, top_k);
  const int expert = routing.experts[blockIdx.y];
  if (blockIdx.x == 0 && threadIdx.x == 0 && heat.counts != nullptr) {
    const uint64_t count = heat.counts[expert] + 1;
    heat.counts[expert] = count;
    heat.shared[expert] = count;
  }
  const int warp = threadIdx.x / 32;
  const int64_t row = blockIdx.x * ACTIVATION_GROUP + 2 * warp;
#pragma unroll
  for (int matrix = 0; matrix < 2; ++matrix) {
    const uint8_t* blocks = reinterpret_cast<const uint8_t*>(matrix == 0 ? gates[expert] : ups[expert]);
    with_type(matrix == 0 ? gate_type : up_type, [&](auto format) {
      using F = decltype(format);
      const float2 sums = two_rows<F>(blocks + row * row_bytes<F>(n), n, a);
      if (threadIdx.x % 32 == 0) {
        products[matrix][2 * warp] = rms * sums.x;
        products[matrix][2 * warp + 1] = rms * sums.y;
      }
    });
  }
  __syncthreads();
  if (threadIdx.x < ACTIVATION_GROUP) results[threadIdx.x] = silu(products[0][threadIdx.x]) * products[1][threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0) store_group(out, blockIdx.y * (d_expert / ACTIVATION_GROUP) + blockIdx.x, results, nullptr);
}

// x float32 [d_model] += sum over the ranks of weight * (W_down a[rank]); out = the activation of x * weight.
// Launch: d_model / 16 blocks of 512 threads.
extern "C" __global__ void __launch_bounds__(512, 1)
    down(Activation a, const float* scores, const uint64_t* addresses, float* x, const float* weight, Activation out,
         int n_experts, int top_k, int type, int d_expert) {
  __shared__ Routing routing;
  __shared__ const uint8_t* downs[TOP_K_MAX];
  __shared__ float results[ACTIVATION_GROUP];
  routing.choose(scores, n_experts, top_k);  // two kernels old: nothing to wait for
  if (threadIdx.x < top_k) {
    downs[threadIdx.x] = reinterpret_cast<const uint8_t*>(addresses[3 * routing.experts[threadIdx.x] + 2]);
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, row = blockIdx.x * ACTIVATION_GROUP + warp;
  with_type(type, [&](auto format) {
    using F = decltype(format);
    // All groups of the row in all chosen experts, one expert after the other.
    constexpr int FIT = 192 / static_cast<int>(sizeof(typename F::Raw)), BATCH = FIT > 1 ? FIT : 1;
    const int row_groups = d_expert / F::VALUES, n_groups = row_groups * top_k;
    const int64_t offset = row * row_bytes<F>(d_expert);
    typename F::Raw raw[BATCH];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int at = first + 32 * i;
        if (at < n_groups) {
          const int rank = at / row_groups, group = at % row_groups;
          raw[i] = F::load(downs[rank] + offset + static_cast<int64_t>(group / F::GROUPS) * F::BLOCK_BYTES,
                           group % F::GROUPS);
        }
      }
    };
    int first = threadIdx.x % 32;
    load(first);
    wait_for_previous();
    let_next_start();
    const float before = x[row];
    float sum = 0.0f;
    while (true) {
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int at = first + 32 * i;
        if (at < n_groups) {
          const int rank = at / row_groups, group = at % row_groups, in_block = group % F::GROUPS;
          const int value = rank * d_expert + group / F::GROUPS * F::BLOCK_VALUES + F::first(in_block);
          sum += routing.weights[rank] * dot<F>(raw[i], in_block, F::grid(), ActivationPart<F>(a, value));
        }
      }
      first += 32 * BATCH;
      if (first >= n_groups) break;
      load(first);
    }
    sum = before + warp_sum(sum);
    if (threadIdx.x % 32 == 0) results[warp] = x[row] = sum;
  });
  __syncthreads();
  if (threadIdx.x == 0) store_group(out, blockIdx.x, results, weight + blockIdx.x * ACTIVATION_GROUP);
}

// logits float32 [m.rows] = rms * (W a).
// Launch: ceil(m.rows / 16) blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(256, 3) head(Activation a, Matrix m, float* logits, int n, float eps) {
  const int row = 2 * (blockIdx.x * 8 + threadIdx.x / 32);
  if (row >= m.rows) {
    let_next_start();
    return;
  }
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const bool both = row + 1 < m.rows;
    Rows<F, 2, 64> rows(n, threadIdx.x % 32);
    rows.row[0] = m.blocks + row * row_bytes<F>(n);
    rows.row[1] = rows.row[0] + (both ? row_bytes<F>(n) : 0);
    rows.load();
    wait_for_previous();
    let_next_start();
    const float rms = inverse_rms(a, n, eps);
    float sums[2] = {0.0f, 0.0f};
    rows.multiply(a, sums);
    const float first = rms * warp_sum(sums[0]), second = rms * warp_sum(sums[1]);
    if (threadIdx.x % 32 == 0) {
      logits[row] = first;
      if (both) logits[row + 1] = second;
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
// Must match: strata_kernels.reference.rope; angles in float64, as there.
// Launch: 1 block of head_dim / 2 threads.
extern "C" __global__ void rope_table(float2* table, const Step* step, double freq_base, double scale, int head_dim) {
  wait_for_previous();
  let_next_start();
  const int pair = threadIdx.x;
  const double angle = step->position * (scale * exp2(-2.0 * pair / head_dim * log2(freq_base)));
  double sine, cosine;
  sincospi(angle * 0.31830988618379067154, &sine, &cosine);  // in units of pi any angle is reduced exactly
  table[pair] = make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}
