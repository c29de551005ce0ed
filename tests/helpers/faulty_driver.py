"""A driver that fails on demand, for tests of what is undone after a failure."""

from collections.abc import Sequence
from typing import Literal

from vmmd.driver.base import Copy, DeviceInfo, DeviceMemory, Driver, Slab
from vmmd.errors import DriverError

Operation = Literal["create", "export", "fill", "read"]


class FaultyDriver:
    """Wraps a driver; the n-th call of a named operation from now on fails.

    A failing call does nothing but raise, as a driver that undoes what it had
    begun. Calls after it go through again, unless `always`.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.name = driver.name
        self.live: set[int] = set()  # ids of handles that were created and not destroyed
        self._countdown: dict[str, int] = {}
        self._error: dict[str, Exception] = {}
        self._always: set[str] = set()

    def fail_at(self, operation: Operation, n: int, error: Exception | None = None, *, always: bool = False) -> None:
        """Lets the n-th call (1 is the next) of `operation` raise `error`; with `always`, those after it too."""
        self._countdown[operation] = n
        self._error[operation] = error or DriverError(f"{operation} failed on purpose", operation, 999, "INJECTED")
        self._always.discard(operation)
        if always:
            self._always.add(operation)

    def heal(self) -> None:
        """Forgets every failure that was asked for."""
        self._countdown.clear()

    def _count(self, operation: Operation) -> None:
        left = self._countdown.get(operation)
        if left is None:
            return
        if left > 1:
            self._countdown[operation] = left - 1
            return
        if operation not in self._always:
            del self._countdown[operation]
        raise self._error[operation]

    def devices(self) -> Sequence[DeviceInfo]:
        return self.driver.devices()

    def memory(self, device_uuid: str) -> DeviceMemory:
        return self.driver.memory(device_uuid)

    def failed_devices(self) -> Sequence[str]:
        return self.driver.failed_devices()

    def create(self, device_uuid: str, size_bytes: int) -> Slab:
        self._count("create")
        slab = self.driver.create(device_uuid, size_bytes)
        self.live.add(id(slab.handle))
        return slab

    def export(self, slab: Slab, *, writable: bool) -> int:
        self._count("export")
        return self.driver.export(slab, writable=writable)

    def held_elsewhere(self, slab: Slab) -> bool | None:
        return self.driver.held_elsewhere(slab)

    def holders(self, slabs: Sequence[Slab]) -> list[int]:
        return self.driver.holders(slabs)

    def fill(self, copies: Sequence[Copy]) -> None:
        self._count("fill")
        self.driver.fill(copies)

    def read(self, slab: Slab, offset_bytes: int, length_bytes: int) -> bytes:
        self._count("read")
        return self.driver.read(slab, offset_bytes, length_bytes)

    def destroy(self, slab: Slab) -> None:
        self.live.discard(id(slab.handle))
        self.driver.destroy(slab)

    def close(self) -> None:
        self.live.clear()
        self.driver.close()
