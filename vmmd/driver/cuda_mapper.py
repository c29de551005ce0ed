"""The CUDA driver, client side: imports slabs and maps them for kernels.

A range is one reservation of device addresses, the same on every GPU of the
process, so `view` is an integer. Each import is released as soon as it is mapped:
the mapping alone keeps the slab alive.

The mapper's own GPU may touch a range, and so may other GPUs that have a context
in this process when the range is reserved and a path to the owner. Others may
not, without failing the map.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from vmmd.driver import cuda_calls
from vmmd.driver.base import check_room
from vmmd.driver.cuda_calls import Gpu, PeerAccess, call
from vmmd.driver.host_memfd import HostReservation
from vmmd.errors import DriverError, InvalidRequest, NotFound

_IS_NO_SLAB = frozenset(
    f"CUDA_ERROR_{name}"
    for name in ("INVALID_VALUE", "INVALID_HANDLE", "INVALID_DEVICE", "NOT_SUPPORTED", "OPERATING_SYSTEM", "UNKNOWN")
)
"""What an import answers to a descriptor of something else."""
_IS_OF_ANOTHER_SIZE = frozenset({"CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_SUPPORTED"})
"""What a map answers when it is not asked for the whole slab."""
_DESCRIPTORS = 1024  # more than a batch of slabs brings


class CudaMapper:
    """Client side of the CUDA driver; see `vmmd.driver.base.Mapper`.

    Args:
        device_uuid: the GPU that owns the slabs; with `host`, the one whose kernels read them.
        peer_access: "auto" lets other GPUs of this process in where a path exists, "never" none.
        host: the slabs are host memory: allocations or memfds, as the daemon could make them.
        host_access: with `host`, the processor may touch them too.

    Errors: `NoDevice`, `NotFound` (this process does not see that GPU), `DriverError`.

    Keeps the GPU's primary context for the life of the process; a caller that
    computes makes it current itself.
    """

    def __init__(
        self, device_uuid: str, *, peer_access: PeerAccess = "auto", host: bool = False, host_access: bool = False
    ) -> None:
        cuda_calls.check_peer_access(peer_access)
        self.cu = cu = cuda_calls.bindings()
        gpus, missing = cuda_calls.find_gpus(cu)
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        if device_uuid not in by_uuid:
            seen = ", ".join([*by_uuid, *missing]) or "none"
            raise NotFound(f"this process sees no GPU {device_uuid!r}; it sees {seen} (CUDA_VISIBLE_DEVICES?)")
        self.gpu: Gpu = by_uuid[device_uuid]
        cuda_calls.widen_descriptor_table(_DESCRIPTORS)
        self.context = call(cu.cuDevicePrimaryCtxRetain, self.gpu.ordinal)
        self.host = host
        self.host_access = host_access
        self._others = () if peer_access == "never" else tuple(gpu for gpu in gpus if gpu is not self.gpu)

    def reserve(self, slab_bytes: int, slabs_max: int) -> "CudaReservation":
        """Reserves ``slabs_max * slab_bytes`` of device addresses; no memory is used."""
        return CudaReservation(self, slab_bytes, slabs_max)

    def readers(self) -> list[int]:
        """Ordinals of the GPUs that may touch a range which is reserved now, the mapper's own first."""
        others = [
            gpu.ordinal
            for gpu in self._others
            if (self.host or gpu.ordinal in self.gpu.reached_by)
            and call(self.cu.cuDevicePrimaryCtxGetState, gpu.ordinal)[1]
        ]
        return [self.gpu.ordinal, *others]


