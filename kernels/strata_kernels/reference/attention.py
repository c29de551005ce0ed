"""Causal attention over the segments of a K/V cache."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from strata_kernels.reference.softmax import softmax

F32 = npt.NDArray[np.float32]


def attention(q: F32, segments: Sequence[tuple[F32, F32]], position: int) -> F32:
    """Each token attends to the cells up to its own.

    Query heads share K/V heads in groups of `n_heads / n_kv_heads` neighbours. Sums go over all cells at
    once, so that their bits do not depend on where one segment ends and the next begins.

    Args:
        q: float32 `[n, n_heads, head_dim]` of the tokens at `position`, `position + 1`, and so on.
        segments: K and V of the cells from 0 on, float32 `[cells, n_kv_heads, head_dim]` each, in order;
            together `position + n` cells.
        position: of the first token.

    Returns:
        float32 `[n, n_heads, head_dim]`.

    Source: Ainslie et al., "GQA", 2023; Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    n, n_heads, head_dim = q.shape
    n_kv_heads = segments[0][0].shape[1]
    group = n_heads // n_kv_heads
    by_head = q.reshape(n, n_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    grouped = by_head.reshape(n_kv_heads, group * n, head_dim)

    k, v = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*segments, strict=True))
    scores: F32 = (grouped @ k.transpose(1, 2, 0)).reshape(n_kv_heads, group, n, -1)
    scores *= np.float32(1 / math.sqrt(head_dim))
    n_cells = scores.shape[-1]
    future = np.arange(n_cells) > np.arange(position, position + n)[:, None]
    scores[:, :, future] = -np.inf
    weights = softmax(scores).reshape(n_kv_heads, group * n, n_cells)

    out: F32 = weights @ v.transpose(1, 0, 2)
    return out.reshape(n_kv_heads, group, n, head_dim).transpose(2, 0, 1, 3).reshape(n, n_heads, head_dim)
