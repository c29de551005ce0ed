// The kernels of decode.cu, reading matrices where they lie.
#define STRATA_IN_PLACE
#include "decode.cu"
