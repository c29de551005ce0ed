"""A model: its arena, weights and homes, and the generation protocol over them.

Order for a trade (`begin`, `finish`), each wait being for all sessions of the
arena to leave older generations behind:

1. unpublish the coldest experts that hotter ones displace; wait
2. fill their slots from the homes
3. publish the newcomers there, unpublish the victims; wait
4. the slab leaves the arena

An expert that is unpublished is read from its home, so no step ever waits.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import structlog
from strata_api.v1 import memory_pb2, pages

from vmmd.core.arbiter import ArenaTrade
from vmmd.core.generations import is_behind
from vmmd.core.ledger import RangeRecord
from vmmd.core.residency import BUSY, EMPTY, F64, Arena, Slot
from vmmd.driver import membarrier
from vmmd.driver.base import Copy, Driver, FileSource, ShortRead, Slab, SlabSource
from vmmd.errors import DriverError, StaleGeneration, Unavailable, VmmError
from vmmd.manager.compare import sample
from vmmd.manager.files import FileIdentity, check_unchanged
from vmmd.manager.session import Session
from vmmd.manager.shared import ResidencyTable

log = structlog.get_logger("vmmd.model")

CHUNK_BYTES = 128 << 20
"""Filled in one call of the driver: progress, and how much a change of mind wastes."""

CHUNKS_AT_ONCE = 2
"""One is laid out and published while another is copied."""

T = TypeVar("T")


class Stuck(Exception):
    """Sessions are still behind past the deadline."""

    def __init__(self, model_id: int, pids: Sequence[int]) -> None:
        super().__init__(f"model {model_id} is still read by pid {', '.join(map(str, pids))}")
        self.model_id = model_id
        self.pids = tuple(pids)


@dataclass
class Piece:
    """One expert's slot to fill, or one extent of the weights."""

    copies: list[Copy]
    expert: int = EMPTY
    slot: Slot | None = None  # None: the home

    @property
    def size_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(c.length_bytes for c in self.copies)


