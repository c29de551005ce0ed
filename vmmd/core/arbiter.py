"""The arbiter: a pure function from the ledger's state and a request to a plan.

`plan` looks for slabs in this order and stops as soon as it has enough:

1. free slabs of the device and domain; new ones under the cap; free slabs of
   other domains, destroyed and created anew;
2. slabs of the same domain's arenas above their floor: those whose experts carry
   least heat, hotter experts moving to colder ones' slots first;
3. models that no session has open, the longest idle first, dropped whole;
4. slabs of other domains' arenas above their floor, revoked, destroyed, created;
5. nothing: `Exhausted`, saying who holds what. A refusal changes nothing.

All or nothing over all devices of a request. The plan names slabs; the manager
takes them out of others' reach (`Ledger.begin_revoke`) before it does anything
that takes time, so checking and taking are one step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vmmd.core.ledger import Ledger, RangeKind, SlabState
from vmmd.core.residency import BUSY, EMPTY, Arena, Slot
from vmmd.errors import Exhausted


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


@dataclass
class Plan:
    """How a request is met: by `devices`, or by dropping idle models and planning again."""

    devices: list[DevicePlan]
    drop: list[int]


class Holder(NamedTuple):
    """A model as the arbiter sees it beside its arena."""

    arena: Arena
    idle_since_s: float | None  # None while a session has it open
    movable: bool  # False while it is being opened or has a stuck reader


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
    for request in requests:
        into = ledger.ranges[request.range_id]
        key = into.device, into.domain
        by_device[key] = by_device.get(key, 0) + request.slabs
    usable = [m for m in models if m.movable and m.arena.model_id not in keep_models]
    plans: list[DevicePlan] = []
    short: list[tuple[DevicePlan, int]] = []
    for (device, domain), count in by_device.items():
        made = _plan_device(ledger, usable, device, domain, count)
        plans.append(made)
        missing = count - made.slabs
        if missing > 0:
            short.append((made, missing))
    if not short:
        return Plan(plans, [])
    drop = None
    for made, missing in short:
        idle = _idle_models(ledger, usable, made)
        live = [m for m in usable if m.idle_since_s is None]
        foreign = _trades(live, ledger, made.device, missing, made.domain, crosses=True)
        if sum(idle.values()) + sum(len(t.slab_ids) for t in foreign) < missing:
            raise refusal(ledger, models, made.device, made.domain, by_device[made.device, made.domain])
        drop = drop or next(iter(idle), None)
        made.trades += foreign
        made.create += sum(len(t.slab_ids) for t in foreign)
    return Plan([], [drop]) if drop is not None else Plan(plans, [])


def free_for(ledger: Ledger, device: str, domain: str) -> int:
    """Slabs that a domain can have on a device without anybody giving something."""
    free = len(ledger.slabs_in(device, SlabState.FREE))
    return free + ledger.room_slabs(device)


def _plan_device(ledger: Ledger, models: Sequence[Holder], device: str, domain: str, count: int) -> DevicePlan:
    made = DevicePlan(device, domain, reuse=ledger.free_slabs(device, domain)[:count])
    made.create = min(count - made.slabs, ledger.room_slabs(device))
    foreign = ledger.slabs_in(device, SlabState.FREE) - set(ledger.free_slabs(device, domain))
    made.destroy = sorted(foreign)[: count - made.slabs]
    made.create += len(made.destroy)
    if made.slabs < count:
        made.trades = _trades(models, ledger, device, count - made.slabs, domain, crosses=False)
    return made


def _idle_models(ledger: Ledger, models: Sequence[Holder], made: DevicePlan) -> dict[int, int]:
    """Slabs on a plan's device by idle model, the longest idle first, beside what the plan takes already."""
    taken = {slab_id for trade in made.trades for slab_id in trade.slab_ids}
    found: dict[int, int] = {}
    for holder in sorted((m for m in models if m.idle_since_s is not None), key=lambda m: m.idle_since_s or 0.0):
        model_id = holder.arena.model_id
        ranges = [r for r in ledger.ranges.values() if r.owner == model_id and r.device == made.device]
        slabs = {i for r in ranges if r.kind is not RangeKind.KV for i in r.slabs.values()} - taken
        if slabs:
            found[model_id] = len(slabs)
    return found


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    heat: float
    model: int  # index in the list of models
    part: int
    index: int
    slab_id: int
    slots: int


