"""The core under random work: ledger, arenas and arbiter, driven the way the manager drives them.

Plans are committed at once and carried out in steps, with everything else happening
in between: other growths, failures, stuck readers, deaths, shrinks, other programs.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vmmd.core import arbiter, geometry
from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord, SlabState
from vmmd.core.policy import SHIPPED
from vmmd.core.residency import BUSY, EMPTY, Arena, Part, Slot, assign_classes, slabs_needed
from vmmd.core.victims import ArenaTrade, Holder, Move
from vmmd.errors import Exhausted

settings.register_profile(
    "core-machine", max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("core-machine-ci", settings.get_profile("core-machine"), max_examples=500)

SLAB = 3072
SMALL, LARGE = 256, 512  # bytes of one matrix: 4 or 2 experts a slab
KV_SLABS_MAX = 8
GPUS, HOST = ("gpu0", "gpu1"), "host"
DOMAINS = ("alice", "bob")

numbers = st.integers(0, 1 << 16)
heats = st.lists(st.integers(0, 9), min_size=7, max_size=12)


def mixed_geometry(small: int, large: int) -> geometry.Geometry:
    """One layer of `small` + `large` experts of two size classes."""
    n = small + large
    sizes = [SMALL] * small + [LARGE] * large
    stacks = [geometry.Stack(0, m, e, 1, 0, 0, 0, sizes[e]) for m in range(3) for e in range(n)]
    return geometry.build(1, n, 1, stacks, [geometry.Extent(0, 0, 256)], [4096])


@dataclass(eq=False)
class FakeModel:
    """What the manager keeps beside an arena."""

    arena: Arena
    ranges: list[RangeRecord]  # of the arena's parts
    others: list[RangeRecord]  # weights and homes
    sessions: set[int]
    idle_since_s: float | None = None
    stuck: int = 0  # waits for readers past their deadline
    busy: set[Slot] = field(default_factory=set)  # the slots that should be BUSY now
    gave: bool = False

    @property
    def model_id(self) -> int:
        return self.arena.model_id

    def holder(self) -> Holder:
        return Holder(self.arena, self.idle_since_s, not self.stuck)


@dataclass(eq=False)
class Flight:
    """A trade under way: begun, emptied, then out, kept (with the arena) or late (out once readers move on)."""

    model: FakeModel
    trade: ArenaTrade
    closed: list[Slot]  # empty slots of the victims, out of the filler's reach
    state: str = "begun"


@dataclass(eq=False)
class Growth:
    """A plan that is being carried out."""

    requests: list[arbiter.Request]
    domain: str
    placed: list[tuple[int, int, int]] = field(default_factory=list)  # range, index, slab
    flights: list[Flight] = field(default_factory=list)
    failed: bool = False


class CoreMachine(RuleBasedStateMachine):
    """Ledger + arenas + arbiter with a fake clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.ledger = Ledger()
        self.models: dict[int, FakeModel] = {}
        self.alive: set[int] = set()  # sessions
        self.growths: list[Growth] = []
        self.held: list[tuple[int, int]] = []  # (slab, session): given back, not let go yet
        self.late: list[tuple[FakeModel, list[Slot], Flight | None]] = []  # waits without a deadline
        self.born: dict[int, tuple[str, str]] = {}
        self.dead: set[int] = set()  # destroyed slab ids

    @initialize(
        caps=st.tuples(st.integers(5, 10), st.integers(4, 9)),
        sizes=st.lists(st.integers(0, 6), min_size=4, max_size=4),
        values=st.tuples(heats, heats),
    )
    def start(self, caps: tuple[int, int], sizes: list[int], values: tuple[list[int], list[int]]) -> None:
        """Three sessions of two domains, a model of each domain, K/V ranges on both devices."""
        for uuid, cap in zip((*GPUS, HOST), (*caps, 16), strict=True):
            self.ledger.add_device(DeviceRecord(uuid, uuid, SLAB, 24 * SLAB, cap * SLAB, is_host=uuid == HOST))
        for domain in (0, 1, 0):
            self.connect(domain)
        for n in range(3):
            for device in (0, 1):
                self.create_range(n, device)
        self.open_model(0, sizes[0] + 8, sizes[1], 1, True, 0, values[0])
        self.open_model(1, sizes[2] + 5, sizes[3], 1, False, 0, values[1])

    # Time, heat, other programs

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.models)
    @rule(which=numbers, values=heats)
    def route(self, which: int, values: list[int]) -> None:
        arena = self._pick(list(self.models.values()), which).arena
        arena.heat = np.resize(np.array(values, np.float64), arena.geometry.n)

    @rule(which=st.integers(0, 2), slabs=st.integers(0, 20), cap=st.booleans())
    def less_or_more_room(self, which: int, slabs: int, cap: bool) -> None:
        """Other programs take or leave memory, or the cap is set anew."""
        device = self.ledger.devices[(*GPUS, HOST)[which]]
        if cap:
            device.cap_bytes = (24 - slabs) * SLAB + slabs % 3
        else:
            device.unmanaged_bytes = slabs * SLAB + slabs % 3

    # Sessions

    @precondition(lambda self: len(self.alive) < 5)
    @rule(domain=st.integers(0, 1))
    def connect(self, domain: int) -> None:
        session = SessionRecord(self.ledger.new_id(), 100 + len(self.born), 1000, 1000, DOMAINS[domain], "x", self.now)
        self.ledger.add_session(session)
        self.alive.add(session.session_id)

    @precondition(lambda self: self.alive)
    @rule(which=numbers, let_go=numbers)
    def die(self, which: int, let_go: int) -> None:
        session_id = self._pick(sorted(self.alive), which)
        self.alive.discard(session_id)
        for model in self.models.values():
            self._detach(model, session_id)
        ranges = [r for r in self.ledger.session_ranges(session_id) if r.parked_s is None]
        mine = [i for r in ranges for i in r.slabs.values()]
        self._take_back([i for i in mine if not self._in_growth(i)], session_id, let_go)

    @precondition(lambda self: self._settled_kv())
    @rule(which=numbers)
    def park(self, which: int) -> None:
        """A conversation is left; its session may live on or end."""
        self.ledger.park(self._pick(self._settled_kv(), which).range_id, self.now)

    @precondition(lambda self: self.alive and any(self.ledger.parked(d) for d in GPUS))
    @rule(which=numbers, who=numbers)
    def adopt(self, which: int, who: int) -> None:
        """Another session of the domain, or the same, goes on with it."""
        record = self._pick([r for d in GPUS for r in self.ledger.parked(d)], which)
        theirs = [s for s in sorted(self.alive) if self.ledger.sessions[s].domain == record.domain]
        if theirs:
            self.ledger.adopt(record.range_id, self._pick(theirs, who))
            self._tidy()

    @precondition(lambda self: any(self.ledger.parked(d) for d in GPUS))
    @rule(which=numbers, held=numbers)
    def drop_parked(self, which: int, held: int) -> None:
        record = self._pick([r for d in GPUS for r in self.ledger.parked(d)], which)
        self.ledger.unpark(record.range_id)
        slabs = [i for i in record.slabs.values() if self._state(i) is SlabState.LEASED]
        self._take_back(slabs, record.owner, held if held % 3 == 0 else 0)

    def _settled_kv(self) -> list[RangeRecord]:
        """Ranges with slabs in use, none of which is coming or going."""
        busy = {r.range_id for g in self.growths for r in g.requests}
        return [
            r
            for r in self.ledger.ranges.values()
            if r.kind is RangeKind.KV
            and r.slabs
            and r.parked_s is None
            and r.owner in self.alive
            and r.range_id not in busy
            and all(self._state(i) is SlabState.LEASED for i in r.slabs.values())
        ]

    def _detach(self, model: FakeModel, session_id: int) -> None:
        if session_id in model.sessions:
            model.sessions.discard(session_id)
            if not model.sessions:
                model.idle_since_s = self.now

    @precondition(lambda self: self.models and self.alive)
    @rule(which=numbers, who=numbers)
    def attach_or_detach(self, which: int, who: int) -> None:
        model = self._pick(list(self.models.values()), which)
        session_id = self._pick(sorted(self.alive), who)
        if session_id in model.sessions:
            self._detach(model, session_id)
        elif self.ledger.sessions[session_id].domain == model.arena.domain:
            model.sessions.add(session_id)
            model.idle_since_s = None

    # Models

    @precondition(lambda self: self.alive and len(self.models) < 4)
    @rule(
        who=numbers,
        small=st.integers(1, 12),
        large=st.integers(0, 6),
        floor=st.integers(0, 6),
        both=st.booleans(),
        pinned=st.sampled_from([0, 0, 1, 18]),
        values=heats,
    )
    def open_model(
        self, who: int, small: int, large: int, floor: int, both: bool, pinned: int, values: list[int]
    ) -> None:
        """A model with homes for all experts but some that are pinned to their slots."""
        session_id = self._pick(sorted(self.alive), who)
        domain = self.ledger.sessions[session_id].domain
        shape = mixed_geometry(small, large)
        total = slabs_needed(shape, SLAB)
        model_id = self.ledger.new_id()

        def new_range(kind: RangeKind, device: str) -> RangeRecord:
            record = RangeRecord(self.ledger.new_id(), kind, device, domain, model_id, total + 2)
            self.ledger.add_range(record)
            return record

        ranges = [new_range(RangeKind.ARENA, d) for d in (GPUS if both else GPUS[who % 2 :][:1])]
        others = [new_range(RangeKind.WEIGHTS, ranges[0].device), new_range(RangeKind.HOMES, HOST)]
        arena = Arena(model_id, domain, shape, [Part(r.range_id, r.device, SLAB) for r in ranges], floor)
        arena.heat = np.resize(np.array(values, np.float64), shape.n)
        model = FakeModel(arena, ranges, others, {session_id})
        first = max(-(-total * arena.floor_slots // shape.n), 1)
        need = [(ranges[0], first), (others[0], 1), (others[1], total)]
        if not self._provide_now([arbiter.Request(r.range_id, count) for r, count in need]):
            for record in [*ranges, *others]:
                self._take_back(list(record.slabs.values()), 0, 0)
                self.ledger.remove_range(record.range_id)
            return
        missing = total - first
        for record in ranges:
            extra = min(missing, arbiter.free_for(self.ledger, record.device, domain))
            if extra > 0 and self._provide_now([arbiter.Request(record.range_id, extra)], free=True):
                missing -= extra
        for p, record in enumerate(ranges):
            sizes = assign_classes(shape, SLAB, len(record.slabs))
            for index, slot_bytes in zip(sorted(record.slabs), sizes, strict=True):
                arena.add_slab(p, index, slot_bytes)
        arena.home_ready[:] = True
        self._refill(model)
        for expert in np.flatnonzero(arena.resident).tolist():
            arena.home_ready[expert] = not pinned >> expert % 8 & 1
        self.models[model_id] = model

    @precondition(lambda self: self.models)
    @rule(which=numbers)
    def finish_homes(self, which: int) -> None:
        """The last homes are filled: nothing is pinned any more."""
        self._pick(list(self.models.values()), which).arena.home_ready[:] = True

    @precondition(lambda self: self.models)
    @rule(which=numbers, part=numbers)
    def give_back(self, which: int, part: int) -> None:
        """An arena takes a slab that nobody needs and fills its empty slots."""
        model = self._pick(list(self.models.values()), which)
        p = part % len(model.ranges)
        record, missing = model.ranges[p], list(model.arena.wanted_by_class(model.arena.missing))
        if missing and len(record.slabs) < record.slabs_max:
            before = set(record.slabs)
            if arbiter.free_for(self.ledger, record.device, record.domain) > 0:
                assert self._provide_now([arbiter.Request(record.range_id, 1)], free=True)
                (index,) = set(record.slabs) - before
                model.arena.add_slab(p, index, missing[0])
        self._refill(model)

    def _refill(self, model: FakeModel) -> None:
        arena = model.arena
        for p in range(len(arena.parts)):
            for slot_bytes, slots in arena.empty_slots(p).items():
                experts = arena.hottest_missing(slot_bytes)[: len(slots)]
                arena.reserve_all(slots[: len(experts)])
                arena.settle_all(experts, slots[: len(experts)])

    # Growth

    @precondition(lambda self: self.alive)
    @rule(who=numbers, device=st.integers(0, 1))
    def create_range(self, who: int, device: int) -> None:
        session_id = self._pick(sorted(self.alive), who)
        if len(self.ledger.session_ranges(session_id)) < 3:
            domain = self.ledger.sessions[session_id].domain
            record = RangeRecord(
                self.ledger.new_id(),
                RangeKind.KV,
                GPUS[device],
                domain,
                session_id,
                KV_SLABS_MAX,
                16,
                16 * KV_SLABS_MAX,
            )
            self.ledger.add_range(record)

    @precondition(lambda self: self.alive)
    @rule(who=numbers, count=st.integers(1, 4), which=numbers)
    def grow_one(self, who: int, count: int, which: int) -> None:
        """One range of a session grows."""
        self._grow(who, [(count if n == which % 2 else 0) for n in range(3)])

    @precondition(lambda self: self.alive)
    @rule(who=numbers, counts=st.lists(st.integers(1, 3), min_size=3, max_size=3))
    def grow_all(self, who: int, counts: list[int]) -> None:
        """Every range of a session grows, all or nothing."""
        self._grow(who, counts)

    def _grow(self, who: int, counts: list[int]) -> None:
        owners = sorted({r.owner for r in self.ledger.ranges.values() if r.kind is RangeKind.KV} & self.alive)
        if not owners:
            return
        busy = {r.range_id for g in self.growths for r in g.requests}
        records = [r for r in self.ledger.session_ranges(self._pick(owners, who)) if r.range_id not in busy]
        records = [r for r in records if r.parked_s is None]
        records = [r for r in records if all(self._state(i) is SlabState.LEASED for i in r.slabs.values())]
        wanted = [(r, min(c, r.slabs_max - len(r.slabs))) for r, c in zip(records, counts, strict=False)]
        requests = [arbiter.Request(r.range_id, c) for r, c in wanted if c > 0]
        if requests:
            growth = self._provide(requests)
            if growth is not None:
                self.growths.append(growth)
                self._complete(growth)

    @precondition(lambda self: self.growths)
    @rule(which=numbers, flight=numbers, held=numbers)
    def go_on(self, which: int, flight: int, held: int) -> None:
        """A trade takes its next step: fill and empty, then leave."""
        growth = self._pick(self.growths, which)
        under_way = [f for f in growth.flights if f.state in ("begun", "emptied")]
        if under_way:
            self._step(self._pick(under_way, flight))
        self._complete(growth, held if held % 4 == 0 else 0)

    @precondition(lambda self: self.growths)
    @rule(which=numbers, flight=numbers, how=numbers)
    def fail(self, which: int, flight: int, how: int) -> None:
        """The driver fails in the middle of filling, or readers are stuck."""
        growth = self._pick(self.growths, which)
        under_way = [f for f in growth.flights if f.state in ("begun", "emptied")]
        if not under_way:
            return
        flown = self._pick(under_way, flight)
        model, trade, arena = flown.model, flown.trade, flown.model.arena
        growth.failed = True
        if flown.state == "emptied":
            flown.state = "late"
            self._later(model, [], flown)
        else:
            flown.state = "kept"
            if how % 2:  # readers are stuck: what is unpublished stays busy until they move on
                self._later(model, [m.to for m in trade.moves], None)
            else:  # the driver fails after some of the moves
                done = trade.moves[: how // 2 % (len(trade.moves) + 1)]
                left = self._settle(model, done)
                for move in trade.moves[len(done) :]:
                    arena.release(move.to)
                    model.busy.discard(move.to)
                if left:
                    self._later(model, left, None)
            for slot in flown.closed:
                arena.release(slot)
                model.busy.discard(slot)
            for slab_id in trade.slab_ids:
                self.ledger.cancel_revoke(slab_id, self.now)
        self._complete(growth)

    @precondition(lambda self: self.late)
    @rule(which=numbers)
    def readers_move_on(self, which: int) -> None:
        model, slots, flight = self.late.pop(which % len(self.late))
        model.stuck -= 1
        for slot in slots:
            model.arena.release(slot)
            model.busy.discard(slot)
        if flight is not None:
            self._take_out(flight)
            for slab_id in flight.trade.slab_ids:
                self.ledger.finish_revoke(slab_id, self.now)
        self._tidy()

    def _later(self, model: FakeModel, slots: list[Slot], flight: Flight | None) -> None:
        model.stuck += 1
        self.late.append((model, slots, flight))

    # Giving back

    @precondition(lambda self: any(r.kind is RangeKind.KV and r.slabs for r in self.ledger.ranges.values()))
    @rule(which=numbers, keep=st.integers(0, 4), let_go=numbers)
    def shrink(self, which: int, keep: int, let_go: int) -> None:
        records = [r for r in self.ledger.ranges.values() if r.kind is RangeKind.KV and r.slabs]
        record = self._pick(records, which)
        slabs = [s for i, s in sorted(record.slabs.items()) if i >= keep]
        self._take_back([s for s in slabs if self._state(s) is SlabState.LEASED], record.owner, let_go)

    @precondition(lambda self: self.held)
    @rule(which=numbers, quarantine=st.booleans())
    def settle_held(self, which: int, quarantine: bool) -> None:
        slab_id, session_id = self.held.pop(which % len(self.held))
        if quarantine:
            self.ledger.quarantine(slab_id, session_id, self.now)
        else:
            self.ledger.finish_revoke(slab_id, self.now)
        self._tidy()

    @precondition(lambda self: any(s.holder is not None for s in self.ledger.slabs.values()))
    @rule()
    def lift_quarantine(self) -> None:
        for device in self.ledger.devices:
            for slab_id in self.ledger.slabs_in(device, SlabState.QUARANTINED):
                self.ledger.lift(slab_id, self.now)

    def _take_back(self, slab_ids: list[int], session_id: int, held: int) -> None:
        for n, slab_id in enumerate(slab_ids):
            self.ledger.begin_revoke(slab_id, self.now)
            if held >> n & 1:
                self.held.append((slab_id, session_id))
            else:
                self.ledger.finish_revoke(slab_id, self.now)
        self._tidy()

    def _tidy(self) -> None:
        busy = {r.range_id for g in self.growths for r in g.requests}
        for record in list(self.ledger.ranges.values()):
            ours = record.owner in self.models or record.owner in self.alive
            idle = record.range_id not in busy and record.parked_s is None
            if record.kind is RangeKind.KV and not ours and not record.slabs and idle:
                self.ledger.remove_range(record.range_id)
        for session_id in set(self.ledger.sessions) - self.alive:
            if not self.ledger.session_ranges(session_id):
                self.ledger.remove_session(session_id)

    # Carrying out plans

    def _provide(self, requests: list[arbiter.Request], free: bool = False) -> Growth | None:
        mended = False
        while True:
            holders = [m.holder() for m in self.models.values()]
            before = self._frozen()
            try:
                plan = arbiter.plan(self.ledger, holders, requests, now_s=self.now)
            except Exhausted as refusal:
                assert not mended, "something was reclaimed or dropped for a request that is refused then"
                assert self._frozen() == before, "a refusal changed something"
                assert not free, "free_for promised too much"
                assert refusal.requested_bytes > 0 and "asked for" in refusal.message
                return None
            assert self._frozen() == before, "planning changed something"
            assert plan == arbiter.plan(self.ledger, holders, requests, now_s=self.now), "planning is not deterministic"
            assert not free or not plan.reclaim
            for range_id, slabs in plan.reclaim:
                self._reclaim(range_id, slabs)
            for model_id in plan.drop:
                self._drop(model_id)
            if not plan.drop and not plan.reclaim:
                break
            mended = True
        self._check_plan(plan, requests)
        assert not free or not any(d.trades for d in plan.devices)
        return self._commit(plan, requests)

    def _provide_now(self, requests: list[arbiter.Request], free: bool = False) -> bool:
        growth = self._provide(requests, free)
        if growth is None:
            return False
        for flight in growth.flights:
            while flight.state != "out":
                self._step(flight)
        self.growths.append(growth)
        self._complete(growth)
        return not growth.failed

    def _reclaim(self, range_id: int, slabs: int) -> None:
        record = self.ledger.ranges[range_id]
        assert record.parked_s is not None, "a range that is in use was reclaimed"
        oldest = self.ledger.parked(record.device)
        older = oldest[: oldest.index(record)]
        assert not any(self._state(i) is SlabState.LEASED for r in older for i in r.slabs.values()), "not the oldest"
        leased = [i for i, s in sorted(record.slabs.items()) if self._state(s) is SlabState.LEASED]
        assert 0 < slabs <= len(leased)
        self._take_back([record.slabs[i] for i in leased[-slabs:]], record.owner, 0)
        if not record.slabs:
            self.ledger.unpark(range_id)
            self._tidy()

    def _drop(self, model_id: int) -> None:
        model = self.models.pop(model_id)
        assert not model.sessions and not model.stuck, "a model that is in use was dropped"
        assert not any(f.model is model and f.state in ("begun", "emptied") for g in self.growths for f in g.flights)
        for record in [*model.ranges, *model.others]:
            self._take_back(list(record.slabs.values()), 0, 0)
            self.ledger.remove_range(record.range_id)

    def _commit(self, plan: arbiter.Plan, requests: list[arbiter.Request]) -> Growth:
        growth = Growth(requests, self.ledger.ranges[requests[0].range_id].domain)
        for device in plan.devices:
            for slab_id in device.destroy:
                self._destroy(slab_id)
            crossing = sum(len(t.slab_ids) for t in device.trades if t.crosses)
            new = [self._create(device.device, device.domain) for _ in range(device.create - crossing)]
            for slab_id in [*device.reuse, *new]:
                self._lease(growth, slab_id)
            for trade in device.trades:
                for slab_id in trade.slab_ids:
                    self.ledger.begin_revoke(slab_id, self.now)
                growth.flights.append(self._begin(self.models[trade.model_id], trade))
        return growth

    def _begin(self, model: FakeModel, trade: ArenaTrade) -> Flight:
        arena = model.arena
        model.gave = True
        empty = arena.slots_that_are(EMPTY, trade.part, trade.indexes)
        arena.reserve_all(empty)
        closed = [Slot(*slot) for slot in empty.tolist()]
        for move in trade.moves:
            if move.displaced == EMPTY:
                arena.reserve(move.to)
            else:
                arena.vacate(move.displaced)
        model.busy |= {*closed, *(m.to for m in trade.moves)}
        return Flight(model, trade, closed)

    def _settle(self, model: FakeModel, moves: list[Move]) -> list[Slot]:
        """Publishes newcomers; returns the slots that they left."""
        left = []
        for move in moves:
            slot = model.arena.slot_of(move.expert)
            model.busy.discard(move.to)
            if slot is not None:  # else it was displaced
                model.busy.add(slot)
                left.append(slot)
        places = np.array([move.to for move in moves], np.int64).reshape(-1, 3)
        model.arena.settle_all(np.array([move.expert for move in moves], np.int64), places)
        return left

    def _step(self, flight: Flight) -> None:
        model, trade = flight.model, flight.trade
        if flight.state == "begun":
            self._settle(model, trade.moves)
            for expert in trade.evicted:
                slot = model.arena.slot_of(expert)
                assert slot is not None and slot.slab in trade.indexes and slot.part == trade.part
                model.arena.vacate(expert)
                model.busy.add(slot)
            flight.state = "emptied"
        else:
            self._take_out(flight)
            flight.state = "out"

    def _take_out(self, flight: Flight) -> None:
        model, trade = flight.model, flight.trade
        for index in trade.indexes:
            model.arena.remove_slab(trade.part, index)
        model.busy = {s for s in model.busy if s.part != trade.part or s.slab not in trade.indexes}

    def _complete(self, growth: Growth, held: int = 0) -> None:
        """Once every trade is over: the slabs are leased, or everything is undone."""
        if any(f.state in ("begun", "emptied") for f in growth.flights):
            return
        self.growths.remove(growth)
        out = [f for f in growth.flights if f.state == "out"]
        crossing = [(f, s) for f in out if f.trade.crosses for s in f.trade.slab_ids]
        if growth.failed:
            for flight in out:
                for slab_id in flight.trade.slab_ids:
                    self.ledger.finish_revoke(slab_id, self.now)
        else:
            new = []
            for n, (flight, slab_id) in enumerate(crossing):
                device = self.ledger.slabs[slab_id].device
                if held >> 2 + n & 1:
                    self.ledger.quarantine(slab_id, next(iter(flight.model.sessions), 0), self.now)
                    growth.failed = True
                    continue
                self.ledger.finish_revoke(slab_id, self.now)
                self._destroy(slab_id)
                if self.ledger.room_slabs(device):
                    new.append(self._create(device, growth.domain))
                else:  # another program was faster
                    growth.failed = True
            same = [s for f in out if not f.trade.crosses for s in f.trade.slab_ids]
            for slab_id in same:
                self.ledger.finish_revoke(slab_id, self.now)
            if not growth.failed:
                for slab_id in [*same, *new]:
                    self._lease(growth, slab_id)
        at_place = [s for s, place in self._places(growth) if place]
        if growth.failed:
            self._take_back(at_place, 0, 0)
        else:
            assert all(sum(p[0] == r.range_id for p in growth.placed) == r.slabs for r in growth.requests)
            owner = self.ledger.ranges[growth.requests[0].range_id]
            if owner.kind is RangeKind.KV and owner.owner not in self.alive:
                self._take_back(at_place, owner.owner, 0)
        self._tidy()

    def _places(self, growth: Growth) -> list[tuple[int, bool]]:
        found = []
        for range_id, index, slab_id in growth.placed:
            slab = self.ledger.slabs.get(slab_id)
            there = slab is not None and (slab.range_id, slab.index) == (range_id, index)
            found.append((slab_id, there and self._state(slab_id) is SlabState.LEASED))
        return found

    def _lease(self, growth: Growth, slab_id: int) -> None:
        slab = self.ledger.slabs[slab_id]
        for request in growth.requests:
            into = self.ledger.ranges[request.range_id]
            wants = sum(p[0] == request.range_id for p in growth.placed) < request.slabs
            if wants and (into.device, into.domain) == (slab.device, slab.domain):
                index = into.hole()
                self.ledger.lease(slab_id, into.range_id, index, self.now)
                growth.placed.append((into.range_id, index, slab_id))
                return
        raise AssertionError(f"slab {slab_id} was planned for nobody")

    def _create(self, device: str, domain: str) -> int:
        slab_id = self.ledger.create(device, domain, self.now)
        record = self.ledger.devices[device]
        used = self.ledger.slab_count(device) * record.slab_bytes
        assert used <= record.cap_bytes, "a slab was created beyond the cap"
        assert used + record.unmanaged_bytes + record.reserve_bytes <= record.total_bytes
        assert slab_id not in self.born, "an id was used twice"
        self.born[slab_id] = device, domain
        return slab_id

    def _destroy(self, slab_id: int) -> None:
        self.ledger.destroy(slab_id)
        self.dead.add(slab_id)

    # Plans

    def _check_plan(self, plan: arbiter.Plan, requests: list[arbiter.Request]) -> None:
        ledger = self.ledger
        wanted: Counter[str] = Counter()
        for request in requests:
            wanted[ledger.ranges[request.range_id].device] += request.slabs
        assert {d.device: d.slabs for d in plan.devices} == dict(wanted), "not all, or more than asked for"
        domain = ledger.ranges[requests[0].range_id].domain
        named = [i for d in plan.devices for i in [*d.reuse, *d.destroy]]
        named += [i for d in plan.devices for t in d.trades for i in t.slab_ids]
        assert len(named) == len(set(named)), "a slab is planned twice"
        given: Counter[int] = Counter()
        victims: dict[int, set[tuple[int, int]]] = {}
        for device in plan.devices:
            assert {self._at(i) for i in device.reuse} <= {(device.device, domain, SlabState.FREE)}
            assert all(self._at(i)[::2] == (device.device, SlabState.FREE) for i in device.destroy)
            assert all(self._at(i)[1] != domain for i in device.destroy)
            for trade in device.trades:
                given[trade.model_id] += trade.slots
                victims.setdefault(trade.model_id, set()).update((trade.part, i) for i in trade.indexes)
            if device.trades:
                parked = ledger.parked(device.device)
                assert not any(self._state(i) is SlabState.LEASED for r in parked for i in r.slabs.values()), (
                    "an arena gives while conversations are parked"
                )
            if any(t.crosses for t in device.trades):
                free = ledger.slabs_in(device.device, SlabState.FREE)
                assert not free - {*device.reuse, *device.destroy}, "a domain gives while slabs are free"
        for device in plan.devices:
            for trade in device.trades:
                self._check_trade(trade, device.device, domain, requests, victims[trade.model_id])
        moves = [(t.model_id, m) for d in plan.devices for t in d.trades for m in t.moves]
        assert len({(i, m.to) for i, m in moves}) == len(moves), "two experts move to one slot"
        assert len({(i, m.expert) for i, m in moves}) == len(moves), "an expert moves to two slots"
        for model_id in given:
            slots = self._leased_slots(self.models[model_id])
            assert slots - given[model_id] >= self.models[model_id].arena.floor_slots, "a trade goes below the floor"
        for device in plan.devices:
            for crosses in (False, True):
                self._check_coldest(device, crosses, given, victims, {r.range_id for r in requests})

    def _check_trade(
        self,
        trade: ArenaTrade,
        device: str,
        domain: str,
        requests: list[arbiter.Request],
        victims: set[tuple[int, int]],
    ) -> None:
        model = self.models[trade.model_id]
        arena, part = model.arena, model.arena.parts[trade.part]
        assert not model.stuck and trade.crosses == (arena.domain != domain)
        assert not trade.crosses or model.sessions, "an idle model of another domain is dropped, not robbed"
        leaving: set[int] = set()
        asked = {r.range_id for r in requests}
        for index, slab_id in zip(trade.indexes, trade.slab_ids, strict=True):
            slab = self.ledger.slabs[slab_id]
            assert slab.came_from not in asked or self.now - slab.came_s >= SHIPPED.hold_s, "traded to and fro"
            assert self._at(slab_id) == (device, arena.domain, SlabState.LEASED)
            assert self.ledger.ranges[part.range_id].slabs[index] == slab_id
            occupants = part.slabs[index].occupants.tolist()
            assert BUSY not in occupants, "a slab with busy slots is a victim"
            experts = {e for e in occupants if e >= 0}
            assert all(arena.home_ready[e] for e in experts), "a slab with pinned experts is a victim"
            leaving |= experts
        assert trade.slots == sum(len(part.slabs[i].occupants) for i in trade.indexes)
        moved, evicted = {m.expert for m in trade.moves}, set(trade.evicted)
        displaced = {m.displaced for m in trade.moves if m.to.part == trade.part}
        assert leaving <= moved | evicted, "an expert is left behind"
        assert evicted == leaving - moved and len(evicted) == len(trade.evicted)
        assert moved <= leaving | displaced
        for move in trade.moves:
            target = arena.parts[move.to.part]
            slab = target.slabs[move.to.slab]
            assert (move.to.part, move.to.slab) not in victims
            assert move.expert in leaving or move.to.part != trade.part
            into = self.ledger.ranges[target.range_id].slabs[move.to.slab]
            assert self._state(into) is SlabState.LEASED, "an expert moves to a slab on its way out"
            assert slab.occupants[move.to.slot] == move.displaced
            assert slab.slot_bytes == arena.slot_bytes(move.expert)
            if move.displaced != EMPTY:
                assert arena.heat[move.expert] > arena.heat[move.displaced], "a move displaces a hotter expert"
                assert arena.home_ready[move.displaced], "a pinned expert is displaced"

    def _check_coldest(
        self,
        device: arbiter.DevicePlan,
        crosses: bool,
        given: Counter[int],
        victims: dict[int, set[tuple[int, int]]],
        into: set[int],
    ) -> None:
        """No slab was spared that is worth less than one that goes: as a class's next, or by itself in its class."""
        dearest = 0.0
        spared: list[float] = []
        for model in self.models.values():
            arena = model.arena
            if model.stuck or (arena.domain != device.domain) != crosses or (crosses and not model.sessions):
                continue
            worth = SHIPPED.expert_worth(arena, self._idle_s(model), 0)
            spare = self._leased_slots(model) - given[model.model_id] - arena.floor_slots
            for p, part in enumerate(arena.parts):
                if part.device != device.device:
                    continue
                ids = self.ledger.ranges[part.range_id].slabs
                leased = {i: s for i, s in part.slabs.items() if self._state(ids[i]) is SlabState.LEASED}
                for slot_bytes in {s.slot_bytes for s in leased.values()}:
                    of_class = {i: s for i, s in leased.items() if s.slot_bytes == slot_bytes}
                    experts = np.concatenate([s.experts() for s in of_class.values()])
                    coldest = np.sort(worth[experts[arena.home_ready[experts]]]).tolist()
                    coldest = [0.0] * sum(s.empty for s in of_class.values()) + coldest
                    gone = [i for i in of_class if (p, i) in victims.get(model.model_id, set())]
                    able = [i for i, s in of_class.items() if i not in gone and self._can_go(arena, s, ids[i], into)]
                    own = {i: float(worth[s.experts()].sum()) for i, s in of_class.items()}
                    slots = SLAB // slot_bytes
                    if gone:
                        dearest = max(dearest, sum(coldest[(len(gone) - 1) * slots : len(gone) * slots]))
                    if able and spare >= slots:
                        spared.append(sum(coldest[len(gone) * slots : (len(gone) + 1) * slots]))
                        assert max((own[i] for i in gone), default=0.0) <= min(own[i] for i in able) + 1e-18
        if any(t.crosses == crosses for t in device.trades):
            assert dearest <= min(spared, default=dearest) * (1 + 1e-9), "a slab was spared that is worth less"

    def _idle_s(self, model: FakeModel) -> float:
        return 0.0 if model.idle_since_s is None else self.now - model.idle_since_s

    def _can_go(self, arena: Arena, slab: Any, slab_id: int, into: set[int]) -> bool:
        record = self.ledger.slabs[slab_id]
        held_back = record.came_from in into and self.now - record.came_s < SHIPPED.hold_s
        return BUSY not in slab.occupants and bool(arena.home_ready[slab.experts()].all()) and not held_back

    def _leased_slots(self, model: FakeModel) -> int:
        return sum(
            len(slab.occupants)
            for part in model.arena.parts
            for index, slab in part.slabs.items()
            if self._state(self.ledger.ranges[part.range_id].slabs[index]) is SlabState.LEASED
        )

    # Looking

    def _pick(self, among: list[Any], n: int) -> Any:
        return among[n % len(among)]

    def _state(self, slab_id: int) -> SlabState:
        return self.ledger.slabs[slab_id].state

    def _at(self, slab_id: int) -> tuple[str, str, SlabState]:
        slab = self.ledger.slabs[slab_id]
        return slab.device, slab.domain, slab.state

    def _in_growth(self, slab_id: int) -> bool:
        placed = any(slab_id == p[2] for g in self.growths for p in g.placed)
        return placed or self._state(slab_id) is not SlabState.LEASED

    def _frozen(self) -> Any:
        """Everything, as values that compare."""
        ledger = self.ledger
        by_device = {d: {s: set(i) for s, i in states.items()} for d, states in ledger._by_device.items()}
        arenas = []
        for model in self.models.values():
            arena = model.arena
            arrays = [arena.place, arena.home, arena.home_ready, arena.heat]
            for part in arena.parts:
                for index, slab in part.slabs.items():
                    arenas.append((part.range_id, index, slab.slot_bytes))
                    arrays.append(slab.occupants)
            arenas += [a.tobytes() for a in arrays]
        records = [ledger.slabs, ledger.ranges, ledger.devices, ledger.sessions]
        rows = [[(key, repr(row)) for key, row in table.items()] for table in records]
        return rows, by_device, arenas, ledger._next_id

    # Invariants

    @invariant()
    def ledger_checks_itself(self) -> None:
        self.ledger.check()

    @invariant()
    def a_slab_is_in_one_state_and_at_most_one_range(self) -> None:
        ledger = self.ledger
        places = Counter(i for r in ledger.ranges.values() for i in r.slabs.values())
        states = Counter(i for d in ledger.devices for s in SlabState for i in ledger.slabs_in(d, s))
        assert set(states) == set(ledger.slabs) and set(states.values()) <= {1}
        for slab_id, slab in ledger.slabs.items():
            assert places[slab_id] == (slab.state in (SlabState.LEASED, SlabState.REVOKING))

    @invariant()
    def the_sums_of_a_device_are_its_slabs(self) -> None:
        for device in self.ledger.devices:
            slabs = [s for s in self.ledger.slabs.values() if s.device == device]
            sums = self.ledger.bytes_by_kind(device)
            assert sum(sums.values()) == len(slabs) * SLAB == self.ledger.slab_count(device) * SLAB
            in_ranges = self.ledger.held_bytes(r for r in self.ledger.ranges.values() if r.device == device)
            assert in_ranges == sum(sums[kind] for kind in (*RangeKind, SlabState.REVOKING))

    @invariant()
    def a_range_of_cells_has_a_session(self) -> None:
        for record in self.ledger.ranges.values():
            assert (record.owner in self.ledger.sessions) == (record.kind is RangeKind.KV)

    @invariant()
    def a_session_has_credentials(self) -> None:
        assert all(s.pid > 0 and s.domain in DOMAINS for s in self.ledger.sessions.values())
        assert self.alive <= set(self.ledger.sessions)

    @invariant()
    def a_slab_keeps_its_device_and_domain(self) -> None:
        for slab_id, slab in self.ledger.slabs.items():
            assert (slab.device, slab.domain) == self.born[slab_id]
        assert not self.dead & set(self.ledger.slabs), "a destroyed slab is back"

    @invariant()
    def no_arena_that_gave_is_below_its_floor(self) -> None:
        for model in self.models.values():
            assert not model.gave or self._leased_slots(model) >= model.arena.floor_slots

    @invariant()
    def an_expert_is_in_one_slot(self) -> None:
        for model in self.models.values():
            model.arena.check()
            slabs = [s for part in model.arena.parts for s in part.slabs.values()]
            found = Counter(e for s in slabs for e in s.experts().tolist())
            assert set(found.values()) <= {1}
            assert set(found) == set(np.flatnonzero(model.arena.resident).tolist())

    @invariant()
    def an_expert_in_no_slot_has_a_ready_home(self) -> None:
        for model in self.models.values():
            assert model.arena.home_ready[~model.arena.resident].all()

    @invariant()
    def an_arena_has_the_slabs_of_its_ranges(self) -> None:
        for model in self.models.values():
            late = {
                (f.trade.part, i) for g in self.growths for f in g.flights for i in f.trade.indexes if f.model is model
            }
            for p, part in enumerate(model.arena.parts):
                extra = set(self.ledger.ranges[part.range_id].slabs) ^ set(part.slabs)
                assert {(p, i) for i in extra} <= late, "arena and ledger disagree beyond trades that are under way"

    @invariant()
    def a_slot_is_busy_for_a_reason(self) -> None:
        for model in self.models.values():
            busy = {
                Slot(p, index, int(slot))
                for p, part in enumerate(model.arena.parts)
                for index, slab in part.slabs.items()
                for slot in np.flatnonzero(slab.occupants == BUSY)
            }
            assert busy == model.busy

    @invariant()
    def a_slab_is_revoking_for_a_reason(self) -> None:
        revoking = {i for i, s in self.ledger.slabs.items() if s.state is SlabState.REVOKING}
        flights = [f for g in self.growths for f in g.flights if f.state not in ("kept", "late")]
        flights += [f for _, _, f in self.late if f is not None]
        assert revoking == {i for i, _ in self.held} | {i for f in flights for i in f.trade.slab_ids}

    @invariant()
    def a_quarantined_slab_is_charged_to_somebody(self) -> None:
        for slab in self.ledger.slabs.values():
            assert (slab.holder is not None) == (slab.state is SlabState.QUARANTINED)


TestCore = pytest.mark.timeout(600)(CoreMachine.TestCase)  # shrinking a failure takes minutes
TestCore.__doc__ = "Every invariant holds after every step, whatever happens in between."
TestCore.settings = settings.get_profile("core-machine-ci" if os.environ.get("CI") else "core-machine")
