"""Exchanges: what clients route to becomes resident, whatever else goes on, and no faster than is allowed."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from tests.helpers.faulty_driver import FaultyDriver
from tests.helpers.in_process import Host, run
from tests.helpers.peer import MATRIX_BYTES, SLOT_BYTES, SmallModel, public_model, write_model
from vmmd.core.residency import EMPTY
from vmmd.driver.base import Copy
from vmmd.manager.placement import Placement
from vmmd.manager.session import Session

SLABS = 8  # one of weights, 7 of 5 slots: 35 of 64 experts are resident
PAGE = pages.HEADER_WORDS


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


class Watched(FaultyDriver):
    """Tells when bytes were copied, and lets the next copies wait at a gate once it is closed."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.clock = Clock()
        self.copied: list[tuple[float, int]] = []
        self.gate = threading.Event()
        self.closed = self.waiting = False

    def fill(self, copies: Sequence[Copy]) -> None:
        self.copied.append((self.clock.now_s, sum(copy.size_bytes for copy in copies)))
        if self.closed:
            self.closed, self.waiting = False, True
            assert self.gate.wait(30)
        super().fill(copies)


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


def watched(host: Host) -> Watched:
    assert isinstance(host.driver, Watched)
    return host.driver


async def opened_host(model: SmallModel, slabs: int = SLABS, bytes_per_s: int = 8 << 30) -> tuple[Host, Any]:
    host = Host(slabs, wrap=Watched)
    host.manager.options = replace(host.manager.options, placement_bytes_per_s=bytes_per_s)
    clock = watched(host).clock
    host.manager.placement = Placement(host.manager, clock.time, clock.sleep)
    opened = await host.open(model)
    return host, opened


def route(opened: Any, session: Session, experts: Sequence[int], tokens: int = 200) -> None:
    """What a client writes after so many tokens that went to these experts alone."""
    words = session.heat[opened.model_id].page.words
    for expert in experts:
        words[PAGE + expert] += tokens
    words[pages.WORD_DECODED] += tokens
    assert opened.count_heat()


async def exchange(host: Host, opened: Any) -> None:
    """One look at a model, until nothing is under way any more."""
    host.manager.placement.begin(opened)
    await until(lambda: not host.manager.placement.is_under_way(opened))


