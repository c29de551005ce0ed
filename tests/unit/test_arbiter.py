"""The arbiter's order, step by step, over literal ledgers and arenas."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from vmmd.core import arbiter, geometry
from vmmd.core.arbiter import DevicePlan, Request
from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord, SlabState
from vmmd.core.residency import EMPTY, Arena, Part, Slot
from vmmd.core.victims import Holder, Move
from vmmd.errors import Exhausted

MIB = 1 << 20
SLAB = 3 * MIB
SMALL, LARGE = MIB // 4, MIB // 2  # bytes of a matrix: 4 or 2 experts a slab
KV, KV1 = 1, 2  # ranges of session 900: on gpu0, on gpu1


def shape(small: int, large: int = 0) -> geometry.Geometry:
    sizes = [SMALL] * small + [LARGE] * large
    stacks = [geometry.Stack(0, m, e, 1, 0, 0, 0, size) for m in range(3) for e, size in enumerate(sizes)]
    return geometry.build(1, len(sizes), 1, stacks, [geometry.Extent(0, 0, 1)], [MIB])


@dataclass
class World:
    """Two devices with caps in slabs, a session of alice with a K/V range on each, and models."""

    caps: tuple[int, int] = (8, 8)
    ledger: Ledger = field(default_factory=Ledger)
    holders: list[Holder] = field(default_factory=list)
    now_s: float = 100.0

    def __post_init__(self) -> None:
        for uuid, cap in zip(("gpu0", "gpu1"), self.caps, strict=True):
            self.ledger.add_device(DeviceRecord(uuid, uuid, SLAB, 100 * SLAB, cap * SLAB))
        self.ledger.add_session(SessionRecord(900, 4711, 1, 1, "alice", "x", 0.0))
        for range_id, device in ((KV, "gpu0"), (KV1, "gpu1")):
            self.ledger.add_range(RangeRecord(range_id, RangeKind.KV, device, "alice", 900, 50, 16, 800))
        self.ledger._next_id = 1000

    def free(self, domain: str, count: int, device: str = "gpu0") -> list[int]:
        return [self.ledger.create(device, domain, 0.0) for _ in range(count)]

    def model(
        self,
        model_id: int,
        slabs: list[tuple[str, int]],
        heat: list[float],
        domain: str = "alice",
        floor: int = 0,
        idle_since_s: float | None = None,
        movable: bool = True,
        large: int = 0,
    ) -> Arena:
        """An arena with a slab at each (device, matrix bytes), filled with experts in order of their class."""
        made = shape(len(heat) - large, large)
        devices = sorted({device for device, _ in slabs})
        parts = [Part(model_id * 10 + p, device, SLAB) for p, device in enumerate(devices)]
        arena = Arena(model_id, domain, made, parts, floor)
        for part in parts:
            self.ledger.add_range(RangeRecord(part.range_id, RangeKind.ARENA, part.device, domain, model_id, 50))
        arena.home_ready[:] = True
        arena.heat[:] = heat
        for device, matrix_bytes in slabs:
            p = devices.index(device)
            index = len(parts[p].slabs)
            self.ledger.lease(self.ledger.create(device, domain, 0.0), parts[p].range_id, index, 0.0)
            arena.add_slab(p, index, 3 * matrix_bytes)
            for slot in range(4 if matrix_bytes == SMALL else 2):
                for expert in np.flatnonzero(~arena.resident & (made.slot_bytes == 3 * matrix_bytes))[:1].tolist():
                    arena.reserve(Slot(p, index, slot))
                    arena.settle(expert, Slot(p, index, slot))
        self.holders.append(Holder(arena, idle_since_s, movable))
        return arena

    def parked(self, range_id: int, slabs: int, parked_s: float, domain: str = "alice", device: str = "gpu0") -> None:
        """A conversation of a session of the domain that has ended."""
        session_id = range_id + 5000
        self.ledger.add_session(SessionRecord(session_id, 4712, 1, 1, domain, "x", 0.0))
        self.ledger.add_range(RangeRecord(range_id, RangeKind.KV, device, domain, session_id, 50, 16, 800))
        for index in range(slabs):
            self.ledger.lease(self.ledger.create(device, domain, 0.0), range_id, index, 0.0)
        self.ledger.park(range_id, parked_s)

    def plan(self, count: int, *more: Request, keep: tuple[int, ...] = ()) -> arbiter.Plan:
        requests = [Request(KV, count), *more]
        return arbiter.plan(self.ledger, self.holders, requests, now_s=self.now_s, keep_models=keep)

    def one(self, count: int) -> DevicePlan:
        made = self.plan(count)
        assert not made.drop
        (device,) = made.devices
        assert device.slabs == count
        return device

    def crowd_out(self, slabs: int, device: str = "gpu0") -> None:
        """Other programs leave so little that the device has `slabs` too many."""
        record = self.ledger.devices[device]
        record.cap_bytes = (self.ledger.slab_count(device) - slabs) * SLAB


SMALL0, LARGE0, SMALL1 = ("gpu0", SMALL), ("gpu0", LARGE), ("gpu1", SMALL)


def test_free_slabs_first() -> None:
    """Free slabs of the domain are used before any is created."""
    world = World()
    mine = world.free("alice", 2)
    assert world.one(1) == DevicePlan("gpu0", "alice", reuse=mine[:1])
    assert world.one(3) == DevicePlan("gpu0", "alice", reuse=mine, create=1)


def test_create_before_destroying() -> None:
    """Slabs are created under the cap before free slabs of other domains are destroyed for it."""
    world = World(caps=(4, 4))
    foreign = world.free("bob", 2)
    assert world.one(2) == DevicePlan("gpu0", "alice", create=2)
    assert world.one(4) == DevicePlan("gpu0", "alice", destroy=foreign, create=4)


def test_pay_back_before_creating() -> None:
    """Where there are more slabs than the cap allows by now, more are destroyed than created."""
    world = World()
    foreign = world.free("bob", 3)
    world.crowd_out(1)
    assert world.one(1) == DevicePlan("gpu0", "alice", destroy=foreign[:2], create=1)
    assert arbiter.free_for(world.ledger, "gpu0", "alice") == 2
    world.crowd_out(3)
    assert arbiter.free_for(world.ledger, "gpu0", "alice") == 0
    with pytest.raises(Exhausted):
        world.plan(1)


def test_coldest_slab_of_the_domain() -> None:
    """Then the slabs of the same domain's arenas, those whose experts carry least heat, of whatever model."""
    world = World(caps=(3, 0))
    world.model(50, [SMALL0, SMALL0], [9, 9, 9, 9, 1, 1, 1, 1])
    world.model(51, [SMALL0], [2, 0, 0, 1])
    (first,) = world.one(1).trades
    assert (first.model_id, first.indexes, first.slots, first.crosses) == (51, [0], 4, False)
    assert (first.moves, sorted(first.evicted)) == ([], [0, 1, 2, 3])
    second = world.one(2).trades[1]
    assert (second.model_id, second.indexes, sorted(second.evicted)) == (50, [1], [4, 5, 6, 7])


