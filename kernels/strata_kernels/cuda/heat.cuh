// How often experts were routed to.
#pragma once

#include "integers.cuh"

namespace strata {

// Where a layer's experts are counted: uint64 [n_experts] on the device, and in the page that is shared with the daemon,
// which gets the sums of the counts that changed.
struct Heat {
  uint64_t* counts;
  volatile uint64_t* shared;
};

}  // namespace strata
