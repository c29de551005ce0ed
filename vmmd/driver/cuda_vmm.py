"""The CUDA driver, daemon side: slabs are CUDA VMM allocations, shared as POSIX descriptors.

Devices are the GPUs of this host by UUID, and the host's RAM. A slab of a GPU is
created with that GPU's context current and that GPU as its location. Slabs of
host memory are allocations on the node of a GPU, which GPUs read at the full
rate of the bus; where the driver or the container refuses those, they are sealed
memfds that each process registers with CUDA.

A device whose context died is failed, and the others go on. A kernel that faults ends
the contexts of all GPUs in its process for good (driver 580), so this process launches
none; after such an error only a new process has them back.

CUDA does not tell whether another process holds a slab, nor can it take one from
a living process: `held_elsewhere` is None.
"""

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import structlog

from vmmd.driver import cuda_calls
from vmmd.driver.base import Copy, DeviceInfo, DeviceMemory, FileSource, Slab, check_bounds, check_copy
from vmmd.driver.cuda_calls import Gpu, PeerAccess, call
from vmmd.driver.cuda_fill import Filler, Piece, Place
from vmmd.driver.host_memfd import HOST_UUID, HostDriver, HostReservation, create_failed
from vmmd.errors import DriverError, Exhausted, InvalidRequest, NoDevice, NotFound

FRESH_CHECK_BYTES = 64 << 20
"""How much of each device is dirtied, released and looked at again at start."""

_DESCRIPTORS = 8192  # of 64 MiB slabs, half a TiB

log = structlog.get_logger("vmmd")


def available() -> list[str]:
    """What this host lacks for this driver, by name; empty where it can be used."""
    return cuda_calls.missing_features()


@dataclass(eq=False)
class _Allocation:
    """The daemon's own hold on a slab: handle and descriptor, or a memfd; and a mapping once it was needed."""

    gpu: Gpu  # in whose context it was made: the owner, or for host memory one on the same node
    on_host: bool
    size_bytes: int
    access: list[Any]
    handle: Any = None
    fd: int = -1
    memfd: Slab | None = None
    reservation: HostReservation | None = None
    address: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the mapping


