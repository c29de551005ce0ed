"""Residency: which expert of a model is in which slot, and how hot it is.

One `Arena` a model: a part on each device that holds its experts, and the homes in
host slabs. A slot is EMPTY, BUSY (being filled, or still read by steps of an old
generation) or holds an expert. A slab belongs to one size class, the slot size, as
in a slab allocator. Experts go by their flat id.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmmd.core.geometry import Geometry

EMPTY, BUSY = -1, -2
NOWHERE = -1

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Slot(NamedTuple):
    """A place for one expert: `slab` is an index in the range of arena part `part`."""

    part: int
    slab: int
    slot: int


class SlabSlots:
    """The slots of one slab of an arena part, and how many are empty and busy."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self.occupants: I64 = np.full(slots, EMPTY, np.int64)  # [slots] expert, EMPTY or BUSY
        self.slots = slots
        self.empty = slots
        self.busy = 0

    def put(self, slot: int, occupant: int) -> None:
        """Changes who is in a slot."""
        was = self.occupants.item(slot)
        self.empty += (occupant == EMPTY) - (was == EMPTY)
        self.busy += (occupant == BUSY) - (was == BUSY)
        self.occupants[slot] = occupant

    def experts(self) -> I64:
        """The experts in it."""
        return self.occupants[self.occupants >= 0]


@dataclass
class Part:
    """An arena's range on one device."""

    range_id: int
    device: str
    slab_bytes: int
    slabs: dict[int, SlabSlots] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """Slots of all its slabs."""
        return sum(s.slots for s in self.slabs.values())

    @property
    def occupied(self) -> int:
        """Slots that hold an expert."""
        return sum(s.slots - s.empty - s.busy for s in self.slabs.values())


