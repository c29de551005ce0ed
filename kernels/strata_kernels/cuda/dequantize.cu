// A tensor's blocks to float32.
//
// Operation: out[i] = the value of element i of `blocks`. One kernel for each type, `dequantize_TYPE`.
// Must match: strata_kernels.reference.dequantize, bit for bit.
// Shapes: `blocks` holds n values of the type, uint8 [n / BLOCK_VALUES * BLOCK_BYTES]; `out` is float32 [n].
// Layout: both contiguous and aligned to 16 bytes; n is a multiple of the type's BLOCK_VALUES (8 for F32, F16, BF16).
//   Blocks are laid out as dequantize.cuh says.
// Launch geometry: a grid of one dimension, of any size; 256 threads a block at most. Thread t of T decodes the groups
//   t, t + T, ...; a group has 8 to 32 values, so ceil(n / 8 / 256) blocks leave each thread one group at most.
// Accumulation: none.
#include "dequantize.cuh"

namespace strata {

template <typename F>
__device__ __forceinline__ void dequantize_all(const uint8_t* __restrict__ blocks, float* __restrict__ out, int64_t n) {
  const int64_t n_groups = n / F::VALUES, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n_groups; i += step) {
    const int64_t block = i / F::GROUPS;
    const int group = static_cast<int>(i % F::GROUPS);
    float values[F::VALUES];
    dequantize_group<F>(blocks + block * F::BLOCK_BYTES, group, values, F::grid());
    float* to = out + block * F::BLOCK_VALUES + F::first(group);
#pragma unroll
    for (int run = 0; run < F::RUNS; ++run) {
#pragma unroll
      for (int j = 0; j < F::RUN; j += 4) {
        const float* v = values + run * F::RUN + j;
        *reinterpret_cast<float4*>(to + run * F::STRIDE + j) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

}  // namespace strata

#define DEQUANTIZE(TYPE)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256)                                                          \
      dequantize_##TYPE(const uint8_t* __restrict__ blocks, float* __restrict__ out, int64_t n) {            \
    strata::dequantize_all<strata::TYPE>(blocks, out, n);                                                    \
  }

DEQUANTIZE(F32)
DEQUANTIZE(F16)
DEQUANTIZE(BF16)
DEQUANTIZE(Q8_0)
DEQUANTIZE(Q4_0)
DEQUANTIZE(Q4_1)
DEQUANTIZE(Q5_0)
DEQUANTIZE(Q5_1)
DEQUANTIZE(Q2_K)
DEQUANTIZE(Q3_K)
DEQUANTIZE(Q4_K)
DEQUANTIZE(Q5_K)
DEQUANTIZE(Q6_K)
DEQUANTIZE(IQ4_NL)
DEQUANTIZE(IQ4_XS)
DEQUANTIZE(IQ3_S)
DEQUANTIZE(IQ3_XXS)
DEQUANTIZE(IQ2_S)
DEQUANTIZE(IQ2_XS)
DEQUANTIZE(IQ2_XXS)
DEQUANTIZE(MXFP4)