class CudaDriver:
    """Daemon side of the CUDA driver; see `vmmd.driver.base.Driver`.

    Args:
        host_total_bytes: what the host's RAM, the last device, offers.
        peer_access: "auto" opens slabs to every GPU with a path to their owner, "never" to the owner alone.
        host_slabs: "auto", or "memfd" for sealed memfds also where CUDA offers host allocations.
        threads: how many threads and pinned buffers a fill uses; by default one a processor, up to 16.
        chunk_bytes: size of a pinned buffer.

    Errors: `NoDevice` (names what is missing), `DriverError`.

    Every device's context and the buffers are made here, and new slabs are checked
    for old bytes. Any thread may call any method.
    """

    name = "cuda"

    def __init__(
        self,
        host_total_bytes: int,
        *,
        peer_access: PeerAccess = "auto",
        host_slabs: Literal["auto", "memfd"] = "auto",
        threads: int | None = None,
        chunk_bytes: int = 4 << 20,
    ) -> None:
        cuda_calls.check_peer_access(peer_access)
        self._cu = cu = cuda_calls.bindings()
        gpus, missing = cuda_calls.find_gpus(cu)
        if not gpus:
            raise NoDevice(f"no GPU can be used; missing: {'; '.join(missing) or 'a GPU'}")
        if missing:
            log.warning("driver.gpus_left_out", missing=missing)
        if peer_access == "never":
            gpus = [replace(gpu, reached_by=frozenset()) for gpu in gpus]
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._lock = threading.Lock()  # guards the four below
        self._live: set[_Allocation] = set()
        self._failed: set[str] = set()
        self._host_bytes = 0
        self._nodes = itertools.cycle({gpu.numa_node for gpu in gpus})
        self._to_clear: frozenset[str] = frozenset()
        self._memfds: HostDriver | None = None
        self._contexts: dict[str, Any] = {}
        cuda_calls.widen_descriptor_table(_DESCRIPTORS)
        with ExitStack() as undo:
            for gpu in gpus:
                self._contexts[gpu.uuid] = call(cu.cuDevicePrimaryCtxRetain, gpu.ordinal)
                undo.callback(cu.cuDevicePrimaryCtxRelease, gpu.ordinal)
            self._infos = {gpu.uuid: self._info(gpu) for gpu in gpus}
            page_bytes = max(gpu.page_bytes for gpu in gpus)
            self._infos[HOST_UUID] = DeviceInfo(
                HOST_UUID, "host memory", host_total_bytes, page_bytes, is_host=True, numa_node=gpus[0].numa_node
            )
            refusal = "asked for" if host_slabs == "memfd" else self._try_host_memory(page_bytes)
            if refusal:
                self._memfds = HostDriver([], host_total_bytes, page_bytes)
                undo.callback(self._memfds.close)
                log.warning("driver.host_slabs_are_memfds", why=refusal)
            undo.callback(self._release_all)
            self._filler = Filler(cu, gpus, self._on, threads or min(16, len(os.sched_getaffinity(0))), chunk_bytes)
            undo.callback(self._filler.close)
            self.check_fresh_slabs()
            self._undo = undo.pop_all()

    def devices(self) -> Sequence[DeviceInfo]:
        """All GPUs in the order of the driver, the host's RAM last."""
        return list(self._infos.values())

    def failed_devices(self) -> list[str]:
        """GPUs whose context died: nothing works on them until the daemon starts anew."""
        with self._lock:
            return sorted(self._failed)

    def memory(self, device_uuid: str) -> DeviceMemory:
        """Total and free bytes, whoever uses them; for the host, its total less slabs."""
        info = self._device(device_uuid)
        if info.is_host:
            with self._lock:
                return DeviceMemory(info.total_bytes, max(0, info.total_bytes - self._host_bytes))
        with self._on(self._gpus[device_uuid]):
            free_bytes, total_bytes = call(self._cu.cuMemGetInfo)
        return DeviceMemory(total_bytes, free_bytes)

    def create(self, device_uuid: str, size_bytes: int) -> Slab:
        """Allocates a slab of zeros on the device that is named, and exports it once.

        Slabs of the host are mapped at once: they are all filled, and by then others may be allocating.
        """
        info = self._device(device_uuid)
        if size_bytes <= 0 or size_bytes % info.page_bytes:
            raise InvalidRequest(f"slab of {size_bytes} bytes: must be a multiple of {info.page_bytes} bytes")
        with ExitStack() as undo:
            if info.is_host:
                self._count_host(info, size_bytes)
                undo.callback(self._uncount_host, size_bytes)
                allocation = self._allocate_memfd(size_bytes) if self._memfds else self._allocate_host(size_bytes)
            else:
                allocation = self._allocate_on(self._gpus[device_uuid], size_bytes)
            undo.callback(self._release, allocation)
            if info.is_host:
                self._place(allocation)
            if device_uuid in self._to_clear:
                self._filler.set_bytes(self._place(allocation), 0, size_bytes)
            undo.pop_all()
        with self._lock:
            self._live.add(allocation)
        return Slab(device_uuid, size_bytes, allocation)

    def export(self, slab: Slab, *, writable: bool) -> int:
        """A new close-on-exec descriptor; the caller closes it. The importer chooses its access, but on memfds."""
        allocation = self._alive(slab)
        if allocation.memfd is not None:
            assert self._memfds is not None
            return self._memfds.export(allocation.memfd, writable=writable)
        try:
            return os.dup(allocation.fd)
        except OSError as error:
            raise create_failed(error, slab.size_bytes) from error

    def held_elsewhere(self, slab: Slab) -> bool | None:
        """None: CUDA does not tell."""
        self._alive(slab)
        return None

    def holders(self, slabs: Sequence[Slab]) -> list[int]:
        """0 but for memfds: an import leaves nothing to see."""
        memfds = [slab.handle.memfd for slab in slabs]
        if self._memfds is None or None in memfds:
            return [0] * len(slabs)
        return self._memfds.holders(memfds)

    def fill(self, copies: Sequence[Copy]) -> None:
        """Reads files with several threads; copy engines do the rest. Slabs stay mapped here from then on.

        Copies from files are made in any order, those between slabs as they come where one GPU makes them all.
        """
        places: dict[_Allocation, Place] = {}

        def place(slab: Slab) -> Place:
            allocation: _Allocation = slab.handle
            found = places.get(allocation)
            if found is None:
                found = places[allocation] = self._slab_place(slab)
            return found

        pieces = []
        for copy in copies:
            check_copy(copy)
            target, offset_bytes, length_bytes, source, *rows = copy
            if length_bytes:
                of = source.fd if isinstance(source, FileSource) else place(source.slab)
                pieces.append(Piece(place(target), offset_bytes, of, source.offset_bytes, length_bytes, *rows))
        self._filler.fill(pieces)

    def read(self, slab: Slab, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of the slab's bytes, by the copy engine."""
        check_bounds(slab, offset_bytes, length_bytes)
        return self._filler.read(self._slab_place(slab), offset_bytes, length_bytes)

    def destroy(self, slab: Slab) -> None:
        """Unmaps, releases and closes; a second call does nothing."""
        allocation: _Allocation = slab.handle
        with self._lock:
            if allocation not in self._live:
                return
            self._live.remove(allocation)
        self._release(allocation)
        if slab.device_uuid == HOST_UUID:
            self._uncount_host(slab.size_bytes)

    def close(self) -> None:
        """Waits for fills, then gives up every slab, the buffers and the contexts."""
        self._undo.close()

    def check_fresh_slabs(self) -> list[str]:
        """Looks for old bytes in new slabs on each device; returns those that show some.

        Dirties a slab, releases it and reads a new one. `create` clears every new
        slab of a device that shows old bytes, or that has no room for the check.
        """
        self._to_clear = frozenset()
        dirty = []
        for info in self._infos.values():
            size_bytes = -(-FRESH_CHECK_BYTES // info.page_bytes) * info.page_bytes
            try:
                slab = self.create(info.uuid, size_bytes)
                self._filler.set_bytes(self._slab_place(slab), 0xA5, size_bytes)
                self.destroy(slab)
                slab = self.create(info.uuid, size_bytes)
                clean = not np.frombuffer(self.read(slab, 0, size_bytes), np.uint64).any()
                self.destroy(slab)
            except Exhausted:
                clean = False
            if not clean:
                dirty.append(info.uuid)
        self._to_clear = frozenset(dirty)
        if dirty:
            log.warning("driver.new_slabs_are_cleared", devices=dirty)
        return dirty

    # Allocating

    def _allocate_on(self, gpu: Gpu, size_bytes: int) -> _Allocation:
        readers = [gpu.ordinal, *sorted(gpu.reached_by)]
        allocation = _Allocation(gpu, False, size_bytes, cuda_calls.access(self._cu, readers))
        try:
            self._allocate(allocation, cuda_calls.device_memory(self._cu, gpu.ordinal))
        except DriverError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            now = self.memory(gpu.uuid)
            raise Exhausted(
                f"device {gpu.uuid} has no room for a slab of {size_bytes} bytes: "
                f"{now.free_bytes} of {now.total_bytes} bytes are free",
                size_bytes,
                now.free_bytes,
            ) from error
        return allocation

    def _allocate_host(self, size_bytes: int) -> _Allocation:
        with self._lock:
            node = next(self._nodes)
        gpu = self._living(next(gpu for gpu in self._gpus.values() if gpu.numa_node == node))
        readers = [other.ordinal for other in self._gpus.values()]
        allocation = _Allocation(gpu, True, size_bytes, cuda_calls.access(self._cu, readers))
        try:
            self._allocate(allocation, cuda_calls.host_memory(self._cu, gpu.numa_node))
        except DriverError as error:
            if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGESIZE")
            raise Exhausted(
                f"node {gpu.numa_node} of the host has no memory for a slab of {size_bytes} bytes: {free_bytes} bytes "
                "are free on all nodes; lower host_cap_bytes, or end other programs",
                size_bytes,
                free_bytes,
            ) from error
        return allocation

    def _allocate_memfd(self, size_bytes: int) -> _Allocation:
        assert self._memfds is not None
        gpu = self._living(next(iter(self._gpus.values())))
        return _Allocation(gpu, True, size_bytes, [], memfd=self._memfds.create(HOST_UUID, size_bytes))

    def _allocate(self, allocation: _Allocation, prop: Any) -> None:
        cu, size_bytes = self._cu, allocation.size_bytes
        _check_descriptors(size_bytes)
        with self._on(allocation.gpu), ExitStack() as undo:
            allocation.handle = call(cu.cuMemCreate, size_bytes, prop, 0)
            undo.callback(cu.cuMemRelease, allocation.handle)
            try:
                fd = int(call(cu.cuMemExportToShareableHandle, allocation.handle, cuda_calls.descriptor_type(cu), 0))
            except DriverError:
                _check_descriptors(size_bytes)
                raise
            os.set_inheritable(fd, False)
            allocation.fd = fd
            undo.pop_all()

    def _release(self, allocation: _Allocation) -> None:
        """Gives everything up, whatever fails: a dead context's memory has gone with it."""
        cu = self._cu
        with allocation.lock, ExitStack() as steps:
            if allocation.fd >= 0:
                os.close(allocation.fd)
            address, allocation.address = allocation.address, 0
            with suppress(DriverError):
                steps.enter_context(self._on(allocation.gpu))
            if allocation.memfd is not None:
                assert self._memfds is not None
                if allocation.reservation is not None:
                    cu.cuMemHostUnregister(address)
                    allocation.reservation.close()
                self._memfds.destroy(allocation.memfd)
                return
            if address:
                cu.cuMemUnmap(address, allocation.size_bytes)
                cu.cuMemAddressFree(address, allocation.size_bytes)
            cu.cuMemRelease(allocation.handle)

    def _release_all(self) -> None:
        with self._lock:
            live, self._live = self._live, set()
            self._host_bytes = 0
        for allocation in live:
            self._release(allocation)

    # Mapping

    def _slab_place(self, slab: Slab) -> Place:
        return self._place(self._alive(slab))

    def _place(self, allocation: _Allocation) -> Place:
        """Where the daemon has the slab mapped, from its first use until it is destroyed."""
        with allocation.lock:
            if not allocation.address:
                map_ = self._map_memfd if allocation.memfd is not None else self._map
                map_(allocation)
            gpu = self._living(allocation.gpu) if allocation.on_host else allocation.gpu
            return Place(allocation.address, gpu, allocation.on_host)

    def _map(self, allocation: _Allocation) -> None:
        cu, size_bytes = self._cu, allocation.size_bytes
        with self._on(allocation.gpu), ExitStack() as undo:
            address = int(call(cu.cuMemAddressReserve, size_bytes, 0, 0, 0))
            undo.callback(cu.cuMemAddressFree, address, size_bytes)
            call(cu.cuMemMap, address, size_bytes, 0, allocation.handle, 0)
            undo.callback(cu.cuMemUnmap, address, size_bytes)
            call(cu.cuMemSetAccess, address, size_bytes, allocation.access, len(allocation.access))
            allocation.address = address
            undo.pop_all()

    def _map_memfd(self, allocation: _Allocation) -> None:
        assert self._memfds is not None and allocation.memfd is not None
        cu, size_bytes = self._cu, allocation.size_bytes
        with self._on(allocation.gpu), ExitStack() as undo:
            reservation = HostReservation(size_bytes, 1)
            undo.callback(reservation.close)
            reservation.map(0, [self._memfds.export(allocation.memfd, writable=True)], writable=True)
            address = reservation.view().ctypes.data
            call(cu.cuMemHostRegister, address, size_bytes, cu.CU_MEMHOSTREGISTER_PORTABLE)
            allocation.address, allocation.reservation = address, reservation
            undo.pop_all()

    def _try_host_memory(self, size_bytes: int) -> str | None:
        """Why host memory cannot be allocated and exported; None where it can."""
        allocation = None
        try:
            allocation = self._allocate_host(size_bytes)
            self._place(allocation)
        except DriverError as error:
            return error.message
        finally:
            if allocation is not None:
                self._release(allocation)
        return None

    # Small things

    def _living(self, gpu: Gpu) -> Gpu:
        """For host memory, which every GPU reaches: this one, or another where its context has died."""
        with self._lock:
            living = [other for other in self._gpus.values() if other.uuid not in self._failed]
        near = [other for other in living if other.numa_node == gpu.numa_node]
        return gpu if gpu in living else next(iter([*near, *living]), gpu)

    @contextmanager
    def _on(self, gpu: Gpu) -> Iterator[None]:
        """Makes a GPU's context current; a sticky error marks the GPU as failed."""
        try:
            with cuda_calls.current(self._cu, self._contexts[gpu.uuid]):
                yield
        except DriverError as error:
            if error.name not in cuda_calls.CONTEXT_IS_DEAD:
                raise
            with self._lock:
                self._failed.add(gpu.uuid)
            message = f"the context of device {gpu.uuid} is dead: {error.message}; restart vmmd to use it again"
            raise DriverError(message, error.call, error.code, error.name) from error

    def _info(self, gpu: Gpu) -> DeviceInfo:
        with self._on(gpu):
            _, total_bytes = call(self._cu.cuMemGetInfo)
        readers = frozenset(other.uuid for other in self._gpus.values() if other.ordinal in gpu.reached_by)
        return DeviceInfo(
            gpu.uuid,
            gpu.name,
            total_bytes,
            gpu.page_bytes,
            numa_node=gpu.numa_node,
            reached_by=readers,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        )

    def _device(self, uuid: str) -> DeviceInfo:
        info = self._infos.get(uuid)
        if info is None:
            raise NotFound(f"no device {uuid!r}; there are {', '.join(self._infos)}")
        return info

    def _alive(self, slab: Slab) -> _Allocation:
        allocation: _Allocation = slab.handle
        with self._lock:
            if allocation not in self._live:
                raise InvalidRequest("this slab is destroyed")
        return allocation

    def _count_host(self, info: DeviceInfo, size_bytes: int) -> None:
        with self._lock:
            free_bytes = max(0, info.total_bytes - self._host_bytes)
            if size_bytes > free_bytes:
                raise Exhausted(
                    f"device {info.uuid} has no room for a slab of {size_bytes} bytes: "
                    f"{free_bytes} of {info.total_bytes} bytes are free",
                    size_bytes,
                    free_bytes,
                )
            self._host_bytes += size_bytes

    def _uncount_host(self, size_bytes: int) -> None:
        with self._lock:
            self._host_bytes -= size_bytes


def _check_descriptors(size_bytes: int) -> None:
    """Two descriptors must be free: CUDA does not say that it lacked one. Errors: `Exhausted`."""
    try:
        with ExitStack() as stack:
            for _ in range(2):
                stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        raise create_failed(error, size_bytes) from error
