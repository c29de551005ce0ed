"""Victims: which slabs arenas give, and which experts of theirs stay.

Experts that are hotter than the coldest that stay take those one's slots, so whichever
slab of a size class goes, it is the coldest experts that leave. What the next slab
is worth to an arena is therefore the same for all slabs of a class on a device: what its
coldest experts are worth, as many as the slab has slots. Arenas give in the order of
that; within a class the slab goes whose own experts are worth least, as fewest have to move.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmmd.core.ledger import Ledger, SlabState
from vmmd.core.policy import NEED, Policy
from vmmd.core.residency import EMPTY, Arena, Part, Slot

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Holder(NamedTuple):
    """A model as the arbiter sees it beside its arena."""

    arena: Arena
    idle_since_s: float | None  # None while a session has it open
    movable: bool  # False while it is being opened or has a stuck reader
    priority: int = 0  # the highest of its sessions
    uid: int | None = None  # who is charged for its weights and floor; None: nobody, it can be dropped
    floor_slabs: int = 0  # that its first part needs
    routed_s: float | None = None  # when anything was routed last; None: never, or a moment ago


class Move(NamedTuple):
    """An expert of a victim slab, or one that was displaced, goes to a slot that stays, whose expert it displaces."""

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
    evicted: list[int]  # experts of the victims that move nowhere: they are read from their homes afterwards
    crosses: bool  # to another domain: the slabs are destroyed
    worth: float  # of what leaves, as the policy says


Leased = dict[int, list[list[int]]]
"""By model and part: the indexes of its arena's slabs that no trade is under way with."""


