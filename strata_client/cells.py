"""K/V cells in slabs, and slabs of a size that suits a model's cells and experts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strata_client.mapping import MappedRange
from strata_client.models.base import F32
from vmmd.errors import InvalidRequest

CELLS_MULTIPLE = 16
_MIB = 1 << 20
_SLAB_MIB = (1, 2, 4, 8, 16, 32, 64)
_WASTE_MAX = 0.125
_SLABS_WANTED_MAX = 4096

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
