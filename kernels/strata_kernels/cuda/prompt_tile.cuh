// Products of up to 64 tokens with rows of weights of any type, by one block: what prompt_matmul.cu is made of.
//
// Tensor cores multiply float16, so weights are decoded to it (rounded once, from float32) and activations lie in memory
// as it. Sums are float32. A weight beyond float16's range becomes the largest of its numbers.
//
// Each of a block's 8 warps has 16 rows of a matrix, a strip, which it alone decodes, into shared memory, and
// multiplies with the tokens' values, which all warps share. So matrices and types may differ from warp to warp, and the
// branch to a type is around a strip's loads and around its decoding, nothing else. Both go step by step through the
// columns, 128 in each. The loads of the next step's weights (to registers) and values (cp.async) are in flight while the
// tensor cores work on this step's.
#pragma once

#include "intrinsics.cuh"
#include "types.cuh"

namespace strata {

constexpr int TILE_TOKENS = 64;
constexpr int TILE_COLUMNS = 128;
constexpr int STRIP_ROWS = 16;
constexpr int TILE_WARPS = 8;
constexpr int TILE_THREADS = 32 * TILE_WARPS;

// Between rows in shared memory, in values: 16 bytes more than the row, so that the 8 rows of a matrix of `ldmatrix` lie
// in different banks.
constexpr int TILE_PITCH = TILE_COLUMNS + 8;

// Two stages of the tokens' values, the strips, and the tokens' scales.
constexpr int TILE_SHARED_BYTES = (2 * TILE_TOKENS + TILE_WARPS * STRIP_ROWS) * TILE_PITCH * 2 + TILE_TOKENS * 4;

constexpr float HALF_MAX = 65504.0f;

// Rows of float16 [.., k] with powers of two for where they would overflow: value i of a row is
// values[i] * scales[i / scale_width], float32 [.., ceil(k / scale_width)]. `scales` may be null: all are 1.
// k is a multiple of 8, `scale_width` of 8.
struct HalfRows {
  const __half* values;
  const float* scales;
  int32_t k;
  int32_t scale_width;

  __device__ __forceinline__ int n_scales() const { return (k + scale_width - 1) / scale_width; }
};

// Up to 16 rows of a matrix, the first at `rows`. There is at least one.
struct Strip {
  const uint8_t* rows;
  int type;
  int count;
};

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

// Within float16's range; what is not a number stays so.
__device__ __forceinline__ float clamp_to_half(float v) { return fabsf(v) > HALF_MAX ? copysignf(HALF_MAX, v) : v; }

// The float16 values of a group, two in each word.
template <typename F>
__device__ __forceinline__ void decode_halves(const typename F::Raw& raw, int group, uint32_t (&out)[F::VALUES / 2]) {
  float values[F::VALUES];
  bool is_large = !F::INTEGER;
  if constexpr (F::INTEGER) {
    uint32_t q[F::WORDS];
    float scale[F::RUNS], minimum[F::RUNS];
    F::integers(raw, group, F::grid(), q, scale, minimum);
#pragma unroll
    for (int run = 0; run < F::RUNS; ++run) {
      float largest = fabsf(scale[run]) * (128.0f + F::BIAS);
      if constexpr (F::HAS_MINIMUM) largest += fabsf(minimum[run]);
      is_large |= largest > HALF_MAX;
    }
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) {
      values[i] = scale[i / F::RUN] * signed_byte_value(q[i / 4], i % 4, static_cast<float>(F::BIAS));
      if constexpr (F::HAS_MINIMUM) values[i] -= minimum[i / F::RUN];
    }
  } else {
    F::values(raw, values);
  }
  if (is_large) {  // seldom
#pragma unroll
    for (int i = 0; i < F::VALUES; ++i) values[i] = clamp_to_half(values[i]);
  }
#pragma unroll
  for (int i = 0; i < F::VALUES / 2; ++i) out[i] = pack_halves(values[2 * i], values[2 * i + 1]);
}

// What of a strip a lane has in registers, whatever its type.
struct Kept {
  static constexpr int WORDS = 32;
  uint32_t words[WORDS];
};

// How the lanes of a warp part a strip's step among them: neighbours take neighbouring groups of a row.
template <typename F>
struct Parts {
  static_assert(F::RUN % 8 == 0 && TILE_COLUMNS % (F::RUNS * F::STRIDE) == 0, "a step has whole groups, stored by eights");
  static constexpr int A_ROW = TILE_COLUMNS / F::VALUES;  // groups
  static constexpr int A_LANE = STRIP_ROWS * A_ROW / 32;
  static constexpr int RAW_WORDS = static_cast<int>(sizeof(typename F::Raw)) / 4;
  static constexpr bool ARE_KEPT = A_LANE * RAW_WORDS <= Kept::WORDS;  // else they are loaded when they are decoded

  int group;  // of the row

  __device__ __forceinline__ explicit Parts(int step) : group(step * A_ROW + threadIdx.x % 32 % A_ROW) {}