class Victims:
    """What arenas can still give, while a plan is made; what is chosen is taken from it.

    Args:
        ledger: who has what.
        models: whose arenas may give.
        policy: says what experts are worth.
        now_s: of the ledger's clock.
        into: ranges that ask. A slab that one of them had a moment ago is held back.
    """

    def __init__(
        self, ledger: Ledger, models: Sequence[Holder], policy: Policy, now_s: float, into: Collection[int] = ()
    ) -> None:
        self._ledger = ledger
        self._models = models
        self._policy = policy
        self._now_s = now_s
        self._into = into
        self._leased = _leased_slabs(models, ledger)
        self._spare = {m.arena.model_id: _spare_slots(m.arena, self._leased) for m in models}
        self._worth: dict[int, F64] = {}  # by model

    def trades(
        self,
        device: str,
        count: int,
        domain: str,
        *,
        crosses: bool,
        gain: float = NEED,
        live: bool = False,
        excess: Mapping[str, int] | None = None,
    ) -> list[ArenaTrade]:
        """Up to `count` slabs of arenas on a device, those worth least first, floors respected.

        Args:
            device: where.
            count: of slabs.
            domain: who asks.
            crosses: whether arenas of other domains give, or of this one.
            gain: what a slab is worth to who asks: none goes that is worth too much where it is.
            live: leave models alone that nobody has open.
            excess: slabs that each domain has beyond what its users are guaranteed; None: no matter.
        """
        givers = [
            (m, holder)
            for m, holder in enumerate(self._models)
            if (holder.arena.domain != domain) == crosses and not (live and holder.idle_since_s is not None)
        ]
        groups = [group for m, holder in givers for group in self._groups(m, holder, device, count)]
        left = dict(excess) if excess is not None else {}
        queue = [offer for group in groups if (offer := self._offer(group, 0)) is not None]
        heapq.heapify(queue)
        chosen: dict[tuple[int, int], list[int]] = {}
        lost: dict[tuple[int, int], float] = {}
        taken = 0
        while queue and taken < count:
            loss, _, at, group = queue[0]
            arena, key = self._models[group.model].arena, (group.model, group.part)
            if gain != NEED and not self._policy.pays(gain, loss):
                break
            gives = self._spare[arena.model_id] >= group.slots and (excess is None or left.get(arena.domain, 0) > 0)
            if gives:
                self._spare[arena.model_id] -= group.slots
                left[arena.domain] = left.get(arena.domain, 0) - 1
                chosen.setdefault(key, []).append(group.indexes[at])
                lost[key] = lost.get(key, 0.0) + loss
                group.given += group.slots
                taken += 1
            following = self._offer(group, at + 1) if gives else None
            if following is None:
                heapq.heappop(queue)
            else:
                heapq.heapreplace(queue, following)
        return [self._trade(m, p, indexes, lost[m, p], crosses=crosses) for (m, p), indexes in chosen.items()]

    def move_on(self, trades: Sequence[ArenaTrade]) -> None:
        """Adds moves to all trades of a plan: experts that are pushed off a device displace colder ones on others."""
        for m, holder in enumerate(self._models):
            own = [trade for trade in trades if trade.model_id == holder.arena.model_id]
            if own and len(holder.arena.parts) > 1:
                self._move_on(m, own)

    def _move_on(self, model: int, trades: Sequence[ArenaTrade]) -> None:
        arena, worth = self._models[model].arena, self.worth(self._models[model])
        staying = {(p, index) for p, indexes in enumerate(self._leased[arena.model_id]) for index in indexes}
        staying -= {(trade.part, index) for trade in trades for index in trade.indexes}
        taken = {move.to for trade in trades for move in trade.moves}
        for trade in trades:
            displaced = [move.displaced for move in trade.moves if move.displaced != EMPTY]
            off = np.array([*trade.evicted, *displaced], np.int64)
            off = off[np.lexsort((off, -worth[off]))]
            for slot_bytes in np.unique(arena.geometry.slot_bytes[off]).tolist():
                hottest = off[arena.geometry.slot_bytes[off] == slot_bytes]
                slabs = [(p, i) for p, i in sorted(staying) if p != trade.part]
                slabs = [(p, i) for p, i in slabs if arena.parts[p].slabs[i].slot_bytes == slot_bytes]
                coldest = _coldest_slots(arena, worth, slabs, taken)
                for expert, (there, slot) in zip(hottest.tolist(), coldest, strict=False):
                    if there != EMPTY and worth[there] >= worth[expert]:
                        break
                    trade.moves.append(Move(expert, slot, there))
                    taken.add(slot)
            moved = {move.expert for move in trade.moves}
            trade.evicted[:] = [expert for expert in trade.evicted if expert not in moved]

    def _offer(self, group: "_Group", start: int) -> "_Offer | None":
        """The next slab of a group, and what the arena loses by it."""
        at = self._first(group, start)
        if at is None:
            return None
        last = len(group.losses) - 1
        loss = group.losses[min(group.given + group.slots, last)] - group.losses[min(group.given, last)]
        return _Offer(float(loss), (group.model, group.part, group.slots), at, group)

    def held_back_s(self, device: str, domain: str, count: int) -> float:
        """Seconds until so many slabs more can be had that are held back now, as who asks had them a moment ago.

        0 where no waiting helps.
        """
        held = []
        for holder in self._models:
            arena = holder.arena
            if arena.domain != domain:
                continue
            spare = self._spare[arena.model_id]
            for p, part in enumerate(arena.parts):
                for index in self._leased[arena.model_id][p] if part.device == device else ():
                    slots, until_s = part.slabs[index].slots, self._held_until_s(self._slab_id(part, index))
                    if until_s > self._now_s and spare >= slots:
                        spare -= slots
                        held.append(until_s - self._now_s)
        return sorted(held)[count - 1] if len(held) >= count else 0.0

    def _held_until_s(self, slab_id: int) -> float:
        slab = self._ledger.slabs[slab_id]
        return slab.came_s + self._policy.hold_s if slab.came_from in self._into else float("-inf")

    def _slab_id(self, part: Part, index: int) -> int:
        return self._ledger.ranges[part.range_id].slabs[index]

    def worth(self, holder: Holder) -> F64:
        """What each expert of a model is worth in a slot."""
        model_id = holder.arena.model_id
        if model_id not in self._worth:
            since_s = [s for s in (holder.idle_since_s, holder.routed_s) if s is not None]
            idle_s = max(0.0, self._now_s - min(since_s)) if since_s else 0.0
            self._worth[model_id] = self._policy.expert_worth(holder.arena, idle_s, holder.priority)
        return self._worth[model_id]

    def _groups(self, model: int, holder: Holder, device: str, count: int) -> "list[_Group]":
        """The slabs of an arena on a device, by part and size class; no more than `count` will be asked for."""
        arena = holder.arena
        found: list[_Group] = []
        for p, part in enumerate(arena.parts):
            leased = self._leased[arena.model_id][p]
            if part.device != device or not leased:
                continue
            worth = self.worth(holder)
            here = np.flatnonzero(arena.place[:, 0] == p)
            at = arena.place[here, 1]
            size = self._ledger.ranges[part.range_id].slabs_max
            own, experts = np.bincount(at, worth[here], size), np.bincount(at, minlength=size)
            is_leased, is_pinned = np.zeros((2, size), np.bool_)
            is_leased[leased] = True
            pinned = ~arena.home_ready[here]
            is_pinned[at[pinned]] = True
            evictable = here[is_leased[at] & ~pinned]
            every = np.array(leased)
            size_of = arena.geometry.slot_bytes
            is_one_class = bool((size_of == size_of[0]).all())
            classes = {int(size_of[0])} if is_one_class else {part.slabs[index].slot_bytes for index in leased}
            for slot_bytes in sorted(classes):
                indexes, of_class = every, evictable
                if not is_one_class:
                    indexes = every[[part.slabs[index].slot_bytes == slot_bytes for index in leased]]
                    of_class = evictable[size_of[evictable] == slot_bytes]
                slots = part.slab_bytes // slot_bytes
                empty = 0
                if len(indexes) * slots > experts[indexes].sum():
                    empty = sum(part.slabs[index].empty for index in indexes.tolist())
                # the fewest experts of equal worth, then the last of the range
                order = indexes[np.lexsort((-indexes, experts[indexes], own[indexes]))]
                order = order[~is_pinned[order]]
                losses = _coldest_first(worth[of_class], empty, min(count, len(order)) * slots)
                found.append(_Group(model, p, order.tolist(), slots, losses))
        return found

    def _first(self, group: "_Group", start: int) -> int | None:
        """The next of a group's slabs that can be given: nothing busy in it, and not held back."""
        part = self._models[group.model].arena.parts[group.part]
        for at in range(start, len(group.indexes)):
            index = group.indexes[at]
            if not part.slabs[index].busy and self._held_until_s(self._slab_id(part, index)) <= self._now_s:
                return at
        return None

    def _trade(self, model: int, p: int, indexes: list[int], loss: float, *, crosses: bool) -> ArenaTrade:
        """The moves that keep the hotter experts: the hottest of the victims to the coldest that stay."""
        arena, worth = self._models[model].arena, self.worth(self._models[model])
        part = arena.parts[p]
        stays = np.zeros(self._ledger.ranges[part.range_id].slabs_max, np.bool_)
        stays[self._leased[arena.model_id][p]] = True
        stays[indexes] = False
        moves: list[Move] = []
        evicted: list[int] = []
        for slot_bytes in {part.slabs[i].slot_bytes for i in indexes}:
            of_class = [part.slabs[i].experts() for i in indexes if part.slabs[i].slot_bytes == slot_bytes]
            experts = np.concatenate(of_class)
            hottest = experts[np.lexsort((experts, -worth[experts]))]
            empty, coldest = _staying(arena, worth, p, slot_bytes, stays, len(hottest))
            into_empty = len(empty)
            rising = min(len(coldest), len(hottest) - into_empty)
            pays = worth[coldest[:rising]] < worth[hottest[into_empty : into_empty + rising]]
            kept = into_empty + (rising if pays.all() else int(pays.argmin()))
            displaced = coldest[: kept - into_empty]
            slots = [*empty, *map(Slot._make, arena.place[displaced].tolist())]
            out = [EMPTY] * into_empty + displaced.tolist()
            moves += map(Move._make, zip(hottest[:kept].tolist(), slots, out, strict=True))
            evicted += hottest[kept:].tolist()
        given = sum(part.slabs[index].slots for index in indexes)
        slab_ids = [self._slab_id(part, index) for index in indexes]
        return ArenaTrade(arena.model_id, p, indexes, slab_ids, given, moves, evicted, crosses, loss)


