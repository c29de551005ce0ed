"""Attention of one token: norm, rotation, storing and all."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from strata_kernels.attention import (
    SHARED_BYTES_ANYWHERE,
    AttendArguments,
    AttendRowsArguments,
    attend_prompt_shape,
    attend_shape,
    workspace_bytes,
)
from strata_kernels.reference import attention, rms_norm, rope
from strata_kernels.structs import Activation, KvCells, Step

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import GpuRunner, KernelRunner
from tests.helpers.kv_cells import SlabCells
from tests.helpers.matrices import from_eights, in_eights, unpack_activation
from vmmd.errors import InvalidRequest

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

EPS = 1e-6
FREQ_BASE = 1e6
LAYER, N_LAYERS = 1, 3
KINDS = ["f16", "bf16", "q8_0"]


@dataclass
class Heads:
    """A layer's heads."""

    head_dim: int
    n_heads: int
    n_kv_heads: int

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads


def rope_table(position: int, head_dim: int) -> F32:
    """float32 `[head_dim / 2, 2]`, cosines and sines."""
    angles = position * FREQ_BASE ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


class Attend:
    """A token, the cells before it, and what it runs on."""

    def __init__(
        self,
        kernels: KernelRunner,
        rng: np.random.Generator,
        kind: str,
        heads: Heads,
        n_cells: int,
        *,
        cells_per_slab: int = 64,
        spare: int = 20,
        source: str | Path | None = None,
    ) -> None:
        self.kernels = kernels
        self.kind = kind
        self.heads = heads
        self.position = n_cells - 1
        self.source = source or f"attend_{kind}.cu"
        d = heads.head_dim
        self.cells = SlabCells(kind, N_LAYERS, heads.n_kv_heads, d, n_cells + spare, cells_per_slab)
        for k_or_v in (0, 1):
            values = rng.standard_normal((self.position, heads.n_kv_heads, d), np.float32)
            self.cells.write(LAYER, k_or_v, values)
        self.q = rng.standard_normal((heads.n_heads, d), np.float32) * np.float32(7)
        self.k, self.v = (rng.standard_normal((heads.n_kv_heads, d), np.float32) for _ in range(2))
        self.q_norm, self.k_norm = (rng.uniform(0.5, 1.5, d).astype(np.float32) for _ in range(2))
        self.table = rope_table(self.position, d)
        self.step = np.frombuffer(bytearray(Step(9, self.position, 0)), np.uint8).copy()
        self.packed = np.empty(0, np.uint8)

    def run(self, n_splits: int, workspace: U8 | None = None, shared_bytes_max: int = SHARED_BYTES_ANYWHERE) -> F32:
        """The kernel's output, float32 `[n_heads, head_dim]`."""
        heads, kernels = self.heads, self.kernels
        n = heads.n_heads * heads.head_dim
        self.packed = np.full(Activation.size_bytes(n), 0xFF, np.uint8)
        if workspace is None:
            workspace = self.workspace(n_splits)
        arrays = (self.q, self.k, self.v, self.q_norm, self.k_norm, self.table, self.step)
        argument = AttendArguments(
            *map(kernels.address, arrays),
            self.cells.argument(kernels.address(self.cells.memory)),
            Activation.at(kernels.address(self.packed), n),
            kernels.address(workspace),
            LAYER,
            heads.n_heads,
            EPS,
        )
        shape = attend_shape(self.kind, heads.head_dim, heads.group, shared_bytes_max, (heads.head_dim,))
        grid = (heads.n_kv_heads, n_splits)
        kernels.run(self.source, shape.name, grid, shape.threads, [argument], shape.shared_bytes)
        return unpack_activation(self.packed, n)[0].reshape(heads.n_heads, heads.head_dim)

    def workspace(self, n_splits: int) -> U8:
        """Counters of zero, and poison."""
        heads = self.heads
        size_bytes = workspace_bytes(heads.n_heads, heads.n_kv_heads, heads.head_dim, n_splits)
        workspace = np.full(size_bytes, 0xFF, np.uint8)
        workspace[: 4 * heads.n_kv_heads] = 0
        return workspace

    def turned(self, x: F32, weight: F32) -> F32:
        """Normed and rotated, float32 `[1, heads, head_dim]`."""
        return rope(rms_norm(x, weight, EPS)[None], self.position, FREQ_BASE)

    def check_new_cell(self) -> None:
        """k and v are in their cell, rounded."""
        for k_or_v, wanted in enumerate((self.turned(self.k, self.k_norm)[0], self.v)):
            found = self.cells.read(LAYER, k_or_v, self.position + 1)[-1]
            assert np.all(np.abs(found - wanted) <= self.cells.rounding(wanted))

    def wanted(self) -> F32:
        """The reference, on the cells as they are."""
        segment = tuple(self.cells.read(LAYER, k_or_v, self.position + 1) for k_or_v in (0, 1))
        return attention(self.turned(self.q, self.q_norm), [(segment[0], segment[1])], self.position)[0]

    def check(self, n_splits: int) -> None:
        """Runs and compares everything."""
        before = self.cells.outside(LAYER, self.position, self.position + 1)
        out = self.run(n_splits)
        self.check_new_cell()
        assert np.array_equal(self.cells.outside(LAYER, self.position, self.position + 1), before)
        check(f"attend_{self.kind}", out, self.wanted())
        values, rounded, sums, squares = unpack_activation(self.packed, out.size)
        assert np.abs(rounded - values).max() <= np.abs(values).max() / 32512
        assert np.abs(sums - rounded.reshape(-1, 16).sum(axis=1)).max() <= 1e-5 * np.abs(values).max()
        assert not squares.any()


