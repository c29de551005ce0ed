// float16 and bfloat16, as cuda_fp16.h and cuda_bf16.h name them. Sums and products are rounded once.
#pragma once

namespace strata_host {

inline float half_to_float(unsigned short h) {
  const unsigned sign = static_cast<unsigned>(h & 0x8000u) << 16, rest = h & 0x7FFFu;
  if (rest >= 0x7C00u) return bits<float>(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  // The exponent's bias differs by 112; subnormals come right by the product.
  const float magnitude = bits<float>(rest << 13) * 0x1p112f;
  return bits<float>(sign | bits<unsigned>(magnitude));
}

inline unsigned short float_to_half(float f) {
  unsigned x = bits<unsigned>(f);
  const unsigned sign = x >> 16 & 0x8000u;
  x &= 0x7FFFFFFFu;
  if (x > 0x7F800000u) return 0x7FFF;
  if (x >= 0x477FF000u) return static_cast<unsigned short>(sign | 0x7C00u);
  if (x < 0x38800000u) {  // subnormal: the neighbours of 0.5 are 2^-24 apart
    x = bits<unsigned>(rounded(bits<float>(x) + 0.5f)) - bits<unsigned>(0.5f);
  } else {
    x = (x - 0x38000000u + 0xFFFu + (x >> 13 & 1u)) >> 13;
  }
  return static_cast<unsigned short>(sign | x);
}

inline float bfloat_to_float(unsigned short b) { return bits<float>(static_cast<unsigned>(b) << 16); }

inline unsigned short float_to_bfloat(float f) {
  const unsigned x = bits<unsigned>(f);
  if ((x & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
  return static_cast<unsigned short>((x + 0x7FFFu + (x >> 16 & 1u)) >> 16);
}

// To float, with the last bit set where that is inexact: rounding it again to fewer bits rounds once.
inline float to_odd(double d) {
  float f = static_cast<float>(d);
  if (f == f && static_cast<double>(f) != d && !isinf(f)) {
    if (fabs(static_cast<double>(f)) > fabs(d)) f = bits<float>(bits<unsigned>(f) - 1);
    f = bits<float>(bits<unsigned>(f) | 1u);
  }
  return f;
}

}  // namespace strata_host

#define STRATA_HALF(Type, Pair, to_float, from_float)                                        \
  struct Type {                                                                              \
    unsigned short raw;                                                                      \
    Type() = default;                                                                        \
    Type(float f) : raw(strata_host::from_float(f)) {}                                       \
    Type(double d) : raw(strata_host::from_float(strata_host::to_odd(d))) {}                 \
    Type(int i) : Type(static_cast<double>(i)) {}                                            \
    operator float() const { return strata_host::to_float(raw); }                            \
  };                                                                                         \
  struct alignas(4) Pair {                                                                   \
    Type x, y;                                                                               \
  };                                                                                         \
  inline Type operator+(Type a, Type b) { return Type(float(a) + float(b)); }                \
  inline Type operator-(Type a, Type b) { return Type(float(a) - float(b)); }                \
  inline Type operator*(Type a, Type b) { return Type(float(a) * float(b)); }                \
  inline Type __hadd(Type a, Type b) { return a + b; }                                       \
  inline Type __hsub(Type a, Type b) { return a - b; }                                       \
  inline Type __hmul(Type a, Type b) { return a * b; }                                       \
  inline Type __hneg(Type a) {                                                               \
    a.raw ^= 0x8000u;                                                                        \
    return a;                                                                                \
  }                                                                                          \
  inline Type __habs(Type a) {                                                               \
    a.raw &= 0x7FFFu;                                                                        \
    return a;                                                                                \
  }                                                                                          \
  inline Type __hfma(Type a, Type b, Type c) {                                               \
    return Type(static_cast<double>(float(a)) * float(b) + static_cast<double>(float(c)));   \
  }                                                                                          \
  inline Type __hmax(Type a, Type b) { return Type(fmaxf(a, b)); }                           \
  inline Type __hmin(Type a, Type b) { return Type(fminf(a, b)); }                           \
  inline bool __hgt(Type a, Type b) { return float(a) > float(b); }                          \
  inline bool __hlt(Type a, Type b) { return float(a) < float(b); }                          \
  inline bool __hisnan(Type a) { return float(a) != float(a); }                              \
  inline Pair __hadd2(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }                     \
  inline Pair __hsub2(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }                     \
  inline Pair __hmul2(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }                     \
  inline Pair __hfma2(Pair a, Pair b, Pair c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
  inline Pair __hmax2(Pair a, Pair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }       \
  inline Pair __hmin2(Pair a, Pair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }       \
  inline Pair __habs2(Pair a) { return {__habs(a.x), __habs(a.y)}; }                         \
  inline Pair __hneg2(Pair a) { return {__hneg(a.x), __hneg(a.y)}; }                         \
  inline float __low2float(Pair a) { return a.x; }                                           \
  inline float __high2float(Pair a) { return a.y; }

STRATA_HALF(__half, __half2, half_to_float, float_to_half)
STRATA_HALF(__nv_bfloat16, __nv_bfloat162, bfloat_to_float, float_to_bfloat)
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline __half __ushort_as_half(unsigned short v) { return strata_host::bits<__half>(v); }
inline unsigned short __half_as_ushort(__half v) { return v.raw; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return strata_host::bits<__nv_bfloat16>(v); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.raw; }

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline __half __double2half(double d) { return __half(d); }
inline __half __int2half_rn(int i) { return __half(i); }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
inline __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }

inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __double2bfloat16(double d) { return __nv_bfloat16(d); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {__nv_bfloat16(v.x), __nv_bfloat16(v.y)}; }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {__nv_bfloat16(f), __nv_bfloat16(f)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
