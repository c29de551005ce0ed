"""Decisions: the last thousand, each with its reason in words, for `vmmctl trades` and `vmmctl explain`.

A reason is made from what the arbiter saw when it decided, and kept once the decision
was carried out.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vmmd.core.arbiter import DevicePlan, Request
from vmmd.core.ledger import Ledger, RangeKind, RangeRecord
from vmmd.core.victims import ArenaTrade, Holder

KEPT = 1000


class Kind(StrEnum):
    """What was decided."""

    TRADE = "trade"  # slabs of an arena for another range of its domain
    CROSSING = "crossing"  # the same for another domain: destroyed, and created anew
    GRANT = "grant"  # free or new slabs
    GIVE_BACK = "give back"  # free or new slabs for an arena
    FREED = "freed"  # by a range that shrank or whose owner went
    RELEASE = "release"  # to the driver
    DROP = "drop"  # a model that nobody has open
    REFUSAL = "refusal"


@dataclass(frozen=True)
class Decision:
    """One of them. Ids are of ranges; 0 stands for nobody's memory, or the driver's.

    Attributes:
        at_s: of the ledger's clock.
        giver, taker: who, in words.
        slabs: that went, or were refused.
        moved: hotter experts that took colder ones' slots.
        evicted: experts that are read from their homes since.
        times: how often in a row the same was refused.
    """

    at_s: float
    kind: Kind
    device: str
    from_id: int
    to_id: int
    giver: str
    taker: str
    slabs: int
    reason: str
    moved: int = 0
    evicted: int = 0
    times: int = 1


class Log:
    """The last decisions, and for every range where its slabs came from since it is there."""

    def __init__(self) -> None:
        self._kept: deque[Decision] = deque(maxlen=KEPT)
        self._came: dict[int, Counter[str]] = {}

    def __iter__(self) -> Iterator[Decision]:
        """The oldest first."""
        return iter(self._kept)

    def add(self, decisions: Sequence[Decision]) -> None:
        """Keeps decisions that were carried out, or refused. The same refusal again is counted."""
        for decision in decisions:
            last = self._kept[-1] if self._kept else None
            if decision.kind is Kind.REFUSAL and last is not None and _same(last, decision):
                self._kept[-1] = replace(decision, times=last.times + 1)
                continue
            self._kept.append(decision)
            if decision.to_id and decision.kind not in (Kind.REFUSAL, Kind.DROP):
                self._came.setdefault(decision.to_id, Counter())[decision.giver] += decision.slabs

    def came_from(self, range_id: int) -> Mapping[str, int]:
        """How many slabs a range got from whom, those that it has given up since included."""
        return self._came.get(range_id, {})

    def concerning(self, range_ids: Collection[int]) -> list[Decision]:
        """The decisions that one of these ranges had a part in, the newest first."""
        return [d for d in reversed(self._kept) if d.from_id in range_ids or d.to_id in range_ids]

    def forget(self, range_id: int) -> None:
        """The range is gone; what is kept about it stays until newer decisions push it out."""
        self._came.pop(range_id, None)


def _same(a: Decision, b: Decision) -> bool:
    return (a.kind, a.to_id, a.slabs, a.reason) == (b.kind, b.to_id, b.slabs, b.reason)


def name_of(ledger: Ledger, record: RangeRecord) -> str:
    """Whose range it is, and which, in words."""
    if record.kind is RangeKind.KV:
        session = ledger.sessions.get(record.owner)
        return f"session {record.owner} (pid {session.pid})" if session is not None else f"session {record.owner}"
    words = {RangeKind.ARENA: "arena", RangeKind.WEIGHTS: "weights", RangeKind.HOMES: "homes"}
    return f"model {record.owner}'s {words[record.kind]}"


def of_plan(
    ledger: Ledger, models: Sequence[Holder], plan: DevicePlan, requests: Sequence[Request], now_s: float
) -> list[Decision]:
    """What a device's plan does, as seen before it is carried out; without requests the driver gets what it yields."""
    wanted = [(ledger.ranges[r.range_id], r.slabs) for r in requests]
    into = _Deal([(to, count) for to, count in wanted if (to.device, to.domain) == (plan.device, plan.domain)])
    holders = {m.arena.model_id: m for m in models}
    anew = f"; {len(plan.destroy)} free slabs of other domains were destroyed" if plan.destroy else ""
    new = plan.create - sum(len(t.slab_ids) for t in plan.trades if t.crosses)
    found = []
    for giver, slabs, how in (("free slabs", len(plan.reuse), ""), ("new slabs", new, anew)):
        for to, count in into.deal(slabs):
            kind, why = Kind.GRANT, "it was free"
            holder = holders.get(to.owner)
            if to.kind is RangeKind.ARENA and holder is not None and holder.movable:
                kind = Kind.GIVE_BACK
                missing, share = int((~holder.arena.resident).sum()), 1.0 - holder.arena.heat_covered()
                why = f"nobody needs it, and {missing} experts with {share:.1%} of the heat have no slot"
            taker = name_of(ledger, to)
            found.append(Decision(now_s, kind, to.device, 0, to.range_id, giver, taker, count, why + how))
    for trade in plan.trades:
        takers = [to for to, _ in into.deal(len(trade.slab_ids))]
        found.append(_of_trade(ledger, holders[trade.model_id], trade, takers[0] if takers else None, now_s))
    return found


