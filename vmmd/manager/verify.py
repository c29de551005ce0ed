"""Verifying a model: every byte of its slots, homes and weights against its file.

It goes on beside steps and trades: a thread of its own reads pieces of a few MiB,
and what it reads of a slot counts as a step (`Model.hold`), so that no trade
refills or gives away the slot under it. An expert that has moved meanwhile is
compared again where it is now.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import structlog
from strata_api.v1 import pages

from vmmd.core.ledger import RangeRecord
from vmmd.core.residency import Slot
from vmmd.driver.base import FileSource, ShortRead, Slab, SlabSource
from vmmd.errors import NotFound, PreconditionFailed, StaleGeneration, Unavailable
from vmmd.manager import filling
from vmmd.manager.compare import Difference, difference, read_source
from vmmd.manager.files import check_unchanged
from vmmd.manager.model import Model

log = structlog.get_logger("vmmd.verify")

PIECE_BYTES = 2 << 20
"""Read and compared at once: about a millisecond in which a trade of the slot waits."""

MISMATCHES_MAX = 100
"""Listed; beyond that they are counted."""

NAMED_MAX = 10
NAME_CHARACTERS_MAX = 60
"""Models in an error's line: it travels in a gRPC trailer, of 8 KiB at most."""

MATRICES = ("gate", "up", "down")

T = TypeVar("T")


@dataclass
class Mismatch:
    """A matrix of an expert in one place, or a piece of the weights, that is not as in the file."""

    place: Literal["slot", "home", "weights"]
    device_uuid: str
    range_id: int
    slab_index: int
    offset_bytes: int  # of the first byte that differs, in the slab
    differing_bytes: int
    layer: int | None = None
    expert: int | None = None  # of the layer
    matrix: str | None = None


class _Place(NamedTuple):
    """A copy of an expert."""

    place: Literal["slot", "home"]
    record: RangeRecord
    slab_index: int
    slab: Slab
    offset_bytes: int


class _Again(Exception):
    """The expert has moved, or the file has changed, since the comparison began."""


