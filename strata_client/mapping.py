"""Leased memory in this process: ranges, shared pages, steps, and what a model reads through them.

Everything here is for the thread that runs the model, and for the session's
watch thread while no step runs: `Steps.lock` keeps the two apart. What the daemon
takes back is therefore unmapped between steps only. Homes alone are mapped beside
steps, by a third thread: only what was not there before, which no step can have read.
"""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from strata_api.v1 import broker_pb2, pages
from strata_api.v1 import memory_pb2 as wire

from strata_client.models.base import F32, I32, U8, ExpertBytes, WeightExtent
from vmmd.driver.base import Mapper
from vmmd.errors import InvalidRequest, LeaseRevoked, NoDevice, StaleGeneration, VmmError

U64 = npt.NDArray[np.uint64]

CELLS_MULTIPLE = 16
_MIB = 1 << 20
_SLAB_MIB = (1, 2, 4, 8, 16, 32, 64)
_WASTE_MAX = 0.125
_SLABS_WANTED_MAX = 4096


class MappedRange:
    """A range's reservation in this process. Any thread may map and unmap.

    Attributes:
        range_id: the daemon's number of it.
        slab_bytes: size of its slabs.
        reader_uuid: the device whose kernels read it: the computing one, or its owner where there is no path between.
        mapped: indexes of the slabs that are mapped.
        changes: how often that has changed.
        lock: held while what was granted is fetched and mapped, and from unmapping to having given back.
    """

    def __init__(self, mapper: Mapper, range_: wire.Range, *, writable: bool, reader_uuid: str | None = None) -> None:
        self.range_id = range_.range_id
        self.device_uuid = range_.device_uuid
        self.reader_uuid = range_.device_uuid if reader_uuid is None else reader_uuid
        self.slab_bytes = range_.slab_bytes
        self.slabs_max = range_.slabs_max
        self.mapped: set[int] = set()
        self.changes = 0  # counts a slab once it is in `mapped`: whoever reads this first misses none
        self.lock = threading.Lock()
        self._lock = threading.Lock()  # within `lock`: while slabs are mapped or unmapped
        self._writable = writable
        self._reservation = mapper.reserve(self.slab_bytes, self.slabs_max) if self.slabs_max else None
        self._view: U8 | None = None

    @property
    def view(self) -> U8:
        """The whole range, uint8 `[slabs_max * slab_bytes]`; touching what is not in `mapped` ends the process.

        Errors: `NoDevice` if it is mapped for a GPU.
        """
        if self._view is None:
            view = self._reservation.view() if self._reservation else np.empty(0, np.uint8)
            if not isinstance(view, np.ndarray):
                raise NoDevice(f"range {self.range_id} of device {self.device_uuid} is mapped for a GPU's kernels only")
            self._view = view
        return self._view

    @property
    def address(self) -> int:
        """Where the range begins for a GPU's kernels; of host slabs known once one is mapped.

        Errors: `NoDevice` if it is mapped for the host; `InvalidRequest` if it is closed or has no slabs.
        """
        if self._reservation is None:
            raise InvalidRequest(f"range {self.range_id} has no slabs")
        view = self._reservation.view()
        if isinstance(view, np.ndarray):
            raise NoDevice(f"range {self.range_id} of device {self.device_uuid} is mapped for the host only")
        return int(view)

    @property
    def slabs(self) -> int:
        """Slabs that are mapped from the first on without a gap."""
        n = 0
        while n in self.mapped:
            n += 1
        return n

    @property
    def ordinal(self) -> int | None:
        """The number in this process of the GPU that it is mapped for; None where it is mapped for the host."""
        return self._reservation.ordinal if self._reservation else None

    def synchronize(self) -> None:
        """Waits for the kernels of this process on the range's GPU. Errors: `DriverError`."""
        if self._reservation is not None:
            self._reservation.synchronize()

    def map(self, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Maps slabs, each run of consecutive indexes in one call; closes all `fds` in any case.

        A slab that is mapped already is replaced: what the daemon sends now is what holds. So between steps only.
        """
        with self._lock:
            self._map(indexes, fds)

    def map_missing(self, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Like `map`, but a slab that is mapped already stays. Also beside steps."""
        with self._lock:
            missing = []
            for index, fd in zip(indexes, fds, strict=True):
                if index in self.mapped:
                    os.close(fd)
                else:
                    missing.append((index, fd))
            self._map([index for index, _ in missing], [fd for _, fd in missing])

    def unmap(self, indexes: Sequence[int]) -> None:
        """Unmaps those of these slabs that are mapped. Between steps only."""
        with self._lock:
            self._unmap(indexes)

    def close(self) -> None:
        """Unmaps everything; views of the range must not be touched any more."""
        self.mapped.clear()
        if self._reservation is not None:
            self._reservation.close()

    def _map(self, indexes: Sequence[int], fds: Sequence[int]) -> None:
        """Maps slabs anew. Lock held."""
        left = list(fds)
        try:
            for start, stop in consecutive_runs(indexes):
                if self._reservation is None:
                    raise InvalidRequest(f"a slab came for range {self.range_id}, which has no slabs")
                self._unmap(indexes[start:stop])
                run, left = left[: stop - start], left[stop - start :]
                self._reservation.map(indexes[start], run, writable=self._writable)
                self.mapped.update(indexes[start:stop])
                self.changes += 1
        finally:
            for fd in left:
                os.close(fd)

    def _unmap(self, indexes: Sequence[int]) -> None:
        """Unmaps those of these slabs that are mapped. Lock held."""
        for index in indexes:
            if index in self.mapped and self._reservation is not None:
                self.mapped.remove(index)
                self.changes += 1
                self._reservation.unmap(index)


def consecutive_runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Places `start, stop` in `indexes` between which each index follows the one before."""
    start = 0
    for at in range(1, len(indexes) + 1):
        if at == len(indexes) or indexes[at] != indexes[at - 1] + 1:
            yield start, at
            start = at


def map_page(fd: int, size_bytes: int, *, writable: bool) -> U64:
    """A shared page as uint64 words; takes over `fd` and closes it.

    Errors: `InvalidRequest` if the page is smaller than it must be.
    """
    try:
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes < size_bytes:
            raise InvalidRequest(f"the daemon's shared page has {actual_bytes} bytes where {size_bytes} are due")
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, prot), np.uint64)
    finally:
        os.close(fd)


class Steps:
    """Publishes the steps of one attached model: see `strata_api.v1.pages`.

    The host computes synchronously, one step at a time, within `step`. A GPU has
    several steps in flight: `publish` begins one, and the GPU itself retires it.

    Attributes:
        lock: the session's, held while a step is published or runs on the host; what is mapped changes only under
            it, and only while the model is idle.
        drain: waits until no step is in flight; whoever publishes for a GPU puts it here.
        line: the model's words of the session page, uint64 `[32]`.
    """

    def __init__(self, line: U64, table: U64, lock: threading.Lock, changes: "Changes") -> None:
        """Takes the model's line of the session page, its residency table, and what changes between steps."""
        self.lock = lock
        self.drain: Callable[[], None] = lambda: None
        self.line = line
        self._table = table
        self._changes = changes

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step on the host: residency entries may be read within it, and only there.

        Errors: `LeaseRevoked` where the daemon went on without this session meanwhile.
        """
        with self.lock:
            number = self._publish()
            try:
                yield
            finally:
                self.line[pages.WORD_RETIRED] = number
            self._check_ended()

    def publish(self) -> int:
        """Publishes a step that a GPU will retire, and returns its number.

        Residency entries may be read for it from here on. Errors: what `drain` raises; `LeaseRevoked` where the daemon
        goes on without this session.
        """
        with self.lock:
            return self._publish()

    @property
    def idle(self) -> bool:
        """Whether no step runs."""
        return bool(self.line[pages.WORD_LAUNCHED] == self.line[pages.WORD_RETIRED])

    def count(self, tokens: int, cells: int) -> None:
        """Shows `tokens` more evaluated tokens, and `cells` cells in use."""
        self.line[pages.WORD_TOKENS] += np.uint64(tokens)
        self.line[pages.WORD_CELLS] = cells

    def _check_ended(self) -> None:
        if self.line[pages.WORD_ENDED]:
            raise LeaseRevoked(
                "the daemon has ended this session and goes on without it: what it read may be wrong; start again"
            )

    def _publish(self) -> int:
        self._check_ended()
        if self._changes.waiting:
            self.drain()
            self._changes.carry_out()
        number = int(self.line[pages.WORD_LAUNCHED]) + 1
        self.line[pages.WORD_RING + number % pages.RING_WORDS] = self._table[pages.WORD_GENERATION]
        self.line[pages.WORD_LAUNCHED] = number
        return number


class Changes:
    """Changes of mapped memory that wait for a moment between steps, in their order."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        """`on_trouble` takes a line for each that fails."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._on_trouble = on_trouble

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def add(self, change: Callable[[], None]) -> None:
        """Takes one. Any thread."""
        self._waiting.append(change)

    def carry_out(self) -> None:
        """Carries all out. Session's lock held, and no step in flight."""
        while self._waiting:
            try:
                self._waiting.popleft()()
            except (VmmError, OSError) as error:
                self._on_trouble(f"a change of mapped memory failed: {error}")


class Shape(NamedTuple):
    """What of a model's geometry the client needs to find bytes in ranges."""

    n_layers: int
    n_experts: int
    weights: Sequence[WeightExtent]
    expert_bytes: Callable[[int, int], tuple[int, int, int]]


class Place(NamedTuple):
    """Where an expert is to be read: its matrices begin at byte offsets of a range."""

    entry: int
    range_: MappedRange
    slab: int
    offsets_bytes: tuple[int, int, int]
    sizes_bytes: tuple[int, int, int]


HOMES_DEADLINE_S = 5.0
"""How long a step waits for homes that were added and are not mapped yet."""


class _Found(NamedTuple):
    slab: int
    mapped: set[int]
    value: ExpertBytes


class ClientMemory:
    """Weights and experts of an opened model; implements `strata_client.models.base.Memory`.

    Attributes:
        arena: the arena's range on each device.
        owners: the arena's parts on devices that the computing one has no path to, which compute the experts there.
        homes: the range of the experts' homes, mapped when the first is looked for in vain, or earlier.
        map_homes: maps them, or waits until they are mapped; nothing afterwards.
        entries: the residency table's entries, uint64 `[n_layers * n_experts]`.
        home_entries: where the homes are, alike.
        heat: the heat page.
    """

    def __init__(
        self,
        shape: Shape,
        weights: MappedRange,
        arena: Sequence[MappedRange],
        homes: MappedRange,
        table: U64,
        heat: U64,
        map_homes: Callable[[], None],
    ) -> None:
        """Takes the ranges, of which `homes` may still be empty, the residency table and the heat page.

        Errors: `StaleGeneration` if the table is of another model or version.
        """
        n = shape.n_layers * shape.n_experts
        header = tuple(int(table[word]) for word in (pages.WORD_MAGIC, pages.WORD_LAYERS, pages.WORD_EXPERTS))
        if header != (pages.MAGIC, shape.n_layers, shape.n_experts):
            raise StaleGeneration("the daemon's residency table is not this model's: restart the daemon")
        self._shape = shape
        self.arena = arena
        self.owners = tuple(part for part, range_ in enumerate(arena) if range_.reader_uuid != weights.reader_uuid)
        self.homes = homes
        self.map_homes = map_homes
        self.entries = table[pages.HEADER_WORDS : pages.HEADER_WORDS + n]
        self.home_entries = table[pages.HEADER_WORDS + n : pages.HEADER_WORDS + 2 * n]
        self._found: list[_Found | None] = [None] * n
        self.heat = heat
        counts = heat[pages.HEADER_WORDS : pages.HEADER_WORDS + 2 * n]
        self._counts = counts.reshape(2, shape.n_layers, shape.n_experts)
        self._weights = weights
        self._extents = {
            extent.name: (offset, offset + extent.length_bytes)
            for extent, offset in zip(shape.weights, weight_offsets(shape.weights), strict=True)
        }

    def weight(self, name: str) -> U8:
        """Raw bytes of a tensor of the weights range, uint8 `[bytes]`."""
        start, stop = self._extents[name]
        return self._weights.view[start:stop]

    def weight_address(self, name: str) -> int:
        """Where a tensor of the weights range begins for a GPU's kernels, aligned to 256 bytes."""
        return self._weights.address + self._extents[name][0]

    def expert(self, layer: int, expert: int) -> ExpertBytes:
        """Raw bytes of an expert, from its home while its slot is not mapped here.

        Errors: `VmmError` if it has no place at all.
        """
        at = layer * self._shape.n_experts + expert
        word = int(self.entries[at])
        found = self._found[at]
        if found is not None and found.value.entry == word and found.slab in found.mapped:
            return found.value
        place = self.place(layer, expert)
        matrices = (
            place.range_.view[start : start + size]
            for start, size in zip(place.offsets_bytes, place.sizes_bytes, strict=True)
        )
        found = _Found(place.slab, place.range_.mapped, ExpertBytes(place.entry, *matrices))
        self._found[at] = found
        return found.value

    def place(self, layer: int, expert: int) -> Place:
        """Where to read an expert: its home while its slot is not mapped here. Within a published step only.

        Errors: `VmmError` if it has no place at all.
        """
        at = layer * self._shape.n_experts + expert
        place = self.find(int(self.entries[at]), layer, expert) or self.home(layer, expert)
        if place is None:
            raise VmmError(f"expert {expert} of layer {layer} is in no slab that this process has mapped")
        return place

    def home(self, layer: int, expert: int) -> Place | None:
        """Where an expert's copy in host slabs is; None while it has none. Errors: as `map_homes`."""
        at = layer * self._shape.n_experts + expert
        place = self.find(int(self.home_entries[at]), layer, expert)
        if place is None:
            word = int(self.home_entries[at])
            self.await_homes(lambda: not word or self.find(word, layer, expert) is not None)
            place = self.find(int(self.home_entries[at]), layer, expert)
        return place

    def await_homes(self, are_mapped: Callable[[], bool]) -> None:
        """Maps the homes, or waits until those are mapped that the daemon has added.

        A process that was stopped hears of them when it reads them already. Errors: as `map_homes`.
        """
        self.map_homes()
        until_s = time.monotonic() + HOMES_DEADLINE_S
        while not are_mapped() and time.monotonic() < until_s:
            time.sleep(0.001)

    def find(self, word: int, layer: int, expert: int) -> Place | None:
        """Where a word of the residency table says that an expert is; None if its slab is not mapped, or it is 0."""
        entry = pages.unpack(word)
        if entry.tier == pages.TIER_HOST:
            range_ = self.homes
        elif entry.tier == pages.TIER_DEVICE and entry.device < len(self.arena):
            range_ = self.arena[entry.device]
        else:
            return None
        if entry.slab not in range_.mapped:
            return None
        sizes = self._shape.expert_bytes(layer, expert)
        gate, up, down, slot_bytes = pages.slot_layout(*sizes)
        base = entry.slab * range_.slab_bytes + entry.slot * slot_bytes
        return Place(word, range_, entry.slab, (base + gate, base + up, base + down), sizes)

    def part_on(self, device_uuid: str) -> int:
        """The number of the arena's part on a device."""
        return [range_.device_uuid for range_ in self.arena].index(device_uuid)

    def experts_on(self, part: int) -> Sequence[int]:
        """The flat ids of the experts that are in a slot of a part now."""
        first = np.uint64(pages.pack(pages.TIER_DEVICE, part, 0, 0))
        last = np.uint64(pages.pack(pages.TIER_DEVICE, part + 1, 0, 0))
        entries = self.entries.copy()
        found: list[int] = np.flatnonzero((entries >= first) & (entries < last)).tolist()
        return found

    def arena_bytes(self, part: int) -> int:
        """Size of a part's slabs that are mapped."""
        return len(self.arena[part].mapped) * self.arena[part].slab_bytes

    def routed(self, layer: int, experts: I32, *, prompt: bool) -> None:
        """Counts heat: `experts` int32 `[n_tokens, top_k]` that a layer routed to."""
        counts = np.bincount(experts.ravel(), minlength=self._shape.n_experts)
        self._counts[int(prompt), layer] += counts.astype(np.uint64)

    def count(self, tokens: int, *, prompt: bool) -> None:
        """Counts `tokens` that are about to be routed: the daemon relates heat to them."""
        self.heat[pages.WORD_PROMPT if prompt else pages.WORD_DECODED] += np.uint64(tokens)


KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 1.0625}
"""Bytes a value takes in a K/V cell. The host computes in f32, a GPU in the others; q8_0 has a float16 scale for 32."""