  static __device__ __forceinline__ int row(int i) { return i * (32 / A_ROW) + threadIdx.x % 32 / A_ROW; }

  __device__ __forceinline__ typename F::Raw load(const Strip& strip, int k, int i) const {
    const int last = strip.count - 1, at = row(i) < last ? row(i) : last;
    const int64_t block = static_cast<int64_t>(at) * (k / F::BLOCK_VALUES) + group / F::GROUPS;
    return F::load(strip.rows + block * F::BLOCK_BYTES, group % F::GROUPS);
  }
};

// Asks for a step of a strip with rows of k values.
__device__ __forceinline__ void load_strip(const Strip& strip, int k, int step, Kept& kept) {
  with_type(strip.type, [&](auto format) {
    using F = decltype(format);
    using P = Parts<F>;
    if constexpr (P::ARE_KEPT) {
      const P parts(step);
      if (parts.group < k / F::VALUES) {
#pragma unroll
        for (int i = 0; i < P::A_LANE; ++i) {
          const typename F::Raw raw = parts.load(strip, k, i);
          memcpy(kept.words + i * P::RAW_WORDS, &raw, sizeof raw);
        }
      }
    }
  });
}

// Stores the step's values into `tile`, 16 rows of TILE_PITCH; zeros beyond k.
__device__ __forceinline__ void decode_strip(const Strip& strip, int k, int step, const Kept& kept, __half* tile) {
  with_type(strip.type, [&](auto format) {
    using F = decltype(format);
    using P = Parts<F>;
    const P parts(step);
    const int in_block = parts.group % F::GROUPS;
    const int column = parts.group / F::GROUPS * F::BLOCK_VALUES + F::first(in_block) - step * TILE_COLUMNS;
#pragma unroll
    for (int i = 0; i < P::A_LANE; ++i) {
      uint32_t out[F::VALUES / 2];
      if (parts.group < k / F::VALUES) {
        typename F::Raw raw;
        if constexpr (P::ARE_KEPT) {
          memcpy(&raw, kept.words + i * P::RAW_WORDS, sizeof raw);
        } else {
          raw = parts.load(strip, k, i);
        }
        decode_halves<F>(raw, in_block, out);
      } else {
#pragma unroll
        for (int j = 0; j < F::VALUES / 2; ++j) out[j] = 0;
      }
      __half* to = tile + P::row(i) * TILE_PITCH + column;
#pragma unroll
      for (int j = 0; j < F::VALUES / 8; ++j) {
        const int run = 8 * j / F::RUN, in_run = 8 * j % F::RUN;
        *reinterpret_cast<uint4*>(to + run * F::STRIDE + in_run) =
            make_uint4(out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]);
      }
    }
  });
}

// The products of a warp: token 16 m + g (+ 8), row 8 half + 2 t (+ 1) of its strip, for lane 4 g + t.
using Sums = float[TILE_TOKENS / 16][2][4];

// Adds a step's products with 16 M tokens.
template <int M>
__device__ __forceinline__ void multiply_step(const __half* tokens, const __half* strip, Sums& sums) {
  const int lane = threadIdx.x % 32;
  const __half* b = strip + (lane % 8 + lane / 16 * 8) * TILE_PITCH + lane / 8 % 2 * 8;
  const __half* a = tokens + lane % 16 * TILE_PITCH + lane / 16 * 8;
#pragma unroll
  for (int column = 0; column < TILE_COLUMNS; column += 16) {
    uint32_t weights[4], values[M][4];
    load_matrices(weights, b + column);
#pragma unroll
    for (int m = 0; m < M; ++m) load_matrices(values[m], a + 16 * m * TILE_PITCH + column);
    const uint32_t first[2] = {weights[0], weights[1]}, second[2] = {weights[2], weights[3]};
#pragma unroll
    for (int m = 0; m < M; ++m) {
      mma_f16(sums[m][0], values[m], first);
      mma_f16(sums[m][1], values[m], second);
    }
  }
}

// A block's tokens: `count` of them, 1 .. 64; the i-th is row `row(i)` of `rows`.
template <typename Row>
struct Tokens {
  HalfRows rows;
  int count;
  Row row;
};

template <typename Row>
__device__ __forceinline__ Tokens<Row> make_tokens(const HalfRows& rows, int count, Row row) {
  return {rows, count, row};
}

// What a block has in shared memory.
struct TileMemory {
  uint8_t* memory;

  __device__ __forceinline__ __half* tokens(int stage) const {
    return reinterpret_cast<__half*>(memory) + stage * (TILE_TOKENS * TILE_PITCH);
  }
  __device__ __forceinline__ __half* strip(int warp) const { return tokens(2) + warp * (STRIP_ROWS * TILE_PITCH); }
  __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(strip(TILE_WARPS)); }
};

// The pieces of 8 values that a thread copies of each step: the same columns of every 16th token.
template <typename Row>
struct Pieces {
  static constexpr int COUNT = TILE_TOKENS * TILE_COLUMNS / 8 / TILE_THREADS;
  static constexpr int A_ROW = TILE_COLUMNS / 8;

