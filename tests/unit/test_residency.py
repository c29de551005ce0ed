"""Residency: slots, places and size classes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vmmd.core import geometry
from vmmd.core.residency import BUSY, EMPTY, NOWHERE, Arena, Part, Slot, assign_classes, classes, slabs_needed

SLAB = 3072
SMALL, LARGE = 768, 1536  # slots: 4 or 2 a slab


def shape(small: int, large: int = 0) -> geometry.Geometry:
    """One layer of experts of two sizes."""
    sizes = [SMALL // 3] * small + [LARGE // 3] * large
    stacks = [geometry.Stack(0, m, e, 1, 0, 0, 0, size) for m in range(3) for e, size in enumerate(sizes)]
    return geometry.build(1, len(sizes), 1, stacks, [geometry.Extent(0, 0, 1)], [4096])


def sized(sizes: list[int]) -> geometry.Geometry:
    """One layer of experts whose slots have these sizes."""
    stacks = [geometry.Stack(0, m, e, 1, 0, 0, 0, size // 3) for m in range(3) for e, size in enumerate(sizes)]
    return geometry.build(1, len(sizes), 1, stacks, [geometry.Extent(0, 0, 1)], [1 << 20])


@pytest.fixture
def arena() -> Arena:
    """Six small and two large experts; a slab of each class on `a`, one small slab on `b`; all homes ready."""
    made = Arena(7, "alice", shape(6, 2), [Part(1, "a", SLAB), Part(2, "b", SLAB)], 99)
    made.add_slab(0, 0, SMALL)
    made.add_slab(0, 3, LARGE)
    made.add_slab(1, 0, SMALL)
    made.home_ready[:] = True
    return made


def put(arena: Arena, expert: int, slot: Slot) -> None:
    arena.reserve(slot)
    arena.settle(expert, slot)
    arena.check()


def frozen(arena: Arena) -> Any:
    slabs = [(p, i, s.slot_bytes, s.occupants.tolist()) for p in arena.parts for i, s in p.slabs.items()]
    return [x[1:] for x in slabs], arena.place.tolist()


def refuses(arena: Arena, call: Callable[..., object], *args: object) -> None:
    before = frozen(arena)
    with pytest.raises(ValueError):
        call(*args)
    assert frozen(arena) == before


def test_new_arena(arena: Arena) -> None:
    """A new arena has empty slots, nothing resident, and a floor of no more than all its experts."""
    assert (arena.slots, arena.parts[0].slots, arena.parts[0].occupied) == (10, 6, 0)
    assert arena.floor_slots == 8
    assert not arena.resident.any()
    assert arena.slot_of(0) is None
    assert (arena.place == NOWHERE).all()


def test_a_slot_s_life(arena: Arena) -> None:
    """A slot goes from empty to busy to its expert, back to busy and to empty."""
    slot = Slot(0, 0, 2)
    occupants = arena.parts[0].slabs[0].occupants
    arena.reserve(slot)
    assert occupants.tolist() == [EMPTY, EMPTY, BUSY, EMPTY]
    arena.settle(4, slot)
    assert (occupants[2], arena.slot_of(4), arena.resident[4]) == (4, slot, True)
    arena.vacate(4)
    assert (occupants[2], arena.slot_of(4)) == (BUSY, None)
    arena.vacate(4)  # it is nowhere already
    arena.release(slot)
    assert (occupants == EMPTY).all()
    arena.check()


def test_moving(arena: Arena) -> None:
    """An expert that settles elsewhere leaves its old slot busy, also on another device."""
    put(arena, 1, Slot(0, 0, 0))
    put(arena, 1, Slot(1, 0, 3))
    assert arena.parts[0].slabs[0].occupants[0] == BUSY
    assert arena.slot_of(1) == Slot(1, 0, 3)


def test_slot_refusals(arena: Arena) -> None:
    """Slots that are not empty, not reserved, not busy or of another size refuse, and nothing changes."""
    refuses(arena, arena.settle, 0, Slot(0, 0, 0))
    refuses(arena, arena.release, Slot(0, 0, 0))
    put(arena, 0, Slot(0, 0, 0))
    refuses(arena, arena.reserve, Slot(0, 0, 0))
    refuses(arena, arena.release, Slot(0, 0, 0))
    refuses(arena, arena.settle, 1, Slot(0, 0, 0))
    arena.reserve(Slot(0, 3, 0))
    refuses(arena, arena.reserve, Slot(0, 3, 0))
    refuses(arena, arena.settle, 1, Slot(0, 3, 0))
    arena.settle(6, Slot(0, 3, 0))


def test_many_slots(arena: Arena) -> None:
    """Many slots go through a life at once as they do one by one, and experts leave the slots that they were in."""
    other = Arena(7, "alice", arena.geometry, [Part(1, "a", SLAB), Part(2, "b", SLAB)], 99)
    for part, index, size in ((0, 0, SMALL), (0, 3, LARGE), (1, 0, SMALL)):
        other.add_slab(part, index, size)
    experts = [5, 6, 0, 3, 1]
    places = [Slot(1, 0, 2), Slot(0, 3, 1), Slot(0, 0, 3), Slot(1, 0, 0), Slot(0, 0, 0)]
    for one in (arena, other):
        put(one, 3, Slot(0, 0, 1))
    for slot in places:
        arena.reserve(slot)
    other.reserve_all(np.array(places))
    assert frozen(arena) == frozen(other)
    for expert, slot in zip(experts, places, strict=True):
        arena.settle(expert, slot)
    other.settle_all(np.array(experts), np.array(places))
    assert frozen(arena) == frozen(other)
    other.check()
    assert [other.slot_of(e) for e in range(8)] == [arena.slot_of(e) for e in range(8)]
    for one in (arena, other):
        one.vacate(0)
        one.vacate(6)
    left = [Slot(0, 3, 1), Slot(0, 0, 3), Slot(0, 0, 1)]
    for slot in left:
        arena.release(slot)
    other.release_all(np.array(left))
    other.check()
    assert frozen(arena) == frozen(other)
    for call in (other.reserve_all, other.release_all):
        call(np.zeros((0, 3), np.int64))
    other.settle_all(np.zeros(0, np.int64), np.zeros((0, 3), np.int64))
    assert frozen(arena) == frozen(other)


def test_refusals_of_many_slots(arena: Arena) -> None:
    """One slot among many that refuses, or that is named twice, refuses all of them, and nothing changes."""
    put(arena, 0, Slot(0, 0, 0))
    arena.reserve_all(np.array([[0, 0, 1], [0, 3, 0], [1, 0, 0]]))
    refuses(arena, arena.reserve_all, np.array([[0, 0, 2], [0, 0, 1]]))
    refuses(arena, arena.reserve_all, np.array([[0, 0, 2], [1, 0, 3], [0, 0, 2]]))
    refuses(arena, arena.release_all, np.array([[0, 0, 1], [0, 0, 0]]))
    refuses(arena, arena.settle_all, np.array([1, 2]), np.array([[0, 0, 1], [0, 0, 2]]))
    refuses(arena, arena.settle_all, np.array([1, 1]), np.array([[0, 0, 1], [1, 0, 0]]))
    refuses(arena, arena.settle_all, np.array([1, 2]), np.array([[0, 0, 1], [0, 3, 0]]))
    arena.settle_all(np.array([0, 7]), np.array([[0, 0, 1], [0, 3, 0]]))
    arena.check()


def test_homes_are_planned(arena: Arena) -> None:
    """Homes come slab by slab in the order that is asked for, by size class, those of a slab in their own order."""
    arena.plan_homes(SLAB, 3, np.array([7, 5, 4, 3, 2, 6, 1, 0]))
    assert arena.home.tolist() == [[2, 0], [2, 1], [1, 0], [1, 1], [1, 2], [1, 3], [0, 0], [0, 1]]
    for slabs, without in ((2, [0, 1]), (1, [0, 1, 2, 3, 4, 5]), (0, list(range(8)))):
        arena.home[:] = NOWHERE
        arena.plan_homes(SLAB, slabs, np.arange(8)[::-1])
        assert np.flatnonzero(arena.home[:, 0] == NOWHERE).tolist() == without


def test_slabs(arena: Arena) -> None:
    """A slab is added once and leaves without experts; its busy slots go with it."""
    refuses(arena, arena.add_slab, 0, 3, SMALL)
    put(arena, 0, Slot(0, 0, 0))
    refuses(arena, arena.remove_slab, 0, 0)
    arena.vacate(0)
    arena.remove_slab(0, 0)
    assert arena.slots == 6
    arena.check()


def test_missing(arena: Arena) -> None:
    """Missing experts are those of a class in no slot with a ready home, hottest first, then in order."""
    arena.heat[:] = [1, 5, 1, 0, 9, 2, 3, 3]
    arena.home_ready[5] = False
    put(arena, 4, Slot(0, 0, 0))
    assert arena.hottest_missing(SMALL).tolist() == [1, 0, 2, 3]
    assert arena.hottest_missing(LARGE).tolist() == [6, 7]
    assert arena.hottest_missing(999).tolist() == []


def test_missing_by_class(arena: Arena) -> None:
    """Classes with missing experts come with most missing heat first, then most experts."""
    assert list(arena.wanted_by_class(arena.missing).items()) == [(SMALL, 6), (LARGE, 2)]
    arena.heat[7] = 1
    assert list(arena.wanted_by_class(arena.missing).items()) == [(LARGE, 2), (SMALL, 6)]
    arena.home_ready[6:] = False
    assert list(arena.wanted_by_class(arena.missing).items()) == [(SMALL, 6)]


def test_empty_slots(arena: Arena) -> None:
    """Empty slots are those of a part that hold nobody and are not busy."""
    put(arena, 0, Slot(0, 0, 0))
    arena.reserve(Slot(0, 0, 1))
    arena.reserve(Slot(0, 3, 1))
    found = {size: slots.tolist() for size, slots in arena.empty_slots(0).items()}
    assert found == {SMALL: [[0, 0, 2], [0, 0, 3]], LARGE: [[0, 3, 0]]}
    assert [len(slots) for slots in arena.empty_slots(1).values()] == [4]
    assert arena.slots_that_are(BUSY, 0, [3, 0]).tolist() == [[0, 3, 1], [0, 0, 1]]
    assert arena.slots_that_are(BUSY, 1, []).shape == (0, 3)


def test_heat_covered(arena: Arena) -> None:
    """The share of the heat that is resident; of the experts while there is none."""
    put(arena, 0, Slot(0, 0, 0))
    assert arena.heat_covered() == 1 / 8
    arena.heat[:2] = 3, 1
    assert arena.heat_covered() == 0.75


def test_check_finds_damage(arena: Arena) -> None:
    """The arena's own check notices an expert in two slots, in none, and in one of another size."""
    put(arena, 0, Slot(0, 0, 0))
    arena.parts[1].slabs[0].occupants[1] = 0
    with pytest.raises(AssertionError, match="not where it says"):
        arena.check()
    arena.parts[1].slabs[0].occupants[1] = EMPTY
    arena.place[1] = 0, 0, 1
    with pytest.raises(AssertionError, match="in no slot"):
        arena.check()
    arena.place[1] = NOWHERE
    arena.parts[0].slabs[3].occupants[0] = 1
    arena.place[1] = 0, 3, 0
    with pytest.raises(AssertionError, match="another size class"):
        arena.check()


