"""Conversations: named K/V ranges that outlive their session, until their user comes back or memory is short.

::

    open ──> in use ──parked, or the client ended──> settling ──> parked ──open──> in use
                                                        │         │    │
                                    somebody holds it ──┤         │    └─memory is short─> spilled ──open──> in use
                                                        v         v                           │
                                                       gone <── expired, dropped, memory is short

A conversation belongs to a user: (domain, user id, name) finds it. Which tokens its
cells hold is in its token page (layout: `strata_api.v1.pages`), which the client keeps true
at every moment. It is read here once, when nobody can write to it any more, cells
included: the client has said so (`park`), or its process has ended and no child has its
memory. What does not settle in seconds is given up. The next session gets a page
of its own, so that whoever may still have the old one changes nothing.

The range stays charged to the session that had it last, whose record the ledger keeps.
All of it is in this process: a daemon that is started anew has no conversations.
"""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from strata_api.v1.names import conversation_problem

from vmmd.core import arbiter, decisions
from vmmd.core.ledger import RangeKind, RangeRecord, SessionRecord, SlabState
from vmmd.driver.base import Copy, SlabSource
from vmmd.errors import Exhausted, InvalidRequest, LeaseRevoked, NotFound, PreconditionFailed, VmmError
from vmmd.manager.conversation import NO_TOKENS, Cells, Conversation, Key
from vmmd.manager.model import Model
from vmmd.manager.releases import HELD_DEADLINE_S
from vmmd.manager.session import BatchItem, Kind, Session
from vmmd.manager.shared import TokenPage

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.conversations")

CELLS_MAX = 1 << 22
"""Of a conversation: its token page is as large as that says, whether it is used or not."""

LAYOUT_CHARACTERS_MAX = 100

END_DEADLINE_S = 10.0
"""How long a process may take to end after its session: a GPU's context takes its time."""


class Opened(NamedTuple):
    """A conversation's range in a session; `began_anew` says why what was left could not be used, if there was any."""

    record: RangeRecord
    batch_id: int
    began_anew: str


