// Types with blocks of 256 values in sub-blocks that have scales of their own, but for those with grids. dequantize.cuh
// says what the structs are for.
#pragma once

#include "format.cuh"

namespace strata {

// A scale and a minimum (low and high nibble) for each 16 values (16 bytes), 2 bits a value (64 bytes), d and dmin
// float16: d * scale * q - dmin * minimum. Byte 32 h + i holds the values 128 h + 32 r + i for r = 0 .. 3, two bits
// each.
struct Q2_K : Format<256, 84, 4, 8, 32> {
  static constexpr bool PAIRED = true;
  static constexpr bool HAS_MINIMUM = true;

  struct Raw {
    uint32_t q[2], scales[2], d;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    const uint8_t *q = block + 16 + 8 * group, *scales = block + group / 4 * 8;
    return {{load_u32(q), load_u32(q + 4)}, {load_u32(scales), load_u32(scales + 4)}, load_u32(block + 80)};
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&minimum)[RUNS]) {
    const uint32_t of_runs = __byte_perm(raw.scales[0], raw.scales[1], group % 4 < 2 ? 0x6420u : 0x7531u);
    const uint32_t scales = low_nibbles(of_runs), minima = high_nibbles(of_runs);
    const float d = half_value(raw.d & 0xFFFFu), dmin = half_value(raw.d >> 16);
#pragma unroll
    for (int run = 0; run < 4; ++run) {
      scale[run] = d * byte_value(scales, run);
      minimum[run] = dmin * byte_value(minima, run);
#pragma unroll
      for (int i = 0; i < 2; ++i) q[2 * run + i] = raw.q[i] >> (2 * run) & 0x03030303u;
    }
  }
};

// A third bit for each value (32 bytes), 2 bits a value (64 bytes, as in Q2_K), 16 scales of 6 bits (12 bytes),
// d float16: d * (scale - 32) * (q - 4). Byte i of the first 32 holds the third bit of the values 32 b + i as bit b.
// Scale s has its low bits in nibble s / 8 of byte s % 8, its high ones in pair s / 4 of byte 8 + s % 4.
struct Q3_K : Format<256, 110, 4, 8, 32> {
  static constexpr bool PAIRED = true;
  static constexpr int BIAS = 4;

  struct Raw {
    uint32_t third[3], q[3], scales[4], skew;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.third, block, group % 4 * 8);
    load_words(raw.q, block, 32 + 8 * group);
    load_words(raw.scales, block, 96);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const int half = group / 4;
    // The runs' scales are s = 8 half + 2 run + second.
    const uint32_t second = group % 4 / 2, pick = 0x6420u + 0x1111u * second;
    const uint32_t bytes[3] = {word_after(raw.scales[0], raw.scales[1], raw.skew),
                               word_after(raw.scales[1], raw.scales[2], raw.skew),
                               word_after(raw.scales[2], raw.scales[3], raw.skew)};
    const uint32_t low = __byte_perm(bytes[0], bytes[1], pick) >> (4 * half) & 0x0F0F0F0Fu;
    const uint32_t high = __byte_perm(bytes[2], bytes[2], pick) >> (4 * half);
    const uint32_t scales = low | (high << 4 & 0x00003030u) | (high << 2 & 0x30300000u);
    const float d = half_value(word_after(raw.scales[3], 0u, raw.skew) & 0xFFFFu);
#pragma unroll
    for (int run = 0; run < 4; ++run) scale[run] = d * byte_value(scales, run, 32.0f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t two = word_after(raw.q[i], raw.q[i + 1], raw.skew);
      const uint32_t third = word_after(raw.third[i], raw.third[i + 1], raw.skew) >> (4 * half);
      q[i] = (two & 0x03030303u) | (third << 2 & 0x04040404u);
      q[2 + i] = (two >> 2 & 0x03030303u) | (third << 1 & 0x04040404u);
      q[4 + i] = (two >> 4 & 0x03030303u) | (third & 0x04040404u);
      q[6 + i] = (two >> 6 & 0x03030303u) | (third >> 1 & 0x04040404u);
    }
  }
};

// The first 16 bytes of Q4_K and Q5_K: d and dmin float16, then 8 scales and 8 minima of 6 bits in three words. Those
// of the sub-blocks 0 .. 3 are the low 6 bits of the bytes of the first word (scales) and the second (minima). Those
// of 4 .. 7 have their low 4 bits in the nibbles of the third word's bytes (scale low), and their high 2 bits as the
// high ones of the first two words' bytes. Here for the sub-blocks 2 pair and 2 pair + 1, all four numbers at once.
__device__ __forceinline__ void scales_and_minima(uint4 head, int pair, float (&scale)[2], float (&minimum)[2]) {
  const uint32_t pick = pair % 2 == 0 ? 0x5410u : 0x7632u;  // two scales, two minima
  const uint32_t in_nibbles = pair < 2 ? 0u : 0x0F0F0F0Fu;
  const uint32_t bytes = __byte_perm(head.y, head.z, pick) >> (pair < 2 ? 0 : 2);
  const uint32_t nibbles = __byte_perm(head.w, head.w >> 4, pick);
  const uint32_t sixes = ((nibbles & in_nibbles) | (bytes & ~in_nibbles)) & 0x3F3F3F3Fu;
  const float d = half_value(head.x & 0xFFFFu), dmin = half_value(head.x >> 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    scale[i] = d * byte_value(sixes, i);
    minimum[i] = dmin * byte_value(sixes, 2 + i);
  }
}