@pytest.mark.parametrize("heads", [(64, 4, 2), (128, 8, 1), (128, 12, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kernels: KernelRunner, rng: np.random.Generator, kind: str, heads: tuple[int, int, int]) -> None:
    """Sequences attended at once, each over its own cells up to its own position, as each alone."""
    shape_of_heads, n_splits = Heads(*heads), 4
    rows = [Attend(kernels, rng, kind, shape_of_heads, n) for n in (700, 1, 40, 257)]
    n, d_kv = heads[1] * heads[0], heads[2] * heads[0]
    for row in rows:
        row.q_norm, row.k_norm = rows[0].q_norm, rows[0].k_norm
    stride = n + 2 * d_kv + 4
    qkv = np.stack([np.resize(np.concatenate([x.ravel() for x in (row.q, row.k, row.v)]), stride) for row in rows])
    tables, steps = np.stack([row.table for row in rows]), np.stack([row.step for row in rows])
    cells = [row.cells.argument(kernels.address(row.cells.memory)) for row in rows]
    packed_cells = np.frombuffer(bytearray((KvCells * len(cells))(*cells)), np.uint8)
    alone = rows[0].workspace(n_splits)
    workspace = np.full((len(rows), -(-alone.nbytes // 16) * 16), 0xFF, np.uint8)
    workspace[:, : alone.nbytes] = alone
    out = in_eights(np.full((len(rows), n), np.nan, np.float16), 8)
    q = kernels.address(qkv)
    argument = AttendRowsArguments(
        q, q + 4 * n, q + 4 * (n + d_kv), kernels.address(rows[0].q_norm), kernels.address(rows[0].k_norm),
        *map(kernels.address, (tables, steps, packed_cells, out, workspace)), stride, workspace.shape[1], LAYER,
        heads[1], EPS,
    )  # fmt: skip
    shape = attend_shape(kind, heads[0], shape_of_heads.group)
    name, grid = shape.name.replace("attend_", "attend_rows_"), (heads[2], n_splits, len(rows))
    kernels.run(f"attend_rows_{kind}.cu", name, grid, shape.threads, [argument], shape.shared_bytes)
    for row, found in zip(rows, from_eights(out, len(rows)), strict=True):
        row.check_new_cell()
        check(f"attend_rows_{kind}", found.astype(np.float32).reshape(row.q.shape), row.wanted())
        assert np.array_equal(found, row.run(n_splits).astype(np.float16).ravel())


@pytest.mark.parametrize("n_cells", [1, 2, 16, 17, 31, 33, 64, 65, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_cells(kernels: KernelRunner, rng: np.random.Generator, kind: str, n_cells: int) -> None:
    """Any number of cells, in one slab or more, attended by one block or several."""
    Attend(kernels, rng, kind, Heads(128, 8, 1), n_cells).check(5)


@pytest.mark.parametrize("heads", [(64, 4, 2), (64, 32, 2), (128, 2, 2), (128, 16, 2), (128, 5, 1), (128, 12, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_heads(
    kernels: KernelRunner, rng: np.random.Generator, kind: str, heads: tuple[int, int, int]
) -> None:
    """1 to 16 query heads a K/V head, of 64 or 128 values."""
    for n_cells in (40, 400):
        Attend(kernels, rng, kind, Heads(*heads), n_cells).check(3)


@pytest.mark.parametrize(
    "kind, dim, n_heads", [("f16", 96, 8), ("f16", 112, 16), ("bf16", 256, 16), ("q8_0", 32, 3), ("q8_0", 256, 8)]
)
def test_other_head_dims(kernels: KernelRunner, rng: np.random.Generator, kind: str, dim: int, n_heads: int) -> None:
    """Heads of a size that the product has no kernel for, where one is compiled."""
    source = Path(__file__).parent / "attend_dims.cu"
    Attend(kernels, rng, kind, Heads(dim, n_heads, 1), 300, source=source).check(2)


@pytest.mark.parametrize("cells_per_slab", [16, 48, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_slabs(kernels: KernelRunner, rng: np.random.Generator, kind: str, cells_per_slab: int) -> None:
    """Cells at the first and last place of slabs of any size."""
    for n_cells in (cells_per_slab, cells_per_slab + 1, 3 * cells_per_slab):
        if n_cells <= 600:
            Attend(kernels, rng, kind, Heads(64, 4, 2), n_cells, cells_per_slab=cells_per_slab, spare=0).check(4)


@pytest.mark.parametrize("n_splits", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_splits(kernels: KernelRunner, rng: np.random.Generator, kind: str, n_splits: int) -> None:
    """Any number of blocks a K/V head, also more than there are cells for."""
    Attend(kernels, rng, kind, Heads(64, 8, 2), 700).check(n_splits)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_again(kernels: KernelRunner, rng: np.random.Generator, kind: str) -> None:
    """The same token gives the same bits; the workspace is ready for another launch after each."""
    attend = Attend(kernels, rng, kind, Heads(128, 16, 2), 600)
    workspace = attend.workspace(4)
    first = attend.run(4, workspace)
    packed = attend.packed
    for _ in range(20 if kernels.on_gpu else 1):
        assert np.array_equal(attend.run(4, workspace), first)
        assert np.array_equal(attend.packed, packed)


@pytest.mark.parametrize("kib", [75, 99, 148, 227])
@pytest.mark.parametrize("kind", KINDS)
def test_stages(kernels: KernelRunner, rng: np.random.Generator, kind: str, kib: int) -> None:
    """However many tiles are in flight, the result has the same bits."""
    attend = Attend(kernels, rng, kind, Heads(128, 8, 1), 1500)
    assert np.array_equal(attend.run(2), attend.run(2, shared_bytes_max=kib * 1024))
    check(f"attend_{kind}", attend.run(2, shared_bytes_max=kib * 1024), attend.wanted())


@pytest.mark.parametrize("kind", KINDS)
def test_one_cell_that_outweighs_all(kernels: KernelRunner, rng: np.random.Generator, kind: str) -> None:
    """Scores that are far apart neither overflow nor lose the cell that counts."""
    attend = Attend(kernels, rng, kind, Heads(64, 2, 1), 500)
    k = attend.cells.read(LAYER, 0, attend.position)
    k[77] *= 40
    k[400] *= 41
    attend.cells.write(LAYER, 0, k)
    attend.q_norm *= 10
    attend.check(2)


def test_cells_of_zeros(kernels: KernelRunner, rng: np.random.Generator) -> None:
    """Blocks of zeros have a scale of zero, and divide by nothing."""
    attend = Attend(kernels, rng, "q8_0", Heads(64, 2, 1), 30)
    attend.k[:] = 0
    attend.v[:, :32] = 0
    attend.check(1)


def test_heads_without_kernels() -> None:
    """Heads that no kernel takes are told of before anything is launched."""
    for head_dim, group in ((80, 4), (128, 17), (64, 0)):
        with pytest.raises(InvalidRequest, match=f"heads of {head_dim} values"):
            attend_shape("f16", head_dim, group)
    with pytest.raises(InvalidRequest, match="heads of 80 values"):
        attend_prompt_shape("f16", 80)


@pytest.mark.gpu
@pytest.mark.parametrize("n_cells", [16_384, 262_144])
@pytest.mark.parametrize("kind", KINDS)
def test_long_contexts(gpu_runner: GpuRunner, rng: np.random.Generator, kind: str, n_cells: int) -> None:
    """The longest context that the product has."""
    for n_splits in (33, 66):
        Attend(gpu_runner, rng, kind, Heads(128, 16, 2), n_cells, cells_per_slab=4096).check(n_splits)
    gpu_runner.forget()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_a_row(gpu_runner: GpuRunner, rng: np.random.Generator, kind: str) -> None:
    """Launches that each start while the one before ends, over many positions, leave what single ones do."""
    heads, n_first, n_steps, n_splits = Heads(128, 16, 2), 200, 120, 16
    attend = Attend(gpu_runner, rng, kind, heads, n_first + n_steps, cells_per_slab=64)
    attend.cells.memory[:] = 0
    step = np.frombuffer(bytearray(Step(9, n_first - 1, 0)), np.uint8).copy()
    attend.step = step
    workspace = attend.workspace(n_splits)
    attend.position = n_first - 1
    attend.table = rope_table(attend.position, heads.head_dim)
    attend.run(n_splits, workspace)
    retired = np.zeros(1, np.uint64)

    n = heads.n_heads * heads.head_dim
    arrays = (attend.q, attend.k, attend.v, attend.q_norm, attend.k_norm, attend.table, step)
    argument = AttendArguments(
        *map(gpu_runner.address, arrays),
        attend.cells.argument(gpu_runner.address(attend.cells.memory)),
        Activation.at(gpu_runner.address(attend.packed), n),
        gpu_runner.address(workspace),
        LAYER,
        heads.n_heads,
        EPS,
    )
    shape = attend_shape(kind, heads.head_dim, heads.group)
    u64 = ctypes.c_uint64
    decode, attending = gpu_runner.kernels("decode.cu", ["F32"]), gpu_runner.kernels(f"attend_{kind}.cu")
    advance = decode.prepare(
        "end_step", 1, 32, [u64(argument.step), 1, u64(gpu_runner.address(retired))], programmatic=True
    )
    base, scale = ctypes.c_double(FREQ_BASE), ctypes.c_double(1)
    table = decode.prepare(
        "rope_table", 1, 64, [u64(argument.rope), u64(argument.step), base, scale, heads.head_dim], programmatic=True
    )
    launch = attending.prepare(
        shape.name, (heads.n_kv_heads, n_splits), shape.threads, [argument], shape.shared_bytes, programmatic=True
    )
    gpu_runner.upload()
    for _ in range(n_steps):
        advance()
        table()
        launch()
    gpu_runner.download()

    out = unpack_activation(attend.packed, n)[0].reshape(heads.n_heads, heads.head_dim)
    attend.position = n_first + n_steps - 1
    attend.check_new_cell()
    check(f"attend_{kind}", out, attend.wanted())
    gpu_runner.forget()