def test_hotter_experts_move() -> None:
    """The hottest experts of a victim take the slots of the coldest that stay, while they are hotter."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [8, 0, 0, 3, 1, 20, 20, 2])
    (trade,) = world.one(1).trades
    assert trade.indexes == [0]
    assert trade.moves == [Move(0, Slot(0, 1, 0), 4), Move(3, Slot(0, 1, 3), 7)]
    assert sorted(trade.evicted) == [1, 2]


def test_equal_heat_moves_nobody() -> None:
    """An expert displaces no other of the same heat."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [5] * 8)
    (trade,) = world.one(1).trades
    assert (trade.moves, trade.indexes) == ([], [1])


def test_empty_slots_are_taken_first() -> None:
    """Experts of a victim go to empty slots before they displace anybody, and cold ones too."""
    world = World(caps=(2, 0))
    arena = world.model(50, [SMALL0, SMALL0], [5, 4, 3, 0, 9, 9])
    assert arena.parts[0].slabs[1].occupants.tolist() == [4, 5, EMPTY, EMPTY]
    (trade,) = world.one(1).trades
    assert trade.moves == [Move(0, Slot(0, 1, 2), EMPTY), Move(1, Slot(0, 1, 3), EMPTY)]


def test_the_emptier_slab_of_equal_heat() -> None:
    """Of slabs of equal heat, the one that fewest experts are in goes, then the last of its range."""
    world = World(caps=(3, 0))
    arena = world.model(50, [SMALL0] * 3, [0] * 12)
    arena.vacate(0)
    arena.release(Slot(0, 0, 0))
    assert [t.indexes for t in world.one(1).trades] == [[0]]
    assert [t.indexes for t in world.one(2).trades] == [[0, 2]]


