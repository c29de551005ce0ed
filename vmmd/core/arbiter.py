"""The arbiter: a pure function from the ledger's state and a request to a plan.

`plan` looks for slabs in this order and stops as soon as it has enough:

1. free slabs of the device and domain; new ones under the cap; free slabs of
   other domains, destroyed and created anew;
2. parked conversations, the longest parked first, reclaimed from their ends;
3. slabs of the same domain's arenas above their floor: those whose experts carry
   least heat, hotter experts moving to colder ones' slots first, on the same device
   and from there to the arena's other devices;
4. models that no session has open, the longest idle first, dropped whole;
5. slabs of other domains' arenas above their floor, revoked, destroyed, created;
6. nothing: `Exhausted`, saying who holds what. A refusal changes nothing.

All or nothing over all devices of a request. The plan names slabs; the manager
takes them out of others' reach (`Ledger.begin_revoke`) before it does anything
that takes time, so checking and taking are one step.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vmmd.core import shares
from vmmd.core.ledger import Ledger, RangeKind, RangeRecord, SessionRecord, SlabState
from vmmd.core.policy import SHIPPED, Policy
from vmmd.core.victims import ArenaTrade, Holder, Victims
from vmmd.errors import Exhausted
from vmmd.sizes import size_text

NOBODY = ""
"""The domain of memory that goes back to the driver."""


class Request(NamedTuple):
    """So many slabs more for a range."""

    range_id: int
    slabs: int


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


class Short(Exhausted):
    """The refusal of a request that misses so many `slabs` on `device` beside all that the plan could have."""

    def __init__(self, refused: Exhausted, device: str, slabs: int, retry_s: float) -> None:
        super().__init__(refused.message, refused.requested_bytes, refused.free_bytes, refused.holders)
        self.device = device
        self.slabs = slabs
        self.retry_s = retry_s


def plan(
    ledger: Ledger,
    models: Sequence[Holder],
    requests: Sequence[Request],
    *,
    now_s: float,
    policy: Policy = SHIPPED,
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
    asked = {request.range_id: request.slabs for request in requests}
    victims = Victims(ledger, usable, policy, now_s, asked)
    plans: list[DevicePlan] = []
    short: list[tuple[DevicePlan, int]] = []
    reclaim: list[Reclaim] = []
    for (device, domain), count in by_device.items():
        if ledger.devices[device].failed:
            raise refusal(ledger, models, device, domain, count, f"{device} has failed")
        share = share_refusal(ledger, models, device, asked)
        if share:
            raise refusal(ledger, models, device, domain, count, share)
        made = _plan_device(ledger, victims, device, domain, count)
        plans.append(made)
        missing = count - made.slabs
        reclaim += plan_reclaim(ledger, device, missing + sum(len(t.slab_ids) for t in made.trades))
        if missing > 0:
            short.append((made, missing))
    if not short:
        if reclaim:
            return Plan([], [], reclaim)
        victims.move_on([trade for made in plans for trade in made.trades])
        return Plan(plans, [])
    drop = None
    for made, missing in short:
        idle = _idle_models(ledger, usable, made)
        excess = _excess(ledger, models, made.device)
        foreign = victims.trades(made.device, missing, made.domain, crosses=True, live=True, excess=excess)
        short_by = missing - _obtainable(ledger, usable, made, idle, sum(len(t.slab_ids) for t in foreign))
        if short_by > 0:
            refused = refusal(ledger, models, made.device, made.domain, by_device[made.device, made.domain])
            raise Short(refused, made.device, short_by, victims.held_back_s(made.device, made.domain, short_by))
        drop = drop or next(iter(idle), None)
        if foreign:  # pays back first what is beyond the cap
            made.destroy = _foreign_free(ledger, made.device, made.domain)
        made.trades += foreign
        made.create += sum(len(t.slab_ids) for t in foreign)
    if reclaim:
        return Plan([], [], reclaim)
    victims.move_on([trade for made in plans for trade in made.trades])
    return Plan([], [drop]) if drop is not None else Plan(plans, [])


def plan_release(
    ledger: Ledger, models: Sequence[Holder], device: str, count: int, *, now_s: float, policy: Policy = SHIPPED
) -> DevicePlan:
    """Up to `count` slabs to give back to the driver: free ones, then those of arenas that are worth least."""
    free = sorted(ledger.slabs_in(device, SlabState.FREE), key=lambda i: (ledger.slabs[i].since_s, i))
    made = DevicePlan(device, NOBODY, destroy=free[:count])
    if len(made.destroy) < count:
        victims = Victims(ledger, [m for m in models if m.movable], policy, now_s)
        made.trades = victims.trades(device, count - len(made.destroy), NOBODY, crosses=True)
        victims.move_on(made.trades)
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


class Rebalance(NamedTuple):
    """A slab that is worth so much more to an arena than to another of its domain that it should go there."""

    request: Request
    plan: Plan
    slot_bytes: int  # the class that the slab shall be of
    gain: float  # what it is worth to who gets it


def plan_rebalance(
    ledger: Ledger, models: Sequence[Holder], device: str, *, now_s: float, policy: Policy = SHIPPED
) -> Rebalance | None:
    """The slab of a device that wins most by going from one arena to another of its domain; None if none should."""
    if ledger.devices[device].failed:
        return None
    usable = [m for m in models if m.movable]
    wanted = []
    for holder in usable:
        arena = holder.arena
        for part in arena.parts:
            record = ledger.ranges[part.range_id]
            if part.device == device and holder.idle_since_s is None and len(record.slabs) < record.slabs_max:
                worth = Victims(ledger, [holder], policy, now_s).worth(holder)
                for slot_bytes in arena.wanted_by_class(arena.missing):
                    missing = arena.hottest_missing(slot_bytes)[: part.slab_bytes // slot_bytes]
                    wanted.append((float(worth[missing].sum()), record, slot_bytes))
    for gain, record, slot_bytes in sorted(wanted, key=lambda w: (-w[0], w[1].range_id, w[2])):
        others = [m for m in usable if m.arena.model_id != record.owner]
        victims = Victims(ledger, others, policy, now_s, {record.range_id})
        trades = victims.trades(device, 1, record.domain, crosses=False, gain=gain)
        if trades:
            victims.move_on(trades)
            plan = Plan([DevicePlan(device, record.domain, trades=trades)], [])
            return Rebalance(Request(record.range_id, 1), plan, slot_bytes, gain)
    return None


# Shares


def account(
    ledger: Ledger,
    models: Sequence[Holder],
    device: str,
    asked: Mapping[int, int] | None = None,
    adopted: Mapping[int, int] | None = None,
) -> shares.Accounts:
    """Every user's account on a device, with what is asked for or adopted: see `shares.accounts`."""
    charged = {m.arena.model_id: m for m in models if m.uid is not None}
    fixed: list[tuple[int, int]] = []
    for record in ledger.ranges.values():
        if record.kind is RangeKind.KV or record.device != device or record.owner not in charged:
            continue
        holder = charged[record.owner]
        held = len(record.slabs) + (asked.get(record.range_id, 0) if asked else 0)
        assert holder.uid is not None
        if record.kind is RangeKind.WEIGHTS:
            fixed.append((holder.uid, held))
        elif record.range_id == holder.arena.parts[0].range_id:
            fixed.append((holder.uid, min(held, holder.floor_slabs)))
    return shares.accounts(ledger, device, fixed, asked, adopted)


