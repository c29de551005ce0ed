"""Upkeep: heat, exchanges, slabs for arenas, quarantine, other programs, stale files, profiles.

One task that wakes every quarter of a second, or at once when memory came back.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from vmmd.core import arbiter
from vmmd.core.ledger import Ledger, RangeRecord
from vmmd.core.residency import Arena
from vmmd.errors import StaleGeneration, VmmError
from vmmd.manager import filling
from vmmd.manager.files import check_unchanged
from vmmd.manager.model import Model, Stuck
from vmmd.manager.slabs import Placed

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.upkeep")

TICK_S = 0.25
PROFILES_S = 60.0
"""Between two times that what was learned is saved, beside when a model is dropped and when the daemon leaves."""

FILES_S = 1.0
"""Between two looks at whether models' files have changed."""

REFILL_BYTES = 8 << 30
"""Filled before anything else is looked at."""


class Upkeep:
    """The manager's housekeeping."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._files_due_s = 0.0
        self._profiles_due_s = time.monotonic() + PROFILES_S
        self._no_room_s: dict[str, float] = {}  # by device: when there was last no room for another slab
        self._tasks: set[asyncio.Task[None]] = set()
        self._rebalancing: set[str] = set()  # devices

    def start(self) -> None:
        """Begins ticking."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Ends it."""
        for task in [self._task, *self._tasks]:
            if task is not None:
                task.cancel()
                await asyncio.wait([task])

    def wake(self) -> None:
        """Memory came back: look at once."""
        self._woken.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._tick()
            except Exception:
                log.exception("upkeep.failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):  # wait_for may swallow a cancellation
                    await self._woken.wait()
            self._woken.clear()

    async def _tick(self) -> None:
        manager = self._manager
        manager.releases.lift_quarantine()
        manager.conversations.expire()
        manager.devices.measure()
        manager.figures.tick()
        now = time.monotonic()
        for model in list(manager.models.values()):
            if model.count_heat():
                manager.placement.begin(model)
            await asyncio.sleep(0)  # a growth that has come meanwhile goes first
        if now >= self._files_due_s:
            self._files_due_s = now + FILES_S
            for model in manager.models.values():
                self._check_files(model)
        if now >= self._profiles_due_s:
            self._profiles_due_s = now + PROFILES_S
            for model in manager.models.values():
                manager.save_profile(model)
        for device in manager.ledger.devices.values():
            balance = manager.ledger.balance_slabs(device.uuid)
            if balance < 1:
                self._no_room_s[device.uuid] = now
            if balance < 0 and not device.failed:
                self._shed(device.uuid, -balance)
        manager.waiting.look()
        for model in sorted(manager.models.values(), key=lambda m: not m.sessions):  # those in use first
            if model.movable and not model.stale:
                await self._give_back(model)
            elif model.movable and not model.sessions:
                await manager.drop_model(model)  # nobody can open a stale model any more
        if len(manager.models) > 1:
            for device in manager.ledger.devices.values():
                if not device.is_host and device.uuid not in self._rebalancing:
                    self._begin(self._rebalance(device.uuid))

    def _shed(self, device: str, count: int) -> None:
        """Begins to give slabs back to the driver, beside everything else."""
        self._begin(self._manager.slabs.shed(device, count))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begins what may have to wait for a reader."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Files

    def _check_files(self, model: Model) -> None:
        if model.ready.done() and not model.stale:
            try:
                check_unchanged(model.files, model.identities)
            except StaleGeneration as error:
                model.mark_stale(error.message)

    # Giving back

    async def _give_back(self, model: Model) -> None:
        """Slabs that nobody needs go to the arena, filled with the hottest experts that are not there."""
        if model.refilling.locked():
            return
        async with model.refilling:
            for p, record in enumerate(model.ranges):
                sizes = wanted_slabs(model.arena, p)
                sizes = sizes[: min(self._returnable(record), self._manager.slabs.places(record))]
                self._manager.figures.returned(record.device, await self.add_slabs(model, p, sizes))
            await self.refill(model)

    async def refill(self, model: Model) -> None:
        """Fills empty slots with the hottest experts that are missing. The model's `refilling` held.

        Not while experts are exchanged, lest one come twice; exchanges end where slots are empty.
        """
        try:
            while self._may_refill(model) and await filling.refill(model, REFILL_BYTES):
                pass
        except (VmmError, OSError) as error:
            log.warning("model.refill_failed", model=model.model_id, why=str(error))

    def _may_refill(self, model: Model) -> bool:
        return model.movable and not self._manager.placement.is_under_way(model)

    def _returnable(self, record: RangeRecord) -> int:
        """Slabs of the range's device that can go to an arena now: none that was traded just now, or is waited for."""
        if self._manager.waiting.is_wanted(record.device):
            return 0
        long_ago = time.monotonic() - self._manager.options.give_back_delay_s
        roomy = self._no_room_s.get(record.device, long_ago) <= long_ago
        return returnable(self._manager.ledger, record, long_ago, roomy=roomy)

    async def add_slabs(self, model: Model, part: int, sizes: list[int]) -> int:
        """Gives a part a slab of each of these size classes; returns how many. The model's `refilling` held."""
        manager, record = self._manager, model.ranges[part]
        if not sizes:
            return 0
        try:
            granted = await manager.slabs.provide([arbiter.Request(record.range_id, len(sizes))], patient=False)
        except VmmError as error:
            log.warning("arena.not_grown", model=model.model_id, slabs=len(sizes), why=error.message)
            return 0
        if model.closed:
            manager.releases.take_back([x.slab_id for x in granted.placed], 0)
            return 0
        self._take_in(model, part, granted.placed, sizes)
        return len(sizes)

    def _take_in(self, model: Model, part: int, placed: Sequence[Placed], sizes: Sequence[int]) -> None:
        """Slabs that an arena's range got become the arena's."""
        record = model.ranges[part]
        for slab, slot_bytes in zip(placed, sizes, strict=True):
            model.arena.add_slab(part, slab.index, slot_bytes)
        self._manager.grant_added(model, record, placed)
        log.info("arena.grown", model=model.model_id, device=record.device, slabs=len(sizes))

    async def _rebalance(self, device: str) -> None:
        """A slab goes from an arena to another of its domain that it is worth much more to."""
        manager = self._manager
        if manager.waiting.is_wanted(device):
            return
        self._rebalancing.add(device)
        try:
            done = await manager.slabs.rebalance(device)
            if done is None:
                return
            found, placed = done
            record = manager.ledger.ranges[placed.range_id]
            model = manager.models.get(record.owner)
            if model is None or model.closed:
                manager.releases.take_back([placed.slab_id], 0)
                return
            self._take_in(model, model.ranges.index(record), [placed], [found.slot_bytes])
            manager.figures.returned(device, 1)
            self.wake()
        except (VmmError, Stuck) as error:
            log.warning("arena.not_rebalanced", device=device, why=str(error))
        finally:
            self._rebalancing.discard(device)


def wanted_slabs(arena: Arena, part: int) -> list[int]:
    """A size class for each slab more that an arena part could fill, the class with most missing heat first.

    The first part, which is read fastest, wants what is on others, too.
    """
    sizes: list[int] = []
    wanted, empty = arena.missing, Counter[int]()
    if part == 0:
        wanted = wanted | (arena.place[:, 0] > 0)
    for slab in (slab for p in (arena.parts if part else arena.parts[:1]) for slab in p.slabs.values()):
        empty[slab.slot_bytes] += slab.empty
    for slot_bytes, count in arena.wanted_by_class(wanted).items():
        per_slab = arena.parts[part].slab_bytes // slot_bytes
        sizes += [slot_bytes] * -(-max(0, count - empty[slot_bytes]) // per_slab)
    return sizes


def returnable(ledger: Ledger, record: RangeRecord, traded_before_s: float, *, roomy: bool) -> int:
    """Free slabs that no trade touched since `traded_before_s`, and slabs to create.

    Unless the device has been `roomy` for a while, slabs are created only for those
    of other domains that are destroyed: other programs may want the rest.
    """
    free = [ledger.slabs[i] for i in ledger.free_slabs(record.device, record.domain)]
    settled = sum(s.traded_s is None or s.traded_s <= traded_before_s for s in free)
    beside = arbiter.free_for(ledger, record.device, record.domain) - len(free)
    if not roomy:
        beside -= max(0, ledger.balance_slabs(record.device))
    return settled + (beside if settled == len(free) else 0)