def test_moves_stay_in_their_class() -> None:
    """With mixed classes, experts move to slots of their size alone."""
    world = World(caps=(4, 0))
    world.model(50, [SMALL0, SMALL0, LARGE0, LARGE0], [1, 1, 1, 4, 2, 9, 9, 9, 8, 0, 3, 30], large=4)
    (trade,) = world.one(2).trades
    assert sorted(trade.indexes) == [0, 2]
    assert set(trade.moves) == {Move(3, Slot(0, 1, 0), 4), Move(8, Slot(0, 3, 0), 10)}
    assert sorted(trade.evicted) == [0, 1, 2, 9]
    assert trade.slots == 6


@pytest.mark.parametrize("floor, possible", [(0, 3), (1, 2), (4, 2), (5, 1), (9, 0), (99, 0)])
def test_floor(floor: int, possible: int) -> None:
    """An arena gives no slab that would take it below its floor."""
    world = World(caps=(3, 0))
    world.model(50, [SMALL0] * 3, [1.0] * 12, floor=floor)
    for count in range(1, 4):
        if count <= possible:
            world.one(count)
        else:
            with pytest.raises(Exhausted):
                world.plan(count)


def test_floor_over_devices() -> None:
    """A floor holds for all devices of a request together."""
    world = World(caps=(2, 2))
    world.model(50, [SMALL0, SMALL0, SMALL1, SMALL1], [1.0] * 16, floor=12)
    world.plan(1)
    world.plan(0, Request(KV1, 1))
    with pytest.raises(Exhausted):
        world.plan(1, Request(KV1, 1))


def test_floor_counts_trades_under_way() -> None:
    """Slabs that are on their way out count as given."""
    world = World(caps=(3, 0))
    world.model(50, [SMALL0] * 3, [1.0] * 12, floor=8)
    (trade,) = world.one(1).trades
    world.ledger.begin_revoke(trade.slab_ids[0], 1.0)
    with pytest.raises(Exhausted, match="revoking"):
        world.plan(1)


def test_no_move_into_a_slab_on_its_way_out() -> None:
    """Experts of a second trade move to no slot of a first one's victims."""
    world = World(caps=(3, 0))
    arena = world.model(50, [SMALL0] * 3, [0, 0, 0, 0, 1, 2, 3, 4, 9, 9, 9, 9])
    (first,) = world.one(1).trades
    assert first.indexes == [0]
    world.ledger.begin_revoke(first.slab_ids[0], 1.0)
    (second,) = world.one(1).trades
    assert (second.indexes, second.moves) == ([1], [])
    assert arena.slots == 12


