"""Releases: slabs come back from who had them, or are quarantined until they do.

Within a domain nobody has to be waited for. What leaves its domain, or goes back to
the driver, is asked for, and stays charged to whoever keeps it.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import structlog
from strata_api.v1 import memory_pb2

from vmmd.core.ledger import SlabState
from vmmd.core.victims import ArenaTrade
from vmmd.manager import trading
from vmmd.manager.model import Model

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.slabs")

HELD_DEADLINE_S = 1.0
"""How long a slab that was given back, or whose client died, may still be held before it is quarantined."""

TELL_AFTER_S = 0.01
"""How long a client is not told yet what it need not unmap at once: it is waiting for the growth that took it."""

LOOK_S = 2.0
"""Between looks at all processes for who holds what has been quarantined."""


class Releases:
    """Slabs on their way back.

    Attributes:
        tasks: wait for slabs to be let go; who needs memory waits for them, too.
    """

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._ledger = manager.ledger
        self._physical = manager.physical
        self._lingering: dict[int, set[int]] = {}  # by revocation: slabs that somebody may have mapped at an old place
        self._looking: asyncio.Task[None] | None = None
        self._look_again_s = 0.0
        self.tasks: set[asyncio.Task[None]] = set()

    # Asking for slabs

    def tell_removed(self, model: Model, trade: ArenaTrade, deadline_s: float = 0.0) -> int:
        """Asks an arena's sessions to unmap a trade's slabs; returns the revocation they answer.

        Without a deadline the memory stays in the domain, and whoever gets to it
        late harms nobody: until it answers, the slabs count as lingering.
        """
        revocation = self._ledger.new_id()
        removed = memory_pb2.SlabsRemoved(
            range_id=model.ranges[trade.part].range_id,
            slab_indexes=trade.indexes,
            revocation_id=revocation,
            deadline_ms=int(deadline_s * 1000),
        )
        event = memory_pb2.WatchEvent(epoch=self._manager.epoch, slabs_removed=removed)
        asked = model.sessions_with(model.ranges[trade.part])
        for session in asked:
            session.revocations.add(revocation)
            if deadline_s:
                session.send(event)
            else:
                asyncio.get_running_loop().call_later(TELL_AFTER_S, session.send, event)
        if asked:
            self._lingering[revocation] = set(trade.slab_ids)
            trading.withhold(model, trade, revocation)
        return revocation

    def forget_answered(self) -> None:
        """Drops revocations that every living session has answered."""
        open_ = {r for s in self._manager.sessions.values() for r in s.revocations}
        for revocation in [r for r in self._lingering if r not in open_]:
            del self._lingering[revocation]

    async def revoke(self, model: Model, trade: ArenaTrade) -> list[int]:
        """Two phases: ask, wait for the memory to be let go, quarantine what is not. Returns what was destroyed."""
        deadline_s = self._manager.options.revoke_deadline_s
        asked = model.sessions_with(model.ranges[trade.part])
        revocation = self.tell_removed(model, trade, deadline_s)
        until = time.monotonic() + deadline_s
        held = list(trade.slab_ids)
        while held and time.monotonic() < until:
            await asyncio.sleep(0.002)
            answered = not any(revocation in s.revocations for s in asked if not s.ended)
            held = [i for i in held if not self._let_go(i, answered)]
        holders = [s for s in asked if revocation in s.revocations and not s.ended] or asked
        kept = [i for i in trade.slab_ids if i in held or not self._physical.destroy_for_others(i)]
        for slab_id in kept:
            self._quarantine(slab_id, holders[0].session_id if holders else 0)
        gone = [i for i in trade.slab_ids if i not in kept]
        for slab_id in gone:
            self._ledger.finish_revoke(slab_id, time.monotonic())
            self._ledger.destroy(slab_id)
        return gone

    def _let_go(self, slab_id: int, answered: bool) -> bool:
        held = self._physical.held(slab_id)
        return answered if held is None else not held

    def _held(self, slab_id: int) -> bool:
        """Whether anybody else holds a slab; by the clients' word where the driver cannot tell."""
        held = self._physical.held(slab_id)
        return any(slab_id in slabs for slabs in self._lingering.values()) if held is None else held

    def quarantine_held(self, slab_ids: Sequence[int]) -> bool:
        """Quarantines free slabs that somebody still holds: they cannot leave their domain. True if any."""
        self.forget_answered()
        held = [i for i in slab_ids if self._held(i)]
        for slab_id in held:
            self._quarantine(slab_id, 0)
        return bool(held)

    def _quarantine(self, slab_id: int, holder: int) -> None:
        session = self._ledger.sessions.get(holder)
        pid = session.pid if session is not None else 0
        self._ledger.quarantine(slab_id, holder, time.monotonic(), pid)
        log.warning("slab.quarantined", slab=slab_id, session=holder, pid=pid)

    # Taking back

    def take_back(self, slab_ids: Sequence[int], holder: int) -> None:
        """Slabs whose user is done with them or dead: FREE once nobody holds them, else quarantined.

        Slabs that are still being created are left to the plan that creates them.
        Empty ranges without an owner are forgotten on the way. Never fails.
        """
        now = time.monotonic()
        mine = [i for i in slab_ids if self._ledger.slabs[i].state is SlabState.LEASED and i in self._physical]
        for slab_id in mine:
            self._ledger.begin_revoke(slab_id, now)
        held = self._settle(mine)
        if held:
            task = asyncio.create_task(self._await_release(held, holder))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            self._came_back()

    def _settle(self, slab_ids: Sequence[int]) -> list[int]:
        """Frees those that nobody else holds; returns the others.

        A slab that was an arena's may still be mapped at its old place by others of
        the domain: that is no reason to keep it.
        """
        held = self.still_held(slab_ids)
        for slab_id in set(slab_ids) - set(held):
            self._ledger.finish_revoke(slab_id, time.monotonic())
        return held

    def still_held(self, slab_ids: Iterable[int]) -> list[int]:
        """Those of these slabs that somebody is seen to hold, old places in arenas apart."""
        self.forget_answered()
        lingering = set().union(*self._lingering.values())
        return [i for i in slab_ids if i not in lingering and self._physical.held(i)]

    async def _await_release(self, slab_ids: list[int], holder: int) -> None:
        until = time.monotonic() + HELD_DEADLINE_S
        delay = 0.001
        while slab_ids and time.monotonic() < until:
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.05)
            slab_ids = self._settle(slab_ids)
        for slab_id in slab_ids:
            self._quarantine(slab_id, holder)
        self._came_back()

    def lift_quarantine(self) -> None:
        """Frees quarantined slabs whose holder has let go, or died."""
        self.forget_answered()
        for device in self._ledger.devices:
            for slab_id in self._ledger.slabs_in(device, SlabState.QUARANTINED):
                dead = self._ledger.slabs[slab_id].holder not in self._manager.sessions
                phantom = dead and self._physical.forget(slab_id)
                if phantom or not self._held(slab_id):
                    self._ledger.lift(slab_id, time.monotonic())
                    log.info("slab.released", slab=slab_id)
                if phantom:
                    self._ledger.destroy(slab_id)
        self._look_for_holders()

    def _look_for_holders(self) -> None:
        """Looks who has the slabs of sessions that have ended: a child, or whoever was sent a descriptor."""
        quarantined = [i for d in self._ledger.devices for i in self._ledger.slabs_in(d, SlabState.QUARANTINED)]
        sought = [i for i in quarantined if self._ledger.slabs[i].holder not in self._manager.sessions]
        sought = [i for i in sought if i in self._physical]
        if sought and not self._looking and time.monotonic() >= self._look_again_s:
            self._looking = asyncio.create_task(self._name_holders(sought))

    async def _name_holders(self, slab_ids: list[int]) -> None:
        try:
            slabs = [self._physical[i] for i in slab_ids]
            loop = asyncio.get_running_loop()
            pids = await loop.run_in_executor(self._manager.executor, self._manager.driver.holders, slabs)
            for slab_id, pid in zip(slab_ids, pids, strict=True):
                slab = self._ledger.slabs.get(slab_id)
                if pid and slab is not None and slab.state is SlabState.QUARANTINED:
                    self._ledger.name_holder(slab_id, pid)
        finally:
            self._looking = None
            self._look_again_s = time.monotonic() + LOOK_S

    def _came_back(self) -> None:
        self._manager.waiting.look()
        self._manager.slabs.tidy()
        self._manager.upkeep.wake()
