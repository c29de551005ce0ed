"""Opening a model: its slabs are found, its weights, slots and homes filled.

Steps may start when every expert has a place; the homes of experts that are on a
device are filled afterwards, behind the client's first tokens.
"""

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import structlog

from vmmd.core import arbiter
from vmmd.core.geometry import Geometry
from vmmd.core.residency import NOWHERE, Slot, assign_classes, classes, slabs_needed
from vmmd.errors import Exhausted, StaleGeneration, Unavailable, VmmError
from vmmd.manager.model import Model, Piece, plan_homes
from vmmd.manager.session import Session

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

HOMES_AT_ONCE_BYTES = 512 << 20

log = structlog.get_logger("vmmd.opening")


def arena_slabs_max(geometry: Geometry, slab_bytes: int) -> int:
    """Indexes to reserve: all experts, and one partly filled slab for each size class."""
    return slabs_needed(geometry, slab_bytes) + len(classes(geometry))


async def run(manager: "Manager", model: Model) -> None:
    """Fills a new model and resolves `model.ready`; on an error it is given up whole."""
    try:
        await _provide(manager, model)
        slots = _place(model)
        with_home, placed = model.arena.home[:, 0] != NOWHERE, np.zeros(model.arena.geometry.n, np.bool_)
        placed[[p.expert for p in slots]] = True
        homes_now = np.flatnonzero(with_home & ~placed)
        await _provide_homes(manager, model, homes_now)
        first = [*model.weights_pieces(), *slots, *(model.home_piece(int(e)) for e in homes_now)]
        model.total_bytes = sum(p.size_bytes for p in first)
        await model.fill(first)
        log.info("model.filled", model=model.model_id, name=model.name, bytes=model.total_bytes)
        model.ready.set_result(None)
    except Exception as error:
        known = error if isinstance(error, VmmError) else Unavailable(f"filling model {model.name!r} failed: {error}")
        if not isinstance(error, VmmError | OSError):
            log.exception("model.fill_failed", model=model.model_id)
        log.warning("model.refused", model=model.model_id, name=model.name, why=known.message)
        manager.forget_model(model)
        for session in list(model.sessions):
            manager.detach(session, model)
        model.closed = True
        manager.discard_ranges(model)
        model.close()
        model.ready.set_exception(known)
        model.ready.exception()  # retrieved, should nobody wait
        return
    model.background = asyncio.create_task(_fill_homes(manager, model))


