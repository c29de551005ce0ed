// Attention of one token of each of several sequences: attend.cuh, a row of blocks for each.
//
// attend_rows_TYPE_DIM_HEADS: as attend_TYPE_DIM_HEADS, for n rows.
// Shapes: q, k, v as there, a row every `stride` values; steps [n] and cells [n] of the sequences; rope float32 [n][DIM / 2][2];
//   out float16 [n][n_heads * DIM] in eights; a workspace for each row, `workspace_stride` bytes apart, a multiple of 16.
// Launch geometry: (n_kv_heads, n_splits, n) blocks, threads and shared memory of strata_kernels.attention.attend_shape.
// Before it waits for the kernel before it, it reads all rows' positions and cells, too.
#pragma once

#include "attend.cuh"
#include "eights.cuh"

namespace strata {

// A row in eights in the place of an activation: where its first value is.
struct RowInEights {
  __half* values;

  // Values 4 quad ... of one thread.
  __device__ __forceinline__ void store_quad(int quad, const float (&v)[4], float, bool valid) const {
    if (valid) {
      __half* at = values + quad / 2 * (EIGHT * EIGHT) + quad % 2 * 4;
      *reinterpret_cast<uint2*>(at) = make_uint2(Half::pack(v[0], v[1]), Half::pack(v[2], v[3]));
    }
  }
};

struct AttendRowsArguments {
  const float* q;
  const float* k;
  const float* v;
  const float* q_norm;
  const float* k_norm;
  const float* rope;
  const Step* steps;
  const KvCells* cells;
  __half* out;
  uint8_t* workspace;
  int64_t stride;
  int64_t workspace_stride;
  int32_t layer;
  int32_t n_heads;
  float eps;

  template <int DIM>
  __device__ __forceinline__ AttendInputs<RowInEights> row(int i) const {
    return {q + i * stride,
            k + i * stride,
            v + i * stride,
            q_norm,
            k_norm,
            rope + i * DIM,
            steps + i,
            cells[i],
            {out + place_in_eights(i, 0, n_heads * DIM)},
            workspace + i * workspace_stride,
            layer,
            n_heads,
            eps};
  }
};

}  // namespace strata

#define ATTEND_ROWS(NAME, KV, DIM, HEADS)                                   \
  extern "C" __global__ void ATTEND_BOUNDS(KV, DIM, HEADS)                  \
      attend_rows_##NAME##_##DIM##_##HEADS(strata::AttendRowsArguments a) { \
    strata::attend<strata::KV, DIM, HEADS>(a.row<DIM>(blockIdx.z));         \
  }
