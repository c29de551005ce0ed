"""The gated activation of the feed-forward networks."""

import numpy as np
import numpy.typing as npt


def swiglu(gate: npt.NDArray[np.float32], up: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`silu(gate) * up`, where `silu(x) = x / (1 + exp(-x))`.

    Args:
        gate: float32 `[..., d]`.
        up: float32 `[..., d]`.

    Returns:
        float32 `[..., d]`.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """
    with np.errstate(over="ignore"):  # exp(-x) is inf for very negative x; the quotient is then 0, as it should be
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
