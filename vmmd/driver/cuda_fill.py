"""Moves bytes into CUDA slabs with the copy engines alone.

Another process's kernels share the GPU in time slices with any kernel of the
daemon, device copies and memsets included, but hardly notice the copy engine's
reads of host memory. So:

- slab to slab: a copy engine, straight from one mapping to the other.
- file to slab: several threads, each with a pinned buffer and a stream of its
  own (a *lane*), read a chunk and have it copied; while some threads read,
  others' chunks are under way. Host slabs are no exception: to open them to the
  processor takes longer than to write them through the GPU.

What costs is each call, so of rows that lie back to back in a file, one read and one
two-dimensional copy move as many as a buffer holds.

Buffers and streams are made once. In the steady state no memory is allocated:
cuMemAlloc and cuMemFree would wait for running kernels.
"""

import ctypes
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from vmmd.driver.cuda_calls import Gpu, call
from vmmd.driver.host_memfd import read_into
from vmmd.errors import DriverError

PITCH_MAX_BYTES = (1 << 31) - 1
"""The largest distance of rows that a two-dimensional copy may have, on every GPU so far."""

OnGpu = Callable[[Gpu], AbstractContextManager[None]]


@dataclass(frozen=True)
class Place:
    """Mapped bytes of a slab: on `gpu`, or in host memory near it that every GPU can reach."""

    address: int
    gpu: Gpu
    on_host: bool


class Piece(NamedTuple):
    """A copy whose slabs are mapped: offsets are from where those begin, or in a file by its descriptor."""

    target: Place
    offset: int
    source: Place | int
    source_offset: int
    row_bytes: int
    height: int  # how many rows
    pitch: int
    source_pitch: int


class _Chunk(NamedTuple):
    """What one buffer holds at a time: rows from a file, or part of a row of a slab on `source_gpu`."""

    gpu: Gpu
    target: int
    source_gpu: Gpu | None
    fd: int
    source: int  # offset in the file, or address
    row_bytes: int
    height: int
    target_pitch: int


