"""Asking clients for memory before others are refused: what the daemon does meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from strata_api.v1 import memory_pb2

from tests.helpers.in_process import SLAB_BYTES, Host, run
from vmmd.core.arbiter import Short
from vmmd.errors import Exhausted, LeaseRevoked, NotFound
from vmmd.manager import recalls
from vmmd.manager.session import Session

SLABS = 12


class _Lender:
    """A session whose one range has the whole device, and what it is asked for."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.session = host.connect("user")
        self.asked: list[memory_pb2.ShrinkRequest] = []
        self.session.watcher = self._watch
        record = host.manager.kv.create(self.session, "", 0, 16, 16 * SLABS, shrinkable=True)
        self.range_id = record.range_id
        self.answer: Callable[[int], None] = lambda slabs: None

    def _watch(self) -> None:
        while self.session.events:
            event = self.session.events.popleft()
            if event.HasField("shrink_request"):
                self.asked.append(event.shrink_request)

    async def fill(self) -> None:
        grown = await self.host.manager.kv.grow(self.session, [(self.range_id, 16 * SLABS)])
        self.host.manager.acknowledge(self.session, grown.batch_id)

    async def keep(self, slabs: int) -> None:
        await self.host.manager.kv.shrink(self.session, self.range_id, 16 * slabs)


def _scenario(body: Callable[[Host, _Lender], Coroutine[Any, Any, None]], deadline_s: float = 30.0) -> None:
    async def scenario() -> None:
        host = Host(SLABS, 4)
        host.manager.options = replace(host.manager.options, revoke_deadline_s=deadline_s)
        try:
            lender = _Lender(host)
            await lender.fill()
            await body(host, lender)
            host.state()
        finally:
            await host.close()

    run(scenario)


async def _begin_growth(host: Host, session: Session, range_id: int, slabs: int) -> "asyncio.Task[Any]":
    """A growth that waits for somebody's answer."""
    task = asyncio.create_task(host.manager.kv.grow(session, [(range_id, 16 * slabs)]))
    for _ in range(20):  # turns of the loop: nothing else is waited for before that
        await asyncio.sleep(0)
    return task


def test_what_is_missing_is_asked_for_and_no_more() -> None:
    """The request names the slabs that free memory falls short by, and the deadline."""

    async def body(host: Host, lender: _Lender) -> None:
        await lender.keep(SLABS - 2)
        growing = await _begin_growth(host, host.session, host.range(), 5)
        assert [(r.range_id, r.slabs, r.deadline_ms) for r in lender.asked] == [(lender.range_id, 3, 30_000)]
        assert not growing.done()
        await lender.keep(SLABS - 5)
        assert (await growing).free_slabs == 5

    _scenario(body)


def test_a_refusal_says_what_was_short() -> None:
    """Of a request beside all that could be had without asking anybody."""

    async def body(host: Host, lender: _Lender) -> None:
        await lender.keep(SLABS - 2)
        host.manager.ledger.ranges[lender.range_id].shrinkable = False
        with pytest.raises(Short) as caught:
            await host.manager.kv.grow(host.session, [(host.range(), 16 * 5)])
        assert (caught.value.device, caught.value.slabs) == ("SIM-0", 3)
        assert (caught.value.requested_bytes, caught.value.free_bytes) == (5 * SLAB_BYTES, 2 * SLAB_BYTES)

    _scenario(body)


def test_two_that_wait_are_both_served() -> None:
    """A range that is being asked is asked again only once it has answered; then for what the second misses."""

    async def body(host: Host, lender: _Lender) -> None:
        first = await _begin_growth(host, host.session, host.range(), 3)
        second = await _begin_growth(host, host.session, host.range(), 3)
        assert len(lender.asked) == 1
        await lender.keep(SLABS - 3)
        while len(lender.asked) < 2:  # by the other, whichever looked first and took what had come
            await asyncio.sleep(0.005)
        await lender.keep(SLABS - 6)
        assert [(await growing).free_slabs for growing in (first, second)] == [3, 3]

    _scenario(body)


def test_who_was_answered_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A growth comes to its end though somebody else has asked the same range again before it looks."""

    async def body(host: Host, lender: _Lender) -> None:
        monkeypatch.setattr(recalls, "LOOK_S", 0.2)
        first = await _begin_growth(host, host.session, host.range(), 3)
        monkeypatch.setattr(recalls, "LOOK_S", 0.001)
        second = await _begin_growth(host, host.session, host.range(), 5)
        await lender.keep(SLABS - 3)
        for missing, kept in ((2, SLABS - 5), (3, SLABS - 8)):
            while lender.asked[-1].slabs != missing or len(lender.asked) < 2:
                await asyncio.sleep(0.001)
            assert (await first).free_slabs == 3
            assert not second.done()
            await lender.keep(kept)
        assert (await second).free_slabs == 5

    _scenario(body)


def test_a_lender_that_dies_gives_all_it_had() -> None:
    """Nobody waits for the answer of a session that has ended."""

    async def body(host: Host, lender: _Lender) -> None:
        growing = await _begin_growth(host, host.session, host.range(), 3)
        host.manager.disconnect(lender.session, "the test says so")
        assert (await growing).free_slabs == 3

    _scenario(body)


def test_a_silent_lender_is_asked_again_once_it_has_shrunk() -> None:
    """Past the deadline the growth is refused; until the range shrinks nobody waits for it any more."""

    async def body(host: Host, lender: _Lender) -> None:
        for _ in range(2):
            with pytest.raises(Exhausted):
                await host.manager.kv.grow(host.session, [(host.range(), 16)])
        assert len(lender.asked) == 1
        await lender.keep(SLABS)
        growing = await _begin_growth(host, host.session, host.range(), 1)
        assert len(lender.asked) == 2
        with pytest.raises(Exhausted):
            await growing

    _scenario(body, 0.2)


def test_a_range_that_is_closed_while_it_grows_gets_nothing() -> None:
    """What comes for it afterwards is free again, and the range is forgotten."""

    async def body(host: Host, lender: _Lender) -> None:
        range_id = host.range()
        growing = await _begin_growth(host, host.session, range_id, 3)
        await host.manager.kv.close(host.session, range_id)
        await lender.keep(SLABS - 3)
        with pytest.raises(LeaseRevoked):
            await growing
        ledger = host.manager.ledger
        assert range_id not in ledger.ranges
        assert len(ledger.free_slabs("SIM-0", "user")) + ledger.room_slabs("SIM-0") == 3
        for use in (host.manager.kv.close(host.session, range_id), host.manager.kv.shrink(host.session, range_id, 0)):
            with pytest.raises(NotFound):
                await use

    _scenario(body)


def test_a_range_is_closed_by_its_own_session_alone() -> None:
    """Another session's range is not found."""

    async def body(host: Host, lender: _Lender) -> None:
        with pytest.raises(NotFound):
            await host.manager.kv.close(host.session, lender.range_id)
        await host.manager.kv.close(lender.session, lender.range_id)
        assert lender.range_id not in host.manager.ledger.ranges

    _scenario(body)
