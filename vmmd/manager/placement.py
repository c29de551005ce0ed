"""Placement: between clients' steps, hot experts take the slots of cold ones.

Each model has a task of its own while there is something to exchange, so that one
whose reader hangs holds no other up. A batch is small: a growth that comes meanwhile
finds the other slabs as they are, and these in a moment.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from vmmd.core import placement
from vmmd.core.ledger import SlabState
from vmmd.core.placement import Exchange, Pace
from vmmd.errors import VmmError
from vmmd.manager import trading
from vmmd.manager.model import Model, Stuck

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.placement")

BATCH_BYTES = 64 << 20
"""Exchanged at once on a device: while a step ends, as many experts as a sixteenth of the slots at most wait for it."""

LOG_S = 10.0
"""Between two lines about one model."""


class Placement:
    """All models' exchanges. `clock` and `sleep` are what time is told by."""

    def __init__(
        self,
        manager: "Manager",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._sleep = sleep
        self._paces: dict[str, Pace] = {}  # by device
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by model
        self._log_due_s: WeakKeyDictionary[Model, float] = WeakKeyDictionary()

    def begin(self, model: Model) -> None:
        """Exchanges experts of a model for as long as it pays, unless that is under way."""
        if model.model_id in self._tasks or not self._may(model):
            return
        task = asyncio.create_task(self._run(model))
        self._tasks[model.model_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(model.model_id))

    def is_under_way(self, model: Model) -> bool:
        """Whether experts of a model are on their way to slots of others."""
        return model.model_id in self._tasks

    async def stop(self) -> None:
        """Ends it."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, model: Model) -> None:
        try:
            while self._may(model):
                while wait_s := max(self._pace(r.device).wait_s(self._clock()) for r in model.ranges):
                    await self._sleep(wait_s)
                if not self._may(model):
                    break
                model.count_heat()
                chosen = self._plan(model)
                if not len(chosen.incoming):
                    break
                await self._carry_out(model, chosen)
        except Stuck as stuck:
            log.info("placement.waits", model=model.model_id, pids=list(stuck.pids))
        except (VmmError, OSError) as error:
            log.warning("placement.failed", model=model.model_id, why=str(error))
        except Exception:
            log.exception("placement.failed", model=model.model_id)

    def _may(self, model: Model) -> bool:
        """Not while its slots wait for a stuck reader, nor before its empty ones are filled."""
        rate = self._manager.options.placement_bytes_per_s
        waits = model.releasing or model.refilling.locked() or model.arena.can_refill()
        return rate > 0 and model.movable and not model.stale and not waits

    def _pace(self, device: str) -> Pace:
        return self._paces.setdefault(device, Pace(self._manager.options.placement_bytes_per_s))

    def _plan(self, model: Model) -> Exchange:
        ledger, arena = self._manager.ledger, model.arena
        limits, leaving = [], []
        for p, record in enumerate(model.ranges):
            slabs = [(index, slab_id) for index, slab_id in record.slabs.items() if index in arena.parts[p].slabs]
            leaving += [(p, index) for index, i in slabs if ledger.slabs[i].state is not SlabState.LEASED]
            share_bytes = len(slabs) * arena.parts[p].slab_bytes // 16
            largest_bytes = int(arena.geometry.slot_bytes.max())
            failed = ledger.devices[record.device].failed
            limits.append(0 if failed else max(largest_bytes, min(BATCH_BYTES, share_bytes)))
        held_s = self._clock() - self._manager.options.give_back_delay_s
        return placement.plan(arena, limits, model.moved_s > held_s, leaving)

    async def _carry_out(self, model: Model, chosen: Exchange) -> None:
        now, sizes = self._clock(), model.arena.geometry.slot_bytes[chosen.incoming]
        for p, size_bytes in enumerate(np.bincount(chosen.slots[:, 0], sizes, len(model.ranges)).tolist()):
            self._pace(model.ranges[p].device).spend(size_bytes, now)
        model.moved_s[chosen.incoming] = model.moved_s[chosen.outgoing] = now
        await trading.exchange(model, chosen)
        model.exchanged += len(chosen.incoming)
        emit = log.debug
        if now >= self._log_due_s.get(model, 0.0):
            emit, self._log_due_s[model] = log.info, now + LOG_S
        emit(
            "experts.exchanged",
            model=model.model_id,
            experts=len(chosen.incoming),
            since_opened=model.exchanged,
            heat_covered=round(model.arena.heat_covered(), 3),
        )
