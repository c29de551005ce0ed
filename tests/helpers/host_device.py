"""GPUs with streams that the host plays: what `strata_client.gpu` enqueues, run in any order that CUDA allows.

Nothing runs before somebody waits for a stream or an event. Then the operation at the
front of a stream that is chosen by chance runs, unless it waits for an event, again and
again. So what is not ordered by streams and events happens in different orders, on one
device and across several.

As with CUDA, a stream, an event and a kernel belong to the device that was current when
they were made, and one is current at a time, in each thread for itself: what is enqueued
on a stream of another is an error here, too. So is a kernel that is given another
device's memory, and what a capture does not allow.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, IntEnum, auto
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from strata_kernels.launch import Dimensions, as_value

from tests.helpers.cuda_host import GuardedMemory, HostKernels

Array = npt.NDArray[Any]

OK = (0,)


class CUresult(IntEnum):
    """What a call may answer; the real numbers."""

    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904


class _Kind(Enum):
    """Of an operation."""

    KERNEL = auto()
    COPY = auto()
    RECORD = auto()
    WAIT = auto()


class _Operation:
    """A piece of work on a stream, or in a graph that is captured."""

    def __init__(
        self, run: Callable[[], Any], waits_for: "_Operation | None" = None, kind: _Kind = _Kind.KERNEL
    ) -> None:
        self.run = run
        self.waits_for = waits_for
        self.kind = kind
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
        self.thread: int | None = threading.get_ident()  # that captures it; None once it is captured
        self.nodes: list[tuple[_Stream, _Operation]] = []
        self.beside: dict[_Stream, _Stream] = {}  # where an instance runs the work of other streams

    def is_joined(self) -> bool:
        """Whether the origin's end comes after all work of other streams."""
        streams, waited_for = {self.origin}, set()
        for stream, node in reversed(self.nodes):
            if node in waited_for:
                streams.add(stream)
            if stream in streams:
                waited_for.add(node.waits_for)
            elif node.kind in (_Kind.KERNEL, _Kind.COPY):
                return False
        return True

    def follows_a_kernel(self, stream: _Stream) -> bool:
        """Whether what is captured next in a stream depends on one kernel there, or on nothing, and on no event."""
        before = [node for on, node in self.nodes if on is stream and node.kind is not _Kind.RECORD]
        return not before or before[-1].kind is _Kind.KERNEL


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
        self.launched: dict[int, int] = {}  # the latest launch of a kernel, by stream
        self._thread = threading.local()
        self._pinned: list[Array] = []
        self._buffers: dict[int, HostBuffer] = {}  # of devices, by address

    @property
    def current(self) -> int:
        """The calling thread's current device; a new thread has none."""
        device: int | None = getattr(self._thread, "device", None)
        assert device is not None, "no device is current in this thread"
        return device

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
        assert self.current is not None
        assert self._streams[stream - 1].captured is None, "a stream that is captured cannot be waited for"
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
        event.recorded = self._enqueue(stream, lambda: None, kind=_Kind.RECORD)
        return OK

    def cuEventSynchronize(self, event: _Event) -> tuple[int]:
        """Runs until the place that was recorded last is done."""
        assert event.recorded is None or event.recorded.graph is None, "an event that was captured cannot be waited for"
        while event.recorded is not None and not event.recorded.is_done:
            self._run_one()
        return OK

    def cuStreamWaitEvent(self, stream: int, event: _Event, flags: int) -> tuple[int]:
        """What comes later in the stream, of whatever device, waits for the place that was recorded last."""
        recorded, on = event.recorded, self._streams[stream - 1]
        if recorded is not None and recorded.graph is not None:
            assert recorded.graph.thread is not None, "the event was recorded in a capture that has ended"
            assert on.captured in (None, recorded.graph), "two captures would become one"
            on.captured = recorded.graph
        assert recorded is None or recorded.graph is on.captured, "a captured stream waits for what is not captured"
        self._enqueue(stream, lambda: None, recorded, kind=_Kind.WAIT)
        return OK

    def cuMemcpyAsync(self, target: int, source: int, size_bytes: int, stream: int) -> tuple[int]:
        """Copies when its turn comes, within a device or from host memory."""
        self.copied_bytes += size_bytes
        for address in (target, source):
            self._check_owner(address, self._streams[stream - 1].device)
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size_bytes), kind=_Kind.COPY)
        return OK

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyAsync

    def cuMemcpyPeerAsync(
        self, target: int, target_context: int, source: int, source_context: int, size_bytes: int, stream: int
    ) -> tuple[int]:
        """Copies from one device to another when its turn comes; a stream of either will do."""
        assert self._streams[stream - 1].device in (target_context, source_context)
        assert target_context != source_context
        assert self._streams[stream - 1].captured is None, "a copy between devices cannot be captured"
        self._check_owner(target, target_context)
        self._check_owner(source, source_context)
        self.crossed_bytes += size_bytes
        self._enqueue(stream, lambda: ctypes.memmove(target, source, size_bytes), kind=_Kind.COPY)
        return OK

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        """What is enqueued from here on is kept instead; streams that wait for its events are captured, too."""
        origin = self._streams[stream - 1]
        assert origin.captured is None, "this stream is captured already"
        origin.captured = _Graph(origin)
        return OK

    def cuStreamEndCapture(self, stream: int) -> tuple[int, _Graph | None]:
        """A graph: what was kept; none where not all work of other streams has been waited for."""
        origin = self._streams[stream - 1]
        graph = origin.captured
        assert graph is not None and graph.origin is origin, "a capture ends on the stream on which it began"
        assert graph.thread == threading.get_ident(), "a capture ends in the thread in which it began"
        graph.thread = None
        for each in self._streams:
            if each.captured is graph:
                each.captured = None
        return (0, graph) if graph.is_joined() else (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, None)

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
        begun = self._enqueue(stream, lambda: None, kind=_Kind.RECORD)
        for beside in graph.beside.values():
            beside.waiting.append(_Operation(lambda: None, begun))
        launched: dict[_Operation, _Operation] = {}
        for captured_on, node in graph.nodes:
            operation = _Operation(node.run, launched[node.waits_for] if node.waits_for is not None else None)
            launched[node] = operation
            on = self._streams[stream - 1] if captured_on is graph.origin else graph.beside[captured_on]
            on.waiting.append(operation)
        return OK

    def enqueue(
        self,
        stream: int,
        run: Callable[[], Any],
        args: Sequence[Any] = (),
        *,
        loaded_on: int | None = None,
        programmatic: bool = False,
    ) -> None:
        """Puts a kernel at the end of a stream, or into the graph captured there; `args` are of ctypes' types."""
        on = self._streams[stream - 1]
        assert on.device == self.current, "a kernel is launched while another device is current"
        assert loaded_on in (None, on.device), "a kernel is launched that was loaded on another device"
        for arg in args:
            data = bytes(arg)
            for word in np.frombuffer(data[: len(data) // 8 * 8], np.uint64).tolist():
                self._check_owner(word, on.device)
        if programmatic and on.captured is not None:
            assert on.captured.follows_a_kernel(on), "a programmatic launch behind an event or a copy is captured"
        self._enqueue(stream, run)

    def upload(self, stream: int, address: int, array: Array) -> None:
        """Copies an array to a device: a pinned one as it is when its turn comes, another one as it is now."""
        assert self.current is not None
        assert self._streams[stream - 1].captured is None, "an upload is captured"
        self._check_owner(address, self._streams[stream - 1].device)
        source: Array | bytes = array
        if not any(np.may_share_memory(array, pinned) for pinned in self._pinned):
            source = array.tobytes()

        def copy() -> None:
            ctypes.memmove(address, source if isinstance(source, bytes) else source.ctypes.data, array.nbytes)

        self._enqueue(stream, copy, kind=_Kind.COPY)

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array that lives as long as the process."""
        assert self.current is not None
        self._check_allocation()
        self._pinned.append(np.zeros(shape, dtype))
        return self._pinned[-1]

    def add_buffer(self, buffer: "HostBuffer") -> None:
        """Memory of the current device."""
        self._check_allocation()
        buffer.device = self.current
        self._buffers[buffer.address] = buffer

    def remove_buffer(self, buffer: "HostBuffer") -> None:
        """It is freed."""
        self._buffers.pop(buffer.address, None)

    def _check_allocation(self) -> None:
        is_captured = any(s.captured is not None and s.captured.thread == threading.get_ident() for s in self._streams)
        assert not is_captured, "a thread that captures allocates memory"

    def _check_owner(self, address: int, device: int) -> None:
        """Memory of one device is for its kernels alone."""
        for begin, buffer in list(self._buffers.items()):
            if begin <= address < begin + buffer.size_bytes:
                assert buffer.device == device, f"memory of device {buffer.device} is given to device {device}"

    def gate(self, stream: int) -> Callable[[], None]:
        """Holds up what comes later in a stream until this is called."""
        gate = _Operation(lambda: None)
        self._enqueue(stream, gate.run, gate, kind=_Kind.WAIT)

        def open_gate() -> None:
            gate.is_done = True

        return open_gate

    def _enqueue(
        self,
        stream: int,
        run: Callable[[], Any],
        waits_for: _Operation | None = None,
        kind: _Kind = _Kind.KERNEL,
    ) -> _Operation:
        assert self.current is not None
        operation = _Operation(run, waits_for, kind)
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
        """An event, of the current device as with CUDA."""
        return self.cu.cuEventCreate(0)[1]

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array that every device reaches."""
        return self.cu.pinned(shape, dtype)

    def reach(self, other: "HostDevice") -> None:
        """Everything is reached anyway."""

    def register(self, page: Array) -> int:
        """Where the page is anyway."""
        return page.ctypes.data

    def upload(self, address: int, array: Array) -> None:
        """Copies the array; a pinned one may only change once that is done."""
        self.cu.upload(self.stream, address, array)

    def download(self, array: Array, address: int) -> None:
        """Fills an array after all that the stream has."""
        self.synchronize()
        ctypes.memmove(array.ctypes.data, address, array.nbytes)


class HostLaunch:
    """In the place of `strata_kernels.launch.Launch`: takes the arguments as they are when it is called."""

    def __init__(
        self,
        run: Callable[..., None],
        args: list[Any],
        grid: Dimensions,
        enqueue: Callable[[Callable[[], None], Sequence[Any]], None],
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
        self._enqueue(lambda: self._run(grid, args), args)


class HostKernelSet:
    """In the place of `strata_kernels.launch.Kernels`: kernels of the current device."""

    def __init__(self, device: HostDevice, sources: Sequence[Path], types: Sequence[str] | None = None) -> None:
        self._cu = device.cu
        self._device = device.cu.current
        compiled = [HostKernels.compile(source, types) for source in sources]
        self._kernels = {name: kernels for kernels in compiled for name in kernels.names}

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
            before = self._cu.launched.get(stream, 0) if programmatic else 0
            self._cu.launched[stream] = kernels.launch(name, grid, block, values, shared_bytes, before=before)

        def enqueue(work: Callable[[], None], values: Sequence[Any]) -> None:
            self._cu.enqueue(stream, work, values, loaded_on=self._device, programmatic=programmatic)

        return HostLaunch(run, list(map(as_value, args)), grid, enqueue)


class HostBuffer:
    """In the place of `strata_kernels.launch.DeviceBuffer`: memory that holds poison and has guards around it.

    With `cu` it is the current device's, and no other may be given its address.
    """

    def __init__(self, size_bytes: int, cu: HostCuda | None = None) -> None:
        self.size_bytes = size_bytes
        self.device: int | None = None
        self._cu = cu
        self._memory = GuardedMemory(size_bytes)
        self.address = self._memory.address
        if cu is not None:
            cu.add_buffer(self)

    def fill(self, byte: int) -> None:
        """Sets every byte."""
        self._memory.array[:] = byte

    def close(self) -> None:
        """Looks at the guards."""
        if self._cu is not None:
            self._cu.remove_buffer(self)
        self._memory.check()
