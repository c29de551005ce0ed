// Kernels that test the host's emulation of CUDA; each is checked by test_cuda_host.py.
#include "intrinsics.cuh"

struct Pair {
  const float* values;
  int n;
};

// out[thread of the grid] = its coordinates, packed.
extern "C" __global__ void coordinates(uint32_t* out) {
  const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
      threadIdx.x | threadIdx.y << 4 | threadIdx.z << 8 | blockIdx.x << 12 | blockIdx.y << 16 | blockIdx.z << 20;
}

extern "C" __global__ void arguments(Pair pair, double factor, int64_t shift, float* out) {
  if (threadIdx.x < pair.n) out[threadIdx.x] = static_cast<float>(pair.values[threadIdx.x] * factor + shift);
}

// The block's sum by shuffles and shared memory; out[block].
extern "C" __global__ void __launch_bounds__(256) sum(const float* __restrict__ in, float* __restrict__ out) {
  __shared__ float partial[8];
  float v = in[blockIdx.x * blockDim.x + threadIdx.x];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < static_cast<int>(blockDim.x) / 32; ++i) v += partial[i];
    out[blockIdx.x] = v;
  }
}

// The same without its barrier.
extern "C" __global__ void sum_unsynchronized(const float* in, float* out) {
  __shared__ float partial[8];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = in[threadIdx.x];
  if (threadIdx.x == 0) out[0] = partial[0] + partial[7];
}

