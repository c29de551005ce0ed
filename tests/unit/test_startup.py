"""What runs beside the imports."""

import ctypes
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from strata_client import startup, timings
from strata_client.startup import Begun, Later, begin_cuda


class Driver:
    """`libcuda` with some GPUs; notes what is called."""

    def __init__(self, gpus: int = 1, failing: str = "") -> None:
        self.calls: list[str] = []
        self._gpus = gpus
        self._failing = failing

    def cuInit(self, flags: int) -> int:
        return self._called("cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._gpus
        return self._called("cuDeviceGetCount")

    def cuDevicePrimaryCtxRetain(self, context: Any, ordinal: int) -> int:
        return self._called(f"cuDevicePrimaryCtxRetain {ordinal}")

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return 999 if name == self._failing else 0


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a host with a GPU has the GPU's file and what programs it."""
    monkeypatch.setattr(startup, "CUDA_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "cuda").mkdir()
    return tmp_path


def calls_of(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    begun = begin_cuda()
    assert begun is not None
    begun.result()
    return driver.calls


def test_the_only_gpu_gets_its_context(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one GPU its primary context is made, in a thread of its own, whose stages are recorded."""
    made = ["cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain 0"]
    assert calls_of(Driver(), monkeypatch) == made
    assert [stage.name for stage in timings.stages() if stage.thread == "cuda"][-2:] == ["cuInit", "context"]


def test_with_several_gpus_only_the_driver_begins(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of several GPUs is used is not known yet: no memory of another one is taken."""
    assert calls_of(Driver(gpus=2), monkeypatch) == ["cuInit", "cuDeviceGetCount"]


def test_what_fails_is_left_to_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that fails, or is not there, is no error at the beginning."""
    assert calls_of(Driver(failing="cuInit"), monkeypatch) == ["cuInit"]

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    begun = begin_cuda()
    assert begun is not None
    begun.result()


@pytest.mark.parametrize("missing", ["cuda", "nvidiactl"])
def test_nothing_begins_without_a_gpu_or_its_package(directory: Path, missing: str) -> None:
    """Where there is no GPU, or nothing to program it with, CUDA is left alone."""
    (directory / missing).rename(directory / "away")
    assert begin_cuda() is None


def test_a_result_is_waited_for_and_errors_are_raised() -> None:
    """`result` gives what the function gave when it is ready, or raises what it raised, each time."""
    ready = threading.Event()
    begun = Begun("slow", lambda: ready.wait(60) and "done")
    ready.set()
    assert begun.result() == "done"

    def fail() -> None:
        raise ValueError("no")

    failed = Begun("bad", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            failed.result()


def test_later_runs_once_when_asked() -> None:
    """What is put off runs once, however often it is begun and wherever; waiting begins nothing."""
    threads: list[str] = []
    later = Later("late", lambda: threads.append(threading.current_thread().name))
    later.wait()
    assert not threads
    later.begin()
    later.begin().result()
    later.wait()
    assert threads == ["late"]


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["generate", "--nonsense"]])
def test_help_and_refusals_import_nothing_slow(arguments: list[str]) -> None:
    """Neither help nor a wrong option waits for numpy, gRPC, CUDA, tokenizers or protobuf."""
    program = (
        "import sys\nfrom strata_client import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    main.main()\nexcept SystemExit:\n    pass\n"
        "slow = {'numpy', 'grpc', 'cuda', 'tokenizers', 'google', 'gguf', 'rich'} & set(sys.modules)\n"
        "print('slow', sorted(slow))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "slow []", done.stdout + done.stderr
