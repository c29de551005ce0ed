"""Placement: which experts are exchanged, and how fast."""

from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from tests.unit.test_residency import LARGE, SLAB, SMALL, shape
from vmmd.core.placement import AGAIN_GAIN_MIN, GAIN_MIN, SWAP_GAIN_MIN, Exchange, Pace, plan
from vmmd.core.residency import BUSY, EMPTY, Arena, Part, Slot

EVERYTHING = (1 << 40, 1 << 40)


class Case(NamedTuple):
    """An arena of experts of two sizes on two devices, with what is to be respected."""

    arena: Arena
    limits: tuple[int, int]
    lately: np.ndarray
    leaving: set[tuple[int, int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    small, large = draw(st.integers(1, 24)), draw(st.integers(0, 8))
    arena = Arena(1, "alice", shape(small, large), [Part(1, "a", SLAB), Part(2, "b", SLAB)], 0)
    n = small + large
    for part, index in ((0, 0), (0, 1), (0, 4), (1, 0), (1, 1)):
        if draw(st.booleans()):
            arena.add_slab(part, index, draw(st.sampled_from([SMALL, LARGE])))
    for expert in draw(st.permutations(range(n))):
        free = [
            Slot(p, i, s)
            for p, part in enumerate(arena.parts)
            for i, slab in part.slabs.items()
            for s in range(slab.slots)
            if slab.occupants[s] < 0 and slab.occupants[s] != BUSY and slab.slot_bytes == arena.slot_bytes(expert)
        ]
        if free:
            slot = draw(st.sampled_from(free))
            arena.reserve(slot)
            if draw(st.integers(0, 5)):
                arena.settle(expert, slot)
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    arena.home_ready[:] = ~arena.resident | np.array(draw(flags))
    arena.heat = np.array(draw(st.lists(st.floats(0, 2), min_size=n, max_size=n)))
    limits = draw(st.tuples(*[st.integers(0, 6 * LARGE)] * 2))
    slabs = [(p, i) for p, part in enumerate(arena.parts) for i in part.slabs]
    leaving = draw(st.sets(st.sampled_from(slabs))) if slabs else set()
    return Case(arena, limits, np.array(draw(flags)), leaving)


@given(cases())
def test_plans_are_sound(case: Case) -> None:
    """Experts with homes alone, hotter for colder of one size, each once, within each device's limit.

    Who comes was missing, or changes places: from another part for one of the first that is
    colder, or for an empty slot there that no missing one could have.
    """
    arena, heat = case.arena, case.arena.heat
    before = arena.place.copy()
    found = plan(arena, case.limits, case.lately, case.leaving)
    assert (arena.place == before).all()
    arena.check()
    assert len(found.incoming) == len(found.outgoing) == len(found.slots)
    assert len(set(found.incoming)) == len(found.incoming) and len(set(found.outgoing)) == len(found.outgoing)
    assert arena.resident[found.outgoing].all()
    swapped = arena.resident[found.incoming] & (found.incoming != found.outgoing)
    assert set(found.incoming[swapped]) <= set(found.outgoing)
    assert arena.home_ready[found.incoming].all() and arena.home_ready[found.outgoing].all()
    assert (arena.geometry.slot_bytes[found.incoming] == arena.geometry.slot_bytes[found.outgoing]).all()
    climb = found.incoming == found.outgoing
    assert (arena.place[found.outgoing[~climb]] == found.slots[~climb]).all()
    assert (arena.place[found.outgoing[climb], 0] > 0).all() and (found.slots[climb, 0] == 0).all()
    assert all(arena.parts[0].slabs[i].occupants[s] == EMPTY for _, i, s in found.slots[climb].tolist())
    assert len(set(map(tuple, found.slots.tolist()))) == len(found.slots)
    assert not np.isin(arena.geometry.slot_bytes[found.incoming[climb]], arena.geometry.slot_bytes[arena.missing]).any()
    assert not case.leaving & {(p, i) for p, i, _ in found.slots.tolist()}
    gain = heat[found.incoming] - heat[found.outgoing]
    lately = case.lately[found.incoming] & case.lately[found.outgoing]
    came = ~arena.resident[found.incoming]
    assert (gain[came] > GAIN_MIN).all()
    assert (gain[came & lately] > AGAIN_GAIN_MIN).all()
    up = swapped & (found.slots[:, 0] == 0)
    down = swapped & ~up
    assert (arena.place[found.incoming[up], 0] > 0).all() and (arena.place[found.incoming[down], 0] == 0).all()
    assert set(found.incoming[up]) == set(found.outgoing[down])
    assert (gain[up] > SWAP_GAIN_MIN).all()
    assert (gain[up & lately] > SWAP_GAIN_MIN + AGAIN_GAIN_MIN - GAIN_MIN - 1e-9).all()
    for part, limit in enumerate(case.limits):
        moved = found.incoming[found.slots[:, 0] == part]
        assert arena.geometry.slot_bytes[moved].sum() <= limit


@given(cases())
def test_without_limits_nothing_is_left_to_win(case: Case) -> None:
    """After two unlimited plans are carried out no exchange pays any more: the hottest are on the first part."""
    arena = case.arena
    none = np.zeros(arena.geometry.n, np.bool_)
    carry_out(arena, plan(arena, EVERYTHING, none))
    resident = arena.resident.copy()
    carry_out(arena, plan(arena, EVERYTHING, none))
    assert (arena.resident == resident).all(), "what came last only changes places"
    assert not len(plan(arena, EVERYTHING, none).incoming)
    for size in (SMALL, LARGE):
        can = arena.home_ready & (arena.geometry.slot_bytes == size)
        part = arena.place[:, 0]
        missing, first, other = (arena.heat[can & (part == p)] for p in (-1, 0, 1))
        for colder, hotter, gain in (missing, first, GAIN_MIN), (missing, other, GAIN_MIN), (other, first, 1 / 16):
            assert not len(colder) or not len(hotter) or colder.max() <= hotter.min() + gain


@given(cases())
def test_batches_come_to_the_same(case: Case) -> None:
    """Batch by batch, however small, the same experts are resident in the end as after one plan."""
    arena = case.arena
    none = np.zeros(arena.geometry.n, np.bool_)
    whole = plan(arena, EVERYTHING, none)
    expected = arena.resident.copy()
    expected[whole.outgoing], expected[whole.incoming] = False, True
    while len((some := plan(arena, (LARGE, LARGE), none)).incoming):
        carry_out(arena, some)
    assert arena.heat[arena.resident].sum() >= arena.heat[expected].sum() - GAIN_MIN * arena.geometry.n


def carry_out(arena: Arena, found: Exchange) -> None:
    before = {tuple(slot) for slot in arena.place[found.outgoing].tolist()}
    taken = {tuple(slot) for slot in found.slots.tolist()}
    for expert in found.outgoing.tolist():
        arena.vacate(expert)
    arena.reserve_all(np.array(sorted(taken - before), np.int64).reshape(-1, 3))
    arena.release_all(np.array(sorted(before - taken), np.int64).reshape(-1, 3))
    arena.settle_all(found.incoming, found.slots)
    arena.check()


@pytest.fixture
def arena() -> Arena:
    """Eight small experts, the first four of them in slots."""
    made = Arena(1, "alice", shape(8), [Part(1, "a", SLAB)], 0)
    made.add_slab(0, 0, SMALL)
    for expert in range(4):
        made.reserve(Slot(0, 0, expert))
        made.settle(expert, Slot(0, 0, expert))
    made.home_ready[:] = True
    return made


def test_the_hottest_take_the_slots_of_the_coldest(arena: Arena) -> None:
    """The pair that wins most comes first."""
    arena.heat = np.array([0.5, 0.1, 0.0, 0.3, 0.2, 0.9, 0.0, 0.4])
    found = plan(arena, [2 * SMALL], np.zeros(8, np.bool_))
    assert found.incoming.tolist() == [5, 7]
    assert found.outgoing.tolist() == [2, 1]
    assert found.slots.tolist() == [[0, 0, 2], [0, 0, 1]]


def test_the_hottest_are_on_the_first_part() -> None:
    """An expert on a peer changes places with a colder one on the first part, if it is hotter by a sixteenth."""
    arena = Arena(1, "alice", shape(8), [Part(1, "a", SLAB), Part(2, "b", SLAB)], 0)
    for part in (0, 1):
        arena.add_slab(part, 0, SMALL)
        for slot in range(4):
            arena.reserve(Slot(part, 0, slot))
            arena.settle(4 * part + slot, Slot(part, 0, slot))
    arena.home_ready[:] = True
    arena.heat = np.array([0.3, 0.0, 0.2, 0.1, 0.3 + SWAP_GAIN_MIN, 0.2, 0.1 + SWAP_GAIN_MIN, 0.0])
    found = plan(arena, [SMALL, SMALL], np.zeros(8, np.bool_))
    assert (found.incoming.tolist(), found.outgoing.tolist()) == ([4, 1], [1, 4])
    assert found.slots.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert not len(plan(arena, [SMALL, 0], np.zeros(8, np.bool_)).incoming), "both copies count"
    carry_out(arena, plan(arena, EVERYTHING, np.zeros(8, np.bool_)))
    assert sorted(np.flatnonzero(arena.place[:, 0] == 0).tolist()) == [0, 2, 4, 5]
    assert not len(plan(arena, EVERYTHING, np.zeros(8, np.bool_)).incoming)


def test_noise_moves_nothing(arena: Arena) -> None:
    """A difference that one routing in 64 tokens makes is left alone, and four times that where they moved lately."""
    none, all_ = np.zeros(8, np.bool_), np.ones(8, np.bool_)
    arena.heat = np.where(arena.resident, 0.1, 0.1 + GAIN_MIN)
    assert not len(plan(arena, EVERYTHING[:1], none).incoming)
    arena.heat = np.where(arena.resident, 0.1, 0.1 + AGAIN_GAIN_MIN - 1e-9)
    assert len(plan(arena, EVERYTHING[:1], none).incoming) == 4
    assert not len(plan(arena, EVERYTHING[:1], all_).incoming)
    arena.heat = np.where(arena.resident, 0.1, 0.1 + AGAIN_GAIN_MIN + 1e-9)
    assert len(plan(arena, EVERYTHING[:1], all_).incoming) == 4


def test_hot_experts_of_real_routing_become_resident() -> None:
    """Skewed routing counted over 512 tokens makes a quarter of the slots serve nearly what the best quarter would."""
    random = np.random.default_rng(0)
    n, top_k = 512, 32
    norms = np.exp(0.5 * random.standard_normal(n))
    arena = Arena(1, "alice", shape(n), [Part(1, "a", SLAB)], 0)
    for index in range(n // 4 // 4):
        arena.add_slab(0, index, SMALL)
        for slot in range(4):
            arena.reserve(Slot(0, index, slot))
            arena.settle(4 * index + slot, Slot(0, index, slot))
    arena.home_ready[:] = True

    def route(tokens: int) -> np.ndarray:
        scores = random.standard_normal((tokens, n)) * norms
        return np.bincount(np.argpartition(-scores, top_k)[:, :top_k].ravel(), minlength=n) / tokens

    arena.heat = route(512)
    first = route(4096)
    while len((found := plan(arena, [16 * SMALL], np.zeros(n, np.bool_))).incoming):
        carry_out(arena, found)
    hits, best = first[arena.resident].sum(), np.sort(first)[::-1][: n // 4].sum()
    assert first[: n // 4].sum() < 0.4 * top_k < hits
    assert hits > 0.97 * best


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 2)), max_size=30), st.integers(1, 1000))
def test_pace_is_kept(batches: list[tuple[int, float]], bytes_per_s: int) -> None:
    """In any stretch of time no more begins than the rate allows and one batch, and nobody waits for nothing."""
    pace, now = Pace(bytes_per_s), 0.0
    begun: list[tuple[float, int]] = []
    for size, idle_s in batches:
        now += idle_s
        wait_s = pace.wait_s(now)
        assert wait_s <= (begun[-1][1] if begun else 0) / bytes_per_s + 1e-9
        now += wait_s
        assert pace.wait_s(now) < 1e-9
        pace.spend(size, now)
        begun.append((now, size))
    for i in range(len(begun)):
        for j in range(i, len(begun)):
            between = sum(size for _, size in begun[i:j])
            assert between <= (begun[j][0] - begun[i][0]) * bytes_per_s * (1 + 1e-9) + 1e-6
