"""The order in which requests wait that cannot be met: by priority, then as they came.

Nobody is passed: who comes later, or may wait for no time at all, goes behind those
that wait for the same device, however little it asks for. A growth within a guarantee
is no part of this: its memory was promised.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiter:
    """A request that waits."""

    ticket: int
    priority: int
    devices: frozenset[str]
    uid: int
    until_s: float

    @property
    def order(self) -> tuple[int, int]:
        """Smaller is sooner."""
        return -self.priority, self.ticket


class Queue:
    """All requests that wait, on all devices."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._next_ticket = 0

    def __iter__(self) -> Iterator[Waiter]:
        """In their order."""
        return iter(sorted(self._waiters.values(), key=lambda w: w.order))

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, priority: int, devices: Collection[str], uid: int, until_s: float) -> Waiter:
        """Lets a request wait until a time."""
        waiter = Waiter(self._next_ticket, priority, frozenset(devices), uid, until_s)
        self._waiters[waiter.ticket] = waiter
        self._next_ticket += 1
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """It waits no longer."""
        del self._waiters[waiter.ticket]

    def of_user(self, uid: int) -> int:
        """How many of a user wait."""
        return sum(waiter.uid == uid for waiter in self._waiters.values())

    def before(self, priority: int, devices: Collection[str], waiter: Waiter | None = None) -> list[Waiter]:
        """Who comes before a waiter, or before a new request, for one of its devices."""
        order = (-priority, self._next_ticket) if waiter is None else waiter.order
        return [w for w in self if w.order < order and not w.devices.isdisjoint(devices)]

    def is_wanted(self, device: str) -> bool:
        """Whether somebody waits for memory of a device."""
        return any(device in waiter.devices for waiter in self._waiters.values())
