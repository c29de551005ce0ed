"""Matrix product with a weight matrix."""

import numpy as np
import numpy.typing as npt


def matmul(x: npt.NDArray[np.float32], weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """`x @ weight.T`: a weight matrix has a row for each output, as in GGUF files.

    Args:
        x: float32 `[..., n, d_in]`.
        weight: float32 `[d_out, d_in]`.

    Returns:
        float32 `[..., n, d_out]`, accumulated in float32.
    """
    return x @ weight.T
