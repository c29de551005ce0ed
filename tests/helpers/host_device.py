"""GPUs with streams that the host plays: what `strata_client.gpu` enqueues, run in any order that CUDA allows.

Nothing runs before somebody waits for a stream or an event. Then the operation at the
front of a stream that is chosen by chance runs, unless it waits for an event, again and
again. So what is not ordered by streams and events happens in different orders, on one
device and across several.

As with CUDA, a stream, an event and a kernel belong to the device that was current when
they were made, and one is current at a time: what is enqueued on a stream of another is
an error here, too.
"""

import ctypes
import threading
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


class _Operation:
    """A piece of work on a stream, or in a graph that is captured."""

    def __init__(self, run: Callable[[], Any], waits_for: "_Operation | None" = None) -> None:
        self.run = run
        self.waits_for = waits_for
        self.is_done = False
        self.graph: _Graph | None = None  # that it was captured in


class _Event:
    """The operation that recorded it last."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.recorded: _Operation | None = None


class _Stream:
    def __init__(self, device: int) -> None:
        self.device = device
        self.waiting: deque[_Operation] = deque()
        self.captured: _Graph | None = None


class _Graph:
    """Work of one stream, and of others that waited for its events meanwhile, in the order in which it was captured."""

    def __init__(self, origin: _Stream) -> None:
        self.origin = origin
        self.nodes: list[tuple[_Stream, _Operation]] = []
        self.beside: dict[_Stream, _Stream] = {}  # where an instance runs the work of other streams


class HostCuda:
    """The calls of ``cuda.bindings.driver`` that concern streams, events, copies and graphs; a context is a device."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._streams: list[_Stream] = []
        self.copied_bytes = 0
        self.crossed_bytes = 0  # from one device to another
        self.n_devices = 0
        self._thread = threading.local()

    @property
    def current(self) -> int:
        """The calling thread's current device."""
        return int(getattr(self._thread, "device", 0))

    def cuCtxSetCurrent(self, device: int) -> tuple[int]:
        """What is made and enqueued from here on is this device's."""
        self._thread.device = device
        return OK

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:
        """A stream of the current device by its number, from 1 on."""
        self._streams.append(_Stream(self.current))
        return 0, len(self._streams)

    def cuStreamDestroy(self, stream: int) -> tuple[int]:
        """Streams must be done."""
        assert not self._streams[stream - 1].waiting
        return OK

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        """Runs until a stream is empty."""
        while self._streams[stream - 1].waiting:
            self._run_one()
        return OK

    def cuEventCreate(self, flags: int) -> tuple[int, _Event]:
        """An event of the current device."""
        return 0, _Event(self.current)

    def cuEventDestroy(self, event: _Event) -> tuple[int]:
        """Nothing is left of it."""
        return OK

    def cuEventRecord(self, event: _Event, stream: int) -> tuple[int]:
        """Waits that follow mean this place in the stream, which is of the event's device."""
        assert event.device == self._streams[stream - 1].device, "an event is recorded on another device's stream"
        event.recorded = self._enqueue(stream, lambda: None)
        return OK

    def cuEventSynchronize(self, event: _Event) -> tuple[int]:
        """Runs until the place that was recorded last is done."""
        while event.recorded is not None and not event.recorded.is_done:
            self._run_one()
        return OK

    def cuStreamWaitEvent(self, stream: int, event: _Event, flags: int) -> tuple[int]:
        """What comes later in the stream, of whatever device, waits for the place that was recorded last."""
        recorded = event.recorded
        if recorded is not None and recorded.graph is not None and self._streams[stream - 1].captured is None:
            self._streams[stream - 1].captured = recorded.graph
        self._enqueue(stream, lambda: None, recorded)
        return OK

    def cuMemcpyAsync(self, target: int, source: int, size_bytes: int, stream: int) -> tuple[int]:
        """Copies when its turn comes."""
        self.copied_bytes += size_bytes
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size_bytes))
        return OK

    def cuMemcpyPeerAsync(
        self, target: int, target_context: int, source: int, source_context: int, size_bytes: int, stream: int
    ) -> tuple[int]:
        """Copies from one device to another when its turn comes; a stream of either will do."""
        assert self._streams[stream - 1].device in (target_context, source_context)
        assert target_context != source_context
        self.crossed_bytes += size_bytes
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size_bytes))
        return OK

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        """What is enqueued from here on is kept instead; streams that wait for its events are captured, too."""
        origin = self._streams[stream - 1]
        origin.captured = _Graph(origin)
        return OK

    def cuStreamEndCapture(self, stream: int) -> tuple[int, _Graph]:
        """A graph: what was kept. The last work of other streams must have been waited for, which is not checked."""
        graph = self._streams[stream - 1].captured
        assert graph is not None
        for each in self._streams:
            if each.captured is graph:
                each.captured = None
        return 0, graph

    def cuGraphInstantiate(self, graph: _Graph, flags: int) -> tuple[int, _Graph]:
        """The graph itself."""
        for stream, _ in graph.nodes:
            if stream is not graph.origin and stream not in graph.beside:
                graph.beside[stream] = _Stream(stream.device)
                self._streams.append(graph.beside[stream])
        return 0, graph

    def cuGraphUpload(self, graph: _Graph, stream: int) -> tuple[int]:
        """Nothing to do."""
        return OK

    def cuGraphDestroy(self, graph: _Graph) -> tuple[int]:
        """Instances outlive it."""
        return OK

    def cuGraphLaunch(self, graph: _Graph, stream: int) -> tuple[int]:
        """Enqueues all of it."""
        assert self._streams[stream - 1].device == self.current, "a graph is launched while another device is current"
        begun = self._enqueue(stream, lambda: None)
        for beside in graph.beside.values():
            beside.waiting.append(_Operation(lambda: None, begun))
        launched: dict[_Operation, _Operation] = {}
        for captured_on, node in graph.nodes:
            operation = _Operation(node.run, launched[node.waits_for] if node.waits_for is not None else None)
            launched[node] = operation
            on = self._streams[stream - 1] if captured_on is graph.origin else graph.beside[captured_on]
            on.waiting.append(operation)
        return OK

    def enqueue(self, stream: int, run: Callable[[], Any], *, anywhere: bool = False) -> None:
        """Puts a kernel, or what may come from `anywhere`, at the end of a stream, or into the graph captured there."""
        is_here = self._streams[stream - 1].device == self.current
        assert anywhere or is_here, "a kernel is launched while another device is current"
        self._enqueue(stream, run)

    def gate(self, stream: int) -> Callable[[], None]:
        """Holds up what comes later in a stream until this is called."""
        gate = _Operation(lambda: None)
        self._enqueue(stream, gate.run, gate)

        def open_gate() -> None:
            gate.is_done = True

        return open_gate

    def _enqueue(self, stream: int, run: Callable[[], Any], waits_for: _Operation | None = None) -> _Operation:
        operation = _Operation(run, waits_for)
        on = self._streams[stream - 1]
        operation.graph = on.captured
        if on.captured is not None:
            on.captured.nodes.append((on, operation))
        else:
            on.waiting.append(operation)
        return operation

    def _run_one(self) -> None:
        """Runs an operation that is at the front of its stream and may run."""
        fronts = [s.waiting for s in self._streams if s.waiting]
        ready = [w for w in fronts if w[0].waits_for is None or w[0].waits_for.is_done]
        assert ready, "streams wait for each other"
        operation = ready[self._rng.integers(len(ready))].popleft()
        operation.run()
        operation.is_done = True


