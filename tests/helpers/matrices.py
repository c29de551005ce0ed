"""Matrices and activations for tests of kernels."""

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from strata_kernels.structs import Activation

from tests.helpers.tensor_blocks import SCALE_OFFSETS

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_EXPONENTS = (116, 124)  # of MXFP4's scales: 2^-12 .. 2^-5


def random_matrix(kind: GGMLQuantizationType, rows: int, columns: int, rng: np.random.Generator) -> tuple[U8, F32]:
    """A matrix whose values are of the size that weights have.

    Returns:
        Its blocks, uint8 `[rows, row_bytes]`, and its values, float32 `[rows, columns]`.
    """
    if kind.name in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, columns), np.float32) * np.float32(0.05)
        raw = gguf.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    else:
        block_values, block_bytes = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (rows * columns // block_values, block_bytes), np.uint8)
        for offset in SCALE_OFFSETS[kind.name]:
            halves = rng.uniform(1e-4, 2e-3, len(blocks)).astype(np.float16)
            blocks[:, offset : offset + 2] = halves[:, None].view(np.uint8)
        if kind.name == "MXFP4":
            blocks[:, 0] = rng.integers(*_EXPONENTS, len(blocks))
        raw = blocks.reshape(rows, -1)
    return np.ascontiguousarray(raw), gguf.dequantize(raw, kind).reshape(rows, columns)


def pack_activation(values: F32, squares: F32 | None = None) -> U8:
    """The bytes of an activation, as `Activation.at` lays them out; `squares` float32 `[n / 16]`."""
    groups = values.reshape(-1, 16).astype(np.float64)
    scales = np.abs(groups).max(axis=1, keepdims=True).astype(np.float32) / np.float32(32512)
    whole = np.rint(np.divide(groups, scales, out=np.zeros_like(groups), where=scales > 0)).astype(np.int32)
    high = (whole + 128 >> 8).astype(np.int8)
    low = (whole & 255).astype(np.uint8)
    sums = scales[:, 0] * whole.sum(axis=1).astype(np.float32)
    parts = (values.astype(np.float32), high, low, scales, sums, np.zeros_like(sums) if squares is None else squares)
    packed = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
    assert len(packed) == Activation.size_bytes(values.size)
    return packed


def unpack_activation(packed: U8, n: int) -> tuple[F32, F32, F32, F32]:
    """The values as floats, the same from the integers, the sums and the squares."""
    values = packed[: 4 * n].view(np.float32)
    high = packed[4 * n : 5 * n].view(np.int8).astype(np.float32)
    low = packed[5 * n : 6 * n].view(np.int8).astype(np.float32)
    scales, sums, squares = packed[6 * n :].view(np.float32).reshape(3, n // 16)
    rounded = (256 * high + low).reshape(-1, 16) * scales[:, None]
    return values, rounded.reshape(-1), sums, squares


def in_eights(rows: npt.NDArray[np.float16], padded: int = 16) -> npt.NDArray[np.float16]:
    """Rows float16 `[n, k]` as `eights.cuh` lays them out, padded with NaNs to a multiple of so many."""
    n, k = rows.shape
    whole = np.full((-(-n // padded) * padded, k), np.nan, np.float16)
    whole[:n] = rows
    return np.ascontiguousarray(whole.reshape(-1, 8, k // 8, 8).transpose(0, 2, 1, 3))


def from_eights(values: npt.NDArray[np.float16], n: int) -> npt.NDArray[np.float16]:
    """The first n rows `[n, k]` of those that lie in eights, float16 `[n_eights, k / 8, 8, 8]`."""
    return values.transpose(0, 2, 1, 3).reshape(-1, 8 * values.shape[1])[:n]
