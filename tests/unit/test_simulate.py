"""The shipped policy against simpler ones, on the traces that docs/policy.md shows."""

import numpy as np
import pytest

from tests.bench.simulate import FREQUENCY, LRU, Setting, Simulation
from tests.bench.traces import Trace, made_up, recorded
from vmmd.core.ledger import RangeKind, SlabState
from vmmd.core.policy import SHIPPED

TRACES = {trace.name: trace for trace in [*made_up(), *recorded()]}
STATIONARY = ("uniform", "zipf-0.8", "zipf-1.2")


@pytest.mark.parametrize("name", TRACES)
def test_the_shipped_policy_wins(name: str) -> None:
    """Its hit rate is within 1 % of the best simpler policy's on stationary traces, and higher on all others."""
    shipped, *others = (
        Simulation(TRACES[name], policy, Setting(slots=0.5)).run().hit_rate for policy in (SHIPPED, LRU, FREQUENCY)
    )
    if name in STATIONARY:
        assert shipped >= 0.99 * max(others)
    else:
        assert shipped > max(others)


def test_every_kind_of_trace_is_there() -> None:
    """Uniform, Zipf, phase-changing and recorded traces are compared."""
    assert set(STATIONARY) < set(TRACES)
    assert sum(name.startswith("phases") for name in TRACES) == 5
    assert {trace.name for trace in recorded()} == {"stories", "texts", "together"}


@pytest.mark.parametrize("policy", [LRU, FREQUENCY, SHIPPED], ids=lambda policy: policy.name)
def test_a_simulation_conserves(policy: object) -> None:
    """Whatever was traded, afterwards every slab is somewhere, every expert at most once, and K/V is given back."""
    trace = next(trace for trace in recorded() if trace.name == "together")
    simulation = Simulation(trace, policy, Setting(slots=0.5))  # type: ignore[arg-type]
    result = simulation.run()
    simulation.ledger.check()
    simulation.arena.check()
    assert result.refusals > 0, "K/V was never short of memory"
    assert not any(record.kind is RangeKind.KV for record in simulation.ledger.ranges.values())
    states = [simulation.ledger.slabs_in("gpu0", state) for state in (SlabState.FREE, SlabState.LEASED)]
    assert sum(map(len, states)) == 12


def test_a_trace_is_kept_whole() -> None:
    """What is recorded comes back from its file as it was."""
    for trace in recorded():
        assert trace.routed.shape[1:] == (6, 4) and trace.n == 96
        assert len(trace) == len(trace.prompt) == len(trace.conversation)
        assert (np.sort(trace.routed, axis=2)[:, :, 1:] != np.sort(trace.routed, axis=2)[:, :, :-1]).all()
        assert trace.routed.max() < trace.n_experts


def test_nothing_moves_without_exchanges_or_growth() -> None:
    """With as many slots as experts and no K/V to speak of, everything hits and nothing moves."""
    routed = np.tile(np.arange(4, dtype=np.uint16), (64, 2, 1))
    trace = Trace("t", 8, routed, np.zeros(64, np.bool_), np.zeros(64, np.uint16))
    result = Simulation(trace, SHIPPED, Setting(slots=1.25)).run()
    assert (result.hit_rate, result.refusals) == (1.0, 0)
