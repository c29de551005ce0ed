"""Decisions and explanations: what people are told of who got what, and why."""

import pytest

from tests.unit.test_arbiter import KV, LARGE0, SMALL0, World
from vmmd.core import decisions
from vmmd.core.arbiter import Request
from vmmd.core.decisions import KEPT, Decision, Kind, Log
from vmmd.core.explain import Explainer
from vmmd.core.ledger import SlabState
from vmmd.core.policy import SHIPPED
from vmmd.errors import Exhausted, NotFound


def planned(world: World, count: int) -> list[Decision]:
    requests = [Request(KV, count)]
    (device,) = world.plan(count).devices
    return decisions.of_plan(world.ledger, world.holders, device, requests, world.now_s)


def told(world: World, log: Log, some_id: int) -> dict[str, str]:
    facts = Explainer(world.ledger, world.holders, log, SHIPPED, world.now_s, 5.0).explain(some_id)
    return {fact.topic: fact.text for fact in facts}


def test_a_trade_says_what_leaves() -> None:
    """A trade's reason counts the experts that leave and their share of the heat, displaced ones included."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [8, 0, 0, 3, 1, 20, 20, 2])
    (trade,) = planned(world, 1)
    assert (trade.kind, trade.from_id, trade.to_id, trade.slabs) == (Kind.TRADE, 500, KV, 1)
    assert (trade.moved, trade.evicted) == (2, 4)
    share = (0 + 0 + 1 + 2) / 54
    assert f"4 experts with {share:.1%} of the heat leave" in trade.reason
    assert "no memory was free" in trade.reason


def test_every_slab_of_a_plan_is_told_of() -> None:
    """Free, new and traded slabs are each a decision, and add up to what was asked for."""
    world = World(caps=(5, 0))
    world.free("alice", 1)
    world.model(50, [SMALL0, LARGE0], [1.0] * 6, large=2)
    world.model(51, [SMALL0], [1.0] * 4, "bob")
    found = planned(world, 5)
    assert {d.giver for d in found} >= {"free slabs", "new slabs", "model 50's arena", "model 51's arena"}
    assert sum(d.slabs for d in found) == 5
    assert {d.kind for d in found} == {Kind.GRANT, Kind.TRADE, Kind.CROSSING}


def test_the_log_keeps_a_thousand() -> None:
    """Older decisions make room, and sums by giver stay."""
    log = Log()
    for n in range(KEPT + 10):
        log.add([Decision(float(n), Kind.GRANT, "gpu0", 0, KV, "free slabs", "s", 1, "why")])
    assert [d.at_s for d in log] == [float(n) for n in range(10, KEPT + 10)]
    assert log.came_from(KV) == {"free slabs": KEPT + 10}
    log.forget(KV)
    assert log.came_from(KV) == {}


def test_the_same_refusal_is_counted() -> None:
    """A client that asks for the same again and again pushes nothing out."""
    world = World(caps=(0, 0))
    log = Log()
    for n in range(3):
        log.add(decisions.refused(world.ledger, [Request(KV, 2)], "no", float(n)))
    log.add(decisions.refused(world.ledger, [Request(KV, 1)], "no", 5.0))
    assert [(d.slabs, d.times, d.at_s) for d in log] == [(2, 3, 2.0), (1, 1, 5.0)]


@pytest.mark.parametrize("possible", [0, 1, 2, 7])
def test_how_far_a_range_could_grow(possible: int) -> None:
    """An explanation finds the largest growth that would be granted, and says what stands in the way of more."""
    world = World(caps=(possible, 0))
    facts = told(world, Log(), KV)
    assert facts["could have"].startswith(f"{possible} slabs")
    assert "Raise the device's cap_bytes" in facts["for more"]
    world.plan(possible)
    with pytest.raises(Exhausted):
        world.plan(possible + 1)


def test_an_arena_is_explained() -> None:
    """An arena's explanation says what it gives next, and what a slab more would be worth."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [8, 0, 0, 3, 1, 20, 20, 2, 50, 50], floor=4)
    facts = told(world, Log(), 50)
    assert facts["experts"].startswith("8 in 8 slots here; 8 of 10 with 35.1% of the heat")
    worth = SHIPPED.expert_worth(world.holders[0].arena, 0.0, 0)
    assert facts["gives next"].startswith(f"a slab worth {worth[[1, 2, 4, 7]].sum() * 1e6:.3g} us")
    assert facts["for more"].startswith(f"a slab more would be worth {worth[[8, 9]].sum() * 1e6:.3g} us")
    world.model(51, [], [1.0], floor=1)
    assert "none is free" in facts["for more"]


def test_a_session_is_explained_with_its_refusals() -> None:
    """A session's explanation has the decisions and the last refusal of its ranges."""
    world = World(caps=(1, 0))
    log = Log()
    log.add(planned(world, 1))
    world.ledger.lease(world.ledger.create("gpu0", "alice", 0.0), KV, 0, 0.0)
    with pytest.raises(Exhausted) as caught:
        world.plan(1)
    log.add(decisions.refused(world.ledger, [Request(KV, 1)], caught.value.message, 99.0))
    facts = Explainer(world.ledger, world.holders, log, SHIPPED, world.now_s, 5.0).explain(900)
    of_range = facts[: next(i for i, fact in enumerate(facts) if fact.text.startswith("2,"))]
    texts = {fact.topic: fact.text for fact in of_range}
    assert texts["came from"].startswith("1 from new slabs")
    assert texts["refused"] == f"1 slabs (3.00 MiB), 1.0 s ago: {caught.value.message}"


def test_a_traded_slab_waits() -> None:
    """An arena's explanation says how long a free slab still waits after a trade."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [1.0] * 10)
    slab_id = world.ledger.ranges[500].slabs[1]
    world.holders[0].arena.vacate(4)
    for expert in (5, 6, 7):
        world.holders[0].arena.vacate(expert)
    world.holders[0].arena.remove_slab(0, 1)
    world.ledger.begin_revoke(slab_id, 98.0)
    world.ledger.finish_revoke(slab_id, 98.0)
    assert world.ledger.slabs[slab_id].state is SlabState.FREE
    assert "1 free slabs were traded a moment ago and can come in 3.0 s" in told(world, Log(), 500)["for more"]


def test_unknown_id() -> None:
    """An id of nothing is refused, saying where ids are listed."""
    with pytest.raises(NotFound, match="vmmctl status"):
        Explainer(World().ledger, [], Log(), SHIPPED, 0.0, 5.0).explain(123456)