class _Deal:
    """Hands slabs to the ranges that want them, in their order."""

    def __init__(self, wanted: Sequence[tuple[RangeRecord, int]]) -> None:
        self._wanted = list(wanted)

    def deal(self, slabs: int) -> list[tuple[RangeRecord, int]]:
        """Who gets how many of so many more."""
        found = []
        while slabs > 0 and self._wanted:
            to, count = self._wanted.pop(0)
            found.append((to, min(count, slabs)))
            if count > slabs:
                self._wanted.insert(0, (to, count - slabs))
            slabs -= min(count, slabs)
        return found


def _of_trade(ledger: Ledger, holder: Holder, trade: ArenaTrade, to: RangeRecord | None, now_s: float) -> Decision:
    arena = holder.arena
    record = ledger.ranges[arena.parts[trade.part].range_id]
    leaving = [*trade.evicted, *(m.displaced for m in trade.moves if m.displaced >= 0)]
    total = float(arena.heat.sum())
    share = float(arena.heat[leaving].sum()) / total if total > 0 else len(leaving) / arena.geometry.n
    why = "no memory was free, and no other slabs were worth less"
    if to is None:
        why = "other programs took the room"
    elif to.kind is RangeKind.ARENA:
        why = "it is worth more there"
    reason = (
        f"{why}: of {len(record.slabs)} slabs {len(trade.slab_ids)} go, {len(trade.moves)} hotter experts move, and"
        f" {len(leaving)} experts with {share:.1%} of the heat leave, worth {trade.worth * 1e6:.3g} us a token"
    )
    return Decision(
        now_s,
        Kind.RELEASE if to is None else Kind.CROSSING if trade.crosses else Kind.TRADE,
        record.device,
        record.range_id,
        0 if to is None else to.range_id,
        name_of(ledger, record),
        "the driver" if to is None else name_of(ledger, to),
        len(trade.slab_ids),
        reason,
        len(trade.moves),
        len(leaving),
    )


def dropped(ledger: Ledger, holder: Holder, requests: Sequence[Request], now_s: float) -> Decision:
    """A model that nobody has open is given up whole for somebody's request."""
    arena = holder.arena
    record = ledger.ranges[arena.parts[0].range_id]
    to = ledger.ranges[requests[0].range_id]
    held = sum(len(r.slabs) for r in ledger.ranges.values() if r.owner == arena.model_id and r.device == record.device)
    idle_s = 0.0 if holder.idle_since_s is None else now_s - holder.idle_since_s
    reason = f"nobody has had model {arena.model_id} open for {idle_s:.0f} s, and other memory did not suffice"
    giver, taker = name_of(ledger, record), name_of(ledger, to)
    return Decision(now_s, Kind.DROP, record.device, record.range_id, to.range_id, giver, taker, held, reason)


def freed(ledger: Ledger, record: RangeRecord, slabs: int, reason: str, now_s: float) -> Decision:
    """A range gives slabs up."""
    giver = name_of(ledger, record)
    return Decision(now_s, Kind.FREED, record.device, record.range_id, 0, giver, "free slabs", slabs, reason)


def refused(ledger: Ledger, requests: Sequence[Request], reason: str, now_s: float) -> list[Decision]:
    """What ranges do not get that they ask for."""
    into = [(ledger.ranges[r.range_id], r.slabs) for r in requests if r.range_id in ledger.ranges]
    return [
        Decision(now_s, Kind.REFUSAL, to.device, 0, to.range_id, "", name_of(ledger, to), slabs, reason)
        for to, slabs in into
    ]
