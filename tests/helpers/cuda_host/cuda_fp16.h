// Stands in for CUDA's header of this name, so that a host compiler compiles kernels: a grid of one thread.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
};

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

constexpr dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim{1, 1, 1}, gridDim{1, 1, 1};

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }

// Each of the low four nibbles of `selector` picks one of the eight bytes of `low` and `high`; its fourth bit asks for
// copies of that byte's top bit instead.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 15u;
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7u))) & 255u;
    if (pick & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << (8 * i);
  }
  return result;
}

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __half2float(__half half) {
  const int sign = half.bits >> 15 ? -1 : 1, exponent = half.bits >> 10 & 31, fraction = half.bits & 1023;
  if (exponent == 31) return fraction ? NAN : static_cast<float>(sign) * INFINITY;
  const float magnitude = exponent ? std::ldexp(static_cast<float>(1024 + fraction), exponent - 25)
                                   : std::ldexp(static_cast<float>(fraction), -24);
  return sign < 0 ? -magnitude : magnitude;
}
