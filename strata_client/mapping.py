"""Leased memory in this process: ranges, shared pages, and what the broker sends of both.

What is mapped changes between steps only (`strata_client.steps`): the session's watch thread unmaps what the daemon
takes back while no step runs. Homes alone are mapped beside steps, by a third thread: only what was not there before,
which no step can have read.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from strata_api.v1 import broker_pb2, pages
from strata_api.v1 import memory_pb2 as wire

from strata_client.models.base import U8
from vmmd.driver.base import Mapper
from vmmd.errors import InvalidRequest, NoDevice

U64 = npt.NDArray[np.uint64]


class MappedRange:
    """A range's reservation in this process. Any thread may map and unmap.

    Attributes:
        range_id: the daemon's number of it.
        slab_bytes: size of its slabs.
        reader_uuid: the device whose kernels read it: the computing one, or its owner where there is no path between.
        mapped: indexes of the slabs that are mapped.
        changes: how often that has changed.
        lock: held while what was granted is fetched and mapped, and from unmapping to having given back.
    """

    def __init__(self, mapper: Mapper, range_: wire.Range, *, writable: bool, reader_uuid: str | None = None) -> None:
        self.range_id = range_.range_id
        self.device_uuid = range_.device_uuid
        self.reader_uuid = range_.device_uuid if reader_uuid is None else reader_uuid
        self.slab_bytes = range_.slab_bytes
        self.slabs_max = range_.slabs_max
        self.mapped: set[int] = set()
        self.changes = 0  # counts a slab once it is in `mapped`: whoever reads this first misses none
        self.lock = threading.Lock()
        self._lock = threading.Lock()  # within `lock`: while slabs are mapped or unmapped
        self._writable = writable
        self._reservation = mapper.reserve(self.slab_bytes, self.slabs_max) if self.slabs_max else None
        self._view: U8 | None = None

    @property
    def view(self) -> U8:
        """The whole range, uint8 `[slabs_max * slab_bytes]`; touching what is not in `mapped` ends the process.

        Errors: `NoDevice` if it is mapped for a GPU.
        """
        if self._view is None:
            view = self._reservation.view() if self._reservation else np.empty(0, np.uint8)
            if not isinstance(view, np.ndarray):
                raise NoDevice(f"range {self.range_id} of device {self.device_uuid} is mapped for a GPU's kernels only")
            self._view = view
        return self._view

    @property
    def address(self) -> int:
        """Where the range begins for a GPU's kernels; of host slabs known once one is mapped.

        Errors: `NoDevice` if it is mapped for the host; `InvalidRequest` if it is closed or has no slabs.
        """
        if self._reservation is None:
            raise InvalidRequest(f"range {self.range_id} has no slabs")
        view = self._reservation.view()
        if isinstance(view, np.ndarray):
            raise NoDevice(f"range {self.range_id} of device {self.device_uuid} is mapped for the host only")
        return int(view)

    @property
    def slabs(self) -> int:
        """Slabs that are mapped from the first on without a gap."""
        n = 0
        while n in self.mapped:
            n += 1
        return n

    @property
    def ordinal(self) -> int | None:
        """The number in this process of the GPU that it is mapped for; None where it is mapped for the host."""
        return self._reservation.ordinal if self._reservation else None

    def synchronize(self) -> None:
        """Waits for the kernels of this process on the range's GPU. Errors: `DriverError`."""
        if self._reservation is not None:
            self._reservation.synchronize()

    def map(self, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Maps slabs, each run of consecutive indexes in one call; closes all `fds` in any case.

        A slab that is mapped already is replaced: what the daemon sends now is what holds. So between steps only.
        """
        with self._lock:
            self._map(indexes, fds)

    def map_missing(self, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Like `map`, but a slab that is mapped already stays. Also beside steps."""
        with self._lock:
            missing = []
            for index, fd in zip(indexes, fds, strict=True):
                if index in self.mapped:
                    os.close(fd)
                else:
                    missing.append((index, fd))
            self._map([index for index, _ in missing], [fd for _, fd in missing])

    def unmap(self, indexes: Sequence[int]) -> None:
        """Unmaps those of these slabs that are mapped. Between steps only."""
        with self._lock:
            self._unmap(indexes)

    def close(self) -> None:
        """Unmaps everything; views of the range must not be touched any more."""
        self.mapped.clear()
        if self._reservation is not None:
            self._reservation.close()

    def _map(self, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Maps slabs anew. Lock held."""
        left = list(fds)
        try:
            for start, stop in consecutive_runs(indexes):
                if self._reservation is None:
                    raise InvalidRequest(f"a slab came for range {self.range_id}, which has no slabs")
                self._unmap(indexes[start:stop])
                run, left = left[: stop - start], left[stop - start :]
                self._reservation.map(indexes[start], run, writable=self._writable)
                self.mapped.update(indexes[start:stop])
                self.changes += 1
        finally:
            for fd in left:
                os.close(fd)

    def _unmap(self, indexes: Sequence[int]) -> None:
        """Unmaps those of these slabs that are mapped. Lock held."""
        for index in indexes:
            if index in self.mapped and self._reservation is not None:
                self.mapped.remove(index)
                self.changes += 1
                self._reservation.unmap(index)


def consecutive_runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places `start, stop` in `indexes` between which each index follows the one before."""
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield start, at
            start = at


def map_page(fd: int, size_bytes: int, *, writable: bool) -> U64:
    """A shared page as uint64 words; takes over `fd` and closes it.

    Errors: `InvalidRequest` if the page is smaller than it must be.
    """
    try:
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes < size_bytes:
            raise InvalidRequest(f"the daemon's shared page has {actual_bytes} bytes where {size_bytes} are due")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, prot), np.uint64)
    finally:
        os.close(fd)


