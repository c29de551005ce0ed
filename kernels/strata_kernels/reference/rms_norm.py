"""Root mean square normalization."""

import numpy as np
import numpy.typing as npt


def rms_norm(x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], eps: float) -> npt.NDArray[np.float32]:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis.

    Args:
        x: float32 `[..., d]`.
        weight: float32 `[d]`.
        eps: added to the mean.

    Returns:
        float32 `[..., d]`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    mean = np.mean(x * x, axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight)
