// The routed experts of one token: what decode.cu does with all that were chosen, decode_part.cu with those that are here.
//
// An expert that another device computes has the addresses 0. Nothing is read of it, and it adds nothing.
#pragma once

#include "activation.cuh"
#include "heat.cuh"
#include "rows.cuh"
#include "routing.cuh"

#ifdef STRATA_IN_PLACE
#define GATE_UP_BOUNDS __launch_bounds__(256, 2)
#else
#define GATE_UP_BOUNDS __launch_bounds__(1024, 1)
#endif

namespace strata {

__device__ __forceinline__ float silu(float v) { return v / (1.0f + expf(-v)); }

// What other devices have summed up: `n` float32 vectors, `stride` values apart.
struct Sums {
  const float* values;
  int64_t stride;
  int32_t n;
};

// out = the activation of silu(rms * W_gate a) * (rms * W_up a), for each chosen expert [top_k, d_expert], unless ALL those
// that have addresses: the others' groups of `out` stay as they are. All chosen ones are counted as heat.
// `addresses` uint64 [n_experts][3]: gate, up and down of the layer's experts.
// Launch: (d_expert / rows, top_k) blocks of 16 threads for each of their rows, 16 to 64, or 16 in place. So few blocks as there are
// multiprocessors are shared among them evenly, whatever runs there when they come. Not programmatic behind the kernel that
// wrote `a`: only scores are waited for.
template <bool ALL>
__device__ __forceinline__ void multiply_gate_up(uint8_t* shared, const Activation& a, const float* scores,
                                                 const uint64_t* addresses, const Activation& out, const Heat& heat,
                                                 int n_experts, int top_k, int gate_type, int up_type, int n,
                                                 int d_expert, float eps) {
  __shared__ Routing routing;
  __shared__ __align__(8) float products[2][64];
  __shared__ const uint8_t* blocks[2];
  constexpr int MINE = EXPERTS_MAX / 256;  // experts whose addresses a thread keeps until one is chosen
  uint64_t gates[MINE], ups[MINE];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const int expert = threadIdx.x + 256 * i;
    if (threadIdx.x < 256 && expert < n_experts) {
      gates[i] = addresses[3 * expert];
      ups[i] = addresses[3 * expert + 1];
    }
  }
  // The activation is two kernels old: nothing to wait for.
  Stage stage{shared};
  const Activation near = ask_activation(stage, a, n);
  commit_copies();
  const float rms = inverse_rms(a, n, eps);
  const int64_t gate_stride = row_bytes(gate_type, n), up_stride = row_bytes(up_type, n);
  const int n_rows = blockDim.x / 16, first = n_rows * blockIdx.x;
  wait_for_copies<0>();  // whoever passes one of the barriers in `choose` has all of it
  wait_for_previous();
  let_next_start();
  routing.choose(scores, n_experts, top_k);
  const int expert = routing.experts[blockIdx.y];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (threadIdx.x < 256 && threadIdx.x + 256 * i == expert) {
      blocks[0] = reinterpret_cast<const uint8_t*>(gates[i]);
      blocks[1] = reinterpret_cast<const uint8_t*>(ups[i]);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = PAIR * warp;
  stage.place += warp * (room_of(PAIR * gate_stride) + room_of(PAIR * up_stride));
  const auto count_heat = [&]() {
    if (blockIdx.x == 0 && threadIdx.x == 0 && heat.counts != nullptr) {
      const uint64_t count = heat.counts[expert] + 1;
      heat.counts[expert] = count;
      heat.shared[expert] = count;
    }
  };
  if (!ALL && blocks[0] == nullptr) {
    count_heat();
    return;
  }
  const uint8_t* rows[2];
  rows[0] = stage.ask(blocks[0] + (first + mine) * gate_stride, PAIR * gate_stride);
  commit_copies();
  rows[1] = stage.ask(blocks[1] + (first + mine) * up_stride, PAIR * up_stride);
  commit_copies();
  count_heat();
#pragma unroll
  for (int matrix = 0; matrix < 2; ++matrix) {
    if (matrix == 0) {
      wait_for_rows<1>();
    } else {
      wait_for_rows<0>();
    }
    with_type(matrix == 0 ? gate_type : up_type, [&](auto format) {
      using F = decltype(format);
      const int64_t stride = row_bytes<F>(n);
      float sums[PAIR] = {0.0f, 0.0f};
      multiply<F>(rows[matrix], stride, n, lane, near, sums);
      const float2 found = make_float2(rms * warp_sum(sums[0]), rms * warp_sum(sums[1]));
      if (lane == 0) *reinterpret_cast<float2*>(products[matrix] + mine) = found;
    });
  }
  __syncthreads();
  // A warp for each group of 16 results.
  const int at = ACTIVATION_GROUP * warp + lane % ACTIVATION_GROUP;
  if (ACTIVATION_GROUP * warp >= n_rows) return;
  const float result = silu(products[0][at]) * products[1][at];
  store_results(out, (blockIdx.y * d_expert + first) / ACTIVATION_GROUP + warp, result, result * result);
}

// x float32 [d_model] += sum over the ranks of weight * (W_down a[rank]); out = the activation of x * weight.
// Unless ALL: over the ranks whose experts have addresses, and what is summed up `elsewhere` is added as well. Without
// `weight` there is neither x nor `elsewhere` to be added to the sum, and no `out`.
// Launch: d_model / 16 blocks of 256 threads.
template <bool ALL>
__device__ __forceinline__ void multiply_down(uint8_t* shared, const Activation& a, const float* scores,
                                              const uint64_t* addresses, float* x, const float* weight,
                                              const Activation& out, const Sums& elsewhere, int n_experts, int top_k,
                                              int type, int d_expert) {
  __shared__ Routing routing;
  __shared__ const uint8_t* experts[TOP_K_MAX];  // that are here, in the order of their ranks
  __shared__ int ranks[TOP_K_MAX], n_ranks;      // these; used unless ALL
  __shared__ __align__(8) float results[ACTIVATION_GROUP];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = ACTIVATION_GROUP * blockIdx.x, mine = PAIR * warp;
  const bool is_last = ALL || weight != nullptr;  // who adds up
  const float norm = is_last ? weight[first + lane % ACTIVATION_GROUP] : 0.0f;
  routing.choose(scores, n_experts, top_k);  // two kernels old: nothing to wait for
  if (ALL) {
    if (threadIdx.x < top_k) {
      experts[threadIdx.x] = reinterpret_cast<const uint8_t*>(addresses[3 * routing.experts[threadIdx.x] + 2]);
    }
  } else if (warp == 0) {
    const uint64_t address = lane < top_k ? addresses[3 * routing.experts[lane] + 2] : 0;
    const uint32_t here = __ballot_sync(0xFFFFFFFFu, address != 0);
    if (address != 0) {
      const int at = __popc(here & ((1u << lane) - 1u));
      experts[at] = reinterpret_cast<const uint8_t*>(address);
      ranks[at] = lane;
    }
    if (lane == 0) n_ranks = __popc(here);
  }
  __syncthreads();
  const int n_here = ALL ? top_k : n_ranks;
  // Unless ALL, of the first warp: what a lane's result is added to. One warp of a block reads and writes host memory, since
  // neighbours' accesses become one.
  float rest = 0.0f;
  with_type(type, [&](auto format) {
    using F = decltype(format);
    // The ranks in two halves, so that the first is multiplied while the second arrives.
    const int64_t stride = row_bytes<F>(d_expert);
    const int row_groups = d_expert / F::VALUES, half = (n_here + 1) / 2;
    const float inverse = 1.0f / static_cast<float>(row_groups);
    const uint32_t room = room_of(PAIR * stride);
    Stage stage{shared + warp * top_k * room};
    for (int i = 0; i < n_here; ++i) {
      stage.ask(experts[i] + (first + mine) * stride, PAIR * stride);
      if (i == half - 1) commit_copies();
    }
    commit_copies();
    wait_for_previous();
    let_next_start();
    float2 before = make_float2(0.0f, 0.0f);
    if (ALL) {
      before = *reinterpret_cast<const float2*>(x + first + mine);
    } else if (is_last && warp == 0) {
      const int at = first + lane % ACTIVATION_GROUP;
      rest = x[at];
      for (int i = 0; i < elsewhere.n; ++i) rest += elsewhere.values[i * elsewhere.stride + at];
    }
    float sums[PAIR] = {0.0f, 0.0f};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 0) {
        wait_for_rows<1>();
      } else {
        wait_for_rows<0>();
      }
      const int end = (part == 0 ? half : n_here) * row_groups;
#pragma unroll 1
      for (int at = part * half * row_groups + lane; at < end; at += 32) {
        const int i = static_cast<int>((static_cast<float>(at) + 0.5f) * inverse), group = at - i * row_groups;
        const int rank = ALL ? i : ranks[i];
        const int in_block = group % F::GROUPS, block = group / F::GROUPS;
        const ActivationPart<F> values(a, rank * d_expert + block * F::BLOCK_VALUES + F::first(in_block));
#ifdef STRATA_IN_PLACE
        const uint8_t* row = experts[i] + (first + mine) * stride + block * F::BLOCK_BYTES;
#else  // experts are aligned to 16
        const uint8_t* row = shared + (warp * top_k + i) * room + (first + mine) * stride % 16 + block * F::BLOCK_BYTES;
#endif
        const float weight_of_rank = routing.weights[rank];
#pragma unroll
        for (int r = 0; r < PAIR; ++r) {
          sums[r] += weight_of_rank * dot<F>(F::load(row + r * stride, in_block), in_block, F::grid(), values);
        }
      }
    }
    const float2 after = make_float2(before.x + warp_sum(sums[0]), before.y + warp_sum(sums[1]));
    if (lane == 0) {
      *reinterpret_cast<float2*>(results + mine) = after;
      if (ALL) *reinterpret_cast<float2*>(x + first + mine) = after;
    }
  });
  __syncthreads();
  if (mine != 0) return;
  float result = results[lane % ACTIVATION_GROUP];
  if (!ALL) {
    result += rest;
    if (lane < ACTIVATION_GROUP) x[first + lane] = result;
    if (!is_last) return;
  }
  store_results(out, blockIdx.x, result * norm, result * result);
}

}  // namespace strata
