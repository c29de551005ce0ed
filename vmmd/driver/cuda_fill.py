"""Moves bytes into CUDA slabs with the copy engines alone.

Another process's kernels share the GPU in time slices with any kernel of the
daemon, device copies and memsets included, but hardly notice the copy engine's
reads of host memory. So:

- slab to slab: a copy engine, straight from one mapping to the other.
- file to slab: several threads, each with a pinned buffer and a stream of its
  own (a *lane*), read a chunk and have it copied; while some threads read,
  others' chunks are under way. Host slabs are no exception: to open them to the
  processor takes longer than to write them through the GPU.

Buffers and streams are made once. In the steady state nothing is allocated:
cuMemAlloc and cuMemFree would wait for running kernels.
"""

import ctypes
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from vmmd.driver.base import FileSource
from vmmd.driver.cuda_calls import Gpu, call
from vmmd.driver.host_memfd import _read_into
from vmmd.errors import DriverError

OnGpu = Callable[[Gpu], AbstractContextManager[None]]


@dataclass(frozen=True)
class Place:
    """Mapped bytes of a slab: on `gpu`, or in host memory near it that every GPU can reach."""

    address: int
    gpu: Gpu
    on_host: bool

    def __add__(self, offset_bytes: int) -> "Place":
        return replace(self, address=self.address + offset_bytes)


@dataclass(frozen=True)
class Piece:
    """One copy whose slabs are mapped."""

    target: Place
    length_bytes: int
    source: Place | FileSource


@dataclass(frozen=True)
class _Lane:
    """A pinned buffer, and a stream on each GPU by UUID."""

    address: int
    buffer: memoryview
    streams: dict[str, Any]


class Filler:
    """Lanes and the threads that use them. Any number of threads may call it at once.

    Args:
        cu: the bindings.
        gpus: all GPUs that a place may be on; their contexts exist.
        on: makes a GPU's context current for a while.
        threads: how many chunks are under way at once.
        chunk_bytes: size of one pinned buffer.
    """

    def __init__(self, cu: Any, gpus: Sequence[Gpu], on: OnGpu, threads: int, chunk_bytes: int) -> None:
        self._cu = cu
        self._on = on
        self._chunk_bytes = chunk_bytes
        self._n_threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fill")
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        with ExitStack() as undo:
            self._streams = self._make_streams(gpus, undo)
            for _ in range(threads):
                with on(gpus[0]):
                    address = int(call(cu.cuMemHostAlloc, chunk_bytes, cu.CU_MEMHOSTALLOC_PORTABLE))
                undo.callback(self._free, gpus[0], cu.cuMemFreeHost, address)
                self._lanes.put(_Lane(address, window(address, chunk_bytes), self._make_streams(gpus, undo)))
            self._undo = undo.pop_all()

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Returns when every byte has arrived, or, after an error, when nothing is under way any more."""
        direct: dict[Gpu, list[Piece]] = {}
        staged: deque[Piece] = deque()
        for piece in pieces:
            gpu = self._direct(piece)
            if gpu is None:
                staged.extend(self._chunks(piece))
            else:
                direct.setdefault(gpu, []).append(piece)
        futures = [self._pool.submit(self._work, staged) for _ in range(min(self._n_threads, len(staged)))]
        try:
            for gpu, some in direct.items():
                self._copy(gpu, some)
        except BaseException:
            staged.clear()
            raise
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def read(self, place: Place, length_bytes: int) -> bytes:
        """A copy of mapped bytes."""
        data = bytearray(length_bytes)
        with self._lane() as lane:
            for start in range(0, length_bytes, self._chunk_bytes):
                part_bytes = min(self._chunk_bytes, length_bytes - start)
                self._read_chunk(lane, place + start, part_bytes)
                data[start : start + part_bytes] = lane.buffer[:part_bytes]
        return bytes(data)

    def set_bytes(self, place: Place, value: int, length_bytes: int) -> None:
        """Sets every byte. On a GPU this is device work, which running kernels feel."""
        stream = self._streams[place.gpu.uuid]
        with self._on(place.gpu):
            call(self._cu.cuMemsetD8Async, place.address, value, length_bytes, stream)
            call(self._cu.cuStreamSynchronize, stream)

    def close(self) -> None:
        """Waits for what is under way and gives buffers, streams and threads up."""
        self._pool.shutdown()
        self._undo.close()

    def _direct(self, piece: Piece) -> Gpu | None:
        """The GPU whose copy engine can do all of this piece, if one can."""
        source, target = piece.source, piece.target
        if isinstance(source, FileSource):
            return None
        if source.on_host or target.on_host:
            return source.gpu if target.on_host else target.gpu
        return target.gpu if target.gpu == source.gpu or target.gpu.ordinal in source.gpu.reached_by else None

    def _copy(self, gpu: Gpu, pieces: Sequence[Piece]) -> None:
        stream = self._streams[gpu.uuid]
        with self._on(gpu):
            try:
                for piece in pieces:
                    assert isinstance(piece.source, Place)
                    source, target = piece.source.address, piece.target.address
                    call(self._cu.cuMemcpyAsync, target, source, piece.length_bytes, stream)
            except BaseException:
                self._cu.cuStreamSynchronize(stream)
                raise
            call(self._cu.cuStreamSynchronize, stream)

    def _chunks(self, piece: Piece) -> Iterator[Piece]:
        source = piece.source
        for start in range(0, piece.length_bytes, self._chunk_bytes):
            length_bytes = min(self._chunk_bytes, piece.length_bytes - start)
            part = (
                replace(source, offset_bytes=source.offset_bytes + start)
                if isinstance(source, FileSource)
                else source + start
            )
            yield Piece(piece.target + start, length_bytes, part)

    def _work(self, todo: deque[Piece]) -> None:
        with self._lane() as lane:
            while todo:
                try:
                    piece = todo.popleft()
                except IndexError:  # another thread was faster
                    return
                try:
                    self._stage(lane, piece)
                except BaseException:
                    todo.clear()
                    raise

    def _stage(self, lane: _Lane, piece: Piece) -> None:
        source, gpu = piece.source, piece.target.gpu
        if isinstance(source, FileSource):
            _read_into(lane.buffer[: piece.length_bytes], source.fd, source.offset_bytes)
        else:
            self._read_chunk(lane, source, piece.length_bytes)
        stream = lane.streams[gpu.uuid]
        with self._on(gpu):
            call(self._cu.cuMemcpyHtoDAsync, piece.target.address, lane.address, piece.length_bytes, stream)
            call(self._cu.cuStreamSynchronize, stream)

    def _read_chunk(self, lane: _Lane, place: Place, length_bytes: int) -> None:
        stream = lane.streams[place.gpu.uuid]
        with self._on(place.gpu):
            call(self._cu.cuMemcpyDtoHAsync, lane.address, place.address, length_bytes, stream)
            call(self._cu.cuStreamSynchronize, stream)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def _make_streams(self, gpus: Sequence[Gpu], undo: ExitStack) -> dict[str, Any]:
        streams = {}
        for gpu in gpus:
            with self._on(gpu):
                stream = call(self._cu.cuStreamCreate, self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
            undo.callback(self._free, gpu, self._cu.cuStreamDestroy, stream)
            streams[gpu.uuid] = stream
        return streams

    def _free(self, gpu: Gpu, function: Any, what: Any) -> None:
        with suppress(DriverError), self._on(gpu):
            function(what)


def window(address: int, size_bytes: int) -> memoryview:
    """Host memory at an address; whoever keeps it must keep the mapping."""
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(address)).cast("B")
