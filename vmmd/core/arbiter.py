"""The arbiter: a pure function from the ledger's state and a request to a plan.

`plan` looks for slabs in this order and stops as soon as it has enough:

1. free slabs of the device and domain; new ones under the cap; free slabs of
   other domains, destroyed and created anew;
2. parked conversations, the longest parked first, reclaimed from their ends;
3. slabs of the same domain's arenas above their floor: those whose experts carry
   least heat, hotter experts moving to colder ones' slots first;
4. models that no session has open, the longest idle first, dropped whole;
5. slabs of other domains' arenas above their floor, revoked, destroyed, created;
6. nothing: `Exhausted`, saying who holds what. A refusal changes nothing.

All or nothing over all devices of a request. The plan names slabs; the manager
takes them out of others' reach (`Ledger.begin_revoke`) before it does anything
that takes time, so checking and taking are one step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vmmd.core.ledger import Ledger, RangeKind, RangeRecord, SlabState
from vmmd.core.residency import EMPTY, Arena, Slot
from vmmd.errors import Exhausted

NOBODY = ""
"""The domain of memory that goes back to the driver."""


class Request(NamedTuple):
    """So many slabs more for a range."""

    range_id: int
    slabs: int


class Move(NamedTuple):
    """An expert of a victim slab goes to a slot that stays, whose expert it displaces."""

    expert: int
    to: Slot
    displaced: int  # EMPTY where the slot holds nobody


@dataclass
class ArenaTrade:
    """What one arena gives on one device."""

    model_id: int
    part: int
    indexes: list[int]  # of its range
    slab_ids: list[int]
    slots: int  # of these slabs
    moves: list[Move]
    evicted: list[int]  # experts of the victims that are read from their homes afterwards
    crosses: bool  # to another domain: the slabs are destroyed


@dataclass
class DevicePlan:
    """Where one device's slabs come from."""

    device: str
    domain: str
    reuse: list[int] = field(default_factory=list)  # free slabs
    destroy: list[int] = field(default_factory=list)  # free slabs of other domains
    create: int = 0  # new slabs, after everything that is destroyed
    trades: list[ArenaTrade] = field(default_factory=list)

    @property
    def slabs(self) -> int:
        """Slabs that the plan yields."""
        return len(self.reuse) + self.create + sum(len(t.slab_ids) for t in self.trades if not t.crosses)


class Reclaim(NamedTuple):
    """So many slabs of a parked range, from its end."""

    range_id: int
    slabs: int


@dataclass
class Plan:
    """How a request is met: by `devices`, or by reclaiming or dropping first, and planning again."""

    devices: list[DevicePlan]
    drop: list[int]  # idle models
    reclaim: list[Reclaim] = field(default_factory=list)


class Holder(NamedTuple):
    """A model as the arbiter sees it beside its arena."""

    arena: Arena
    idle_since_s: float | None  # None while a session has it open
    movable: bool  # False while it is being opened or has a stuck reader


class Short(Exhausted):
    """The refusal of a request that misses so many `slabs` on `device` beside all that the plan could have."""

    def __init__(self, refused: Exhausted, device: str, slabs: int) -> None:
        super().__init__(refused.message, refused.requested_bytes, refused.free_bytes, refused.holders)
        self.device = device
        self.slabs = slabs


Leased = dict[int, list[tuple[int, int, int]]]
"""By model: (part, index, slab id) of its arena's slabs that no trade is under way with."""


def plan(
    ledger: Ledger,
    models: Sequence[Holder],
    requests: Sequence[Request],
    *,
    keep_models: Collection[int] = (),
) -> Plan:
    """Decides where the slabs of `requests` come from. Errors: `Exhausted`.

    Requests of one device are met together. `keep_models` are not touched.
    """
    by_device: dict[tuple[str, str], int] = {}
    owners = set()  # an arena that asks gives nothing to itself
    for request in requests:
        into = ledger.ranges[request.range_id]
        owners.add(into.owner)
        key = into.device, into.domain
        by_device[key] = by_device.get(key, 0) + request.slabs
    usable = [m for m in models if m.movable and m.arena.model_id not in {*keep_models, *owners}]
    leased = _leased_slabs(usable, ledger)
    spare = {m.arena.model_id: _spare_slots(m.arena, leased) for m in usable}
    plans: list[DevicePlan] = []
    short: list[tuple[DevicePlan, int]] = []
    reclaim: list[Reclaim] = []
    for (device, domain), count in by_device.items():
        if ledger.devices[device].failed:
            raise refusal(ledger, models, device, domain, count, f"{device} has failed")
        made = _plan_device(ledger, usable, leased, spare, device, domain, count)
        plans.append(made)
        missing = count - made.slabs
        reclaim += plan_reclaim(ledger, device, missing + sum(len(t.slab_ids) for t in made.trades))
        if missing > 0:
            short.append((made, missing))
    if not short:
        return Plan([], [], reclaim) if reclaim else Plan(plans, [])
    drop = None
    for made, missing in short:
        idle = _idle_models(ledger, usable, made)
        live = [m for m in usable if m.idle_since_s is None]
        foreign = _trades(live, leased, spare, made.device, missing, made.domain, crosses=True)
        short_by = missing - _obtainable(ledger, usable, made, idle, sum(len(t.slab_ids) for t in foreign))
        if short_by > 0:
            refused = refusal(ledger, models, made.device, made.domain, by_device[made.device, made.domain])
            raise Short(refused, made.device, short_by)
        drop = drop or next(iter(idle), None)
        if foreign:  # pays back first what is beyond the cap
            made.destroy = _foreign_free(ledger, made.device, made.domain)
        made.trades += foreign
        made.create += sum(len(t.slab_ids) for t in foreign)
    if reclaim:
        return Plan([], [], reclaim)
    return Plan([], [drop]) if drop is not None else Plan(plans, [])


