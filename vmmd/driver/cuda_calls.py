"""CUDA driver calls by name of error, and the GPUs of this process by UUID.

`call` is the one place where a result tuple of ``cuda.bindings`` becomes a value
or a `DriverError`. The bindings are imported on first use: a host without them
can still import this module and be told what is missing.
"""

import fcntl
import importlib
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal
from uuid import UUID

from vmmd.errors import DriverError, InvalidRequest, NoDevice

PeerAccess = Literal["auto", "never"]

CONTEXT_IS_DEAD = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "ASSERT",
        "CONTAINED",
        "CONTEXT_IS_DESTROYED",
        "DEVICE_UNAVAILABLE",
        "ECC_UNCORRECTABLE",
        "EXTERNAL_DEVICE",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_ADDRESS",
        "ILLEGAL_INSTRUCTION",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "LAUNCH_TIMEOUT",
        "MISALIGNED_ADDRESS",
        "NVLINK_UNCORRECTABLE",
        "TENSOR_MEMORY_LEAK",
    )
)
"""Sticky errors: every later call in the same context fails too."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device that can share slabs. `ordinal` is this process's own number of it."""

    uuid: str
    name: str
    ordinal: int
    page_bytes: int
    numa_node: int  # the host's node nearest to it
    reached_by: frozenset[int]  # ordinals of other GPUs with a path to its memory
    bandwidth_bytes_per_s: int  # of its memory


def bindings() -> Any:
    """``cuda.bindings.driver``, initialised. Errors: `NoDevice`, which names what is missing."""
    try:
        cu = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise NoDevice(f"the Python package cuda-bindings ({error}); install strata-vmm[cuda]") from error
    try:
        call(cu.cuInit, 0)
    except DriverError as error:
        raise NoDevice(f"a usable NVIDIA driver and GPU ({error.message})") from error
    except RuntimeError as error:  # what the bindings raise where there is no libcuda.so.1
        raise NoDevice("the NVIDIA driver's libcuda.so.1") from error
    return cu


def call(function: Any, *args: Any) -> Any:
    """Calls one driver function; returns its value, a tuple of several, or None.

    Errors: `DriverError` with the function's name and the error's code and name.
    """
    code, *values = function(*args)
    if code:
        name = getattr(code, "name", str(code))
        raise DriverError(f"{function.__name__} failed with {name}", function.__name__, int(code), name)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def find_gpus(cu: Any) -> tuple[list[Gpu], list[str]]:
    """The GPUs that can share slabs, and what each of the others lacks.

    Errors: `DriverError` where they cannot even be counted.
    """
    gpus, missing = [], []
    count = call(cu.cuDeviceGetCount)
    for ordinal in range(count):
        name = f"GPU {ordinal}"
        try:
            device = call(cu.cuDeviceGet, ordinal)
            name = f"GPU-{UUID(bytes=bytes(call(cu.cuDeviceGetUuid, device).bytes))}"
            lacks = _lacks(cu, device)
            if not lacks:
                gpus.append(_gpu(cu, name, ordinal, device, count))
        except DriverError as error:  # the others go on
            lacks = f"an answer ({error.message})"
        if lacks:
            missing.append(f"{lacks} on {name}")
    usable = {gpu.ordinal for gpu in gpus}
    return [replace(gpu, reached_by=gpu.reached_by & usable) for gpu in gpus], missing


def _lacks(cu: Any, device: Any) -> str:
    attribute = cu.CUdevice_attribute
    needed = {
        "virtual memory management": attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        "memory export as POSIX descriptors": attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    }
    return " and ".join(name for name, code in needed.items() if not call(cu.cuDeviceGetAttribute, code, device))


def _gpu(cu: Any, uuid: str, ordinal: int, device: Any, count: int) -> Gpu:
    node = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    return Gpu(
        uuid,
        bytes(call(cu.cuDeviceGetName, 256, device)).split(b"\0")[0].decode(),
        ordinal,
        call(
            cu.cuMemGetAllocationGranularity,
            device_memory(cu, ordinal),
            cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        ),
        max(0, call(cu.cuDeviceGetAttribute, node, device)),
        frozenset(o for o in range(count) if o != ordinal and _has_path(cu, o, device)),
        _bandwidth_bytes_per_s(cu, device),
    )


def _bandwidth_bytes_per_s(cu: Any, device: Any) -> int:
    """Two transfers a cycle of the memory's clock, as wide as its bus."""
    attribute = cu.CUdevice_attribute
    clock_khz = call(cu.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device)
    bus_bits = call(cu.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device)
    return 2 * 1000 * int(clock_khz) * int(bus_bits) // 8


def _has_path(cu: Any, ordinal: int, device: Any) -> bool:
    """Whether a GPU reaches the memory of a device; one that does not answer reaches nothing."""
    try:
        return bool(call(cu.cuDeviceCanAccessPeer, call(cu.cuDeviceGet, ordinal), device))
    except DriverError:
        return False


def missing_features() -> list[str]:
    """What this host lacks for the CUDA driver, by name; empty where the driver can be used."""
    try:
        cu = bindings()
        gpus, missing = find_gpus(cu)
    except (NoDevice, DriverError) as error:
        return [error.message]
    return [] if gpus else missing or ["a GPU"]


@contextmanager
def current(cu: Any, context: Any) -> Iterator[None]:
    """Makes a context this thread's current one for a while."""
    call(cu.cuCtxPushCurrent, context)
    try:
        yield
    finally:
        cu.cuCtxPopCurrent()


def descriptor_type(cu: Any) -> Any:
    """The handle type of slabs: a POSIX descriptor."""
    return cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def device_memory(cu: Any, ordinal: int) -> Any:
    """Properties of a slab on a GPU."""
    return _memory(cu, cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, ordinal)


def host_memory(cu: Any, numa_node: int) -> Any:
    """Properties of a slab in the host's memory on one node."""
    return _memory(cu, cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA, numa_node)


def _memory(cu: Any, kind: Any, number: int) -> Any:
    """GPUDirect RDMA is never asked for: it would pin address space of the card's BAR."""
    prop = cu.CUmemAllocationProp()
    prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type, prop.location.id = kind, number
    prop.requestedHandleTypes = descriptor_type(cu)
    return prop


def access(cu: Any, ordinals: Sequence[int], numa_node: int | None = None, *, writable: bool = True) -> list[Any]:
    """Who may touch a mapping: these GPUs, and the host where `numa_node` is given."""
    flags = cu.CUmemAccess_flags
    kind = cu.CUmemLocationType
    places = [(kind.CU_MEM_LOCATION_TYPE_DEVICE, ordinal) for ordinal in ordinals]
    if numa_node is not None:
        places.append((kind.CU_MEM_LOCATION_TYPE_HOST_NUMA, numa_node))
    descriptions = []
    for location_type, number in places:
        description = cu.CUmemAccessDesc()
        description.location.type, description.location.id = location_type, number
        description.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        descriptions.append(description)
    return descriptions


def widen_descriptor_table(n: int) -> None:
    """Makes this process's table large enough for `n` descriptors, as far as its limit allows.

    The kernel widens it by doubling, and where threads share it, waits each time
    for an RCU grace period: milliseconds in the middle of a grant.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError), open("/dev/null", "rb") as null:
        os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, min(n, soft) - 1))


def check_peer_access(value: str) -> None:
    """Errors: `InvalidRequest` for what is neither "auto" nor "never"."""
    if value not in ("auto", "never"):
        raise InvalidRequest(f'peer_access = {value!r}: must be "auto" or "never"')
