// Types with blocks of 256 values that are entries of a grid with signs. dequantize.cuh says what the structs are for.
//
// A group is 32 neighbours, that is one word of signs, and eight entries of four magnitudes or four of eight.
#pragma once

#include "format.cuh"
#include "iq_grids.cuh"

namespace strata {

// The eighth bit of each byte that makes the number of its bits even, beside the seven that are given.
__device__ __forceinline__ uint32_t with_parity(uint32_t sevens) {
  uint32_t parity = sevens ^ sevens >> 4;  // what a shift brings from the byte above never reaches bit 0
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return sevens | (parity & 0x01010101u) << 7;
}

// 32 signs from four times seven bits: the low 28 of a word.
__device__ __forceinline__ uint32_t signs_of_28(uint32_t word) {
  return with_parity((word & 0x7Fu) | (word << 1 & 0x7F00u) | (word << 2 & 0x7F0000u) | (word << 3 & 0x7F000000u));
}

// The entry of two words at `index` of the IQ2 types' grids, with eight signs, as integers.
__device__ __forceinline__ void entry_with_signs(const uint32_t* grid, uint32_t index, uint32_t signs, uint32_t& first,
                                                 uint32_t& second) {
  const uint2 entry = reinterpret_cast<const uint2*>(grid)[index];
  first = with_signs(entry.x, signs);
  second = with_signs(entry.y, signs >> 4);
}

// d float16, low 8 bits of 64 indices, their ninth bits (8 bytes), signs (32 bytes), 8 scales of 4 bits (4 bytes):
// d * (1 + 2 scale) * entry * sign.
struct IQ3_S : Format<256, 110, 2, 16, 16, 512> {
  struct Raw {
    uint32_t indices[3], signs[2], ninth, scale, d, skew;
  };

  static __device__ __forceinline__ const uint32_t* grid() { return IQ3_S_GRID; }

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.indices, block, 8 * group);
    load_words(raw.signs, block, 72 + 4 * group);
    raw.ninth = block[66 + group];
    raw.scale = block[106 + group / 2];
    raw.d = load_u16(block);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int group, const uint32_t* grid,
                                                  uint32_t (&q)[WORDS], float (&scale)[RUNS], float (&)[RUNS]) {
    const uint32_t four = raw.scale >> (group % 2 * 4) & 15u;
    scale[0] = scale[1] = half_value(raw.d) * byte_value(1u + 2u * four, 0);
    const uint32_t signs = word_after(raw.signs[0], raw.signs[1], raw.skew + 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t low = word_after(raw.indices[i / 4], raw.indices[i / 4 + 1], raw.skew + 2) >> (i % 4 * 8) & 255u;
      q[i] = with_signs(grid[low | (raw.ninth << (8 - i) & 256u)], signs >> (4 * i));
    }
  }
};

// d float16, 64 indices of 8 bits, then for each 32 values a word: four times 7 bits of signs, and the scale in its
// top 4 bits: d * (0.5 + scale) * 0.5 * entry * sign.
struct IQ3_XXS : Format<256, 98, 2, 16, 16, 256> {
  struct Raw {
    uint32_t indices[3], signs[2], d, skew;
  };

  static __device__ __forceinline__ const uint32_t* grid() { return IQ3_XXS_GRID; }

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.indices, block, 8 * group);
    load_words(raw.signs, block, 64 + 4 * group);
    raw.d = load_u16(block);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t* grid, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const uint32_t word = word_after(raw.signs[0], raw.signs[1], raw.skew + 2);
    scale[0] = scale[1] = half_value(raw.d) * (0.5f + byte_value(word >> 28, 0)) * 0.5f;
    const uint32_t signs = signs_of_28(word);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t index = word_after(raw.indices[i / 4], raw.indices[i / 4 + 1], raw.skew + 2) >> (i % 4 * 8) & 255u;
      q[i] = with_signs(grid[index], signs >> (4 * i));
    }
  }
};