// Neighbours through shared memory: needs a barrier after the loads and one before the next.
template <bool BOTH>
__device__ void rotate(float* data) {
  DYNAMIC_SHARED(bytes);
  float* shared = reinterpret_cast<float*>(bytes);
  for (int i = 0; i < 3; ++i) {
    shared[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
    if (BOTH) __syncthreads();
  }
}
extern "C" __global__ void rotate_three(float* data) { rotate<true>(data); }
extern "C" __global__ void rotate_without_second_barrier(float* data) { rotate<false>(data); }

// 16 results of warp operations a lane.
extern "C" __global__ void warp(const int* in, int* out) {
  const int lane = threadIdx.x, v = in[lane];
  const unsigned all = 0xFFFFFFFFu;
  int* to = out + 16 * lane;
  to[0] = __shfl_sync(all, v, lane + 5);
  to[1] = __shfl_sync(all, v, 3, 8);
  to[2] = __shfl_up_sync(all, v, 2);
  to[3] = __shfl_up_sync(all, v, 3, 16);
  to[4] = __shfl_down_sync(all, v, 7);
  to[5] = __shfl_down_sync(all, v, 1, 4);
  to[6] = __shfl_xor_sync(all, v, 21);
  to[7] = static_cast<int>(__ballot_sync(all, v % 3 == 0));
  to[8] = __any_sync(all, v == in[9]) + 2 * __all_sync(all, v == in[9]);
  to[9] = __reduce_add_sync(all, v);
  to[10] = __reduce_max_sync(all, v);
  to[11] = static_cast<int>(__reduce_xor_sync(all, static_cast<unsigned>(v)));
  to[12] = static_cast<int>(__match_any_sync(all, v % 4));
  to[13] = static_cast<int>(__float2half_rn(__shfl_xor_sync(all, static_cast<float>(v), 1)));
  to[14] = __syncthreads_count(v % 2) + 100 * __syncthreads_or(v == in[31]) + 1000 * __syncthreads_and(v > 0);
  if (lane < 16) to[15] = __shfl_sync(0xFFFFu, v, 15 - lane);
  if (lane >= 16) to[15] = __reduce_min_sync(0xFFFF0000u, v);
  __syncwarp();
}

extern "C" __global__ void atomics(uint32_t* words, float* number, unsigned long long* wide) {
  atomicAdd(words + 0, 2u);
  atomicMax(words + 1, threadIdx.x);
  atomicInc(words + 2, 99u);
  if (atomicCAS(words + 3, 0u, threadIdx.x + 1u) == 0u) atomicExch(words + 4, 7u);
  atomicOr(words + 5, 1u << threadIdx.x % 32);
  atomicAdd(number, 0.5f);
  atomicAdd(wide, 1ull << 33);
}

// d [16][8] = c + a [16][16] b [16][8], from row-major memory; b as its columns.
template <bool BFLOAT>
__device__ void multiply(const uint16_t* a, const uint16_t* b, float* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const auto two = [](const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
  const uint32_t left[4] = {two(a + 16 * g + 2 * t), two(a + 16 * (g + 8) + 2 * t), two(a + 16 * g + 2 * t + 8),
                            two(a + 16 * (g + 8) + 2 * t + 8)};
  const uint32_t right[2] = {two(b + 16 * g + 2 * t), two(b + 16 * g + 2 * t + 8)};
  float sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = d[8 * (g + i / 2 * 8) + 2 * t + i % 2];
  if (BFLOAT) {
    strata::mma_bf16(sums, left, right);
  } else {
    strata::mma_f16(sums, left, right);
  }
  for (int i = 0; i < 4; ++i) d[8 * (g + i / 2 * 8) + 2 * t + i % 2] = sums[i];
}
extern "C" __global__ void multiply_f16(const uint16_t* a, const uint16_t* b, float* d) { multiply<false>(a, b, d); }
extern "C" __global__ void multiply_bf16(const uint16_t* a, const uint16_t* b, float* d) { multiply<true>(a, b, d); }

// d [16][8] = a [16][16] b [16][8], both row-major, by way of shared memory and ldmatrix.
extern "C" __global__ void multiply_from_shared(const uint16_t* a, const uint16_t* b, float* d) {
  __shared__ __align__(16) uint16_t left[16][16], right[16][8];
  const int lane = threadIdx.x;
  strata::copy_async(&left[lane / 2][lane % 2 * 8], a + 16 * (lane / 2) + lane % 2 * 8);
  strata::copy_async(&right[lane % 16][0], b + 8 * (lane % 16), lane < 16 || true);
  strata::commit_copies();
  strata::wait_for_copies<0>();
  __syncwarp();
  uint32_t fragments[4], columns[4];
  strata::load_matrices(fragments, &left[lane % 16][lane / 16 * 8]);
  strata::load_matrices_transposed(columns, &right[lane % 16][0]);
  const uint32_t two[2] = {columns[0], columns[1]};
  float sums[4] = {};
  strata::mma_f16(sums, fragments, two);
  for (int i = 0; i < 4; ++i) d[8 * (lane / 4 + i / 2 * 8) + 2 * (lane % 4) + i % 2] = sums[i];
}

// What is in shared memory after waiting for all but `pending` of three groups; the third word of 16 bytes is not valid.
template <int PENDING>
__device__ void copies(const uint4* in, uint4* out) {
  __shared__ uint4 to[3];
  for (int i = 0; i < 3; ++i) {
    strata::copy_async(&to[i], in + i, i < 2);
    strata::commit_copies();
  }
  strata::wait_for_copies<PENDING>();
  for (int i = 0; i < 3; ++i) out[i] = to[i];
}
extern "C" __global__ void copies_pending_0(const uint4* in, uint4* out) { copies<0>(in, out); }
extern "C" __global__ void copies_pending_1(const uint4* in, uint4* out) { copies<1>(in, out); }
extern "C" __global__ void copies_pending_3(const uint4* in, uint4* out) { copies<3>(in, out); }

// Rounded to float16 and bfloat16 and back, and combined.
extern "C" __global__ void halves(const float* in, uint16_t* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float v = in[i], w = in[n - 1 - i];
    out[6 * i] = __half_as_ushort(__float2half_rn(v));
    out[6 * i + 1] = __bfloat16_as_ushort(__float2bfloat16_rn(v));
    const __half2 a = __floats2half2_rn(v, w), b = __floats2half2_rn(w, w);
    out[6 * i + 2] = __half_as_ushort(__low2half(__hadd2(a, b)));
    out[6 * i + 3] = __half_as_ushort(__low2half(__hmul2(a, b)));
    out[6 * i + 4] = __half_as_ushort(__high2half(__hsub2(a, b)));
    out[6 * i + 5] = __half_as_ushort(__low2half(__hfma2(a, b, a)));
  }
}

// ---- What must be reported.

extern "C" __global__ void divergent_barrier(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1;
}

extern "C" __global__ void different_barriers(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

extern "C" __global__ void divergent_shuffle(int* out) {
  if (threadIdx.x != 7) out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, out[threadIdx.x], 1);
}

extern "C" __global__ void copy_at(const uint32_t* in, uint32_t* out, int from, int to) { out[to] = in[from]; }

extern "C" __global__ void misaligned(const uint8_t* in, uint4* out) {
  *out = *reinterpret_cast<const uint4*>(in + threadIdx.x + 4);
}

extern "C" __global__ void divide(int* values) { values[0] /= values[1]; }

extern "C" __global__ void endless(volatile int* flag) {
  while (*flag == 0) {
  }
}

// The first thread waits for the last to come.
extern "C" __global__ void wait_for_flag(volatile int* flag) {
  if (threadIdx.x == 0) {
    while (flag[0] == 0) __nanosleep(20);
    flag[1] = 1;
  }
  if (threadIdx.x == blockDim.x - 1) flag[0] = 1;
}

extern "C" __global__ void overflow_stack(int* out, int depth) {
  volatile int frame[1024];
  frame[depth % 1024] = depth;
  if (depth > 0) overflow_stack(out, depth - 1);
  out[0] = frame[depth % 1024];
}

// Shared memory as a block finds it.
extern "C" __global__ void fresh_shared(uint32_t* out) {
  __shared__ uint32_t words[4];
  DYNAMIC_SHARED(bytes);
  out[2 * blockIdx.x] = words[threadIdx.x];
  out[2 * blockIdx.x + 1] = bytes[0];
  words[threadIdx.x] = 1;
  bytes[0] = 1;
}

extern "C" __global__ void beyond_dynamic_shared(int at) {
  DYNAMIC_SHARED(bytes);
  bytes[at] = 1;
}

// ---- For what is watched: each of these is wrong with `WRONG`, and right without.

// Lanes take each other's values through shared memory.
template <bool WRONG>
__device__ void swap_in_warp(const float* in, float* out) {
  __shared__ float values[32];
  values[threadIdx.x] = in[threadIdx.x];
  if (!WRONG) __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 1] + __shfl_xor_sync(0xFFFFFFFFu, 0.0f, 1);
}
extern "C" __global__ void swaps(const float* in, float* out) { swap_in_warp<false>(in, out); }
extern "C" __global__ void swaps_without_barrier(const float* in, float* out) { swap_in_warp<true>(in, out); }

