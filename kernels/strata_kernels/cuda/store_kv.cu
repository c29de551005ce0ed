// What comes before a prompt's attention: the angles of rotation; norm, rotation and storing.
//
// rope_table_prompt
// Operation: table[i][j] = cos and sin of scale * (position + i) * freq_base ^ (-2 j / head_dim).
// Must match: strata_kernels.reference.rope.
// Shapes: table float32 [n][head_dim / 2][2].
// Launch geometry: n blocks of head_dim / 2 threads.
//
// store_kv_f32, store_kv_f16
// Operation: norms and rotates q and k of n tokens; stores k and v into the cells position .. position + n - 1.
// Must match: strata_kernels.reference.rms_norm, rope, and kv_store rounded to the cells' type.
// Shapes: q [n, n_heads * head_dim], k and v [n, n_kv_heads * head_dim], float32 or float16, a token's row every
//   `stride` values (even); q_norm, k_norm float32 [head_dim]; table as above; q_out float16 [n, n_heads, head_dim].
//   head_dim is a multiple of 16, 256 at most.
// Layout: cells as kv.cuh says.
// Launch geometry: ceil(n * (n_heads + 2 * n_kv_heads) / 8) blocks of 256 threads; a warp takes one head of one token.
// Accumulation: float32.
#include "attention.cuh"
#include "rope.cuh"

namespace strata {

struct StoreArguments {
  const void* q;
  const void* k;
  const void* v;
  const float* q_norm;
  const float* k_norm;
  const float* table;
  __half* q_out;
  KvCells cells;
  int64_t stride;
  int32_t layer;
  int32_t n_heads;
  int32_t position;
  int32_t n;
  float eps;
};

template <typename T>
__device__ __forceinline__ void store_kv(const StoreArguments& a) {
  constexpr int HEAD_DIM_MAX = 256;
  __shared__ float wide[8][HEAD_DIM_MAX];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int dim = a.cells.head_dim, n_kv_heads = a.cells.n_kv_heads, n_all = a.n_heads + 2 * n_kv_heads;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 8 + warp;
  const int token = static_cast<int>(at / n_all), task = static_cast<int>(at % n_all);
  wait_for_previous();
  let_next_start();
  if (token >= a.n) return;

  const bool is_q = task < a.n_heads, is_k = !is_q && task < a.n_heads + n_kv_heads;
  const int head = is_q ? task : is_k ? task - a.n_heads : task - a.n_heads - n_kv_heads;
  const T* from = static_cast<const T*>(is_q ? a.q : is_k ? a.k : a.v) + token * a.stride + head * dim;
  Head<HEAD_DIM_MAX / 128> x(dim, lane);
  x.load(from);
  if (is_q || is_k) {
    Head<HEAD_DIM_MAX / 128> weight(dim, lane);
    float4 turns[HEAD_DIM_MAX / 128];
    weight.load(is_q ? a.q_norm : a.k_norm);
    x.load_turns(a.table + static_cast<int64_t>(token) * dim, turns);
    float squares[1] = {x.square()};
    sum_over_warp(squares);
    x.norm(weight, squares[0], a.eps);
    x.rotate(turns);
  }
  if (is_q) {
    __half* to = a.q_out + (static_cast<int64_t>(token) * a.n_heads + head) * dim;
    x.each([&](int place, float first, float second) {
      *reinterpret_cast<uint32_t*>(to + place) = Half::pack(first, second);
    });
    return;
  }
  const int cell = a.position + token, k_or_v = is_k ? 0 : 1;
  uint8_t* to = a.cells.values(a.layer, k_or_v, cell, head);
  if (a.cells.type != KV_Q8_0) {
    x.each([&](int place, float first, float second) {
      *reinterpret_cast<uint32_t*>(to + 2 * place) =
          a.cells.type == KV_F16 ? Half::pack(first, second) : Bfloat::pack(first, second);
    });
    return;
  }
  x.each([&](int place, float first, float second) {
    *reinterpret_cast<float2*>(&wide[warp][place]) = make_float2(first, second);
  });
  __syncwarp();
  __half* scales = reinterpret_cast<__half*>(a.cells.scales(a.layer, k_or_v, cell, head));
  for (int block = 0; block < dim / Q8_BLOCK; ++block) {
    __half scale;
    to[block * Q8_BLOCK + lane] = static_cast<uint8_t>(quantize(wide[warp][block * Q8_BLOCK + lane], scale));
    if (lane == 0) scales[block] = scale;
  }
}

}  // namespace strata

extern "C" __global__ void rope_table_prompt(float2* table, int position, double freq_base, double scale,
                                             int head_dim) {
  strata::wait_for_previous();
  strata::let_next_start();
  const int token = blockIdx.x, pair = threadIdx.x;
  table[static_cast<int64_t>(token) * (head_dim / 2) + pair] =
      strata::turn_of(position + token, pair, freq_base, scale, head_dim);
}

extern "C" __global__ void __launch_bounds__(256) store_kv_f32(strata::StoreArguments a) { strata::store_kv<float>(a); }

extern "C" __global__ void __launch_bounds__(256) store_kv_f16(strata::StoreArguments a) {
  strata::store_kv<__half>(a);
}
