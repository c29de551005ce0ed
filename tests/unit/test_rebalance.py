"""Slabs between arenas: they go where they are worth much more, and not to and fro."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.in_process import Host, run
from tests.helpers.peer import SmallModel, public_model
from tests.unit.test_arbiter import SMALL, SMALL0, World
from vmmd.core import arbiter
from vmmd.core.arbiter import Request
from vmmd.core.decisions import Kind
from vmmd.core.policy import SHIPPED


def world(cold: float, missing: float, floor: int = 0) -> World:
    """Model 50 has two slabs of experts of heat `cold`; of model 51's experts four of heat `missing` have no slot."""
    made = World(caps=(3, 0))
    made.model(50, [SMALL0, SMALL0], [cold] * 4 + [9.0] * 4, floor=floor)
    made.model(51, [SMALL0], [9.0] * 4 + [missing] * 4)
    return made


def rebalance(made: World, now_s: float = 100.0) -> arbiter.Rebalance | None:
    return arbiter.plan_rebalance(made.ledger, made.holders, "gpu0", now_s=now_s)


def test_a_slab_goes_where_it_is_worth_more() -> None:
    """The arena that misses the hottest experts gets the slab that is worth least to another of its domain."""
    found = rebalance(world(1.0, 2.0))
    assert found is not None
    (device,) = found.plan.devices
    (trade,) = device.trades
    assert (trade.model_id, trade.indexes, trade.crosses) == (50, [0], False)
    assert (found.request, found.slot_bytes) == (Request(510, 1), 3 * SMALL)
    assert found.gain == pytest.approx(2 * trade.worth)
    assert (device.reuse, device.destroy, device.create) == ([], [], 0)


@pytest.mark.parametrize("missing", [0.0, 1.0, 1.4])
def test_little_gain_moves_nothing(missing: float) -> None:
    """What wins less than the margin stays where it is."""
    assert rebalance(world(1.0, missing)) is None


def test_floors_and_domains_hold() -> None:
    """No arena gives below its floor, to another domain, or where it is not movable; nobody gets for an idle model."""
    assert rebalance(world(1.0, 5.0, floor=8)) is None
    made = world(1.0, 5.0)
    for n, change in ((0, {"movable": False}), (1, {"movable": False}), (1, {"idle_since_s": 50.0})):
        holders = list(made.holders)
        holders[n] = holders[n]._replace(**change)
        assert arbiter.plan_rebalance(made.ledger, holders, "gpu0", now_s=100.0) is None
    made.holders[1].arena.domain = made.ledger.ranges[510].domain = "bob"
    assert rebalance(made) is None
    made.ledger.devices["gpu0"].failed = True
    assert rebalance(made) is None


def test_a_model_that_nobody_uses_gives() -> None:
    """The longer nothing was routed in an open model, the less its slabs are worth to it."""
    made = world(1.0, 1.0)
    assert rebalance(made) is None
    made.holders[0] = made.holders[0]._replace(routed_s=100.0 - SHIPPED.wanted_again_s)
    assert rebalance(made) is not None


def test_a_slab_does_not_come_back_at_once() -> None:
    """A slab that came from an arena goes back to it only after hold_s, whatever it is worth there."""
    made = world(1.0, 5.0)
    for slab_id in made.ledger.ranges[500].slabs.values():
        made.ledger.slabs[slab_id].came_from, made.ledger.slabs[slab_id].came_s = 510, 98.0
    assert rebalance(made, 102.9) is None
    assert rebalance(made, 103.0) is not None


# The manager's


def test_arenas_trade_in_a_daemon() -> None:
    """Slabs move from a model that nobody routes in to one that misses hot experts, with their reason."""

    async def scenario(cold: SmallModel, hot: SmallModel) -> None:
        host = Host(device_slabs=16, homes_slabs=40)
        host.manager.policy = replace(SHIPPED, hold_s=0.0)
        one = await host.open(cold)
        two = await host.open(hot)
        before = two.arena.slots
        assert before < hot.n
        two.arena.heat = np.linspace(1.0, 0.1, hot.n)
        one.arena.heat = np.full(cold.n, 1e-6)
        host.manager.upkeep.start()
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if two.arena.resident.all():
                break
        assert two.arena.resident.all() and two.arena.slots >= hot.n
        assert one.arena.slots >= one.arena.floor_slots
        trades = [d for d in host.manager.decisions if d.kind is Kind.TRADE]
        assert trades and all("it is worth more there" in d.reason for d in trades)
        host.manager.ledger.check()
        for model in (one, two):
            model.arena.check()
        await host.close()

    with public_model() as cold, public_model(3, 20) as hot:
        run(lambda: scenario(cold, hot))
