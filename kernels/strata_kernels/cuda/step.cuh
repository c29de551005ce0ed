// What a decode step reads instead of being told, and what the graph advances by itself.
#pragma once

#include "integers.cuh"

namespace strata {

constexpr int RING_WORDS = 16;  // as strata_api.v1.pages.RING_WORDS

// In device memory; one a sequence.
struct Step {
  uint64_t number;   // of the launch that runs, as the session page counts; advanced last
  int32_t position;  // cell that the token is evaluated in
  int32_t token;     // to be evaluated; the sampler replaces it by the one to be evaluated next
};

}  // namespace strata
