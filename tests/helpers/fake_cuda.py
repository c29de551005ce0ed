"""A stand-in for ``cuda.bindings.driver`` on host memory, for tests of the CUDA driver without a GPU.

Slabs are files without a name in memory, mapped at the addresses that the driver
reserves, so bytes, descriptors and other processes are real. `FakeCuda.install`
puts it where the bindings would be imported from. It is as strict as the real
one where that matters: a slab maps whole, a device out of room says so, and
nothing runs without a current context.

Run as a program it is a vmmd on the stand-in; STRATA_FAKE_CUDA holds its options as JSON.
"""

import ctypes
import json
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

from vmmd.driver import host_memfd

_libc = ctypes.CDLL(None)
MIB = 1 << 20
PAGE_BYTES = 2 * MIB


class CUresult(IntEnum):
    """The codes that this stand-in returns; the real numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


def gpu_uuid(ordinal: int, salt: int = 0) -> str:
    """The name of a simulated GPU."""
    return f"GPU-{_uuid(ordinal, salt)}"


def _uuid(ordinal: int, salt: int) -> UUID:
    return UUID(int=(salt << 8) + ordinal + 1)


class _Failed(Exception):
    pass


def _struct(**fields: Any) -> Callable[[], SimpleNamespace]:
    return lambda: SimpleNamespace(**{name: make() for name, make in fields.items()})


class _Properties:
    """As with the real structure, what it contains is gone with it."""

    def __init__(self, location: SimpleNamespace) -> None:
        self.location = location

    def __del__(self) -> None:
        vars(self.location).clear()


class _Memcpy2D:
    """CUDA_MEMCPY2D: has the real fields and no others."""

    __slots__ = (
        *("srcXInBytes", "srcY", "srcMemoryType", "srcHost", "srcDevice", "srcArray", "srcPitch"),
        *("dstXInBytes", "dstY", "dstMemoryType", "dstHost", "dstDevice", "dstArray", "dstPitch"),
        *("WidthInBytes", "Height"),
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)


class FakeCuda:
    """State of the stand-in: what exists, how often each function was called, and which call is to fail.

    Args:
        gpus: how many there are.
        total_bytes: memory of each.
        peers: whether they have a path to each other.
        host_memory: whether allocations on the host's nodes are supported.
        dirty: whether a new slab shows old bytes.
        salt: makes the GPUs others than those of another stand-in on this host.
        others: a directory, where what processes allocate beside slabs is seen by all that name it.
        visible: which of the GPUs this process sees, in its order, as CUDA_VISIBLE_DEVICES says; None for all.
    """

    def __init__(
        self,
        gpus: int = 2,
        total_bytes: int = 256 * MIB,
        *,
        peers: bool = True,
        host_memory: bool = True,
        dirty: bool = False,
        salt: int = 0,
        others: str = "",
        visible: Sequence[int] | None = None,
    ) -> None:
        self.visible = list(range(gpus) if visible is None else visible)  # by this process's number
        self.total_bytes, self.peers = total_bytes, peers
        self.host_memory, self.dirty = host_memory, dirty
        self.salt, self.others = salt, Path(others) if others else None
        self.calls: Counter[str] = Counter()
        self.handles: dict[int, list[int]] = {}  # [fd, size, location type, location number]
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, list[int]] = {}
        self.access: dict[int, list[tuple[int, int, int]]] = {}
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, mmap.mmap] = {}
        self.allocated: dict[int, Path] = {}
        self.streams: dict[int, int] = {}  # and contexts that they were made in
        self.events: dict[int, int] = {}
        self.contexts: Counter[int] = Counter()
        self.dead: set[int] = set()  # contexts in which every call fails
        self._current = threading.local()
        self._lock = threading.RLock()
        self._next = 1
        self._fails: dict[str, tuple[int, CUresult]] = {}
        self.module = self._module()

    def install(self) -> None:
        """Takes the place of the bindings in this process."""
        sys.modules["cuda.bindings.driver"] = self.module

    def fail_at(self, function: str, n: int, name: str) -> None:
        """Lets the n-th call of a function from now on (1 is the next) and those after it return an error."""
        self._fails[function] = (self.calls[function] + n, CUresult[name])

    def heal(self) -> None:
        """Forgets the failures that were asked for."""
        self._fails.clear()

    def live(self) -> dict[str, int]:
        """How much of everything exists."""
        kinds = ("handles", "reserved", "mapped", "registered", "pinned", "streams", "events")
        return {kind: len(getattr(self, kind)) for kind in kinds} | {"contexts": self.contexts.total()}

    def _module(self) -> Any:
        module: Any = ModuleType("cuda.bindings.driver")
        for name in dir(self):
            if name.startswith("cu"):
                setattr(module, name, self._counted(name, getattr(self, name)))
        enum = {
            "CUdevice_attribute": (
                "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
                "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
                "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID",
                "CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE",
                "CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH",
            ),
            "CUmemAllocationHandleType": ("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",),
            "CUmemAllocationType": ("CU_MEM_ALLOCATION_TYPE_PINNED",),
            "CUmemAllocationGranularity_flags": ("CU_MEM_ALLOC_GRANULARITY_MINIMUM",),
            "CUmemLocationType": ("CU_MEM_LOCATION_TYPE_DEVICE", "CU_MEM_LOCATION_TYPE_HOST_NUMA"),
            "CUmemAccess_flags": ("CU_MEM_ACCESS_FLAGS_PROT_READ", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"),
            "CUmemorytype": (
                "CU_MEMORYTYPE_HOST",
                "CU_MEMORYTYPE_DEVICE",
                "CU_MEMORYTYPE_ARRAY",
                "CU_MEMORYTYPE_UNIFIED",
            ),
            "CUstream_flags": ("CU_STREAM_NON_BLOCKING",),
            "CUevent_flags": ("CU_EVENT_DISABLE_TIMING",),
        }
        for name, values in enum.items():
            setattr(module, name, SimpleNamespace(**{value: i for i, value in enumerate(values, 1)}))
        module.CU_MEMHOSTALLOC_PORTABLE, module.CU_MEMHOSTREGISTER_PORTABLE = 1, 1
        module.CU_MEMHOSTREGISTER_READ_ONLY = 8
        module.CUDA_MEMCPY2D = _Memcpy2D
        place = _struct(type=int, id=int)
        module.CUmemAllocationProp = _struct(location=place, type=int, requestedHandleTypes=int)
        module.CUmemAccessDesc = _struct(location=place, flags=int)
        return module

    def _counted(self, name: str, function: Any) -> Any:
        def counted(*args: Any) -> tuple[Any, ...]:
            if self.dead.intersection(self._stack()[-1:]) and not name.startswith("cuCtx"):
                return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
            with self._lock:
                self.calls[name] += 1
                n, code = self._fails.get(name, (sys.maxsize, CUresult.CUDA_SUCCESS))
                if self.calls[name] >= n:
                    return (code,)
            try:
                result = function(*args)
            except _Failed as error:
                return (error.args[0],)
            except OSError:
                return (CUresult.CUDA_ERROR_OPERATING_SYSTEM,)
            if result is None:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, *(result if isinstance(result, tuple) else (result,)))

        counted.__name__ = name
        return counted

    def _require(self, condition: Any, code: str = "CUDA_ERROR_INVALID_VALUE") -> None:
        if not condition:
            raise _Failed(CUresult[code])

    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        stack: list[int] = self._current.stack
        return stack

    def _need_context(self) -> int:
        self._require(self._stack(), "CUDA_ERROR_INVALID_CONTEXT")
        return self._stack()[-1]

    def _used_bytes(self, ordinal: int) -> int:
        physical = {id(slab): slab for slab in (*self.handles.values(), *self.mapped.values())}.values()
        slabs_bytes = sum(size for _, size, kind, number in physical if (kind, number) == (1, ordinal))
        return slabs_bytes + self._others_bytes(ordinal)

    def _others_bytes(self, ordinal: int) -> int:
        if self.others is None:
            return 0
        own = self.others.glob(f"{self.visible[ordinal]}-*")
        files = [path for path in own if Path("/proc", path.name.split("-")[1]).exists()]
        return sum(path.stat().st_size for path in files)

    # Devices and contexts

    def cuInit(self, flags: int) -> None:
        self._require(self.visible, "CUDA_ERROR_NO_DEVICE")

    def cuDeviceGetCount(self) -> int:
        return len(self.visible)

    def cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"fake\0\0"

    def cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=_uuid(self.visible[device], self.salt).bytes)

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        return {3: 0, 4: 3_201_000, 5: 6144}.get(attribute, 1)  # the node; the memory's kHz and bits

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        return int(self.peers)

    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.contexts[device] += 1
        return device

    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        self.contexts[device] -= 1

    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int]:
        return 0, int(self.contexts[device] > 0)

    def cuCtxPushCurrent(self, context: int) -> None:
        self._stack().append(context)

    def cuCtxPopCurrent(self) -> int:
        return self._stack().pop()

    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.total_bytes - self._used_bytes(self._need_context()), self.total_bytes

    # Slabs

    def cuMemGetAllocationGranularity(self, prop: Any, flags: int) -> int:
        return PAGE_BYTES

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        context = self._need_context()
        kind, number = prop.location.type, prop.location.id
        assert kind == 2 or number == context, "a slab is created with its owner's context"
        self._require(kind == 1 or self.host_memory, "CUDA_ERROR_NOT_PERMITTED")
        with self._lock:
            if kind == 1:
                self._require(size <= self.total_bytes - self._used_bytes(number), "CUDA_ERROR_OUT_OF_MEMORY")
            where = self.visible[number] if kind == 1 else number
            fd = os.memfd_create(f"fake-{kind}-{where}", os.MFD_CLOEXEC)
            os.ftruncate(fd, size)
            if self.dirty:
                os.pwrite(fd, b"old bytes", size // 2)
            return self._keep([fd, size, kind, number])

    def _keep(self, slab: list[int]) -> int:
        with self._lock:
            self._next += 1
            self.handles[self._next] = slab
            return self._next

    def cuMemRelease(self, handle: int) -> None:
        with self._lock:
            os.close(self.handles.pop(handle)[0])

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> int:
        return os.dup(self.handles[handle][0])

    def cuMemImportFromShareableHandle(self, fd: int, kind: int) -> int:
        name = os.readlink(f"/proc/self/fd/{fd}").split("fake-")
        self._require(len(name) == 2)
        kind, where = map(int, name[1].split()[0].split("-"))
        self._require(kind != 1 or where in self.visible)
        number = self.visible.index(where) if kind == 1 else where
        return self._keep([os.dup(fd), os.fstat(fd).st_size, kind, number])

    def cuMemGetAllocationPropertiesFromHandle(self, handle: int) -> Any:
        _, _, kind, number = self.handles[handle]
        place = SimpleNamespace(type=kind, id=number)
        return _Properties(place)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        base = host_memfd._reserve(0, size, 0)
        self.reserved[base] = size
        return base

    def cuMemAddressFree(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= mapped < address + size for mapped in self.mapped)
        host_memfd._libc.munmap(address, size)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        slab = self.handles[handle]
        self._require(size <= slab[1])
        self._require(size == slab[1], "CUDA_ERROR_NOT_SUPPORTED")
        host_memfd._mmap(address, size, 0, mmap.MAP_SHARED | host_memfd._MAP_FIXED, slab[0])
        self.mapped[address] = slab

    def cuMemSetAccess(self, address: int, size: int, descriptions: list[Any], count: int) -> None:
        assert len(descriptions) == count
        end = address + size
        while address < end:
            slab = self.mapped[address]
            for place in (d.location for d in descriptions if d.location.type == 1):
                is_own = slab[2] != 1 or slab[3] == place.id
                self._require(place.id < len(self.visible) and (is_own or self.peers), "CUDA_ERROR_INVALID_DEVICE")
            writable = descriptions[0].flags == 2
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(slab[1]), prot)
            self.access[address] = [(d.location.type, d.location.id, d.flags) for d in descriptions]
            address += slab[1]

    def cuMemUnmap(self, address: int, size: int) -> None:
        with self._lock:
            slab = self.mapped.pop(address)
            assert slab[1] == size
            self.access.pop(address, None)
            host_memfd._reserve(address, size, host_memfd._MAP_FIXED)

    # What is no slab: counted, not there

    def cuMemAlloc(self, size: int) -> int:
        context = self._need_context()
        assert self.others is not None
        self._require(size <= self.total_bytes - self._used_bytes(context), "CUDA_ERROR_OUT_OF_MEMORY")
        self._next += 1
        path = self.others / f"{self.visible[context]}-{os.getpid()}-{self._next}"
        with path.open("wb") as file:
            file.truncate(size)
        self.allocated[self._next] = path
        return self._next

    def cuMemFree(self, address: int) -> None:
        self.allocated.pop(address).unlink()

    # Host memory, streams and copies

    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        buffer = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.pinned[address] = buffer
        return address

    def cuMemFreeHost(self, address: int) -> None:
        del self.pinned[address]

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> None:
        self._need_context()
        self.registered[address] = size

    def cuMemHostUnregister(self, address: int) -> None:
        del self.registered[address]

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        self._require(address in self.registered)
        return address

    def cuCtxSynchronize(self) -> None:
        self._need_context()

    def cuStreamCreate(self, flags: int) -> int:
        context = self._need_context()
        self._next += 1
        self.streams[self._next] = context
        return self._next

    def cuStreamDestroy(self, stream: int) -> None:
        del self.streams[stream]

    def cuStreamSynchronize(self, stream: int) -> None:
        assert stream in self.streams

    def cuEventCreate(self, flags: int) -> int:
        context = self._need_context()
        with self._lock:
            self._next += 1
            self.events[self._next] = context
            return self._next

    def cuEventRecord(self, event: int, stream: int) -> None:
        self._require(self.events[event] == self.streams[stream], "CUDA_ERROR_INVALID_HANDLE")

    def cuEventSynchronize(self, event: int) -> None:
        assert event in self.events

    def cuEventDestroy(self, event: int) -> None:
        del self.events[event]

    def cuMemcpyAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self._need_context()
        ctypes.memmove(target, source, size)

    cuMemcpyHtoDAsync = cuMemcpyDtoHAsync = cuMemcpyAsync

    def cuMemcpy2DAsync(self, copy: Any, stream: int) -> None:
        self._need_context()
        assert stream in self.streams
        address = {1: ("srcHost", "dstHost"), 2: ("srcDevice", "dstDevice"), 4: ("srcDevice", "dstDevice")}
        self._require(copy.srcMemoryType in address and copy.dstMemoryType in address)
        source = getattr(copy, address[copy.srcMemoryType][0]) + copy.srcY * copy.srcPitch + copy.srcXInBytes
        target = getattr(copy, address[copy.dstMemoryType][1]) + copy.dstY * copy.dstPitch + copy.dstXInBytes
        self._require(all(copy.WidthInBytes <= pitch < 1 << 31 for pitch in (copy.srcPitch, copy.dstPitch)))
        for row in range(copy.Height):
            ctypes.memmove(target + row * copy.dstPitch, source + row * copy.srcPitch, copy.WidthInBytes)

    def cuMemcpyDtoH(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    cuMemcpyHtoD = cuMemcpyDtoH

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> None:
        self._need_context()
        ctypes.memset(address, value, size)


def main() -> None:
    """A vmmd on the stand-in."""
    FakeCuda(**json.loads(os.environ["STRATA_FAKE_CUDA"])).install()
    from vmmd.main import main as vmmd

    vmmd()


if __name__ == "__main__":
    main()
