"""A GPU with streams that the host plays: what `strata_client.gpu` enqueues, run in any order that CUDA allows.

Nothing runs before `HostDevice.synchronize`. Then the operation at the front of a stream that is chosen by chance
runs, unless it waits for an event, again and again. So what is not ordered by streams and events happens in
different orders.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from strata_kernels.launch import Dimensions, as_value

from tests.helpers.cuda_host import GuardedMemory, HostKernels

Array = npt.NDArray[Any]

OK = (0,)


class _Event:
    """The operation that recorded it last."""

    def __init__(self) -> None:
        self.recorded: _Operation | None = None


class _Operation:
    def __init__(self, run: Callable[[], None], waits_for: "_Operation | None" = None) -> None:
        self.run = run
        self.waits_for = waits_for
        self.is_done = False


class HostCuda:
    """The calls of ``cuda.bindings.driver`` that concern streams, events, copies and graphs."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._streams: list[deque[_Operation]] = []
        self._captured: dict[int, list[Callable[[], Any]]] = {}  # by stream that is captured
        self.copied_bytes = 0

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        """A stream by its number, from 1 on."""
        self._streams.append(deque())
        return 0, len(self._streams)

    def cuStreamDestroy(self, stream: int) -> tuple[int]:
        """Streams must be done."""
        assert not self._streams[stream - 1]
        return OK

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        """Runs until a stream is empty."""
        while self._streams[stream - 1]:
            self._run_one()
        return OK

    def cuEventCreate(self, flags: int) -> tuple[int, _Event]:
        """An event."""
        return 0, _Event()

    def cuEventDestroy(self, event: _Event) -> tuple[int]:
        """Nothing is left of it."""
        return OK

    def cuEventRecord(self, event: _Event, stream: int) -> tuple[int]:
        """Waits that follow mean this place in the stream."""
        event.recorded = self.enqueue(stream, lambda: None)
        return OK

    def cuEventSynchronize(self, event: _Event) -> tuple[int]:
        """Runs until the place that was recorded last is done."""
        while event.recorded is not None and not event.recorded.is_done:
            self._run_one()
        return OK

    def cuStreamWaitEvent(self, stream: int, event: _Event, flags: int) -> tuple[int]:
        """What comes later in the stream waits for the place that was recorded last."""
        self.enqueue(stream, lambda: None, event.recorded)
        return OK

    def cuMemcpyAsync(self, target: int, source: int, size_bytes: int, stream: int) -> tuple[int]:
        """Copies when its turn comes."""
        self.copied_bytes += size_bytes
        self.enqueue(stream, lambda: ctypes.memmove(target, source, size_bytes))
        return OK

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        """What is enqueued from here on is kept instead."""
        self._captured[stream] = []
        return OK

    def cuStreamEndCapture(self, stream: int) -> tuple[int, list[Callable[[], Any]]]:
        """A graph: what was kept, in its order."""
        return 0, self._captured.pop(stream)

    def cuGraphInstantiate(self, graph: list[Callable[[], Any]], flags: int) -> tuple[int, list[Callable[[], Any]]]:
        """The graph itself."""
        return 0, graph

    def cuGraphUpload(self, graph: list[Callable[[], Any]], stream: int) -> tuple[int]:
        """Nothing to do."""
        return OK

    def cuGraphDestroy(self, graph: list[Callable[[], Any]]) -> tuple[int]:
        """Instances outlive it."""
        return OK

    def cuGraphLaunch(self, graph: list[Callable[[], Any]], stream: int) -> tuple[int]:
        """Enqueues all of it."""
        for run in graph:
            self.enqueue(stream, run)
        return OK

    def enqueue(self, stream: int, run: Callable[[], Any], waits_for: _Operation | None = None) -> _Operation:
        """Puts an operation at the end of a stream, or into the graph that is captured there."""
        operation = _Operation(run, waits_for)
        if stream in self._captured:
            self._captured[stream].append(run)
        else:
            self._streams[stream - 1].append(operation)
        return operation

    def _run_one(self) -> None:
        """Runs an operation that is at the front of its stream and may run."""
        ready = [s for s in self._streams if s and (s[0].waits_for is None or s[0].waits_for.is_done)]
        assert ready, "streams wait for each other"
        operation = ready[self._rng.integers(len(ready))].popleft()
        operation.run()
        operation.is_done = True


class HostDevice:
    """In the place of `strata_client.gpu.device.Device`."""

    multiprocessors = 4
    shared_bytes_max = 99 * 1024

    def __init__(self, rng: np.random.Generator) -> None:
        self.cu = HostCuda(rng)
        self.stream = self.cu.cuStreamCreate(0)[1]
        self._pinned: list[Array] = []

    def make_current(self) -> None:
        """There is no other."""

    def synchronize(self) -> None:
        """Runs all that the stream has."""
        self.cu.cuStreamSynchronize(self.stream)

    def close(self) -> None:
        """Runs all that the stream has."""
        self.synchronize()

    def event(self) -> _Event:
        """An event."""
        return _Event()

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array that lives as long as this device."""
        self._pinned.append(np.zeros(shape, dtype))
        return self._pinned[-1]

    def register(self, page: Array) -> int:
        """Where the page is anyway."""
        return page.ctypes.data

    def upload(self, address: int, array: Array) -> None:
        """Copies what the array holds now."""
        data = array.tobytes()
        self.cu.enqueue(self.stream, lambda: ctypes.memmove(address, data, len(data)))

    def download(self, array: Array, address: int) -> None:
        """Fills an array after all that the stream has."""
        self.synchronize()
        ctypes.memmove(array.ctypes.data, address, array.nbytes)


class HostLaunch:
    """In the place of `strata_kernels.launch.Launch`: takes the arguments as they are when it is called."""

    def __init__(
        self, run: Callable[..., None], args: list[Any], grid: Dimensions, enqueue: Callable[..., Any]
    ) -> None:
        self.args = args
        self._run = run
        self._grid = grid
        self._enqueue = enqueue

    def resize(self, grid: Dimensions) -> None:
        """Another grid from the next call on."""
        self._grid = grid

    def __call__(self) -> None:
        """Enqueues it."""
        args = [type(arg).from_buffer_copy(arg) for arg in self.args]
        grid = self._grid
        self._enqueue(lambda: self._run(grid, args))


class HostKernelSet:
    """In the place of `strata_kernels.launch.Kernels`."""

    def __init__(self, device: HostDevice, sources: Sequence[Path]) -> None:
        self._cu = device.cu
        self._kernels = {name: kernels for kernels in map(HostKernels.compile, sources) for name in kernels.names}

    def prepare(
        self,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int = 0,
        stream: int = 0,
        programmatic: bool = False,
    ) -> HostLaunch:
        """Puts a launch together."""
        kernels = self._kernels[name]

        def run(grid: Dimensions, values: list[Any]) -> None:
            kernels.launch(name, grid, block, values, shared_bytes)

        return HostLaunch(run, list(map(as_value, args)), grid, lambda work: self._cu.enqueue(stream, work))


class HostBuffer:
    """In the place of `strata_kernels.launch.DeviceBuffer`: memory that holds poison and has guards around it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._memory = GuardedMemory(size_bytes)
        self.address = self._memory.address

    def fill(self, byte: int) -> None:
        """Sets every byte."""
        self._memory.array[:] = byte

    def close(self) -> None:
        """Looks at the guards."""
        self._memory.check()