// A thread reads what another copies: at a barrier after each has waited, or before.
template <bool WRONG>
__device__ void copy_for_others(const uint4* in, uint4* out) {
  DYNAMIC_SHARED(bytes);
  uint4* to = reinterpret_cast<uint4*>(bytes);
  strata::copy_async(to + threadIdx.x, in + threadIdx.x);
  strata::commit_copies();
  if (WRONG) __syncthreads();
  strata::wait_for_copies<0>();
  if (!WRONG) __syncthreads();
  out[threadIdx.x] = to[(threadIdx.x + 1) % blockDim.x];
}
extern "C" __global__ void copies_for_others(const uint4* in, uint4* out) { copy_for_others<false>(in, out); }
extern "C" __global__ void copies_without_waiting(const uint4* in, uint4* out) { copy_for_others<true>(in, out); }

// A copy takes the place of what another thread still reads.
extern "C" __global__ void copies_too_early(const uint4* in, uint4* out) {
  __shared__ uint4 to[64];
  to[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = to[threadIdx.x ^ 1];
  strata::copy_async(to + threadIdx.x, in + threadIdx.x);
  strata::commit_copies();
  strata::wait_for_copies<0>();
}

// The last block adds up what all have stored.
template <bool WRONG>
__device__ void add_blocks(const float* in, float* parts, float* out, uint32_t* counter) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = in[blockIdx.x];
    is_last = WRONG ? blockIdx.x == gridDim.x - 1 : strata::count_arrival(counter) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last || threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int i = 0; i < static_cast<int>(gridDim.x); ++i) sum += __ldcg(parts + i);
  *out = sum;
}
extern "C" __global__ void adds_blocks(const float* in, float* parts, float* out, uint32_t* counter) {
  add_blocks<false>(in, parts, out, counter);
}
extern "C" __global__ void adds_blocks_unordered(const float* in, float* parts, float* out, uint32_t* counter) {
  add_blocks<true>(in, parts, out, counter);
}

// to = from + 1, after having waited; or something of it before.
extern "C" __global__ void adds_one(const float* from, float* to) {
  strata::wait_for_previous();
  strata::let_next_start();
  to[threadIdx.x] = from[threadIdx.x] + 1.0f;
}
extern "C" __global__ void adds_one_read_early(const float* from, float* to) {
  const float v = from[threadIdx.x];
  strata::wait_for_previous();
  to[threadIdx.x] = v + 1.0f;
}
extern "C" __global__ void adds_one_written_early(const float* from, float* to) {
  to[threadIdx.x] = 0.0f;
  strata::wait_for_previous();
  to[threadIdx.x] = from[threadIdx.x] + 1.0f;
}
extern "C" __global__ void adds_one_started_early(const float* from, float* to) {
  strata::let_next_start();
  strata::wait_for_previous();
  to[threadIdx.x] = from[threadIdx.x] + 1.0f;
}
extern "C" __global__ void waits_never(const float* from, float* to) {}
