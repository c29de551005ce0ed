"""The products of quantized weights with 16-bit activations."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from strata_kernels.structs import Activation, Matrix

from tests.helpers.kernel_bounds import relative_error
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import pack_activation, random_matrix, unpack_activation
from tests.helpers.tensor_blocks import KINDS, SCALE_OFFSETS

SOURCE = Path(__file__).with_name("products.cu")
INTEGERS = [kind for kind in KINDS if kind.name not in ("F32", "F16", "BF16")]
SUMS = 2e-6  # what float32 loses in sums
ROUNDING = 1.5e-4  # what 16 bits lose: 1.6e-5 of the weights' norm, more of sums in which their mean cancels


def multiply(
    kernels: KernelRunner, kind: GGMLQuantizationType, raw: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8], n: int
) -> npt.NDArray[np.float32]:
    """The product of a matrix's blocks with an activation of n values, from the kernel."""
    out = np.full(len(raw), np.nan, np.float32)
    args = [Activation.at(kernels.address(packed), n), Matrix(kernels.address(raw), int(kind), len(raw)), out, n]
    kernels.run(SOURCE, "multiply", -(-len(raw) // 64), 64, args, types=[kind.name])
    return out


def random_activation(rng: np.random.Generator, n: int) -> npt.NDArray[np.float32]:
    """Values of many sizes, some groups of 16 all zero, with a mean that is not."""
    values = rng.standard_normal(n) * np.exp(rng.standard_normal(n)) + 0.3
    values[rng.integers(0, n // 16) * 16 :][:16] = 0
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [256, 768])
def test_dot(kernels: KernelRunner, rng: np.random.Generator, kind: GGMLQuantizationType, n: int) -> None:
    """Products are those of the decoded weights with the rounded activation but for float32's sums."""
    raw, values = random_matrix(kind, 67, n, rng)
    x = random_activation(rng, n)
    packed = pack_activation(x)
    rounded = unpack_activation(packed, n)[1].astype(np.float64)
    out = multiply(kernels, kind, raw, packed, n)
    exact = values.astype(np.float64) @ x.astype(np.float64)
    if kind in INTEGERS:
        assert relative_error(out, values.astype(np.float64) @ rounded) < SUMS
        assert relative_error(out, exact) < ROUNDING
    else:
        assert relative_error(out, exact) < SUMS


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_each_value(kernels: KernelRunner, rng: np.random.Generator, kind: GGMLQuantizationType) -> None:
    """Every weight of a row meets the value of its own place."""
    n = 256
    raw, values = random_matrix(kind, 3, n, rng)
    for place in rng.choice(n, 24, replace=False):
        x = np.zeros(n, np.float32)
        x[place] = 1
        out = multiply(kernels, kind, raw, pack_activation(x), n)
        # What a minimum or a bias adds and takes away again is some times as large as the weight.
        assert np.abs(out - values[:, place]).max() <= 1e-5 * np.abs(values).max()


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda kind: kind.name)
def test_largest(kernels: KernelRunner, rng: np.random.Generator, kind: GGMLQuantizationType) -> None:
    """Sums of equal bits of weights and values that are all the largest of their 16 overflow nothing."""
    n = 512
    raw, _ = random_matrix(kind, 3, n, rng)
    block_bytes = GGML_QUANT_SIZES[kind][1]
    kept = [at + i for at in SCALE_OFFSETS[kind.name] for i in range(2)] if kind.name != "MXFP4" else [0]
    blocks = raw.reshape(3, -1, block_bytes)
    blocks[:, :, np.setdiff1d(np.arange(block_bytes), kept)] = np.array([0x00, 0x80, 0xFF], np.uint8)[:, None, None]
    values = gguf.dequantize(raw, kind).astype(np.float64)
    x = np.full(n, -3.0, np.float32)
    out = multiply(kernels, kind, raw, pack_activation(x), n)
    assert np.all(np.abs(out - values @ x) <= 1e-6 * np.abs(values).sum(axis=1) * 3)


def test_store(kernels: KernelRunner, rng: np.random.Generator) -> None:
    """A kernel stores the activation that the tests' helper makes, but for ties of the rounding."""
    n = 1040
    x = random_activation(rng, n)
    packed = np.full(Activation.size_bytes(n), 0xFF, np.uint8)
    kernels.run(SOURCE, "activate", 2, 64, [x, Activation.at(kernels.address(packed), n), n])
    values, rounded, sums, squares = unpack_activation(packed, n)
    largest = np.abs(x).reshape(-1, 16).max(axis=1)
    assert np.array_equal(values, x)
    assert np.all(np.abs(rounded - x).reshape(-1, 16).max(axis=1) <= largest / 32512 * 0.51)
    groups = rounded.reshape(-1, 16).astype(np.float64)  # whose sums may be near zero
    assert np.all(np.abs(sums - groups.sum(axis=1)) <= 1e-6 * np.abs(groups).sum(axis=1))
    assert not squares.any()
