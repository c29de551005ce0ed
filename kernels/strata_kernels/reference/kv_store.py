"""Puts new keys and values into the cells of a K/V cache."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]


def kv_store(k: F32, v: F32, segments: Sequence[tuple[F32, F32]], position: int) -> None:
    """Copies `n` tokens' K and V into the cells `position .. position + n`.

    Args:
        k: float32 `[n, n_kv_heads, head_dim]`.
        v: float32 `[n, n_kv_heads, head_dim]`.
        segments: K and V of the cells from 0 on, float32 `[cells, n_kv_heads, head_dim]` each, in order;
            together at least `position + n` cells. Written in place.
        position: cell of the first token.
    """
    start = 0
    for k_cells, v_cells in segments:
        end = start + len(k_cells)
        first, last = max(start, position), min(end, position + len(k))
        if first < last:
            k_cells[first - start : last - start] = k[first - position : last - position]
            v_cells[first - start : last - start] = v[first - position : last - position]
        start = end
