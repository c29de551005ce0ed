// What decode's and the prompt's attention share: numbers for the tensor cores, the norm and rotation of a head, and
// how a cell is rounded to its type.
#pragma once

#include "intrinsics.cuh"
#include "kv.cuh"

namespace strata {

constexpr float LOG2_E = 1.44269504f;
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

template <typename Pair>
__device__ __forceinline__ uint32_t as_word(Pair pair) {
  static_assert(sizeof(Pair) == 4, "two values of 16 bits");
  return *reinterpret_cast<uint32_t*>(&pair);
}

// ---- Numbers of 16 bits, two a word: what the tensor cores multiply.

struct Half {
  static __device__ __forceinline__ uint32_t pack(float x, float y) { return as_word(__floats2half2_rn(x, y)); }
  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    return __half22float2(*reinterpret_cast<__half2*>(&word));
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_f16(d, a, b);
  }
};

struct Bfloat {
  static __device__ __forceinline__ uint32_t pack(float x, float y) { return as_word(__floats2bfloat162_rn(x, y)); }
  static __device__ __forceinline__ float2 unpack(uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bf16(d, a, b);
  }
};

// x and y as the sum of two numbers each: about twice the bits.
template <typename Number>
__device__ __forceinline__ void pack_in_two(float x, float y, uint32_t& high, uint32_t& low) {
  high = Number::pack(x, y);
  const float2 rounded = Number::unpack(high);
  low = Number::pack(x - rounded.x, y - rounded.y);
}

// ---- Types of cells. `Number` is what their values are multiplied as.

struct KvF16 {
  using Number = Half;
  static constexpr int32_t TYPE = KV_F16;
  static constexpr int VALUE_BYTES = 2;
};

struct KvBf16 {
  using Number = Bfloat;
  static constexpr int32_t TYPE = KV_BF16;
  static constexpr int VALUE_BYTES = 2;
};

struct KvQ8 {
  using Number = Half;
  static constexpr int32_t TYPE = KV_Q8_0;
  static constexpr int VALUE_BYTES = 1;
};

constexpr int Q8_BLOCK = 32;  // values a scale

// Two of the four int8 in `word` as float16, exactly. `PICK` is 0x4140 for the lower two, 0x4342 for the upper two,
// 0x4240 for the even ones, 0x4341 for the odd ones.
template <uint32_t PICK>
__device__ __forceinline__ uint32_t to_halves(uint32_t word) {
  // 0x6400 | u is 1024 + u
  const uint32_t biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, PICK);
  const uint32_t bias = 0x64806480u;  // 1152
  return as_word(__hsub2(*reinterpret_cast<const __half2*>(&biased), *reinterpret_cast<const __half2*>(&bias)));
}

__device__ __forceinline__ uint32_t multiply_halves(uint32_t a, uint32_t b) {
  return as_word(__hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b)));
}

// ---- A head's values in the lanes of a warp.

// Several sums over a warp at once, the same bits in every lane.
template <int N>
__device__ __forceinline__ void sum_over_warp(float (&sums)[N]) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], offset);
  }
}

__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ __forceinline__ float2 load_pair(const __half* p) {
  return __half22float2(*reinterpret_cast<const __half2*>(p));
}

// Lane l has the values 2 p, 2 p + 1 of the first half of the head and the same of the second, for p = l, l + 32, ...,
// as rotation needs them: N of each, enough for 128 N values.
template <int N>
struct Head {
  int head_dim;
  int lane;
  float2 first[N], second[N];

  Head() = default;
  __device__ __forceinline__ Head(int head_dim_, int lane_) : head_dim(head_dim_), lane(lane_) {}

  // Where the values of first[j] stand; those of second[j] come head_dim / 2 later.
  __device__ __forceinline__ int at(int j) const { return 2 * (lane + 32 * j); }
  __device__ __forceinline__ bool has(int j) const { return at(j) < head_dim / 2; }

  template <typename T>
  __device__ __forceinline__ void load(const T* x) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      first[j] = has(j) ? load_pair(x + at(j)) : make_float2(0.0f, 0.0f);
      second[j] = has(j) ? load_pair(x + head_dim / 2 + at(j)) : make_float2(0.0f, 0.0f);
    }
  }

  // This lane's share of the sum of squares.
  __device__ __forceinline__ float square() const {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sum += first[j].x * first[j].x + first[j].y * first[j].y + second[j].x * second[j].x + second[j].y * second[j].y;
    }
    return sum;
  }

  // RMS norm, from the sum of squares. reference.rms_norm
  __device__ __forceinline__ void norm(const Head& weight, float squares, float eps) {
    const float factor = rsqrtf(squares / static_cast<float>(head_dim) + eps);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      first[j].x *= factor * weight.first[j].x;
      first[j].y *= factor * weight.first[j].y;
      second[j].x *= factor * weight.second[j].x;
      second[j].y *= factor * weight.second[j].y;
    }
  }

  // The turns of this lane's pairs, from a table float32 [head_dim / 2][2] of cosines and sines.
  __device__ __forceinline__ void load_turns(const float* table, float4 (&turns)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      turns[j] = has(j) ? *reinterpret_cast<const float4*>(table + 2 * at(j)) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }

  // reference.rope
  __device__ __forceinline__ void rotate(const float4 (&turns)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float4 turn = turns[j];
      const float2 a = first[j], b = second[j];
      first[j] = make_float2(a.x * turn.x - b.x * turn.y, a.y * turn.z - b.y * turn.w);
      second[j] = make_float2(a.x * turn.y + b.x * turn.x, a.y * turn.w + b.y * turn.z);
    }
  }

  // Calls body(place, x, y) for each pair.
  template <typename Body>
  __device__ __forceinline__ void each(Body body) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (!has(j)) continue;
      body(at(j), first[j].x, first[j].y);
      body(head_dim / 2 + at(j), second[j].x, second[j].y);
    }
  }
};

// ---- q8_0: 32 values, one a lane, to int8 and a scale; value = scale * int8. The scale is a 127th of the largest,
// rounded to float16; values are rounded to the nearest multiple of what it was rounded to.
__device__ __forceinline__ int quantize(float v, __half& scale) {
  float largest = fabsf(v);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
  scale = __float2half_rn(largest / 127.0f);
  const float step = __half2float(scale);
  const int q = step > 0.0f ? __float2int_rn(v / step) : 0;
  return min(max(q, -127), 127);
}

}  // namespace strata
