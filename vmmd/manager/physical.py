"""The physical slabs behind the ledger's: made in parallel, destroyed, asked who holds them."""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from vmmd.driver.base import Driver, Slab
from vmmd.errors import VmmError

CREATORS = min(4, os.cpu_count() or 1)
"""Threads that create slabs of a device at once: host memory is cleared at the rate of as many."""


class Wanted(NamedTuple):
    """A slab of the ledger that is to be made."""

    slab_id: int
    device: str
    size_bytes: int


class PhysicalSlabs(Mapping[int, Slab]):
    """Driver slabs by slab id. A *phantom* was destroyed here, but its memory did not come back."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._slabs: dict[int, Slab] = {}
        self._phantoms: dict[int, Slab] = {}
        self._creators: dict[str, ThreadPoolExecutor] = {}  # by device: a growth does not wait for host memory
        self.creating = Counter[str]()
        """Slabs by device that worker threads are making."""

    def __getitem__(self, slab_id: int) -> Slab:
        return self._slabs[slab_id]

    def __contains__(self, slab_id: object) -> bool:
        return slab_id in self._slabs

    def __len__(self) -> int:
        return len(self._slabs)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._slabs))  # at once: worker threads add to it

    def bytes_on(self, device: str) -> int:
        """Bytes of the slabs that exist on a device, phantoms included."""
        slabs = [*list(self._slabs.values()), *self._phantoms.values()]  # at once: worker threads add to it
        return sum(s.size_bytes for s in slabs if s.device_uuid == device)

    async def create(self, wanted: Sequence[Wanted]) -> None:
        """Makes slabs. Errors: `Exhausted`, `DriverError`; those made so far stay."""
        by_device: dict[str, deque[Wanted]] = {}
        for one in wanted:
            by_device.setdefault(one.device, deque()).append(one)
        made = Counter(one.device for one in wanted)
        self.creating.update(made)
        try:
            errors = await asyncio.gather(
                *(
                    asyncio.get_running_loop().run_in_executor(self._creators_of(device), self._make, todo)
                    for device, todo in by_device.items()
                    for _ in range(min(CREATORS, len(todo)))
                )
            )
        finally:
            self.creating.subtract(made)
        for error in errors:
            if error is not None:
                raise error

    def _creators_of(self, device: str) -> ThreadPoolExecutor:
        if device not in self._creators:
            self._creators[device] = ThreadPoolExecutor(CREATORS, "vmmd-create")
        return self._creators[device]

    def _make(self, todo: deque[Wanted]) -> VmmError | None:
        """One of the threads that share what is to be made; after an error they all stop."""
        while todo:
            try:
                slab_id, device, size_bytes = todo.popleft()
            except IndexError:  # another thread was faster
                return None
            try:
                self._slabs[slab_id] = self._driver.create(device, size_bytes)
            except VmmError as error:
                todo.clear()
                return error
        return None

    def close(self) -> None:
        """Lets the threads go; what they are making is the driver's to give up."""
        for creators in self._creators.values():
            creators.shutdown(wait=False, cancel_futures=True)

    def held(self, slab_id: int) -> bool | None:
        """Whether anybody else holds a slab; None where the driver cannot tell."""
        if slab_id in self._phantoms:
            return True
        return self._driver.held_elsewhere(self._slabs[slab_id])

    def destroy(self, slab_id: int) -> None:
        """Destroys a slab that nobody else holds."""
        self._driver.destroy(self._slabs.pop(slab_id))

    def destroy_for_others(self, slab_id: int) -> bool:
        """Destroys a slab whose memory is to serve another domain; False: it did not come back.

        Where the driver cannot tell who holds a slab, the device's free memory tells
        whether it was the last hold. If not, somebody kept an import, and the slab
        lives on as a phantom until `forget`.
        """
        slab = self._slabs[slab_id]
        knows = self._driver.held_elsewhere(slab) is not None
        before = 0 if knows else self._driver.memory(slab.device_uuid).free_bytes
        self.destroy(slab_id)
        if knows or self._driver.memory(slab.device_uuid).free_bytes - before >= slab.size_bytes // 2:
            return True
        self._phantoms[slab_id] = slab
        return False

    def forget(self, slab_id: int) -> bool:
        """Drops a phantom, whose holder has died; False if the slab is none."""
        return self._phantoms.pop(slab_id, None) is not None
