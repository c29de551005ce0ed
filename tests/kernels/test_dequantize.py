"""The CUDA dequantization."""

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from strata_kernels import reference
from strata_kernels.cuda import iq_grids

from tests.helpers import cuda_host
from tests.helpers.kernel_runner import HostRunner, KernelRunner
from tests.helpers.tensor_blocks import KINDS, expected, random_blocks

THREADS = 256
POISON = 0xFFC0FFEE  # a NaN that the blocks do not decode to


@pytest.fixture
def contracting(kernels: KernelRunner) -> Iterator[KernelRunner]:
    """Runs kernels on the host with products and sums contracted to one operation."""
    if kernels.on_gpu:
        pytest.skip("a GPU's compiler contracts anyway")
    if not cuda_host.can_contract():
        pytest.skip("this processor has no fused multiply-add")
    runner = HostRunner(contracted=True)
    yield runner
    runner.close()


def run(
    kernels: KernelRunner, kind: GGMLQuantizationType, blocks: npt.NDArray[np.uint8], n: int, n_grid: int
) -> npt.NDArray[np.uint32]:
    """The bits of the first n values of blocks, from a grid of so many blocks."""
    out = np.full(n, POISON, np.uint32)
    kernels.run("dequantize.cu", f"dequantize_{kind.name}", n_grid, THREADS, [blocks, out, ctypes.c_int64(n)])
    return out


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantize_is_exact(kernels: KernelRunner, kind: GGMLQuantizationType) -> None:
    """Each type's values are those of the gguf package, bit for bit, from loads inside the blocks, on any grid."""
    blocks = random_blocks(kind, 8192 if kernels.on_gpu else 2048)
    wanted = expected(blocks, kind)
    for n_grid in (-(-wanted.size // 8 // THREADS), 7, 1):
        assert np.array_equal(run(kernels, kind, blocks, wanted.size, n_grid), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_contraction_changes_nothing(contracting: KernelRunner, kind: GGMLQuantizationType) -> None:
    """A compiler that makes one operation of a product and a sum leaves every bit as it is."""
    blocks = random_blocks(kind, 2048, seed=2)
    wanted = expected(blocks, kind)
    assert np.array_equal(run(contracting, kind, blocks, wanted.size, 3), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_few_blocks(kernels: KernelRunner, kind: GGMLQuantizationType) -> None:
    """Fewer groups than threads come right, and nothing is written past them."""
    blocks = random_blocks(kind, 256)
    wanted = expected(blocks, kind)
    block_values = wanted.size // len(blocks)
    for n_blocks, n_grid in itertools.product((1, 3, 255), (1, 40)):
        n = n_blocks * block_values
        assert np.array_equal(run(kernels, kind, blocks[:n_blocks], n, n_grid), wanted[:n])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_reference_agrees(kind: GGMLQuantizationType) -> None:
    """The numpy function that the kernels name gives the same bits."""
    blocks = random_blocks(kind, 256, seed=1)
    with np.errstate(all="ignore"):
        ours = reference.dequantize(blocks, kind).reshape(-1).view(np.uint32)
    assert np.array_equal(ours, expected(blocks, kind))


def test_random_blocks_cover_all_bytes() -> None:
    """The blocks of these tests have all 256 values in every byte that is not part of a float16 number."""
    blocks = random_blocks(GGMLQuantizationType.MXFP4, 256)
    assert all(len(np.unique(column)) == 256 for column in blocks.T)


def test_grids_are_fresh() -> None:
    """The committed grids are what the script makes of the gguf package's tables."""
    assert iq_grids.HEADER.read_text() == iq_grids.render()
