"""K/V ranges: elastic memory of one session, from its first slab to its last."""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import structlog
from strata_api.v1 import memory_pb2

from vmmd.core import arbiter, decisions, shares
from vmmd.core.ledger import RangeKind, RangeRecord, SlabState
from vmmd.errors import Exhausted, InvalidRequest, LeaseRevoked, NotFound
from vmmd.manager.session import BatchItem, Kind, Session
from vmmd.manager.slabs import Placed

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.manager")


class Grown(NamedTuple):
    """A growth: its batch (0 if nothing was missing) and where the slabs came from."""

    batch_id: int
    ranges: list[RangeRecord]
    free_slabs: int
    trades: list[memory_pb2.Trade]


CELLS_MAX = 1 << 40
SLABS_MAX = (1 << 32) - 1
"""Of a range: the wire counts them with 32 bits."""


class KvRanges:
    """All sessions' K/V ranges; what they hold is in the ledger."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager

    def create(
        self,
        session: Session,
        device_uuid: str,
        model_id: int,
        cells_per_slab: int,
        cells_max: int,
        *,
        shrinkable: bool = False,
    ) -> RangeRecord:
        """An elastic range without memory, for K/V or other uses. Errors: `InvalidRequest`, `NotFound`, `Exhausted`."""
        device = self._manager.devices.choose([device_uuid] if device_uuid else [])[0]
        if model_id and not any(m is not None and m.model_id == model_id for m in session.attached):
            raise NotFound(f"model {model_id} is not open in this session")
        size = self._manager.ledger.devices[device].slab_bytes
        fits = 1 <= cells_per_slab <= size and cells_per_slab % 16 == 0
        if not fits or not 1 <= cells_max <= min(CELLS_MAX, cells_per_slab * SLABS_MAX):
            raise InvalidRequest(
                f"a range of {cells_max} cells, {cells_per_slab} a slab of {size} bytes: a slab holds a positive"
                f" multiple of 16 cells, a range 1 to {CELLS_MAX} cells and at most {SLABS_MAX} slabs"
            )
        self.check_count(session)
        record = RangeRecord(
            self._manager.ledger.new_id(),
            RangeKind.KV,
            device,
            session.record.domain,
            session.session_id,
            -(-cells_max // cells_per_slab),
            cells_per_slab,
            cells_max,
            shrinkable=shrinkable,
        )
        self._manager.ledger.add_range(record)
        return record

    def check_count(self, session: Session) -> None:
        """Errors: `Exhausted` where a session can have no more ranges."""
        limit = self._manager.options.ranges_per_session_max
        if len(self._manager.ledger.session_ranges(session.session_id)) >= limit:
            raise Exhausted(
                f"this session has {limit} ranges, which is the limit (ranges_per_session_max); close one first"
            )
        uid, most = session.record.uid, self._manager.options.ranges_per_user_max
        if sum(self._uid_of(r) == uid for r in self._manager.ledger.ranges.values()) >= most:
            raise Exhausted(f"user {uid} has {most} ranges, which is the limit (ranges_per_user_max); close one first")

    def _uid_of(self, record: RangeRecord) -> int | None:
        """The user whose session has a range; None of a model's."""
        session = self._manager.ledger.sessions.get(record.owner)
        return session.uid if session is not None else None

    def _own_range(self, session: Session, range_id: int) -> RangeRecord:
        record = self._manager.ledger.ranges.get(range_id)
        is_own = record is not None and record.kind is RangeKind.KV and record.owner == session.session_id
        if record is None or not is_own or record.closed or self._manager.conversations.is_others(session, range_id):
            raise NotFound(f"range {range_id} is not a K/V range of this session")
        return record

    async def grow(self, session: Session, growths: Sequence[tuple[int, int]], wait_s: float = 0.0) -> Grown:
        """Grows K/V ranges to at least so many cells each, all or nothing, at once or within `wait_s`.

        A caller that is cancelled meanwhile (its client hung up) does not stop a
        trade half-way: the growth is completed and given back. Errors:
        `InvalidRequest`, `NotFound`, `Exhausted` (nothing changed), `LeaseRevoked`.
        """
        hung_up = asyncio.Event()
        task = asyncio.create_task(self._counted_growth(session, growths, wait_s, hung_up))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            hung_up.set()
            self._manager.waiting.look()
            task.add_done_callback(lambda done: self._undo_growth(session, done))
            raise

    def _undo_growth(self, session: Session, done: "asyncio.Task[Grown]") -> None:
        if not done.cancelled() and done.exception() is None:
            items = session.batches.pop(done.result().batch_id, [])
            kept = [i.slab_id for i in items if self._manager.slabs.is_at(Placed(i.id, i.slab_index, i.slab_id))]
            self._manager.releases.take_back(kept, session.session_id)

    async def _counted_growth(
        self, session: Session, growths: Sequence[tuple[int, int]], wait_s: float, hung_up: asyncio.Event
    ) -> Grown:
        figures = self._manager.figures
        began_s = figures.growth_began(session)
        try:
            grown = await self._grow(session, growths, wait_s, hung_up)
        except BaseException:
            figures.growth_ended(session, began_s, None)
            raise
        traded = sum(t.slabs for t in grown.trades)
        figures.growth_ended(session, began_s, grown.free_slabs + traded, traded)
        return grown

    async def _grow(
        self, session: Session, growths: Sequence[tuple[int, int]], wait_s: float, hung_up: asyncio.Event
    ) -> Grown:
        records = [self._own_range(session, range_id) for range_id, _ in growths]
        if len({r.range_id for r in records}) != len(records):
            raise InvalidRequest("a range is named twice in one growth")
        await self._manager.slabs.settled(records)
        if session.ended or any(r.closed for r in records):
            raise LeaseRevoked("the session or the range ended before it grew")
        session.check_batches()
        for record, (_, cells) in zip(records, growths, strict=True):
            if not 0 <= cells <= record.cells_max:
                raise InvalidRequest(
                    f"range {record.range_id} cannot grow to {cells} cells; it was made for {record.cells_max} at most"
                )

        def missing() -> list[arbiter.Request]:
            each = zip(records, growths, strict=True)
            wanted = [(r.range_id, -(-cells // r.cells_per_slab) - len(r.slabs)) for r, (_, cells) in each]
            return [arbiter.Request(range_id, slabs) for range_id, slabs in wanted if slabs > 0]

        asked = {request.range_id: request.slabs for request in missing()}
        if not asked:
            return Grown(0, records, 0, [])
        self._check_cap(session, asked)
        gone = partial(_is_over, session, records, hung_up)
        granted = await self._manager.waiting.provide(session.record, missing, wait_s=wait_s, gone=gone)
        if session.ended or any(r.closed for r in records):
            self._manager.releases.take_back(
                [p.slab_id for p in granted.placed if self._manager.slabs.is_at(p)], session.session_id
            )
            raise LeaseRevoked("the session or the range ended while it grew")
        items = [BatchItem(Kind.KIND_SLAB, p.range_id, p.index, p.slab_id, writable=True) for p in granted.placed]
        batch_id = session.add_batch(self._manager.ledger.new_id(), items)
        log.info(
            "range.grown",
            session=session.session_id,
            slabs=len(items),
            free=granted.free_slabs,
            traded=sum(t.slabs for t in granted.trades),
            moved=sum(t.experts_moved for t in granted.trades),
        )
        return Grown(batch_id, records, granted.free_slabs, granted.trades)

    def _check_cap(self, session: Session, asked: dict[int, int]) -> None:
        """Errors: `Exhausted` where a growth is beyond the session's own cap: no waiting helps."""
        why = shares.over_cap(self._manager.ledger, session.record, asked)
        if why:
            requests = [arbiter.Request(range_id, slabs) for range_id, slabs in asked.items()]
            refused = decisions.refused(self._manager.ledger, requests, why, time.monotonic())
            self._manager.decisions.add(refused)
            raise Exhausted(why)

    async def shrink(self, session: Session, range_id: int, cells: int) -> RangeRecord:
        """Takes back a K/V range's slabs from the end, keeping at least so many cells.

        The client has unmapped them; what it still holds past a deadline stays
        charged to it as quarantined. Errors: `InvalidRequest`, `NotFound`.
        """
        record = self._own_range(session, range_id)
        if cells < 0:
            raise InvalidRequest(f"a range cannot shrink to {cells} cells")
        keep = -(-cells // record.cells_per_slab)
        slab_ids = [s for i, s in sorted(record.slabs.items()) if i >= keep]
        slab_ids = [s for s in slab_ids if self._manager.ledger.slabs[s].state is SlabState.LEASED]
        if slab_ids:
            now, why = time.monotonic(), f"its client keeps {cells} cells"
            freed = decisions.freed(self._manager.ledger, record, len(slab_ids), why, now)
            self._manager.decisions.add([freed])
        for items in session.batches.values():
            items[:] = [item for item in items if item.slab_id not in slab_ids]
        self._manager.conversations.lowered(range_id, keep * record.cells_per_slab)
        self._manager.releases.take_back(slab_ids, session.session_id)
        self._manager.recalls.answered(range_id)
        return record

    async def close(self, session: Session, range_id: int) -> None:
        """Takes a range back whole; it is forgotten once nobody holds its slabs. Errors: `NotFound`."""
        record = await self.shrink(session, range_id, 0)
        self._manager.conversations.forget(range_id)
        record.closed = True
        self._manager.slabs.tidy()


def _is_over(session: Session, records: Sequence[RangeRecord], hung_up: asyncio.Event) -> bool:
    """Whether nobody waits for a growth any more."""
    return session.ended or hung_up.is_set() or any(record.closed for record in records)
