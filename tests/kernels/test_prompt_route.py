"""Routing of a prompt's tokens, and their groups by expert."""

import ctypes

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from strata_kernels import prompt
from strata_kernels.prompt import TILE_TOKENS, Groups
from strata_kernels.reference import router
from strata_kernels.structs import Heat, Matrix

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import random_matrix
from tests.helpers.tensor_blocks import KINDS

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
SOURCE = "prompt_route.cu"


def run_router(kernels: KernelRunner, x: F32, m: Matrix) -> F32:
    """The parts of the scores, float32 `[splits, n, n_experts]`."""
    n, k = x.shape
    grid = prompt.router_grid(n, m.rows, k)
    scores = np.full((grid[2], n, m.rows), np.nan, np.float32)
    kernels.run(SOURCE, "router_prompt", grid, prompt.ROUTER_THREADS, [x, m, scores, n, k])
    return scores


def run_route(kernels: KernelRunner, scores: F32, top_k: int) -> tuple[I32, F32]:
    """The choice from parts of scores."""
    splits, n, n_experts = scores.shape
    experts, weights = np.full((n, top_k), -1, np.int32), np.full((n, top_k), np.nan, np.float32)
    args = [scores, splits, experts, weights, n, n_experts, top_k]
    kernels.run(SOURCE, "route_prompt", n + 1, prompt.ROUTER_THREADS, args)
    return experts, weights


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_scores_of_every_type(kernels: KernelRunner, rng: np.random.Generator, kind: Type) -> None:
    """A router of any type scores tokens in float32."""
    n, n_experts, k = 18, 35, 512
    x = rng.standard_normal((n, k)).astype(np.float32)
    raw, values = random_matrix(kind, n_experts, k, rng)
    scores = run_router(kernels, x, Matrix(kernels.address(raw), int(kind), n_experts))
    check("router_prompt", scores.sum(axis=0), x.astype(np.float64) @ values.T.astype(np.float64))


@pytest.mark.parametrize("n, n_experts, k, top_k", [(1, 16, 256, 4), (33, 128, 2048, 8), (20, 70, 96, 3)])
def test_choice(kernels: KernelRunner, rng: np.random.Generator, n: int, n_experts: int, k: int, top_k: int) -> None:
    """Tokens go to the experts that the reference chooses, with its weights."""
    x = rng.standard_normal((n, k)).astype(np.float32)
    raw, values = random_matrix(Type.F32, n_experts, k, rng)
    scores = run_router(kernels, x, Matrix(kernels.address(raw), int(Type.F32), n_experts))
    check("router_prompt", scores.sum(axis=0), x.astype(np.float64) @ values.T.astype(np.float64))
    experts, weights = run_route(kernels, scores, top_k)
    sums = np.zeros((n, n_experts), np.float32)
    for part in scores:
        sums += part
    wanted, wanted_weights = router(sums, top_k)
    assert np.array_equal(experts, wanted)
    check("embed", weights, wanted_weights)


def test_equal_scores_go_to_lower_numbers(kernels: KernelRunner, rng: np.random.Generator) -> None:
    """Ties are decided by the number, and scores that are not numbers still choose different experts."""
    scores = np.zeros((2, 6, 512), np.float32)
    scores[0, 1] = rng.integers(0, 3, 512)
    scores[1, 2, ::2] = np.nan
    scores[0, 3, [500, 7]] = 1
    experts, _ = run_route(kernels, scores, 16)
    wanted, _ = router(scores.sum(axis=0)[[0, 1, 3]], 16)
    assert np.array_equal(experts[[0, 1, 3]], wanted)
    assert all(len(set(row)) == 16 and min(row) >= 0 and max(row) < 512 for row in experts.tolist())


@pytest.mark.parametrize("n, n_experts, top_k", [(1, 16, 4), (31, 6, 2), (1000, 128, 8), (300, 5, 5), (9, 512, 16)])
def test_groups(kernels: KernelRunner, rng: np.random.Generator, n: int, n_experts: int, top_k: int) -> None:
    """Each expert gets its tokens in their order, in tiles of 64, and is counted as often."""
    loads = rng.dirichlet(np.full(n_experts, 0.5))
    loads = 0.9 * loads + 0.1 / n_experts
    experts = np.stack([rng.choice(n_experts, top_k, replace=False, p=loads) for _ in range(n)]).astype(np.int32)
    order = rng.permutation(n_experts).astype(np.int32)
    tiles_max = prompt.tiles_max(n, n_experts, top_k)
    pairs, first_tiles = np.full(n * top_k, -1, np.int32), np.full(n_experts + 1, -1, np.int32)
    tiles = np.full((tiles_max, 4), -1, np.int32)
    assert Groups.sizes_bytes(n, n_experts, top_k) == (pairs.nbytes, first_tiles.nbytes, tiles.nbytes)
    groups = Groups(*map(kernels.address, (pairs, first_tiles, tiles)))
    counts, shared = np.full(n_experts, 1 << 40, np.uint64), np.zeros(n_experts, np.uint64)
    heat = Heat(kernels.address(counts), kernels.address(shared))
    args = [experts, order, groups, heat, n, n_experts, top_k]
    kernels.run(SOURCE, "group_prompt", n_experts, prompt.GROUP_THREADS, args)

    places = np.argsort(order)[experts.reshape(-1)]
    assert np.array_equal(pairs, np.argsort(places, kind="stable"))
    found = np.bincount(experts.reshape(-1), minlength=n_experts)
    assert np.array_equal(counts, found + (1 << 40))
    assert np.array_equal(shared, np.where(found, counts, 0))
    wanted, row = [], 0
    for place, expert in enumerate(order):
        assert first_tiles[place] == len(wanted)
        for at in range(0, found[expert], TILE_TOKENS):
            wanted.append((place, expert, row + at, min(TILE_TOKENS, found[expert] - at)))
        row += found[expert]
    assert first_tiles[-1] == len(wanted) <= tiles_max
    assert np.array_equal(tiles[: len(wanted)], wanted)
    assert np.all(tiles[len(wanted) :] == -1)


def test_heat_that_is_not_wanted(kernels: KernelRunner) -> None:
    """Without an array for them, nothing is counted."""
    experts, order = np.array([[1]], np.int32), np.arange(2, dtype=np.int32)
    pairs, first_tiles, tiles = np.full(1, -1, np.int32), np.full(3, -1, np.int32), np.full((1, 4), -1, np.int32)
    groups = Groups(*map(kernels.address, (pairs, first_tiles, tiles)))
    args = [experts, order, groups, Heat(0, 0), ctypes.c_int32(1), 2, 1]
    kernels.run(SOURCE, "group_prompt", 2, prompt.GROUP_THREADS, args)
    assert first_tiles.tolist() == [0, 0, 1] and tiles.tolist() == [[1, 1, 0, 1]] and pairs.tolist() == [0]
