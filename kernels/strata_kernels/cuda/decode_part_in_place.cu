// The kernels of decode_part.cu, reading matrices where they lie.
#define STRATA_IN_PLACE
#include "decode_part.cu"