@dataclass(eq=False)
class _Group:
    """Slabs of one size class on one device."""

    model: int  # index in the list of models
    part: int
    indexes: list[int]  # those worth least by themselves first
    slots: int  # of a slab
    losses: F64  # [slots + 1] what the arena loses by giving so many
    given: int = 0  # slots


class _Offer(NamedTuple):
    """The slab that a group would give next; the fields are in the order of preference, the group is never reached."""

    loss: float
    who: tuple[int, int, int]  # model, part, class
    at: int  # in the group's indexes
    group: _Group


def _coldest_slots(
    arena: Arena, worth: F64, slabs: Sequence[tuple[int, int]], taken: Set[Slot]
) -> Iterator[tuple[int, Slot]]:
    """(expert or EMPTY, slot) of some slabs (part, index) that may be taken over: empty ones, then the coldest."""
    for p, index in slabs:
        if arena.parts[p].slabs[index].empty:
            free = (Slot(*slot) for slot in arena.slots_that_are(EMPTY, p, [index]).tolist())
            yield from ((EMPTY, slot) for slot in free if slot not in taken)
    held = np.concatenate([arena.parts[p].slabs[index].experts() for p, index in slabs] or [np.zeros(0, np.int64)])
    held = held[arena.home_ready[held]]
    for expert in held[np.argsort(worth[held], kind="stable")].tolist():
        slot = arena.slot_of(expert)
        if slot is not None and slot not in taken:
            yield expert, slot


