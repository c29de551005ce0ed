// What prompt processing does to the rows of its tokens, between the matrix products.
//
// embed_prompt     x = rows of the embedding                          reference.embedding
// rms_norm_prompt  x / sqrt(mean(x^2) + eps) * weight                 reference.rms_norm
// combine_prompt   x += sum over the ranks of weight * y              reference.expert_ffn, weighted
// last_activation  a row as the activation that decode's `head` takes
//
// Shapes: x float32 [n][d], d a multiple of 32. Launch geometry: stands at each kernel; a block takes a row.
// Accumulation: float32; a row's squares by thread, then by warp, then over the warps.
#include "activation.cuh"
#include "row_norm.cuh"

using namespace strata;

// x float32 [n][d] = the tokens' rows of the table; a token is every `stride`-th int. One that is not in it gives NaNs.
// Launch: n blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    embed_prompt(Matrix table, const int* tokens, int stride, float* x, int n, int d) {
  wait_for_previous();
  let_next_start();
  if (blockIdx.x >= n) return;
  const int token = tokens[blockIdx.x * stride];
  float* row = x + static_cast<int64_t>(blockIdx.x) * d;
  if (token < 0 || token >= table.rows) {
    for (int i = threadIdx.x; i < d; i += blockDim.x) row[i] = __uint_as_float(0x7FC00000u);
    return;
  }
  with_type(table.type, [&](auto format) {
    using F = decltype(format);
    const uint8_t* blocks = table.blocks + static_cast<int64_t>(token) * (d / F::BLOCK_VALUES) * F::BLOCK_BYTES;
    for (int i = threadIdx.x; i < d / F::VALUES; i += blockDim.x) {
      float values[F::VALUES];
      const int group = i % F::GROUPS;
      dequantize_group<F>(blocks + static_cast<int64_t>(i / F::GROUPS) * F::BLOCK_BYTES, group, values, F::grid());
      float* to = row + i / F::GROUPS * F::BLOCK_VALUES + F::first(group);
#pragma unroll
      for (int j = 0; j < F::VALUES; j += 4) {
        *reinterpret_cast<float4*>(to + j / F::RUN * F::STRIDE + j % F::RUN) =
            make_float4(values[j], values[j + 1], values[j + 2], values[j + 3]);
      }
    }
  });
}

// The normed rows: `halves` float16 [n][d], and `floats` float32 [n][d] unless that is null.
// Launch: n blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    rms_norm_prompt(const float* x, const float* weight, __half* halves, float* floats, int n, int d, float eps) {
  __shared__ float sums[ROW_THREADS / 32];
  wait_for_previous();
  let_next_start();
  if (blockIdx.x >= n) return;
  const int64_t offset = static_cast<int64_t>(blockIdx.x) * d;
  const float4* row = reinterpret_cast<const float4*>(x + offset);
  float square = 0.0f;
  for (int i = threadIdx.x; i < d / 4; i += ROW_THREADS) {
    square += square_of(row[i]);
  }
  const float factor = 1.0f / sqrtf(block_sum(square, sums) / static_cast<float>(d) + eps);
  for (int i = threadIdx.x; i < d / 4; i += ROW_THREADS) {
    const float4 result = times(row[i], factor, reinterpret_cast<const float4*>(weight)[i]);
    if (floats != nullptr) reinterpret_cast<float4*>(floats + offset)[i] = result;
    store_halves(halves + offset + 4 * i, result);
  }
}

// x float32 [n][d] += sum over rank of weights[n][top_k] * y[n][top_k][d], in the order of the ranks.
// Launch: n blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    combine_prompt(float* x, const float* y, const float* weights, int n, int d, int top_k) {
  wait_for_previous();
  let_next_start();
  if (blockIdx.x >= n) return;
  const int64_t token = blockIdx.x;
  float4* row = reinterpret_cast<float4*>(x + token * d);
  const float4* results = reinterpret_cast<const float4*>(y + token * top_k * d);
  for (int i = threadIdx.x; i < d / 4; i += ROW_THREADS) {
    row[i] = combined(row[i], results + i, d / 4, weights + token * top_k, top_k);
  }
}

// The activation of row `n` - 1 of x times weight, with the squares of x.
// Launch: ceil(d / 16 / 256) blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
    last_activation(const float* x, const float* weight, Activation out, int n, int d) {
  wait_for_previous();
  let_next_start();
  const int group = blockIdx.x * ROW_THREADS + threadIdx.x;
  if (group >= d / ACTIVATION_GROUP) return;
  const float* row = x + static_cast<int64_t>(n - 1) * d + ACTIVATION_GROUP * group;
  float values[ACTIVATION_GROUP], square = 0.0f;
#pragma unroll
  for (int i = 0; i < ACTIVATION_GROUP; ++i) {
    square += row[i] * row[i];
    values[i] = row[i] * weight[ACTIVATION_GROUP * group + i];
  }
  out.store(group, values, square);
}