@dataclass(eq=False)
class Model:
    """One opened model of one domain."""

    model_id: int
    name: str
    arena: Arena
    weights: RangeRecord
    homes: RangeRecord
    ranges: list[RangeRecord]  # of the arena's parts, in order
    table: ResidencyTable
    files: list[int]  # descriptors, owned here
    identities: list[FileIdentity]
    driver: Driver
    executor: Executor
    slab: Callable[[int], Slab]  # physical slab of an id
    quiesce_deadline_s: float
    ready: "asyncio.Future[None]"
    sessions: list[Session] = field(default_factory=list)
    filled_bytes: int = 0
    total_bytes: int = 0
    stale: bool = False
    closed: bool = False
    reading: list[float] = field(default_factory=list)  # generations that the daemon's own reads go by
    working: int = 0  # fills and trades under way: its descriptors and table are needed
    idle_since_s: float | None = None
    stuck_pids: tuple[int, ...] = ()
    heat_before: F64 = field(init=False)  # at the start of the heat interval
    background: "asyncio.Task[None] | None" = None  # fills the remaining homes
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set)  # wait for stuck readers
    _quiet: "set[asyncio.Task[None]]" = field(default_factory=set)  # wait to release slots
    _unmapping: "list[_Unmapping]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.heat_before = self.arena.heat

    @property
    def movable(self) -> bool:
        """Whether the arbiter may plan with its slabs."""
        return self.ready.done() and not self.closed and not self.stuck_pids

    # Addresses

    def _slot_copies(self, expert: int, slab: Slab, offset: int, source: Slab | None, at: int) -> list[Copy]:
        """Copies of one expert's matrices: from its files, or from the same layout in another slab."""
        if source is not None:
            return [Copy(slab, offset, self.arena.slot_bytes(expert), SlabSource(source, at))]
        sizes, files, offsets = self._places[expert]
        begins = pages.slot_layout(*sizes)
        return [
            Copy(slab, offset + begins[m], sizes[m], FileSource(self.files[files[m]], offsets[m])) for m in range(3)
        ]

    @cached_property
    def _places(self) -> list[tuple[list[int], list[int], list[int]]]:
        """By expert: sizes, files and offsets of gate, up and down, as plain integers."""
        geometry = self.arena.geometry
        lists = (geometry.size_bytes.tolist(), geometry.file.tolist(), geometry.offset_bytes.tolist())
        return list(zip(*lists, strict=True))

    def _home_at(self, expert: int) -> tuple[Slab, int]:
        slab_index, slot = self.arena.home[expert].tolist()
        return self.slab(self.homes.slabs[slab_index]), slot * self.arena.slot_bytes(expert)

    def slot_piece(self, expert: int, slot: Slot) -> Piece:
        """The filling of a device slot: from the expert's home if it is ready, else from the file."""
        slab = self.slab(self.ranges[slot.part].slabs[slot.slab])
        source, at = self._home_at(expert) if self.arena.home_ready[expert] else (None, 0)
        offset = slot.slot * self.arena.slot_bytes(expert)
        return Piece(self._slot_copies(expert, slab, offset, source, at), expert, slot)

    def home_piece(self, expert: int) -> Piece:
        """The filling of an expert's home from the file."""
        slab, offset = self._home_at(expert)
        return Piece(self._slot_copies(expert, slab, offset, None, 0), expert)

    def weights_pieces(self) -> list[Piece]:
        """The filling of the weights range; an extent may straddle slabs."""
        size = self.slab(next(iter(self.weights.slabs.values()))).size_bytes
        pieces, at = [], 0
        for extent in self.arena.geometry.weights:
            copies, done = [], 0
            while done < extent.length_bytes:
                index, inside = divmod(at + done, size)
                length = min(size - inside, extent.length_bytes - done)
                source = FileSource(self.files[extent.file], extent.offset_bytes + done)
                copies.append(Copy(self.slab(self.weights.slabs[index]), inside, length, source))
                done += length
            pieces.append(Piece(copies))
            at += pages.align(extent.length_bytes)
        return pieces

    # Filling

    async def fill(self, pieces: Iterable[Piece]) -> None:
        """Fills and publishes, in chunks. Slots are BUSY before and held after; homes become ready.

        A sample of each chunk is read back before it is published. Errors:
        `StaleGeneration` where a file changed, `OSError`, `DriverError` (named
        MISMATCH where the sample differs); what was published before stays.
        """
        self.working += 1
        under_way: deque[asyncio.Task[None]] = deque()
        try:
            for chunk in _chunks(pieces):
                if self.closed:
                    raise Unavailable(f"model {self.name!r} is being dropped")
                if len(under_way) == CHUNKS_AT_ONCE:
                    await asyncio.shield(under_way[0])
                    under_way.popleft()
                under_way.append(asyncio.create_task(self._fill_chunk(chunk)))
                await asyncio.sleep(0)  # its copies are under way before the next chunk is laid out
            while under_way:
                await asyncio.shield(under_way[0])
                under_way.popleft()
        finally:
            if under_way:
                await asyncio.wait(under_way)  # nothing may still write once this has returned
                for task in under_way:
                    task.exception()
            self.working -= 1

    async def _fill_chunk(self, chunk: list[Piece]) -> None:
        loop = asyncio.get_running_loop()
        copies = [c for piece in chunk for c in piece.copies]

        def work() -> tuple[Copy, int] | None:
            self.driver.fill(copies)
            return sample(self.driver, copies)

        try:
            wrong = await loop.run_in_executor(self.executor, work)
        except ShortRead as error:
            raise StaleGeneration(f"a file of model {self.name!r} has shrunk while it was read: {error}") from None
        if any(isinstance(c.source, FileSource) for c in copies):
            check_unchanged(self.files, self.identities)
        if wrong is not None:
            copy, offset_bytes = wrong
            raise self._mismatch(next(p for p in chunk if any(c is copy for c in p.copies)), copy, offset_bytes)
        for piece in chunk:
            self._publish(piece)
        self.table.bump()
        self.filled_bytes += sum(p.size_bytes for p in chunk)

    def _mismatch(self, piece: Piece, copy: Copy, offset_bytes: int) -> DriverError:
        """What to say of a slab that is not, from some byte on, what was written to it."""
        if piece.expert == EMPTY:
            record = self.weights
            index = next(i for i, slab_id in record.slabs.items() if self.slab(slab_id) is copy.target)
        elif piece.slot is not None:
            record, index = self.ranges[piece.slot.part], piece.slot.slab
        else:
            record, index = self.homes, int(self.arena.home[piece.expert][0])
        source = "its file" if isinstance(copy.source, FileSource) else "the copy in host memory"
        return DriverError(
            f"a fill of model {self.name!r} went wrong: slab {index} of range {record.range_id}"
            f" ({record.kind.value}) on {copy.target.device_uuid} differs from {source} at byte {offset_bytes};"
            " nothing of it is used; check that device's memory",
            call="fill",
            name="MISMATCH",
        )

    def _publish(self, piece: Piece) -> None:
        expert = piece.expert
        if expert == EMPTY:
            return
        if piece.slot is not None:
            self.arena.settle(expert, piece.slot)
            self._point(expert)
            return
        slab, slot = (int(x) for x in self.arena.home[expert])
        self.arena.home_ready[expert] = True
        self.table.set_home(expert, pages.pack(pages.TIER_HOST, 0, slab, slot))
        if self.arena.slot_of(expert) is None:
            self._point(expert)

    def _point(self, expert: int) -> None:
        """Rewrites an expert's entry from where the arena says it is."""
        slot = self.arena.slot_of(expert)
        if slot is None:
            self.table.set_entry(expert, self.table.home(expert))
        else:
            self.table.set_entry(expert, pages.pack(pages.TIER_DEVICE, slot.part, slot.slab, slot.slot))

    async def refill(self, limit_bytes: int) -> bool:
        """Fills empty slots with the hottest missing experts; whether any is left to do."""
        arena = self.arena
        pieces: list[Piece] = []
        chosen: set[int] = set()
        spent, more = 0, False
        for part in range(len(arena.parts)):
            by_class: dict[int, list[Slot]] = {}
            for slot_bytes, slot in arena.empty_slots(part):
                by_class.setdefault(slot_bytes, []).append(slot)
            for slot_bytes, slots in by_class.items():
                missing = arena.hottest_missing(slot_bytes, len(slots) + len(chosen))
                missing = [e for e in missing if e not in chosen][: len(slots)]
                room = max(0, limit_bytes - spent) // slot_bytes
                more |= len(missing) > room
                for expert, slot in zip(missing[:room], slots, strict=False):
                    arena.reserve(slot)
                    pieces.append(self.slot_piece(expert, slot))
                    chosen.add(expert)
                    spent += slot_bytes
        try:
            await self.fill(pieces)
        except (VmmError, OSError):
            for piece in pieces:
                if piece.slot is not None and arena.slot_of(piece.expert) != piece.slot:
                    arena.release(piece.slot)
            raise
        return more

    # Generations

    def behind(self, generation: int) -> list[int]:
        """Pids of sessions that may still read under an older generation, and the daemon's if `hold` does."""
        pids = [
            s.record.pid for s in self.sessions if not s.ended and is_behind(s.line(s.attachment(self)), generation)
        ]
        return [*pids, os.getpid()] if any(g < generation for g in self.reading) else pids

    async def hold(self, executor: Executor, work: Callable[[], T], *, of_slots: bool) -> T:
        """Runs `work` in a thread; until it ends the model keeps its slabs and descriptors.

        With `of_slots` it is a step: a slot that the arena names when this is called
        is neither refilled nor given away. `executor` should start it at once, as
        trades wait for it.
        """
        generation = self.table.generation if of_slots else float("inf")
        self.reading.append(generation)
        job = asyncio.get_running_loop().run_in_executor(executor, work)
        job.add_done_callback(lambda _: self.reading.remove(generation))
        return await asyncio.shield(job)  # whoever waits may be cancelled, the thread goes on

    async def quiesce(self, generation: int, deadline_s: float) -> None:
        """Waits until nobody is behind. Errors: `Stuck` past the deadline.

        The barrier comes once, before the first look: a step that is published
        after it reads the rewritten entries.
        """
        membarrier.issue()
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline_s
        delay = 0.0
        while pids := self.behind(generation):
            if loop.time() >= until:
                raise Stuck(self.model_id, pids)
            await asyncio.sleep(delay)
            delay = min(delay + 0.0002, 0.002)

    # Trades

    def begin(self, trade: ArenaTrade) -> int:
        """Step 1, at once: takes the slots of `trade.moves`, and the empty ones of the victims, out of others' reach.

        Returns the generation.
        """
        for index in trade.indexes:
            for slot in self._slots_that_are(EMPTY, trade.part, index):
                self.arena.reserve(slot)
        for move in trade.moves:
            if move.displaced == EMPTY:
                self.arena.reserve(move.to)
            else:
                self.arena.vacate(move.displaced)
                self._point(move.displaced)
        return self.table.bump()

    async def finish(self, trade: ArenaTrade, generation: int) -> None:
        """Steps 1 (the wait) to 4. The slabs' ledger state is the caller's.

        Errors: `Stuck`, with `trade.slab_ids` untouched and still in the arena, or
        `StuckVictims`, with them emptied and not yet quiescent; `VmmError` where
        the driver failed, untouched.
        """
        self.working += 1
        try:
            await self._finish(trade, generation)
        finally:
            self.working -= 1

    async def _finish(self, trade: ArenaTrade, generation: int) -> None:
        arena = self.arena
        reserved = self._busy_slots(trade)
        try:
            if any(move.displaced != EMPTY for move in trade.moves):
                await self.quiesce(generation, self.quiesce_deadline_s)
            pieces = [self.slot_piece(move.expert, move.to) for move in trade.moves]
            await self.fill(pieces)
        except Stuck as stuck:
            for slot in reserved:
                arena.release(slot)
            self._later(self._release_when_quiet([m.to for m in trade.moves], generation), stuck.pids)
            raise
        except (VmmError, OSError):
            for slot in [*reserved, *(m.to for m in trade.moves if arena.slot_of(m.expert) != m.to)]:
                arena.release(slot)
            if left := self._busy_slots(trade):  # of experts that had moved already; old steps may read there
                self._release_later(left, self.table.bump())
            raise
        for expert in trade.evicted:
            arena.vacate(expert)
            self._point(expert)
        generation = self.table.bump()
        try:
            await self.quiesce(generation, self.quiesce_deadline_s)
        except Stuck as stuck:
            raise StuckVictims(stuck, generation) from None
        self.take_out(trade)

    def _slots_that_are(self, occupant: int, part: int, index: int) -> list[Slot]:
        occupants = self.arena.parts[part].slabs[index].occupants
        return [Slot(part, index, int(i)) for i in np.flatnonzero(occupants == occupant)]

    def _busy_slots(self, trade: ArenaTrade) -> list[Slot]:
        return [slot for index in trade.indexes for slot in self._slots_that_are(BUSY, trade.part, index)]

    def take_out(self, trade: ArenaTrade) -> None:
        """Step 4: the emptied slabs leave the arena. Telling its sessions is the caller's."""
        for index in trade.indexes:
            self.arena.remove_slab(trade.part, index)

    def withhold(self, trade: ArenaTrade, revocation_id: int) -> None:
        """Keeps the indexes of slabs that have left empty until every session has answered the revocation."""
        self._unmapping.append(_Unmapping(trade.part, tuple(trade.indexes), revocation_id, list(self.sessions)))

    def withheld(self, part: int) -> set[int]:
        """Indexes at which some session may still have a slab mapped that has gone.

        No other slab may come there yet: that session would take the old one for it.
        """
        self._unmapping = [
            u
            for u in self._unmapping
            if any(u.revocation_id in s.revocations and not s.ended and s in self.sessions for s in u.sessions)
        ]
        return {index for u in self._unmapping if u.part == part for index in u.indexes}

    @property
    def epoch(self) -> int:
        """The daemon's epoch, as the table has it."""
        return self.table.page.words[pages.WORD_EPOCH]

    def later_take_out(self, trade: ArenaTrade, stuck: "StuckVictims", done: Callable[[], None]) -> None:
        """Step 4 once the stuck readers have moved on or died; then `done`."""

        async def wait() -> None:
            await self.quiesce(stuck.generation, float("inf"))
            self.take_out(trade)
            done()

        self._later(wait(), stuck.stuck.pids)

    async def _release_when_quiet(self, slots: Sequence[Slot], generation: int) -> None:
        await self.quiesce(generation, float("inf"))
        for slot in slots:
            self.arena.release(slot)

    def _release_later(self, slots: Sequence[Slot], generation: int) -> None:
        task = asyncio.create_task(self._release_when_quiet(slots, generation))
        self._quiet.add(task)
        task.add_done_callback(self._quiet.discard)

    def _later(self, waiting: Coroutine[Any, Any, None], pids: Sequence[int]) -> None:
        self.stuck_pids = tuple(pids)
        log.warning("model.stuck", model=self.model_id, pids=list(pids))

        async def run() -> None:
            await waiting
            if len(self.tasks) == 1:
                self.stuck_pids = ()

        task = asyncio.create_task(run())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    # Ending

    def mark_stale(self, why: str) -> None:
        """The file changed: no new fills from it; sessions are told."""
        if not self.stale:
            self.stale = True
            self.table.mark_stale()
            log.warning("model.stale", model=self.model_id, why=why)
            notice = memory_pb2.Notice(code=memory_pb2.Notice.CODE_STALE, message=why)
            for session in self.sessions:
                session.send(memory_pb2.WatchEvent(epoch=self.epoch, notice=notice))

    async def stop(self) -> None:
        """Ends what still fills it, so that its descriptors can be closed."""
        self.closed = True
        while self.working or self.reading or (self.background is not None and not self.background.done()):
            await asyncio.sleep(0.001)

    def close(self) -> None:
        """Closes descriptors and the table; slabs are the manager's to take back."""
        self.closed = True
        for task in self.tasks | self._quiet:
            task.cancel()
        for fd in self.files:
            os.close(fd)
        self.files.clear()
        self.table.page.close()


@dataclass(frozen=True)
class _Unmapping:
    """Slabs that have left a part, and the sessions that were told to unmap them."""

    part: int
    indexes: tuple[int, ...]
    revocation_id: int
    sessions: list[Session]


class StuckVictims(Exception):
    """Victims were emptied, but sessions may still read them."""

    def __init__(self, stuck: Stuck, generation: int) -> None:
        super().__init__(str(stuck))
        self.stuck = stuck
        self.generation = generation


def _chunks(pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += piece.size_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def plan_homes(arena: Arena, slab_bytes: int, slabs: int, order: "np.typing.NDArray[np.int64]") -> None:
    """Gives homes in at most `slabs` slabs of the homes range to experts in `order`, by size class.

    Experts beyond that have no home: they are pinned to their device slots.
    """
    used = 0
    open_slab: dict[int, tuple[int, int]] = {}  # slot_bytes -> (slab, next slot)
    for expert in order.tolist():
        size = arena.slot_bytes(expert)
        slab, slot = open_slab.get(size, (-1, 0))
        if slab < 0 or slot == slab_bytes // size:
            if used == slabs:
                continue
            slab, slot = used, 0
            used += 1
        arena.home[expert] = slab, slot
        open_slab[size] = slab, slot + 1
