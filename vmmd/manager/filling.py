"""Filling a model: weights, slots and homes are laid out, copied, checked and published, chunk by chunk.

A model has many thousand pieces, so everything about them goes by arrays: experts
``[k]``, and slots ``[k, 3]`` of part, slab and slot.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from strata_api.v1 import pages

from vmmd.core.geometry import matrix_offsets
from vmmd.core.residency import NOWHERE
from vmmd.driver import runs
from vmmd.driver.base import Copy, FileSource, ShortRead, Slab
from vmmd.errors import DriverError, StaleGeneration, Unavailable, VmmError
from vmmd.manager.compare import sample
from vmmd.manager.files import check_unchanged
from vmmd.manager.model import Model

CHUNK_BYTES = 128 << 20
"""Filled in one call of the driver and published: progress, and how much a change of mind wastes."""

UNSEEN_CHUNK_BYTES = 256 << 20
"""The same of what is not published chunk by chunk: each costs a third of a millisecond."""

BLOCK_BYTES = 1 << 30
"""Laid out at once."""

CHUNKS_AT_ONCE = 3
"""While one is copied, the next waits for the copy engines, and another is checked and published or laid out."""

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Chunk(NamedTuple):
    """Copies of one call of the driver, and what to do when they have arrived and a sample of them was right."""

    copies: list[Copy]
    publish: Callable[[], None]


async def fill(model: Model, chunks: Iterable[Chunk]) -> None:
    """Copies, checks and publishes. Each chunk is laid out when it is about to be copied.

    Errors: `StaleGeneration` where a file changed, `OSError`, `DriverError` (named
    MISMATCH where the sample differs); what was published before stays.
    """
    model.working += 1
    under_way: deque[asyncio.Task[None]] = deque()
    try:
        for chunk in chunks:
            if model.closed:
                raise Unavailable(f"model {model.name!r} is being dropped")
            if len(under_way) == CHUNKS_AT_ONCE:
                await asyncio.shield(under_way[0])
                under_way.popleft()
            under_way.append(asyncio.create_task(_fill_chunk(model, chunk)))
            await asyncio.sleep(0)  # its copies are under way before the next chunk is laid out
        while under_way:
            await asyncio.shield(under_way[0])
            under_way.popleft()
    finally:
        if under_way:
            await asyncio.wait(under_way)  # nothing may still write once this has returned
            for task in under_way:
                task.exception()
        model.working -= 1


async def _fill_chunk(model: Model, chunk: Chunk) -> None:
    copies = chunk.copies

    def work() -> tuple[Copy, int] | None:
        model.driver.fill(copies)
        return sample(model.driver, copies)

    try:
        wrong = await asyncio.get_running_loop().run_in_executor(model.executor, work)
    except ShortRead as error:
        raise StaleGeneration(f"a file of model {model.name!r} has shrunk while it was read: {error}") from None
    if any(isinstance(c.source, FileSource) for c in copies):
        check_unchanged(model.files, model.identities)
    if wrong is not None:
        raise _mismatch(model, *wrong)
    chunk.publish()
    model.filled_bytes += sum(c.size_bytes for c in copies)


def _mismatch(model: Model, copy: Copy, offset_bytes: int) -> DriverError:
    """What to say of a slab that is not, from some byte on, what was written to it."""
    where = next(
        f"slab {index} of range {record.range_id} ({record.kind.value})"
        for record in (model.weights, model.homes, *model.ranges)
        for index, slab_id in record.slabs.items()
        if model.slabs.get(slab_id) is copy.target
    )
    source = "its file" if isinstance(copy.source, FileSource) else "the copy in host memory"
    return DriverError(
        f"a fill of model {model.name!r} went wrong: {where} on {copy.target.device_uuid} differs from {source} at"
        f" byte {offset_bytes}; nothing of it is used; check that device's memory",
        call="fill",
        name="MISMATCH",
    )


# What there is to fill


def weights(model: Model) -> Iterator[Chunk]:
    """The weights range, from the files. Nothing is published: nobody has it before the model is ready."""
    copies: list[Copy] = []
    size_bytes = 0
    for copy in weights_copies(model):
        copies.append(copy)
        size_bytes += copy.size_bytes
        if size_bytes >= CHUNK_BYTES:
            yield Chunk(copies, _nothing)
            copies, size_bytes = [], 0
    if copies:
        yield Chunk(copies, _nothing)


def weights_copies(model: Model) -> Iterator[Copy]:
    """The same as copies: an extent may straddle slabs."""
    slabs = {index: model.slabs[slab_id] for index, slab_id in model.weights.slabs.items()}
    slab_bytes = next(iter(slabs.values())).size_bytes
    at = 0
    for extent in model.arena.geometry.weights:
        done = 0
        while done < extent.length_bytes:
            index, inside = divmod(at + done, slab_bytes)
            length = min(slab_bytes - inside, extent.length_bytes - done)
            yield Copy(slabs[index], inside, length, FileSource(model.files[extent.file], extent.offset_bytes + done))
            done += length
        at += pages.align(extent.length_bytes)


def slots(model: Model, experts: I64, places: I64) -> Iterator[Chunk]:
    """Experts into device slots, each from its home if that is ready, else from its file.

    The slots are BUSY before; each chunk is published.
    """
    for cut, copies in _lay_out(model, experts, places, CHUNK_BYTES):
        yield Chunk(copies, partial(publish_slots, model, experts[cut], places[cut]))


def unpublished_slots(model: Model, experts: I64, places: I64) -> Iterator[Chunk]:
    """The same where nobody can read yet: `publish_slots` is the caller's."""
    for _, copies in _lay_out(model, experts, places, UNSEEN_CHUNK_BYTES):
        yield Chunk(copies, _nothing)


