"""Placement: which missing experts are worth the slots of colder ones, and how fast they may come.

An expert that comes costs one copy of it from host memory, as much as one token
that reads it there. It saves such a read for every routing that it has more than
the one that goes. So an exchange pays for itself soon: what is to be avoided is
moving for nothing but noise, since heat is an estimate from a few hundred tokens.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmmd.core.residency import NOWHERE, Arena

GAIN_MIN = 1 / 64
"""Routings a token that an exchange must win: its copy is paid back within so many tokens."""

AGAIN_GAIN_MIN = 1 / 16
"""The same where either of the two moved lately: four standard errors of a heat of a tenth, so that no
noise sends it back."""

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Exchange(NamedTuple):
    """Experts that come `[k]`, the colder ones that go `[k]`, and the slots `[k, 3]` where those are."""

    incoming: I64
    outgoing: I64
    slots: I64


def plan(
    arena: Arena, limit_bytes: Sequence[int], moved_lately: Bool, leaving: Collection[tuple[int, int]] = ()
) -> Exchange:
    """The exchanges that win most, of at most `limit_bytes` for each part of the arena.

    The hottest missing experts take the slots of the coldest of their size class, on
    whatever part and from any layer. An expert without a home is left where it is.

    Args:
        moved_lately: `[n]`, experts that came or went a moment ago.
        leaving: (part, slab) that a trade is under way with.
    """
    heat, place, sizes = arena.heat, arena.place, arena.geometry.slot_bytes
    reluctance = np.where(moved_lately, (AGAIN_GAIN_MIN - GAIN_MIN) / 2, 0.0)
    placed = (place[:, 0] != NOWHERE) & arena.home_ready
    for part, slab in leaving:
        placed &= (place[:, 0] != part) | (place[:, 1] != slab)
    missing = ~arena.resident & arena.home_ready
    pairs = [_pairs(sizes == size, missing, placed, heat, reluctance) for size in np.unique(sizes[missing])]
    incoming, outgoing, gain = (np.concatenate(column) for column in zip(_NOTHING, *pairs, strict=True))
    order = np.argsort(-gain, kind="stable")
    order = order[gain[order] > GAIN_MIN]
    part_of = place[outgoing[order], 0]
    chosen = np.zeros(len(order), np.bool_)
    for part, limit in enumerate(limit_bytes):
        here = np.flatnonzero(part_of == part)
        chosen[here] = np.cumsum(sizes[incoming[order[here]]]) <= limit
    order = order[chosen]
    return Exchange(incoming[order], outgoing[order], place[outgoing[order]])


_NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64))


def _pairs(
    of_class: Bool, missing: Bool, placed: Bool, heat: npt.NDArray[np.float64], reluctance: npt.NDArray[np.float64]
) -> tuple[I64, I64, npt.NDArray[np.float64]]:
    """Of one size class, the hottest missing with the coldest placed and so on, and what each pair wins."""
    comes, goes = np.flatnonzero(missing & of_class), np.flatnonzero(placed & of_class)
    wins, loses = heat[comes] - reluctance[comes], heat[goes] + reluctance[goes]
    hottest, coldest = np.argsort(-wins, kind="stable"), np.argsort(loses, kind="stable")
    k = min(len(hottest), len(coldest))
    hottest, coldest = hottest[:k], coldest[:k]
    return comes[hottest], goes[coldest], wins[hottest] - loses[coldest]


class Pace:
    """Holds copies to a device down to so many bytes a second: one batch is paid off before the next begins.

    In any stretch of time no more is begun than that rate allows, and one batch.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next batch may begin."""
        return max(0.0, self._free_s - now_s)

    def spend(self, size_bytes: int, now_s: float) -> None:
        """A batch of so many bytes begins."""
        self._free_s = max(self._free_s, now_s) + size_bytes / self._bytes_per_s
