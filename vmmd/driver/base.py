"""The driver protocol: what vmmd needs of a device's memory, and clients of a mapping.

Two sides, because two processes are involved:

- `Driver` runs in the daemon. It creates slabs on a device, exports each as a
  descriptor, fills them from files or other slabs, and destroys them.
- `Mapper` runs in a client. It reserves addresses, imports descriptors and maps
  slab *i* of a range at byte offset ``i * slab_bytes``.

Both raise `vmmd.errors.DriverError` for a failed call and undo what they had
begun. All methods block; the daemon calls `fill`, `read`, `create` and `holders` from
worker threads, possibly several at once, everything else from one thread.

Contract, tested on every driver by ``tests/unit/test_driver_contract.py``:

- A slab is created on the device that is named, never on a current one, and maps
  whole or not at all.
- A new slab reads as zeros.
- `export` gives a new descriptor each time, close-on-exec, which the caller
  closes; the memory lives as long as the slab, a descriptor or a mapping does.
- `destroy` gives up the daemon's own hold. Others keep what they have mapped:
  no mapping can be taken from a living process. `held_elsewhere` tells.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from vmmd.errors import InvalidRequest


@dataclass(frozen=True)
class DeviceInfo:
    """One device. Known by `uuid`; ordinals never leave a driver."""

    uuid: str
    name: str
    total_bytes: int
    page_bytes: int  # allocation granularity: slab sizes are multiples of it
    is_host: bool = False  # the host's RAM: homes of experts, no computing
    numa_node: int | None = None
    reached_by: frozenset[str] = frozenset()  # devices whose kernels read its slabs where they are
    bandwidth_bytes_per_s: int = 0  # of its memory, as the hardware says; 0 where that is not known


@dataclass(frozen=True)
class DeviceMemory:
    """What a device has at this moment, whoever uses it."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Slab:
    """One physical allocation. `handle` means something to its driver alone."""

    device_uuid: str
    size_bytes: int
    handle: Any


class FileSource(NamedTuple):
    """Bytes of an open regular file; `fd` stays the caller's."""

    fd: int
    offset_bytes: int


class SlabSource(NamedTuple):
    """Bytes of another slab."""

    slab: Slab
    offset_bytes: int


