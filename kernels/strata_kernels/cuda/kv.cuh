// Where the K/V cells of a sequence lie.
//
// A range is consecutive addresses, `slab_bytes` a slab. A slab holds `cells_per_slab` cells (a multiple of 16) as
// [layer][K or V][cell][kv_head][head_dim] in float16 or bfloat16. In q8_0 each [layer][K or V] is a plane of int8
// [cell][kv_head][head_dim] followed by one of float16 scales [cell][kv_head][head_dim / 32]; value = scale * int8.
// Every plane begins on 16 bytes: cells come in multiples of 16.
#pragma once

#include "integers.cuh"

namespace strata {

enum KvType : int32_t { KV_F16 = 0, KV_BF16 = 1, KV_Q8_0 = 2 };

struct KvCells {
  uint8_t* base;
  int64_t slab_bytes;
  int32_t cells_per_slab;
  int32_t n_kv_heads;
  int32_t head_dim;  // a multiple of 16; of 32 for q8_0
  int32_t type;

  // Bytes of a cell's K or V in one layer, scales included.
  __device__ __forceinline__ int64_t cell_bytes() const {
    const int64_t values = static_cast<int64_t>(n_kv_heads) * head_dim;
    return type == KV_Q8_0 ? values + values / 16 : values * 2;
  }

  // The plane of K (0) or V (1) of a layer in the slab that holds `cell`.
  __device__ __forceinline__ uint8_t* plane(int layer, int k_or_v, int cell) const {
    return base + cell / cells_per_slab * slab_bytes + (2 * layer + k_or_v) * (cell_bytes() * cells_per_slab);
  }

  // Where the values [head_dim] of a cell and head begin.
  __device__ __forceinline__ uint8_t* values(int layer, int k_or_v, int cell, int head) const {
    const int64_t at = (static_cast<int64_t>(cell % cells_per_slab) * n_kv_heads + head) * head_dim;
    return plane(layer, k_or_v, cell) + (type == KV_Q8_0 ? at : 2 * at);
  }

  // q8_0: where the scales float16 [head_dim / 32] of a cell and head begin.
  __device__ __forceinline__ uint8_t* scales(int layer, int k_or_v, int cell, int head) const {
    const int64_t plane_values = static_cast<int64_t>(cells_per_slab) * n_kv_heads * head_dim;
    const int64_t at = (static_cast<int64_t>(cell % cells_per_slab) * n_kv_heads + head) * (head_dim / 32);
    return plane(layer, k_or_v, cell) + plane_values + 2 * at;
  }
};

}  // namespace strata