def share_refusal(
    ledger: Ledger,
    models: Sequence[Holder],
    device: str,
    asked: Mapping[int, int],
    adopted: Mapping[int, int] | None = None,
) -> str:
    """Why guarantees and users' caps do not allow a growth, or an adoption; empty if they do."""
    if ledger.devices[device].is_host or not ledger.has_shares:
        return ""
    after = account(ledger, models, device, asked, adopted)
    return (
        ""
        if shares.fits(ledger, device, after)
        else shares.refusal(ledger, device, account(ledger, models, device), after)
    )


def adoption_refusal(ledger: Ledger, models: Sequence[Holder], range_id: int, session: SessionRecord) -> str:
    """Why guarantees and caps do not allow that a session takes a parked range over; empty if they do."""
    record = ledger.ranges[range_id]
    return shares.over_cap(ledger, session, {range_id: len(record.slabs)}) or share_refusal(
        ledger, models, record.device, {}, {range_id: session.session_id}
    )


def is_promised(ledger: Ledger, models: Sequence[Holder], requests: Sequence[Request]) -> bool:
    """Whether a growth is within what its users and sessions are guaranteed, on every device."""
    asked = {request.range_id: request.slabs for request in requests}
    devices = {ledger.ranges[range_id].device for range_id in asked}
    return ledger.has_shares and all(
        not ledger.devices[device].is_host
        and shares.promised(account(ledger, models, device, asked)) <= shares.promised(account(ledger, models, device))
        for device in devices
    )


def unpromised(ledger: Ledger, models: Sequence[Holder], device: str) -> int:
    """Slabs of a device that are neither in use nor guaranteed to anybody; negative where too many are."""
    return shares.slabs_of(ledger, device) - shares.promised(account(ledger, models, device))


def _excess(ledger: Ledger, models: Sequence[Holder], device: str) -> Counter[str] | None:
    """Slabs that each domain has on a device beyond what its users are promised; None: nobody is promised any.

    What is parked is none of them: it has been given before any arena gives.
    """
    if ledger.devices[device].is_host or not ledger.has_shares:
        return None
    held = Counter(s.domain for s in ledger.slabs.values() if s.device == device and s.state is not SlabState.FREE)
    for record in ledger.parked(device):
        held[record.domain] -= len(record.slabs)
    held.subtract(shares.promised_to(ledger, account(ledger, models, device)))
    return held


def free_for(ledger: Ledger, device: str, domain: str) -> int:
    """Slabs that a domain can have on a device without anybody giving something."""
    if ledger.devices[device].failed:
        return 0
    foreign = len(_foreign_free(ledger, device, domain))
    return len(ledger.free_slabs(device, domain)) + max(0, ledger.balance_slabs(device) + foreign)


def _foreign_free(ledger: Ledger, device: str, domain: str) -> list[int]:
    """Free slabs of other domains."""
    return sorted(i for i in ledger.slabs_in(device, SlabState.FREE) if ledger.slabs[i].domain != domain)


def _plan_device(ledger: Ledger, victims: Victims, device: str, domain: str, count: int) -> DevicePlan:
    made = DevicePlan(device, domain, reuse=ledger.free_slabs(device, domain)[:count])
    foreign = _foreign_free(ledger, device, domain)
    balance = ledger.balance_slabs(device)
    made.create = max(0, min(count - made.slabs, balance + len(foreign)))
    if made.create > balance:
        made.destroy = foreign[: made.create - balance] if made.create else []
    if made.slabs < count:
        made.trades = victims.trades(device, count - made.slabs, domain, crosses=False)
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
