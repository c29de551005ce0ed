"""Shared pages: many entries of a residency table are written at once, each whole."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from strata_api.v1 import pages

from vmmd.manager.shared import ResidencyTable

N_LAYERS, N_EXPERTS = 40, 50


@pytest.fixture
def table() -> Iterator[ResidencyTable]:
    made = ResidencyTable(7, N_LAYERS, N_EXPERTS)
    yield made
    made.page.close()


def test_many_entries_are_packed_as_one(table: ResidencyTable) -> None:
    """Entries and homes ``[k]`` are the words that `pages.pack` gives, at their experts; others are untouched."""
    experts = np.array([0, 1999, 7, 8])
    device, slab, slot = (
        np.array([0, 255, 1, 0]),
        np.array([5, (1 << 32) - 1, 0, 9]),
        np.array([3, (1 << 22) - 1, 0, 4]),
    )
    table.set_entries(experts, pages.TIER_DEVICE, device, slab, slot)
    table.set_homes(experts[:2], pages.TIER_HOST, 0 * device[:2], slab[:2], slot[:2])
    for i, expert in enumerate(experts.tolist()):
        place = int(device[i]), int(slab[i]), int(slot[i])
        assert pages.unpack(table.entry(expert)) == (pages.TIER_DEVICE, *place)
        assert table.home(expert) == (pages.pack(pages.TIER_HOST, 0, *place[1:]) if i < 2 else 0)
    assert sum(table.entry(expert) != 0 for expert in range(table.n)) == 4
    assert sum(table.home(expert) != 0 for expert in range(table.n)) == 2

    table.send_home(np.array([1999, 8, 3]))
    assert table.entry(1999) == table.home(1999) != 0
    assert table.entry(8) == table.entry(3) == 0
    assert table.generation == 1

    none = np.zeros(0, np.int64)
    table.set_entries(none, pages.TIER_DEVICE, none, none, none)
    table.send_home(none)
    assert pages.unpack(table.entry(0)) == (pages.TIER_DEVICE, 0, 5, 3)


@pytest.mark.parametrize("scattered", [False, True])
def test_no_entry_is_ever_torn(table: ResidencyTable, scattered: bool) -> None:
    """Another process sees of each entry what was there before or what is there afterwards."""
    experts = np.random.default_rng(0).permutation(table.n) if scattered else np.arange(table.n)
    ones = np.ones_like(experts)
    values = (0 * ones, 0 * ones, 0 * ones), (255 * ones, ((1 << 32) - 1) * ones, ((1 << 22) - 1) * ones)
    table.set_entries(experts, pages.TIER_DEVICE, *values[0])
    expected = {pages.pack(pages.TIER_DEVICE, *(int(column[0]) for column in value)) for value in values}
    argv = [sys.executable, "-c", _READER, str(table.page.fd), str(pages.HEADER_WORDS), str(table.n)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=[table.page.fd]) as reader:
        turn = 0
        while reader.poll() is None:
            turn += 1
            table.set_entries(experts, pages.TIER_DEVICE, *values[turn % 2])
        assert reader.stdout is not None
        assert {int(word) for word in reader.stdout.read().split()} == expected


_READER = """
import mmap, sys, time
import numpy as np
fd, start, n = map(int, sys.argv[1:])
words = np.frombuffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ), np.uint64)[start : start + n]
seen, until = set(), time.monotonic() + 0.3
while time.monotonic() < until or len(seen) < 2 and time.monotonic() < until + 60:
    seen.update(words.tolist())  # numpy.unique copies bytes, not words
print(*seen)
"""