async def _fill_homes(manager: "Manager", model: Model) -> None:
    """Makes and fills the homes of experts that have a slot, some slabs at a time.

    Host memory is slow to make, and nobody waits for this. A home is published when
    every session has mapped its slab: readers find homes without asking. Experts
    that get none are pinned where they are.
    """
    arena = model.arena
    at_once = max(1, HOMES_AT_ONCE_BYTES // manager.ledger.devices[model.homes.device].slab_bytes)
    waiting = np.flatnonzero((arena.home[:, 0] != NOWHERE) & ~arena.home_ready)
    group = (arena.home[waiting, 0] - arena.home[waiting, 0].min(initial=1 << 32)) // at_once
    groups = [waiting[group == g] for g in np.unique(group)]
    providing: list[asyncio.Task[list[tuple[Session, int]]]] = []  # a group ahead of the one that is filled
    try:
        for i, experts in enumerate(groups):
            for ahead in groups[i : i + 2][len(providing) :]:
                providing.append(asyncio.create_task(_provide_homes(manager, model, ahead)))
            batches = await providing[0]
            providing.pop(0)
            while not model.closed and any(b in s.batches and not s.ended for s, b in batches):
                await asyncio.sleep(0.002)
            await model.fill([model.home_piece(int(e)) for e in experts])
    except (VmmError, OSError) as error:
        await asyncio.gather(*providing, return_exceptions=True)
        arena.home[~arena.home_ready] = NOWHERE
        log.warning("homes.short", model=model.model_id, ready=int(arena.home_ready.sum()), why=str(error))
        if isinstance(error, StaleGeneration | OSError) and not model.closed:
            model.mark_stale(str(error))


async def _provide_homes(
    manager: "Manager", model: Model, experts: "np.typing.NDArray[np.int64]"
) -> list[tuple[Session, int]]:
    """Leases the slabs of some experts' homes; returns the batches that the model's sessions are granted.

    Homes were planned from the range's first index on, so slabs come in that order.
    """
    highest = int(model.arena.home[experts, 0].max()) if len(experts) else -1
    missing = highest + 1 - len(model.homes.slabs)
    if missing <= 0:
        return []
    request = arbiter.Request(model.homes.range_id, missing)
    granted = await manager.slabs.provide([request], keep_models=(model.model_id,), patient=not model.ready.done())
    if model.closed:
        manager.slabs.take_back([p.slab_id for p in granted.placed], 0)
        raise Unavailable(f"model {model.name!r} is being dropped")
    return manager.grant_added(model, model.homes, granted.placed) if model.ready.done() else []


async def _provide(manager: "Manager", model: Model) -> None:
    """Leases slabs: weights and the arena's floor at least, then as much as is free. Plans the homes."""
    ledger, arena, geometry = manager.ledger, model.arena, model.arena.geometry
    host = model.homes
    host_bytes = ledger.devices[host.device].slab_bytes
    order = np.arange(geometry.n)
    homes = min(slabs_needed(geometry, host_bytes), _obtainable(manager, model, host.device))
    plan_homes(arena, host_bytes, homes, order[::-1])
    pinned = np.flatnonzero(arena.home[:, 0] == NOWHERE)
    floor = _floor_slabs(model, pinned)
    first = model.ranges[0]
    need = [arbiter.Request(model.weights.range_id, model.weights.slabs_max), arbiter.Request(first.range_id, floor)]
    try:
        await manager.slabs.provide(need, keep_models=(model.model_id,))
    except Exhausted as error:
        raise Exhausted(
            f"model {model.name!r} needs {arbiter.size_text(geometry.weights_bytes)} of weights and room for"
            f" {arena.floor_slots} experts, {len(pinned)} of them without a home in host memory: {error.message}",
            error.requested_bytes,
            error.free_bytes,
            error.holders,
        ) from None
    missing = slabs_needed(geometry, arena.parts[0].slab_bytes) - floor
    for p, record in enumerate(model.ranges):
        extra = min(missing, arbiter.free_for(ledger, record.device, record.domain))
        if extra > 0:
            await manager.slabs.provide([arbiter.Request(record.range_id, extra)], keep_models=(model.model_id,))
            missing -= extra
        sizes = assign_classes(geometry, arena.parts[p].slab_bytes, len(record.slabs))
        for index, slot_bytes in zip(sorted(record.slabs), _pinned_first(model, pinned, sizes, p), strict=True):
            arena.add_slab(p, index, slot_bytes)


def _obtainable(manager: "Manager", model: Model, device: str) -> int:
    """Slabs of a device that are free or held by models that nobody has open."""
    ledger = manager.ledger
    idle = [m for m in manager.models.values() if m.idle_since_s is not None and m is not model and m.movable]
    held = sum(len(r.slabs) for m in idle for r in (m.weights, m.homes, *m.ranges) if r.device == device)
    return arbiter.free_for(ledger, device, model.arena.domain) + held


def _floor_slabs(model: Model, pinned: "np.typing.NDArray[np.int64]") -> int:
    """Slabs of the first device that the floor and the experts without homes need."""
    geometry, slab_bytes = model.arena.geometry, model.arena.parts[0].slab_bytes
    total = slabs_needed(geometry, slab_bytes)
    share = -(-total * model.arena.floor_slots // geometry.n)
    return min(total, max(share, len(classes(geometry)), slabs_needed(geometry, slab_bytes, pinned)))


def _pinned_first(model: Model, pinned: "np.typing.NDArray[np.int64]", sizes: list[int], part: int) -> list[int]:
    """The size classes of a part's slabs, with room for every pinned expert on the first part."""
    if part != 0 or not len(pinned):
        return sizes
    geometry, slab_bytes = model.arena.geometry, model.arena.parts[0].slab_bytes
    must: list[int] = []
    for size, experts in classes(geometry):
        count = int(np.isin(experts, pinned).sum())
        must += [size] * -(-count // (slab_bytes // size))
    rest = list(sizes)
    for size in must:
        if size in rest:
            rest.remove(size)
    return (must + rest)[: len(sizes)]


def _place(model: Model) -> list[Piece]:
    """Reserves slots, pinned experts first, then in order; returns their filling."""
    arena = model.arena
    free: dict[int, list[Slot]] = {}
    for part in range(len(arena.parts)):
        for slot_bytes, slot in arena.empty_slots(part):
            free.setdefault(slot_bytes, []).append(slot)
    for slots in free.values():
        slots.reverse()
    has_home = arena.home[:, 0] != NOWHERE
    pieces: list[Piece] = []
    homeless = 0
    for expert in np.lexsort((np.arange(arena.geometry.n), has_home)).tolist():
        if slots := free.get(arena.slot_bytes(expert), []):
            arena.reserve(slots[-1])
            pieces.append(model.slot_piece(expert, slots.pop()))
        elif not has_home[expert]:
            homeless += 1
    if homeless:
        raise Exhausted(
            f"{homeless} experts of model {model.name!r} fit neither the device's cap nor the host's;"
            " raise cap_bytes or host_cap_bytes"
        )
    return pieces
