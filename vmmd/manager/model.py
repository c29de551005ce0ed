"""A model: its arena, weights and homes, who reads it, and waiting until nobody reads what is to be written.

`vmmd.manager.filling` fills it, `vmmd.manager.trading` gives slabs of it away.
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import structlog
from strata_api.v1 import memory_pb2, pages

from vmmd.core.generations import is_behind
from vmmd.core.ledger import RangeKind, RangeRecord
from vmmd.core.policy import Estimate
from vmmd.core.residency import F64, NOWHERE, Arena
from vmmd.driver import membarrier
from vmmd.driver.base import Driver, Slab
from vmmd.manager.figures import ModelFigures
from vmmd.manager.files import FileIdentity
from vmmd.manager.session import Session
from vmmd.manager.shared import HeatPage, ResidencyTable

log = structlog.get_logger("vmmd.model")

I64 = npt.NDArray[np.int64]
T = TypeVar("T")


class Stuck(Exception):
    """Sessions are still behind past the deadline."""

    def __init__(self, model_id: int, pids: Sequence[int]) -> None:
        super().__init__(f"model {model_id} is still read by pid {', '.join(map(str, pids))}")
        self.model_id = model_id
        self.pids = tuple(pids)


@dataclass(frozen=True)
class Unmapping:
    """Slabs that have left a part, and the sessions that were told to unmap them."""

    part: int
    indexes: tuple[int, ...]
    revocation_id: int
    sessions: list[Session]


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
    slabs: Mapping[int, Slab]  # physical slabs by id
    quiesce_deadline_s: float
    ready: "asyncio.Future[None]"
    heat: Estimate
    profile_key: str
    sessions: list[Session] = field(default_factory=list)
    devices_of: dict[int, list[str]] = field(default_factory=dict)  # by session: those whose parts it maps
    filled_s: dict[str, float] = field(default_factory=dict)  # by device: how long its part took to fill
    refilling: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it gets slabs and fills empty slots
    figures: ModelFigures = field(default_factory=ModelFigures)
    filled_bytes: int = 0
    total_bytes: int = 0
    stale: bool = False
    closed: bool = False
    reading: list[float] = field(default_factory=list)  # generations that the daemon's own reads go by
    working: int = 0  # fills and trades under way: its descriptors and table are needed
    idle_since_s: float | None = None
    routed_s: float | None = None  # when anything was routed last
    floor_slabs: int = 0  # of the first device that the floor and the experts without homes need
    stuck_pids: tuple[int, ...] = ()
    exchanged: int = 0  # experts that took a colder one's slot
    learned_more: bool = False  # since its profile was saved
    moved_s: F64 = field(init=False)  # [n] when an expert last came or went so
    background: "asyncio.Task[None] | None" = None  # makes and fills the homes
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set)  # wait for stuck readers
    releasing: "set[asyncio.Task[None]]" = field(default_factory=set)  # wait to release slots
    unmapping: list[Unmapping] = field(default_factory=list)  # see `vmmd.manager.trading.withheld`

    def __post_init__(self) -> None:
        self.moved_s = np.full(self.arena.geometry.n, -np.inf)

    @property
    def movable(self) -> bool:
        """Whether the arbiter may plan with its slabs."""
        return self.ready.done() and not self.closed and not self.stuck_pids

    @property
    def epoch(self) -> int:
        """The daemon's epoch, as the table has it."""
        return self.table.page.words[pages.WORD_EPOCH]

    def point(self, experts: I64) -> None:
        """Rewrites entries from where the arena says that experts are: in a slot, or at home."""
        place = self.arena.place[experts]
        away = place[:, 0] == NOWHERE
        self.table.send_home(experts[away])
        self.table.set_entries(experts[~away], pages.TIER_DEVICE, *place[~away].T)

    # Sessions

    def join(self, session: Session, page: HeatPage, devices: Sequence[str]) -> None:
        """A session reads it from now on, with the parts on some devices, and counts its routing in `page`."""
        session.heat[self.model_id] = page
        self.sessions.append(session)
        self.devices_of[session.session_id] = list(devices)
        self.heat.join(session.session_id, page.counts())

    def grants(self, session: Session, record: RangeRecord) -> bool:
        """Whether a session maps a range of this model: all but the parts on devices that it did not name."""
        return record.kind is not RangeKind.ARENA or record.device in self.devices_of.get(session.session_id, ())

    def sessions_with(self, record: RangeRecord) -> list[Session]:
        """The sessions that map a range of this model."""
        return [session for session in self.sessions if self.grants(session, record)]

    def out_of_reach(self, session: Session) -> I64:
        """Experts that a session cannot read: without a home, and on a device that it did not name."""
        parts = [p for p, record in enumerate(self.ranges) if not self.grants(session, record)]
        return np.flatnonzero(np.isin(self.arena.place[:, 0], parts) & ~self.arena.home_ready)

    def leave(self, session: Session) -> None:
        """The session reads it no more."""
        self.count_heat()
        self.heat.leave(session.session_id)
        session.heat.pop(self.model_id).page.close()
        self.sessions.remove(session)
        del self.devices_of[session.session_id]

    def count_heat(self) -> bool:
        """Brings the arena's heat up to date; whether anything was routed since the last time."""
        counts = {s.session_id: s.heat[self.model_id].counts() for s in self.sessions if not s.ended}
        routed = self.heat.count(counts)
        if routed:
            self.arena.heat = self.heat.value()
            self.learned_more = True
            self.routed_s = time.monotonic()
        return routed

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
        for task in self.tasks | self.releasing:
            task.cancel()
        for fd in self.files:
            os.close(fd)
        self.files.clear()
        self.table.page.close()
