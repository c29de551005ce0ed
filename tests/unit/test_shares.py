"""Guarantees, caps and priorities: what is promised can always be had, and nobody gets more than may be."""

import copy
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.test_arbiter import SLAB, shape
from tests.unit.test_arbiter import SMALL as MATRIX
from vmmd.core import arbiter, shares
from vmmd.core.arbiter import Request
from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord, Share, SlabState, UserRecord
from vmmd.core.policy import SHIPPED
from vmmd.core.residency import EMPTY, Arena, Part
from vmmd.core.shares import Asked
from vmmd.core.victims import ArenaTrade, Holder
from vmmd.errors import Exhausted, InvalidRequest

POLICY = replace(SHIPPED, hold_s=0.0)
SLOTS = 4  # of a slab
USERS = {1: "team", 2: "team", 3: "bob", 4: "carol"}


@dataclass
class World:
    """A device, users of three domains with guarantees in slabs, and whatever they do, each thing done at once."""

    slabs: int
    guarantees: dict[int, int] = field(default_factory=dict)
    caps: dict[int, int] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    holders: dict[int, Holder] = field(default_factory=dict)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.ledger.add_device(DeviceRecord("gpu0", "gpu0", SLAB, 1000 * SLAB, self.slabs * SLAB))
        for uid, domain in USERS.items():
            cap = self.caps.get(uid)
            share = Share(self.guarantees.get(uid, 0) * SLAB, None if cap is None else cap * SLAB)
            self.ledger.users[uid] = UserRecord(domain, share)

    def session(self, uid: int, guarantee: int = 0) -> int:
        """A session of a user with one empty K/V range; returns the range."""
        share = Share(guarantee * SLAB)
        session_id = self.ledger.new_id()
        self.ledger.add_session(SessionRecord(session_id, 1, uid, uid, USERS[uid], "x", 0.0, share))
        if guarantee and arbiter.unpromised(self.ledger, self.models, "gpu0") < 0:
            self.ledger.remove_session(session_id)
            raise Exhausted("no")
        record = RangeRecord(self.ledger.new_id(), RangeKind.KV, "gpu0", USERS[uid], session_id, 1000, 16, 16000)
        self.ledger.add_range(record)
        return record.range_id

    @property
    def models(self) -> list[Holder]:
        return list(self.holders.values())

    def plan(self, *requests: Request) -> arbiter.Plan:
        return arbiter.plan(self.ledger, self.models, requests, now_s=self.now_s, policy=POLICY)

    def grow(self, *requests: Request) -> None:
        """All of it at once, or `Exhausted`."""
        while (plan := self.plan(*requests)).drop or plan.reclaim:
            for range_id, slabs in plan.reclaim:
                self.shrink(range_id, len(self.ledger.ranges[range_id].slabs) - slabs)
            for model_id in plan.drop:
                self.drop(model_id)
            try:
                self.plan(*requests)
            except Exhausted as refusal:
                raise AssertionError("something was given up for a request that is refused then") from refusal
        for device in plan.devices:
            for slab_id in device.destroy:
                self.ledger.destroy(slab_id)
            crossing = 0
            ready = list(device.reuse)
            for trade in device.trades:
                self.carry_out(trade)
                if trade.crosses:
                    for slab_id in trade.slab_ids:
                        self.ledger.destroy(slab_id)
                    crossing += len(trade.slab_ids)
                else:
                    ready += trade.slab_ids
            ready += [self.ledger.create("gpu0", device.domain, self.now_s) for _ in range(device.create)]
            for request in requests:
                record = self.ledger.ranges[request.range_id]
                for _ in range(request.slabs):
                    self.ledger.lease(ready.pop(), record.range_id, record.hole(), self.now_s)
            assert not ready
        self.ledger.check()

    def carry_out(self, trade: ArenaTrade) -> None:
        arena = self.holders[trade.model_id].arena
        arena.reserve_all(arena.slots_that_are(EMPTY, 0, trade.indexes))
        for move in trade.moves:
            if move.displaced == EMPTY:
                arena.reserve(move.to)
            else:
                arena.vacate(move.displaced)
            arena.settle(move.expert, move.to)
        for expert in trade.evicted:
            arena.vacate(expert)
        for index, slab_id in zip(trade.indexes, trade.slab_ids, strict=True):
            arena.remove_slab(0, index)
            self.free(slab_id)
        assert arena.slots >= arena.floor_slots

    def free(self, slab_id: int) -> None:
        self.ledger.begin_revoke(slab_id, self.now_s)
        self.ledger.finish_revoke(slab_id, self.now_s)

    def shrink(self, range_id: int, keep: int) -> None:
        record = self.ledger.ranges[range_id]
        for index in sorted(record.slabs)[keep:]:
            self.free(record.slabs[index])

    def park(self, range_id: int) -> None:
        """A range's session ends, and leaves it as a conversation."""
        self.ledger.park(range_id, self.now_s)
        self.ledger.end_session(self.ledger.ranges[range_id].owner)

    def adopt(self, range_id: int, guarantee: int = 0, cap: int | None = None) -> None:
        """Another session of the same user goes on with a conversation, or `Exhausted`."""
        before = self.ledger.sessions[self.ledger.ranges[range_id].owner]
        share = Share(guarantee * SLAB, None if cap is None else cap * SLAB)
        session = replace(before, session_id=self.ledger.new_id(), share=share)
        self.ledger.add_session(session)
        why = "no"
        if not guarantee or arbiter.unpromised(self.ledger, self.models, "gpu0") >= 0:
            why = arbiter.adoption_refusal(self.ledger, self.models, range_id, session)
        if why:
            self.ledger.remove_session(session.session_id)
            raise Exhausted(why)
        self.ledger.adopt(range_id, session.session_id)
        self.ledger.remove_session(before.session_id)

    def open(self, uid: int, weights: int, floor: int, experts: int) -> int:
        """A user's model: weights and floor, then as much as is free; returns its id."""
        model_id = self.ledger.new_id()
        ranges = {
            kind: RangeRecord(self.ledger.new_id(), kind, "gpu0", USERS[uid], model_id, 1000)
            for kind in (RangeKind.WEIGHTS, RangeKind.ARENA)
        }
        for record in ranges.values():
            self.ledger.add_range(record)
        part = Part(ranges[RangeKind.ARENA].range_id, "gpu0", SLAB)
        arena = Arena(model_id, USERS[uid], shape(experts), [part], floor * SLOTS)
        arena.home_ready[:] = True
        arena.heat[:] = np.arange(experts) * 7 % 5
        self.holders[model_id] = Holder(arena, None, False, 0, uid, floor)
        try:
            self.grow(Request(ranges[RangeKind.WEIGHTS].range_id, weights), Request(part.range_id, floor))
        except Exhausted:
            del self.holders[model_id]
            for record in ranges.values():
                self.ledger.remove_range(record.range_id)
            raise
        self.holders[model_id] = self.holders[model_id]._replace(movable=True)
        self.lend(model_id)
        return model_id

    def lend(self, model_id: int) -> None:
        """An arena takes what is free, and fills it."""
        arena = self.holders[model_id].arena
        record = self.ledger.ranges[arena.parts[0].range_id]
        free = arbiter.free_for(self.ledger, "gpu0", arena.domain)
        wanted = -(-arena.geometry.n // SLOTS) - len(record.slabs)
        if min(free, wanted) > 0:
            self.grow(Request(record.range_id, min(free, wanted)))
        for index in record.slabs:
            if index not in arena.parts[0].slabs:
                arena.add_slab(0, index, 3 * MATRIX)
        for slot_bytes, slots in arena.empty_slots(0).items():
            experts = arena.hottest_missing(slot_bytes)[: len(slots)]
            arena.reserve_all(slots[: len(experts)])
            arena.settle_all(experts, slots[: len(experts)])

    def close(self, model_id: int) -> None:
        self.holders[model_id] = self.holders[model_id]._replace(idle_since_s=self.now_s, uid=None)

    def drop(self, model_id: int) -> None:
        del self.holders[model_id]
        for record in [r for r in self.ledger.ranges.values() if r.owner == model_id]:
            for slab_id in list(record.slabs.values()):
                self.free(slab_id)
            self.ledger.remove_range(record.range_id)

    def check_guarantees(self) -> None:
        """Everybody could have all that is promised, right now, one after the other."""
        accounts = arbiter.account(self.ledger, self.models, "gpu0")
        assert shares.promised(accounts) <= self.slabs
        later = copy.deepcopy(self)
        for uid, account in accounts.items():
            for session_id, guarantee in account.guarantees.items():
                if guarantee > account.held.get(session_id, 0):
                    (record,) = later.ledger.session_ranges(session_id)
                    later.grow(Request(record.range_id, guarantee - account.held.get(session_id, 0)))
            after = arbiter.account(later.ledger, later.models, "gpu0")[uid]
            if after.promised > after.used:
                later.grow(Request(later.session(uid), after.promised - after.used))
        used = sum(a.used for a in arbiter.account(later.ledger, later.models, "gpu0").values())
        assert used == shares.promised(accounts)


actions = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "shrink", "open", "close", "lend", "session", "park", "adopt"]),
        st.integers(0, 1 << 16),
    ),
    max_size=25,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.integers(4, 14), st.lists(st.integers(0, 6), min_size=4, max_size=4), actions)
