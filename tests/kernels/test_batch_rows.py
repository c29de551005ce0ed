"""What a step does to the rows of its sequences between matrix products."""

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from strata_kernels import batch
from strata_kernels.prompt import Groups
from strata_kernels.reference import rms_norm, router
from strata_kernels.structs import Heat, Matrix, Step

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import from_eights, in_eights, random_matrix

SOURCE = "batch_rows.cu"
EPS = np.float32(1e-6)


def nans(*shape: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[np.float32]:
    """An output before it is written."""
    return np.full(shape, np.nan, dtype)


def test_begin(kernels: KernelRunner) -> None:
    """Every row gets the step's number, and the turns of its own position."""
    positions, head_dim, base = [0, 70_000, 5], 64, 1e6
    step = np.frombuffer(bytearray(Step(41, 9, 9)), np.uint8)
    steps = np.frombuffer(bytearray(b"".join(bytes(Step(7, position, 3)) for position in positions)), np.uint8).copy()
    table = nans(3, head_dim // 2, 2)
    args = [table, step, steps, ctypes.c_double(base), ctypes.c_double(0.5), head_dim]
    kernels.run(SOURCE, "begin_rows", 3, head_dim // 2, args)
    angles = 0.5 * np.array(positions)[:, None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
    assert np.allclose(table, np.stack([np.cos(angles), np.sin(angles)], axis=-1), atol=1e-6)
    found = [Step.from_buffer_copy(steps[16 * row :]) for row in range(3)]
    assert [(row.number, row.position, row.token) for row in found] == [(41, position, 3) for position in positions]


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q4_K], ids=str)
@pytest.mark.parametrize(
    "n, n_experts, top_k, k", [(1, 128, 8, 256), (5, 6, 2, 512), (64, 33, 16, 256), (3, 512, 16, 256)]
)
def test_route(
    kernels: KernelRunner, rng: np.random.Generator, kind: Type, n: int, n_experts: int, top_k: int, k: int
) -> None:
    """Normed rows, the experts of each by the scores in float32, their weights, the rows of each expert, and heat."""
    x = rng.standard_normal((n, k)).astype(np.float32) * np.float32(3)
    weight = (1 + 0.1 * rng.standard_normal(k)).astype(np.float32)
    raw, values = random_matrix(kind, n_experts, k, rng)
    normed = rms_norm(x, weight, EPS)
    tiles_max = min(n * top_k, n_experts + n * top_k // 64)
    halves, scores = nans(n, k, dtype=np.float16), nans(n, n_experts)
    arrived = np.zeros(n + 1, np.uint32)
    experts, weights = np.full((n, top_k), -1, np.int32), nans(n, top_k)
    pairs, first_tiles = np.full(n * top_k, -1, np.int32), np.full(n_experts + 1, -1, np.int32)
    tiles = np.full((tiles_max, 4), -1, np.int32)
    counts, shared = np.full(n_experts, 1 << 40, np.uint64), np.zeros(n_experts, np.uint64)
    args = [
        x, weight, Matrix(kernels.address(raw), int(kind), n_experts), halves, scores, arrived, experts, weights,
        Groups(*map(kernels.address, (pairs, first_tiles, tiles))),
        Heat(kernels.address(counts), kernels.address(shared)), k, top_k, EPS,
    ]  # fmt: skip
    grid = batch.route_grid(n, n_experts)
    shared_bytes_max = int(rng.choice([227 * 1024, 0]))  # rows of the router are copied, or not
    shared_bytes = batch.route_shared_bytes(k, raw.shape[1], shared_bytes_max)
    kernels.run(SOURCE, "route_rows", grid, batch.ROW_THREADS, args, shared_bytes, types=[kind.name])
    check("norm_rows", halves.astype(np.float32), normed)
    check("route_rows", scores, normed @ values.T)
    assert not arrived.any()
    wanted, wanted_weights = router(scores, top_k)
    assert np.array_equal(experts, wanted)
    check("embed", weights, wanted_weights)

    found = np.bincount(experts.reshape(-1), minlength=n_experts)
    chosen = np.flatnonzero(found)
    firsts = np.concatenate([[0], np.cumsum(found)])
    assert first_tiles.tolist() == np.concatenate([[0], np.cumsum(found > 0)]).tolist()
    assert np.array_equal(tiles[: len(chosen)], [(e, e, firsts[e], found[e]) for e in chosen])
    assert np.all(tiles[len(chosen) :] == -1)
    for expert in chosen:
        of_expert = np.sort(pairs[firsts[expert] : firsts[expert + 1]])
        assert np.array_equal(of_expert, np.flatnonzero(experts.reshape(-1) == expert))
    assert np.array_equal(counts, found + (1 << 40))
    assert np.array_equal(shared, np.where(found, counts, 0))


@pytest.mark.parametrize("n, top_k, d", [(1, 1, 32), (11, 8, 2048), (3, 16, 96), (2, 0, 64)])
def test_combine(kernels: KernelRunner, rng: np.random.Generator, n: int, top_k: int, d: int) -> None:
    """The experts' results are added by weight, and the sums, or the rows as they are, handed on normed."""
    x, y = rng.standard_normal((n, d)).astype(np.float32), rng.standard_normal((n, top_k, d)).astype(np.float32)
    weights, norm = rng.random((n, top_k)).astype(np.float32), rng.standard_normal(d).astype(np.float32)
    wanted = x + np.einsum("nk,nkd->nd", weights, y)
    halves = in_eights(np.full((n, d), np.nan, np.float16), 8)
    args = [x, y, weights, norm, halves, d, top_k, EPS]
    kernels.run(SOURCE, "combine_rows", n, batch.ROW_THREADS, args)
    check("combine_prompt", x, wanted)
    check("norm_rows", from_eights(halves, n).astype(np.float32), rms_norm(wanted, norm, EPS))
    assert np.isnan(from_eights(halves, 16)[n:]).all()
