// Products of a matrix's rows with an activation: what decode spends its time on.
//
// A warp asks for all of its rows at once, by copies to shared memory, which need no registers: so there is room for
// the next kernel's blocks beside it, and, since weights depend on no kernel, these ask for theirs while this one ends.
// A warp multiplies when its own have come. With STRATA_IN_PLACE rows are read where they lie: those that are too long.
#pragma once

#include "activation.cuh"
#include "dot.cuh"
#include "intrinsics.cuh"
#include "types.cuh"

// Registers: so few that blocks of the next kernel find room beside these; in place, enough to have loads in flight.
#ifdef STRATA_IN_PLACE
#define ROWS_BOUNDS __launch_bounds__(256, 2)
#else
#define ROWS_BOUNDS __launch_bounds__(256, 4)
#endif

namespace strata {

// The sum over a warp, the same bits in every lane.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  return v;
}

// 1 / RMS of a vector of n values, from the sums of squares in its activation; for a whole warp.
__device__ __forceinline__ float inverse_rms(const Activation& a, int n, float eps) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < n / ACTIVATION_GROUP; i += 32) sum += a.squares[i];
  return rsqrtf(warp_sum(sum) / static_cast<float>(n) + eps);
}

// Bytes of a row of n values.
template <typename F>
__device__ __forceinline__ int64_t row_bytes(int n) {
  return static_cast<int64_t>(n) / F::BLOCK_VALUES * F::BLOCK_BYTES;
}

// The same, of a type by its number.
__device__ __forceinline__ int64_t row_bytes(int type, int n) {
  int64_t bytes = 0;
  with_type(type, [&](auto format) { bytes = row_bytes<decltype(format)>(n); });
  return bytes;
}

// Rows of a warp.
constexpr int PAIR = 2;

// Shared memory for bytes that begin anywhere.
__device__ __forceinline__ uint32_t room_of(int64_t size_bytes) {
  return (static_cast<uint32_t>(size_bytes) + 30u) / 16u * 16u;
}

// Shared memory, given out piece by piece to what is copied there.
struct Stage {
  uint8_t* place;

  // Asks for bytes, with `n_threads` threads of which this is number `thread`; the caller ends the group of copies.
  // Where they will be, as they are aligned where they come from. Whole units of 16 bytes are read, but for the last.
  __device__ __forceinline__ const uint8_t* ask(const uint8_t* from, int64_t size_bytes, int thread, int n_threads) {
#ifdef STRATA_IN_PLACE
    return from;
#else
    uint8_t* const to = place;
    const uint32_t skew = reinterpret_cast<uint64_t>(from) % 16, size = static_cast<uint32_t>(size_bytes) + skew;
    const uint32_t rest = size % 16, whole = size - rest;
    for (uint32_t at = 16 * thread; at < whole; at += 16 * n_threads) copy_async(to + at, from - skew + at);
    if (rest != 0 && thread == 0) copy_part_async(to + whole, from - skew + whole, rest);
    place += room_of(size_bytes);
    return to + skew;
#endif
  }

  // With a warp.
  __device__ __forceinline__ const uint8_t* ask(const uint8_t* from, int64_t size_bytes) {
    return ask(from, size_bytes, threadIdx.x % 32, 32);
  }
};

// The activation of n values, all but its floats on their way to shared memory, by all threads of a block.
__device__ __forceinline__ Activation ask_activation(Stage& stage, const Activation& a, int n) {
  const auto ask = [&](const void* from, int size_bytes) {
    return const_cast<uint8_t*>(stage.ask(static_cast<const uint8_t*>(from), size_bytes, threadIdx.x, blockDim.x));
  };
  Activation near = a;
  near.high = reinterpret_cast<uint32_t*>(ask(a.high, n));
  near.low = reinterpret_cast<uint32_t*>(ask(a.low, n));
  near.scales = reinterpret_cast<float*>(ask(a.scales, n / ACTIVATION_GROUP * 4));
  near.sums = reinterpret_cast<float*>(ask(a.sums, n / ACTIVATION_GROUP * 4));
  return near;
}

// What this warp asked for before its last PENDING groups is there, for all of its lanes.
template <int PENDING>
__device__ __forceinline__ void wait_for_rows() {
  wait_for_copies<PENDING>();
  __syncwarp();
}

// Adds to `sums` a thread's share of the products of ROWS rows, `stride` bytes apart, with an activation. STEP threads
// share them, of which this is number `at`.
template <typename F, int ROWS, int STEP = 32>
__device__ __forceinline__ void multiply(const uint8_t* row, int64_t stride, int n, int at, const Activation& a,
                                         float (&sums)[ROWS]) {
#pragma unroll 1
  for (int group = at; group < n / F::VALUES; group += STEP) {
    const int in_block = group % F::GROUPS;
    const uint8_t* block = row + static_cast<int64_t>(group / F::GROUPS) * F::BLOCK_BYTES;
    const ActivationPart<F> part(a, group / F::GROUPS * F::BLOCK_VALUES + F::first(in_block));
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      sums[r] += dot<F>(F::load(block + r * stride, in_block), in_block, F::grid(), part);
    }
  }
}

// The group of an activation that a block's 16 results are, from shared memory; for its first warp. `square` is that of
// lane % 16, to be summed up.
__device__ __forceinline__ void store_results(const Activation& out, int group, float value, float square) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) square += __shfl_xor_sync(0xFFFFFFFFu, square, offset);
  out.store_lane(group, value, square);
}

}  // namespace strata