class Fetched:
    """What comes with a batch, sorted while it is fetched."""

    def __init__(self, ranges: Sequence[MappedRange], n_experts: int = 0, cells_max: int = 0) -> None:
        """`n_experts` over all layers and a conversation's `cells_max` give the pages' sizes."""
        self._ranges = {range_.range_id: range_ for range_ in ranges}
        self._n = n_experts
        self._cells_max = cells_max
        self.table: U64 | None = None
        self.heat: U64 | None = None
        self.tokens: U64 | None = None

    def take(self, entries: Sequence[broker_pb2.BatchEntry], fds: Sequence[int]) -> None:
        """Maps a piece of the batch; closes every descriptor of it."""
        slabs: dict[int, tuple[list[int], list[int]]] = {}
        left = list(fds)
        try:
            for entry, fd in zip(entries, fds, strict=True):
                if entry.kind == broker_pb2.BatchEntry.KIND_SLAB and entry.id in self._ranges:
                    indexes, slab_fds = slabs.setdefault(entry.id, ([], []))
                    indexes.append(entry.slab_index)
                    slab_fds.append(fd)
                elif entry.kind == broker_pb2.BatchEntry.KIND_RESIDENCY and self._n:
                    left.remove(fd)
                    self.table = map_page(fd, pages.residency_bytes(self._n), writable=False)
                elif entry.kind == broker_pb2.BatchEntry.KIND_HEAT and self._n:
                    left.remove(fd)
                    self.heat = map_page(fd, pages.heat_bytes(self._n), writable=True)
                elif entry.kind == broker_pb2.BatchEntry.KIND_TOKENS and self._cells_max:
                    left.remove(fd)
                    self.tokens = map_page(fd, pages.tokens_bytes(self._cells_max), writable=True)
            for range_id, (indexes, slab_fds) in slabs.items():
                left = [fd for fd in left if fd not in slab_fds]
                self._ranges[range_id].map(indexes, slab_fds)
        finally:
            for fd in left:
                os.close(fd)
