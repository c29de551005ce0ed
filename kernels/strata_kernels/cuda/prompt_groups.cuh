// Which tokens of a chunk go to which expert, as group_prompt leaves it and the experts' products take it.
//
// The experts of a layer are put into an order, by which they are computed: those that are read where they lie, then
// group by group those that are copied first. A place is a number in that order; "row" is a number in the list of all
// (token, rank) pairs by place, and by token within a place; a pair is token * top_k + rank.
#pragma once

#include "prompt_tile.cuh"

namespace strata {

// At most TILE_TOKENS rows of one expert.
struct GroupTile {
  int32_t place;
  int32_t expert;
  int32_t first_row;
  int32_t count;
};

// In device memory, for n tokens.
struct Groups {
  int32_t* pairs;         // [n * top_k], by row
  int32_t* first_tiles;   // [n_experts + 1]: the first tile of each place, and the number of all
  GroupTile* tiles;       // [n_experts + n * top_k / TILE_TOKENS] at most
};

// The experts that a launch computes, at places first .. last - 1, and where their matrices lie: at `addresses`
// uint64 [n_experts][3] (gate, up, down), or, where that is null, `stride` bytes apart from `staged` on.
struct Experts {
  const uint64_t* addresses;
  const uint8_t* staged;
  int64_t stride;
  int64_t up, down;  // where these begin within an expert
  int32_t first;
  int32_t last;

  __device__ __forceinline__ const uint8_t* matrix(const GroupTile& tile, int which) const {
    if (addresses != nullptr) return reinterpret_cast<const uint8_t*>(addresses[3 * tile.expert + which]);
    return staged + (tile.place - first) * stride + (which == 0 ? 0 : which == 1 ? up : down);
  }
};

// Takes tile number `index` of the launch; false where there are fewer.
__device__ __forceinline__ bool find_tile(const Groups& groups, const Experts& experts, int index, GroupTile& tile) {
  const int at = groups.first_tiles[experts.first] + index;
  if (at >= groups.first_tiles[experts.last]) return false;
  tile = groups.tiles[at];
  return true;
}

}  // namespace strata