// 16 bytes of scales and minima, 128 bytes of nibbles: d * scale * q - dmin * minimum. Byte 32 p + i holds the values
// 64 p + i and 64 p + 32 + i: a pair of sub-blocks.
struct Q4_K : Format<256, 144, 2, 16, 32> {
  static constexpr bool PAIRED = true;
  static constexpr bool HAS_MINIMUM = true;

  struct Raw {
    uint4 q, head;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    return {load_u128(block + 16 + 16 * group), load_u128(block)};
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&minimum)[RUNS]) {
    scales_and_minima(raw.head, group / 2, scale, minimum);
    const uint32_t words[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      q[i] = low_nibbles(words[i]);
      q[4 + i] = high_nibbles(words[i]);
    }
  }
};

// As Q4_K with a fifth bit for each value between the two (32 bytes): byte i holds that of the values 32 b + i as
// bit b.
struct Q5_K : Format<256, 176, 2, 16, 32> {
  static constexpr bool PAIRED = true;
  static constexpr bool HAS_MINIMUM = true;

  struct Raw {
    uint4 q, fifth, head;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    return {load_u128(block + 48 + 16 * group), load_u128(block + 16 + group % 2 * 16), load_u128(block)};
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&minimum)[RUNS]) {
    const int pair = group / 2;
    scales_and_minima(raw.head, pair, scale, minimum);
    const uint32_t words[4] = {raw.q.x, raw.q.y, raw.q.z, raw.q.w};
    const uint32_t fifth[4] = {raw.fifth.x, raw.fifth.y, raw.fifth.z, raw.fifth.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = fifth[i] >> (2 * pair);
      q[i] = low_nibbles(words[i]) | (bits << 4 & 0x10101010u);
      q[4 + i] = high_nibbles(words[i]) | (bits << 3 & 0x10101010u);
    }
  }
};

// Low 4 bits (128 bytes), high 2 bits (64 bytes), 16 int8 scales, d float16: d * scale * (q - 32). The values
// 128 h + 32 r + i, r = 0 .. 3, have their low bits in nibble r / 2 of byte 64 h + 32 (r % 2) + i, and their high
// ones in pair r of byte 32 h + i of the 64.
struct Q6_K : Format<256, 210, 2, 16, 64> {
  static constexpr bool PAIRED = true;
  static constexpr int BIAS = 32;

  struct Raw {
    uint32_t low[5], high[5];  // low bits of r and r + 2, high bits of all
    int scales[2];
    uint32_t d, skew;
  };

  // Group 4 h + 2 (r % 2) + i / 16: the runs are r % 2 and r % 2 + 2.
  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    const int half = group / 4, part = group % 4;
    Raw raw;
    load_words(raw.low, block, 64 * half + 16 * part);
    load_words(raw.high, block, 128 + 32 * half + part % 2 * 16);
    const int8_t* scales = reinterpret_cast<const int8_t*>(block) + 192 + 8 * half + part;
    raw.scales[0] = scales[0];
    raw.scales[1] = scales[4];
    raw.d = load_u16(block + 208);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const float d = half_value(raw.d);
    scale[0] = d * static_cast<float>(raw.scales[0]);
    scale[1] = d * static_cast<float>(raw.scales[1]);
    const uint32_t shift = group % 4 / 2 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = word_after(raw.low[i], raw.low[i + 1], raw.skew);
      const uint32_t high = word_after(raw.high[i], raw.high[i + 1], raw.skew) >> shift;
      q[i] = low_nibbles(low) | (high << 4 & 0x30303030u);
      q[4 + i] = high_nibbles(low) | (high & 0x30303030u);
    }
  }
};

// d float16, high 2 bits of 8 scales (2 bytes), their low 4 bits (4 bytes), then each sub-block's 16 bytes of nibbles
// as in IQ4_NL: d * (scale - 32) * table[q].
struct IQ4_XS : Format<256, 136, 2, 16, 16> {
  struct Raw {
    uint2 first, second, head;
  };

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    const uint8_t* q = block + 8 + 16 * group;
    return {load_u64(q), load_u64(q + 8), load_u64(block)};
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t*, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const uint32_t six = (raw.head.y >> (4 * group) & 15u) | (raw.head.x >> (16 + 2 * group) & 3u) << 4;
    scale[0] = scale[1] = half_value(raw.head.x & 0xFFFFu) * byte_value(six, 0, 32.0f);
    const uint32_t words[4] = {raw.first.x, raw.first.y, raw.second.x, raw.second.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) iq4_table().eight(words[i], q[i], q[4 + i]);
  }
};

}  // namespace strata