class Arena:
    """Places, homes and heat of a model's experts. Knows nothing of the ledger."""

    def __init__(self, model_id: int, domain: str, geometry: Geometry, parts: list[Part], floor_slots: int) -> None:
        n = geometry.n
        self.model_id = model_id
        self.domain = domain
        self.geometry = geometry
        self.parts = parts
        self.floor_slots = min(floor_slots, n)
        self.place: I64 = np.full((n, 3), NOWHERE, np.int64)  # part, slab, slot
        self._slot_of: list[Slot | None] = [None] * n  # the same; an array's single items are slow to read
        self._slot_bytes: list[int] = geometry.slot_bytes.tolist()
        self.home: I64 = np.full((n, 2), NOWHERE, np.int64)  # slab, slot in the homes range
        self.home_ready: Bool = np.zeros(n, np.bool_)
        self.moving: Bool = np.zeros(n, np.bool_)  # a trade brings it to another slot
        self.heat: F64 = np.zeros(n, np.float64)

    # Slabs

    def add_slab(self, part: int, index: int, slot_bytes: int) -> None:
        """A slab of empty slots of one size class."""
        slabs = self.parts[part].slabs
        if index in slabs:
            raise ValueError(f"part {part} has slab {index} already")
        slabs[index] = SlabSlots(slot_bytes, self.parts[part].slab_bytes // slot_bytes)

    def remove_slab(self, part: int, index: int) -> None:
        """Takes out a slab that no expert is in. Its busy slots go with it."""
        if (self.parts[part].slabs[index].occupants >= 0).any():
            raise ValueError(f"slab {index} of part {part} still holds experts")
        del self.parts[part].slabs[index]

    # Slots

    def reserve(self, slot: Slot) -> None:
        """EMPTY -> BUSY: about to be filled."""
        self._expect(slot, EMPTY, "empty").put(slot.slot, BUSY)

    def settle(self, expert: int, slot: Slot) -> None:
        """BUSY -> holds `expert`, which leaves the slot it was in (that one turns BUSY)."""
        slab = self._expect(slot, BUSY, "reserved")
        if slab.slot_bytes != self.slot_bytes(expert):
            raise ValueError(f"{slot} is not of expert {expert}'s size")
        self.vacate(expert)
        slab.put(slot.slot, expert)
        self._slot_of[expert] = slot
        self.place[expert] = slot

    def vacate(self, expert: int) -> None:
        """The expert is read from its home from now on; its slot turns BUSY until `release`."""
        slot = self.slot_of(expert)
        if slot is not None:
            self.parts[slot.part].slabs[slot.slab].put(slot.slot, BUSY)
            self.place[expert] = NOWHERE
            self._slot_of[expert] = None

    def release(self, slot: Slot) -> None:
        """BUSY -> EMPTY: no step reads it any more, or its filling was given up."""
        self._expect(slot, BUSY, "busy").put(slot.slot, EMPTY)

    def reserve_all(self, slots: I64) -> None:
        """The same with many slots ``[k, 3]``: all of them, or none."""
        for slab, _, numbers in self._expect_all(slots, EMPTY, "empty"):
            slab.occupants[numbers] = BUSY
            slab.empty -= len(numbers)
            slab.busy += len(numbers)

    def settle_all(self, experts: I64, slots: I64) -> None:
        """The same with an expert for each of many slots ``[k, 3]``: all of them, or none."""
        found = self._expect_all(slots, BUSY, "reserved")
        sizes = np.zeros(len(experts), np.int64)
        for slab, chosen, _ in found:
            sizes[chosen] = slab.slot_bytes
        if (self.geometry.slot_bytes[experts] != sizes).any():
            raise ValueError("a slot is not of its expert's size")
        ordered = np.sort(experts)
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("an expert cannot settle in two slots")
        for expert in experts[self.place[experts, 0] != NOWHERE].tolist():
            self.vacate(expert)
        for slab, chosen, numbers in found:
            slab.occupants[numbers] = experts[chosen]
            slab.busy -= len(numbers)
        self.place[experts] = slots
        for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
            self._slot_of[expert] = Slot(*slot)

    def release_all(self, slots: I64) -> None:
        """The same with many slots ``[k, 3]``: all of them, or none."""
        for slab, _, numbers in self._expect_all(slots, BUSY, "busy"):
            slab.occupants[numbers] = EMPTY
            slab.busy -= len(numbers)
            slab.empty += len(numbers)

    def _expect(self, slot: Slot, occupant: int, what: str) -> SlabSlots:
        slab = self.parts[slot.part].slabs[slot.slab]
        if slab.occupants.item(slot.slot) != occupant:
            raise ValueError(f"{slot} is not {what}")
        return slab

    def _expect_all(self, slots: I64, occupant: int, what: str) -> list[tuple[SlabSlots, I64, I64]]:
        """By slab of slots ``[k, 3]`` that hold `occupant`: the slab, which rows are its own, their slot numbers."""
        if not len(slots):
            return []
        order = np.lexsort((slots[:, 2], slots[:, 1], slots[:, 0]))
        ordered = slots[order]
        numbers = ordered[:, 2]
        another = (ordered[1:, 1] != ordered[:-1, 1]) | (ordered[1:, 0] != ordered[:-1, 0])
        if not (another | (numbers[1:] != numbers[:-1])).all():
            raise ValueError("a slot is named twice")
        bounds = [0, *(np.flatnonzero(another) + 1).tolist(), len(slots)]
        found = []
        for start, stop in pairwise(bounds):
            part, index = ordered[start, :2].tolist()
            slab = self.parts[part].slabs[index]
            if np.count_nonzero(slab.occupants[numbers[start:stop]] == occupant) < stop - start:
                raise ValueError(f"a slot of slab {index} of part {part} is not {what}")
            found.append((slab, order[start:stop], numbers[start:stop]))
        return found

    # Homes

    def plan_homes(self, slab_bytes: int, slabs: int, order: I64) -> None:
        """Gives homes in at most `slabs` slabs of the homes range to experts in `order`, by size class.

        Slabs come in the order in which they are needed; within one, experts are in
        their own order, as in a file. Experts beyond that have no home: they are pinned
        to their device slots.
        """
        needed: list[I64] = []  # by class: where in the order a slab more is needed
        filled: list[tuple[I64, I64]] = []  # experts, and which slab and slot of their class
        for slot_bytes, _ in classes(self.geometry):
            at = np.flatnonzero(self.geometry.slot_bytes[order] == slot_bytes)
            slots = slab_bytes // slot_bytes
            needed.append(at[::slots])
            places = np.stack(np.divmod(np.arange(len(at)), slots), axis=1)
            filled.append((order[at][np.lexsort((order[at], places[:, 0]))], places))
        index = np.argsort(np.argsort(np.concatenate(needed)))
        bounds = np.cumsum([len(some) for some in needed])[:-1]
        for indexes, (experts, places) in zip(np.split(index, bounds), filled, strict=True):
            slab = indexes[places[:, 0]] if len(places) else places[:, 0]
            has = slab < slabs
            self.home[experts[has]] = np.stack((slab, places[:, 1]), axis=1)[has]

    # Looking

    def slot_of(self, expert: int) -> Slot | None:
        """Where an expert is on a device."""
        return self._slot_of[expert]

    def slot_bytes(self, expert: int) -> int:
        """The size class of an expert."""
        return self._slot_bytes[expert]

    @property
    def resident(self) -> Bool:
        """`[n]`: whether each expert is in a device slot."""
        found: Bool = self.place[:, 0] != NOWHERE
        return found

    @property
    def slots(self) -> int:
        """Slots on all devices."""
        return sum(part.slots for part in self.parts)

    def heat_covered(self) -> float:
        """Share of the heat that resident experts carry; of the experts while there is no heat."""
        total = float(self.heat.sum())
        return float(self.heat[self.resident].sum()) / total if total > 0 else float(self.resident.mean())

    @property
    def missing(self) -> Bool:
        """`[n]`: whether each expert is in no slot, can be filled from a home, and is not on its way to a slot."""
        found: Bool = ~self.resident & self.home_ready & ~self.moving
        return found

    def hottest_missing(self, slot_bytes: int) -> I64:
        """The experts of a size class that are in no slot and can be filled from a home, hottest first."""
        missing = np.flatnonzero(self.missing & (self.geometry.slot_bytes == slot_bytes))
        return missing[np.argsort(-self.heat[missing], kind="stable")]

    def can_refill(self) -> bool:
        """Whether an expert is missing that an empty slot has room for."""
        sizes = {slab.slot_bytes for part in self.parts for slab in part.slabs.values() if slab.empty}
        return bool(sizes) and not sizes.isdisjoint(self.wanted_by_class(self.missing))

    def wanted_by_class(self, wanted: Bool) -> dict[int, int]:
        """How many of some experts `[n]` there are of each size class, the one with most of their heat first."""
        of = {int(c): wanted & (self.geometry.slot_bytes == c) for c in np.unique(self.geometry.slot_bytes[wanted])}
        hottest = sorted(of, key=lambda c: (-float(self.heat[of[c]].sum()), -int(of[c].sum()), c))
        return {c: int(of[c].sum()) for c in hottest}

    def empty_slots(self, part: int) -> dict[int, I64]:
        """The empty slots ``[k, 3]`` of a part by their size, slab after slab."""
        of_size: dict[int, list[int]] = {}
        for index, slab in self.parts[part].slabs.items():
            if slab.empty:
                of_size.setdefault(slab.slot_bytes, []).append(index)
        return {slot_bytes: self.slots_that_are(EMPTY, part, indexes) for slot_bytes, indexes in of_size.items()}

    def slots_that_are(self, occupant: int, part: int, indexes: Iterable[int]) -> I64:
        """The slots ``[k, 3]`` of some slabs of a part that are EMPTY, or BUSY."""
        found = [np.zeros((0, 3), np.int64)]
        for index in indexes:
            slots = np.flatnonzero(self.parts[part].slabs[index].occupants == occupant)
            found.append(np.column_stack((np.full_like(slots, part), np.full_like(slots, index), slots)))
        return np.concatenate(found)

    def check(self) -> None:
        """Raises `AssertionError` where slots and places disagree."""
        found = 0
        for p, part in enumerate(self.parts):
            for index, slab in part.slabs.items():
                for slot, expert in enumerate(slab.occupants):
                    assert expert >= BUSY
                    if expert >= 0:
                        found += 1
                        assert tuple(self.place[expert]) == (p, index, slot), f"expert {expert} is not where it says"
                        assert slab.slot_bytes == self.slot_bytes(int(expert)), "a slot of another size class"
                        assert self.slot_of(int(expert)) == (p, index, slot), "places disagree"
                assert slab.empty == int((slab.occupants == EMPTY).sum()), "empty slots are miscounted"
                assert slab.busy == int((slab.occupants == BUSY).sum()), "busy slots are miscounted"
        assert found == int(self.resident.sum()), "an expert is resident in no slot"


def classes(geometry: Geometry) -> list[tuple[int, I64]]:
    """(slot_bytes, experts in order) of each size class, largest slots first."""
    sizes = np.unique(geometry.slot_bytes)[::-1]
    return [(int(size), np.flatnonzero(geometry.slot_bytes == size)) for size in sizes]


def slabs_needed(geometry: Geometry, slab_bytes: int, experts: I64 | None = None) -> int:
    """Slabs that hold all experts (or those given), each slab of one size class."""
    sizes = geometry.slot_bytes if experts is None else geometry.slot_bytes[experts]
    unique, counts = np.unique(sizes, return_counts=True)
    return sum(-(-int(count) // (slab_bytes // int(size))) for size, count in zip(unique, counts, strict=True))


def assign_classes(geometry: Geometry, slab_bytes: int, slabs: int) -> list[int]:
    """A size class for each of `slabs` slabs, in proportion to what each class needs.

    Every class gets its full need where there is enough. With fewer slabs, each goes
    to the class that has least of its need, so that every class gets one first.
    """
    need = [(size, -(-len(experts) // (slab_bytes // size))) for size, experts in classes(geometry)]
    total = sum(count for _, count in need)
    if slabs >= total:
        return [size for size, count in need for _ in range(count)]
    given = {size: 0 for size, _ in need}
    queue = [(0.0, -count, size) for size, count in need]
    heapq.heapify(queue)
    for _ in range(slabs):
        _, count, size = queue[0]
        given[size] += 1
        heapq.heapreplace(queue, (given[size] / -count, count, size))
    return [size for size, _ in need for _ in range(given[size])]
