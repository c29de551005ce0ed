// Qualifiers, vector types, integer and floating-point functions, atomics, as CUDA names them.
#pragma once

// All of the standard library that the emulator needs: some of the macros below would break its headers.
#include <dlfcn.h>
#include <link.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__ __attribute__((visibility("default")))  // how kernels are found in what the preprocessor leaves
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __builtin_assume(condition) ((void)0)

// The library's thread-local storage is shared memory and nothing else: so it is found, and poisoned for each block.
#define __shared__ static thread_local

// ---- Vector types.

#define STRATA_VECTOR(type, n, alignment, ...)          \
  struct alignas(alignment) type##n {                   \
    STRATA_MEMBERS_##n(STRATA_SCALAR_##type)            \
  };                                                    \
  inline type##n make_##type##n(STRATA_PARAMETERS_##n(STRATA_SCALAR_##type)) { return {STRATA_NAMES_##n}; }
#define STRATA_MEMBERS_1(T) T x;
#define STRATA_MEMBERS_2(T) T x, y;
#define STRATA_MEMBERS_3(T) T x, y, z;
#define STRATA_MEMBERS_4(T) T x, y, z, w;
#define STRATA_PARAMETERS_1(T) T x
#define STRATA_PARAMETERS_2(T) T x, T y
#define STRATA_PARAMETERS_3(T) T x, T y, T z
#define STRATA_PARAMETERS_4(T) T x, T y, T z, T w
#define STRATA_NAMES_1 x
#define STRATA_NAMES_2 x, y
#define STRATA_NAMES_3 x, y, z
#define STRATA_NAMES_4 x, y, z, w
#define STRATA_SCALAR_char signed char
#define STRATA_SCALAR_uchar unsigned char
#define STRATA_SCALAR_short short
#define STRATA_SCALAR_ushort unsigned short
#define STRATA_SCALAR_int int
#define STRATA_SCALAR_uint unsigned
#define STRATA_SCALAR_longlong long long
#define STRATA_SCALAR_ulonglong unsigned long long
#define STRATA_SCALAR_float float
#define STRATA_SCALAR_double double
#define STRATA_VECTORS(type, size)               \
  STRATA_VECTOR(type, 1, size)                   \
  STRATA_VECTOR(type, 2, 2 * size)               \
  STRATA_VECTOR(type, 3, size)                   \
  STRATA_VECTOR(type, 4, 4 * size > 16 ? 16 : 4 * size)
STRATA_VECTORS(char, 1)
STRATA_VECTORS(uchar, 1)
STRATA_VECTORS(short, 2)
STRATA_VECTORS(ushort, 2)
STRATA_VECTORS(int, 4)
STRATA_VECTORS(uint, 4)
STRATA_VECTORS(longlong, 8)
STRATA_VECTORS(ulonglong, 8)
STRATA_VECTORS(float, 4)
STRATA_VECTORS(double, 8)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---- Bits.

namespace strata_host {

template <typename To, typename From>
inline To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// A result that is not to be contracted with what is done with it.
template <typename T>
inline T rounded(T value) {
  asm("" : "+m"(value));
  return value;
}

}  // namespace strata_host

inline float __uint_as_float(unsigned v) { return strata_host::bits<float>(v); }
inline float __int_as_float(int v) { return strata_host::bits<float>(v); }
inline unsigned __float_as_uint(float v) { return strata_host::bits<unsigned>(v); }
inline int __float_as_int(float v) { return strata_host::bits<int>(v); }
inline double __longlong_as_double(long long v) { return strata_host::bits<double>(v); }
inline long long __double_as_longlong(double v) { return strata_host::bits<long long>(v); }
inline double __hiloint2double(int hi, int lo) {
  return strata_host::bits<double>(static_cast<uint64_t>(static_cast<unsigned>(hi)) << 32 | static_cast<unsigned>(lo));
}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (v >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long v) {
  return static_cast<unsigned long long>(__brev(static_cast<unsigned>(v))) << 32 | __brev(static_cast<unsigned>(v >> 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(hi) << 32 | lo) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(hi) << 32 | lo) >> (shift & 31u));
}

// Each of the low four nibbles of `selector` picks one of the eight bytes of `low` and `high` by its low three bits: the
// instruction's copies of a top bit cannot be asked for here.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 7u;
    result |= (static_cast<unsigned>(bytes >> (8 * pick)) & 255u) << (8 * i);
  }
  return result;
}

inline int __dp4a(int a, int b, int sum) {
  unsigned result = static_cast<unsigned>(sum);
  for (int i = 0; i < 4; ++i) {
    result += static_cast<unsigned>(static_cast<int8_t>(static_cast<unsigned>(a) >> 8 * i) *
                                    static_cast<int8_t>(static_cast<unsigned>(b) >> 8 * i));
  }
  return static_cast<int>(result);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; ++i) sum += (a >> 8 * i & 255u) * (b >> 8 * i & 255u);
  return sum;
}
inline unsigned __vadd4(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int i = 0; i < 32; i += 8) r |= (((a >> i) + (b >> i)) & 255u) << i;
  return r;
}
inline unsigned __vsub4(unsigned a, unsigned b) {
  unsigned r = 0;
  for (int i = 0; i < 32; i += 8) r |= (((a >> i) - (b >> i)) & 255u) << i;
  return r;
}

