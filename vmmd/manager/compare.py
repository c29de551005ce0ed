"""Compares bytes in slabs with where they came from. Everything here blocks: it is for worker threads."""

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vmmd.driver.base import Copy, Driver, FileSource, ShortRead, SlabSource

SAMPLE_BYTES = 4096
"""Compared at the beginning and at the end of a sampled copy."""


class Difference(NamedTuple):
    """Where bytes begin to differ, and how many do."""

    offset_bytes: int
    differing_bytes: int


def difference(found: bytes, expected: bytes) -> Difference | None:
    """How two stretches of the same length differ; None if they are equal."""
    if found == expected:
        return None
    differs = np.frombuffer(found, np.uint8) != np.frombuffer(expected, np.uint8)
    return Difference(int(differs.argmax()), int(np.count_nonzero(differs)))


def read_source(driver: Driver, source: FileSource | SlabSource, length_bytes: int) -> bytes:
    """What a copy would bring. Errors: `ShortRead`, `OSError`, `DriverError`."""
    if isinstance(source, SlabSource):
        return driver.read(source.slab, source.offset_bytes, length_bytes)
    parts: list[bytes] = []
    left, at = length_bytes, source.offset_bytes
    while left:
        part = os.pread(source.fd, left, at)
        if not part:
            raise ShortRead(f"the file ends at byte {at}, {left} bytes early")
        parts.append(part)
        left, at = left - len(part), at + len(part)
    return b"".join(parts)


def sample(driver: Driver, copies: Sequence[Copy]) -> tuple[Copy, int] | None:
    """Reads back the first and last 4 KiB of one copy chosen at random.

    Returns the copy and the first byte of its slab that is not as in its source; None if
    all is equal. Errors: as `read_source`.
    """
    copy = random.choice(copies)
    length = min(SAMPLE_BYTES, copy.length_bytes)
    for at in sorted({0, copy.length_bytes - length}):
        source = (
            FileSource(copy.source.fd, copy.source.offset_bytes + at)
            if isinstance(copy.source, FileSource)
            else SlabSource(copy.source.slab, copy.source.offset_bytes + at)
        )
        found = driver.read(copy.target, copy.offset_bytes + at, length)
        differs = difference(found, read_source(driver, source, length))
        if differs is not None:
            return copy, copy.offset_bytes + at + differs.offset_bytes
    return None
