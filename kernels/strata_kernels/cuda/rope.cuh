// The angles that a position turns q and k by. Must match: strata_kernels.reference.rope; angles in float64, as there.
#pragma once

#include "integers.cuh"

namespace strata {

// Cosine and sine of scale * position * freq_base ^ (-2 pair / head_dim).
__device__ __forceinline__ float2 turn_of(int position, int pair, double freq_base, double scale, int head_dim) {
  const double angle = position * (scale * exp2(-2.0 * pair / head_dim * log2(freq_base)));
  double sine, cosine;
  sincospi(angle * 0.31830988618379067154, &sine, &cosine);  // in units of pi any angle is reduced exactly
  return make_float2(static_cast<float>(cosine), static_cast<float>(sine));
}

}  // namespace strata