def plan_release(ledger: Ledger, models: Sequence[Holder], device: str, count: int) -> DevicePlan:
    """Up to `count` slabs to give back to the driver: free ones, then the coldest of all arenas above their floors."""
    free = sorted(ledger.slabs_in(device, SlabState.FREE), key=lambda i: (ledger.slabs[i].since_s, i))
    made = DevicePlan(device, NOBODY, destroy=free[:count])
    if len(made.destroy) < count:
        usable = [m for m in models if m.movable]
        leased = _leased_slabs(usable, ledger)
        spare = {m.arena.model_id: _spare_slots(m.arena, leased) for m in usable}
        made.trades = _trades(usable, leased, spare, device, count - len(made.destroy), NOBODY, crosses=True)
    return made


def plan_reclaim(ledger: Ledger, device: str, count: int) -> list[Reclaim]:
    """Up to `count` slabs of a device's parked ranges: the longest parked give first."""
    found = []
    for record in ledger.parked(device):
        slabs = min(count, _leased_count(ledger, record))
        if slabs > 0:
            found.append(Reclaim(record.range_id, slabs))
            count -= slabs
    return found


def _leased_count(ledger: Ledger, record: RangeRecord) -> int:
    """Slabs of a range that are not on their way back already."""
    return sum(ledger.slabs[i].state is SlabState.LEASED for i in record.slabs.values())


def free_for(ledger: Ledger, device: str, domain: str) -> int:
    """Slabs that a domain can have on a device without anybody giving something."""
    if ledger.devices[device].failed:
        return 0
    foreign = len(_foreign_free(ledger, device, domain))
    return len(ledger.free_slabs(device, domain)) + max(0, ledger.balance_slabs(device) + foreign)


def _foreign_free(ledger: Ledger, device: str, domain: str) -> list[int]:
    """Free slabs of other domains."""
    return sorted(i for i in ledger.slabs_in(device, SlabState.FREE) if ledger.slabs[i].domain != domain)


def _plan_device(
    ledger: Ledger,
    models: Sequence[Holder],
    leased: Leased,
    spare: dict[int, int],
    device: str,
    domain: str,
    count: int,
) -> DevicePlan:
    made = DevicePlan(device, domain, reuse=ledger.free_slabs(device, domain)[:count])
    foreign = _foreign_free(ledger, device, domain)
    balance = ledger.balance_slabs(device)
    made.create = max(0, min(count - made.slabs, balance + len(foreign)))
    if made.create > balance:
        made.destroy = foreign[: made.create - balance] if made.create else []
    if made.slabs < count:
        made.trades = _trades(models, leased, spare, device, count - made.slabs, domain, crosses=False)
    return made


def _obtainable(ledger: Ledger, models: Sequence[Holder], made: DevicePlan, idle: dict[int, int], cross: int) -> int:
    """Slabs that parked ranges, idle models and `cross` slabs of other domains would yield beside what the plan has.

    Where a device has more slabs than its cap allows by now, some that are destroyed
    are not created anew.
    """
    domains = {m.arena.model_id: m.arena.domain for m in models}
    own_idle = sum(slabs for model_id, slabs in idle.items() if domains[model_id] == made.domain)
    foreign_idle = sum(idle.values()) - own_idle
    parked = ledger.parked(made.device)
    own = own_idle + sum(_leased_count(ledger, r) for r in parked if r.domain == made.domain)
    foreign = foreign_idle + sum(_leased_count(ledger, r) for r in parked if r.domain != made.domain)
    debt = _debt_slabs(ledger, made)
    return own + (foreign + cross - debt if foreign >= debt else 0)