def test_who_cannot_give() -> None:
    """Slabs with busy slots or pinned experts are no victims, nor those of models that are not movable."""
    world = World(caps=(3, 0))
    arena = world.model(50, [SMALL0] * 3, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    arena.vacate(0)
    arena.home_ready[5] = False
    assert world.one(1).trades[0].indexes == [2]
    with pytest.raises(Exhausted):
        world.plan(2)
    with pytest.raises(Exhausted):
        world.plan(1, keep=(50,))
    world.holders[0] = world.holders[0]._replace(movable=False)
    with pytest.raises(Exhausted):
        world.plan(1)


def test_pinned_experts_are_not_displaced() -> None:
    """An expert without a ready home keeps its slot, however cold."""
    world = World(caps=(2, 0))
    arena = world.model(50, [SMALL0, SMALL0], [3, 0, 0, 0, 0, 1, 9, 9])
    arena.home_ready[4] = False
    (trade,) = world.one(1).trades
    assert trade.moves == [Move(0, Slot(0, 1, 1), 5)]


def test_an_arena_gives_nothing_to_itself() -> None:
    """A request for an arena's range takes nothing from that arena."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [1.0] * 8)
    with pytest.raises(Exhausted):
        arbiter.plan(world.ledger, world.holders, [Request(500, 1)], now_s=100.0)


def test_idle_models_before_other_domains() -> None:
    """Then models that nobody has open are dropped, the longest idle first, before another domain gives."""
    world = World(caps=(4, 0))
    world.model(50, [SMALL0], [1.0] * 4, "bob", idle_since_s=20.0)
    world.model(51, [SMALL0], [1.0] * 4, "carol", idle_since_s=10.0)
    world.model(52, [SMALL0, SMALL0], [0.0] * 8, "bob")
    assert world.plan(1) == arbiter.Plan([], [51])
    assert world.plan(4).drop == [51]
    with pytest.raises(Exhausted):
        world.plan(5)


def test_no_model_is_dropped_in_vain() -> None:
    """No model is dropped where that would not be enough."""
    world = World(caps=(3, 0))
    world.model(50, [SMALL0], [1.0] * 4, "bob", idle_since_s=20.0)
    world.model(52, [SMALL0, SMALL0], [1.0] * 8, "bob", floor=8)
    world.plan(1)
    with pytest.raises(Exhausted):
        world.plan(2)
    world.crowd_out(1)  # dropping only pays back what is too much
    with pytest.raises(Exhausted):
        world.plan(1)


def test_no_drop_during_a_trade() -> None:
    """A model that a trade is under way with is not dropped."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [1.0] * 8, floor=4, idle_since_s=5.0)
    (trade,) = world.one(1).trades
    assert world.plan(2).drop == [50]
    world.ledger.begin_revoke(trade.slab_ids[0], 1.0)
    with pytest.raises(Exhausted):
        world.plan(1)


def test_other_domains_last() -> None:
    """Then arenas of other domains above their floor give slabs, which are destroyed and created anew."""
    world = World(caps=(4, 0))
    world.model(50, [SMALL0, SMALL0], [9.0] * 8, floor=4)
    world.model(52, [SMALL0, SMALL0], [0, 0, 0, 0, 1, 1, 1, 1], "bob", floor=4)
    device = world.one(2)
    assert [(t.model_id, t.indexes, t.crosses) for t in device.trades] == [(50, [1], False), (52, [0], True)]
    assert (device.create, device.destroy, device.reuse) == (1, [], [])
    with pytest.raises(Exhausted):
        world.plan(3)


def test_other_domains_pay_back_first() -> None:
    """Where there are more slabs than the cap allows by now, free ones are destroyed before another domain gives."""
    world = World()
    world.model(52, [SMALL0, SMALL0], [1.0] * 8, "bob")
    free = world.free("carol", 1)
    world.crowd_out(1)
    device = world.one(1)
    assert (device.destroy, device.create, [t.crosses for t in device.trades]) == (free, 1, [True])
    world.crowd_out(2)
    with pytest.raises(Exhausted):
        world.plan(1)


def test_all_or_nothing() -> None:
    """Several devices are met together or not at all."""
    world = World(caps=(2, 2))
    assert [d.create for d in world.plan(2, Request(KV1, 1)).devices] == [2, 1]
    with pytest.raises(Exhausted, match="gpu1"):
        world.plan(2, Request(KV1, 3))
    assert not world.ledger.slabs


def test_requests_of_a_device_are_met_together() -> None:
    """Two ranges of one device count together."""
    world = World(caps=(3, 0))
    world.ledger.add_range(RangeRecord(7, RangeKind.KV, "gpu0", "alice", 900, 50, 16, 800))
    (device,) = world.plan(2, Request(7, 1)).devices
    assert device.create == 3
    with pytest.raises(Exhausted):
        world.plan(2, Request(7, 2))


def test_failed_device() -> None:
    """A failed device gives nothing, not even what is free, and says so."""
    world = World()
    world.free("alice", 3)
    world.ledger.devices["gpu0"].failed = True
    assert arbiter.free_for(world.ledger, "gpu0", "alice") == 0
    with pytest.raises(Exhausted, match="gpu0 has failed"):
        world.plan(1)


def test_refusal() -> None:
    """A refusal says what was asked, what is free, who holds what and what to do."""
    world = World(caps=(8, 0))
    world.model(50, [SMALL0, SMALL0], [1.0] * 8, floor=8)
    world.model(51, [SMALL0], [1.0] * 4, "bob", floor=4)
    for index, slab_id in enumerate(world.free("alice", 3)):
        world.ledger.lease(slab_id, KV, index, 0.0)
    world.ledger.begin_revoke(world.ledger.ranges[KV].slabs[1], 0.0)
    world.ledger.quarantine(world.ledger.ranges[KV].slabs[1], 900, 0.0)
    world.ledger.devices["gpu0"].unmanaged_bytes = 5 * MIB
    with pytest.raises(Exhausted) as caught:
        world.plan(9)
    error = caught.value
    assert (error.requested_bytes, error.free_bytes) == (9 * SLAB, 2 * SLAB)
    assert error.holders == (
        "model 50 (alice) holds 6.00 MiB (8 slots, floor 8)",
        "model 51 (bob) holds 3.00 MiB (4 slots, floor 4)",
        "session 900 (pid 4711) holds 6.00 MiB of K/V",
        "3.00 MiB quarantined",
        "5.00 MiB unmanaged (other programs, contexts)",
    )
    assert error.message == (
        "27.00 MiB (9 slabs) asked for on gpu0, 6.00 MiB free of a cap of 24.00 MiB; "
        + "; ".join(error.holders)
        + ". Raise the device's cap_bytes, or end a session"
    )
    assert arbiter.refusal(world.ledger, world.holders, "gpu1", "alice", 1, "model x").message == (
        "model x: 3.00 MiB (1 slabs) asked for on gpu1, 0.00 MiB free of a cap of 0.00 MiB; nothing is held. "
        "Raise the device's cap_bytes, or end a session"
    )


def test_deterministic() -> None:
    """The same ledger and request give the same plan, whatever ties there are."""

    def once() -> arbiter.Plan:
        world = World(caps=(5, 5))
        world.free("bob", 1)
        world.model(50, [SMALL0, LARGE0, SMALL1], [1.0] * 12, large=4)
        world.model(51, [SMALL0], [1.0] * 4)
        return world.plan(4, Request(KV1, 3))

    assert once() == once()


def test_planning_changes_nothing() -> None:
    """Neither ledger nor arena is touched by a plan."""
    world = World(caps=(2, 0))
    arena = world.model(50, [SMALL0, SMALL0], [3, 0, 0, 0, 1, 1, 9, 9])
    before = arena.place.copy(), [s.occupants.copy() for s in arena.parts[0].slabs.values()]
    world.one(1)
    assert (arena.place == before[0]).all()
    assert all((a == s.occupants).all() for a, s in zip(before[1], arena.parts[0].slabs.values(), strict=True))
    assert len(world.ledger.slabs_in("gpu0", SlabState.LEASED)) == 2
    world.ledger.check()


def test_parked_conversations_give_before_arenas() -> None:
    """When nothing is free the longest parked give first, and only as much as is missing; arenas keep their slabs."""
    world = World(caps=(8, 0))
    world.model(50, [SMALL0] * 2, [0] * 8)
    world.parked(60, 2, parked_s=7.0)
    world.parked(61, 3, parked_s=3.0)
    assert world.plan(1).devices and not world.plan(1).reclaim
    for count, reclaim in ((2, [(61, 1)]), (4, [(61, 3)]), (5, [(61, 3), (60, 1)]), (8, [(61, 3), (60, 2)])):
        made = world.plan(count)
        assert (made.devices, made.drop, made.reclaim) == ([], [], reclaim)
    with pytest.raises(Exhausted) as refused:
        world.plan(9)
    assert "parked conversations hold 15.00 MiB" in refused.value.message
    assert "session 5060" not in refused.value.message


def test_parked_conversations_of_others_pay_for_a_lowered_cap_first() -> None:
    """Where there are too many slabs, a parked conversation of another domain gives only what it has beyond those."""
    world = World(caps=(4, 0))
    world.parked(60, 4, parked_s=1.0, domain="bob")
    world.crowd_out(2)
    assert world.plan(2).reclaim == [(60, 2)]
    with pytest.raises(Exhausted):
        world.plan(3)


def test_slabs_on_their_way_back_are_not_reclaimed_again() -> None:
    """A parked range's slabs that somebody is seen to hold count for nothing."""
    world = World(caps=(2, 0))
    world.parked(60, 2, parked_s=1.0)
    world.ledger.begin_revoke(world.ledger.ranges[60].slabs[1], 2.0)
    assert world.plan(1).reclaim == [(60, 1)]
    assert arbiter.plan_reclaim(world.ledger, "gpu0", 5) == [(60, 1)]
    with pytest.raises(Exhausted):
        world.plan(2)


def test_a_parked_conversation_goes_before_an_idle_model() -> None:
    """An idle model is dropped only for what parked conversations do not give."""
    world = World(caps=(5, 0))
    world.model(50, [SMALL0] * 3, [1] * 12, domain="bob", idle_since_s=1.0)
    world.parked(60, 2, parked_s=9.0)
    assert world.plan(2).reclaim == [(60, 2)]
    both = world.plan(4)
    assert (both.reclaim, both.drop) == ([(60, 2)], [])


def test_what_a_device_gives_up_goes_to_colder_slots_on_the_others() -> None:
    """Experts that a trade pushes off its device, victims and displaced, take colder ones' slots on a peer."""
    world = World(caps=(3, 2))
    arena = world.model(
        1, [SMALL0] * 3 + [SMALL1] * 2, [9, 8, 7, 6, 5, 4, 3, 2, 1.5, 1, 4.5, 0.5, 0, 3.5, 2.5, 1.2, 1.1, 0.1, 0.2, 5]
    )
    (trade,) = world.one(1).trades
    # slab 2 is the coldest: of its experts 10 (4.5) and 8 (1.5), the first is hotter than the coldest that stay
    assert trade.indexes == [2]
    assert trade.moves[0] == Move(10, Slot(0, 1, 3), 7)
    there = {move.expert: move.displaced for move in trade.moves[1:]}
    assert there == {7: 12, 8: 17, 9: 18} and trade.evicted == [11]
    assert all(move.to == arena.slot_of(move.displaced) and move.to.part == 1 for move in trade.moves[1:])


def test_a_device_lends_to_its_own_ranges() -> None:
    """A growth on the peer takes its own coldest slots; what they held is colder than all on the first device."""
    world = World(caps=(1, 2))
    world.model(1, [SMALL0, SMALL1, SMALL1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 1, 1, 1])
    made = arbiter.plan(world.ledger, world.holders, [Request(KV1, 1)], now_s=100.0)
    (device,) = made.devices
    (trade,) = device.trades
    assert (device.device, trade.part, trade.indexes) == ("gpu1", 1, [1])
    assert trade.moves == [] and trade.evicted == [8, 9, 10, 11]


def test_growths_on_both_devices_do_not_meet() -> None:
    """All devices of a request give at once: nobody moves to a slab that leaves, nor two experts to one slot."""
    world = World(caps=(3, 3))
    world.model(1, [SMALL0] * 3 + [SMALL1] * 3, [float(heat) for heat in range(24, 0, -1)])
    made = world.plan(2, Request(KV1, 1))
    trades = {t.part: t for device in made.devices for t in device.trades}
    assert (trades[0].indexes, trades[1].indexes) == ([2, 1], [2])
    moves = [move for trade in trades.values() for move in trade.moves]
    assert len({move.to for move in moves}) == len(moves) == 8, "all of the first device's, to what stays on the other"
    assert {(move.to.part, move.to.slab) for move in moves} == {(1, 0), (1, 1)}
    assert trades[0].evicted == []