// d float16, low 8 bits of 32 indices, signs (32 bytes), high 2 bits of the indices (8 bytes), 16 scales of 4 bits
// (8 bytes): d * (0.5 + scale) * 0.25 * entry * sign.
struct IQ2_S : Format<256, 82, 2, 16, 16, 2048> {
  struct Raw {
    uint32_t indices[2], signs[2], high, scales, d, skew;
  };

  static __device__ __forceinline__ const uint32_t* grid() { return IQ2_S_GRID; }

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.indices, block, 4 * group);
    load_words(raw.signs, block, 32 + 4 * group);
    raw.high = block[66 + group];
    raw.scales = block[74 + group];
    raw.d = load_u16(block);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t* grid, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const float d = half_value(raw.d);
    scale[0] = d * (0.5f + byte_value(raw.scales & 15u, 0)) * 0.25f;
    scale[1] = d * (0.5f + byte_value(raw.scales >> 4, 0)) * 0.25f;
    const uint32_t indices = word_after(raw.indices[0], raw.indices[1], raw.skew + 2);
    const uint32_t signs = word_after(raw.signs[0], raw.signs[1], raw.skew + 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t index = (indices >> (8 * i) & 255u) | (raw.high << (8 - 2 * i) & 0x300u);
      entry_with_signs(grid, index, signs >> (8 * i), q[2 * i], q[2 * i + 1]);
    }
  }
};

// d float16, 32 times 9 bits of index and 7 bits of signs (64 bytes), 16 scales of 4 bits (8 bytes):
// d * (0.5 + scale) * 0.25 * entry * sign.
struct IQ2_XS : Format<256, 74, 2, 16, 16, 1024> {
  struct Raw {
    uint32_t indices[3], scales, d, skew;
  };

  static __device__ __forceinline__ const uint32_t* grid() { return IQ2_XS_GRID; }

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.indices, block, 8 * group);
    raw.scales = block[66 + group];
    raw.d = load_u16(block);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t* grid, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const float d = half_value(raw.d);
    scale[0] = d * (0.5f + byte_value(raw.scales & 15u, 0)) * 0.25f;
    scale[1] = d * (0.5f + byte_value(raw.scales >> 4, 0)) * 0.25f;
    const uint32_t words[2] = {word_after(raw.indices[0], raw.indices[1], raw.skew + 2),
                               word_after(raw.indices[1], raw.indices[2], raw.skew + 2)};
    // The high byte of each of the four, whose low bit belongs to the index.
    const uint32_t signs = with_parity(__byte_perm(words[0], words[1], 0x7531u) >> 1 & 0x7F7F7F7Fu);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t index = words[i / 2] >> (i % 2 * 16) & 511u;
      entry_with_signs(grid, index, signs >> (8 * i), q[2 * i], q[2 * i + 1]);
    }
  }
};

// d float16, then for each 32 values four indices of 8 bits and a word as in IQ3_XXS:
// d * (0.5 + scale) * 0.25 * entry * sign.
struct IQ2_XXS : Format<256, 66, 2, 16, 16, 512> {
  struct Raw {
    uint32_t words[3], d, skew;
  };

  static __device__ __forceinline__ const uint32_t* grid() { return IQ2_XXS_GRID; }

  static __device__ __forceinline__ Raw load(const uint8_t* block, int group) {
    Raw raw;
    load_words(raw.words, block, 8 * group);
    raw.d = load_u16(block);
    raw.skew = skew_of(block);
    return raw;
  }

  static __device__ __forceinline__ void integers(const Raw& raw, int, const uint32_t* grid, uint32_t (&q)[WORDS],
                                                  float (&scale)[RUNS], float (&)[RUNS]) {
    const uint32_t indices = word_after(raw.words[0], raw.words[1], raw.skew + 2);
    const uint32_t word = word_after(raw.words[1], raw.words[2], raw.skew + 2);
    scale[0] = scale[1] = half_value(raw.d) * (0.5f + byte_value(word >> 28, 0)) * 0.25f;
    const uint32_t signs = signs_of_28(word);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      entry_with_signs(grid, indices >> (8 * i) & 255u, signs >> (8 * i), q[2 * i], q[2 * i + 1]);
    }
  }
};

}  // namespace strata
