"""Geometry: where a model's experts and weights lie in its files, checked.

The client parses the file; the daemon trusts none of it. What passes here can be
read with `pread` and copied into slots without another check, except that a file
may shrink meanwhile.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from strata_api.v1 import pages

from vmmd.errors import InvalidRequest

EXPERTS_MAX = 1 << 20
"""Of all layers together; 8 MiB of residency table."""

EXPERT_BYTES_MAX = 1 << 40
"""Of one matrix; the slots of all experts together then fit 64 bits."""

EXTENTS_MAX = 1 << 20

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stack:
    """`count` experts of one layer's matrix, `stride_bytes` apart in one file."""

    layer: int
    matrix: int  # 0 gate, 1 up, 2 down
    first_expert: int
    count: int
    file: int
    offset_bytes: int
    stride_bytes: int
    expert_bytes: int


class Extent(NamedTuple):
    """A piece of the weights."""

    file: int
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Geometry:
    """A checked geometry. Expert ``e`` of layer ``l`` has the flat id ``l * n_experts + e``."""

    n_layers: int
    n_experts: int
    top_k: int
    file: I64  # [n, 3] file of gate, up, down
    offset_bytes: I64  # [n, 3]
    size_bytes: I64  # [n, 3]
    slot_bytes: I64  # [n] slot size: the size class of an expert
    weights: tuple[Extent, ...]
    weights_bytes: int  # laid out, with alignment
    digest: str

    @property
    def n(self) -> int:
        """Experts of all layers."""
        return self.n_layers * self.n_experts

    @property
    def experts_bytes(self) -> int:
        """Bytes of all slots."""
        return int(self.slot_bytes.sum())


def build(
    n_layers: int,
    n_experts: int,
    top_k: int,
    stacks: Iterable[Stack],
    weights: Sequence[Extent],
    file_bytes: Sequence[int],
) -> Geometry:
    """Checks a geometry against the sizes of its files.

    Every (layer, expert, matrix) must be named exactly once and lie inside its
    file; arithmetic is on Python integers, so nothing overflows. Errors:
    `InvalidRequest`, naming what lies.
    """
    if not (n_layers >= 1 and n_experts >= 1 and n_layers * n_experts <= EXPERTS_MAX):
        raise InvalidRequest(
            f"geometry: {n_layers} layers of {n_experts} experts; 1 to {EXPERTS_MAX} in all are possible"
        )
    if not 1 <= top_k <= n_experts:
        raise InvalidRequest(f"geometry: top_k {top_k} is not between 1 and the {n_experts} experts of a layer")
    n = n_layers * n_experts
    file = np.full((n, 3), -1, np.int64)
    offset = np.zeros((n, 3), np.int64)
    size = np.zeros((n, 3), np.int64)
    for s in stacks:
        what = f"geometry: layer {s.layer} matrix {s.matrix} experts {s.first_expert}..{s.first_expert + s.count - 1}"
        if not (0 <= s.layer < n_layers and 0 <= s.matrix < 3 and s.count >= 1 and s.first_expert >= 0):
            raise InvalidRequest(f"{what}: no such layer, matrix or count")
        if s.first_expert + s.count > n_experts:
            raise InvalidRequest(f"{what}: a layer has {n_experts} experts")
        if not 1 <= s.expert_bytes <= EXPERT_BYTES_MAX:
            raise InvalidRequest(f"{what}: {s.expert_bytes} bytes each; 1 to {EXPERT_BYTES_MAX} are possible")
        stride = s.stride_bytes if s.count > 1 else 0  # of one expert it means nothing
        if s.count > 1 and stride < s.expert_bytes:
            raise InvalidRequest(f"{what}: {s.expert_bytes} bytes each at a stride of {s.stride_bytes} overlap")
        end = s.offset_bytes + (s.count - 1) * stride + s.expert_bytes
        _inside(what, s.file, s.offset_bytes, end, file_bytes)
        rows = slice(s.layer * n_experts + s.first_expert, s.layer * n_experts + s.first_expert + s.count)
        if (file[rows, s.matrix] >= 0).any():
            raise InvalidRequest(f"{what}: named twice")
        file[rows, s.matrix] = s.file
        offset[rows, s.matrix] = s.offset_bytes + stride * np.arange(s.count, dtype=np.int64)
        size[rows, s.matrix] = s.expert_bytes
    if (file < 0).any():
        row, matrix = map(int, np.argwhere(file < 0)[0])
        layer, expert = divmod(row, n_experts)
        raise InvalidRequest(f"geometry: layer {layer} expert {expert} has no {('gate', 'up', 'down')[matrix]} matrix")
    if len(weights) > EXTENTS_MAX:
        raise InvalidRequest(f"geometry: {len(weights)} extents of weights; at most {EXTENTS_MAX} are possible")
    total = 0
    for i, extent in enumerate(weights):
        what = f"geometry: extent {i} of the weights"
        if extent.length_bytes < 1:
            raise InvalidRequest(f"{what} has {extent.length_bytes} bytes")
        _inside(what, extent.file, extent.offset_bytes, extent.offset_bytes + extent.length_bytes, file_bytes)
        total += pages.align(extent.length_bytes)
    if not weights:
        raise InvalidRequest("geometry: a model has weights beside its experts; none were named")
    digest = hashlib.sha256(repr((n_layers, n_experts, top_k, tuple(weights))).encode())
    for array in (file, offset, size):
        digest.update(array.tobytes())
    return Geometry(
        n_layers,
        n_experts,
        top_k,
        file,
        offset,
        size,
        _aligned(size).sum(axis=1),
        tuple(weights),
        total,
        digest.hexdigest(),
    )


def matrix_offsets(sizes: I64) -> I64:
    """Byte offsets of gate, up and down in slots, for sizes ``[k, 3]``: `pages.slot_layout` for arrays."""
    aligned = _aligned(sizes)
    return np.cumsum(aligned, axis=1) - aligned


def _aligned(sizes: I64) -> I64:
    aligned: I64 = (sizes + pages.ALIGN_BYTES - 1) // pages.ALIGN_BYTES * pages.ALIGN_BYTES
    return aligned


def _inside(what: str, file: int, offset: int, end: int, file_bytes: Sequence[int]) -> None:
    if not 0 <= file < len(file_bytes):
        raise InvalidRequest(f"{what}: file {file} of {len(file_bytes)}")
    if offset < 0 or end > file_bytes[file]:
        raise InvalidRequest(f"{what}: bytes {offset} to {end} of a file of {file_bytes[file]}")


def fit(geometry: Geometry, slab_bytes: int) -> None:
    """Refuses an expert that does not fit a slab. Errors: `InvalidRequest` with the size that would do."""
    largest = int(geometry.slot_bytes.max())
    if largest > slab_bytes:
        would_do = 1 << (largest - 1).bit_length()
        raise InvalidRequest(
            f"an expert of this model takes {largest} bytes and slab_bytes is {slab_bytes}; "
            f"an expert must fit a slab: set slab_bytes to {would_do} or more"
        )
    if slab_bytes // int(geometry.slot_bytes.min()) > pages.SLOTS_PER_SLAB_MAX:
        raise InvalidRequest(f"slab_bytes {slab_bytes} holds more than {pages.SLOTS_PER_SLAB_MAX} slots of this model")