def _coldest_first(worth: F64, empty: int, count: int) -> F64:
    """What the coldest so many slots hold, summed up ``[count + 1]``; those that are empty hold nothing."""
    held = min(len(worth), max(0, count - empty))
    coldest = worth if held == len(worth) else np.partition(worth, held)[:held]
    return np.concatenate((np.zeros(empty + 1), np.cumsum(np.sort(coldest))))


def _leased_slabs(models: Sequence[Holder], ledger: Ledger) -> Leased:
    revoking = {i for device in ledger.devices for i in ledger.slabs_in(device, SlabState.REVOKING)}
    return {
        m.arena.model_id: [
            [i for i, s in ledger.ranges[part.range_id].slabs.items() if i in part.slabs and s not in revoking]
            for part in m.arena.parts
        ]
        for m in models
    }


def _spare_slots(arena: Arena, leased: Leased) -> int:
    """Slots that an arena can give; those of slabs on their way out count as given."""
    parts = zip(arena.parts, leased[arena.model_id], strict=True)
    return sum(part.slabs[index].slots for part, indexes in parts for index in indexes) - arena.floor_slots


def _staying(arena: Arena, worth: F64, p: int, slot_bytes: int, stays: Bool, count: int) -> tuple[list[Slot], I64]:
    """Up to `count` slots of a class that stay and may be taken over: empty ones, and experts, the coldest first."""
    empty = [
        Slot(p, index, int(slot))
        for index, slab in arena.parts[p].slabs.items()
        if slab.empty and slab.slot_bytes == slot_bytes and stays[index]
        for slot in np.flatnonzero(slab.occupants == EMPTY)
    ][:count]
    experts = np.flatnonzero(arena.place[:, 0] == p)
    experts = experts[stays[arena.place[experts, 1]]]
    able = arena.home_ready[experts] & (arena.geometry.slot_bytes[experts] == slot_bytes)
    if not able.all():
        experts = experts[able]
    count -= len(empty)
    if 0 < count < len(experts):  # sorting thousands takes longer than all the rest
        values = worth[experts]
        experts = experts[values <= np.partition(values, count - 1)[count - 1]]
    return empty, experts[np.argsort(worth[experts], kind="stable")][:count]