def homes(model: Model, experts: I64) -> Iterator[Chunk]:
    """Experts into their homes, from the files; `publish_homes` is the caller's, once all sessions have mapped them."""
    for _, copies in _lay_out(model, experts, None, UNSEEN_CHUNK_BYTES):
        yield Chunk(copies, _nothing)


def _nothing() -> None:
    """Publishes nothing."""


def publish_slots(model: Model, experts: I64, places: I64) -> None:
    """The experts are read there from now on."""
    model.arena.settle_all(experts, places)
    model.point(experts)
    model.table.bump()


def publish_homes(model: Model, experts: I64) -> None:
    """The homes can be read, so the experts can be evicted; those without a slot are read there from now on."""
    home = model.arena.home[experts]
    model.arena.home_ready[experts] = True
    model.table.set_homes(experts, pages.TIER_HOST, np.zeros_like(experts), home[:, 0], home[:, 1])
    model.point(experts)
    model.table.bump()


async def refill(model: Model, limit_bytes: int) -> bool:
    """Fills empty slots with the hottest missing experts; False: all that can be filled are."""
    coming = np.zeros(model.arena.geometry.n, np.bool_)
    begun: list[tuple[I64, I64]] = []
    is_done = False

    def chunks() -> Iterator[Chunk]:
        nonlocal is_done
        left_bytes = limit_bytes
        while left_bytes > 0:
            experts, places = _choose(model, min(left_bytes, BLOCK_BYTES), coming)
            if not len(experts):
                is_done = True
                return
            coming[experts] = True
            begun.append((experts, places))
            left_bytes -= int(model.arena.geometry.slot_bytes[experts].sum())
            yield from slots(model, experts, places)

    try:
        await fill(model, chunks())
    except (VmmError, OSError):
        for experts, places in begun:
            model.arena.release_all(not_settled(model, experts, places))
        raise
    return not is_done


def _choose(model: Model, limit_bytes: int, coming: Bool) -> tuple[I64, I64]:
    """Reserves empty slots ``[k, 3]`` for the hottest missing experts ``[k]`` that are not `coming`: one at least."""
    arena = model.arena
    experts, places = [np.zeros(0, np.int64)], [np.zeros((0, 3), np.int64)]
    chosen = coming.copy()
    for part in range(len(arena.parts)):
        for slot_bytes, empty in arena.empty_slots(part).items():
            missing = arena.hottest_missing(slot_bytes)
            count = limit_bytes // slot_bytes if len(experts) > 1 else max(1, limit_bytes // slot_bytes)
            some = missing[~chosen[missing]][: min(len(empty), count)]
            chosen[some] = True
            experts.append(some)
            places.append(empty[: len(some)])
            limit_bytes -= len(some) * slot_bytes
    found = np.concatenate(experts), np.concatenate(places)
    arena.reserve_all(found[1])
    return found


