// The routed experts of one token where peers compute some of them: docs/kernels.md tells who computes when.
//
// gate_up_part  silu(W_gate h) * (W_up h) of the chosen experts that are here        reference.expert_ffn
// down_part     sum over these of weight * W_down g, and others' sums                reference.expert_ffn
//
// Shapes, launch geometry, shared memory and accumulation are those of decode.cu; decode_part_in_place.cu reads rows where
// they lie.
#include "mixture.cuh"

using namespace strata;

// decode.cu's gate_up for the experts that have addresses.
extern "C" __global__ void GATE_UP_BOUNDS
    gate_up_part(Activation a, const float* scores, const uint64_t* addresses, Activation out, Heat heat, int n_experts,
                 int top_k, int gate_type, int up_type, int n, int d_expert, float eps) {
  DYNAMIC_SHARED(shared);
  multiply_gate_up<false>(shared, a, scores, addresses, out, heat, n_experts, top_k, gate_type, up_type, n, d_expert, eps);
}

// decode.cu's down for the experts that have addresses: with `weight` for the device that has x, which adds what others
// have summed up; without it for those, and x is their sum.
extern "C" __global__ void ROWS_BOUNDS
    down_part(Activation a, const float* scores, const uint64_t* addresses, float* x, const float* weight, Activation out,
              Sums elsewhere, int n_experts, int top_k, int type, int d_expert) {
  DYNAMIC_SHARED(shared);
  multiply_down<false>(shared, a, scores, addresses, x, weight, out, elsewhere, n_experts, top_k, type, d_expert);
}
