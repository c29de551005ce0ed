"""The CUDA dequantization kernels on a GPU."""

import ctypes
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType
from strata_kernels import compiler

from tests.helpers.require_gpu import require_gpu
from tests.helpers.tensor_blocks import KINDS, expected, random_blocks
from vmmd.driver.cuda_calls import bindings, call, current

pytestmark = pytest.mark.gpu

THREADS = 256
POISON = 0xFFC0FFEE  # a NaN that the blocks do not decode to
GUARD = 1024  # values past the last that must stay as they are

Run = Callable[[GGMLQuantizationType, npt.NDArray[np.uint8], int, int], npt.NDArray[np.uint32]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a type's kernel on the first GPU over blocks, for so many values and on a grid of so many blocks."""
    require_gpu()
    if missing := compiler.missing_features():
        pytest.fail(f"kernels cannot be compiled here; missing: {'; '.join(missing)}")
    cu = bindings()
    device = call(cu.cuDeviceGet, 0)
    attribute = cu.CUdevice_attribute
    major, minor = (
        call(cu.cuDeviceGetAttribute, code, device)
        for code in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    compiled = compiler.compile_source(compiler.SOURCES / "dequantize.cu", f"sm_{major}{minor}")
    context = call(cu.cuDevicePrimaryCtxRetain, device)
    with current(cu, context):
        module = call(cu.cuModuleLoadData, compiled.cubin)

    def run_kernel(
        kind: GGMLQuantizationType, blocks: npt.NDArray[np.uint8], n: int, n_grid: int
    ) -> npt.NDArray[np.uint32]:
        out = np.empty(n + GUARD, np.uint32)
        with current(cu, context):
            function = call(cu.cuModuleGetFunction, module, f"dequantize_{kind.name}".encode())
            source, target = call(cu.cuMemAlloc, blocks.nbytes), call(cu.cuMemAlloc, out.nbytes)
            try:
                call(cu.cuMemcpyHtoD, source, blocks.ctypes.data, blocks.nbytes)
                call(cu.cuMemsetD32, target, POISON, out.size)
                arguments = (int(source), int(target), n), (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
                call(cu.cuLaunchKernel, function, n_grid, 1, 1, THREADS, 1, 1, 0, 0, arguments, 0)
                call(cu.cuMemcpyDtoH, out.ctypes.data, target, out.nbytes)
            finally:
                call(cu.cuMemFree, source)
                call(cu.cuMemFree, target)
        assert np.all(out[n:] == POISON)
        return out[:n]

    yield run_kernel
    with current(cu, context):
        call(cu.cuModuleUnload, module)
    call(cu.cuDevicePrimaryCtxRelease, device)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantize_is_exact(run: Run, kind: GGMLQuantizationType) -> None:
    """Each type's values are those of the gguf package, bit for bit, on any size of grid."""
    blocks = random_blocks(kind, 8192)
    wanted = expected(blocks, kind)
    for n_grid in (-(-wanted.size // 8 // THREADS), 7, 1):
        assert np.array_equal(run(kind, blocks, wanted.size, n_grid), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_few_blocks(run: Run, kind: GGMLQuantizationType) -> None:
    """Fewer groups than threads come right, and nothing is written past them."""
    blocks = random_blocks(kind, 256)
    wanted = expected(blocks, kind)
    block_values = wanted.size // len(blocks)
    for n_blocks, n_grid in itertools.product((1, 3, 255), (1, 40)):
        n = n_blocks * block_values
        assert np.array_equal(run(kind, blocks[:n_blocks], n, n_grid), wanted[:n])