@dataclass(frozen=True)
class _Lane:
    """A pinned buffer, the description of copies of rows from it, and a stream on each GPU by UUID."""

    address: int
    buffer: memoryview
    rows: Any
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
                buffer, streams = window(address, chunk_bytes), self._make_streams(gpus, undo)
                self._lanes.put(_Lane(address, buffer, self._rows_from(address), streams))
            self._undo = undo.pop_all()

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Returns when every byte has arrived, or, after an error, when nothing is under way any more."""
        direct: dict[Gpu, list[Piece]] = {}
        staged: deque[_Chunk] = deque()
        for piece in pieces:
            gpu = self._direct(piece)
            if gpu is None:
                staged.extend(self._chunks(piece))
            else:
                direct.setdefault(gpu, []).append(piece)
        if len(staged) == 1 and not direct:  # not worth waking a thread
            self._work(staged)
            return
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

    def read(self, place: Place, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of mapped bytes."""
        data = bytearray(length_bytes)
        with self._lane() as lane:
            for start in range(0, length_bytes, self._chunk_bytes):
                part_bytes = min(self._chunk_bytes, length_bytes - start)
                self._read_chunk(lane, place.gpu, place.address + offset_bytes + start, part_bytes)
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
        if isinstance(source, int):
            return None
        if source.on_host or target.on_host:
            return source.gpu if target.on_host else target.gpu
        return target.gpu if target.gpu == source.gpu or target.gpu.ordinal in source.gpu.reached_by else None

    def _copy(self, gpu: Gpu, pieces: Sequence[Piece]) -> None:
        """Several callers share a stream, so that one's copies begin when another's end; each waits for its own."""
        cu, stream = self._cu, self._streams[gpu.uuid]
        with self._on(gpu):
            arrived = call(cu.cuEventCreate, cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            try:
                for piece in pieces:
                    self._copy_rows(piece, stream)
                call(cu.cuEventRecord, arrived, stream)
                call(cu.cuEventSynchronize, arrived)
            except BaseException:
                cu.cuStreamSynchronize(stream)
                raise
            finally:
                cu.cuEventDestroy(arrived)

    def _copy_rows(self, piece: Piece, stream: Any) -> None:
        """From slab to slab; in one call across the bus, else by row: copies within a GPU are choosy about pitches."""
        target, offset, source, source_offset, row_bytes, height, pitch, source_pitch = piece
        assert isinstance(source, Place)
        at, source_at = target.address + offset, source.address + source_offset
        if height > 1 and source.on_host != target.on_host and max(pitch, source_pitch) <= PITCH_MAX_BYTES:
            rows = self._cu.CUDA_MEMCPY2D()
            rows.srcMemoryType = rows.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
            rows.srcDevice, rows.srcPitch = source_at, source_pitch
            rows.dstDevice, rows.dstPitch = at, pitch
            rows.WidthInBytes, rows.Height = row_bytes, height
            call(self._cu.cuMemcpy2DAsync, rows, stream)
            return
        for i in range(height):
            call(self._cu.cuMemcpyAsync, at + i * pitch, source_at + i * source_pitch, row_bytes, stream)

    def _chunks(self, piece: Piece) -> Iterator[_Chunk]:
        """Parts that fit a buffer: several whole rows that are back to back in a file, or parts of a row."""
        place, offset, source, source_offset, row_bytes, height, pitch, source_pitch = piece
        gpu, target = place.gpu, place.address + offset
        if isinstance(source, int):
            source_gpu, fd, begin = None, source, source_offset
            step = self._chunk_bytes // row_bytes if source_pitch == row_bytes and pitch <= PITCH_MAX_BYTES else 1
        else:
            source_gpu, fd, begin, step = source.gpu, -1, source.address + source_offset, 1
        if step > 1:
            for row in range(0, height, step):
                at, source_at = target + row * pitch, begin + row * source_pitch
                yield _Chunk(gpu, at, source_gpu, fd, source_at, row_bytes, min(step, height - row), pitch)
            return
        for row in range(height):
            at, source_at = target + row * pitch, begin + row * source_pitch
            for start in range(0, row_bytes, self._chunk_bytes):
                length_bytes = min(self._chunk_bytes, row_bytes - start)
                yield _Chunk(gpu, at + start, source_gpu, fd, source_at + start, length_bytes, 1, 0)

    def _work(self, todo: deque[_Chunk]) -> None:
        with self._lane() as lane:
            try:
                chunk = _pop(todo)
                while chunk is not None:
                    chunk = self._stage(lane, chunk, todo)
            except BaseException:
                todo.clear()
                raise

    def _stage(self, lane: _Lane, chunk: _Chunk, todo: deque[_Chunk]) -> _Chunk | None:
        """Moves this chunk, and others as long as they need this context alone; returns the first that does not."""
        gpu = chunk.gpu
        stream = lane.streams[gpu.uuid]
        if chunk.source_gpu is not None:  # in a context of its own: whose error it is must be clear
            self._read_chunk(lane, chunk.source_gpu, chunk.source, chunk.row_bytes)
        with self._on(gpu):
            while True:
                if chunk.source_gpu is None:
                    read_into(lane.buffer[: chunk.height * chunk.row_bytes], chunk.fd, chunk.source)
                self._write_chunk(lane, chunk, stream)
                following = _pop(todo)
                if following is None or following.gpu is not gpu or following.source_gpu is not None:
                    return following
                chunk = following

    def _write_chunk(self, lane: _Lane, chunk: _Chunk, stream: Any) -> None:
        if chunk.height > 1:
            rows = lane.rows
            rows.srcPitch = rows.WidthInBytes = chunk.row_bytes
            rows.dstDevice, rows.dstPitch, rows.Height = chunk.target, chunk.target_pitch, chunk.height
            call(self._cu.cuMemcpy2DAsync, rows, stream)
        else:
            call(self._cu.cuMemcpyHtoDAsync, chunk.target, lane.address, chunk.row_bytes, stream)
        call(self._cu.cuStreamSynchronize, stream)

    def _rows_from(self, address: int) -> Any:
        """Describes copies as cuMemcpyHtoDAsync makes them, host slabs included; what varies is left out."""
        rows = self._cu.CUDA_MEMCPY2D()
        rows.srcMemoryType, rows.srcHost = self._cu.CUmemorytype.CU_MEMORYTYPE_HOST, address
        rows.dstMemoryType = self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        return rows

    def _read_chunk(self, lane: _Lane, gpu: Gpu, address: int, length_bytes: int) -> None:
        stream = lane.streams[gpu.uuid]
        with self._on(gpu):
            call(self._cu.cuMemcpyDtoHAsync, lane.address, address, length_bytes, stream)
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


def _pop(todo: deque[_Chunk]) -> _Chunk | None:
    try:
        return todo.popleft()
    except IndexError:
        return None


def window(address: int, size_bytes: int) -> memoryview:
    """Host memory at an address; whoever keeps it must keep the mapping."""
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(address)).cast("B")
