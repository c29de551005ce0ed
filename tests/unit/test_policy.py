"""What memory is worth: averages of routing, and who gives slabs to whom first."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst

from tests.unit.test_arbiter import KV, LARGE0, MIB, SMALL0, World
from vmmd.core import arbiter, heat
from vmmd.core.arbiter import Request
from vmmd.core.averages import BATCH_TOKENS, Averages
from vmmd.core.ledger import RangeKind, RangeRecord
from vmmd.core.policy import SHIPPED
from vmmd.errors import Exhausted

N = 8


def routed(random: np.random.Generator, odds: list[float], tokens: int) -> np.ndarray:
    return random.binomial(tokens, odds).astype(np.float64)


def test_a_steady_stream_is_learned() -> None:
    """Of a steady stream the averages come to know each expert's share to within its noise."""
    random, odds = np.random.default_rng(1), [0.9, 0.6, 0.3, 0.1, 0.05, 0.02, 0.02, 0.01]
    averages = Averages(N, 32.0)
    for _ in range(400):
        averages.add(routed(random, odds, 16), 16)
    np.testing.assert_allclose(averages.share(), odds, atol=0.03)


def test_a_change_is_followed() -> None:
    """A hundred tokens after the routing has changed for good, the new order of experts is known."""
    random, odds = np.random.default_rng(2), [0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]
    averages = Averages(N, 32.0)
    for _ in range(400):
        averages.add(routed(random, odds, 16), 16)
    for _ in range(6):
        averages.add(routed(random, odds[::-1], 16), 16)
    assert set(np.argsort(-averages.share())[:2]) == {6, 7}


counts = npst.arrays(np.float64, N, elements=st.floats(0, 1))


@given(st.lists(st.tuples(counts, st.integers(1, 5000)), max_size=30))
def test_shares_stay_shares(stream: list[tuple[np.ndarray, int]]) -> None:
    """Whatever is counted, a share is finite, at least 0 and at most 1."""
    averages = Averages(N, 32.0)
    for share, tokens in stream:
        averages.add(share * tokens, tokens)
        found = averages.share()
        assert np.isfinite(found).all() and (found >= 0).all() and (found <= 1 + 1e-9).all()


def test_few_tokens_count_little() -> None:
    """Before the first batch is judged, what came counts already, as little as a few tokens can."""
    averages = Averages(N, 32.0)
    assert averages.share().tolist() == [0.0] * N
    averages.add(np.eye(N)[3], 1)
    assert 0 < averages.share()[3] < 0.2
    averages.add(np.eye(N)[3] * BATCH_TOKENS, BATCH_TOKENS)
    assert averages.share()[3] > 0.5


def test_worth_is_what_reading_elsewhere_costs() -> None:
    """An expert's worth is its heat times the time that reading it from the host takes longer than from a slot."""
    sizes = np.array([MIB, 2 * MIB])
    found = heat.worth(np.array([0.5, 0.5]), sizes)
    assert found[1] == pytest.approx(2 * found[0])
    assert found[0] == pytest.approx(0.5 * MIB / 50e9, rel=0.05)
    assert (heat.worth(np.array([0.5, 0.5]), sizes, "peer") < found).all()


def test_idle_and_unimportant_is_worth_less() -> None:
    """A model's experts are worth less the longer nobody had it open, and twice as much a step of priority."""
    world = World()
    arena = world.model(50, [SMALL0], [1.0] * 4)
    base = SHIPPED.expert_worth(arena, 0.0, 0)
    np.testing.assert_allclose(SHIPPED.expert_worth(arena, SHIPPED.wanted_again_s, 0), base / 2)
    np.testing.assert_allclose(SHIPPED.expert_worth(arena, 0.0, 3), base * 8)


