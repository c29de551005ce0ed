"""Recalls: before anybody is refused, clients that can are asked to give memory back.

A client says of a range that it can (`shrinkable`). It is asked, never forced: what it
does not give stays its own, and whoever asked is refused. One that lets a deadline pass
is asked no more until it has shrunk that range of its own accord.
"""

import asyncio
import time
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING

import structlog
from strata_api.v1 import memory_pb2

from vmmd.core.ledger import RangeKind, RangeRecord, SlabState

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.slabs")

LOOK_S = 0.005


class Recalls:
    """Requests to clients to shrink their ranges."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._asked: dict[int, int] = {}  # by range: the number of the request that its client has not answered yet
        self._numbers = count()
        self._silent: set[int] = set()  # those that let a deadline pass

    async def make_room(self, device: str, slabs: int, busy: Mapping[int, int]) -> bool:
        """Asks for so many slabs, and waits for the answers or the deadline; True if anybody gave some.

        Asks nobody where all of them together have too few; but where some are asked for
        another's sake already, waits for those first. `busy` ranges, which are growing
        themselves, are left alone.
        """
        self._silent &= self._manager.ledger.ranges.keys()
        able = [r for r in self._manager.ledger.ranges.values() if self._is_able(r, device, busy)]
        chosen: list[tuple[RangeRecord, int]] = []
        for record in sorted(able, key=lambda r: (-len(r.slabs), r.range_id)):  # few clients rather than many
            left = slabs - sum(share for _, share in chosen)
            if left > 0:
                chosen.append((record, min(left, self._leased(record))))
        deadline_s = self._manager.options.revoke_deadline_s
        if sum(share for _, share in chosen) < slabs:
            return await self._others_answers(device, deadline_s)
        before = {record.range_id: self._leased(record) for record, _ in chosen}
        requests = [(record, self._ask(record, share, deadline_s)) for record, share in chosen]
        until = time.monotonic() + deadline_s
        while any(self._is_awaited(record, number) for record, number in requests) and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        for record, number in requests:
            if self._is_awaited(record, number):
                self._silent.add(record.range_id)
                log.warning("range.not_shrunk", range=record.range_id, session=record.owner)
            if self._asked.get(record.range_id) == number:
                del self._asked[record.range_id]
        return any(self._leased(record) < before[record.range_id] for record, _ in chosen)

    async def _others_answers(self, device: str, deadline_s: float) -> bool:
        """Waits for an answer that somebody else waits for; False where there is none, or it does not come."""
        ranges = self._manager.ledger.ranges
        awaited = {(i, n) for i, n in self._asked.items() if i in ranges and ranges[i].device == device}
        until = time.monotonic() + deadline_s
        while awaited and awaited <= self._asked.items() and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        return any(range_id not in self._silent for range_id, _ in awaited - self._asked.items())

    def answered(self, range_id: int) -> None:
        """A client has shrunk a range, by whatever it gave."""
        self._asked.pop(range_id, None)
        self._silent.discard(range_id)

    def _is_able(self, record: RangeRecord, device: str, busy: Mapping[int, int]) -> bool:
        session = self._manager.sessions.get(record.owner)
        return (
            record.kind is RangeKind.KV
            and record.device == device
            and record.shrinkable
            and not record.closed
            and not busy.get(record.range_id)
            and record.range_id not in self._silent
            and record.range_id not in self._asked
            and session is not None
            and session.watcher is not None
            and self._leased(record) > 0
        )

    def _leased(self, record: RangeRecord) -> int:
        """Slabs of a range that are not on their way back already."""
        return sum(self._manager.ledger.slabs[i].state is SlabState.LEASED for i in record.slabs.values())

    def _is_awaited(self, record: RangeRecord, number: int) -> bool:
        """Whether a request is not answered; another one may be, of somebody who has asked since."""
        return self._asked.get(record.range_id) == number and record.owner in self._manager.sessions

    def _ask(self, record: RangeRecord, slabs: int, deadline_s: float) -> int:
        """Sends a request; returns its number."""
        number = self._asked[record.range_id] = next(self._numbers)
        request = memory_pb2.ShrinkRequest(
            range_id=record.range_id, slabs=slabs, deadline_ms=max(1, int(deadline_s * 1000))
        )
        session = self._manager.sessions[record.owner]
        session.send(memory_pb2.WatchEvent(epoch=self._manager.epoch, shrink_request=request))
        log.info("range.asked", range=record.range_id, session=record.owner, slabs=slabs)
        return number
