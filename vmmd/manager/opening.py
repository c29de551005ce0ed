"""Opening a model: its slabs are found, its weights and slots filled, then the homes in host memory.

Steps may start when every expert has a place: the homes of experts that are on a
device are filled behind the client's first tokens (`vmmd.manager.homes`).
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog

from vmmd.core import arbiter
from vmmd.core.geometry import Geometry
from vmmd.core.ledger import Ledger, RangeKind, RangeRecord, SessionRecord
from vmmd.core.residency import NOWHERE, Part, assign_classes, classes, slabs_needed
from vmmd.errors import Exhausted, Unavailable, VmmError
from vmmd.manager import filling
from vmmd.manager.homes import Homes
from vmmd.manager.model import Model
from vmmd.manager.upkeep import wanted_slabs
from vmmd.sizes import size_text

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.opening")

I64 = npt.NDArray[np.int64]


def new_part(ledger: Ledger, model_id: int, domain: str, geometry: Geometry, device: str) -> RangeRecord:
    """An empty range, in the ledger, for a model's experts on a device."""
    slabs_max = arena_slabs_max(geometry, ledger.devices[device].slab_bytes)
    record = RangeRecord(ledger.new_id(), RangeKind.ARENA, device, domain, model_id, slabs_max)
    ledger.add_range(record)
    return record


def arena_slabs_max(geometry: Geometry, slab_bytes: int) -> int:
    """Indexes to reserve: all experts, and one partly filled slab for each size class."""
    return slabs_needed(geometry, slab_bytes) + len(classes(geometry))


async def run(manager: "Manager", model: Model, opener: SessionRecord, wait_s: float) -> None:
    """Fills a new model and resolves `model.ready`; on an error it is given up whole.

    Memory is waited for for up to `wait_s`, and as long as a session wants the model.
    """
    geometry = model.arena.geometry
    homes: Homes | None = None
    began = time.monotonic()
    try:
        await _recall(manager, model)
        await _provide(manager, model, opener, wait_s)
        experts, places = _place(model)
        provided_s = time.monotonic() - began
        needed = model.arena.home[:, 0] != NOWHERE
        needed[experts] = False
        places_bytes = int(geometry.size_bytes[experts].sum() + geometry.size_bytes[needed].sum())
        model.total_bytes = places_bytes + sum(extent.length_bytes for extent in geometry.weights)
        homes = Homes(manager, model, needed)  # host memory is slow to make, so that begins now
        model.background = asyncio.create_task(homes.run())
        await filling.fill(model, chain(filling.weights(model), filling.unpublished_slots(model, experts, places)))
        filling.publish_slots(model, experts, places)
        homes.slots_are_filled.set()
        slots_s = time.monotonic() - began
        model.filled_s = {record.device: slots_s - provided_s for record in model.ranges}
        await asyncio.shield(homes.needed_are_ready)
        log.info(
            "model.filled",
            model=model.model_id,
            name=model.name,
            bytes=model.total_bytes,
            provided_s=round(provided_s, 3),  # each is counted from the beginning
            slots_s=round(slots_s, 3),
            ready_s=round(time.monotonic() - began, 3),
        )
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
        if homes is not None:
            homes.slots_are_filled.set()
            await model.stop()
        manager.discard_ranges(model)
        model.close()
        model.ready.set_exception(known)
        model.ready.exception()  # retrieved, should nobody wait


async def extend(manager: "Manager", model: Model, devices: Sequence[str]) -> None:
    """Parts on more devices for a model that is open, with the hottest experts that have no slot, from their homes.

    A device without room gets an empty part, which fills when there is some. Never fails.
    """
    if {r.device for r in model.ranges}.issuperset(devices):
        return
    if model.background is not None:
        await asyncio.wait([model.background])
    async with model.refilling:
        for device in devices:
            if model.closed or any(record.device == device for record in model.ranges):
                continue
            began = time.monotonic()
            record = new_part(manager.ledger, model.model_id, model.arena.domain, model.arena.geometry, device)
            model.ranges.append(record)
            model.arena.parts.append(Part(record.range_id, device, manager.ledger.devices[device].slab_bytes))
            await _make_room(manager, model, len(model.ranges) - 1)
            model.filled_s[device] = time.monotonic() - began
            log.info("model.extended", model=model.model_id, device=device, s=round(model.filled_s[device], 3))


async def _make_room(manager: "Manager", model: Model, part: int) -> None:
    """Gives a part as many slabs as can be had and are wanted, and fills them."""
    record = model.ranges[part]
    while manager.placement.is_under_way(model):  # it ends, as `refilling` is held
        await asyncio.sleep(0.001)
    sizes = wanted_slabs(model.arena, part)
    free = min(arbiter.free_for(manager.ledger, record.device, record.domain), manager.slabs.places(record))
    if manager.waiting.is_wanted(record.device):
        free = 0
    if len(sizes) > free:
        sizes = assign_classes(model.arena.geometry, model.arena.parts[part].slab_bytes, free)
    await manager.upkeep.add_slabs(model, part, sizes)
    await manager.upkeep.refill(model)