def test_what_leaves_counts_not_where_it_is() -> None:
    """Of two arenas that one gives whose coldest experts are worth less, wherever in its slabs they are."""
    world = World(caps=(4, 0))
    world.model(50, [SMALL0, SMALL0], [9, 0, 9, 0, 9, 0, 9, 0])  # every slab is hot, half of its experts are not
    world.model(51, [SMALL0, SMALL0], [1, 1, 1, 1, 9, 9, 9, 9])
    (trade,) = world.one(1).trades
    assert trade.model_id == 50
    assert {m.expert for m in trade.moves} | set(trade.evicted) == {4, 5, 6, 7}
    assert sorted([*trade.evicted, *(m.displaced for m in trade.moves)]) == [1, 3, 5, 7]
    assert trade.worth == 0
    assert [t.model_id for t in world.one(2).trades] == [50, 51]


def test_size_counts() -> None:
    """Experts that are larger are worth more at the same heat: they take longer to read."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0], [1.0] * 4)
    world.model(51, [LARGE0], [0.9] * 2, large=2)  # half as many, each twice as large
    assert world.one(1).trades[0].model_id == 51
    world.holders[1].arena.heat[:] = 1.1
    assert world.one(1).trades[0].model_id == 50


def test_priority_and_idleness_decide_between_arenas() -> None:
    """At the same heat the arena of lower priority gives first, and one that nobody reads before that."""
    world = World(caps=(3, 0))
    for model_id in (50, 51, 52):
        world.model(model_id, [SMALL0], [1.0] * 4)
    world.holders[0] = world.holders[0]._replace(priority=1)
    world.holders[1] = world.holders[1]._replace(priority=0)
    world.holders[2] = world.holders[2]._replace(idle_since_s=world.now_s - 60.0)
    assert [t.model_id for t in world.one(3).trades] == [52, 51, 50]


@pytest.mark.parametrize("ago_s, possible", [(0.0, False), (4.9, False), (5.1, True)])
def test_a_slab_does_not_go_to_and_fro(ago_s: float, possible: bool) -> None:
    """A slab that an arena had from a range goes back to that range only after hold_s, to others at once."""
    world = World(caps=(1, 0))
    world.model(50, [SMALL0], [1.0] * 4)
    slab = world.ledger.slabs[world.ledger.ranges[500].slabs[0]]
    slab.came_from, slab.came_s = KV, world.now_s - ago_s
    if possible:
        assert len(world.one(1).trades) == 1
    else:
        with pytest.raises(Exhausted) as caught:
            world.plan(1)
        assert caught.value.retry_s == pytest.approx(5.0 - ago_s)
    world.ledger.add_range(RangeRecord(77, RangeKind.KV, "gpu0", "alice", 900, 50, 16, 800))
    arbiter.plan(world.ledger, world.holders, [Request(77, 1)], now_s=world.now_s)


def test_waiting_for_held_slabs_must_help() -> None:
    """A refusal says when to come again only where what is held back would be enough."""
    world = World(caps=(2, 0))
    world.model(50, [SMALL0, SMALL0], [1.0] * 8, floor=4)
    for slab_id in world.ledger.ranges[500].slabs.values():
        world.ledger.slabs[slab_id].came_from, world.ledger.slabs[slab_id].came_s = KV, world.now_s
    for count, retry_s in ((1, 5.0), (2, 0.0)):
        with pytest.raises(Exhausted) as caught:
            world.plan(count)
        assert caught.value.retry_s == retry_s


def test_a_policy_can_be_given() -> None:
    """The arbiter asks the policy that it is given."""
    world = World(caps=(1, 0))
    world.model(50, [SMALL0], [1.0] * 4)
    slab = world.ledger.slabs[world.ledger.ranges[500].slabs[0]]
    slab.came_from, slab.came_s = KV, world.now_s
    patient = replace(SHIPPED, hold_s=0.0)
    made = arbiter.plan(world.ledger, world.holders, [Request(KV, 1)], now_s=world.now_s, policy=patient)
    assert len(made.devices[0].trades) == 1