class Conversations:
    """All conversations. `clock` says when they were parked, and when they expire."""

    def __init__(self, manager: "Manager", clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._manager = manager
        self._by_key: dict[Key, Conversation] = {}
        self._by_range: dict[int, Conversation] = {}

    def __contains__(self, range_id: int) -> bool:
        return range_id in self._by_range

    def of(self, uid: int | None) -> list[Conversation]:
        """A user's conversations, or everybody's."""
        return [c for c in self._by_key.values() if uid in (None, c.key.uid)]

    def is_others(self, session: Session, range_id: int) -> bool:
        """Whether a range is a conversation's that this session does not use, or no longer."""
        conversation = self._by_range.get(range_id)
        return conversation is not None and conversation.session is not session

    async def open(
        self,
        session: Session,
        name: str,
        layout: str,
        device_uuid: str,
        model_id: int,
        cells_per_slab: int,
        cells_max: int,
    ) -> Opened:
        """The user's conversation of this name, with all that can be used of it, or a new one.

        What was left of another model, device or layout is dropped. One that is spilled
        comes back to its device first. Errors: `InvalidRequest`, `NotFound` (the
        model), `PreconditionFailed` (another session uses it), `Exhausted` (no room for
        what is spilled, or more than the session may have, and it stays as it is; or a
        limit), `LeaseRevoked`.
        """
        problem = conversation_problem(name)
        if problem is None and not (layout.isprintable() and len(layout) <= LAYOUT_CHARACTERS_MAX):
            problem = f"a layout has at most {LAYOUT_CHARACTERS_MAX} printable characters"
        if problem is None and not 1 <= cells_max <= CELLS_MAX:
            problem = f"a conversation of {cells_max} cells; it can have 1 to {CELLS_MAX}"
        if problem is not None:
            raise InvalidRequest(problem)
        model = self._manager.models.get(model_id)
        if model is None or model not in session.attached:
            raise NotFound(f"model {model_id} is not open in this session, and a conversation needs its model")
        device = self._manager.devices.choose([device_uuid] if device_uuid else [])[0]
        cells = Cells((tuple(model.identities), model.arena.geometry.digest), device, cells_per_slab, layout)
        key = Key(session.record.domain, session.record.uid, name)
        found, began_anew = await self._find(session, key, cells)
        session.check_batches()
        if found is None:
            conversation = self._make(session, key, cells, model, cells_max)
        else:
            conversation = self._resume(session, found, cells_max)
        record, page = conversation.record, conversation.page
        assert page is not None
        items = [BatchItem(Kind.KIND_TOKENS, record.range_id, page=page.page, writable=True)]
        slabs = sorted(record.slabs.items())
        items += [BatchItem(Kind.KIND_SLAB, record.range_id, i, s, writable=True) for i, s in slabs]
        batch_id = session.add_batch(self._manager.ledger.new_id(), items)
        log.info("conversation.opened", session=session.session_id, range=record.range_id, cells=page.complete)
        return Opened(record, batch_id, began_anew)

    async def _find(self, session: Session, key: Key, cells: Cells) -> tuple[Conversation | None, str]:
        """The conversation if it can go on, parked on its device; else why what was there was dropped."""
        while (conversation := self._by_key.get(key)) is not None:
            if conversation.session is not None:
                raise PreconditionFailed(
                    f"conversation {key.name!r} is in use by pid {conversation.session.record.pid};"
                    " wait until that has ended, or use another name"
                )
            if conversation.task is not None:
                await asyncio.wait([conversation.task])
                _check_session(session)
                continue
            why = conversation.difference(cells)
            if why:
                self._discard(conversation, why)
                return None, why
            if conversation.record.device == cells.device:
                return conversation, ""
            await asyncio.shield(self._begin_move(conversation, cells.device, session.record))
            _check_session(session)
        return None, ""

    def _make(self, session: Session, key: Key, cells: Cells, model: Model, cells_max: int) -> Conversation:
        limit = self._manager.options.conversations_per_user_max
        theirs = self.of(key.uid)
        parked = [c for c in theirs if c.record.parked_s is not None]
        if len(theirs) >= limit and not parked:
            raise Exhausted(
                f"user {key.uid} has {limit} conversations in use, which is the limit"
                " (conversations_per_user_max); end one first"
            )
        page = TokenPage(cells_max, NO_TOKENS)
        try:
            kv = self._manager.kv
            record = kv.create(session, cells.device, model.model_id, cells.cells_per_slab, cells_max)
        except BaseException:
            page.page.close()
            raise
        if len(theirs) >= limit:
            oldest = min(parked, key=lambda c: c.parked_s)
            self._discard(oldest, f"the user has {limit} conversations (conversations_per_user_max)")
        conversation = Conversation(key, cells, model.name, record, session, page)
        self._by_key[key] = self._by_range[record.range_id] = conversation
        return conversation

    def _resume(self, session: Session, conversation: Conversation, cells_max: int) -> Conversation:
        """A session takes a parked one over, and no more of it than `cells_max` cells."""
        ledger, record, models = self._manager.ledger, conversation.record, self._manager.holders()
        self._manager.kv.check_count(session)
        why = arbiter.adoption_refusal(ledger, models, record.range_id, session.record)
        if why:
            slabs = len(record.slabs)
            refusal = arbiter.refusal(ledger, models, record.device, record.domain, slabs, why)
            request = arbiter.Request(record.range_id, slabs)
            self._manager.decisions.add(decisions.refused(ledger, [request], refusal.message, time.monotonic()))
            raise refusal
        slabs_max = -(-cells_max // record.cells_per_slab)
        tokens = conversation.tokens[:cells_max]
        conversation.page = TokenPage(cells_max, tokens)
        ledger.adopt(record.range_id, session.session_id)
        conversation.session, conversation.tokens = session, NO_TOKENS
        self._take_from_end(record, slabs_max, f"its session has room for {cells_max} cells")
        record.cells_max = cells_max
        record.slabs_max = max([slabs_max, *(i + 1 for i in record.slabs)])  # some may be on their way back
        return conversation

    # Parking

    async def park(self, session: Session, range_id: int) -> int:
        """The client is done with a conversation and has unmapped it; returns how many cells it keeps.

        Errors: `NotFound`.
        """
        conversation = self._by_range.get(range_id)
        if conversation is None or conversation.session is not session:
            raise NotFound(f"range {range_id} is not a conversation of this session")
        await asyncio.wait([self._begin(conversation, partial(self._settle, conversation, session, None))])
        return len(conversation.tokens)

    def leave(self, session: Session) -> None:
        """The session ends, not necessarily its process. Never fails."""
        for conversation in [c for c in self._by_range.values() if c.session is session]:
            try:
                pidfd = os.dup(session.pidfd)
            except OSError as error:
                self._discard(conversation, f"no descriptor is left to watch its client: {error.strerror}")
            else:
                task = self._begin(conversation, partial(self._settle, conversation, session, pidfd))
                task.add_done_callback(partial(_close, pidfd))

    def lowered(self, range_id: int, cells: int) -> None:
        """A range keeps memory for so many cells only: no others are complete, whatever memory comes."""
        conversation = self._by_range.get(range_id)
        if conversation is not None and conversation.page is not None:
            conversation.page.lower(cells)

    def forget(self, range_id: int) -> None:
        """A session has closed a range: if it is a conversation's, there is none any more."""
        conversation = self._by_range.get(range_id)
        if conversation is not None:
            self._discard(conversation, "its client has closed it")

    async def _settle(self, conversation: Conversation, session: Session, pidfd: int | None) -> None:
        """Parks what nobody writes to any more. Waits for the process of `pidfd`, or takes the client's word."""
        record = conversation.record
        await self._manager.slabs.settled([record])
        session.withdraw(record.range_id)
        free = pidfd is None or await _ends(pidfd, END_DEADLINE_S)
        until = time.monotonic() + HELD_DEADLINE_S
        while free and self._manager.releases.still_held(record.slabs.values()):
            free = time.monotonic() < until
            await asyncio.sleep(0.002)
        if not free:
            self._discard(conversation, "its client has ended the session, but still holds the memory")
            return
        assert conversation.page is not None
        conversation.tokens = conversation.page.tokens(min(conversation.complete, record.cells_max))
        conversation.page.page.close()
        conversation.page = None
        if not len(conversation.tokens):
            self._discard(conversation, "it has no complete cells")
            return
        keep = -(-len(conversation.tokens) // record.cells_per_slab)
        self._take_from_end(record, keep, f"its conversation has {len(conversation.tokens)} cells")
        self._manager.ledger.park(record.range_id, self.clock())
        self._manager.waiting.look()
        log.info("conversation.parked", range=record.range_id, owner=record.owner, cells=len(conversation.tokens))

    # Giving memory back

    async def reclaim(self, range_id: int, slabs: int) -> None:
        """Takes so many slabs of a parked range from its end, unless all of it may go to the host."""
        conversation = self._by_range.get(range_id)
        if conversation is None or conversation.record.parked_s is None:
            return  # somebody was faster
        if self._make_room_to_spill(conversation):
            try:
                await asyncio.shield(self._begin_move(conversation, self._manager.host))
                return
            except (VmmError, OSError) as error:
                log.warning("conversation.not_spilled", range=range_id, why=str(error))
        if conversation.record.parked_s is None:
            return
        record = conversation.record
        leased = sorted(i for i, s in record.slabs.items() if self._manager.ledger.slabs[s].state is SlabState.LEASED)
        keep = leased[-slabs] if slabs < len(leased) else 0
        if keep == 0:
            self._discard(conversation, "memory was short")
            return
        conversation.tokens = conversation.tokens[: keep * record.cells_per_slab]
        self._take_from_end(record, keep, "its conversation is parked, and memory was short")
        log.info("conversation.cut", range=range_id, slabs=slabs, cells=len(conversation.tokens))

    def expire(self) -> None:
        """Drops what has been parked for too long."""
        before_s = self.clock() - self._manager.options.conversation_expiry_s
        for conversation in self.of(None):
            if conversation.record.parked_s is not None and conversation.record.parked_s <= before_s:
                self._discard(conversation, "it has expired")

    async def drop(self, uid: int, name: str) -> tuple[int, int]:
        """Drops a user's conversation; returns its cells and bytes.

        Errors: `NotFound`, `PreconditionFailed` (a session uses it).
        """
        found = [c for c in self.of(uid) if c.key.name == name]
        if not found:
            raise NotFound(f"user {uid} has no conversation {name!r}; vmmctl conversations lists what there is")
        cells, n_bytes = 0, 0
        for conversation in found:
            while conversation.task is not None:
                await asyncio.wait([conversation.task])
            if conversation.session is not None:
                pid = conversation.session.record.pid
                raise PreconditionFailed(f"conversation {name!r} is in use by pid {pid}; drop it when that has ended")
            if self._by_key.get(conversation.key) is conversation:
                cells += len(conversation.tokens)
                n_bytes += self._manager.ledger.held_bytes([conversation.record])
                self._discard(conversation, "it was dropped")
        return cells, n_bytes

    def _make_room_to_spill(self, conversation: Conversation) -> bool:
        """Whether all of it fits what spilled conversations may have of the host, older ones making way."""
        ledger, host, limit = self._manager.ledger, self._manager.host, self._manager.options.conversation_spill_bytes
        slabs, slab_bytes = len(conversation.record.slabs), ledger.devices[host].slab_bytes
        is_like_host = slab_bytes == ledger.devices[conversation.cells.device].slab_bytes
        if conversation.record.device == host or not is_like_host or slabs * slab_bytes > limit:
            return False
        while True:
            spilled = ledger.held_bytes(
                r for r in ledger.ranges.values() if r.kind is RangeKind.KV and r.device == host
            )
            free = arbiter.free_for(ledger, host, conversation.key.domain)
            if spilled + slabs * slab_bytes <= limit and free >= slabs:
                return True
            oldest = next(iter(ledger.parked(host)), None)
            if oldest is None:
                return False
            self._discard(self._by_range[oldest.range_id], "newer ones needed the host's memory")

    def _begin_move(
        self, conversation: Conversation, device: str, asker: SessionRecord | None = None
    ) -> "asyncio.Task[None]":
        """Takes a parked one out of others' reach, at once, and moves it to another device, where it is parked then.

        `asker` is the session that it comes back for: charged for it, and served in its turn.
        Errors of the task: `Exhausted`, `DriverError`, `LeaseRevoked`; it stays where it is.
        """
        since_s = conversation.parked_s
        self._manager.ledger.unpark(conversation.record.range_id)
        return self._begin(conversation, partial(self._move, conversation, device, since_s, asker))

    async def _move(self, conversation: Conversation, device: str, since_s: float, asker: SessionRecord | None) -> None:
        manager, ledger, old = self._manager, self._manager.ledger, conversation.record
        if asker is not None and asker.session_id not in manager.sessions:
            ledger.park(old.range_id, since_s)
            raise LeaseRevoked("the session ended while it opened a conversation")
        slabs = [slab_id for _, slab_id in sorted(old.slabs.items())]
        new = RangeRecord(
            ledger.new_id(),
            RangeKind.KV,
            device,
            old.domain,
            old.owner if asker is None else asker.session_id,
            len(slabs),
            old.cells_per_slab,
            old.cells_max,
        )
        ledger.add_range(new)
        self._by_range[new.range_id] = conversation
        need = [arbiter.Request(new.range_id, len(slabs))]
        try:
            if asker is None:  # to the host only what is free there goes
                await manager.slabs.provide(need, patient=False)
            else:
                await manager.waiting.provide(asker, lambda: need, wait_s=0, gone=lambda: False)
            copies = [
                Copy(manager.physical[new.slabs[i]], 0, ledger.devices[device].slab_bytes, source)
                for i, source in enumerate(SlabSource(manager.physical[slab_id], 0) for slab_id in slabs)
            ]
            await asyncio.get_running_loop().run_in_executor(manager.executor, manager.driver.fill, copies)
        except BaseException:
            del self._by_range[new.range_id]
            new.closed = True
            manager.releases.take_back(list(new.slabs.values()), new.owner)
            ledger.park(old.range_id, since_s)
            raise
        del self._by_range[old.range_id]
        conversation.record = new
        ledger.park(new.range_id, since_s if device == manager.host else self.clock())
        self._free(old, slabs, f"its conversation moved to {device}")
        log.info("conversation.moved", range=old.range_id, to_range=new.range_id, device=device, slabs=len(slabs))

    def _take_from_end(self, record: RangeRecord, keep: int, why: str) -> None:
        """Frees what a range has beyond its first `keep` slabs."""
        self._free(record, [s for i, s in record.slabs.items() if i >= keep], why)

    def _free(self, record: RangeRecord, slab_ids: list[int], why: str) -> None:
        """Frees slabs of a range, those apart that are on their way back already."""
        ledger = self._manager.ledger
        leased = [i for i in slab_ids if ledger.slabs[i].state is SlabState.LEASED]
        if leased:
            self._manager.decisions.add([decisions.freed(ledger, record, len(leased), why, time.monotonic())])
        self._manager.releases.take_back(leased, record.owner)

    def _discard(self, conversation: Conversation, why: str) -> None:
        """Forgets one that no session uses, and frees its memory."""
        record = conversation.record
        del self._by_key[conversation.key], self._by_range[record.range_id]
        conversation.session, conversation.tokens = None, NO_TOKENS
        if conversation.page is not None:
            conversation.page.page.close()
            conversation.page = None
        if record.parked_s is not None:
            self._manager.ledger.unpark(record.range_id)
        self._free(record, list(record.slabs.values()), f"its conversation was given up: {why}")
        log.info("conversation.dropped", range=record.range_id, owner=record.owner, why=why)

    # Work in the background

    def _begin(self, conversation: Conversation, work: Callable[[], Coroutine[Any, Any, None]]) -> "asyncio.Task[None]":
        """Starts work that has the conversation for itself until it ends."""

        async def run() -> None:
            try:
                await work()
            finally:
                conversation.task = None

        conversation.session = None
        conversation.task = task = asyncio.create_task(run())
        task.add_done_callback(_look_at)
        return task

    async def close(self) -> None:
        """Ends what is under way, closes pages; the memory is the manager's to give up."""
        tasks = [c.task for c in self._by_key.values() if c.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for conversation in self._by_key.values():
            if conversation.page is not None:
                conversation.page.page.close()


def _look_at(done: "asyncio.Task[None]") -> None:
    """What a task failed with: our own bugs are logged, should nobody wait for it."""
    error = None if done.cancelled() else done.exception()
    if error is not None and not isinstance(error, VmmError | OSError):
        log.error("conversation.bug", exc_info=error)


def _check_session(session: Session) -> None:
    """Errors: `LeaseRevoked`."""
    if session.ended:
        raise LeaseRevoked("the session ended while it opened a conversation")


def _close(fd: int, _: object) -> None:
    os.close(fd)


async def _ends(pidfd: int, timeout_s: float) -> bool:
    """Whether a process ends in time."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout_s)
    finally:
        loop.remove_reader(pidfd)
    return ended.is_set()