async def until(condition: Any) -> None:
    for _ in range(5000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not happen")


def begin_step(opened: Any, session: Session) -> None:
    line: Any = session.line(session.attachment(opened))
    line[pages.WORD_RING + (line[pages.WORD_LAUNCHED] + 1) % pages.RING_WORDS] = opened.table.generation
    line[pages.WORD_LAUNCHED] += 1


def end_step(opened: Any, session: Session) -> None:
    line: Any = session.line(session.attachment(opened))
    line[pages.WORD_RETIRED] += 1


def check(host: Host, opened: Any, path: Path) -> None:
    """Every expert that is said to be in a slot is there, byte for byte, and the table says the same."""
    host.manager.ledger.check()
    arena = opened.arena
    arena.check()
    data = path.read_bytes()
    for expert in range(arena.geometry.n):
        slot = arena.slot_of(expert)
        if slot is None:
            assert opened.table.entry(expert) == opened.table.home(expert) != 0
            continue
        assert pages.unpack(opened.table.entry(expert)) == (pages.TIER_DEVICE, *slot)
        assert bytes_in(host, opened, slot) == bytes_of(data, arena, expert), expert


def bytes_in(host: Host, opened: Any, slot: Any) -> bytes:
    part, slab, at = slot
    return host.driver.read(opened.slabs[opened.ranges[part].slabs[slab]], at * SLOT_BYTES, SLOT_BYTES)


def bytes_of(data: bytes, arena: Any, expert: int) -> bytes:
    return b"".join(data[at : at + MATRIX_BYTES] for at in arena.geometry.offset_bytes[expert].tolist())


def missing(opened: Any) -> list[int]:
    return [int(e) for e in np.flatnonzero(~opened.arena.resident)]


def test_what_is_routed_to_becomes_resident(model: SmallModel) -> None:
    """Experts that a session routes to take the slots of those that it does not, and again when it changes its mind."""

    async def scenario() -> None:
        host, opened = await opened_host(model)
        try:
            for _ in range(3):
                hot = missing(opened)[:20]
                assert len(hot) == 20
                route(opened, host.session, hot, 2000)
                await exchange(host, opened)
                assert opened.arena.resident[hot].all()
                assert opened.arena.heat_covered() > 0.95
                assert int(opened.arena.resident.sum()) == 35
                check(host, opened, model.path)
            assert opened.exchanged >= 60
        finally:
            await host.close()

    run(scenario)


def test_upkeep_sees_to_it(model: SmallModel) -> None:
    """Nobody has to ask: upkeep finds what was routed to."""

    async def scenario() -> None:
        host, opened = await opened_host(model)
        try:
            host.manager.upkeep.start()
            hot = missing(opened)[:20]
            words = host.session.heat[opened.model_id].page.words
            for expert in hot:
                words[PAGE + expert] = 500
            words[pages.WORD_DECODED] = 500
            await until(lambda: opened.arena.resident[hot].all())
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_nothing_moves_where_no_rate_is_allowed(model: SmallModel) -> None:
    """With a rate of 0 experts stay where they were put."""

    async def scenario() -> None:
        host, opened = await opened_host(model, bytes_per_s=0)
        try:
            before = opened.arena.place.copy()
            route(opened, host.session, missing(opened)[:20])
            await exchange(host, opened)
            assert (opened.arena.place == before).all()
        finally:
            await host.close()

    run(scenario)


def test_the_rate_is_kept(model: SmallModel) -> None:
    """By the clock, no stretch of time sees more bytes copied than the rate allows and one batch."""
    rate = 100_000

    async def scenario() -> None:
        host, opened = await opened_host(model, bytes_per_s=rate)
        driver = watched(host)
        try:
            route(opened, host.session, missing(opened)[:25], 2000)
            driver.copied.clear()
            await exchange(host, opened)
            assert opened.arena.heat_covered() > 0.95
            copied, batch = driver.copied, max(size for _, size in driver.copied)
            assert sum(size for _, size in copied) == 25 * SLOT_BYTES
            assert len(copied) >= 25 // (35 // 16 or 1) and batch <= 35 // 16 * SLOT_BYTES
            for i in range(len(copied)):
                for j in range(i, len(copied)):
                    spent = sum(size for _, size in copied[i : j + 1])
                    assert spent <= (copied[j][0] - copied[i][0]) * rate + batch + 1
        finally:
            await host.close()

    run(scenario)


def test_a_reader_that_hangs_delays_its_own_arena_only(model: SmallModel, tmp_path: Path) -> None:
    """No slot is written that a step may read; other models' experts move on; when the step ends, everything heals."""

    async def scenario() -> None:
        host, opened = await opened_host(model, 20)
        try:
            data = model.path.read_bytes()
            grown = await host.manager.kv.grow(host.session, [(host.range(), 16 * 12)])
            host.fetch(grown.batch_id)
            other_session = host.connect("user")
            other = await host.open(write_model(tmp_path / "model", 2, 20), other_session)
            begin_step(opened, host.session)
            before = [(opened.arena.slot_of(e), e) for e in np.flatnonzero(opened.arena.resident).tolist()]
            hot, hot_there = missing(opened)[:10], missing(other)[:4]
            assert hot and hot_there
            route(opened, host.session, hot)
            host.manager.placement.begin(opened)
            route(other, other_session, hot_there)
            await exchange(host, other)
            assert other.arena.resident[hot_there].all()
            await until(lambda: not host.manager.placement.is_under_way(opened))  # the deadline has passed
            await exchange(host, opened)  # it does not insist
            for slot, expert in before:
                assert bytes_in(host, opened, slot) == bytes_of(data, opened.arena, expert)
            assert opened.movable and not opened.arena.resident[hot].any()
            end_step(opened, host.session)
            await until(lambda: not opened.releasing)
            await host.manager.upkeep._give_back(opened)
            await exchange(host, opened)
            assert opened.arena.resident[hot].all()
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_a_growth_does_not_wait_for_an_exchange(model: SmallModel) -> None:
    """While a batch's copies hang, a range grows out of the other slabs of the same arena."""

    async def scenario() -> None:
        host, opened = await opened_host(model, 12)
        driver = watched(host)
        try:
            hot = missing(opened)[:6]
            route(opened, host.session, hot)
            range_id = host.range()
            driver.closed = True
            host.manager.placement.begin(opened)
            await until(lambda: driver.waiting)
            grown = await host.manager.kv.grow(host.session, [(range_id, 16 * 4)])
            assert host.fetch(grown.batch_id) == 4
            assert sum(trade.slabs for trade in grown.trades) == 4
            assert sum(slab.busy for slab in opened.arena.parts[0].slabs.values()) == 3
            assert host.manager.placement.is_under_way(opened)
            driver.gate.set()
            await until(lambda: not host.manager.placement.is_under_way(opened))
            await exchange(host, opened)
            assert opened.arena.resident[hot].all()
            check(host, opened, model.path)
        finally:
            driver.gate.set()
            await host.close()

    run(scenario)


def test_slabs_that_are_being_given_away_are_left_alone(model: SmallModel) -> None:
    """An exchange begun while a trade waits for a step puts nothing into the trade's slabs."""

    async def scenario() -> None:
        host, opened = await opened_host(model)
        try:
            host.manager.options = replace(host.manager.options, quiesce_deadline_s=30.0)
            opened.quiesce_deadline_s = 30.0
            range_id = host.range()
            # the last three slabs are the coldest and go; expert 20 moves to expert 0's slot first
            route(opened, host.session, [*range(1, 20), 20, 25, 30])
            begin_step(opened, host.session)
            hot = missing(opened)[:12]
            growth = asyncio.create_task(host.manager.kv.grow(host.session, [(range_id, 16 * 3)]))
            await until(lambda: opened.working)
            route(opened, host.session, hot, 1000)
            host.manager.placement.begin(opened)
            await until(lambda: opened.working == 2)
            assert all(opened.arena.resident[[21, 34]]), "the trade waits for its first step"
            end_step(opened, host.session)
            assert host.fetch((await growth).batch_id) == 3
            await until(lambda: not host.manager.placement.is_under_way(opened))
            assert opened.arena.resident[hot].all()
            assert len(opened.ranges[0].slabs) == 4
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_copies_that_fail_lose_nothing(model: SmallModel) -> None:
    """After a failed batch its experts are at their homes, its slots empty; the next ones fill them."""

    async def scenario() -> None:
        host, opened = await opened_host(model)
        try:
            hot = missing(opened)[:8]
            route(opened, host.session, hot)
            host.driver.fail_at("fill", 2)
            await exchange(host, opened)
            check(host, opened, model.path)
            occupants = [slab.occupants for slab in opened.arena.parts[0].slabs.values()]
            assert sum(int((o == EMPTY).sum()) for o in occupants) == 2
            await host.manager.upkeep._give_back(opened)
            await exchange(host, opened)
            assert opened.arena.resident[hot].all() and int(opened.arena.resident.sum()) == 35
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_generations_say_when_slots_change(model: SmallModel) -> None:
    """Each batch is two generations: the cold experts are at their homes, then the hot ones in their slots."""

    async def scenario() -> None:
        host, opened = await opened_host(model)
        driver = watched(host)
        try:
            hot = missing(opened)[:2]
            route(opened, host.session, hot)
            seen = [opened.table.generation]
            driver.closed = True
            host.manager.placement.begin(opened)
            await until(lambda: driver.waiting)
            seen.append(opened.table.generation)
            assert int(opened.arena.resident.sum()) == 33 and not opened.arena.resident[hot].any()
            at_home = [opened.table.entry(e) == opened.table.home(e) for e in range(model.n)]
            assert at_home == (~opened.arena.resident).tolist()
            driver.gate.set()
            await until(lambda: not host.manager.placement.is_under_way(opened))
            seen.append(opened.table.generation)
            assert [b - a for a, b in pairwise(seen)] == [1, 1]
            check(host, opened, model.path)
        finally:
            driver.gate.set()
            await host.close()

    run(scenario)
