"""Matrix products for one token of each of several sequences."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from strata_kernels.batch import STRIP_ROWS, THREADS, expert_shape, matmul_blocks, staged_bytes
from strata_kernels.prompt import Groups
from strata_kernels.reference import swiglu
from strata_kernels.structs import Matrix

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import in_eights, random_matrix
from tests.helpers.tensor_blocks import KINDS

F32 = npt.NDArray[np.float32]
HIDDEN_SCALE = np.float32(1 / 16)
SHARED_BYTES_MAX = 227 * 1024


@pytest.fixture(params=[False, True], ids=["staged", "in place"])
def in_place(request: pytest.FixtureRequest) -> bool:
    """Whether matrices are read where they lie."""
    return bool(request.param)


def source(in_place: bool) -> str:
    """The kernels' file."""
    return "batch_matmul_in_place.cu" if in_place else "batch_matmul.cu"


def shared_bytes(in_place: bool, *rows: tuple[Type, int]) -> int:
    """For strips of rows of so many values."""
    if in_place:
        return 0
    sizes = [n // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1] for kind, n in rows]
    size = staged_bytes(sizes, SHARED_BYTES_MAX)
    assert size > 0
    return size


def columns(kind: Type, n: int) -> int:
    """About n, as the type's blocks allow."""
    return -(-n // GGML_QUANT_SIZES[kind][0]) * GGML_QUANT_SIZES[kind][0]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_type(kernels: KernelRunner, rng: np.random.Generator, in_place: bool, kind: Type) -> None:
    """Rows of every type times a few tokens; numbers of columns that warps and lanes cannot share evenly."""
    n, rows, k = 3, 19, columns(kind, 96)
    raw, values = random_matrix(kind, rows, k, rng)
    x = rng.standard_normal((n, k)).astype(np.float16)
    y = np.full((n, rows), np.nan, np.float32)
    matrix, none = Matrix(kernels.address(raw), int(kind), rows), Matrix(0, 0, 0)
    args = [in_eights(x), matrix, none, none, y, n, k, rows, 0]
    grid, shared = matmul_blocks(rows), shared_bytes(in_place, (kind, k))
    kernels.run(source(in_place), "matmul_rows", grid, THREADS, args, shared, types=[kind.name])
    check("matmul_rows", y, x.astype(np.float32) @ values.T)


@pytest.mark.parametrize("kinds", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.F16, Type.Q8_0, Type.F32)], ids=str)
@pytest.mark.parametrize("n", [1, 8, 17, 64])
def test_three_matrices(
    kernels: KernelRunner, rng: np.random.Generator, in_place: bool, kinds: tuple[Type, ...], n: int
) -> None:
    """Results of three matrices side by side, stored or added; a token's do not depend on its neighbours."""
    rows, k = (32, 16, 13), 768
    found = [random_matrix(kind, count, k, rng) for kind, count in zip(kinds, rows, strict=True)]
    matrices = [Matrix(kernels.address(raw), int(kind), len(raw)) for kind, (raw, _) in zip(kinds, found, strict=True)]
    x = rng.standard_normal((n, k)).astype(np.float16)
    wanted = np.concatenate([x.astype(np.float32) @ values.T for _, values in found], axis=1)
    stride = sum(rows) + 3
    grid, shared = matmul_blocks(*rows), max(shared_bytes(in_place, (kind, k)) for kind in kinds)
    types = [kind.name for kind in set(kinds)]

    def product(x: npt.NDArray[np.float16], before: F32, add: int) -> F32:
        y = before.copy()
        args: list[Any] = [in_eights(x), *matrices, y, len(x), k, stride, add]
        kernels.run(source(in_place), "matmul_rows", grid, THREADS, args, shared, types=types)
        assert np.array_equal(y[:, sum(rows) :], before[:, sum(rows) :])
        return y[:, : sum(rows)]

    y = product(x, np.full((n, stride), np.float32(7)), 0)
    check("matmul_rows", y, wanted)
    before = rng.standard_normal((n, stride)).astype(np.float32)
    check("matmul_rows", product(x, before, 1) - before[:, : sum(rows)], wanted)
    if n > 1:
        some = np.arange(n)[::-1][: n // 2]
        assert np.array_equal(product(x[some], np.zeros((len(some), stride), np.float32), 0), y[some])


@pytest.mark.parametrize(
    "kinds", [(Type.Q4_K, Type.Q4_K, Type.Q6_K), (Type.IQ3_S, Type.Q4_K, Type.IQ4_XS), (Type.F16, Type.F16, Type.F16)],
    ids=str,
)  # fmt: skip
def test_experts(
    kernels: KernelRunner, rng: np.random.Generator, in_place: bool, kinds: tuple[Type, Type, Type]
) -> None:
    """Each chosen expert's network of its own rows, whatever blocks share them; some have one row, some many."""
    n, n_experts, top_k, d_model, d_expert = 11, 7, 3, 512, 256
    shapes = ((d_expert, d_model), (d_expert, d_model), (d_model, d_expert))
    found = [
        [random_matrix(kind, *shape, rng) for kind, shape in zip(kinds, shapes, strict=True)] for _ in range(n_experts)
    ]
    table = np.array([[kernels.address(raw) for raw, _ in row] for row in found], np.uint64)
    chosen = np.argsort(rng.random((n, n_experts)) + 2.0 * (np.arange(n_experts) % 3 == 1), axis=1)[:, :top_k]
    experts = chosen.reshape(-1)
    order = np.argsort(experts, kind="stable").astype(np.int32)
    counts = np.bincount(experts, minlength=n_experts)
    tiles = [(e, e, int(counts[:e].sum()), int(counts[e])) for e in range(n_experts) if counts[e]]
    first_tiles = np.zeros(n_experts + 1, np.int32)
    first_tiles[n_experts] = len(tiles)
    tile_words = np.array(tiles, np.int32)
    groups = Groups(kernels.address(order), kernels.address(first_tiles), kernels.address(tile_words))
    x = rng.standard_normal((n, d_model)).astype(np.float16)
    types = [kind.name for kind in set(kinds)]

    hidden = np.full((n * top_k, d_expert), np.nan, np.float16)
    stages = 1 if in_place else int(rng.integers(1, 5))
    args = [x, groups, table, int(kinds[0]), int(kinds[1]), hidden, n_experts, top_k, d_model, d_expert]
    staged = shared_bytes(in_place, (kinds[0], d_model), (kinds[1], d_model))
    args, shared = [*args, stages, staged], stages * staged
    grid = int(rng.choice([1, 5, 64, len(tiles) * d_expert // STRIP_ROWS + 3]))
    kernels.run(source(in_place), "gate_up_rows", grid, THREADS, args, shared, types=types)
    wanted = np.stack(
        [
            swiglu(*(values @ x[pair // top_k].astype(np.float32) for _, values in found[experts[pair]][:2]))
            for pair in order
        ]
    )
    check("gate_up_rows", hidden.astype(np.float32), HIDDEN_SCALE * wanted)

    y = np.full((n * top_k, d_model), np.nan, np.float32)
    args = [hidden, groups, table, int(kinds[2]), y, n_experts, d_model, d_expert]
    staged = shared_bytes(in_place, (kinds[2], d_expert), (kinds[2], d_expert))
    args, shared = [*args, stages, staged], stages * staged
    kernels.run(source(in_place), "down_rows", grid, THREADS, args, shared, types=types)
    given = hidden.astype(np.float32) / HIDDEN_SCALE
    wanted = np.zeros_like(y)
    for at, pair in enumerate(order):
        wanted[pair] = found[experts[pair]][2][1] @ given[at]
    check("down_rows", y, wanted)


def test_large_results(kernels: KernelRunner) -> None:
    """Hidden values beyond float16's range keep their size up to a million, and become that beyond it."""
    d_model, d_expert = 32, 16
    up = np.zeros((d_expert, d_model), np.float32)
    up[0, 0], up[1, 0] = 400, 60000
    raw = up.view(np.uint8).reshape(d_expert, -1)
    table = np.full((1, 3), kernels.address(raw), np.uint64)
    pairs, first_tiles = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    tiles = np.array([(0, 0, 0, 1)], np.int32)
    groups = Groups(kernels.address(pairs), kernels.address(first_tiles), kernels.address(tiles))
    x = np.full((1, d_model), 2, np.float16)
    hidden = np.full((1, d_expert), np.nan, np.float16)
    args = [x, groups, table, int(Type.F32), int(Type.F32), hidden, 1, 1, d_model, d_expert, 1, 0]
    kernels.run("batch_matmul_in_place.cu", "gate_up_rows", 1, THREADS, args, types=["F32"])
    assert hidden[0].tolist() == [40000.0, 65504.0, *[0.0] * (d_expert - 2)]


@pytest.mark.parametrize(
    "row_bytes, stages, blocks, in_place",
    [((1152, 1152), 2, 2, False), ((432, 432), 4, 2, False), ((630, 630), 4, 2, False), ((4096, 4096), 1, 1, False),
     ((8192, 8192), 1, 2, True)],
)  # fmt: skip
def test_shapes_over_experts(row_bytes: tuple[int, ...], stages: int, blocks: int, in_place: bool) -> None:
    """As many stages as two blocks of a multiprocessor can have; one block where two do not fit."""
    shape = expert_shape(132, SHARED_BYTES_MAX, row_bytes)
    assert (shape.stages, shape.blocks) == (stages, 132 * blocks)
    assert (shape.shared_bytes == 0) == in_place
    assert shape.shared_bytes <= SHARED_BYTES_MAX
