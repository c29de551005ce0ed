// The tensor types that a compilation knows, and the branch to one of them.
//
// -DSTRATA_TYPES="X(Q4_K) X(Q6_K)" names those of one model; without it all are known.
#pragma once

#include "dequantize.cuh"

#ifndef STRATA_TYPES
#define STRATA_TYPES                                                                                                  \
  X(F32) X(F16) X(BF16) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) \
  X(IQ4_XS) X(IQ3_S) X(IQ3_XXS) X(IQ2_S) X(IQ2_XS) X(IQ2_XXS) X(MXFP4)
#endif

namespace strata {

// Numbers as GGUF has them.
enum Type : int32_t {
  TYPE_F32 = 0, TYPE_F16 = 1, TYPE_Q4_0 = 2, TYPE_Q4_1 = 3, TYPE_Q5_0 = 6, TYPE_Q5_1 = 7, TYPE_Q8_0 = 8,
  TYPE_Q2_K = 10, TYPE_Q3_K = 11, TYPE_Q4_K = 12, TYPE_Q5_K = 13, TYPE_Q6_K = 14, TYPE_IQ2_XXS = 16,
  TYPE_IQ2_XS = 17, TYPE_IQ3_XXS = 18, TYPE_IQ4_NL = 20, TYPE_IQ3_S = 21, TYPE_IQ2_S = 22, TYPE_IQ4_XS = 23,
  TYPE_BF16 = 30, TYPE_MXFP4 = 39,
};

// A matrix as it lies in its file: `rows` of blocks, one row after the other.
struct Matrix {
  const uint8_t* blocks;
  int32_t type;
  int32_t rows;
};

// Calls body(F()) for the struct F of a type; nothing for a type that this compilation does not know.
template <typename Body>
__device__ __forceinline__ void with_type(int type, Body body) {
  switch (type) {
#define X(name) \
  case TYPE_##name: body(name()); break;
    STRATA_TYPES
#undef X
    default: break;
  }
}

}  // namespace strata
