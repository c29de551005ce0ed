"""Placement: which missing experts are worth the slots of colder ones, and how fast they may come.

An expert that comes costs one copy of it from host memory, as much as one token
that reads it there. It saves such a read for every routing that it has more than
the one that goes. So an exchange pays for itself soon: what is to be avoided is
moving for nothing but noise, since heat is an estimate from a few hundred tokens.

Where an arena has parts on peers, too, the first part is the computing device's own, and
read fastest: what is hotter on a peer changes places with what is colder there.
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

SWAP_GAIN_MIN = 1 / 16
"""Routings a token that an expert on a peer must have more than the one whose place it takes on the first part.
A read there saves an eighth of a read from host memory, and two experts are copied: paid back within 256 tokens."""

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Exchange(NamedTuple):
    """Experts that come `[k]`, to slots `[k, 3]`, and those that must leave theirs for it `[k]`. Some do both."""

    incoming: I64
    outgoing: I64
    slots: I64


def plan(
    arena: Arena, limit_bytes: Sequence[int], moved_lately: Bool, leaving: Collection[tuple[int, int]] = ()
) -> Exchange:
    """The exchanges that win most, of at most `limit_bytes` for each part of the arena.

    The hottest missing experts take the slots of the coldest of their size class, on
    whatever part and from any layer. Then experts on other parts and colder ones on the
    first change places, and where none is missing, the hottest on other parts come to the
    first one's empty slots. An expert without a home is left where it is.

    Args:
        moved_lately: `[n]`, experts that came or went a moment ago.
        leaving: (part, slab) that a trade is under way with.
    """
    heat, place, sizes = arena.heat, arena.place, arena.geometry.slot_bytes
    reluctance = np.where(moved_lately, (AGAIN_GAIN_MIN - GAIN_MIN) / 2, 0.0)
    placed = (place[:, 0] != NOWHERE) & arena.home_ready
    for part, slab in leaving:
        placed &= (place[:, 0] != part) | (place[:, 1] != slab)
    missing = arena.missing
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
    incoming, outgoing = incoming[order], outgoing[order]
    left_bytes = np.array(limit_bytes, np.float64) - np.bincount(place[outgoing, 0], sizes[incoming], len(limit_bytes))
    placed[outgoing] = False
    up, down = _swaps(arena, left_bytes, placed, reluctance)
    placed[up] = False
    climbing, empty = _climbs(arena, left_bytes[0] - sizes[up].sum(), placed, leaving)
    return Exchange(
        np.concatenate((incoming, up, down, climbing)),
        np.concatenate((outgoing, down, up, climbing)),
        np.concatenate((place[outgoing], place[down], place[up], empty)),
    )


def _swaps(
    arena: Arena, left_bytes: npt.NDArray[np.float64], placed: Bool, reluctance: npt.NDArray[np.float64]
) -> tuple[I64, I64]:
    """Pairs of an expert on another part and a colder one on the first, of at most `left_bytes` for each part."""
    sizes, part_of = arena.geometry.slot_bytes, arena.place[:, 0]
    here, there = placed & (part_of == 0), placed & (part_of > 0)
    pairs = [_pairs(sizes == size, there, here, arena.heat, reluctance) for size in np.unique(sizes[there])]
    up, down, gain = (np.concatenate(column) for column in zip(_NOTHING, *pairs, strict=True))
    order = np.argsort(-gain, kind="stable")
    order = order[gain[order] > SWAP_GAIN_MIN]
    up, down = up[order], down[order]
    fits = np.cumsum(sizes[up]) <= left_bytes[0]
    for part in range(1, len(left_bytes)):
        on_it = part_of[up] == part
        fits &= ~on_it | (np.cumsum(np.where(on_it, sizes[up], 0)) <= left_bytes[part])
    return up[fits], down[fits]


def _climbs(arena: Arena, left_bytes: float, placed: Bool, leaving: Collection[tuple[int, int]]) -> tuple[I64, I64]:
    """The hottest experts on other parts, and empty slots of the first for them, of at most `left_bytes`."""
    sizes = arena.geometry.slot_bytes
    experts, slots = [_NOTHING[0]], [np.zeros((0, 3), np.int64)]
    for slot_bytes, empty in arena.empty_slots(0).items():
        empty = empty[[(0, slab) not in leaving for slab in empty[:, 1].tolist()]]
        of_class = sizes == slot_bytes
        there = np.flatnonzero(placed & of_class & (arena.place[:, 0] > 0))
        if (arena.missing & of_class).any():
            continue  # they come first, and without leaving another slot
        hottest = there[np.argsort(-arena.heat[there], kind="stable")]
        hottest = hottest[: min(len(empty), int(left_bytes // slot_bytes))]
        left_bytes -= len(hottest) * slot_bytes
        experts.append(hottest)
        slots.append(empty[: len(hottest)])
    return np.concatenate(experts), np.concatenate(slots)


_NOTHING = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float64))


def _pairs(
    of_class: Bool, come: Bool, go: Bool, heat: npt.NDArray[np.float64], reluctance: npt.NDArray[np.float64]
) -> tuple[I64, I64, npt.NDArray[np.float64]]:
    """Of one size class, the hottest that may come with the coldest that may go, and what each pair wins."""
    comes, goes = np.flatnonzero(come & of_class), np.flatnonzero(go & of_class)
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