// ---- Arithmetic.

template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(fmin(static_cast<T>(a), static_cast<T>(b)));
  } else {
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
  }
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(fmax(static_cast<T>(a), static_cast<T>(b)));
  } else {
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
  }
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline double sinpi(double x) { return sin(M_PI * fmod(x, 2.0)); }
inline double cospi(double x) { return cos(M_PI * fmod(x, 2.0)); }
inline void sincospi(double x, double* s, double* c) { *s = sinpi(x), *c = cospi(x); }
inline float sinpif(float x) { return static_cast<float>(sinpi(x)); }
inline float cospif(float x) { return static_cast<float>(cospi(x)); }
inline void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }

inline float __fadd_rn(float a, float b) { return strata_host::rounded(a + b); }
inline float __fsub_rn(float a, float b) { return strata_host::rounded(a - b); }
inline float __fmul_rn(float a, float b) { return strata_host::rounded(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return strata_host::rounded(a + b); }
inline double __dmul_rn(double a, double b) { return strata_host::rounded(a * b); }
inline double __dsub_rn(double a, double b) { return strata_host::rounded(a - b); }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// Float to integer: saturates, and NaN becomes 0 (int, unsigned) or the most negative (long long).
namespace strata_host {
template <typename To>
inline To saturated(double x) {
  constexpr To lowest = std::is_signed_v<To> ? static_cast<To>(To{1} << (8 * sizeof(To) - 1)) : To{0};
  constexpr To highest = static_cast<To>(~lowest);
  if (x != x) return sizeof(To) == 8 ? static_cast<To>(uint64_t{1} << 63) : To{0};
  if (x <= static_cast<double>(lowest)) return lowest;
  if (x >= static_cast<double>(highest)) return highest;
  return static_cast<To>(x);
}
}  // namespace strata_host

#define STRATA_CONVERSIONS(name, from, to)                                                     \
  inline to __##name##_rn(from x) { return strata_host::saturated<to>(rint(x)); }              \
  inline to __##name##_rz(from x) { return strata_host::saturated<to>(trunc(x)); }             \
  inline to __##name##_rd(from x) { return strata_host::saturated<to>(floor(x)); }             \
  inline to __##name##_ru(from x) { return strata_host::saturated<to>(ceil(x)); }
STRATA_CONVERSIONS(float2int, float, int)
STRATA_CONVERSIONS(float2uint, float, unsigned)
STRATA_CONVERSIONS(float2ll, float, long long)
STRATA_CONVERSIONS(float2ull, float, unsigned long long)
STRATA_CONVERSIONS(double2int, double, int)
STRATA_CONVERSIONS(double2uint, double, unsigned)
STRATA_CONVERSIONS(double2ll, double, long long)
STRATA_CONVERSIONS(double2ull, double, unsigned long long)
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

// ---- Memory. Only one thread runs at a time, so fences do nothing and atomics are plain.

namespace strata_host {
// While an atomic is done.
#ifdef STRATA_WATCH
struct Atomic {
  Atomic(const void* p, size_t size);
  ~Atomic();
};
#else
struct Atomic {
  Atomic(const void*, size_t) {}
};
#endif
}  // namespace strata_host

#define STRATA_LOAD(name)                                \
  template <typename T>                                  \
  inline T name(const T* p) {                            \
    return *p;                                           \
  }
#define STRATA_STORE(name)                               \
  template <typename T>                                  \
  inline void name(T* p, std::common_type_t<T> value) {  \
    *p = value;                                          \
  }
STRATA_LOAD(__ldg)
STRATA_LOAD(__ldcg)
STRATA_LOAD(__ldca)
STRATA_LOAD(__ldcs)
STRATA_LOAD(__ldlu)
STRATA_LOAD(__ldcv)
STRATA_STORE(__stcg)
STRATA_STORE(__stcs)
STRATA_STORE(__stwb)
STRATA_STORE(__stwt)

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

#define STRATA_ATOMIC(name, result)                                           \
  template <typename T>                                                       \
  inline T name(T* p, std::common_type_t<T> v) {                              \
    const strata_host::Atomic atomic(p, sizeof(T));                           \
    const T old = *p;                                                         \
    *p = result;                                                              \
    return old;                                                               \
  }                                                                           \
  template <typename T>                                                       \
  inline T name##_system(T* p, std::common_type_t<T> v) {                     \
    return name(p, v);                                                        \
  }                                                                           \
  template <typename T>                                                       \
  inline T name##_block(T* p, std::common_type_t<T> v) {                      \
    return name(p, v);                                                        \
  }
STRATA_ATOMIC(atomicAdd, old + v)
STRATA_ATOMIC(atomicSub, old - v)
STRATA_ATOMIC(atomicExch, v)
STRATA_ATOMIC(atomicMin, old < v ? old : v)
STRATA_ATOMIC(atomicMax, old < v ? v : old)
STRATA_ATOMIC(atomicAnd, old & v)
STRATA_ATOMIC(atomicOr, old | v)
STRATA_ATOMIC(atomicXor, old ^ v)
STRATA_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
STRATA_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
template <typename T>
inline T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> v) {
  const strata_host::Atomic atomic(p, sizeof(T));
  const T old = *p;
  if (old == compare) *p = v;
  return old;
}