class CellShape(NamedTuple):
    """What a K/V cell consists of."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    type: str = "f32"

    @property
    def layout(self) -> str:
        """What cells that can be exchanged have in common."""
        return f"{self.type}, {self.n_layers} layers, {self.n_kv_heads} heads of {self.head_dim}"

    @property
    def size_bytes(self) -> int:
        """K and V of all layers."""
        return int(self.n_layers * 2 * self.n_kv_heads * self.head_dim * KV_BYTES[self.type])


class KVRange:
    """A sequence's cells; implements `strata_client.models.base.KVCache` where they are float32.

    A slab holds `cells_per_slab` cells as `[layer][K or V][cell][kv_head][head_dim]`.
    """

    def __init__(self, range_: MappedRange, cell: CellShape) -> None:
        """Errors: `InvalidRequest` if 16 cells do not fit a slab."""
        self.range = range_
        self.cells_per_slab = cells_per_slab(range_.slab_bytes, cell.size_bytes)
        self._used_bytes = self.cells_per_slab * cell.size_bytes
        self._shape = (cell.n_layers, 2, self.cells_per_slab, cell.n_kv_heads, cell.head_dim)
        self._slabs: list[F32] = []

    @property
    def cells(self) -> int:
        """Cells there is memory for, from the first on without a gap."""
        return self.range.slabs * self.cells_per_slab

    @property
    def size_bytes(self) -> int:
        """Memory that the range has."""
        return len(self.range.mapped) * self.range.slab_bytes

    def segments(self, layer: int, n_cells: int) -> Sequence[tuple[F32, F32]]:
        """K and V of cells `0 .. n_cells`, in order, one pair of views a slab."""
        n_slabs = -(-n_cells // self.cells_per_slab)
        while len(self._slabs) < n_slabs:
            base = len(self._slabs) * self.range.slab_bytes
            self._slabs.append(self.range.view[base : base + self._used_bytes].view(np.float32).reshape(self._shape))
        last = n_cells - (n_slabs - 1) * self.cells_per_slab
        pairs = []
        for i, slab in enumerate(self._slabs[:n_slabs]):
            cells = last if i == n_slabs - 1 else self.cells_per_slab
            pairs.append((slab[layer, 0, :cells], slab[layer, 1, :cells]))
        return pairs


class Batch:
    """What comes with a batch, sorted while it is fetched."""

    def __init__(self, ranges: Sequence[MappedRange], n_experts: int = 0, cells_max: int = 0) -> None:
        """`n_experts` over all layers and a conversation's `cells_max` give the pages' sizes."""
        self._ranges = {range_.range_id: range_ for range_ in ranges}
        self._n = n_experts
        self._cells_max = cells_max
        self.table: U64 | None = None
        self.heat: U64 | None = None
        self.tokens: U64 | None = None

    def take(self, entries: Sequence[broker_pb2.BatchEntry], fds: Sequence[int]) -> None:
        """Maps a piece of the batch; closes every descriptor of it."""
        slabs: dict[int, tuple[list[int], list[int]]] = {}
        left = list(fds)
        try:
            for entry, fd in zip(entries, fds, strict=True):
                if entry.kind == broker_pb2.BatchEntry.KIND_SLAB and entry.id in self._ranges:
                    indexes, slab_fds = slabs.setdefault(entry.id, ([], []))
                    indexes.append(entry.slab_index)
                    slab_fds.append(fd)
                elif entry.kind == broker_pb2.BatchEntry.KIND_RESIDENCY and self._n:
                    left.remove(fd)
                    self.table = map_page(fd, pages.residency_bytes(self._n), writable=False)
                elif entry.kind == broker_pb2.BatchEntry.KIND_HEAT and self._n:
                    left.remove(fd)
                    self.heat = map_page(fd, pages.heat_bytes(self._n), writable=True)
                elif entry.kind == broker_pb2.BatchEntry.KIND_TOKENS and self._cells_max:
                    left.remove(fd)
                    self.tokens = map_page(fd, pages.tokens_bytes(self._cells_max), writable=True)
            for range_id, (indexes, slab_fds) in slabs.items():
                left = [fd for fd in left if fd not in slab_fds]
                self._ranges[range_id].map(indexes, slab_fds)
        finally:
            for fd in left:
                os.close(fd)


def weight_offsets(extents: Sequence[WeightExtent]) -> list[int]:
    """Where each extent begins in the weights range: in order, 256-byte aligned."""
    offsets, at = [], 0
    for extent in extents:
        offsets.append(at)
        at = pages.align(at + extent.length_bytes)
    return offsets


def cells_per_slab(slab_bytes: int, cell_bytes: int) -> int:
    """The largest multiple of 16 cells that fits a slab.

    Errors: `InvalidRequest`, with the `slab_bytes` that would do, if that is 0.
    """
    cells = slab_bytes // cell_bytes // CELLS_MULTIPLE * CELLS_MULTIPLE
    if cells == 0:
        need = CELLS_MULTIPLE * cell_bytes
        raise InvalidRequest(
            f"{CELLS_MULTIPLE} K/V cells of {cell_bytes} bytes do not fit slab_bytes = {slab_bytes}; "
            f"start vmmd with slab_bytes = {_power_of_two(need)} or more"
        )
    return cells


def choose_slab_bytes(slot_sizes: Sequence[int], other_bytes: int, cell_bytes: int) -> int:
    """Slab size for a private daemon: small, with little waste, and not too many slabs.

    The smallest of 1 to 64 MiB that fits the largest expert with at most 12.5 % of
    waste (else the least), fits 16 cells, and needs at most about 4096 slabs.

    Args:
        slot_sizes: bytes of every expert's slot.
        other_bytes: weights and K/V at their largest.
        cell_bytes: one K/V cell of all layers.
    """
    largest = max(slot_sizes, default=0)
    least = max(largest, CELLS_MULTIPLE * cell_bytes)
    sizes = [mib * _MIB for mib in _SLAB_MIB if mib * _MIB >= least] or [_power_of_two(least)]
    total = 2 * sum(slot_sizes) + other_bytes  # an expert may lie at home and on the device
    few = [size for size in sizes if total <= _SLABS_WANTED_MAX * size] or sizes[-1:]

    def waste(size: int) -> float:
        return size % largest / size if largest else 0.0

    return next((size for size in few if waste(size) <= _WASTE_MAX), min(few, key=waste))


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