def test_guarantees_are_never_broken(slabs: int, wanted: list[int], steps: list[tuple[str, int]]) -> None:
    """Whatever others do, each user can grow to its guarantee at every moment, at once and all of them together."""
    guarantees: dict[int, int] = {}
    for uid, count in zip(USERS, wanted, strict=True):
        guarantees[uid] = min(count, slabs - sum(guarantees.values()))
    world = World(slabs, guarantees)
    world.check_guarantees()  # before the first allocation
    ranges = [(uid, world.session(uid)) for uid in USERS]
    for action, n in steps:
        world.now_s += 1.0
        uid, range_id = ranges[n % len(ranges)]
        models = sorted(world.holders)
        is_parked = world.ledger.ranges[range_id].parked_s is not None
        try:
            if is_parked and action in ("grow", "shrink", "park", "adopt"):
                world.adopt(range_id, n // 16 % 3)
            elif action == "park":
                world.park(range_id)
            elif action == "grow":
                world.grow(Request(range_id, 1 + n // 16 % 4))
            elif action == "shrink":
                world.shrink(range_id, n // 16 % 3)
            elif action == "open":
                world.open(uid, 1 + n // 16 % 2, n // 64 % 3, 4 + n // 256 % 40)
            elif action == "session":
                ranges.append((uid, world.session(uid, n // 16 % 3)))
            elif models and action == "close":
                world.close(models[n % len(models)])
            elif models and action == "lend":
                world.lend(models[n % len(models)])
        except Exhausted:
            pass
        world.check_guarantees()


@settings(max_examples=60)
@given(st.integers(0, 6), st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_caps_are_never_passed(cap: int, growths: list[int]) -> None:
    """A user's sessions together hold at most its cap, and as much as fits under it."""
    world = World(20, caps={3: cap})
    ranges = [world.session(3), world.session(3)]
    held = 0
    for n, slabs in enumerate(growths):
        if held + slabs <= cap:
            world.grow(Request(ranges[n % 2], slabs))
            held += slabs
        else:
            with pytest.raises(Exhausted, match=f"user 3 may hold {cap} slabs"):
                world.grow(Request(ranges[n % 2], slabs))
    assert arbiter.account(world.ledger, world.models, "gpu0")[3].used == held


def test_unused_guarantees_are_lent_and_called_back() -> None:
    """An arena has the memory that a user is guaranteed, and gives it when that user comes."""
    world = World(6, {3: 4})
    model_id = world.open(4, 1, 1, 20)
    assert world.holders[model_id].arena.slots == 5 * SLOTS
    stranger = world.session(4)
    with pytest.raises(Exhausted, match="4 to user 3 and not used yet"):
        world.grow(Request(stranger, 1))
    owner = world.session(3)
    world.grow(Request(owner, 4))
    assert world.holders[model_id].arena.slots == SLOTS
    with pytest.raises(Exhausted):
        world.grow(Request(owner, 1))


def test_a_domain_keeps_what_it_is_guaranteed() -> None:
    """Arenas of other domains give only what their domain has beyond its users' guarantees."""
    world = World(6, {4: 5})
    model_id = world.open(4, 1, 1, 20)
    stranger = world.session(3)
    world.grow(Request(stranger, 1))
    assert world.holders[model_id].arena.slots == 4 * SLOTS
    with pytest.raises(Exhausted):
        world.grow(Request(stranger, 1))


def test_what_is_parked_is_called_back() -> None:
    """Parked conversations count for nobody, give before arenas do, and count again for who goes on with them."""
    world = World(10, {1: 6}, {4: 3})
    model_id = world.open(3, 1, 1, 8)  # weights and two slabs of experts, of which one is the floor
    first, second = world.session(4), world.session(4)
    world.grow(Request(first, 2))
    world.park(first)
    assert arbiter.account(world.ledger, world.models, "gpu0")[4].used == 0
    world.grow(Request(second, 2))
    with pytest.raises(Exhausted, match=r"user 4 may hold 3 slabs there .* uses 2 and would use 4"):
        world.adopt(first)
    world.park(second)
    with pytest.raises(Exhausted, match=r"may hold 1 slabs of gpu0 \(its cap\), has 0 and would have 2"):
        world.adopt(first, cap=1)
    world.adopt(first)
    with pytest.raises(Exhausted, match="6 to user 1 and not used yet"):
        world.grow(Request(world.session(2), 1))
    owner = world.session(1)
    world.grow(Request(owner, 5))
    assert not world.ledger.ranges[second].slabs and len(world.ledger.ranges[first].slabs) == 2
    assert world.holders[model_id].arena.slots == 2 * SLOTS
    world.grow(Request(owner, 1))
    assert world.holders[model_id].arena.slots == SLOTS


def test_going_on_with_a_conversation_breaks_no_guarantee() -> None:
    """What was parked when somebody was guaranteed its memory stays parked; within a guarantee it can be had."""
    world = World(6)
    parked = world.session(4)
    world.grow(Request(parked, 4))
    world.park(parked)
    world.session(3, guarantee=4)
    with pytest.raises(Exhausted, match="of 6 slabs 4 are in use or guaranteed: 4 to user 3"):
        world.adopt(parked)
    assert world.ledger.ranges[parked].parked_s is not None
    world.ledger.users[4] = UserRecord("carol", Share(2 * SLAB))
    world.shrink(parked, 2)
    world.adopt(parked)


def test_a_session_is_guaranteed_memory_before_its_first_range() -> None:
    """A session's guarantee holds from its connection on, and one that cannot be kept is refused."""
    world = World(3)
    other = world.session(4)
    first = world.session(3, guarantee=2)
    world.grow(Request(other, 1))
    with pytest.raises(Exhausted, match="guaranteed"):
        world.grow(Request(other, 1))
    with pytest.raises(Exhausted):
        world.session(3, guarantee=1)
    world.grow(Request(first, 2))


def test_models_count_for_who_opened_them() -> None:
    """Weights and floor use up the opener's guarantee, and nobody's once the model is idle."""
    world = World(6, {4: 4})
    model_id = world.open(4, 1, 2, 8)
    assert arbiter.account(world.ledger, world.models, "gpu0")[4].used == 3
    stranger = world.session(3)
    world.grow(Request(stranger, 2))
    with pytest.raises(Exhausted):
        world.grow(Request(stranger, 1))
    world.close(model_id)
    assert arbiter.account(world.ledger, world.models, "gpu0")[4].used == 0
    world.check_guarantees()


def test_quarantined_memory_counts_for_its_holder() -> None:
    """What a session does not let go of stays charged to its user, and nobody is charged for an unknown holder's."""
    world = World(4, caps={3: 2})
    range_id = world.session(3)
    world.grow(Request(range_id, 2))
    record = world.ledger.ranges[range_id]
    for index, holder in ((0, record.owner), (1, 0)):
        slab_id = record.slabs[index]
        world.ledger.begin_revoke(slab_id, 0.0)
        world.ledger.quarantine(slab_id, holder, 0.0)
    accounts = arbiter.account(world.ledger, world.models, "gpu0")
    assert (accounts[3].used, accounts[shares.NO_USER].used) == (1, 1)
    world.grow(Request(range_id, 1))
    with pytest.raises(Exhausted, match="user 3"):
        world.grow(Request(range_id, 1))


def test_a_growth_within_a_guarantee_is_promised() -> None:
    """What is within the guarantees of a user or session goes before requests that wait."""
    world = World(6, {3: 2})
    one, other = world.session(3), world.session(4)
    assert arbiter.is_promised(world.ledger, world.models, [Request(one, 2)])
    assert not arbiter.is_promised(world.ledger, world.models, [Request(one, 3)])
    assert not arbiter.is_promised(world.ledger, world.models, [Request(other, 1)])
    assert not arbiter.is_promised(World(6).ledger, [], [])


def test_a_device_that_shrinks_keeps_its_promises_in_order() -> None:
    """Where a device has less than is guaranteed, growths within a guarantee go on and others are refused."""
    world = World(6, {3: 4})
    one, other = world.session(3), world.session(4)
    world.grow(Request(other, 2))
    world.ledger.devices["gpu0"].cap_bytes = 4 * SLAB
    world.grow(Request(one, 2))
    with pytest.raises(Exhausted):
        world.grow(Request(other, 1))
    assert len(world.ledger.slabs_in("gpu0", SlabState.LEASED)) == 4


@pytest.mark.parametrize(
    ("allowed", "asked", "share"),
    [
        (Share(10, 20, 3), Asked(), Share(10, 20, 3)),
        (Share(10, 20, 3), Asked(0, 15, -5), Share(0, 15, -5)),
        (Share(0, None, 0), Asked(cap_bytes=7), Share(0, 7, 0)),
    ],
)
def test_clients_may_ask_for_less(allowed: Share, asked: Asked, share: Share) -> None:
    """A client has what it asks for where that is no more than it may have, and all of that where it asks nothing."""
    assert shares.lessened(allowed, asked) == share


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (Asked(guarantee_bytes=11), "session_guarantee_bytes"),
        (Asked(cap_bytes=21), "session_cap_bytes"),
        (Asked(priority=4), "priority 4"),
        (Asked(cap_bytes=5), "more than the cap"),
    ],
)
def test_clients_may_not_ask_for_more(asked: Asked, names: str) -> None:
    """More than a session may have is refused, naming the key that says so."""
    with pytest.raises(InvalidRequest, match=names):
        shares.lessened(Share(10, 20, 3), asked)


def test_a_session_stays_under_its_cap() -> None:
    """A growth beyond the session's own cap is refused, with what it has and would have."""
    world = World(9)
    range_id = world.session(3)
    session = world.ledger.sessions[world.ledger.ranges[range_id].owner]
    capped = replace(session, share=Share(0, 2 * SLAB + 5))
    world.grow(Request(range_id, 1))
    assert shares.over_cap(world.ledger, capped, {range_id: 1}) == ""
    assert "may hold 2 slabs of gpu0 (its cap), has 1 and would have 3" in shares.over_cap(
        world.ledger, capped, {range_id: 2}
    )
    assert shares.over_cap(world.ledger, session, {range_id: 100}) == ""
