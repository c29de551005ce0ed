// The kernels of batch_matmul.cu, reading matrices where they lie.
#define STRATA_IN_PLACE
#include "batch_matmul.cu"