def _trades(
    models: Sequence[Holder], ledger: Ledger, device: str, count: int, domain: str, *, crosses: bool
) -> list[ArenaTrade]:
    """Up to `count` slabs of arenas on a device, the coldest first, floors respected."""
    candidates = [
        candidate
        for m, holder in enumerate(models)
        if (holder.arena.domain != domain) == crosses
        for p, part in enumerate(holder.arena.parts)
        if part.device == device
        for candidate in _candidates(holder.arena, m, p, ledger)
    ]
    spare = [m.arena.slots - m.arena.floor_slots for m in models]
    chosen: dict[tuple[int, int], list[_Candidate]] = {}
    taken = 0
    for candidate in sorted(candidates):
        if taken == count:
            break
        if spare[candidate.model] >= candidate.slots:
            spare[candidate.model] -= candidate.slots
            chosen.setdefault((candidate.model, candidate.part), []).append(candidate)
            taken += 1
    return [_trade(models[m].arena, p, victims, crosses=crosses) for (m, p), victims in chosen.items()]


def _candidates(arena: Arena, model: int, p: int, ledger: Ledger) -> list[_Candidate]:
    """Slabs of a part that can be given: leased, nothing busy in them, every expert with a home."""
    part = arena.parts[p]
    of_range = ledger.ranges[part.range_id].slabs
    found = []
    for index, slab in part.slabs.items():
        slab_id = of_range[index]
        if ledger.slabs[slab_id].state is not SlabState.LEASED or (slab.occupants == BUSY).any():
            continue
        experts = slab.experts()
        if arena.home_ready[experts].all():
            heat = float(arena.heat[experts].sum())
            # equal heat: the fewest experts leave, then the last slab of the range
            found.append(_Candidate(heat, model, p, -index, slab_id, len(slab.occupants)))
    return found


def _trade(arena: Arena, p: int, victims: Sequence[_Candidate], *, crosses: bool) -> ArenaTrade:
    """The moves that keep the hotter experts: the hottest of the victims to the coldest that stay."""
    part = arena.parts[p]
    indexes = [-v.index for v in victims]
    leaving = set(indexes)
    moves: list[Move] = []
    evicted: list[int] = []
    for slot_bytes in {part.slabs[i].slot_bytes for i in indexes}:
        experts = np.concatenate([part.slabs[i].experts() for i in indexes if part.slabs[i].slot_bytes == slot_bytes])
        hottest = experts[np.lexsort((experts, -arena.heat[experts]))]
        staying = _staying_coldest_first(arena, p, slot_bytes, leaving)
        kept = 0
        for expert, (displaced, slot) in zip(hottest.tolist(), staying, strict=False):
            if displaced != EMPTY and arena.heat[displaced] >= arena.heat[expert]:
                break
            moves.append(Move(expert, slot, displaced))
            kept += 1
        evicted += hottest[kept:].tolist()
    slots = sum(v.slots for v in victims)
    return ArenaTrade(arena.model_id, p, indexes, [v.slab_id for v in victims], slots, moves, evicted, crosses)


def _staying_coldest_first(arena: Arena, p: int, slot_bytes: int, leaving: set[int]) -> list[tuple[int, Slot]]:
    """(expert or EMPTY, slot) of the slots that stay and may be taken over: empty ones, then the coldest."""
    empty: list[tuple[int, Slot]] = []
    held: list[tuple[float, int, Slot]] = []
    for index, slab in arena.parts[p].slabs.items():
        if slab.slot_bytes != slot_bytes or index in leaving:
            continue
        for slot, expert in enumerate(slab.occupants.tolist()):
            if expert == EMPTY:
                empty.append((EMPTY, Slot(p, index, slot)))
            elif expert >= 0 and arena.home_ready[expert]:
                held.append((float(arena.heat[expert]), expert, Slot(p, index, slot)))
    held.sort()
    return empty + [(expert, slot) for _, expert, slot in held]


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
        held = ledger.held_bytes(r for r in ledger.session_ranges(session.session_id) if r.device == device)
        if held:
            holders.append(f"session {session.session_id} (pid {session.pid}) holds {size_text(held)} of K/V")
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
