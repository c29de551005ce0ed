"""How far each kernel may be from its numpy reference: norm(a - b) / norm(b), a the kernel's and b the reference's.

Inputs are random and new in each run, so a bound is far from all that was seen, or from all that can be: rounding to
float16 alone takes 2^-11 of a value at most, 4.9e-4, and of a few values that much.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

BOUNDS = {
    "dequantize": 0.0,
    "embed": 1e-6,
    "matmul": 1.5e-4,
    "gate_up": 3e-4,
    "down": 3e-4,
    "down_part": 1e-3,  # of some experts alone: what 16 bits round off averages out less
    "attend_f16": 5e-4,
    "attend_bf16": 5e-5,
    "attend_q8_0": 8e-4,
    "store_kv": 6e-4,
    "attend_prompt_f16": 1e-3,
    "attend_prompt_bf16": 4e-3,
    "attend_prompt_q8_0": 2e-3,
    "matmul_prompt": 1.5e-3,
    "gate_up_prompt": 2e-3,
    "down_prompt": 2e-3,
    "rms_norm_prompt": 6e-4,
    "router_prompt": 1e-5,
    "combine_prompt": 1e-6,
    "matmul_rows": 1.5e-3,
    "gate_up_rows": 1.5e-3,
    "down_rows": 1.5e-3,
    "norm_rows": 6e-4,
    "route_rows": 1e-5,
    "attend_rows_f16": 7e-4,
    "attend_rows_bf16": 6e-4,
    "attend_rows_q8_0": 1e-3,
}
"""By operation. Zero: bit for bit."""


def relative_error(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """norm(a - b) / norm(b), in float64; NaN where either has one."""
    wide = np.asarray(b, np.float64)
    norm = float(np.linalg.norm(wide))
    error = float(np.linalg.norm(np.asarray(a, np.float64) - wide))
    return error / norm if norm > 0 else error


def check(operation: str, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
    """Fails unless `a` is near enough to `b` for the operation."""
    assert a.shape == b.shape, f"{operation}: shapes {a.shape} and {b.shape}"
    error, bound = relative_error(a, b), BOUNDS[operation]
    assert error <= bound, f"{operation}: relative error {error:.3g}, bound {bound:.3g}"
