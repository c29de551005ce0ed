"""Trades of an arena's slabs, under the generation protocol.

Order (`begin`, `finish`), each wait being for all sessions of the arena to leave
older generations behind:

1. unpublish the coldest experts that hotter ones displace; wait
2. fill their slots from the homes
3. publish the newcomers there, unpublish the victims; wait
4. the slab leaves the arena

An expert that is unpublished is read from its home, so no step ever waits. An
`exchange` is the first two steps with newcomers from their homes.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
import structlog

from vmmd.core.placement import Exchange
from vmmd.core.residency import BUSY, EMPTY
from vmmd.core.victims import ArenaTrade
from vmmd.errors import VmmError
from vmmd.manager import filling
from vmmd.manager.model import Model, Stuck, Unmapping

log = structlog.get_logger("vmmd.model")

I64 = npt.NDArray[np.int64]


class StuckVictims(Exception):
    """Victims were emptied, but sessions may still read them."""

    def __init__(self, stuck: Stuck, generation: int) -> None:
        super().__init__(str(stuck))
        self.stuck = stuck
        self.generation = generation


def begin(model: Model, trade: ArenaTrade) -> int:
    """Step 1, at once: takes the slots of `trade.moves`, and the empty ones of the victims, out of others' reach.

    The experts that move, too: those that are displaced on one device and move on to another are in no slot meanwhile.
    Returns the generation; `finish` must follow.
    """
    arena = model.arena
    arena.moving[_moving(trade)] = True
    arena.reserve_all(arena.slots_that_are(EMPTY, trade.part, trade.indexes))
    displaced = []
    for move in trade.moves:
        if move.displaced == EMPTY:
            arena.reserve(move.to)
        else:
            arena.vacate(move.displaced)
            displaced.append(move.displaced)
    model.point(np.array(displaced, np.int64))
    return model.table.bump()


async def finish(model: Model, trade: ArenaTrade, generation: int) -> None:
    """Steps 1 (the wait) to 4. The slabs' ledger state is the caller's.

    Errors: `Stuck`, with `trade.slab_ids` untouched and still in the arena, or
    `StuckVictims`, with them emptied and not yet quiescent; `VmmError` where
    the driver failed, untouched.
    """
    model.working += 1
    try:
        await _finish(model, trade, generation)
    finally:
        model.arena.moving[_moving(trade)] = False
        model.working -= 1


async def _finish(model: Model, trade: ArenaTrade, generation: int) -> None:
    arena = model.arena
    reserved = _busy_slots(model, trade)
    experts = _moving(trade)
    places = np.array([move.to for move in trade.moves], np.int64).reshape(-1, 3)
    try:
        if any(move.displaced != EMPTY for move in trade.moves):
            await model.quiesce(generation, model.quiesce_deadline_s)
        await filling.fill(model, filling.slots(model, experts, places))
    except Stuck as stuck:
        arena.release_all(reserved)
        _later(model, _release_when_quiet(model, places, generation), stuck.pids)
        raise
    except (VmmError, OSError):
        arena.release_all(np.concatenate((reserved, filling.not_settled(model, experts, places))))
        left = _busy_slots(model, trade)  # of experts that had moved already; old steps may read there
        if len(left):
            _release_later(model, left, model.table.bump())
        raise
    for expert in trade.evicted:
        arena.vacate(expert)
    model.point(np.array(trade.evicted, np.int64))
    generation = model.table.bump()
    try:
        await model.quiesce(generation, model.quiesce_deadline_s)
    except Stuck as stuck:
        raise StuckVictims(stuck, generation) from None
    _take_out(model, trade)


async def exchange(model: Model, chosen: Exchange) -> None:
    """Lets experts take the slots of others, or empty ones. Whoever leaves a slot is read from its home.

    Errors: `Stuck`, `VmmError`, `OSError`. The slots are empty then: at once, or when
    the stuck readers have moved on.
    """
    arena, slots = model.arena, chosen.slots
    before = {tuple(slot) for slot in arena.place[chosen.outgoing].tolist()}
    taken = {tuple(slot) for slot in slots.tolist()}
    arena.reserve_all(_rows(taken - before))
    left = _rows(before - taken)
    for expert in chosen.outgoing.tolist():
        arena.vacate(expert)
    model.point(chosen.outgoing)
    generation = model.table.bump()
    model.working += 1
    try:
        await model.quiesce(generation, model.quiesce_deadline_s)
        arena.release_all(left)
        await filling.fill(model, filling.slots(model, chosen.incoming, slots))
    except Stuck:
        _release_later(model, np.concatenate((slots, left)), generation)
        raise
    except (VmmError, OSError):
        arena.release_all(filling.not_settled(model, chosen.incoming, slots))
        raise
    finally:
        model.working -= 1


def _rows(slots: Set[tuple[int, ...]]) -> I64:
    return np.array(sorted(slots), np.int64).reshape(-1, 3)


def _moving(trade: ArenaTrade) -> I64:
    return np.array([move.expert for move in trade.moves], np.int64)


def _busy_slots(model: Model, trade: ArenaTrade) -> I64:
    return model.arena.slots_that_are(BUSY, trade.part, trade.indexes)


def _take_out(model: Model, trade: ArenaTrade) -> None:
    """Step 4: the emptied slabs leave the arena. Telling its sessions is the caller's."""
    for index in trade.indexes:
        model.arena.remove_slab(trade.part, index)


def withhold(model: Model, trade: ArenaTrade, revocation_id: int) -> None:
    """Keeps the indexes of slabs that have left empty until every session has answered the revocation."""
    model.unmapping.append(Unmapping(trade.part, tuple(trade.indexes), revocation_id, list(model.sessions)))


def withheld(model: Model, part: int) -> set[int]:
    """Indexes at which some session may still have a slab mapped that has gone.

    No other slab may come there yet: that session would take the old one for it.
    """
    model.unmapping = [
        u
        for u in model.unmapping
        if any(u.revocation_id in s.revocations and not s.ended and s in model.sessions for s in u.sessions)
    ]
    return {index for u in model.unmapping if u.part == part for index in u.indexes}


def take_out_later(model: Model, trade: ArenaTrade, stuck: StuckVictims, done: Callable[[], None]) -> None:
    """Step 4 once the stuck readers have moved on or died; then `done`."""

    async def wait() -> None:
        await model.quiesce(stuck.generation, float("inf"))
        _take_out(model, trade)
        done()

    _later(model, wait(), stuck.stuck.pids)


async def _release_when_quiet(model: Model, slots: I64, generation: int) -> None:
    await model.quiesce(generation, float("inf"))
    model.arena.release_all(slots)


def _release_later(model: Model, slots: I64, generation: int) -> None:
    task = asyncio.create_task(_release_when_quiet(model, slots, generation))
    model.releasing.add(task)
    task.add_done_callback(model.releasing.discard)


def _later(model: Model, waiting: Coroutine[Any, Any, None], pids: Sequence[int]) -> None:
    model.stuck_pids = tuple(pids)
    log.warning("model.stuck", model=model.model_id, pids=list(pids))

    async def run() -> None:
        await waiting
        if len(model.tasks) == 1:
            model.stuck_pids = ()

    task = asyncio.create_task(run())
    model.tasks.add(task)
    task.add_done_callback(model.tasks.discard)
