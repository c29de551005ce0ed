"""Homes: a copy in host memory of every expert that may be evicted.

Host memory is slow to make, and meanwhile a file is read five times and slabs are mapped
ten times more slowly. So it is made when the device slots are filled and a first step has
run, or from the very beginning where steps cannot start without some home or the device
slots are in host memory, too; some slabs at a time, by threads of its own. Three stages
follow each other, each working on what the one before has done:

1. make slabs, and grant them to the sessions;
2. fill them, once the device slots are filled: those come first;
3. publish the homes in them, once every session has mapped the slabs: readers find
   homes without asking, and must not find what they cannot reach.

No stage waits for a later one, unless a session is so far behind that the third
has much to do.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import structlog
from strata_api.v1 import pages

from vmmd.core import arbiter
from vmmd.core.residency import NOWHERE
from vmmd.errors import StaleGeneration, Unavailable, VmmError
from vmmd.manager import filling
from vmmd.manager.model import Model
from vmmd.manager.session import Session

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.homes")

GROUP_BYTES = 1 << 30
"""Of slabs that are made, filled and published together."""

GROUPS_WAITING_MAX = 64
"""Before a stage: so much is made for sessions that map nothing."""

FIRST_STEP_S = 0.5
"""How long they wait for a first step, once steps can start."""

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class _Group(NamedTuple):
    """Experts whose homes are in slabs that are there, and the grants of these that must be acknowledged."""

    experts: I64
    grants: list[tuple[Session, int]]


class Homes:
    """Makes the homes that are planned for a model, those of experts that need one before steps can start first.

    Attributes:
        slots_are_filled: to be set when homes may be filled.
        needed_are_ready: whether the homes of the experts in `needed` are published, or why they cannot be.
    """

    def __init__(self, manager: "Manager", model: Model, needed: Bool) -> None:
        self.slots_are_filled = asyncio.Event()
        self.needed_are_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._manager = manager
        self._model = model
        self._needed = needed
        self._made: asyncio.Queue[_Group | None] = asyncio.Queue(GROUPS_WAITING_MAX)
        self._filled: asyncio.Queue[_Group | None] = asyncio.Queue(GROUPS_WAITING_MAX)
        self._ended = False
        self._began_s = time.monotonic()
        self._done_s: dict[str, float] = {}
        self._look_at_needed()

    async def run(self) -> None:
        """All of it. Experts that get no home are pinned where they are."""
        arena = self._model.arena
        making, publishing = asyncio.create_task(self._make()), asyncio.create_task(self._publish())
        failure: VmmError | OSError | None = None
        try:
            await self._fill()
            await making
        except (VmmError, OSError) as error:
            failure = error
        finally:
            self._ended = True
            await self._end(making)
            await self._filled.put(None)
            await publishing
        if failure is not None:
            arena.home[~arena.home_ready] = NOWHERE
            self._give_up(failure)
        elif not self._model.closed:
            self._take_time("published_s")
            ready = int(arena.home_ready.sum())
            log.info("homes.filled", model=self._model.model_id, homes=ready, **self._done_s)

    async def _make(self) -> None:
        """Stage 1. Errors: `VmmError`; what was made before is passed on."""
        try:
            if not self._needed.any() and self._manager.driver.name == "cuda":
                await self.slots_are_filled.wait()
                await self._first_step()
            for experts in self._groups():
                if self._ended:
                    return
                group = _Group(experts, await self._provide(experts))
                self._take_time("made_s")
                await self._made.put(group)
        finally:
            await self._made.put(None)

    async def _first_step(self) -> None:
        """Waits until a session has run a step, for a moment."""
        model = self._model
        end_s = time.monotonic() + FIRST_STEP_S
        while time.monotonic() < end_s and not (model.closed or self._ended or self._have_stepped()):
            await asyncio.sleep(0.01)

    def _have_stepped(self) -> bool:
        lines = (s.line(s.attachment(self._model)) for s in self._model.sessions if not s.ended)
        return any(line[pages.WORD_RETIRED] for line in lines)

    async def _fill(self) -> None:
        """Stage 2. Errors: as `filling.fill`."""
        await self.slots_are_filled.wait()
        while (group := await self._made.get()) is not None:
            await filling.fill(self._model, filling.homes(self._model, group.experts))
            self._take_time("filled_s")
            await self._filled.put(group)

    async def _publish(self) -> None:
        """Stage 3. A session that does not map what it was granted, as one that is stopped, is waited for a while."""
        model = self._model
        while (group := await self._filled.get()) is not None:
            end_s = time.monotonic() + self._manager.options.revoke_deadline_s
            while not model.closed and (late := [s for s, i in group.grants if i in s.batches and not s.ended]):
                if time.monotonic() > end_s:
                    log.warning("homes.unmapped", model=model.model_id, pids=[s.record.pid for s in late])
                    break
                await asyncio.sleep(0.002)
            if not model.closed:
                filling.publish_homes(model, group.experts)
                self._look_at_needed()

    async def _end(self, making: "asyncio.Task[None]") -> None:
        """Waits until no slab is being made any more, whatever was made."""
        while not making.done():
            while not self._made.empty():
                self._made.get_nowait()
            await asyncio.wait([making], timeout=0.01)
        if not making.cancelled():
            making.exception()

    def _groups(self) -> Iterator[I64]:
        """Experts by the slabs of their homes, which were planned from the range's first index on."""
        home = self._model.arena.home[:, 0]
        slabs = max(1, GROUP_BYTES // self._manager.ledger.devices[self._model.homes.device].slab_bytes)
        waiting = np.flatnonzero(home != NOWHERE)
        group = home[waiting] // slabs
        for g in np.unique(group).tolist():
            yield waiting[group == g]

    async def _provide(self, experts: I64) -> list[tuple[Session, int]]:
        """Leases and makes the slabs of some homes and grants them to the sessions that have the model by now.

        Who opens it later is granted all that there is then.
        """
        manager, model = self._manager, self._model
        missing = int(model.arena.home[experts, 0].max()) + 1 - len(model.homes.slabs)
        if missing <= 0:
            return []
        request = arbiter.Request(model.homes.range_id, missing)
        patient = bool(self._needed[experts].any())
        keep = (model.model_id,)
        granted = await manager.slabs.provide([request], keep_models=keep, patient=patient, ask=patient)
        if model.closed:
            manager.releases.take_back([p.slab_id for p in granted.placed], 0)
            raise Unavailable(f"model {model.name!r} is being dropped")
        return manager.grant_added(model, model.homes, granted.placed) if model.ready.done() else []

    def _take_time(self, stage: str) -> None:
        """When a stage was last done with a group, for the log."""
        self._done_s[stage] = round(time.monotonic() - self._began_s, 3)

    def _look_at_needed(self) -> None:
        if not self.needed_are_ready.done() and self._model.arena.home_ready[self._needed].all():
            self.needed_are_ready.set_result(None)

    def _give_up(self, error: VmmError | OSError) -> None:
        model = self._model
        if not self.needed_are_ready.done():
            self.needed_are_ready.set_exception(error)
            self.needed_are_ready.exception()  # retrieved, should nobody wait any more
            return
        log.warning("homes.short", model=model.model_id, ready=int(model.arena.home_ready.sum()), why=str(error))
        if isinstance(error, StaleGeneration | OSError) and not model.closed:
            model.mark_stale(str(error))
