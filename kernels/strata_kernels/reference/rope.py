"""Rotary position embedding."""

import numpy as np
import numpy.typing as npt


def rope(x: npt.NDArray[np.float32], position: int, freq_base: float, scale: float = 1.0) -> npt.NDArray[np.float32]:
    """Rotates pairs of values by angles that grow with the position.

    The pairs are `(i, i + head_dim / 2)` ("neox"), not neighbours. Pair `i` turns by
    `scale * position * freq_base ** (-2 i / head_dim)`; angles are taken in float64.

    Args:
        x: float32 `[n, n_heads, head_dim]` of the tokens at `position`, `position + 1`, and so on.
        position: of the first token.
        freq_base: the base of the frequencies.
        scale: below 1 stretches the context (linear scaling).

    Returns:
        float32 `[n, n_heads, head_dim]`.

    Source: Su et al., "RoFormer", 2021, equation 34.
    """
    n, _, head_dim = x.shape
    frequencies = scale * freq_base ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(position, position + n)[:, None, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., : head_dim // 2], x[..., head_dim // 2 :]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
