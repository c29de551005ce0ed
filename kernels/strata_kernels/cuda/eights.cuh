// Rows of float16 in eights: value c of row r is at [r / 8][c / 8][r % 8][c % 8], for k columns, a multiple of 8.
//
// What the lanes of a warp take of the tokens of a dense product then lies side by side: row by row, every 16 bytes were in
// another line of the cache, and all in the same of its banks.
#pragma once

#include "integers.cuh"

namespace strata {

constexpr int EIGHT = 8;

__device__ __forceinline__ int64_t place_in_eights(int row, int column, int k) {
  return static_cast<int64_t>(row / EIGHT) * (EIGHT * k) + (column / EIGHT * EIGHT + row % EIGHT) * EIGHT + column % EIGHT;
}

}  // namespace strata
