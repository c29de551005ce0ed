"""Matrix products of prompt processing: dense ones, and those of the routed experts."""

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from strata_kernels import prompt
from strata_kernels.prompt import Experts, Groups, HalfRows
from strata_kernels.reference import expert_ffn, swiglu
from strata_kernels.structs import Matrix

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import random_matrix
from tests.helpers.tensor_blocks import KINDS

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
SOURCE = "prompt_matmul.cu"
FEW_KINDS = [Type.F32, Type.BF16, Type.Q4_K, Type.Q6_K]


def matrix(kernels: KernelRunner, kind: Type, rows: int, columns: int, rng: np.random.Generator) -> tuple[Matrix, F32]:
    """A matrix in a kernel's memory, and its values."""
    raw, values = random_matrix(kind, rows, columns, rng)
    return Matrix(kernels.address(raw), int(kind), rows), values


def run_matmul(kernels: KernelRunner, rows: HalfRows, matrices: list[Matrix], y: F32, *, add: bool) -> None:
    """One launch with up to three matrices."""
    n = len(y)
    three = [*matrices, *[Matrix(0, 0, 0)] * (3 - len(matrices))]
    grid = prompt.matmul_grid(n, *(m.rows for m in matrices))
    args = [rows, *three, y, n, y.shape[1], int(add)]
    kernels.run(SOURCE, "matmul_prompt", grid, prompt.TILE_THREADS, args, prompt.TILE_SHARED_BYTES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_matmul_of_every_type(kernels: KernelRunner, rng: np.random.Generator, kind: Type) -> None:
    """Each type's values meet the columns that they belong to, in whole steps and in a last one that is not."""
    k = 768 if Type.Q2_K <= kind <= Type.IQ4_XS and kind not in (Type.IQ4_NL, Type.BF16) else 352
    n, rows = 18, 50
    x = rng.standard_normal((n, k)).astype(np.float16)
    m, values = matrix(kernels, kind, rows, k, rng)
    y = np.full((n, rows), np.nan, np.float32)
    run_matmul(kernels, HalfRows.unscaled(kernels.address(x), k), [m], y, add=False)
    check("matmul_prompt", y, x.astype(np.float32) @ values.T)


@pytest.mark.parametrize("n", [1, 16, 31, 33, 64, 100])
def test_matmul_of_any_number_of_tokens(kernels: KernelRunner, rng: np.random.Generator, n: int) -> None:
    """Three matrices' products stand side by side, and nothing beside them is touched."""
    n = n * 10 if kernels.on_gpu else n
    k, rows, kinds = 256, (144, 32, 18), (Type.Q4_K, Type.Q4_K, Type.Q6_K)
    x = rng.standard_normal((n, k)).astype(np.float16)
    found = [matrix(kernels, kind, count, k, rng) for kind, count in zip(kinds, rows, strict=True)]
    y = np.full((n, sum(rows) + 6), np.nan, np.float32)
    args = HalfRows.unscaled(kernels.address(x), k), [m for m, _ in found]
    run_matmul(kernels, *args, y, add=False)
    assert np.isnan(y[:, sum(rows) :]).all()
    check("matmul_prompt", y[:, : sum(rows)], x.astype(np.float32) @ np.concatenate([v for _, v in found]).T)


@pytest.mark.parametrize("rows", [(1,), (33, 17, 129), (16, 15)])
def test_matmul_of_odd_rows(kernels: KernelRunner, rng: np.random.Generator, rows: tuple[int, ...]) -> None:
    """Matrices may have any number of rows."""
    n, k = 17, 128
    x = rng.standard_normal((n, k)).astype(np.float16)
    found = [matrix(kernels, Type.Q8_0, count, k, rng) for count in rows]
    for stride in (sum(rows), sum(rows) + 1):
        y = np.full((n, stride), np.nan, np.float32)
        run_matmul(kernels, HalfRows.unscaled(kernels.address(x), k), [m for m, _ in found], y, add=False)
        assert np.isnan(y[:, sum(rows) :]).all()
        y[:, sum(rows) :] = 0
        run_matmul(kernels, HalfRows.unscaled(kernels.address(x), k), [m for m, _ in found], y, add=True)
        wanted = x.astype(np.float32) @ np.concatenate([v for _, v in found]).T
        check("matmul_prompt", y[:, : sum(rows)], 2 * wanted)


@pytest.mark.parametrize("kind", FEW_KINDS, ids=lambda kind: kind.name)
def test_matmul_adds(kernels: KernelRunner, rng: np.random.Generator, kind: Type) -> None:
    """Products are added to what is there."""
    n, rows, k = 20, 256, 512
    x = rng.standard_normal((n, k)).astype(np.float16)
    m, values = matrix(kernels, kind, rows, k, rng)
    y = rng.standard_normal((n, rows)).astype(np.float32)
    before = y.copy()
    run_matmul(kernels, HalfRows.unscaled(kernels.address(x), k), [m], y, add=True)
    check("matmul_prompt", y - before, x.astype(np.float32) @ values.T)


@pytest.mark.parametrize("width", [64, 96, 512])
def test_matmul_of_scaled_rows(kernels: KernelRunner, rng: np.random.Generator, width: int) -> None:
    """Rows with scales, equal or not within a row, stand for values beyond float16's range."""
    n, rows, k = 35, 64, 512
    halves = rng.standard_normal((n, k)).astype(np.float16)
    scales = np.ones((n, -(-k // width)), np.float32)
    scales[::3] = 2.0 ** rng.integers(0, 12, scales[::3].shape)
    scales[1] = 2.0**20
    x = halves.astype(np.float32) * np.repeat(scales, width, axis=1)[:, :k]
    m, values = matrix(kernels, Type.Q4_K, rows, k, rng)
    y = np.full((n, rows), np.nan, np.float32)
    given = HalfRows(kernels.address(halves), kernels.address(scales), k, width)
    run_matmul(kernels, given, [m], y, add=False)
    wanted = x @ values.T
    for row in range(n):
        check("matmul_prompt", y[row], wanted[row])


@pytest.mark.parametrize("kind", [Type.F32, Type.BF16, Type.Q4_1, Type.Q8_0, Type.Q3_K], ids=lambda kind: kind.name)
def test_weights_beyond_float16(kernels: KernelRunner, rng: np.random.Generator, kind: Type) -> None:
    """Weights too large for float16 count as its largest number; what is not a number stays so."""
    n, rows, k = 3, 16, 256
    raw, values = random_matrix(kind, rows, k, rng)
    if kind in (Type.F32, Type.BF16):
        values[:, ::5] *= 1e9
        values[3, 7] = np.nan
        bits = values.view(np.uint32)
        raw = (bits if kind == Type.F32 else (bits >> 16).astype(np.uint16)).view(np.uint8).reshape(rows, -1)
    else:
        at = {Type.Q4_1: 0, Type.Q8_0: 0, Type.Q3_K: 108}[kind]
        blocks = raw.reshape(-1, raw.size // (rows * k // (256 if kind == Type.Q3_K else 32)))
        blocks[:, at : at + 2] = np.full((len(blocks), 1), 60000, np.float16).view(np.uint8)
        values = gguf.dequantize(raw, kind).reshape(rows, k)
    raw = np.ascontiguousarray(raw)
    x = np.zeros((n, k), np.float16)
    x[0], x[1, ::2], x[2] = 2**-10, 2**-12, rng.uniform(0, 2**-10, k)
    y = np.full((n, rows), np.nan, np.float32)
    m = Matrix(kernels.address(raw), int(kind), rows)
    run_matmul(kernels, HalfRows.unscaled(kernels.address(x), k), [m], y, add=False)
    wanted = x.astype(np.float32) @ np.clip(values, -65504, 65504).T
    assert np.array_equal(np.isnan(y), np.isnan(wanted))
    check("matmul_prompt", np.nan_to_num(y), np.nan_to_num(wanted))


class Layer:
    """A layer's experts in memory, each matrix by itself, and tokens that are routed to them."""

    def __init__(
        self, kernels: KernelRunner, rng: np.random.Generator, kinds: tuple[Type, Type, Type], experts: I32,
        n_experts: int, d_model: int, d_expert: int, order: I32,
    ) -> None:  # fmt: skip
        shapes = ((d_expert, d_model), (d_expert, d_model), (d_model, d_expert))
        self.found = [
            [random_matrix(kind, *shape, rng) for kind, shape in zip(kinds, shapes, strict=True)]
            for _ in range(n_experts)
        ]
        self.values = [[values for _, values in matrices] for matrices in self.found]
        self.table = np.array([[kernels.address(raw) for raw, _ in row] for row in self.found], np.uint64)
        self.experts = experts
        pairs, tiles, first_tiles = [], [], [0]
        for place, expert in enumerate(order):
            mine = np.flatnonzero(experts.reshape(-1) == expert)
            starts = range(0, len(mine), prompt.TILE_TOKENS)
            tiles += [(place, expert, len(pairs) + i, min(prompt.TILE_TOKENS, len(mine) - i)) for i in starts]
            pairs += mine.tolist()
            first_tiles.append(len(tiles))
        self.pairs = np.array(pairs, np.int32)
        self._tiles, self._first_tiles = np.array(tiles, np.int32).reshape(-1, 4), np.array(first_tiles, np.int32)
        self.groups = Groups(*map(kernels.address, (self.pairs, self._first_tiles, self._tiles)))


MIXES: list[tuple[Type, Type, Type]] = [
    (Type.Q4_K, Type.Q4_K, Type.Q6_K),
    (Type.F16, Type.F16, Type.F16),
    (Type.IQ3_S, Type.Q4_K, Type.IQ4_XS),
    (Type.Q8_0, Type.F32, Type.BF16),
]


@pytest.mark.parametrize("kinds", MIXES, ids=lambda kinds: "-".join(kind.name for kind in kinds))
@pytest.mark.parametrize("n, top_k", [(1, 4), (5, 2), (80, 3)])
def test_experts(
    kernels: KernelRunner, rng: np.random.Generator, kinds: tuple[Type, Type, Type], n: int, top_k: int
) -> None:
    """Each token's experts compute it, in two launches in an order of their own; experts without tokens do nothing."""
    if kernels.on_gpu:
        n, n_experts, d_model, d_expert = 13 * n, 20, 2048, 768
    else:
        n_experts, d_model, d_expert = 6, 256, 256
    loads = rng.dirichlet(np.full(n_experts - 1, 0.7))
    loads = 0.9 * loads + 0.1 / (n_experts - 1)
    experts = np.stack([rng.choice(n_experts - 1, top_k, replace=False, p=loads) for _ in range(n)]).astype(np.int32)
    order = rng.permutation(n_experts).astype(np.int32)
    layer = Layer(kernels, rng, kinds, experts, n_experts, d_model, d_expert, order)
    x = rng.standard_normal((n, d_model)).astype(np.float16)
    h = np.full((n * top_k, d_expert), np.nan, np.float16)
    scales = np.full((n * top_k, -(-d_expert // prompt.SCALE_WIDTH)), np.nan, np.float32)
    y = np.full((n * top_k, d_model), np.nan, np.float32)
    for array in (h, scales, y, layer.table):
        kernels.address(array)
    middle = n_experts // 2
    for first, last in ((0, middle), (middle, n_experts)):
        given = Experts.in_place(kernels.address(layer.table), first, last)
        args: list[Any] = [HalfRows.unscaled(kernels.address(x), d_model), layer.groups, given, int(kinds[0])]
        args += [int(kinds[1]), h, scales, d_expert, top_k]
        grid = prompt.gate_up_grid(n, last - first, top_k, d_expert)
        kernels.run(SOURCE, "gate_up_prompt", grid, prompt.TILE_THREADS, args, prompt.TILE_SHARED_BYTES)
        hidden = HalfRows(kernels.address(h), kernels.address(scales), d_expert, prompt.SCALE_WIDTH)
        grid = prompt.down_grid(n, last - first, top_k, d_model)
        args = [hidden, layer.groups, given, int(kinds[2]), y, d_model]
        kernels.run(SOURCE, "down_prompt", grid, prompt.TILE_THREADS, args, prompt.TILE_SHARED_BYTES)
    wanted_h, wanted_y = np.empty_like(h, np.float32), np.empty_like(y)
    for row, pair in enumerate(layer.pairs):
        values, token = layer.values[experts.reshape(-1)[pair]], x[pair // top_k].astype(np.float32)
        wanted_h[row] = swiglu(values[0] @ token, values[1] @ token)
        wanted_y[pair] = expert_ffn(token[None], *values)[0]
    check("gate_up_prompt", h * np.repeat(scales, prompt.SCALE_WIDTH, axis=1)[:, :d_expert], wanted_h)
    check("down_prompt", y, wanted_y)


def test_experts_that_were_copied(kernels: KernelRunner, rng: np.random.Generator) -> None:
    """Experts are found in a staging buffer by their place; values beyond float16's range come out."""
    n, top_k, n_experts, d_model, d_expert, first = 4, 2, 5, 256, 288, 2
    kinds = (Type.F16, Type.F16, Type.F16)
    experts = np.stack([rng.choice(n_experts, top_k, replace=False) for _ in range(n)]).astype(np.int32)
    order = rng.permutation(n_experts).astype(np.int32)
    layer = Layer(kernels, rng, kinds, experts, n_experts, d_model, d_expert, order)
    matrix_bytes = d_expert * d_model * 2
    up, down, stride = matrix_bytes + 256, 2 * matrix_bytes + 512, 3 * matrix_bytes + 768
    staged = np.full((n_experts - first, stride), 0xFF, np.uint8)
    for place in range(first, n_experts):
        for offset, (raw, _) in zip((0, up, down), layer.found[order[place]], strict=True):
            staged[place - first, offset : offset + matrix_bytes] = raw.reshape(-1)
    given = Experts(0, kernels.address(staged), stride, up, down, first, n_experts)
    x = (rng.standard_normal((n, d_model)) * 700).astype(np.float16)
    h = np.full((n * top_k, d_expert), np.nan, np.float16)
    scales = np.full((n * top_k, -(-d_expert // prompt.SCALE_WIDTH)), np.nan, np.float32)
    y = np.full((n * top_k, d_model), np.nan, np.float32)
    args: list[Any] = [HalfRows.unscaled(kernels.address(x), d_model), layer.groups, given, 1, 1]
    args += [h, scales, d_expert, top_k]
    grid = prompt.gate_up_grid(n, n_experts - first, top_k, d_expert)
    for array in (h, scales, y):
        kernels.address(array)
    kernels.run(SOURCE, "gate_up_prompt", grid, prompt.TILE_THREADS, args, prompt.TILE_SHARED_BYTES)
    hidden = HalfRows(kernels.address(h), kernels.address(scales), d_expert, prompt.SCALE_WIDTH)
    grid = prompt.down_grid(n, n_experts - first, top_k, d_model)
    args = [hidden, layer.groups, given, 1, y, d_model]
    kernels.run(SOURCE, "down_prompt", grid, prompt.TILE_THREADS, args, prompt.TILE_SHARED_BYTES)
    places = np.argsort(order)[experts.reshape(-1)]
    assert np.isnan(y[places < first]).all()
    assert np.nanmax(scales) > 1
    for pair in np.flatnonzero(places >= first):
        values, token = layer.values[experts.reshape(-1)[pair]], x[pair // top_k].astype(np.float32)
        check("down_prompt", y[pair], expert_ffn(token[None], *values)[0])
