"""The library for other engines on GPUs, and on a stand-in where there is none."""

import functools
from collections.abc import Iterator

import pytest

from tests.helpers.cuda_peer import GIB, Machine
from tests.helpers.library_peer import LibraryEngine
from tests.helpers.peer import Admin, Remote


@pytest.fixture(scope="module", params=["fake-cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Real GPUs, or the stand-in."""
    if request.param == "cuda":
        yield Machine.real()
        return
    yield Machine.stand_in(tmp_path_factory.mktemp("others"))


def test_memory_of_a_gpu_is_lent_and_comes_back(machine: Machine) -> None:
    """Views are addresses of the GPU that stay where they are; nothing is unmapped before its kernels have ended."""
    kind = functools.partial(LibraryEngine, fake=machine.fake)
    with (
        machine.daemon(f"host_cap_bytes = {GIB}\n") as daemon,
        Admin(daemon.directory) as admin,
        Remote(daemon.directory, kind=kind) as engine,
    ):
        slab_bytes = engine.ask("lease", 2, 4)
        assert slab_bytes == machine.slab_bytes
        engine.ask("write", 5, 0, 2 * slab_bytes)
        assert engine.ask("grow", 4) == 4 * slab_bytes
        engine.ask("write", 6, 2 * slab_bytes, 2 * slab_bytes)
        assert engine.ask("read", 2 * slab_bytes - 100, 200) == {5, 6}
        assert engine.ask("read", 0, 2 * slab_bytes) == {5}
        kind_of_device, number, ordinal = engine.ask("dlpack_device")
        assert (kind_of_device, number) == (2, ordinal)
        assert "copy it with the GPU's framework" in engine.ask("numpy_says")
        assert admin.device().kv_bytes == 4 * slab_bytes
        assert engine.ask("shrink", 1) == 1
        assert admin.device().kv_bytes == slab_bytes
        for outcome in engine.ask("write_with_frameworks", 7):
            assert outcome.split(": ")[1] == "wrote {7}, kept its memory", outcome
        engine.ask("close")
        assert admin.device().kv_bytes == 0
