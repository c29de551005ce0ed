// Types with blocks of 32 values and one scale. dequantize.cuh says what the structs are for.
//
// In those of 4 and 5 bits, byte i of 16 holds value i in its low nibble and value 16 + i in its high one; a group is a
// whole block.
#pragma once

#include "format.cuh"

namespace strata {

// d float16, 32 int8: d * q.
struct Q8_0 : Format<32, 34, 1, 16, 16> {
  struct Raw {
    uint32_t q[5], d, skew;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.q, block, 16 * group);
    raw.d = load_u16(block);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    scale[0] = half_value(raw.d);
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = word_after(raw.q[i], raw.q[i + 1], raw.skew + 2);
  }
};

// d float16, 16 bytes of nibbles: d * (q - 8).
struct Q4_0 : Format<32, 18, 2, 16, 16> {
  static constexpr int BIAS = 8;

  struct Raw {
    uint32_t words[5], skew;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) {
    Raw raw;
    load_words(raw.words, block, 0);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    scale[0] = scale[1] = half_value(word_after(raw.words[0], raw.words[1], raw.skew) & 0xFFFFu);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = word_after(raw.words[i], raw.words[i + 1], raw.skew + 2);
      q[i] = low_nibbles(word);
      q[4 + i] = high_nibbles(word);
    }
  }
};

// d and m float16, 16 bytes of nibbles: d * q + m.
struct Q4_1 : Format<32, 20, 2, 16, 16> {
  static constexpr bool HAS_MINIMUM = true;

  struct Raw {
    uint32_t words[5];
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < 5; ++i) raw.words[i] = load_u32(block + 4 * i);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&minimum)[RUNS]) {
    scale[0] = scale[1] = half_value(raw.words[0] & 0xFFFFu);
    minimum[0] = minimum[1] = -half_value(raw.words[0] >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[i] = low_nibbles(raw.words[1 + i]);
      q[4 + i] = high_nibbles(raw.words[1 + i]);
    }
  }
};

// d float16, a fifth bit for each value (4 bytes), 16 bytes of nibbles: d * (q - 16).
struct Q5_0 : Format<32, 22, 2, 16, 16> {
  static constexpr int BIAS = 16;

  struct Raw {
    uint32_t words[6], skew;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) {
    Raw raw;
    load_words(raw.words, block, 0);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    scale[0] = scale[1] = half_value(word_after(raw.words[0], raw.words[1], raw.skew) & 0xFFFFu);
    const uint32_t fifth = word_after(raw.words[0], raw.words[1], raw.skew + 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = word_after(raw.words[1 + i], raw.words[2 + i], raw.skew + 2);
      q[i] = low_nibbles(word) | fifth_bits(fifth >> (4 * i));
      q[4 + i] = high_nibbles(word) | fifth_bits(fifth >> (16 + 4 * i));
    }
  }
};

// d and m float16, a fifth bit for each value (4 bytes), 16 bytes of nibbles: d * q + m.
struct Q5_1 : Format<32, 24, 2, 16, 16> {
  static constexpr bool HAS_MINIMUM = true;

  struct Raw {
    uint2 head, first, second;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int) {
    return {load_u64(block), load_u64(block + 8), load_u64(block + 16)};
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&minimum)[RUNS]) {
    scale[0] = scale[1] = half_value(raw.head.x & 0xFFFFu);
    minimum[0] = minimum[1] = -half_value(raw.head.x >> 16);
    const uint32_t words[4] = {raw.first.x, raw.first.y, raw.second.x, raw.second.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[i] = low_nibbles(words[i]) | fifth_bits(raw.head.y >> (4 * i));
      q[4 + i] = high_nibbles(words[i]) | fifth_bits(raw.head.y >> (16 + 4 * i));
    }
  }
};

// d float16, 16 bytes of nibbles, each an index: d * table[q].
struct IQ4_NL : Format<32, 18, 2, 16, 16> {
  using Raw = Q4_0::Raw;

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) { return Q4_0::load(block, group); }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    scale[0] = scale[1] = half_value(word_after(raw.words[0], raw.words[1], raw.skew) & 0xFFFFu);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      iq4_table().eight(word_after(raw.words[i], raw.words[i + 1], raw.skew + 2), q[i], q[4 + i]);
    }
  }
};

// e, a byte: the scale 2^(e - 128); 16 bytes of nibbles, each an E2M1 number: scale * twice the number. 17 bytes, so
// that a block begins anywhere.
struct MXFP4 : Format<32, 17, 2, 16, 16> {
  using Raw = Q4_0::Raw;

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) { return Q4_0::load(block, group); }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const uint32_t e = raw.words[0] >> (8 * raw.skew) & 255u;  // 0 and 1 give subnormals
    scale[0] = scale[1] = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mxfp4_table().eight(word_after(raw.words[i], raw.words[i + 1], raw.skew + 1), q[i], q[4 + i]);
    }
  }
};

}  // namespace strata
