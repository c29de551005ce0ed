// The input vector of decode's products, as the kernel before leaves it.
//
// Shapes, for n values, n a multiple of 16: `values` float32 [n]; `high`, `low` int8 [n] as words of four; `scales`,
// `sums`, `squares` float32 [n / 16]. value = scale * (256 * high + low) but for the rounding to 16 bits, 2^-16 of the largest of the
// 16 values. `sums` are those of the rounded values; `squares` are whatever the producer wants to have added up
// (RMS norm: of the residual's values before the norm's weight).
#pragma once

#include "integers.cuh"

namespace strata {

constexpr int ACTIVATION_GROUP = 16;

struct Activation {
  float* values;
  uint32_t* high;
  uint32_t* low;
  float* scales;
  float* sums;
  float* squares;

  // Bytes that an activation of n values takes in one piece, in this order of members.
  static __host__ __device__ constexpr int64_t size_bytes(int64_t n) { return n * 4 + n + n + 3 * (n / 16 * 4); }

  // The activation of n values at `memory`, aligned to 16 bytes.
  static __device__ __forceinline__ Activation at(uint8_t* memory, int n) {
    Activation a;
    a.values = reinterpret_cast<float*>(memory);
    a.high = reinterpret_cast<uint32_t*>(memory + 4 * n);
    a.low = a.high + n / 4;
    a.scales = reinterpret_cast<float*>(a.low + n / 4);
    a.sums = a.scales + n / 16;
    a.squares = a.sums + n / 16;
    return a;
  }

  // Stores group `group` (values 16 group ...) from one thread.
  __device__ __forceinline__ void store(int group, const float (&v)[16], float square) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(v[i]));
    const float inverse = largest > 0.0f ? 32512.0f / largest : 0.0f;  // 127 * 256: the high plane fits int8
    const float scale = largest / 32512.0f;
    uint32_t high_words[4], low_words[4];
    int sum = 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      high_words[word] = low_words[word] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int q = __float2int_rn(v[4 * word + i] * inverse);
        sum += q;
        high_words[word] |= (static_cast<uint32_t>((q + 128) >> 8) & 255u) << (8 * i);
        low_words[word] |= (static_cast<uint32_t>(q) & 255u) << (8 * i);  // q - 256 high, as a signed byte
      }
    }
    float4* to = reinterpret_cast<float4*>(values) + 4 * group;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
    reinterpret_cast<uint4*>(high)[group] = make_uint4(high_words[0], high_words[1], high_words[2], high_words[3]);
    reinterpret_cast<uint4*>(low)[group] = make_uint4(low_words[0], low_words[1], low_words[2], low_words[3]);
    scales[group] = scale;
    sums[group] = scale * static_cast<float>(sum);
    squares[group] = square;
  }

  // The same from a whole warp: value v is that of lane % 16, in both halves; `square` of the group.
  __device__ __forceinline__ void store_lane(int group, float v, float square) const {
    const int lane = threadIdx.x % 32, at = ACTIVATION_GROUP * group + lane;
    float largest = fabsf(v);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, offset));
    }
    const float inverse = largest > 0.0f ? 32512.0f / largest : 0.0f;
    const int q = __float2int_rn(v * inverse);
    int sum = q;
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    if (lane >= ACTIVATION_GROUP) return;
    values[at] = v;
    reinterpret_cast<int8_t*>(high)[at] = static_cast<int8_t>((q + 128) >> 8);
    reinterpret_cast<int8_t*>(low)[at] = static_cast<int8_t>(q & 255);
    if (lane != 0) return;
    const float scale = largest / 32512.0f;
    scales[group] = scale;
    sums[group] = scale * static_cast<float>(sum);
    squares[group] = square;
  }

  // The same from four neighbouring lanes: each has the values 4 quad ..., quad % 4 is its lane % 4, and all lanes of the warp
  // call it. Nothing is stored for a lane without `valid`.
  __device__ __forceinline__ void store_quad(int quad, const float (&v)[4], float square, bool valid) const {
    float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
    const float inverse = largest > 0.0f ? 32512.0f / largest : 0.0f;
    uint32_t high_word = 0, low_word = 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int q = __float2int_rn(v[i] * inverse);
      sum += q;
      high_word |= (static_cast<uint32_t>((q + 128) >> 8) & 255u) << (8 * i);
      low_word |= (static_cast<uint32_t>(q) & 255u) << (8 * i);
    }
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    if (!valid) return;
    reinterpret_cast<float4*>(values)[quad] = make_float4(v[0], v[1], v[2], v[3]);
    high[quad] = high_word;
    low[quad] = low_word;
    if (quad % 4 != 0) return;
    const float scale = largest / 32512.0f;
    scales[quad / 4] = scale;
    sums[quad / 4] = scale * static_cast<float>(sum);
    squares[quad / 4] = square;
  }
};

}  // namespace strata
