"""K/V cells in slabs, as kernels find them: what `kv.cuh` describes, in numpy."""

import numpy as np
import numpy.typing as npt
from strata_kernels.structs import KV_BF16, KV_F16, KV_Q8_0, KvCells

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

TYPES = {"f16": KV_F16, "bf16": KV_BF16, "q8_0": KV_Q8_0}

_GAP = 48  # bytes of a slab that no cell takes


def _encode(values: F32, kind: str) -> U8:
    """16-bit values, uint8 `[..., 2 * head_dim]`."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint8)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)


def _decode(raw: U8, kind: str) -> F32:
    if kind == "f16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


class SlabCells:
    """A range of slabs of K/V cells; every byte is 0xFF at first, NaN in any type.

    Attributes:
        memory: uint8 `[n_slabs, slab_bytes]`.
    """

    def __init__(
        self, kind: str, n_layers: int, n_kv_heads: int, head_dim: int, n_cells: int, cells_per_slab: int
    ) -> None:
        self.kind = kind
        self.n_kv_heads = n_kv_heads
        self.head_dim = head_dim
        self.cells_per_slab = cells_per_slab
        self.capacity = -(-n_cells // cells_per_slab) * cells_per_slab
        values = n_kv_heads * head_dim
        self._plane_values = values * cells_per_slab
        self._plane_bytes = cells_per_slab * (values + values // 16 if kind == "q8_0" else 2 * values)
        slab_bytes = n_layers * 2 * self._plane_bytes + _GAP
        self.memory = np.full((self.capacity // cells_per_slab, slab_bytes), 0xFF, np.uint8)

    def argument(self, address: int) -> KvCells:
        """The struct, for memory at an address."""
        return KvCells(
            address,
            self.memory.shape[1],
            self.cells_per_slab,
            self.n_kv_heads,
            self.head_dim,
            TYPES[self.kind],
        )

    def _planes(self, layer: int, k_or_v: int) -> U8:
        """uint8 `[n_slabs, plane_bytes]`, a view."""
        at = (2 * layer + k_or_v) * self._plane_bytes
        return self.memory[:, at : at + self._plane_bytes]

    def write(self, layer: int, k_or_v: int, values: F32) -> None:
        """Rounds float32 `[n, n_kv_heads, head_dim]` to the cells 0 .. n - 1."""
        n = len(values)
        padded = np.zeros((self.capacity, self.n_kv_heads, self.head_dim), np.float32)
        padded[:n] = values
        slabs = padded.reshape(-1, self.cells_per_slab, self.n_kv_heads, self.head_dim)
        for slab, (planes, some) in enumerate(zip(self._planes(layer, k_or_v), slabs, strict=True)):
            count = min(max(n - slab * self.cells_per_slab, 0), self.cells_per_slab)
            some = some[:count]
            if self.kind != "q8_0":
                raw = _encode(some, self.kind).reshape(-1)
                planes[: raw.size] = raw
                continue
            blocks = some.reshape(-1, 32)
            scales = (np.abs(blocks).max(axis=1) / np.float32(127)).astype(np.float16)
            wide = scales.astype(np.float32)[:, None]
            whole = np.rint(np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0)).clip(-127, 127)
            planes[: whole.size] = whole.astype(np.int8).view(np.uint8).reshape(-1)
            at = self._plane_values
            planes[at : at + 2 * scales.size] = scales.view(np.uint8)

    def read(self, layer: int, k_or_v: int, n: int) -> F32:
        """The cells 0 .. n - 1, float32 `[n, n_kv_heads, head_dim]`."""
        found = []
        for slab, plane in enumerate(self._planes(layer, k_or_v)[: -(-n // self.cells_per_slab)]):
            count = min(n - slab * self.cells_per_slab, self.cells_per_slab)
            n_values = count * self.n_kv_heads * self.head_dim
            if self.kind != "q8_0":
                values = _decode(np.ascontiguousarray(plane[: 2 * n_values]), self.kind)
            else:
                whole = plane[:n_values].view(np.int8).reshape(-1, 32).astype(np.float32)
                raw = np.ascontiguousarray(plane[self._plane_values : self._plane_values + n_values // 16])
                values = whole * raw.view(np.float16).astype(np.float32)[:, None]
            found.append(values.reshape(count, self.n_kv_heads, self.head_dim))
        return np.concatenate(found)

    def rounding(self, values: F32) -> F32:
        """How far a value may be from what its cell holds; of the same shape."""
        if self.kind != "q8_0":
            return np.abs(values) * np.float32(2.0**-10 if self.kind == "f16" else 2.0**-7) + np.float32(1e-7)
        blocks = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True)
        return np.broadcast_to(blocks * np.float32(0.52 / 127), (len(blocks), 32)).reshape(values.shape)

    def outside(self, layer: int, first: int, last: int) -> U8:
        """All bytes but those of the cells first .. last - 1 in a layer."""
        copy = self.memory.copy()
        values = self.n_kv_heads * self.head_dim
        for cell in range(first, last):
            slab, row = divmod(cell, self.cells_per_slab)
            for k_or_v in (0, 1):
                at = (2 * layer + k_or_v) * self._plane_bytes
                if self.kind != "q8_0":
                    copy[slab, at + 2 * row * values : at + 2 * (row + 1) * values] = 0
                    continue
                copy[slab, at + row * values : at + (row + 1) * values] = 0
                at += self._plane_values
                copy[slab, at + row * values // 16 : at + (row + 1) * values // 16] = 0
        return copy