def _debt_slabs(ledger: Ledger, made: DevicePlan) -> int:
    """Slabs to destroy before one can be created, beside other domains' free ones."""
    foreign = len(_foreign_free(ledger, made.device, made.domain))
    return max(0, -(ledger.balance_slabs(made.device) + foreign))


def _idle_models(ledger: Ledger, models: Sequence[Holder], made: DevicePlan) -> dict[int, int]:
    """Slabs on a plan's device by idle model, the longest idle first, beside what the plan takes already.

    A model that a trade is under way with is left alone until it is over.
    """
    taken = {slab_id for trade in made.trades for slab_id in trade.slab_ids}
    found: dict[int, int] = {}
    for holder in sorted((m for m in models if m.idle_since_s is not None), key=lambda m: m.idle_since_s or 0.0):
        model_id = holder.arena.model_id
        ranges = [r for r in ledger.ranges.values() if r.owner == model_id]
        if any(ledger.slabs[i].state is SlabState.REVOKING for r in ranges for i in r.slabs.values()):
            continue
        slabs = {i for r in ranges if r.device == made.device for i in r.slabs.values()} - taken
        if slabs:
            found[model_id] = len(slabs)
    return found


class _Candidate(NamedTuple):
    heat: float  # of its experts; the fields are in the order of preference
    experts: int
    model: int  # index in the list of models
    part: int
    order: int  # its index in the range, negated
    slab_id: int
    slots: int


def _leased_slabs(models: Sequence[Holder], ledger: Ledger) -> Leased:
    revoking = {i for device in ledger.devices for i in ledger.slabs_in(device, SlabState.REVOKING)}
    return {
        m.arena.model_id: [
            (p, index, slab_id)
            for p, part in enumerate(m.arena.parts)
            for index, slab_id in ledger.ranges[part.range_id].slabs.items()
            if index in part.slabs and slab_id not in revoking
        ]
        for m in models
    }


def _spare_slots(arena: Arena, leased: Leased) -> int:
    """Slots that an arena can give; those of slabs on their way out count as given."""
    staying = sum(arena.parts[p].slabs[i].slots for p, i, _ in leased[arena.model_id])
    return staying - arena.floor_slots


def _trades(
    models: Sequence[Holder],
    leased: Leased,
    spare: dict[int, int],
    device: str,
    count: int,
    domain: str,
    *,
    crosses: bool,
) -> list[ArenaTrade]:
    """Up to `count` slabs of arenas on a device, the coldest first, floors respected.

    `spare` is what each model can still give, on all devices; what is chosen here is
    taken from it.
    """
    candidates = [
        candidate
        for m, holder in enumerate(models)
        if (holder.arena.domain != domain) == crosses
        for candidate in _candidates(holder.arena, m, device, leased)
    ]
    chosen: dict[tuple[int, int], list[_Candidate]] = {}
    taken = 0
    for candidate in sorted(candidates):
        if taken == count:
            break
        model_id = models[candidate.model].arena.model_id
        if spare[model_id] >= candidate.slots:
            spare[model_id] -= candidate.slots
            chosen.setdefault((candidate.model, candidate.part), []).append(candidate)
            taken += 1
    return [_trade(models[m].arena, leased, p, victims, crosses=crosses) for (m, p), victims in chosen.items()]


def _candidates(arena: Arena, model: int, device: str, leased: Leased) -> list[_Candidate]:
    """Slabs on a device that can be given: leased, nothing busy in them, every expert with a home."""
    found = []
    sums: dict[int, tuple[list[float], list[int]]] = {}
    for p, index, slab_id in leased[arena.model_id]:
        slab = arena.parts[p].slabs[index]
        if arena.parts[p].device != device or slab.busy:
            continue
        if p not in sums:
            sums[p] = _slab_sums(arena, p)
        heat, homeless = (x[index] if index < len(x) else 0 for x in sums[p])
        if not homeless:
            # equal heat: the fewest experts leave, then the last slab of the range
            found.append(_Candidate(heat, slab.slots - slab.empty, model, p, -index, slab_id, slab.slots))
    return found


def _slab_sums(arena: Arena, p: int) -> tuple[list[float], list[int]]:
    """By slab index of a part: the heat of its experts, and how many of them have no home."""
    here = np.flatnonzero(arena.place[:, 0] == p)
    slabs = arena.place[here, 1]
    heat = np.bincount(slabs, arena.heat[here])
    homeless = np.bincount(slabs, ~arena.home_ready[here])
    return heat.tolist(), homeless.tolist()