def not_settled(model: Model, experts: I64, places: I64) -> I64:
    """The slots ``[k, 3]`` among `places` that their experts have not come to."""
    elsewhere = (model.arena.place[experts] != places).any(axis=1)
    left: I64 = places[elsewhere]
    return left


# Laying out


def _lay_out(model: Model, experts: I64, places: I64 | None, chunk_bytes: int) -> Iterator[tuple[slice, list[Copy]]]:
    """Chunks of experts and their copies: into slots ``[k, 3]``, or where there are none, into the experts' homes.

    Blocks are laid out whole: it takes as long for one chunk as for ten.
    """
    sizes = model.arena.geometry.slot_bytes[experts]
    for block in _cuts(sizes, max(BLOCK_BYTES, chunk_bytes)):
        some = experts[block]
        cuts = list(_cuts(sizes[block], chunk_bytes))
        group = np.repeat(np.arange(len(cuts)), [cut.stop - cut.start for cut in cuts])
        if places is None:
            found = _from_files(model, some, group, *_homes(model, some), groups=len(cuts))
        else:
            found = _slot_copies(model, some, places[block], group, groups=len(cuts))
        for cut, copies in zip(cuts, found, strict=True):
            yield slice(block.start + cut.start, block.start + cut.stop), copies


def _cuts(sizes: I64, limit_bytes: int) -> Iterator[slice]:
    """Divides experts of these sizes where the limit is reached."""
    ends = np.cumsum(sizes).tolist()
    start = before = 0
    while start < len(ends):
        stop = min(bisect_left(ends, before + limit_bytes) + 1, len(ends))
        yield slice(start, stop)
        start, before = stop, ends[stop - 1]


def _slot_copies(model: Model, experts: I64, places: I64, group: I64, groups: int) -> list[list[Copy]]:
    keys, target_of = _distinct(places[:, 0] << 32 | places[:, 1])
    targets = [model.slabs[model.ranges[key >> 32].slabs[key & 0xFFFFFFFF]] for key in keys]
    at = places[:, 2] * model.arena.geometry.slot_bytes[experts]
    ready = model.arena.home_ready[experts]
    files, at_home = np.flatnonzero(~ready), np.flatnonzero(ready)
    read = _from_files(model, experts[files], group[files], targets, target_of[files], at[files], groups)
    moved = _from_homes(model, experts[at_home], group[at_home], targets, target_of[at_home], at[at_home], groups)
    return [a + b for a, b in zip(read, moved, strict=True)]


def _homes(model: Model, experts: I64) -> tuple[list[Slab], I64, I64]:
    """Where homes are: slabs, by expert which of them, and the byte offset there."""
    home = model.arena.home[experts]
    assert (home != NOWHERE).all()
    indexes, slab_of = _distinct(home[:, 0])
    slabs = [model.slabs[model.homes.slabs[index]] for index in indexes]
    return slabs, slab_of, home[:, 1] * model.arena.geometry.slot_bytes[experts]


def _from_files(
    model: Model, experts: I64, group: I64, targets: Sequence[Slab], target_of: I64, at: I64, groups: int
) -> list[list[Copy]]:
    geometry = model.arena.geometry
    sizes = geometry.size_bytes[experts]
    target = at[:, None] + matrix_offsets(sizes)
    source = geometry.file[experts], geometry.offset_bytes[experts]
    columns = (np.repeat(group, 3), np.repeat(target_of, 3), target, *source, sizes)
    return runs.from_files(targets, model.files, runs.Pieces(*(column.ravel() for column in columns)), groups)


def _from_homes(
    model: Model, experts: I64, group: I64, targets: Sequence[Slab], target_of: I64, at: I64, groups: int
) -> list[list[Copy]]:
    sources, source_of, source_at = _homes(model, experts)
    slot_bytes = model.arena.geometry.slot_bytes[experts]
    return runs.from_slabs(
        targets, sources, runs.Pieces(group, target_of, at, source_of, source_at, slot_bytes), groups
    )


def _distinct(values: I64) -> tuple[list[int], I64]:
    """The different values in order, and which of them each is: `np.unique` in a fifth of the time."""
    if not len(values):
        return [], values
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    which = np.empty_like(order)
    which[order] = np.cumsum(is_first) - 1
    return ordered[is_first].tolist(), which
