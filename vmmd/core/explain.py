"""Explanations: why a range has what it has, what was refused, and what would change it; in words."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vmmd.core import arbiter
from vmmd.core.decisions import Decision, Kind, Log, name_of
from vmmd.core.ledger import Ledger, RangeKind, RangeRecord, SessionRecord, SlabState
from vmmd.core.policy import Policy
from vmmd.core.victims import Holder, Victims
from vmmd.errors import Exhausted, NotFound
from vmmd.sizes import size_text

DECISIONS_MAX = 5


class Fact(NamedTuple):
    """One line of an explanation."""

    topic: str
    text: str


class Explainer:
    """What is known at one moment.

    Args:
        ledger: who has what.
        models: every model.
        log: what was decided.
        policy: what memory is worth.
        now_s: of the ledger's clock.
        give_back_delay_s: before an arena takes a slab that was traded.
    """

    def __init__(
        self,
        ledger: Ledger,
        models: Sequence[Holder],
        log: Log,
        policy: Policy,
        now_s: float,
        give_back_delay_s: float,
    ) -> None:
        self._ledger = ledger
        self._models = models
        self._log = log
        self._policy = policy
        self._now_s = now_s
        self._give_back_delay_s = give_back_delay_s

    def explain(self, some_id: int) -> list[Fact]:
        """Of a range, of all ranges of a session, or of all of a model. Errors: `NotFound`."""
        ledger = self._ledger
        if some_id in ledger.ranges:
            return self._range(ledger.ranges[some_id])
        if some_id in ledger.sessions:
            session = ledger.sessions[some_id]
            head = [Fact("session", f"{some_id}, pid {session.pid}, user {session.uid}, domain {session.domain!r}")]
            ranges = ledger.session_ranges(some_id)
            return head + [fact for record in ranges for fact in self._range(record)] + self._share(session, ranges)
        owned = [r for r in ledger.ranges.values() if r.owner == some_id and r.kind is not RangeKind.KV]
        if not owned:
            raise NotFound(
                f"{some_id} is no range, session or model of this vmmd; `vmmctl status --output json` and"
                " `vmmctl trades` list their ids"
            )
        return [fact for record in owned for fact in self._range(record)]

    def _range(self, record: RangeRecord) -> list[Fact]:
        size = self._ledger.devices[record.device].slab_bytes
        is_kv, owner = record.kind is RangeKind.KV, name_of(self._ledger, record)
        facts = [
            Fact("range", f"{record.range_id}, {'K/V of ' if is_kv else ''}{owner}, on {record.device}"),
            Fact("holds", f"{_slabs(len(record.slabs), size)} of at most {record.slabs_max}"),
        ]
        came = ", ".join(f"{count} from {giver}" for giver, count in self._log.came_from(record.range_id).items())
        if came:
            facts.append(Fact("came from", f"{came}, those given up since included"))
        facts += self._kv(record) if is_kv else self._arena(record)
        decisions = self._log.concerning([record.range_id])
        facts += [Fact("decided", self._told(d, record)) for d in decisions[:DECISIONS_MAX]]
        refusal = next((d for d in decisions if d.kind is Kind.REFUSAL), None)
        if refusal is not None:
            times = f", {refusal.times} times in a row" if refusal.times > 1 else ""
            facts.append(
                Fact("refused", f"{_slabs(refusal.slabs, size)}, {self._ago(refusal)}{times}: {refusal.reason}")
            )
        return facts

    def _told(self, decision: Decision, record: RangeRecord) -> str:
        count = f"{decision.slabs} slab" + "s" * (decision.slabs != 1)
        if decision.to_id == record.range_id:
            way = f"{count} refused" if decision.kind is Kind.REFUSAL else f"{count} from {decision.giver}"
        else:
            way = f"{count} to {decision.taker}"
        return f"{self._ago(decision)}, {decision.kind}: {way}; {decision.reason}"

    def _ago(self, decision: Decision) -> str:
        return f"{self._now_s - decision.at_s:.1f} s ago"

    # K/V

    def _kv(self, record: RangeRecord) -> list[Fact]:
        """How far it could grow now, and what would let it grow further."""
        if record.parked_s is not None:
            since = f"for {self._now_s - record.parked_s:.1f} s"
            return [Fact("parked", f"{since}: it waits for its user, and gives before any arena does")]
        session = self._ledger.sessions[record.owner]
        size = self._ledger.devices[record.device].slab_bytes
        possible, most = 0, record.slabs_max - len(record.slabs)
        refusal = self._refusal(record, most) if most else None
        if refusal is None:
            possible = most
        else:
            beyond = most
            while beyond - possible > 1:
                half = (possible + beyond) // 2
                if (found := self._refusal(record, half)) is None:
                    possible = half
                else:
                    beyond, refusal = half, found
        facts = [Fact("could have", f"{_slabs(possible, size)} more at this moment")]
        if session.share.cap_bytes is not None:
            facts.append(Fact("session's cap", f"{size_text(session.share.cap_bytes)} on each device"))
        if refusal is not None:
            facts.append(Fact("for more", refusal.message))
        return facts

    def _refusal(self, record: RangeRecord, slabs: int) -> Exhausted | None:
        request = arbiter.Request(record.range_id, slabs)
        try:
            arbiter.plan(self._ledger, self._models, [request], now_s=self._now_s, policy=self._policy)
        except Exhausted as refusal:
            return refusal
        return None

    def _share(self, session: SessionRecord, ranges: Sequence[RangeRecord]) -> list[Fact]:
        """What the session and its user may count on."""
        share = session.share
        cap = "none" if share.cap_bytes is None else size_text(share.cap_bytes)
        text = f"guarantee {size_text(share.guarantee_bytes)}, cap {cap}, priority {share.priority}, on each device"
        facts = [Fact("session's share", text)]
        for device in sorted({record.device for record in ranges}):
            size = self._ledger.devices[device].slab_bytes
            account = arbiter.account(self._ledger, self._models, device).get(session.uid)
            if account is not None:
                cap = "none" if account.cap is None else _slabs(account.cap, size)
                text = (
                    f"uses {_slabs(account.used, size)} of {device}, {account.fixed} of them for models' weights and"
                    f" floors; guarantee {_slabs(account.guarantee, size)}, cap {cap}"
                )
                facts.append(Fact(f"user {session.uid}", text))
        return facts

    # Models

    def _arena(self, record: RangeRecord) -> list[Fact]:
        """What it would gain by a slab, and what it would lose."""
        holder = next((m for m in self._models if m.arena.model_id == record.owner), None)
        if holder is None or record.kind is not RangeKind.ARENA:
            return []
        arena = holder.arena
        p = next(i for i, part in enumerate(arena.parts) if part.range_id == record.range_id)
        part = arena.parts[p]
        facts = [
            Fact(
                "experts",
                f"{part.occupied} in {part.slots} slots here; {int(arena.resident.sum())} of {arena.geometry.n} with"
                f" {arena.heat_covered():.1%} of the heat on all devices; floor {arena.floor_slots} slots",
            )
        ]
        victims = Victims(self._ledger, [holder], self._policy, self._now_s)
        worth = victims.worth(holder)
        gives = victims.trades(record.device, 1, arena.domain, crosses=False)
        if gives:
            facts.append(Fact("gives next", f"a slab worth {gives[0].worth * 1e6:.3g} us a token to it"))
        elif not holder.movable:
            facts.append(Fact("gives next", "nothing: it is being filled, or a reader of it is behind"))
        else:
            facts.append(Fact("gives next", "nothing: it is at its floor, or its experts have no home in host memory"))
        missing = np.flatnonzero(~arena.resident & arena.home_ready)
        if len(missing):
            slots = part.slab_bytes // int(arena.geometry.slot_bytes[missing].min())
            gain = float(np.sort(worth[missing])[::-1][:slots].sum())
            facts.append(
                Fact("for more", f"a slab more would be worth {gain * 1e6:.3g} us a token; {self._free(record)}")
            )
        else:
            facts.append(Fact("for more", "nothing is missing: every expert that can be moved has a slot"))
        return facts

    def _free(self, record: RangeRecord) -> str:
        free = [self._ledger.slabs[i] for i in self._ledger.free_slabs(record.device, record.domain)]
        waits = [s.traded_s + self._give_back_delay_s - self._now_s for s in free if s.traded_s is not None]
        waits = [wait for wait in waits if wait > 0]
        if waits:
            return f"{len(waits)} free slabs were traded a moment ago and can come in {max(waits):.1f} s"
        kv = len([i for i in self._ledger.slabs_in(record.device, SlabState.LEASED) if self._is_kv(i)])
        if not arbiter.free_for(self._ledger, record.device, record.domain):
            return f"none is free: {kv} slabs are K/V, and come back when their sessions shrink or end"
        return "it comes when the device has had room for a while"

    def _is_kv(self, slab_id: int) -> bool:
        range_id = self._ledger.slabs[slab_id].range_id
        return range_id is not None and self._ledger.ranges[range_id].kind is RangeKind.KV


def _slabs(count: int, slab_bytes: int) -> str:
    return f"{count} slabs ({size_text(count * slab_bytes)})"
