"""Conversations in a manager in this process: parked, reclaimed, spilled, expired, and what goes wrong meanwhile."""

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from strata_client.mapping import map_page
from strata_client.transcript import Transcript
from tests.helpers.in_process import SLAB_BYTES, Host, run
from tests.helpers.peer import SmallModel, write_model
from vmmd.core import arbiter, decisions
from vmmd.core.ledger import RangeRecord, Share, SlabState, UserRecord
from vmmd.errors import Exhausted, InvalidRequest, LeaseRevoked, NotFound, PreconditionFailed, VmmError
from vmmd.manager import conversations
from vmmd.manager.conversations import Conversation
from vmmd.manager.session import Kind, Session
from vmmd.manager.shared import SharedPage

CELLS = 16
"""Of a slab."""

CELLS_MAX = 20 * CELLS


@pytest.fixture
def model(tmp_path: Path) -> SmallModel:
    """A model of 12 slots, of which 5 fit a slab."""
    return write_model(tmp_path / "model", 2, 6)


class Talk:
    """A conversation as a client in this process has it."""

    def __init__(self, host: Host, session: Session) -> None:
        self.host, self.session = host, session
        self.record: RangeRecord
        self.transcript: Transcript
        self.began_anew = ""

    async def open(
        self, model_id: int, name: str = "x", cells_max: int = CELLS_MAX, layout: str = "l", cells_per_slab: int = CELLS
    ) -> "Talk":
        """Errors: as `Conversations.open`."""
        manager = self.host.manager
        opened = await manager.conversations.open(self.session, name, layout, "", model_id, cells_per_slab, cells_max)
        self.record, self.began_anew = opened.record, opened.began_anew
        found, _, total = manager.descriptors(self.session, opened.batch_id, 0, 250)
        assert len(found) == total == 1 + len(self.record.slabs)
        for item, fd in found:
            if item.kind == Kind.KIND_TOKENS:
                self.transcript = Transcript(map_page(fd, pages.tokens_bytes(cells_max), writable=True))
            else:
                os.close(fd)
        manager.acknowledge(self.session, opened.batch_id)
        return self

    async def say(self, *tokens: int) -> None:
        """Grows to the cells of these tokens, and says so in each: the first bytes of a slab are its first token."""
        manager = self.host.manager
        cells = self.transcript.complete + len(tokens)
        grown = await manager.kv.grow(self.session, [(self.record.range_id, cells)])
        if grown.batch_id:
            self.host.fetch(grown.batch_id, self.session)
            manager.acknowledge(self.session, grown.batch_id)
        self.transcript.add(tokens)
        for index, slab_id in self.record.slabs.items():
            token = int(self.transcript._tokens[index * CELLS])
            fd = manager.driver.export(manager.physical[slab_id], writable=True)
            os.pwrite(fd, np.full(SLAB_BYTES // 8, token, np.uint64).tobytes(), 0)
            os.close(fd)

    async def leave(self) -> int:
        """Parks it by the client's word, and lets go of its page."""
        if hasattr(self, "transcript"):
            del self.transcript
        return await self.host.manager.conversations.park(self.session, self.record.range_id)

    def is_intact(self) -> bool:
        """Whether every slab that it has says what `say` wrote."""
        manager = self.host.manager
        return all(
            manager.driver.read(manager.physical[s], 0, SLAB_BYTES)
            == np.full(SLAB_BYTES // 8, int(self.transcript._tokens[i * CELLS]), np.uint64).tobytes()
            for i, s in self.record.slabs.items()
        )


def found(host: Host, name: str = "x") -> Conversation | None:
    return next((c for c in host.manager.conversations.of(None) if c.key.name == name), None)


def the(host: Host, name: str = "x") -> Conversation:
    conversation = found(host, name)
    assert conversation is not None
    return conversation


def with_options(host: Host, **options: Any) -> None:
    host.manager.options = dataclasses.replace(host.manager.options, **options)


async def refusal(doing: Awaitable[Any], kind: type[VmmError]) -> str:
    with pytest.raises(kind) as refused:
        await doing
    return refused.value.message


async def until(true: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while asyncio.get_running_loop().time() < deadline:
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("timed out")


async def parked(host: Host, model_id: int, name: str, slabs: int, first: int = 100) -> None:
    """A conversation of so many slabs, whose tokens count from `first` on."""
    talk = await Talk(host, host.session).open(model_id, name)
    await talk.say(*range(first, first + slabs * CELLS))
    assert await talk.leave() == slabs * CELLS


def test_another_session_goes_on(model: SmallModel) -> None:
    """What was said is there in the next session, what was beyond is free, and the owner is charged all the while."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        first = await Talk(host, host.session).open(opened.model_id)
        await first.say(*range(100, 100 + 2 * CELLS))
        await host.manager.kv.grow(host.session, [(first.record.range_id, 5 * CELLS)])
        first.transcript.cut(CELLS + 3)
        assert the(host).state == "in use"
        assert await first.leave() == CELLS + 3
        assert (the(host).state, len(first.record.slabs), first.record.owner) == ("parked", 2, host.session.session_id)
        session = host.connect("user")
        await host.open(model, session)
        host.manager.disconnect(host.session, "left")
        assert host.session.session_id in host.manager.ledger.sessions
        second = await Talk(host, session).open(opened.model_id)
        assert (second.record, second.record.owner) == (first.record, session.session_id)
        assert host.session.session_id not in host.manager.ledger.sessions
        assert second.transcript.complete == CELLS + 3
        assert second.transcript.common(range(100, 200)) == CELLS + 3
        assert second.is_intact() and not second.began_anew
        host.state()
        await host.close()

    run(scenario)


def test_only_what_fits_is_used_again(model: SmallModel) -> None:
    """A session that asks for fewer cells gets no more, and the memory beyond is free."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 4)
        talk = await Talk(host, host.session).open(opened.model_id, cells_max=CELLS + 1)
        assert (talk.transcript.complete, sorted(talk.record.slabs), talk.record.slabs_max) == (CELLS + 1, [0, 1], 2)
        await refusal(host.manager.kv.grow(host.session, [(talk.record.range_id, CELLS + 2)]), InvalidRequest)
        await host.close()

    run(scenario)


def test_it_begins_anew_where_its_cells_are_of_no_use(model: SmallModel, tmp_path: Path) -> None:
    """Another layout, other slabs, a file that has changed: what was left is dropped, and the reply says why."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        for what, options in (("other cells: l", {"layout": "m"}), ("other cells: m", {"cells_per_slab": 2 * CELLS})):
            await parked(host, opened.model_id, "x", 2) if what[-1] == "l" else None
            talk = await Talk(host, host.session).open(opened.model_id, **{"layout": "m", **options})  # type: ignore[arg-type]
            assert what in talk.began_anew
            assert (talk.transcript.complete, len(talk.record.slabs)) == (0, 0)
            await talk.say(1)
            await talk.leave()
        changed = await host.open(write_model(tmp_path / "model", 2, 6))
        assert changed is not opened
        talk = await Talk(host, host.session).open(changed.model_id, layout="m", cells_per_slab=2 * CELLS)
        assert "a file that has changed since" in talk.began_anew
        host.state()
        await host.close()

    run(scenario)


def test_one_session_at_a_time(model: SmallModel) -> None:
    """While a session uses it others are refused, with its pid; they and it have no access to what is not theirs."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        session = host.connect("user")
        await host.open(model, session)
        talk = await Talk(host, host.session).open(opened.model_id)
        await talk.say(7)
        message = await refusal(Talk(host, session).open(opened.model_id), PreconditionFailed)
        assert f"in use by pid {os.getpid()}" in message
        await refusal(host.manager.conversations.drop(0, "x"), PreconditionFailed)
        await refusal(host.manager.conversations.park(session, talk.record.range_id), NotFound)
        await talk.leave()
        await refusal(talk.leave(), NotFound)
        await refusal(host.manager.kv.grow(host.session, [(talk.record.range_id, 64)]), NotFound)
        await refusal(host.manager.kv.shrink(host.session, talk.record.range_id, 0), NotFound)
        await Talk(host, session).open(opened.model_id)
        await refusal(host.manager.kv.grow(host.session, [(talk.record.range_id, 64)]), NotFound)
        await host.close()

    run(scenario)


def test_another_user_has_another_conversation(model: SmallModel) -> None:
    """The same name of another user, or of the same one in another domain, is another conversation."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 2)
        other = host.manager.connect(os.getpid(), 42, 0, "user", "test", os.pidfd_open(os.getpid()))
        stranger = host.connect("stranger")
        for session in (other, stranger):
            model_id = (await host.open(model, session)).model_id
            assert (await Talk(host, session).open(model_id)).transcript.complete == 0
        assert the(host).state == "parked" and len(host.manager.conversations.of(0)) == 2
        await refusal(host.manager.conversations.drop(43, "x"), NotFound)
        await host.close()

    run(scenario)


def test_nothing_granted_before_can_be_fetched_once_it_is_left(model: SmallModel) -> None:
    """A batch that was not fetched when the client left its conversation gives no descriptor of it any more."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 2)
        again = await host.manager.conversations.open(host.session, "x", "l", "", opened.model_id, CELLS, CELLS_MAX)
        await host.manager.conversations.park(host.session, again.record.range_id)
        assert host.fetch(again.batch_id) == 0
        await host.close()

    run(scenario)


def test_a_closed_page_is_exported_to_nobody(tmp_path: Path) -> None:
    """The descriptor of a page that was closed is not one that was opened since."""
    page = SharedPage("test", 4096, read_only=False)
    page.close()
    fds = [os.open(tmp_path, os.O_RDONLY) for _ in range(3)]
    with pytest.raises(OSError):
        page.export()
    for fd in fds:
        os.close(fd)


def test_a_shrunk_range_has_no_more_complete_cells_than_memory(model: SmallModel) -> None:
    """Cells whose memory was given back do not count again when other memory comes in its place."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        talk = await Talk(host, host.session).open(opened.model_id)
        await talk.say(*range(3 * CELLS))
        await host.manager.kv.shrink(host.session, talk.record.range_id, CELLS)
        await host.manager.kv.grow(host.session, [(talk.record.range_id, 3 * CELLS)])
        assert await talk.leave() == CELLS
        await host.close()

    run(scenario)


@pytest.mark.parametrize("claim", [0, 1 << 63])
def test_what_a_client_claims_is_clamped(model: SmallModel, claim: int) -> None:
    """No more cells are kept than there is memory for; a conversation of none is not kept at all."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        before = host.state()
        talk = await Talk(host, host.session).open(opened.model_id)
        await talk.say(1, 2, 3)
        talk.transcript._page[pages.WORD_COMPLETE] = claim
        assert await talk.leave() == (CELLS if claim else 0)
        assert (found(host) is not None) == bool(claim)
        assert claim or host.state() == before
        await host.close()

    run(scenario)


def test_a_client_that_keeps_its_memory_loses_the_conversation(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever still holds a slab may write to it: such cells are given to nobody, and stay charged to the holder."""
    monkeypatch.setattr(conversations, "HELD_DEADLINE_S", 0.05)

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        talk = await Talk(host, host.session).open(opened.model_id)
        await talk.say(*range(2 * CELLS))
        held = host.manager.physical[talk.record.slabs[1]]
        fd = host.manager.driver.export(held, writable=True)
        assert await talk.leave() == 0
        assert found(host) is None
        device = talk.record.device
        await until(lambda: len(host.manager.ledger.slabs_in(device, SlabState.QUARANTINED)) == 1)
        os.close(fd)
        await host.close()

    run(scenario)


def test_a_session_that_ends_without_its_process_loses_the_conversation(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was cut off may go on writing: without its word or its end nothing is parked."""
    monkeypatch.setattr(conversations, "END_DEADLINE_S", 0.05)

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        session = host.connect("user")
        await host.open(model, session)
        talk = await Talk(host, session).open(opened.model_id)
        await talk.say(*range(2 * CELLS))
        host.manager.disconnect(session, "it was cut off")
        assert the(host).state == "settling"
        waiting = asyncio.create_task(Talk(host, host.session).open(opened.model_id))
        assert (await waiting).transcript.complete == 0
        assert session.session_id not in host.manager.ledger.sessions
        await host.close()

    run(scenario)


def test_what_has_been_parked_for_too_long_is_dropped(model: SmallModel) -> None:
    """Each conversation is dropped when it has been parked for as long as is configured, counted from its last use."""

    async def scenario() -> None:
        host = Host()
        now = 1000.0
        host.manager.conversations.clock = lambda: now
        with_options(host, conversation_expiry_s=100.0)
        opened = await host.open(model)
        before = host.state()
        await parked(host, opened.model_id, "old", 2)
        now = 1060.0
        await parked(host, opened.model_id, "new", 2)
        in_use = await Talk(host, host.session).open(opened.model_id, "busy")
        now = 1099.0
        host.manager.conversations.expire()
        assert found(host, "old") and found(host, "new")
        now = 1100.0
        host.manager.conversations.expire()
        assert found(host, "old") is None and found(host, "new")
        await (await Talk(host, host.session).open(opened.model_id, "new")).leave()
        now = 1199.0
        host.manager.conversations.expire()
        assert found(host, "new")
        now = 9999.0
        host.manager.conversations.expire()
        assert found(host, "new") is None and the(host, "busy").session is host.session
        await in_use.leave()
        assert host.state() == before
        await host.close()

    run(scenario)


def test_a_user_has_so_many_conversations(model: SmallModel) -> None:
    """At the limit a new one takes the place of the longest parked; where all are in use it is refused."""

    async def scenario() -> None:
        host = Host()
        with_options(host, conversations_per_user_max=2)
        opened = await host.open(model)
        await parked(host, opened.model_id, "a", 1)
        await parked(host, opened.model_id, "b", 1)
        await refusal(Talk(host, host.session).open(opened.model_id, "c", cells_per_slab=3), InvalidRequest)
        assert found(host, "a") and found(host, "b")
        await Talk(host, host.session).open(opened.model_id, "c")
        assert found(host, "a") is None and found(host, "b")
        await Talk(host, host.session).open(opened.model_id, "d")
        message = await refusal(Talk(host, host.session).open(opened.model_id, "e"), Exhausted)
        assert "conversations_per_user_max" in message
        host.state()
        await host.close()

    run(scenario)


@pytest.mark.parametrize(
    "bad", [{"name": "../x"}, {"name": ""}, {"layout": "a\nb"}, {"layout": "x" * 101}, {"cells_max": 0}]
)
def test_what_makes_no_sense_is_refused(model: SmallModel, bad: dict[str, Any]) -> None:
    """Names, layouts and sizes out of range are refused, and nothing has changed."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        before = host.state()
        await refusal(Talk(host, host.session).open(opened.model_id, **bad), InvalidRequest)
        await refusal(Talk(host, host.session).open(opened.model_id, cells_max=1 << 40), InvalidRequest)
        await refusal(Talk(host, host.session).open(opened.model_id + 1), NotFound)
        await refusal(Talk(host, host.session).open(0), NotFound)
        assert host.state() == before
        await host.close()

    run(scenario)


def test_the_longest_parked_give_first_and_from_their_ends(model: SmallModel) -> None:
    """A growth that finds nothing free takes the end of the longest parked conversation; the beginning stays of use."""

    async def scenario() -> None:
        host = Host(device_slabs=14)
        opened = await host.open(model)
        arena = len(opened.ranges[0].slabs)
        await parked(host, opened.model_id, "old", 4)
        await parked(host, opened.model_id, "new", 4, first=500)
        free = 14 - arena - len(opened.weights.slabs) - 8
        growing = host.range()
        await host.manager.kv.grow(host.session, [(growing, CELLS * (free + 3))])
        assert (the(host, "old").complete, the(host, "new").complete) == (CELLS, 4 * CELLS)
        await host.manager.kv.grow(host.session, [(growing, CELLS * (free + 5))])
        assert found(host, "old") is None and the(host, "new").complete == 3 * CELLS
        assert len(opened.ranges[0].slabs) == arena
        talk = await Talk(host, host.session).open(opened.model_id, "new")
        assert talk.transcript.common(range(500, 600)) == 3 * CELLS and talk.is_intact()
        host.state()
        await host.close()

    run(scenario)


def test_a_refused_growth_leaves_conversations_alone(model: SmallModel) -> None:
    """What conversations could not make possible either takes nothing of them."""

    async def scenario() -> None:
        host = Host(device_slabs=14)
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 4)
        before = host.state()
        await refusal(host.manager.kv.grow(host.session, [(host.range(), CELLS * 14)]), Exhausted)
        assert the(host).complete == 4 * CELLS
        assert host.state() == before
        await host.close()

    run(scenario)


def test_what_is_taken_goes_to_the_host_and_comes_back(model: SmallModel) -> None:
    """With room on the host a conversation is moved there whole, and back, byte for byte, when it is wanted again."""

    async def scenario() -> None:
        host = Host(device_slabs=14)
        with_options(host, conversation_spill_bytes=6 * SLAB_BYTES)
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 6)
        device = the(host).record.device
        growing = host.range()
        room = arbiter.free_for(host.manager.ledger, device, "user")
        await host.manager.kv.grow(host.session, [(growing, CELLS * (room + 1))])
        assert (the(host).state, the(host).complete) == ("spilled", 6 * CELLS)
        assert the(host).record.device == host.manager.host
        await host.manager.kv.grow(host.session, [(growing, CELLS * (room + 6))])
        before = host.state()
        message = await refusal(Talk(host, host.session).open(opened.model_id), Exhausted)
        assert "asked for" in message
        assert host.state() == before and the(host).state == "spilled"
        await host.manager.kv.shrink(host.session, growing, 0)
        talk = await Talk(host, host.session).open(opened.model_id)
        assert talk.record.device == device
        assert talk.transcript.common(range(100, 200)) == 6 * CELLS and talk.is_intact()
        await talk.leave()
        host.state()
        await host.close()

    run(scenario)


def test_it_comes_back_within_shares_only(model: SmallModel) -> None:
    """Nobody is charged for what is parked; going on with more than a user may have is refused, and it stays."""

    async def scenario() -> None:
        host = Host()
        manager = host.manager
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 3)
        record = the(host).record

        def used() -> int:
            return arbiter.account(manager.ledger, manager.holders(), record.device)[0].used

        fixed = 1 + opened.floor_slabs  # weights and floor
        assert used() == fixed
        manager.ledger.users[0] = UserRecord("user", Share(0, (fixed + 2) * SLAB_BYTES))
        message = await refusal(Talk(host, host.session).open(opened.model_id), Exhausted)
        assert f"uses {fixed} and would use {fixed + 3}" in message
        assert (the(host).state, the(host).complete, used()) == ("parked", 3 * CELLS, fixed)
        facts = {fact.topic: fact.text for fact in manager.explain(record.range_id)}
        assert "gives before any arena" in facts["parked"] and "3 slabs" in facts["refused"]
        manager.ledger.users[0] = UserRecord("user", Share(0, (fixed + 3) * SLAB_BYTES))
        talk = await Talk(host, host.session).open(opened.model_id)
        assert used() == fixed + 3 and talk.is_intact()
        await talk.leave()
        assert used() == fixed
        await manager.conversations.drop(0, "x")
        last = list(manager.decisions)[-1]
        assert (last.kind, last.slabs, "it was dropped" in last.reason) == (decisions.Kind.FREED, 3, True)
        await host.close()

    run(scenario)


def test_a_spilled_one_comes_back_in_its_turn(model: SmallModel) -> None:
    """Where somebody waits for memory of its device, what is spilled stays until that one has had some."""

    async def scenario() -> None:
        host = Host(device_slabs=14)
        with_options(host, conversation_spill_bytes=6 * SLAB_BYTES)
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 2)
        growing = host.range()
        room = arbiter.free_for(host.manager.ledger, the(host).cells.device, "user")
        await host.manager.kv.grow(host.session, [(growing, CELLS * (room + 1))])
        assert the(host).state == "spilled"
        other = host.connect("user")
        growth = (host.range(other), 14 * CELLS)
        waiting = asyncio.create_task(host.manager.kv.grow(other, [growth], 10.0))
        await until(lambda: host.manager.waiting.is_wanted(the(host).cells.device))
        before = host.state()
        message = await refusal(Talk(host, host.session).open(opened.model_id), Exhausted)
        assert "came first" in message
        assert the(host).state == "spilled" and host.state() == before
        host.manager.disconnect(other, "left")
        await refusal(waiting, LeaseRevoked)
        await host.manager.kv.shrink(host.session, growing, 0)
        talk = await Talk(host, host.session).open(opened.model_id)
        assert talk.record.owner == host.session.session_id and talk.is_intact()
        await host.close()

    run(scenario)


def test_the_host_keeps_the_newest(model: SmallModel) -> None:
    """Where spilled conversations have all they may of the host, the longest parked makes way for the next."""

    async def scenario() -> None:
        host = Host(device_slabs=14)
        with_options(host, conversation_spill_bytes=4 * SLAB_BYTES)
        opened = await host.open(model)
        await parked(host, opened.model_id, "a", 3)
        await parked(host, opened.model_id, "b", 2)
        await parked(host, opened.model_id, "c", 5)
        for name, states in (("a", {"a": "spilled", "b": "parked"}), ("b", {"b": "spilled", "c": "parked"})):
            conversation = the(host, name)
            await host.manager.conversations.reclaim(conversation.record.range_id, 1)
            assert {n: the(host, n).state for n in states} == states
        assert found(host, "a") is None
        await host.manager.conversations.reclaim(the(host, "c").record.range_id, 1)
        assert (the(host, "c").state, the(host, "c").complete) == ("parked", 4 * CELLS)
        await host.manager.conversations.reclaim(the(host, "b").record.range_id, 1)
        assert (the(host, "b").state, the(host, "b").complete) == ("spilled", CELLS)
        host.state()
        await host.close()

    run(scenario)


@pytest.mark.parametrize("operation", ["create", "fill"])
def test_a_spill_that_fails_takes_the_end_instead(model: SmallModel, operation: Any) -> None:
    """The memory that was asked for comes all the same, and nothing is lost on the way."""

    async def scenario() -> None:
        host = Host()
        with_options(host, conversation_spill_bytes=100 * SLAB_BYTES)
        opened = await host.open(model)
        await parked(host, opened.model_id, "x", 4)
        host.driver.fail_at(operation, 1)
        await host.manager.conversations.reclaim(the(host).record.range_id, 1)
        assert (the(host).state, the(host).complete) == ("parked", 3 * CELLS)
        talk = await Talk(host, host.session).open(opened.model_id)
        assert talk.is_intact()
        await talk.leave()
        host.state()
        await host.close()

    run(scenario)


def test_a_session_that_ends_while_its_conversation_comes_back(model: SmallModel) -> None:
    """It is parked on its device, and the next session has all of it."""

    async def scenario() -> None:
        host = Host()
        with_options(host, conversation_spill_bytes=100 * SLAB_BYTES)
        opened = await host.open(model)
        session = host.connect("user")
        await host.open(model, session)
        await parked(host, opened.model_id, "x", 4)
        await host.manager.conversations.reclaim(the(host).record.range_id, 1)
        opening = asyncio.create_task(Talk(host, session).open(opened.model_id))
        await until(lambda: the(host).state == "moving")
        host.manager.disconnect(session, "it ended")
        await refusal(opening, LeaseRevoked)
        talk = await Talk(host, host.session).open(opened.model_id)
        assert talk.transcript.complete == 4 * CELLS and talk.is_intact()
        host.state()
        await host.close()

    run(scenario)


def test_other_programs_get_the_memory_of_conversations_first(model: SmallModel) -> None:
    """When a device's room is taken, parked conversations give before experts do."""

    async def scenario() -> None:
        host = Host(device_slabs=14)
        opened = await host.open(model)
        arena = len(opened.ranges[0].slabs)
        await parked(host, opened.model_id, "x", 4)
        device = the(host).record.device
        free = len(host.manager.ledger.slabs_in(device, SlabState.FREE))
        await host.manager.slabs.shed(device, free + 3)
        assert the(host).complete == CELLS
        assert len(opened.ranges[0].slabs) == arena
        host.state()
        await host.close()

    run(scenario)


def test_a_closed_range_is_no_conversation_any_more(model: SmallModel) -> None:
    """A session that closes its conversation's range gives it up, and its name is new again."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        before = host.state()
        talk = await Talk(host, host.session).open(opened.model_id)
        await talk.say(*range(2 * CELLS))
        del talk.transcript
        await host.manager.kv.close(host.session, talk.record.range_id)
        assert found(host) is None and talk.record.range_id not in host.manager.ledger.ranges
        assert host.state() == before
        assert (await Talk(host, host.session).open(opened.model_id)).transcript.complete == 0
        await host.close()

    run(scenario)


def test_dropping_frees_the_memory(model: SmallModel) -> None:
    """A dropped conversation's cells and bytes are free, and its name is new again."""

    async def scenario() -> None:
        host = Host()
        opened = await host.open(model)
        before = host.state()
        await parked(host, opened.model_id, "x", 3)
        assert await host.manager.conversations.drop(0, "x") == (3 * CELLS, 3 * SLAB_BYTES)
        assert host.state() == before
        await refusal(host.manager.conversations.drop(0, "x"), NotFound)
        talk = await Talk(host, host.session).open(opened.model_id)
        assert (talk.transcript.complete, talk.began_anew) == (0, "")
        await host.close()

    run(scenario)


@pytest.mark.parametrize("seed", range(4))
def test_many_talk_while_memory_is_short(model: SmallModel, seed: int) -> None:
    """Whatever is reclaimed, spilled, brought back and dropped meanwhile: who comes back finds a true beginning."""

    async def scenario() -> None:
        host = Host(device_slabs=16)
        with_options(host, conversation_spill_bytes=6 * SLAB_BYTES, conversations_per_user_max=5)
        opened = await host.open(model)
        before = host.state()
        random = np.random.default_rng(seed)
        left: dict[str, list[int]] = {}
        came_back = [0]

        async def talk(session: Session) -> None:
            for _ in range(40):
                name = "abcdef"[random.integers(6)]
                cells_max = int(random.choice([CELLS, CELLS_MAX]))
                try:
                    conversation = await Talk(host, session).open(opened.model_id, name, cells_max)
                except (Exhausted, PreconditionFailed):
                    await asyncio.sleep(random.random() * 0.004)
                    continue
                complete = conversation.transcript.complete
                kept = left.pop(name, [])[:complete]
                assert len(kept) == complete == conversation.transcript.common(kept)
                assert conversation.is_intact()
                came_back[0] += complete > 0
                said = [int(token) for token in random.integers(1, 1 << 20, random.integers(1, 5 * CELLS))]
                try:
                    conversation.transcript.cut(int(random.integers(0, complete + 1)))
                    kept = kept[: conversation.transcript.complete]
                    await conversation.say(*said[: cells_max - len(kept)])
                    left[name] = [*kept, *said[: cells_max - len(kept)]]
                except Exhausted:
                    left[name] = kept
                await asyncio.sleep(random.random() * 0.004)
                await conversation.leave()

        async def press(session: Session) -> None:
            range_id = host.range(session)
            for _ in range(40):
                try:
                    grown = await host.manager.kv.grow(session, [(range_id, int(random.integers(1, 9)) * CELLS)])
                    host.manager.acknowledge(session, grown.batch_id) if grown.batch_id else None
                except Exhausted:
                    pass
                await asyncio.sleep(random.random() * 0.01)
                await host.manager.kv.shrink(session, range_id, int(random.integers(0, 3)) * CELLS)
                if random.random() < 0.2:
                    try:
                        await host.manager.conversations.drop(0, "abcdef"[random.integers(6)])
                    except (NotFound, PreconditionFailed):
                        pass
            await host.manager.kv.shrink(session, range_id, 0)

        sessions = [host.connect("user") for _ in range(4)]
        for session in sessions:
            await host.open(model, session)
        await asyncio.gather(*(talk(s) for s in sessions[:3]), press(sessions[3]))
        assert came_back[0] > 5
        for conversation in host.manager.conversations.of(0):
            await host.manager.conversations.drop(0, conversation.key.name)
        for session in sessions:
            host.manager.disconnect(session, "done")
        await until(lambda: not host.manager.releases.tasks)
        sums, _, descriptors = host.state()
        kinds = ("kv", "revoking", "quarantined")
        assert not [(kind, n_bytes) for kind, n_bytes in sums.items() if kind.endswith(kinds) and n_bytes]
        assert descriptors == before[2]
        await host.close()

    run(scenario)
