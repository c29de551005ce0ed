"""What prompt processing does to its tokens' rows between matrix products."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from strata_kernels.prompt import ROW_THREADS
from strata_kernels.reference import rms_norm
from strata_kernels.structs import Activation, Matrix

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import random_matrix, unpack_activation
from tests.helpers.tensor_blocks import KINDS

SOURCE = "prompt_rows.cu"
EPS = np.float32(1e-6)
GUARD = 2  # blocks more than there are tokens


def nans(*shape: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[np.float32]:
    """An output before it is written."""
    return np.full(shape, np.nan, dtype)


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_embed(kernels: KernelRunner, rng: np.random.Generator, kind: Type, stride: int) -> None:
    """Each token's row of any type is there bit for bit; a token that does not exist shows as NaNs."""
    n, n_vocab, d = 7, 40, 512
    raw, values = random_matrix(kind, n_vocab, d, rng)
    rows = rng.integers(0, n_vocab, (n, stride)).astype(np.int32)
    tokens = rows[:, 0]
    tokens[2], tokens[3], tokens[4] = n_vocab - 1, n_vocab, -1
    x = nans(n, d)
    table = Matrix(kernels.address(raw), int(kind), n_vocab)
    kernels.run(SOURCE, "embed_prompt", n + GUARD, ROW_THREADS, [table, rows, stride, x, n, d])
    is_token = (tokens >= 0) & (tokens < n_vocab)
    assert np.array_equal(x[is_token], values[tokens[is_token]])
    assert np.isnan(x[~is_token]).all()


@pytest.mark.parametrize("n, d", [(1, 256), (5, 2048), (3, 4128)])
@pytest.mark.parametrize("with_floats", [True, False])
def test_rms_norm(kernels: KernelRunner, rng: np.random.Generator, n: int, d: int, with_floats: bool) -> None:
    """Normed rows in float16, and in float32 where it is wanted."""
    x = rng.standard_normal((n, d)).astype(np.float32) * np.float32(10.0) ** rng.integers(-3, 8, (n, 1))
    weight = (1 + 0.1 * rng.standard_normal(d)).astype(np.float32)
    halves, floats = nans(n, d, dtype=np.float16), nans(n, d)
    args = [x.astype(np.float32), weight, halves, floats if with_floats else np.uint64(0), n, d, EPS]
    kernels.run(SOURCE, "rms_norm_prompt", n + GUARD, ROW_THREADS, args)
    wanted = rms_norm(x, weight, float(EPS))
    check("rms_norm_prompt", halves, wanted)
    if with_floats:
        check("embed", floats, wanted)
        assert np.array_equal(halves, floats.astype(np.float16))


@pytest.mark.parametrize("n, d, top_k", [(1, 256, 4), (33, 2048, 8), (2, 96, 16), (4, 64, 1)])
def test_combine(kernels: KernelRunner, rng: np.random.Generator, n: int, d: int, top_k: int) -> None:
    """The experts' results, weighted and summed in the order of their ranks, are added."""
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, d), (n, top_k, d)))
    weights = rng.dirichlet(np.ones(top_k), n).astype(np.float32)
    before = x.copy()
    kernels.run(SOURCE, "combine_prompt", n + GUARD, ROW_THREADS, [x, y, weights, n, d, top_k])
    check("combine_prompt", x, before + np.einsum("nk,nkd->nd", weights, y))


@pytest.mark.parametrize("n, d", [(1, 256), (31, 2048), (5, 8192)])
def test_last_activation(kernels: KernelRunner, rng: np.random.Generator, n: int, d: int) -> None:
    """The last row as values, as 16-bit integers and with its sums of squares."""
    x, weight = rng.standard_normal((n, d)).astype(np.float32), rng.standard_normal(d).astype(np.float32)
    packed = np.full(Activation.size_bytes(d), 0xFF, np.uint8)
    out = Activation.at(kernels.address(packed), d)
    kernels.run(SOURCE, "last_activation", -(-d // 16 // ROW_THREADS), ROW_THREADS, [x, weight, out, n, d])
    values, rounded, sums, squares = unpack_activation(packed, d)
    assert np.array_equal(values, x[-1] * weight)
    assert np.abs(rounded - values).max() <= np.abs(values).max() / 32512
    assert np.allclose(sums, rounded.reshape(-1, 16).sum(axis=1), atol=1e-5 * np.abs(values).max())
    assert np.allclose(squares, (x[-1].reshape(-1, 16) ** 2).sum(axis=1), rtol=1e-5)
