"""Slabs: carries out plans.

A plan is committed in the ledger before the first await; what fails is undone.
`vmmd.manager.releases` takes slabs back.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
from strata_api.v1 import memory_pb2

from vmmd.core import arbiter, decisions
from vmmd.core.ledger import Ledger, RangeKind, RangeRecord, SlabState
from vmmd.core.victims import ArenaTrade
from vmmd.errors import Exhausted, VmmError
from vmmd.manager import trading
from vmmd.manager.model import Model, Stuck
from vmmd.manager.physical import Wanted

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.slabs")

ATTEMPTS_MAX = 16
WAIT_DEADLINE_S = 10.0
"""How long a plan waits for what others are doing with the memory that it needs."""

LOOK_AGAIN_S = 0.05
"""Meanwhile: homes that are ready let go of slots one group after the other."""


class _PlanAgain(Exception):
    """The ledger has changed since the plan was made."""


class _MemoryTaken(Exception):
    """The driver had no room for a new slab: another program took it since it was measured."""

    def __init__(self, error: Exhausted) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Placed:
    """A slab at its index of a range."""

    range_id: int
    index: int
    slab_id: int


@dataclass
class Provided:
    """What a request got, and from where."""

    placed: list[Placed] = field(default_factory=list)
    free_slabs: int = 0
    trades: list[memory_pb2.Trade] = field(default_factory=list)


class Slabs:
    """Physical slabs and the plans over them."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._ledger = manager.ledger
        self._physical = manager.physical
        self._releases = manager.releases
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: Counter[int] = Counter()  # ranges that a plan is being carried out for
        self._asking = 0  # of them, those whose plans wait for clients to give something back
        self._shedding: set[str] = set()  # devices that slabs are being given back to the driver of

    def is_at(self, placed: Placed) -> bool:
        """Whether a slab is still at that place, and not on its way back."""
        slab = self._ledger.slabs.get(placed.slab_id)
        return (
            slab is not None
            and (slab.range_id, slab.index) == (placed.range_id, placed.index)
            and slab.state is SlabState.LEASED
        )

    async def provide(
        self,
        requests: Sequence[arbiter.Request],
        *,
        keep_models: Collection[int] = (),
        patient: bool = True,
        ask: bool = False,
    ) -> Provided:
        """Plans and carries out, all or nothing.

        `patient` waits for memory that is on its way back; `ask` asks clients that can to
        give some back, before it is refused. Plans again where a model was dropped for it,
        where a reader is stuck or where another program took the memory. Errors:
        `Exhausted`, `DriverError`.
        """
        mine = [r.range_id for r in requests]
        self._busy.update(mine)
        try:
            provided = await self._provide(requests, keep_models, patient, ask)
            self._manager.figures.traded(provided.trades)
            return provided
        finally:
            self._busy.subtract(mine)
            self.tidy()

    async def rebalance(self, device: str) -> tuple[arbiter.Rebalance, Placed] | None:
        """Moves one slab of a device between arenas of a domain, if that pays. Errors: `VmmError`, `Stuck`."""
        holders = self._manager.holders()
        found = arbiter.plan_rebalance(
            self._ledger, holders, device, now_s=time.monotonic(), policy=self._manager.policy
        )
        if found is None or self.places(self._ledger.ranges[found.request.range_id]) < 1:
            return None
        self._busy.update([found.request.range_id])
        try:
            provided = await self._carry_out(found.plan, [found.request])
            self._manager.figures.traded(provided.trades)
            return found, provided.placed[0]
        except (_PlanAgain, _MemoryTaken):
            return None
        finally:
            self._busy.subtract([found.request.range_id])
            self.tidy()

    async def _provide(
        self, requests: Sequence[arbiter.Request], keep_models: Collection[int], patient: bool, ask: bool
    ) -> Provided:
        attempts = 0
        until = time.monotonic() + (WAIT_DEADLINE_S if patient else 0.0)
        while attempts < ATTEMPTS_MAX:
            try:
                plan = arbiter.plan(
                    self._ledger,
                    self._manager.holders(),
                    requests,
                    now_s=time.monotonic(),
                    policy=self._manager.policy,
                    keep_models={*keep_models, *self._withholding(requests)},
                )
            except Exhausted as error:
                if time.monotonic() + error.retry_s < until and await self._wait_for_memory(requests, error):
                    continue
                if ask and isinstance(error, arbiter.Short) and await self._ask_for_memory(requests, error):
                    until = time.monotonic() + WAIT_DEADLINE_S  # for what was given to be let go
                    continue
                raise
            for range_id, slabs in plan.reclaim:
                reclaiming = asyncio.create_task(self._manager.conversations.reclaim(range_id, slabs))
                self._tasks.add(reclaiming)
                reclaiming.add_done_callback(self._tasks.discard)
                await reclaiming
            if plan.reclaim:
                continue
            if plan.drop:
                for model_id in plan.drop:
                    holder = next(h for h in self._manager.holders() if h.arena.model_id == model_id)
                    dropped = decisions.dropped(self._ledger, holder, requests, time.monotonic())
                    self._manager.decisions.add([dropped])
                    dropping = asyncio.create_task(self._manager.drop_model(self._manager.models[model_id]))
                    self._tasks.add(dropping)  # others who need memory wait for it, too
                    dropping.add_done_callback(self._tasks.discard)
                    await dropping
                continue
            attempts += 1
            self._check_places(requests)
            try:
                return await self._carry_out(plan, requests)
            except _PlanAgain:
                continue
            except _MemoryTaken as taken:  # the next plan knows, or says who holds what
                self._manager.devices.measure()
                if attempts == 2:
                    raise taken.error from None
            except Stuck as stuck:
                log.warning("plan.stuck", model=stuck.model_id, pids=stuck.pids)
        raise Exhausted("no slab could be had: the readers of every arena that could give some are stuck")

    def _withholding(self, requests: Sequence[arbiter.Request]) -> set[int]:
        """Models of other domains with a client that keeps what was taken back: asking it for more is in vain."""
        domains = {self._ledger.ranges[r.range_id].domain for r in requests}
        quarantined = (
            i for device in self._ledger.devices for i in self._ledger.slabs_in(device, SlabState.QUARANTINED)
        )
        holders = {self._ledger.slabs[i].holder for i in quarantined}
        return {
            m.model_id
            for m in self._manager.models.values()
            if m.arena.domain not in domains and any(s.session_id in holders for s in m.sessions)
        }

    async def _wait_for_memory(self, requests: Sequence[arbiter.Request], refusal: Exhausted) -> bool:
        """Waits for slabs that are on their way back, or experts that will soon be evictable; False if none are.

        Slots that are being filled and slabs that another plan has in hand may be
        somebody's to give a moment later, and those that were traded a moment ago soon.
        """
        owners = {self._ledger.ranges[r.range_id].owner for r in requests}
        others = [m for m in self._manager.models.values() if m.model_id not in owners]
        filling = [m.background for m in others if m.background is not None and not m.background.done()]
        pending = [*self._tasks, *self._releases.tasks, *filling]
        if pending:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED, timeout=LOOK_AGAIN_S)
            return True
        if any(m.working for m in others) or self._busy.total() - self._asking > len(requests):
            await asyncio.sleep(0.002)
            return True
        if refusal.retry_s:
            await asyncio.sleep(min(refusal.retry_s, LOOK_AGAIN_S))
            return True
        return False

    async def _ask_for_memory(self, requests: Sequence[arbiter.Request], short: arbiter.Short) -> bool:
        """Asks clients that can to give back what is missing; False where nobody did.

        Meanwhile this plan has nothing in hand that another could wait for.
        """
        self._asking += len(requests)
        try:
            return await self._manager.recalls.make_room(short.device, short.slabs, self._busy)
        finally:
            self._asking -= len(requests)

    async def settled(self, records: Sequence[RangeRecord]) -> None:
        """Waits until no slab of these ranges is on its way back and no other plan is made for them."""
        while any(
            self._busy[r.range_id] or any(self._ledger.slabs[i].state is SlabState.REVOKING for i in r.slabs.values())
            for r in records
        ):
            await asyncio.sleep(0.001)

    # Carrying out

    async def _carry_out(self, plan: arbiter.Plan, requests: Sequence[arbiter.Request]) -> Provided:
        now = time.monotonic()
        holders = self._manager.holders()
        made = [d for p in plan.devices for d in decisions.of_plan(self._ledger, holders, p, requests, now)]
        fresh: list[int] = []  # of them, not created physically yet
        free_slabs = 0
        begun: list[tuple[Model, ArenaTrade, int]] = []
        leases = _Leases(self._ledger, requests, self._hole)
        if self._releases.quarantine_held([i for d in plan.devices for i in d.destroy]):
            raise _PlanAgain
        for device in plan.devices:
            for slab_id in device.destroy:
                self._destroy(slab_id)
            crossing = sum(len(t.slab_ids) for t in device.trades if t.crosses)
            new = [self._ledger.create(device.device, device.domain, now) for _ in range(device.create - crossing)]
            fresh += new
            for slab_id in [*device.reuse, *new]:
                leases.lease(slab_id, now)
            free_slabs += len(device.reuse) + len(new)
            begun += self._begin(device.trades)
        domains = {d.device: d.domain for d in plan.devices}
        results = await asyncio.gather(
            self._create(fresh),
            *(self._finish(model, trade, generation) for model, trade, generation in begun),
            return_exceptions=True,
        )
        errors = [r for r in results if isinstance(r, BaseException)]
        if not errors:
            try:
                await self._cross(begun, domains, leases)
                for _, trade, _ in begun:
                    if not trade.crosses:
                        for slab_id in trade.slab_ids:  # not free for a moment: others plan with what is free
                            self._ledger.finish_revoke(slab_id, time.monotonic())
                            leases.lease(slab_id, time.monotonic())
            except (VmmError, _PlanAgain) as error:
                errors.append(error)
        if errors:
            for (model, trade, _), result in zip(begun, results[1:], strict=True):
                if result is None:
                    self._keep(model, trade)
            for placed in leases.placed:
                if self.is_at(placed):
                    self._give_up(placed.slab_id)
            raise _MemoryTaken(results[0]) if isinstance(results[0], Exhausted) else errors[0]
        trades = [
            memory_pb2.Trade(
                model_id=model.model_id,
                device_uuid=model.ranges[trade.part].device,
                slabs=len(trade.slab_ids),
                slots=trade.slots,
                experts_moved=len(trade.moves),
                slots_total=model.arena.parts[trade.part].slots,
                slots_occupied=model.arena.parts[trade.part].occupied,
            )
            for model, trade, _ in begun
        ]
        self._manager.decisions.add(made)
        return Provided(leases.placed, free_slabs, trades)

    def _begin(self, trades: Sequence[ArenaTrade]) -> list[tuple[Model, ArenaTrade, int]]:
        """Takes the slabs of trades out of others' reach, at once; returns each with its generation."""
        begun = []
        for trade in trades:
            for slab_id in trade.slab_ids:
                self._ledger.begin_revoke(slab_id, time.monotonic())
            model = self._manager.models[trade.model_id]
            begun.append((model, trade, trading.begin(model, trade)))
        return begun

    async def _finish(self, model: Model, trade: ArenaTrade, generation: int) -> None:
        """One arena gives its slabs: nobody reads them afterwards; on an error they are back with the arena."""
        now = time.monotonic
        try:
            await trading.finish(model, trade, generation)
        except trading.StuckVictims as stuck:

            def done() -> None:
                for slab_id in trade.slab_ids:
                    self._ledger.finish_revoke(slab_id, now())
                self._releases.tell_removed(model, trade)

            trading.take_out_later(model, trade, stuck, done)
            raise stuck.stuck from None
        except BaseException:
            for slab_id in trade.slab_ids:
                self._ledger.cancel_revoke(slab_id, now())
            raise
        if not trade.crosses:
            self._releases.tell_removed(model, trade)

    def _keep(self, model: Model, trade: ArenaTrade) -> None:
        """A trade that came to nothing after its arena gave the slabs: they stay in their domain, free."""
        left = [i for i in trade.slab_ids if i in self._ledger.slabs]
        for slab_id in left:
            if self._ledger.slabs[slab_id].state is SlabState.REVOKING:
                self._ledger.finish_revoke(slab_id, time.monotonic())
        if trade.crosses:
            self._releases.tell_removed(model, trade)

    async def _cross(
        self, begun: "list[tuple[Model, ArenaTrade, int]]", domains: dict[str, str], leases: "_Leases"
    ) -> None:
        """Slabs that leave their domain: revoked from every session, destroyed, created anew and leased."""
        for model, trade, _ in begun:
            if not trade.crosses:
                continue
            device = model.ranges[trade.part].device
            gone = await self._releases.revoke(model, trade)
            new = []
            for _ in range(min(len(gone), self._ledger.room_slabs(device))):
                new.append(self._ledger.create(device, domains[device], time.monotonic()))
                leases.lease(new[-1], time.monotonic())
            await self._create(new)
            if len(gone) < len(trade.slab_ids):
                raise _PlanAgain  # without that arena: what is still held past the deadline is quarantined
            if len(new) < len(gone):
                raise Exhausted(f"other programs took the room for {len(gone) - len(new)} slabs on {device} meanwhile")

    async def _create(self, slab_ids: Sequence[int]) -> None:
        """Creates physical slabs for ledger entries; on an error those made stay, for `_give_up`."""
        devices = [self._ledger.slabs[i].device for i in slab_ids]
        sizes = [self._ledger.devices[d].slab_bytes for d in devices]
        await self._physical.create([Wanted(*w) for w in zip(slab_ids, devices, sizes, strict=True)])

    def _give_up(self, slab_id: int) -> None:
        """Undoes a lease of a plan that failed; a slab that was never made is forgotten."""
        slab = self._ledger.slabs[slab_id]
        if slab.state is SlabState.LEASED:
            self._ledger.begin_revoke(slab_id, time.monotonic())
            self._ledger.finish_revoke(slab_id, time.monotonic())
        if slab_id not in self._physical:
            self._ledger.destroy(slab_id)

    def _destroy(self, slab_id: int) -> None:
        self._ledger.destroy(slab_id)
        self._physical.destroy(slab_id)

    def places(self, record: RangeRecord) -> int:
        """How many slabs more a range has indexes for at this moment."""
        return record.slabs_max - len(record.slabs) - len(self._withheld(record) - record.slabs.keys())

    def _check_places(self, requests: Sequence[arbiter.Request]) -> None:
        for request in requests:
            places = self.places(self._ledger.ranges[request.range_id])
            if request.slabs > places:
                raise Exhausted(
                    f"range {request.range_id} has places for {places} slabs, not for {request.slabs}, until its"
                    " sessions have unmapped what has gone"
                )

    def _withheld(self, record: RangeRecord) -> set[int]:
        """Indexes of a range at which somebody may still have a slab mapped that has gone, or is about to."""
        model = self._manager.models.get(record.owner) if record.kind is RangeKind.ARENA else None
        return trading.withheld(model, model.ranges.index(record)) if model is not None else set()

    def _hole(self, record: RangeRecord) -> int:
        """The lowest index of a range that nobody has another slab mapped at."""
        withheld = self._withheld(record)
        if not withheld:
            return record.hole()
        return next(i for i in range(record.slabs_max) if i not in record.slabs and i not in withheld)

    # Giving to the driver

    async def shed(self, device: str, count: int) -> None:
        """Gives up to `count` slabs of a device back to the driver: free ones, parked ones, then the coldest of arenas.

        For other programs that took the room. What is held past the deadline is
        quarantined. Does nothing while it is at it already for this device.
        """
        if device in self._shedding:
            return
        self._shedding.add(device)
        try:
            free = len(self._ledger.slabs_in(device, SlabState.FREE))
            for range_id, slabs in arbiter.plan_reclaim(self._ledger, device, count - free):
                await self._manager.conversations.reclaim(range_id, slabs)
            plan = arbiter.plan_release(
                self._ledger,
                self._manager.holders(),
                device,
                count,
                now_s=time.monotonic(),
                policy=self._manager.policy,
            )
            self._releases.quarantine_held(plan.destroy)
            for slab_id in plan.destroy:
                if self._ledger.slabs[slab_id].state is SlabState.FREE:
                    self._destroy(slab_id)
            made = decisions.of_plan(self._ledger, self._manager.holders(), plan, [], time.monotonic())
            for (model, trade, generation), decision in zip(self._begin(plan.trades), made, strict=True):
                try:
                    await self._finish(model, trade, generation)
                    gone = await self._releases.revoke(model, trade)
                    self._manager.decisions.add([decision])
                    log.info("arena.shrunk", model=model.model_id, device=device, slabs=len(gone))
                except (Stuck, VmmError) as error:
                    log.warning("arena.not_shrunk", model=model.model_id, device=device, why=str(error))
        finally:
            self._shedding.discard(device)

    def tidy(self) -> None:
        """Forgets empty ranges and sessions that have ended."""
        manager, ledger = self._manager, self._ledger
        for record in list(ledger.ranges.values()):
            owner_gone = (
                record.owner not in manager.sessions and record.range_id not in manager.conversations
                if record.kind is RangeKind.KV
                else record.owner not in manager.models
            )
            if (owner_gone or record.closed) and not record.slabs and not self._busy[record.range_id]:
                ledger.remove_range(record.range_id)
                manager.decisions.forget(record.range_id)
        for session_id in list(ledger.sessions):
            if session_id not in manager.sessions and not ledger.session_ranges(session_id):
                ledger.remove_session(session_id)


class _Leases:
    """Hands slabs to the requests' ranges, lowest empty index first."""

    def __init__(self, ledger: Ledger, requests: Sequence[arbiter.Request], hole: Callable[[RangeRecord], int]) -> None:
        self._ledger = ledger
        self._hole = hole
        self._wanted = {r.range_id: r.slabs for r in requests}
        self.placed: list[Placed] = []

    def lease(self, slab_id: int, now_s: float) -> None:
        """Leases a FREE slab to a range of its device and domain that still wants one."""
        slab = self._ledger.slabs[slab_id]
        for range_id, count in self._wanted.items():
            into = self._ledger.ranges[range_id]
            if count and (into.device, into.domain) == (slab.device, slab.domain):
                index = self._hole(into)
                self._ledger.lease(slab_id, range_id, index, now_s)
                self._wanted[range_id] -= 1
                self.placed.append(Placed(range_id, index, slab_id))
                return
        raise AssertionError(f"slab {slab_id} was planned for nobody")