def test_classes() -> None:
    """Size classes come largest first, each with its experts in order."""
    found = [(size, experts.tolist()) for size, experts in classes(shape(3, 2))]
    assert found == [(LARGE, [3, 4]), (SMALL, [0, 1, 2])]


@pytest.mark.parametrize("small, large, slabs", [(4, 0, 1), (5, 0, 2), (1, 1, 2), (4, 2, 2), (5, 3, 4), (1, 0, 1)])
def test_slabs_needed(small: int, large: int, slabs: int) -> None:
    """All experts need so many slabs, each of one class."""
    assert slabs_needed(shape(small, large), SLAB) == slabs
    assert slabs_needed(shape(small, large), SLAB, np.array([0])) == 1
    assert slabs_needed(shape(small, large), SLAB, np.array([], np.int64)) == 0


@pytest.mark.parametrize("counts", [(4, 2), (40, 2), (4, 20), (17, 9), (1, 1)])
def test_assign_classes(counts: tuple[int, int]) -> None:
    """Each slab has a class, no class has more than it needs, all have one first, and shares are in proportion."""
    made = shape(*counts)
    need = {size: -(-len(experts) // (SLAB // size)) for size, experts in classes(made)}
    total = sum(need.values())
    for slabs in range(total + 3):
        given = assign_classes(made, SLAB, slabs)
        assert len(given) == min(slabs, total)
        assert all(given.count(size) <= count for size, count in need.items())
        if slabs >= len(need):
            for size, count in need.items():
                assert given.count(size) >= max(1, int(count * min(slabs, total) / total) - 1)


def test_no_class_starves() -> None:
    """A class that needs little has a slab before one that needs much has its second."""
    made = sized([1536] + [3072] + [768] * 36)
    for slabs in range(3, 12):
        assert set(assign_classes(made, SLAB, slabs)) == {768, 1536, 3072}
    assert sorted(assign_classes(made, SLAB, 4)) == [768, 768, 1536, 3072]


def test_many_classes() -> None:
    """Thousands of size classes are assigned in no time."""
    made = sized([768 * (e + 1) for e in range(300)])
    assert len(assign_classes(made, 768 * 300, 200)) == 200
