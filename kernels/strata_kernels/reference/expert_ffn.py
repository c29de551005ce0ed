"""The feed-forward network of one expert."""

import numpy as np
import numpy.typing as npt

from strata_kernels.reference.matmul import matmul
from strata_kernels.reference.swiglu import swiglu

F32 = npt.NDArray[np.float32]


def expert_ffn(x: F32, gate: F32, up: F32, down: F32) -> F32:
    """`down(silu(gate(x)) * up(x))`.

    Args:
        x: float32 `[..., n, d_model]`, the tokens routed to this expert.
        gate: float32 `[d_expert, d_model]`.
        up: float32 `[d_expert, d_model]`.
        down: float32 `[d_model, d_expert]`.

    Returns:
        float32 `[..., n, d_model]`, not yet weighted.
    """
    return matmul(swiglu(matmul(x, gate), matmul(x, up)), down)
