"""Policy: what a decision costs the daemon with 64 clients, and hit rates beside those of simpler policies."""

import asyncio
import os
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.bench import report
from tests.bench.report import Row
from tests.bench.simulate import FREQUENCY, LRU, Setting, Simulation
from tests.bench.test_manager import EXPERTS, LAYERS, MATRIX_BYTES, SLAB_BYTES, WEIGHTS_BYTES, Bench, N
from tests.bench.traces import made_up, recorded
from vmmd.core import arbiter, decisions
from vmmd.core.arbiter import Request
from vmmd.core.averages import BATCH_TOKENS, Averages
from vmmd.core.ledger import Share, UserRecord
from vmmd.core.policy import SHIPPED
from vmmd.manager import Manager
from vmmd.manager.session import Session

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

CLIENTS, DECISIONS = 64, 1000
STATIONARY = ("uniform", "zipf-0.8", "zipf-1.2")
MACHINE = f"{platform.machine()}-{os.cpu_count()}-CPUs"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A model's file, all zeros and no blocks."""
    path = tmp_path / "model"
    path.touch()
    os.truncate(path, WEIGHTS_BYTES + N * 3 * MATRIX_BYTES)
    yield path


def test_decisions(file: Path) -> None:
    """Deciding and planning a growth, with 64 clients on a device that 18 GiB of experts and K/V fill."""
    report.write("decisions", MACHINE, "no driver", asyncio.run(_decisions(file)))


async def _decisions(file: Path) -> list[Row]:
    bench, random = Bench(file), np.random.default_rng(0)
    manager, ledger = bench.manager, bench.manager.ledger
    clients = [_connect(bench, n) for n in range(CLIENTS - 1)]
    model, _ = await bench.open()
    ranges = [manager.kv.create(s, "", 0, 16, 16 * 4096).range_id for s in (bench.session, *clients)]
    for n, range_id in enumerate(ranges):
        session = bench.session if n == 0 else clients[n - 1]
        session.batches.pop((await manager.kv.grow(session, [(range_id, 16 * 2)])).batch_id)
    ledger.devices["NULL-0"].cap_bytes = ledger.slab_count("NULL-0") * SLAB_BYTES  # nothing is free
    assert arbiter.free_for(ledger, "NULL-0", "user") == 0

    def decide() -> list[float]:
        """Milliseconds of each decision: planning is pure, so each is made three times, and the quickest counts."""
        spent = []
        for n in range(DECISIONS):
            model.arena.heat = random.zipf(1.5, model.arena.geometry.n).astype(np.float64)
            requests = [Request(ranges[n % CLIENTS], 1 + n % 8)]
            spent.append(min(_seconds(manager, requests) for _ in range(3)) * 1e3)
        return spent

    without = decide()
    for n, client in enumerate(clients):
        ledger.users[client.record.uid] = UserRecord("user", Share(SLAB_BYTES * (n % 3), None))
    with_shares = decide()
    averages = Averages(N, 32.0)
    counts = np.full(N, 0.1)
    began = time.thread_time()
    for _ in range(100):
        averages.add(counts * BATCH_TOKENS, BATCH_TOKENS)
    learning = (time.thread_time() - began) * 10
    await bench.close()
    return [
        Row("a decision and its plan, 64 clients, p50", float(np.quantile(without, 0.5)), "ms", "lower"),
        Row("the same, p99", float(np.quantile(without, 0.99)), "ms", "lower", target=2),
        Row(
            "with guarantees for each of 64 users, p99", float(np.quantile(with_shares, 0.99)), "ms", "lower", target=2
        ),
        Row(f"learning from {BATCH_TOKENS} tokens of {LAYERS} x {EXPERTS} experts", learning, "ms", "lower"),
    ]


def _seconds(manager: Manager, requests: Sequence[Request]) -> float:
    """The thread's own time for deciding and planning: others use the processor, too."""
    began = time.thread_time()
    now_s, holders = time.monotonic(), manager.holders()
    plan = arbiter.plan(manager.ledger, holders, requests, now_s=now_s, policy=manager.policy)
    decisions.of_plan(manager.ledger, holders, plan.devices[0], requests, now_s)
    spent_s = time.thread_time() - began
    assert plan.devices[0].trades
    return spent_s


def _connect(bench: Bench, n: int) -> Session:
    session = bench.manager.connect(os.getpid(), 1000 + n, 0, "user", "bench", os.pidfd_open(os.getpid()))
    session.watcher = session.events.clear
    return session


def test_hit_rates() -> None:
    """The shipped policy's hit rate less the best simpler one's, in percent of it, on every trace."""
    rows = []
    for slots in (0.25, 0.5, 0.75):
        for trace in [*made_up(), *recorded()]:
            results = [Simulation(trace, policy, Setting(slots=slots)).run() for policy in (SHIPPED, LRU, FREQUENCY)]
            shipped, *others = (result.hit_rate for result in results)
            target = -1.0 if trace.name in STATIONARY else 0.0
            gain = (shipped / max(others) - 1) * 100
            rows.append(Row(f"{trace.name}, slots for {slots:.0%} of the experts", gain, "%", "higher", target=target))
    report.write("policy", "simulated", "no driver", rows)
