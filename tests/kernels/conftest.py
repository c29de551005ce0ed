"""Where the kernels of these tests run."""

import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from strata_kernels import compiler

from tests.helpers.cuda_host import require_host_compiler
from tests.helpers.kernel_runner import GpuRunner, HostRunner, KernelRunner
from tests.helpers.require_gpu import require_gpu


@pytest.fixture(scope="session")
def gpu_runner() -> Iterator[GpuRunner]:
    """The first GPU, with the kernels that were loaded so far."""
    require_gpu()
    if missing := compiler.missing_features():
        pytest.fail(f"kernels cannot be compiled here; missing: {'; '.join(missing)}")
    runner = GpuRunner()
    yield runner
    runner.close()


@pytest.fixture(params=["host emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> Iterator[KernelRunner]:
    """Runs kernels, on the host and on a GPU."""
    if request.param == "gpu":
        gpu: GpuRunner = request.getfixturevalue("gpu_runner")
        yield gpu
        gpu.forget()
        return
    require_host_compiler()
    runner = HostRunner()
    yield runner
    runner.close()


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are new in each run; the seed is printed with a failure."""
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)
