// Instructions that C++ has no words for. tests/helpers/cuda_host/ defines the same functions for the host.
//
// STRATA_HOST is defined there; everything else in this folder is the same source for both.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "integers.cuh"

#ifndef STRATA_HOST

// Shared memory whose size the launch gives: declares `uint8_t name[]`, aligned to 16 bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint8_t name[]

namespace strata {

// How much of it the launch gave.
__device__ __forceinline__ uint32_t dynamic_shared_bytes() {
  uint32_t size;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(size));
  return size;
}

// ---- Programmatic dependent launch (from sm_90; before it a kernel begins when the one before has ended).

// Waits until the kernels that this one was launched after have ended and their stores are seen. Every thread that
// reads or overwrites what they touch calls it first.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel after this one start, as soon as every block has said so or ended.
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Between the blocks of a launch.

// Adds 1 to a counter in global memory and returns what it was. A block that has a barrier, then one thread's call, has
// published what all its threads stored; with a barrier after the call they see what those that called before have.
__device__ __forceinline__ uint32_t count_arrival(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// ---- Integers.

// sum + the dot product of four signed bytes with four signed bytes.
__device__ __forceinline__ int dot4(uint32_t a, uint32_t b, int sum) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
}

// ---- Exponential function: 2^x within 2^-22 of it; 0 where that is less than 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- Loads of what is read once: not kept in the L1 cache. `p` is aligned to 16 bytes.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// ---- Copies from global to shared memory that go on behind the thread; 16 bytes, both aligned to 16.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// Only the first `n` are read, and zeros written for the others. It is another instruction: neighbours' copies of host
// memory seem not to become one request then, which halves the rate.
__device__ __forceinline__ void copy_part_async(void* shared, const void* global, uint32_t n) {
  const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(n) : "memory");
}

// All 16 bytes, or none.
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  copy_part_async(shared, global, valid ? 16 : 0);
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the latest PENDING groups of this thread have arrived. Other threads' need a barrier too.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- Tensor cores: d += a * b, m16n8k16, float32 sums. Fragments as the PTX manual lays them out, with lane = 4 g + t:
// a[0] row g, columns 2t 2t+1; a[1] row g + 8; a[2], a[3] the same with columns + 8; b[0] rows 2t 2t+1 of column g,
// b[1] rows + 8; d[0], d[1] row g, columns 2t 2t+1; d[2], d[3] row g + 8.
__device__ __forceinline__ void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit values from shared memory: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes,
// aligned to 16); out[m] holds of matrix m row lane / 4, columns 2 (lane % 4) and the next. `transposed`: of its transpose.
__device__ __forceinline__ void load_matrices(uint32_t (&out)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&out)[4], const void* row) {
  const uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(from)
               : "memory");
}

}  // namespace strata

#endif  // STRATA_HOST