class CudaReservation:
    """A range's addresses on the GPUs of this process; for one thread at a time."""

    def __init__(self, mapper: CudaMapper, slab_bytes: int, slabs_max: int) -> None:
        page_bytes = mapper.gpu.page_bytes
        if slab_bytes <= 0 or slab_bytes % page_bytes or slabs_max <= 0:
            raise InvalidRequest(
                f"range of {slabs_max} slabs of {slab_bytes} bytes: at least one slab, of a multiple of {page_bytes}"
            )
        self.slab_bytes = slab_bytes
        self.slabs_max = slabs_max
        self.ordinal: int | None = mapper.gpu.ordinal
        self._mapper = mapper
        self._cu = mapper.cu
        self._readers = mapper.readers()
        self._mapped: set[int] = set()
        self._open = True
        self._memfds: HostReservation | None = None  # where the host's slabs turn out to be memfds
        self._base = 0
        if not mapper.host:
            self._reserve()

    def map(self, first_index: int, fds: Sequence[int], *, writable: bool) -> None:
        """Imports slabs and maps them at consecutive indexes, all or none; closes every descriptor in any case.

        Access is set once for all of them; read-only without `writable`, and then
        a kernel's store is an illegal address in this process alone.
        """
        count = len(fds)
        with _closing(fds) as left:
            self._check_room(first_index, count)
            if not left:
                return
            if self._mapper.host and _is_sealed_memfd(left[0]):
                self._map_memfds(first_index, left, writable)
            else:
                self._map_handles(first_index, left, writable)
        self._mapped.update(range(first_index, first_index + count))

    def unmap(self, index: int) -> None:
        """Unmaps one slab; its addresses stay reserved. Kernels that use it must have ended."""
        if index not in self._mapped:
            raise InvalidRequest(f"slab {index} of this range is not mapped")
        with cuda_calls.current(self._cu, self._mapper.context):
            if self._memfds is not None:
                call(self._cu.cuMemHostUnregister, self._address(index))
                self._memfds.unmap(index)
            else:
                call(self._cu.cuMemUnmap, self._address(index), self.slab_bytes)
        self._mapped.remove(index)

    def is_mapped(self, index: int) -> bool:
        """Whether slab `index` is mapped."""
        return index in self._mapped

    def view(self) -> int:
        """The range's address, on every GPU; of host slabs also the processor's, where it has access.

        Ask for a range of host slabs after its first `map`: only then is it known
        which kind of address they need.
        """
        if not self._open:
            raise InvalidRequest("this range is closed")
        if not self._base:
            self._reserve()
        return self._base

    def synchronize(self) -> None:
        """Waits for the kernels of this process on the GPU, whichever range they use."""
        with cuda_calls.current(self._cu, self._mapper.context):
            call(self._cu.cuCtxSynchronize)

    def close(self) -> None:
        """Unmaps everything and gives the addresses back; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        with cuda_calls.current(self._cu, self._mapper.context):
            for index in sorted(self._mapped):
                if self._memfds is not None:
                    self._cu.cuMemHostUnregister(self._address(index))
                else:
                    self._cu.cuMemUnmap(self._address(index), self.slab_bytes)
            self._mapped.clear()
            if self._memfds is not None:
                self._memfds.close()
            elif self._base:
                self._cu.cuMemAddressFree(self._base, self.slab_bytes * self.slabs_max)

    def _reserve(self) -> None:
        self._base = int(call(self._cu.cuMemAddressReserve, self.slab_bytes * self.slabs_max, 0, 0, 0))

    def _map_handles(self, first_index: int, fds: Sequence[int], writable: bool) -> None:
        cu, mapper = self._cu, self._mapper
        first = self.view() + first_index * self.slab_bytes
        if self._memfds is not None:
            raise InvalidRequest("this range has memfds in it, and no CUDA allocation can join them")
        with cuda_calls.current(cu, mapper.context), ExitStack() as undo:
            numa_node = None
            for i, fd in enumerate(fds):
                handle, numa_node = self._import(fd)
                try:
                    self._map_one(first + i * self.slab_bytes, handle)
                finally:
                    cu.cuMemRelease(handle)
                undo.callback(cu.cuMemUnmap, first + i * self.slab_bytes, self.slab_bytes)
            who = cuda_calls.access(cu, self._readers, numa_node if mapper.host_access else None, writable=writable)
            call(cu.cuMemSetAccess, first, len(fds) * self.slab_bytes, who, len(who))
            undo.pop_all()

    def _import(self, fd: int) -> tuple[Any, int]:
        """The slab's handle, and its node if it is host memory. Errors: `InvalidRequest` if it is no slab of ours."""
        cu, mapper = self._cu, self._mapper
        kind = cu.CUmemLocationType
        try:
            handle = call(cu.cuMemImportFromShareableHandle, fd, cuda_calls.descriptor_type(cu))
        except DriverError as error:
            if error.name not in _IS_NO_SLAB:
                raise
            raise InvalidRequest(f"descriptor {fd} is no slab: {error.message}") from error
        try:
            prop = call(cu.cuMemGetAllocationPropertiesFromHandle, handle)
            location = prop.location  # lives in prop
            if mapper.host:
                expected, fits = "host memory", location.type == kind.CU_MEM_LOCATION_TYPE_HOST_NUMA
            else:
                expected = f"device {mapper.gpu.uuid}"
                fits = (location.type, location.id) == (kind.CU_MEM_LOCATION_TYPE_DEVICE, mapper.gpu.ordinal)
            if not fits:
                raise InvalidRequest(
                    f"descriptor {fd} is no slab of {expected}: it lies on {location.type} {location.id}"
                )
        except BaseException:
            cu.cuMemRelease(handle)
            raise
        return handle, int(location.id)

    def _map_one(self, address: int, handle: Any) -> None:
        try:
            call(self._cu.cuMemMap, address, self.slab_bytes, 0, handle, 0)
        except DriverError as error:
            if error.name not in _IS_OF_ANOTHER_SIZE:
                raise
            raise InvalidRequest(f"this is no slab of {self.slab_bytes} bytes: {error.message}") from error

    def _map_memfds(self, first_index: int, fds: list[int], writable: bool) -> None:
        """Maps and registers; takes the descriptors out of `fds` once the host's reservation closes them."""
        cu = self._cu
        if self._memfds is None:
            if self._base:
                raise InvalidRequest("the host's slabs are memfds: ask for view() only after the first map")
            self._memfds = HostReservation(self.slab_bytes, self.slabs_max)
            self._base = self._memfds.view().ctypes.data
        flags = cu.CU_MEMHOSTREGISTER_PORTABLE | (0 if writable else cu.CU_MEMHOSTREGISTER_READ_ONLY)
        with cuda_calls.current(cu, self._mapper.context), ExitStack() as undo:
            mine = list(fds)
            fds.clear()
            self._memfds.map(first_index, mine, writable=writable)
            indexes = range(first_index, first_index + len(mine))
            for index in indexes:
                undo.callback(self._memfds.unmap, index)
            for index in indexes:
                address = self._address(index)
                call(cu.cuMemHostRegister, address, self.slab_bytes, flags)
                undo.callback(cu.cuMemHostUnregister, address)
                if int(call(cu.cuMemHostGetDevicePointer, address, 0)) != address:
                    raise DriverError(f"GPU {self._mapper.gpu.uuid} sees registered host memory at another address")
            undo.pop_all()

    def _address(self, index: int) -> int:
        return self._base + index * self.slab_bytes

    def _check_room(self, first_index: int, count: int) -> None:
        if not self._open:
            raise InvalidRequest("this range is closed")
        check_room(first_index, count, self.slabs_max, self._mapped)


@contextmanager
def _closing(fds: Sequence[int]) -> Iterator[list[int]]:
    """Closes what is left of these descriptors at the end."""
    left = list(fds)
    try:
        yield left
    finally:
        for fd in left:
            with suppress(OSError):
                os.close(fd)


def _is_sealed_memfd(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
