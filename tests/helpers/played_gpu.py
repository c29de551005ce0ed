"""GPUs that the host plays, under the engines of `strata_client.gpu`, with a real daemon on the host driver."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_client import attached as attaching
from strata_client.attached import Attached, attach
from strata_client.gpu import decoder, prompt, streaming
from strata_client.gpu import engine as gpu_engine
from strata_client.mapping import MappedRange
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from strata_client.session import Session
from tests.helpers.cuda_host import require_host_compiler
from tests.helpers.daemon import Daemon
from tests.helpers.gguf_builder import DATA
from tests.helpers.host_device import HostBuffer, HostDevice, HostKernelSet

MICRO = DATA / "micro.gguf"


def play(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory, streams and kernels in the place of GPUs', which are told from each other by their UUIDs.

    All are of one process, so that events order streams of several. Real GPUs go on while a range grows, which waits
    for that; these run nothing by themselves, so they are told to.
    """
    require_host_compiler()
    rng = np.random.default_rng(np.random.default_rng().integers(1 << 32))
    devices: list[HostDevice] = []
    for module in (decoder, gpu_engine, prompt, streaming):
        monkeypatch.setattr(module, "DeviceBuffer", lambda size_bytes: HostBuffer(size_bytes, devices[0].cu))
    uuids: list[str] = []
    lock = threading.Lock()  # several may be loaded at once

    def device(uuid: str) -> HostDevice:
        with lock:
            if uuid not in uuids:
                uuids.append(uuid)
            devices.append(HostDevice(rng, devices[0] if devices else None, uuids.index(uuid)))
            return devices[-1]

    def kernels(sources: Sequence[Path], types: Sequence[str]) -> HostKernelSet:
        return HostKernelSet(devices[0], sources)

    change = Session._change

    def change_between_steps(session: Session, how: Callable[[], None]) -> None:
        if threading.current_thread() is threading.main_thread():  # the watch thread waits until that one is idle
            for device in devices:
                device.synchronize()
        change(session, how)

    monkeypatch.setattr(gpu_engine, "Device", device)
    monkeypatch.setattr(gpu_engine, "Kernels", kernels)
    monkeypatch.setattr(MappedRange, "address", property(lambda self: self.view.ctypes.data))
    monkeypatch.setattr(Session, "_change", change_between_steps)


@contextmanager
def attached_micro(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, *, gpu: bool, context: int = 256, path: Path = MICRO, **how: Any
) -> Iterator[Attached]:
    """micro.gguf, or another model, attached, to be computed on the host or on GPUs that it plays."""
    monkeypatch.setattr(attaching, "is_gpu", lambda uuid: gpu)
    with open_model_file(str(path)) as model_file:
        lines: list[str] = []
        with attach(
            Qwen3Moe(model_file), model_file, [daemon.directory], context=context, device=None, kv_type=None,
            say=lines.append, say_verbose=lines.append, signals=Signals(), progress=lambda done, total: None, **how,
        ) as attached:  # fmt: skip
            yield attached