class Copy(NamedTuple):
    """Of a fill: `rows` pieces of `length_bytes` each, from `source` to `target` at an offset.

    From one row to the next it is `pitch_bytes` in the target and `source_pitch_bytes`
    in the source, neither of them less than the length. What costs is each copy:
    `vmmd.driver.runs` makes rows of many.
    """

    target: Slab
    offset_bytes: int
    length_bytes: int
    source: FileSource | SlabSource
    rows: int = 1
    pitch_bytes: int = 0
    source_pitch_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Of all rows."""
        return self.rows * self.length_bytes

    def row(self, i: int) -> "Copy":
        """One of its rows."""
        of, at = self.source, self.source.offset_bytes + i * self.source_pitch_bytes
        source = FileSource(of.fd, at) if isinstance(of, FileSource) else SlabSource(of.slab, at)
        return Copy(self.target, self.offset_bytes + i * self.pitch_bytes, self.length_bytes, source)


class ShortRead(Exception):
    """A file ended before the bytes that a fill asked for: it has shrunk."""


class Driver(Protocol):
    """Daemon side."""

    name: str

    def devices(self) -> Sequence[DeviceInfo]:
        """All devices that can be used, computing ones first, the host's RAM last."""

    def memory(self, device_uuid: str) -> DeviceMemory:
        """Total and free bytes of a device now. Errors: `NotFound`, `DriverError`."""

    def create(self, device_uuid: str, size_bytes: int) -> Slab:
        """Allocates a slab of zeros.

        Errors: `InvalidRequest` (not a multiple of the page), `NotFound`,
        `Exhausted` (the device has no room, or the process no descriptor; the
        message says which), `DriverError`.
        """

    def export(self, slab: Slab, *, writable: bool) -> int:
        """A new close-on-exec descriptor of the slab; the caller closes it.

        Where the driver can (host), a descriptor that is not `writable` maps
        read-only; on CUDA the importer chooses its own access.
        """

    def held_elsewhere(self, slab: Slab) -> bool | None:
        """Whether any other descriptor or mapping of the slab exists.

        None where the driver cannot tell; then the clients' word must do.
        """

    def holders(self, slabs: Sequence[Slab]) -> list[int]:
        """The pid of another process that holds each slab, one of them; 0 where that cannot be seen.

        Looks at every process of this host: milliseconds, for a worker thread.
        """

    def fill(self, copies: Sequence[Copy]) -> None:
        """Copies bytes into slabs; returns when all of them have arrived.

        Errors: `ShortRead` (a file has shrunk), `OSError` (reading it failed),
        `DriverError`. Targets hold unspecified bytes after an error.
        """

    def failed_devices(self) -> Sequence[str]:
        """Devices on which nothing works until the daemon starts anew (a dead context)."""

    def read(self, slab: Slab, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of the slab's bytes, for verification."""

    def destroy(self, slab: Slab) -> None:
        """Gives up the daemon's hold on the slab. Never fails."""

    def close(self) -> None:
        """Gives up everything that the driver still has."""


class Reservation(Protocol):
    """A range's addresses in one client process; nothing is mapped at first."""

    slab_bytes: int
    slabs_max: int
    ordinal: int | None  # of the GPU in this process; None where the host maps it

    def map(self, first_index: int, fds: Sequence[int], *, writable: bool) -> None:
        """Imports slabs and maps them at consecutive indexes, all or none.

        Closes every descriptor in any case. Not inherited by forked children.
        Errors: `InvalidRequest` (outside the range, or a descriptor that is no
        slab of this size), `DriverError`.
        """

    def unmap(self, index: int) -> None:
        """Unmaps one slab and releases its import; the addresses stay reserved."""

    def is_mapped(self, index: int) -> bool:
        """Whether slab `index` is mapped."""

    def view(self) -> Any:
        """The whole range: a uint8 numpy array on the host, an address on CUDA.

        Touching an unmapped part faults.
        """

    def synchronize(self) -> None:
        """Waits until no kernel that this process has launched on the GPU runs any more. Errors: `DriverError`."""

    def close(self) -> None:
        """Unmaps everything and gives the addresses back."""


def check_bounds(slab: Slab, offset_bytes: int, length_bytes: int) -> None:
    """Refuses bytes outside a slab. Errors: `InvalidRequest`."""
    if offset_bytes < 0 or length_bytes < 0 or offset_bytes + length_bytes > slab.size_bytes:
        raise InvalidRequest(f"{length_bytes} bytes at {offset_bytes} lie outside a slab of {slab.size_bytes} bytes")


def check_copy(copy: Copy) -> None:
    """Refuses a copy that reaches outside a slab, or whose rows overlap. Errors: `InvalidRequest`."""
    target, offset_bytes, length_bytes, source, rows, pitch_bytes, source_pitch_bytes = copy
    if rows != 1 and (rows < 1 or min(pitch_bytes, source_pitch_bytes) < length_bytes):
        raise InvalidRequest(
            f"{rows} rows of {length_bytes} bytes, {pitch_bytes} apart in the target and {source_pitch_bytes} in the"
            " source: there must be one at least, and none may overlap"
        )
    check_bounds(target, offset_bytes, length_bytes + (rows - 1) * pitch_bytes)
    if isinstance(source, SlabSource):
        check_bounds(source.slab, source.offset_bytes, length_bytes + (rows - 1) * source_pitch_bytes)


def check_room(first_index: int, count: int, slabs_max: int, mapped: Container[int]) -> None:
    """Refuses to map slabs outside a range, or where one is mapped already. Errors: `InvalidRequest`."""
    if first_index < 0 or first_index + count > slabs_max:
        raise InvalidRequest(
            f"slabs {first_index} to {first_index + count - 1} lie outside a range of {slabs_max} slabs"
        )
    taken = [index for index in range(first_index, first_index + count) if index in mapped]
    if taken:
        raise InvalidRequest(f"slab {taken[0]} of this range is mapped already")


class Mapper(Protocol):
    """Client side: makes reservations on one device."""

    def reserve(self, slab_bytes: int, slabs_max: int) -> Reservation:
        """Reserves ``slabs_max * slab_bytes`` of addresses. Errors: `DriverError`."""
