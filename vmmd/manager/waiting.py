"""Waiting: requests that cannot be met now are tried again, in order, until their client's deadline."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from vmmd.core import arbiter, decisions
from vmmd.core.ledger import SessionRecord
from vmmd.core.waiting import Queue, Waiter
from vmmd.errors import Exhausted, LeaseRevoked
from vmmd.manager.slabs import Provided

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

LOOK_AGAIN_S = 0.25
"""Memory comes back in ways that nobody announces: readers move on, homes are filled."""


class Waiting:
    """All requests that clients make for memory."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._queue = Queue()
        self._woken: dict[int, asyncio.Event] = {}  # by ticket

    def look(self) -> None:
        """Memory may have come back, or somebody no longer waits."""
        for event in self._woken.values():
            event.set()

    def is_wanted(self, device: str) -> bool:
        """Whether somebody waits for memory of a device: nobody else is given any of it meanwhile."""
        return self._queue.is_wanted(device)

    async def provide(
        self,
        asker: SessionRecord,
        ask: Callable[[], list[arbiter.Request]],
        *,
        wait_s: float,
        gone: Callable[[], bool],
        keep_models: Collection[int] = (),
    ) -> Provided:
        """Grants what `ask` says, at once or within `wait_s`, after those that came before.

        Args:
            asker: the session, whose priority counts.
            ask: what is missing at that moment; it is asked again before each try.
            wait_s: 0 refuses at once what cannot be had.
            gone: whether the client no longer waits.
            keep_models: see `arbiter.plan`.

        Errors: `Exhausted`, with what was refused last; `LeaseRevoked` (`gone`); `DriverError`.
        """
        try:
            return await self._provide(asker, ask, wait_s, gone, keep_models)
        except Exhausted as refusal:
            refused = decisions.refused(self._manager.ledger, ask(), refusal.message, time.monotonic())
            self._manager.decisions.add(refused)
            raise
        finally:
            self.look()

    async def _provide(
        self,
        asker: SessionRecord,
        ask: Callable[[], list[arbiter.Request]],
        wait_s: float,
        gone: Callable[[], bool],
        keep_models: Collection[int],
    ) -> Provided:
        devices = {self._manager.ledger.ranges[r.range_id].device for r in ask()}
        priority = asker.share.priority
        provide = self._manager.slabs.provide
        if not wait_s:
            self._after(self._queue.before(priority, devices), ask())
            return await provide(ask(), keep_models=keep_models, ask=True)
        most = self._manager.options.waiting_per_user_max
        if self._queue.of_user(asker.uid) >= most:
            raise Exhausted(f"{most} requests of user {asker.uid} wait already (waiting_per_user_max)")
        waiter = self._queue.add(priority, devices, asker.uid, time.monotonic() + wait_s)
        woken = self._woken[waiter.ticket] = asyncio.Event()
        clients_asked = False
        try:
            while True:
                try:
                    self._after(self._queue.before(priority, devices, waiter), ask())
                    clients_are_asked, clients_asked = not clients_asked, True
                    return await provide(ask(), keep_models=keep_models, patient=False, ask=clients_are_asked)
                except Exhausted as error:
                    refusal = error
                if (left_s := waiter.until_s - time.monotonic()) <= 0:
                    break
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, LOOK_AGAIN_S)):
                        await woken.wait()
                woken.clear()
                if gone():
                    raise LeaseRevoked("the client went while its request waited for memory")
            raise Exhausted(
                f"waited {wait_s:.1f} s: {refusal.message}",
                refusal.requested_bytes,
                refusal.free_bytes,
                refusal.holders,
            )
        finally:
            self._queue.remove(waiter)
            del self._woken[waiter.ticket]

    def _after(self, before: Sequence[Waiter], requests: Sequence[arbiter.Request]) -> None:
        """Errors: `Exhausted` where others come first, unless all of it was promised."""
        manager = self._manager
        if before and not arbiter.is_promised(manager.ledger, manager.holders(), requests):
            raise Exhausted(f"{len(before)} requests that came first, or have priority, wait for memory of that device")
