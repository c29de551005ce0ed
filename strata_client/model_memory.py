"""Weights and experts of an opened model, found in mapped ranges through its residency table."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from strata_api.v1 import pages

from strata_client.mapping import U64, MappedRange
from strata_client.models.base import I32, U8, ExpertBytes, WeightExtent
from vmmd.errors import StaleGeneration, VmmError

HOMES_DEADLINE_S = 5.0
"""How long a step waits for homes that were added and are not mapped yet."""


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


def weight_offsets(extents: Sequence[WeightExtent]) -> list[int]:
    """Where each extent begins in the weights range: in order, 256-byte aligned."""
    offsets, at = [], 0
    for extent in extents:
        offsets.append(at)
        at = pages.align(at + extent.length_bytes)
    return offsets