  const Tokens<Row>& tokens;
  int first, column;
  int64_t rows[COUNT];

  __device__ __forceinline__ explicit Pieces(const Tokens<Row>& tokens_)
      : tokens(tokens_), first(threadIdx.x / A_ROW), column(threadIdx.x % A_ROW * 8) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) rows[i] = token(i) < tokens.count ? tokens.row(token(i)) : 0;
  }

  __device__ __forceinline__ int token(int i) const { return first + i * (TILE_THREADS / A_ROW); }

  // Begins to copy a step's; zeros where there is no token or no column.
  __device__ __forceinline__ void copy(int step, __half* tile) const {
    const int at = step * TILE_COLUMNS + column;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool valid = token(i) < tokens.count && at < tokens.rows.k;
      const __half* from = tokens.rows.values + (valid ? rows[i] * tokens.rows.k + at : 0);
      copy_async(tile + token(i) * TILE_PITCH + column, from, valid);
    }
    commit_copies();
  }

  // Brings what this thread has copied to its token's scale.
  __device__ __forceinline__ void rescale(int step, __half* tile, const float* scales) const {
    const int at = step * TILE_COLUMNS + column;
    if (at >= tokens.rows.k) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (token(i) >= tokens.count) continue;
      const float scale = tokens.rows.scales[rows[i] * tokens.rows.n_scales() + at / tokens.rows.scale_width];
      const float ratio = scale / scales[token(i)];
      if (ratio == 1.0f) continue;
      __half* values = tile + token(i) * TILE_PITCH + column;
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = __float2half_rn(__half2float(values[j]) * ratio);
    }
  }
};

// The products of a block's tokens with each warp's strip, in `sums`. A warp without rows has a strip with `count` 0.
// All threads of the block call it with the same tokens. Another use of the memory needs a barrier first.
template <typename Row>
__device__ __forceinline__ void multiply_tile(const TileMemory& memory, const Tokens<Row>& tokens, const Strip& strip,
                                              Sums& sums) {
  const int k = tokens.rows.k, n_steps = (k + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const int warp = threadIdx.x / 32;
  const bool has_rows = strip.count > 0;
#pragma unroll
  for (int m = 0; m < TILE_TOKENS / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][half][i] = 0.0f;
    }
  }
  Kept kept;
  if (has_rows) load_strip(strip, k, 0, kept);
  const Pieces<Row> pieces(tokens);
  pieces.copy(0, memory.tokens(0));

  // A token whose scales differ is brought to the largest of them.
  float* scales = memory.scales();
  bool is_scaled = false;
  if (tokens.rows.scales != nullptr) {
    if (threadIdx.x < tokens.count) {
      const int n_scales = tokens.rows.n_scales();
      const float* given = tokens.rows.scales + static_cast<int64_t>(tokens.row(threadIdx.x)) * n_scales;
      float largest = given[0];
      for (int i = 1; i < n_scales; ++i) largest = fmaxf(largest, given[i]);
      scales[threadIdx.x] = largest;
      is_scaled = largest != 1.0f;
    }
    is_scaled = __syncthreads_or(is_scaled) != 0;
  }

  __half* tile = memory.strip(warp);
  for (int step = 0; step < n_steps; ++step) {
    if (has_rows) {
      decode_strip(strip, k, step, kept, tile);
      if (step + 1 < n_steps) load_strip(strip, k, step + 1, kept);
    }
    __half* values = memory.tokens(step % 2);
    wait_for_copies<0>();
    if (is_scaled) pieces.rescale(step, values, scales);
    __syncthreads();  // this step's values are there, and no warp reads the last one's
    if (step + 1 < n_steps) pieces.copy(step + 1, memory.tokens((step + 1) % 2));
    if (has_rows) {
      switch ((tokens.count + 15) / 16) {
        case 1: multiply_step<1>(values, tile, sums); break;
        case 2: multiply_step<2>(values, tile, sums); break;
        case 3: multiply_step<3>(values, tile, sums); break;
        default: multiply_step<4>(values, tile, sums); break;
      }
    }
    __syncwarp();
  }
  if (is_scaled) {
#pragma unroll
    for (int m = 0; m < TILE_TOKENS / 16; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * m + threadIdx.x % 32 / 4 + i / 2 * 8;
        const float scale = token < tokens.count ? scales[token] : 0.0f;
        sums[m][0][i] *= scale;
        sums[m][1][i] *= scale;
      }
    }
  }
}

// Calls body(token, row, products of `row` and the next) for what this lane has of its warp's products.
template <typename Body>
__device__ __forceinline__ void each_pair(const Sums& sums, int count, Body body) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < TILE_TOKENS / 16; ++m) {
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int token = 16 * m + 8 * eight + lane / 4;
      if (token < count) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          body(token, 8 * half + lane % 4 * 2, make_float2(sums[m][half][2 * eight], sums[m][half][2 * eight + 1]));
        }
      }
    }
  }
}

}  // namespace strata
