"""Attention of a prompt's tokens: angles, norm, rotation and storing, then attention over all cells."""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from strata_kernels.attention import (
    STORE_THREADS,
    PromptArguments,
    StoreArguments,
    attend_prompt_grid,
    attend_prompt_shape,
    store_kv_grid,
)
from strata_kernels.reference import attention, rms_norm, rope

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import GpuRunner, KernelRunner
from tests.helpers.kv_cells import SlabCells

F32 = npt.NDArray[np.float32]

EPS = 1e-6
LAYER, N_LAYERS = 1, 3
KINDS = ["f16", "bf16", "q8_0"]


def rope_table(kernels: KernelRunner, position: int, n: int, head_dim: int, freq_base: float, scale: float) -> F32:
    """The kernel's table, float32 `[n, head_dim / 2, 2]`."""
    table = np.full((n, head_dim // 2, 2), np.nan, np.float32)
    args = [table, position, ctypes.c_double(freq_base), ctypes.c_double(scale), head_dim]
    kernels.run("store_kv.cu", "rope_table_prompt", n, head_dim // 2, args)
    return table


class Tokens:
    """Projections of n tokens at a position, and the cells."""

    def __init__(
        self,
        rng: np.random.Generator,
        kind: str,
        heads: tuple[int, int, int],
        position: int,
        n: int,
        *,
        cells_per_slab: int = 64,
        projections: type[np.floating] = np.float32,
    ) -> None:
        self.kind = kind
        self.head_dim, self.n_heads, self.n_kv_heads = heads
        self.position = position
        self.n = n
        n_cells = position + n
        self.cells = SlabCells(kind, N_LAYERS, self.n_kv_heads, self.head_dim, n_cells + 20, cells_per_slab)
        for k_or_v in (0, 1):
            values = rng.standard_normal((position, self.n_kv_heads, self.head_dim), np.float32)
            self.cells.write(LAYER, k_or_v, values)
        self.stride = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim + 16
        self.projections = rng.standard_normal((n, self.stride), np.float32).astype(projections)
        self.q_norm, self.k_norm = (rng.uniform(0.5, 1.5, self.head_dim).astype(np.float32) for _ in range(2))
        self.q_out = np.full((n, self.n_heads, self.head_dim), np.nan, np.float16)

    def parts(self) -> tuple[F32, F32, F32]:
        """q, k and v, float32 `[n, heads, head_dim]`."""
        ends = np.cumsum([count * self.head_dim for count in (self.n_heads, self.n_kv_heads, self.n_kv_heads)])
        q, k, v, _ = np.split(self.projections.astype(np.float32), ends, axis=1)
        return tuple(part.reshape(self.n, -1, self.head_dim) for part in (q, k, v))  # type: ignore[return-value]

    def store(self, kernels: KernelRunner) -> None:
        """Runs `store_kv`."""
        table = rope_table(kernels, self.position, self.n, self.head_dim, 1e6, 1.0)
        first = kernels.address(self.projections)
        size = self.projections.itemsize * self.head_dim
        argument = StoreArguments(
            first,
            first + size * self.n_heads,
            first + size * (self.n_heads + self.n_kv_heads),
            kernels.address(self.q_norm),
            kernels.address(self.k_norm),
            kernels.address(table),
            kernels.address(self.q_out),
            self.cells.argument(kernels.address(self.cells.memory)),
            self.stride,
            LAYER,
            self.n_heads,
            self.position,
            self.n,
            EPS,
        )
        name = "store_kv_f16" if self.projections.dtype == np.float16 else "store_kv_f32"
        grid = store_kv_grid(self.n, self.n_heads, self.n_kv_heads)
        kernels.run("store_kv.cu", name, grid, STORE_THREADS, [argument])

    def check_store(self, kernels: KernelRunner) -> None:
        """Runs `store_kv` and compares everything."""
        last = self.position + self.n
        before = self.cells.outside(LAYER, self.position, last)
        self.store(kernels)
        assert np.array_equal(self.cells.outside(LAYER, self.position, last), before)
        q, k, v = self.parts()
        q = rope(rms_norm(q, self.q_norm, EPS), self.position, 1e6)
        k = rope(rms_norm(k, self.k_norm, EPS), self.position, 1e6)
        check("store_kv", self.q_out.astype(np.float32), q)
        for k_or_v, wanted in enumerate((k, v)):
            found = self.cells.read(LAYER, k_or_v, last)[self.position :]
            assert np.all(np.abs(found - wanted) <= self.cells.rounding(wanted))

    def fill(self, rng: np.random.Generator) -> None:
        """Puts values where `store_kv` would have."""
        for k_or_v in (0, 1):
            shape = (self.position + self.n, self.n_kv_heads, self.head_dim)
            self.cells.write(LAYER, k_or_v, rng.standard_normal(shape, np.float32))
        self.q_out[:] = 2 * rng.standard_normal(self.q_out.shape, np.float32)

    def check_attend(self, kernels: KernelRunner, source: str | Path | None = None) -> None:
        """Runs `attend_prompt` and compares."""
        before = self.cells.memory.copy()
        out = np.full_like(self.q_out, np.nan)
        argument = PromptArguments(
            kernels.address(self.q_out),
            kernels.address(out),
            self.cells.argument(kernels.address(self.cells.memory)),
            LAYER,
            self.n_heads,
            self.position,
            self.n,
        )
        shape = attend_prompt_shape(self.kind, self.head_dim, (self.head_dim,))
        grid = attend_prompt_grid(self.n, self.n_heads, self.n_kv_heads)
        kernels.run(source or f"attend_{self.kind}.cu", shape.name, grid, shape.threads, [argument], shape.shared_bytes)
        assert np.array_equal(self.cells.memory, before)
        n_cells = self.position + self.n
        segment = self.cells.read(LAYER, 0, n_cells), self.cells.read(LAYER, 1, n_cells)
        wanted = attention(self.q_out.astype(np.float32), [segment], self.position)
        check(f"attend_prompt_{self.kind}", out.astype(np.float32), wanted)


@pytest.mark.parametrize("position", [0, 1, 4097, 262_143])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rope_table(kernels: KernelRunner, position: int, head_dim: int) -> None:
    """Cosines and sines are those of float64 angles, rounded, at any position."""
    for freq_base, scale in ((1e6, 1.0), (1e4, 0.25)):
        table = rope_table(kernels, position, 3, head_dim, freq_base, scale)
        frequencies = scale * freq_base ** (-np.arange(0, head_dim, 2) / head_dim)
        angles = np.arange(position, position + 3)[:, None] * frequencies
        assert np.abs(table - np.stack([np.cos(angles), np.sin(angles)], axis=-1)).max() <= 2.0**-24


@pytest.mark.parametrize("n, position", [(1, 0), (5, 62), (33, 100), (31, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_store_kv(kernels: KernelRunner, rng: np.random.Generator, kind: str, n: int, position: int) -> None:
    """Every token's q is normed and rotated, its k and v are in its cell, and no other cell changed."""
    for heads in ((64, 4, 2), (128, 3, 3), (256, 2, 1)):
        Tokens(rng, kind, heads, position, n).check_store(kernels)
    Tokens(rng, kind, (96, 4, 1), position, n, projections=np.float16).check_store(kernels)


@pytest.mark.parametrize("n, position", [(1, 0), (1, 64), (31, 0), (33, 31), (7, 250), (100, 29)])
@pytest.mark.parametrize("kind", KINDS)
def test_attend(kernels: KernelRunner, rng: np.random.Generator, kind: str, n: int, position: int) -> None:
    """Each of any number of tokens attends to the cells up to its own."""
    for heads in ((64, 4, 2), (128, 8, 1)):
        tokens = Tokens(rng, kind, heads, position, n)
        tokens.fill(rng)
        tokens.check_attend(kernels)


@pytest.mark.parametrize("n_heads, n_kv_heads", [(1, 1), (4, 4), (5, 1), (24, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_heads(
    kernels: KernelRunner, rng: np.random.Generator, kind: str, n_heads: int, n_kv_heads: int
) -> None:
    """Any number of query heads a K/V head; slabs that end within a tile."""
    tokens = Tokens(rng, kind, (64, n_heads, n_kv_heads), 75, 70, cells_per_slab=48)
    tokens.fill(rng)
    tokens.check_attend(kernels)


@pytest.mark.parametrize("kind, dim", [("f16", 96), ("bf16", 256), ("q8_0", 32), ("q8_0", 256)])
def test_other_head_dims(kernels: KernelRunner, rng: np.random.Generator, kind: str, dim: int) -> None:
    """Heads of a size that the product has no kernel for, where one is compiled."""
    tokens = Tokens(rng, kind, (dim, 4, 2), 50, 40)
    tokens.fill(rng)
    tokens.check_attend(kernels, Path(__file__).parent / "attend_dims.cu")


@pytest.mark.parametrize("kind", KINDS)
def test_store_then_attend(kernels: KernelRunner, rng: np.random.Generator, kind: str) -> None:
    """What the first kernel stores the second attends over."""
    tokens = Tokens(rng, kind, (128, 8, 2), 20, 40)
    tokens.store(kernels)
    tokens.check_attend(kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("n, position", [(1000, 0), (512, 16_384), (33, 100_000)])
@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts(gpu_runner: GpuRunner, rng: np.random.Generator, kind: str, n: int, position: int) -> None:
    """Chunks of the size that the product uses, behind many cells."""
    heads = (128, 16, 2) if position < 100_000 else (128, 8, 1)
    tokens = Tokens(rng, kind, heads, position, n, cells_per_slab=4096)
    tokens.check_store(gpu_runner)
    tokens.check_attend(gpu_runner)
    gpu_runner.forget()