class HostDevice:
    """In the place of `strata_client.gpu.device.Device`.

    The first has CUDA's calls to itself; others of the same process are made with those of the first, and with its
    context where they are the same GPU.
    """

    multiprocessors = 4
    shared_bytes_max = 99 * 1024

    def __init__(self, rng: np.random.Generator, first: "HostDevice | None" = None, context: int | None = None) -> None:
        self.cu: HostCuda = HostCuda(rng) if first is None else first.cu
        self.context = self.cu.n_devices if context is None else context
        self.cu.n_devices = max(self.cu.n_devices, self.context + 1)
        self.make_current()
        self.stream = self.cu.cuStreamCreate(0)[1]
        self._pinned: list[Array] = []

    def make_current(self) -> None:
        """What is enqueued from here on is this one's."""
        self.cu.cuCtxSetCurrent(self.context)

    def synchronize(self) -> None:
        """Runs all that the stream has."""
        self.cu.cuStreamSynchronize(self.stream)

    def close(self) -> None:
        """Runs all that the stream has."""
        self.synchronize()

    def event(self) -> _Event:
        """An event."""
        return _Event(self.context)

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array that lives as long as this device."""
        self._pinned.append(np.zeros(shape, dtype))
        return self._pinned[-1]

    def reach(self, other: "HostDevice") -> None:
        """Everything is reached anyway."""

    def register(self, page: Array) -> int:
        """Where the page is anyway."""
        return page.ctypes.data

    def upload(self, address: int, array: Array) -> None:
        """Copies what the array holds now."""
        data = array.tobytes()
        self.cu.enqueue(self.stream, lambda: ctypes.memmove(address, data, len(data)), anywhere=True)

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