def find(models: Mapping[int, Model], wanted: str) -> Model:
    """The model of this id or name. Errors: `NotFound`, naming what there is."""
    found = [m for m in models.values() if wanted in (str(m.model_id), m.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFound(f"{len(found)} models are called {_shown(wanted)}: {_list(found)}; give an id")
    there = f"there are {_list(list(models.values()))}" if models else "none is open"
    raise NotFound(f"there is no model {_shown(wanted)} here; {there}")


def _shown(name: str) -> str:
    return repr(name if len(name) <= NAME_CHARACTERS_MAX else name[: NAME_CHARACTERS_MAX - 1] + "…")


def _list(models: list[Model]) -> str:
    named = ", ".join(f"{m.model_id} ({_shown(m.name)})" for m in models[:NAMED_MAX])
    return named + (f" and {len(models) - NAMED_MAX} more" if len(models) > NAMED_MAX else "")


class Verification:
    """One comparison of a model with its file, with what it has found so far.

    Once the file has changed, slots are compared with their homes, and weights and
    homes with nothing.

    Attributes:
        slots, homes, weights_bytes: compared whole.
        slots_skipped: of experts without a home, when the file has changed.
        mismatched: mismatches in all; the first 100 are in `mismatches`.
        compared_bytes, total_bytes: progress; experts move, so the total is as of the beginning.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.file_changed = False
        self.slots = 0
        self.homes = 0
        self.weights_bytes = 0
        self.slots_skipped = 0
        self.mismatched = 0
        self.mismatches: list[Mismatch] = []
        self.compared_bytes = 0
        arena = model.arena
        copies = arena.resident.astype(int) + arena.home_ready
        experts_bytes = int((arena.geometry.size_bytes.sum(axis=1) * copies).sum())
        self.total_bytes = experts_bytes + sum(e.length_bytes for e in arena.geometry.weights)
        self._thread = ThreadPoolExecutor(1, "vmmd-verify")  # not the fills' threads: trades wait for those

    async def run(self) -> None:
        """Compares everything; for the loop's thread, once.

        Errors: `PreconditionFailed` (still being filled), `Unavailable` (dropped
        meanwhile, or the file cannot be read), `DriverError`.
        """
        try:
            if not self.model.ready.done():
                raise PreconditionFailed(f"model {_shown(self.model.name)} is still being filled; verify it afterwards")
            self._check_file()
            await self._compare_weights()
            for expert in range(self.model.arena.geometry.n):
                await self._compare_expert(expert)
        except OSError as error:
            raise Unavailable(
                f"the file of model {_shown(self.model.name)} cannot be read: {error.strerror or error}"
            ) from None
        finally:
            self._thread.shutdown(wait=False)
        emit = log.warning if self.mismatched else log.info
        emit(
            "model.verified",
            model=self.model.model_id,
            name=self.model.name,
            slots=self.slots,
            homes=self.homes,
            weights_bytes=self.weights_bytes,
            file_changed=self.file_changed,
            mismatches=self.mismatched,
        )

    # Weights

    async def _compare_weights(self) -> None:
        model = self.model
        for copy in filling.weights_copies(model):
            for at, length in _pieces(copy.length_bytes):
                if self.file_changed:
                    return
                assert isinstance(copy.source, FileSource)
                try:
                    expected = await self._expected(FileSource(copy.source.fd, copy.source.offset_bytes + at), length)
                except _Again:
                    return
                offset = copy.offset_bytes + at
                (differs,) = await self._differences([(copy.target, offset)], expected, of_slots=False)
                self.weights_bytes += length
                if differs is not None:
                    index = next(i for i, s in model.weights.slabs.items() if model.slabs[s] is copy.target)
                    where = model.weights.device, model.weights.range_id, index
                    self._add(Mismatch("weights", *where, offset + differs.offset_bytes, differs.differing_bytes))

    # Experts

    async def _compare_expert(self, expert: int) -> None:
        """Compares an expert wherever it is, again and again until it has stayed there."""
        arena = self.model.arena
        while True:
            slot = arena.slot_of(expert)
            home = self._home(expert) if arena.home_ready[expert] else None
            places = [] if slot is None else [self._slot(expert, slot)]
            if not self.file_changed:
                places += [] if home is None else [home]
            elif home is None:
                self.slots_skipped += len(places)
                return
            if not places:
                return
            try:
                found = await self._compare_places(expert, slot, places, home if self.file_changed else None)
            except _Again:
                continue
            self.slots += slot is not None
            self.homes += not self.file_changed and home is not None
            for mismatch in found:
                self._add(mismatch)
            return

    async def _compare_places(
        self, expert: int, slot: Slot | None, places: list[_Place], reference: _Place | None
    ) -> list[Mismatch]:
        """Compares an expert's places with `reference`, None for the file. Errors: `_Again`."""
        model, geometry = self.model, self.model.arena.geometry
        layer, of_layer = divmod(expert, geometry.n_experts)
        sizes = [int(x) for x in geometry.size_bytes[expert]]
        found: dict[tuple[int, int], Mismatch] = {}
        for matrix, begin in enumerate(pages.slot_layout(*sizes)[:3]):
            fd, start = model.files[int(geometry.file[expert, matrix])], int(geometry.offset_bytes[expert, matrix])
            for at, length in _pieces(sizes[matrix]):
                source = (
                    FileSource(fd, start + at)
                    if reference is None
                    else SlabSource(reference.slab, reference.offset_bytes + begin + at)
                )
                expected = await self._expected(source, length)
                if model.arena.slot_of(expert) != slot:
                    raise _Again
                read = [(p.slab, p.offset_bytes + begin + at) for p in places]
                for i, differs in enumerate(await self._differences(read, expected, of_slots=slot is not None)):
                    if differs is None:
                        continue
                    if (i, matrix) in found:
                        found[i, matrix].differing_bytes += differs.differing_bytes
                        continue
                    p, (_, offset) = places[i], read[i]
                    where = p.record.device, p.record.range_id, p.slab_index, offset + differs.offset_bytes
                    whose = layer, of_layer, MATRICES[matrix]
                    found[i, matrix] = Mismatch(p.place, *where, differs.differing_bytes, *whose)
        if model.arena.slot_of(expert) != slot:
            raise _Again
        return list(found.values())

    def _slot(self, expert: int, slot: Slot) -> _Place:
        record = self.model.ranges[slot.part]
        offset = slot.slot * self.model.arena.slot_bytes(expert)
        return _Place("slot", record, slot.slab, self.model.slabs[record.slabs[slot.slab]], offset)

    def _home(self, expert: int) -> _Place:
        record = self.model.homes
        index, slot = (int(x) for x in self.model.arena.home[expert])
        offset = slot * self.model.arena.slot_bytes(expert)
        return _Place("home", record, index, self.model.slabs[record.slabs[index]], offset)

    # Reading

    async def _expected(self, source: FileSource | SlabSource, length_bytes: int) -> bytes:
        """Errors: `_Again` where the file has changed, whatever was read of it."""
        work = partial(read_source, self.model.driver, source, length_bytes)
        try:
            expected = await self._in_thread(work, of_slots=False)
        except ShortRead:
            self.file_changed = True
            raise _Again from None
        if isinstance(source, FileSource):
            self._check_file()
            if self.file_changed:
                raise _Again
        return expected

    async def _differences(
        self, places: list[tuple[Slab, int]], expected: bytes, *, of_slots: bool
    ) -> list[Difference | None]:
        """How each place differs. A slot is where the arena says now: nothing is awaited before the reading."""
        driver, length = self.model.driver, len(expected)

        def work() -> list[Difference | None]:
            return [difference(driver.read(slab, offset, length), expected) for slab, offset in places]

        differences = await self._in_thread(work, of_slots=of_slots)
        self.compared_bytes += length * len(places)
        return differences

    async def _in_thread(self, work: Callable[[], T], *, of_slots: bool) -> T:
        if self.model.closed:
            raise Unavailable(f"model {_shown(self.model.name)} was dropped while it was verified")
        return await self.model.hold(self._thread, work, of_slots=of_slots)

    def _check_file(self) -> None:
        try:
            check_unchanged(self.model.files, self.model.identities)
        except StaleGeneration:
            self.file_changed = True

    def _add(self, mismatch: Mismatch) -> None:
        self.mismatched += 1
        if len(self.mismatches) < MISMATCHES_MAX:
            self.mismatches.append(mismatch)


def _pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of pieces that make up so many bytes."""
    for at in range(0, size_bytes, PIECE_BYTES):
        yield at, min(PIECE_BYTES, size_bytes - at)
