"""What a model needs of memory: the seam between arithmetic and leased ranges.

A model is given a `Memory` and a `KVCache` and knows nothing of daemons, ranges
or slabs. `strata_client.model_memory` and `strata_client.cells` implement them on
mapped ranges, tests on plain files and arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


class ModelError(Exception):
    """A model file cannot be used; the message is one line for a person.

    It names what is wrong (key, tensor, count, offset) and what to do.
    """


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """`count` experts of one layer's matrix, at equal distances in one file."""

    layer: int
    matrix: int  # 0 gate, 1 up, 2 down
    first_expert: int
    count: int
    file: int
    offset_bytes: int
    stride_bytes: int
    expert_bytes: int


class WeightExtent(NamedTuple):
    """One tensor of the weights range, as it lies in its file."""

    name: str
    file: int
    offset_bytes: int
    length_bytes: int


class ExpertBytes(NamedTuple):
    """The raw blocks of one expert, uint8 `[bytes]` each, read in place.

    Valid until the step that read them is retired. `entry` is the residency
    entry they were found by: an unchanged entry means unchanged bytes.
    """

    entry: int
    gate: U8
    up: U8
    down: U8


class Memory(Protocol):
    """Weights and experts of an opened model."""

    def weight(self, name: str) -> U8:
        """Raw bytes of a tensor of the weights range, uint8 `[bytes]`."""

    def expert(self, layer: int, expert: int) -> ExpertBytes:
        """Raw bytes of an expert, wherever it is. Within a published step only."""

    def routed(self, layer: int, experts: I32, *, prompt: bool) -> None:
        """Counts heat: `experts` int32 `[n_tokens, top_k]` that a layer routed to."""


class KVCache(Protocol):
    """A sequence's K/V cells. Cell = token position."""

    def segments(self, layer: int, n_cells: int) -> Sequence[tuple[F32, F32]]:
        """K and V of cells `0 .. n_cells`, in order, as float32
        `[cells, n_kv_heads, head_dim]` views, one pair a slab; writable."""
