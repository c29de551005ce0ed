"""A driver whose memory is not there and whose copies cost nothing: what is left is the manager's own time."""

import os
from collections.abc import Sequence

from vmmd.driver.base import Copy, DeviceInfo, DeviceMemory, Slab
from vmmd.driver.host_memfd import HOST_UUID

GIB = 1 << 30


class _Handle:
    """Tells slabs apart."""


class NullDriver:
    """One device of 141 GiB, and as much host memory. Files must read as zeros: so do slabs."""

    name = "null"

    def __init__(self) -> None:
        self.copies = 0
        self.fills = 0

    def devices(self) -> Sequence[DeviceInfo]:
        return [
            DeviceInfo("NULL-0", "null", 141 * GIB, 2 << 20),
            DeviceInfo(HOST_UUID, "host memory", 141 * GIB, 2 << 20, is_host=True),
        ]

    def memory(self, device_uuid: str) -> DeviceMemory:
        return DeviceMemory(141 * GIB, 141 * GIB)

    def failed_devices(self) -> Sequence[str]:
        return []

    def create(self, device_uuid: str, size_bytes: int) -> Slab:
        return Slab(device_uuid, size_bytes, _Handle())

    def export(self, slab: Slab, *, writable: bool) -> int:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def held_elsewhere(self, slab: Slab) -> bool | None:
        return None

    def holders(self, slabs: Sequence[Slab]) -> list[int]:
        return [0] * len(slabs)

    def fill(self, copies: Sequence[Copy]) -> None:
        self.copies += len(copies)
        self.fills += 1

    def read(self, slab: Slab, offset_bytes: int, length_bytes: int) -> bytes:
        return bytes(length_bytes)

    def destroy(self, slab: Slab) -> None:
        pass

    def close(self) -> None:
        pass
