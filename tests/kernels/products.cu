// What decode kernels are built on, by itself: an activation as a kernel stores it, and products of rows with it.
//
// `activate`: `out` is the activation of x, float32 [n]. One thread for each 16 values.
// `multiply`: out float32 [m.rows] = W a, for rows of n values of any type. One thread for each row.
// Accumulation: dot.cuh's within a group, float32 across groups.
#include "dot.cuh"
#include "types.cuh"

using namespace strata;

extern "C" __global__ void activate(const float* x, Activation out, int n) {
  const int group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= n / ACTIVATION_GROUP) return;
  float values[ACTIVATION_GROUP];
#pragma unroll
  for (int i = 0; i < ACTIVATION_GROUP; ++i) values[i] = x[ACTIVATION_GROUP * group + i];
  out.store(group, values, 0.0f);
}

extern "C" __global__ void multiply(Activation a, Matrix m, float* out, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= m.rows) return;
  with_type(m.type, [&](auto format) {
    using F = decltype(format);
    const int n_blocks = n / F::BLOCK_VALUES;
    const uint8_t* blocks = m.blocks + static_cast<int64_t>(row) * n_blocks * F::BLOCK_BYTES;
    float sum = 0.0f;
    for (int i = 0; i < n_blocks * F::GROUPS; ++i) {
      const int block = i / F::GROUPS, group = i % F::GROUPS;
      const ActivationPart<F> part(a, block * F::BLOCK_VALUES + F::first(group));
      sum += dot<F>(F::load(blocks + block * F::BLOCK_BYTES, group), group, F::grid(), part);
    }
    out[row] = sum;
  });
}
