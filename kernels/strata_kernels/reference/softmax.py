"""Softmax."""

import numpy as np
import numpy.typing as npt


def softmax(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`exp(x) / sum(exp(x))` over the last axis, shifted by the maximum so that nothing overflows.

    Args:
        x: float32 `[..., n]`; -inf gives probability 0; at least one is finite.

    Returns:
        float32 `[..., n]`.
    """
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
