"""A driver whose memory is damaged on demand, for tests of what notices it."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from vmmd.driver.base import Copy, Slab
from vmmd.driver.host_memfd import HostDriver


class CorruptingDriver:
    """Wraps the host driver.

    Attributes:
        corrupts: tells which copies of a fill arrive with their last byte wrong.
        before_read: called with the slab in the thread that reads, before each read.
        after_fill: called in the thread that fills, after each fill.
    """

    def __init__(self, driver: HostDriver) -> None:
        self.driver = driver
        self.corrupts: Callable[[Copy], bool] = lambda copy: False
        self.before_read: Callable[[Slab], None] = lambda slab: None
        self.after_fill: Callable[[], None] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def fill(self, copies: Sequence[Copy]) -> None:
        """Fills, and damages what is to be damaged."""
        self.driver.fill(copies)
        for copy in copies:
            if self.corrupts(copy):
                damage(copy.target, copy.offset_bytes + copy.length_bytes - 1)
        self.after_fill()

    def read(self, slab: Slab, offset_bytes: int, length_bytes: int) -> bytes:
        """Reads after `before_read`."""
        self.before_read(slab)
        return self.driver.read(slab, offset_bytes, length_bytes)


def damage(slab: Slab, offset_bytes: int) -> None:
    """Flips a bit of a host driver's slab."""
    fd = slab.handle.fd
    (was,) = os.pread(fd, 1, offset_bytes)
    os.pwrite(fd, bytes([was ^ 1]), offset_bytes)
