// A group of weights times the activation's values that it meets.
//
// Integers: the sum of q * x for each run, exact in int32 (16 * 127 * 32512 at most), then in float32 scaled by the
// weights' and by the activation's scale, less bias and minimum times the sum of x: docs/kernels.md tells why. Floats:
// products and sums in float32.
// `ActivationPart<F>` is loaded once and may meet the same group of several rows.
#pragma once

#include "activation.cuh"
#include "dequantize.cuh"
#include "intrinsics.cuh"

namespace strata {

template <typename F, bool INTEGER = F::INTEGER>
struct ActivationPart;

template <typename F>
struct ActivationPart<F, true> {
  static constexpr bool HAS_SUMS = F::HAS_MINIMUM || F::BIAS != 0;

  uint32_t high[F::WORDS], low[F::WORDS];
  float scale[F::RUNS];
  float sum[F::RUNS];  // of a run's values; where HAS_SUMS

  // Of the group whose first value is number `first` of the activation.
  __device__ __forceinline__ ActivationPart(const Activation& a, int first) {
#pragma unroll
    for (int run = 0; run < F::RUNS; ++run) {
      const uint32_t at = first + run * F::STRIDE;
      load_run(high + run * (F::RUN / 4), a.high + at / 4);
      load_run(low + run * (F::RUN / 4), a.low + at / 4);
      scale[run] = a.scales[at / ACTIVATION_GROUP];
      if constexpr (HAS_SUMS && F::RUN == ACTIVATION_GROUP) sum[run] = a.sums[at / ACTIVATION_GROUP];
    }
    if constexpr (HAS_SUMS && F::RUN < ACTIVATION_GROUP) {
#pragma unroll
      for (int run = 0; run < F::RUNS; ++run) {
        uint32_t ones[F::WORDS];
        for (uint32_t& word : ones) word = 0x01010101u;
        sum[run] = scale[run] * static_cast<float>(products(ones, run));
      }
    }
  }

  // The sum of a run's integers times those of a group of weights.
  __device__ __forceinline__ int products(const uint32_t (&q)[F::WORDS], int run) const {
    int sum_high = 0, sum_low = 0;
#pragma unroll
    for (int i = run * (F::RUN / 4); i < (run + 1) * (F::RUN / 4); ++i) {
      sum_high = dot4(q[i], high[i], sum_high);
      sum_low = dot4(q[i], low[i], sum_low);
    }
    return 256 * sum_high + sum_low;
  }

 private:
  // As wide as a run is.
  static __device__ __forceinline__ void load_run(uint32_t* to, const uint32_t* from) {
    if constexpr (F::RUN == 16) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      to[0] = words.x;
      to[1] = words.y;
      to[2] = words.z;
      to[3] = words.w;
    } else if constexpr (F::RUN == 8) {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      to[0] = words.x;
      to[1] = words.y;
    } else {
      to[0] = from[0];
    }
  }
};

template <typename F>
struct ActivationPart<F, false> {
  float values[F::VALUES];

  __device__ __forceinline__ ActivationPart(const Activation& a, int first) {
    static_assert(F::RUNS == 1, "floats are neighbours");
#pragma unroll
    for (int i = 0; i < F::VALUES; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(a.values + first + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    }
  }
};

// The sum of the group's products.
template <typename F>
__device__ __forceinline__ float dot(const typename F::Raw& raw, int group, const uint32_t* grid,
                                     const ActivationPart<F>& part) {
  float result = 0.0f;
  if constexpr (F::INTEGER) {
    uint32_t q[F::WORDS];
    float scale[F::RUNS], minimum[F::RUNS];
    F::integers(raw, group, grid, q, scale, minimum);
#pragma unroll
    for (int run = 0; run < F::RUNS; ++run) {
      float product = part.scale[run] * static_cast<float>(part.products(q, run));
      if constexpr (F::BIAS != 0) product -= static_cast<float>(F::BIAS) * part.sum[run];
      result += scale[run] * product;
      if constexpr (F::HAS_MINIMUM) result -= minimum[run] * part.sum[run];
    }
  } else {
    float values[F::VALUES];
    F::values(raw, values);
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) result += values[i] * part.values[i];
  }
  return result;
}

}  // namespace strata
