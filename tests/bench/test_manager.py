"""The manager's own time for 18 GiB of experts: drivers and copies cost nothing here, and no GPU is needed."""

import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench import report
from tests.bench.report import Row
from tests.helpers.null_driver import GIB, NullDriver
from vmmd.core import arbiter, geometry
from vmmd.core.ledger import DeviceRecord
from vmmd.main import SWITCH_INTERVAL_S
from vmmd.manager import Manager, filling
from vmmd.manager.manager import Options
from vmmd.manager.session import Session
from vmmd.manager.upkeep import wanted_slabs

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

LAYERS, EXPERTS, MATRIX_BYTES = 51, 128, 983_040
SLAB_BYTES, WEIGHTS_BYTES = 64 << 20, 160 << 20
N = LAYERS * EXPERTS
FOR_16_GIB = 16 * GIB / (N * 3 * MATRIX_BYTES)
REFILL_SLABS, GROWTH_SLABS = 64, 6


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A model's file, all zeros and no blocks."""
    path = tmp_path / "model"
    path.touch()
    os.truncate(path, WEIGHTS_BYTES + N * 3 * MATRIX_BYTES)
    yield path


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """As in the daemon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before)


class Bench:
    """A manager and its one session, which maps at once what it is granted."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.driver = NullDriver()
        records = [
            DeviceRecord(d.uuid, d.name, SLAB_BYTES, d.total_bytes, d.total_bytes, is_host=d.is_host)
            for d in self.driver.devices()
        ]
        self.manager = Manager(self.driver, records, Options(give_back_delay_s=0))
        self.session: Session = self.manager.connect(os.getpid(), 0, 0, "user", "bench", os.pidfd_open(os.getpid()))
        self.session.watcher = self._read
        self._opened = 0

    def _read(self) -> None:
        while self.session.events:
            event = self.session.events.popleft()
            if event.HasField("slabs_added"):
                self.manager.acknowledge(self.session, event.slabs_added.batch_id)
            elif event.HasField("slabs_removed"):
                self.manager.released(self.session, event.slabs_removed.revocation_id)

    async def open(self) -> tuple[Any, dict[str, float]]:
        """Opens the model, with a layer less than the last time; returns it and ms by stage, as if it had 16 GiB."""
        layers = LAYERS - self._opened
        self._opened += 1
        self.session.add_files(self._opened, [os.open(self.file, os.O_RDONLY)], 10)
        stacks = [
            geometry.Stack(
                layer,
                m,
                0,
                EXPERTS,
                0,
                WEIGHTS_BYTES + (3 * layer + m) * EXPERTS * MATRIX_BYTES,
                MATRIX_BYTES,
                MATRIX_BYTES,
            )
            for layer in range(layers)
            for m in range(3)
        ]
        began, cpu = time.perf_counter(), time.process_time()
        shape, weights = (layers, EXPERTS, 8), [geometry.Extent(0, 0, WEIGHTS_BYTES)]
        model, _ = await self.manager.open_model(self.session, self._opened, "m", [], shape, stacks, weights)
        await asyncio.shield(model.ready)
        ready = time.perf_counter()
        for batch_id in self.manager.grant_model(self.session, model):
            self.session.batches.pop(batch_id, None)
        granted = time.perf_counter()
        await asyncio.wait([model.background])
        scale = FOR_16_GIB * N / model.arena.geometry.n * 1e3
        return model, {
            "ready": (ready - began) * scale,
            "granted": (granted - ready) * scale,
            "homes": (time.perf_counter() - granted) * scale,
            "processor": (time.process_time() - cpu) * scale,
        }

    async def close(self) -> None:
        self.manager.disconnect(self.session, "the bench ends")
        for model in list(self.manager.models.values()):
            await self.manager.drop_model(model)
        await self.manager.close()


def test_python(file: Path) -> None:
    """Opening with homes, growing by slots, and refilling: milliseconds of Python."""
    rows = asyncio.run(_run(file))
    report.write("manager-python", f"{platform.machine()}-{os.cpu_count()}-CPUs", "no driver", rows)


async def _run(file: Path) -> list[Row]:
    bench = Bench(file)
    manager, random = bench.manager, np.random.default_rng(0)
    openings = []
    for _ in range(4):
        model, spent = await bench.open()
        openings.append(spent)
        if len(openings) < 4:
            manager.close_model(bench.session, model.model_id)
            await manager.drop_model(model)
    arena = model.arena
    part_bytes = int(arena.geometry.slot_bytes[0])
    range_id = manager.kv.create(bench.session, "", 0, 16, 16 * 4096).range_id
    room = arbiter.free_for(manager.ledger, "NULL-0", "user")
    grown = await manager.kv.grow(bench.session, [(range_id, 16 * room)])
    bench.session.batches.pop(grown.batch_id)

    async def grow(slabs: int) -> float:
        arena.heat = random.zipf(1.5, arena.geometry.n).astype(np.float64)
        began = time.perf_counter()
        done = await manager.kv.grow(bench.session, [(range_id, 16 * (room + slabs))])
        took_s = time.perf_counter() - began
        bench.session.batches.pop(done.batch_id)
        assert sum(trade.slabs for trade in done.trades) == slabs
        return took_s * 1e3

    async def refill() -> tuple[float, float]:
        await manager.kv.shrink(bench.session, range_id, 16 * room)
        missing = arena.hottest_missing(part_bytes)
        began = time.perf_counter()
        await manager.upkeep.add_slabs(model, 0, wanted_slabs(arena, 0))
        added = time.perf_counter()
        first = next(filling.slots(model, missing[:50], arena.empty_slots(0)[part_bytes][:50]))
        laid_out = time.perf_counter()
        assert first.copies
        while await filling.refill(model, 8 * GIB):
            pass
        ended = time.perf_counter()
        assert arena.resident.all() and arbiter.free_for(manager.ledger, "NULL-0", "user") == 0
        return (laid_out - added) * 1e3, (ended - began - (laid_out - added)) * 1e3

    growths, layouts, refills = [], [], []
    for _ in range(10):
        growths.append(await grow(GROWTH_SLABS))
        await refill()
    for _ in range(5):
        await grow(REFILL_SLABS)
        layout, whole = await refill()
        layouts.append(layout)
        refills.append(whole)
    await bench.close()
    best = {key: min(spent[key] for spent in openings) for key in openings[0]}
    return [
        Row("16 GiB of experts: until steps can start", best["ready"], "ms", "lower", target=100),
        Row("the same, first time", openings[0]["ready"], "ms", "lower"),
        Row("granting all of it", best["granted"], "ms", "lower"),
        Row("then until every home is published", best["homes"], "ms", "lower"),
        Row("processor time of all that", best["processor"], "ms", "lower"),
        Row("growth by 6 slabs of the arena, p50", statistics.median(growths), "ms", "lower"),
        Row("refilling 4 GiB: until its first chunk is laid out", statistics.median(layouts), "ms", "lower", target=5),
        Row("the same, all of it", statistics.median(refills), "ms", "lower"),
    ]