def _trade(arena: Arena, leased: Leased, p: int, victims: Sequence[_Candidate], *, crosses: bool) -> ArenaTrade:
    """The moves that keep the hotter experts: the hottest of the victims to the coldest that stay."""
    part = arena.parts[p]
    indexes = [-v.order for v in victims]
    leaving = set(part.slabs) - {index for q, index, _ in leased[arena.model_id] if q == p} | set(indexes)
    moves: list[Move] = []
    evicted: list[int] = []
    for slot_bytes in {part.slabs[i].slot_bytes for i in indexes}:
        experts = np.concatenate([part.slabs[i].experts() for i in indexes if part.slabs[i].slot_bytes == slot_bytes])
        hottest = experts[np.lexsort((experts, -arena.heat[experts]))]
        staying = _staying_coldest_first(arena, p, slot_bytes, leaving, len(hottest))
        kept = 0
        for expert, (displaced, slot) in zip(hottest.tolist(), staying, strict=False):
            if displaced != EMPTY and arena.heat[displaced] >= arena.heat[expert]:
                break
            moves.append(Move(expert, slot, displaced))
            kept += 1
        evicted += hottest[kept:].tolist()
    slots = sum(v.slots for v in victims)
    return ArenaTrade(arena.model_id, p, indexes, [v.slab_id for v in victims], slots, moves, evicted, crosses)


def _staying_coldest_first(
    arena: Arena, p: int, slot_bytes: int, leaving: set[int], count: int
) -> list[tuple[int, Slot]]:
    """Up to `count` (expert or EMPTY, slot) that stay and may be taken over: empty ones, then the coldest."""
    found = [
        (EMPTY, Slot(p, index, int(slot)))
        for index, slab in arena.parts[p].slabs.items()
        if slab.empty and slab.slot_bytes == slot_bytes and index not in leaving
        for slot in np.flatnonzero(slab.occupants == EMPTY)
    ][:count]
    held = (arena.place[:, 0] == p) & arena.home_ready & (arena.geometry.slot_bytes == slot_bytes)
    experts = np.flatnonzero(held)
    experts = experts[~np.isin(arena.place[experts, 1], list(leaving))]
    coldest = experts[np.argsort(arena.heat[experts], kind="stable")[: count - len(found)]]
    places = arena.place[coldest].tolist()
    return found + [(expert, Slot(*place)) for expert, place in zip(coldest.tolist(), places, strict=True)]


def refusal(
    ledger: Ledger, models: Sequence[Holder], device: str, domain: str, slabs: int, what: str = ""
) -> Exhausted:
    """The refusal that says what was asked, what is, who holds what, and what to do."""
    record = ledger.devices[device]
    size = record.slab_bytes
    free = free_for(ledger, device, domain) * size
    holders = []
    names = {m.arena.model_id: m for m in models}
    for model_id, holder in names.items():
        held = ledger.held_bytes(
            r
            for r in ledger.ranges.values()
            if r.owner == model_id and r.kind is not RangeKind.KV and r.device == device
        )
        if held:
            arena = holder.arena
            holders.append(
                f"model {model_id} ({arena.domain}) holds {size_text(held)}"
                f" ({arena.slots} slots, floor {arena.floor_slots})"
            )
    for session in ledger.sessions.values():
        ranges = (r for r in ledger.session_ranges(session.session_id) if r.parked_s is None)
        held = ledger.held_bytes(r for r in ranges if r.device == device)
        if held:
            holders.append(f"session {session.session_id} (pid {session.pid}) holds {size_text(held)} of K/V")
    parked = ledger.held_bytes(ledger.parked(device))
    if parked:
        holders.append(f"parked conversations hold {size_text(parked)}")
    for state in (SlabState.REVOKING, SlabState.QUARANTINED):
        count = len(ledger.slabs_in(device, state))
        if count:
            holders.append(f"{size_text(count * size)} {state}")
    if record.unmanaged_bytes:
        holders.append(f"{size_text(record.unmanaged_bytes)} unmanaged (other programs, contexts)")
    message = (
        f"{what + ': ' if what else ''}{size_text(slabs * size)} ({slabs} slabs) asked for on {device}, "
        f"{size_text(free)} free of a cap of {size_text(record.cap_bytes)}; "
        f"{'; '.join(holders[:6]) or 'nothing is held'}. Raise the device's cap_bytes, or end a session"
    )
    return Exhausted(message, slabs * size, free, holders)


def size_text(n_bytes: int) -> str:
    """A size for a person: GiB from 0.01 GiB up, else MiB."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 // 100 else f"{n_bytes / 2**20:.2f} MiB"