async def _recall(manager: "Manager", model: Model) -> None:
    """Begins with the heat that was learned of the model another time."""
    loop = asyncio.get_running_loop()
    n = model.arena.geometry.n
    learned = await loop.run_in_executor(manager.executor, manager.profiles.load, model.profile_key, n)
    if learned is not None:
        model.heat.recall(learned)
        model.arena.heat = model.heat.value()


async def _provide(manager: "Manager", model: Model, opener: SessionRecord, wait_s: float) -> None:
    """Leases slabs: weights and the arena's floor at least, then as much as is free. Plans the homes."""
    ledger, arena, geometry = manager.ledger, model.arena, model.arena.geometry
    host = model.homes
    host_bytes = ledger.devices[host.device].slab_bytes
    wanted = slabs_needed(geometry, host_bytes)
    homes = min(wanted, _obtainable(manager, model, host.device))
    hottest = np.argsort(-arena.heat, kind="stable")
    order = hottest[::-1] if homes < wanted else _slotless_first(manager, model, hottest)
    arena.plan_homes(host_bytes, homes, order)
    pinned = np.flatnonzero(arena.home[:, 0] == NOWHERE)
    floor = model.floor_slabs = _floor_slabs(model, pinned)
    first = model.ranges[0]
    need = [arbiter.Request(model.weights.range_id, model.weights.slabs_max), arbiter.Request(first.range_id, floor)]
    try:
        await manager.waiting.provide(
            opener,
            lambda: need,
            wait_s=wait_s,
            gone=lambda: not model.sessions,
            keep_models=(model.model_id,),
        )
    except Exhausted as error:
        raise Exhausted(
            f"model {model.name!r} needs {size_text(geometry.weights_bytes)} of weights and room for"
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


def _slotless_first(manager: "Manager", model: Model, hottest: I64) -> I64:
    """Experts that will hardly find a slot, then the others: steps start when the former have homes.

    Each of the two from the last on: pieces that lie together in the file are filled together.
    """
    ledger, geometry = manager.ledger, model.arena.geometry
    free_bytes = sum(
        arbiter.free_for(ledger, r.device, r.domain) * ledger.devices[r.device].slab_bytes for r in model.ranges
    )
    room = max(0, free_bytes - geometry.weights_bytes) * geometry.n // geometry.experts_bytes
    return np.concatenate([np.sort(some)[::-1] for some in (hottest[room:], hottest[:room])])


def _obtainable(manager: "Manager", model: Model, device: str) -> int:
    """Slabs of a device that are free, parked or held by models that nobody has open."""
    ledger = manager.ledger
    idle = [m for m in manager.models.values() if m.idle_since_s is not None and m is not model and m.movable]
    held = sum(len(r.slabs) for m in idle for r in (m.weights, m.homes, *m.ranges) if r.device == device)
    parked = sum(len(r.slabs) for r in ledger.parked(device))
    return arbiter.free_for(ledger, device, model.arena.domain) + held + parked


def _floor_slabs(model: Model, pinned: I64) -> int:
    """Slabs of the first device that the floor and the experts without homes need."""
    geometry, slab_bytes = model.arena.geometry, model.arena.parts[0].slab_bytes
    total = slabs_needed(geometry, slab_bytes)
    share = -(-total * model.arena.floor_slots // geometry.n)
    return min(total, max(share, len(classes(geometry)), slabs_needed(geometry, slab_bytes, pinned)))


def _pinned_first(model: Model, pinned: I64, sizes: list[int], part: int) -> list[int]:
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


def _place(model: Model) -> tuple[I64, I64]:
    """Reserves slots, for pinned experts and the hottest others; returns experts and their slots ``[k, 3]``."""
    arena = model.arena
    has_home = arena.home[:, 0] != NOWHERE
    found: list[tuple[I64, I64]] = []
    homeless = 0
    free: dict[int, list[I64]] = {}
    for part in range(len(arena.parts)):
        for slot_bytes, slots in arena.empty_slots(part).items():
            free.setdefault(slot_bytes, []).append(slots)
    for slot_bytes, of_class in classes(arena.geometry):
        places = np.concatenate(free.get(slot_bytes, [np.zeros((0, 3), np.int64)]))
        pinned, others = of_class[~has_home[of_class]], of_class[has_home[of_class]]
        homeless += max(0, len(pinned) - len(places))
        hottest = others[np.argsort(-arena.heat[others], kind="stable")[: max(0, len(places) - len(pinned))]]
        experts = np.concatenate((pinned[: len(places)], hottest))
        places = places[: len(experts)]
        # the hottest on the first part, and on each part in their order, as in the file
        found.append((experts[np.lexsort((experts, places[:, 0]))], places))
    if homeless:
        raise Exhausted(
            f"{homeless} experts of model {model.name!r} fit neither the device's cap nor the host's;"
            " raise cap_bytes or host_cap_bytes"
        )
    experts, places = (np.concatenate(columns) for columns in zip(*found, strict=True))
    arena.reserve_all(places)
    order = np.lexsort((experts, has_home[experts]))
    return experts[order], places[order]
