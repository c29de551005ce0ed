"""The routed experts of a token where several devices compute them, and what passes between the devices."""

from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from strata_kernels.decode import ROWS, THREADS, activation_bytes
from strata_kernels.prompt import CARRY_THREADS, ROW_THREADS
from strata_kernels.reference import router, swiglu
from strata_kernels.structs import Activation, Heat, Piece, Sums

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.kernels.test_decode import EPS, F32, MIXES, Experts, Staging, Vector, check_activation, poisoned, staging

__all__ = ["staging"]  # a fixture

N_EXPERTS, D_MODEL, D_EXPERT = 9, 512, 256


def part_of(source: str) -> str:
    """The source with the kernels that take some of the experts."""
    return source.replace("decode", "decode_part")


class Device:
    """One device's share of a layer: the experts with addresses in its table."""

    def __init__(
        self, kernels: KernelRunner, staging: Staging, kinds: tuple[Type, Type, Type], top_k: int, table: Any
    ) -> None:
        self._kernels, self._staging, self._kinds, self._top_k = kernels, staging, kinds, top_k
        self._types = [kind.name for kind in set(kinds)]
        self._table = table

    def gate_up(self, vector: Vector, scores: F32, heat: Heat, rows: int) -> tuple[Any, Activation]:
        """The hidden activation, whose groups of absent experts are not written."""
        packed, hidden = poisoned(self._kernels, self._top_k * D_EXPERT)
        args: list[Any] = [vector.argument, scores, self._table, hidden, heat, N_EXPERTS, self._top_k]
        args += [int(self._kinds[0]), int(self._kinds[1]), D_MODEL, D_EXPERT, EPS]
        self._kernels.run(
            part_of(self._staging.source), "gate_up_part", (D_EXPERT // rows, self._top_k), 16 * rows, args,
            self._staging.size(self._kinds[:2], D_MODEL, rows, activation_bytes(D_MODEL)), types=self._types,
        )  # fmt: skip
        return packed, hidden

    def down(self, hidden: Activation, scores: F32, x: F32, weight: Any, out: Activation, sums: Sums) -> None:
        """Into x."""
        args = [hidden, scores, self._table, x, weight, out, sums, N_EXPERTS, self._top_k]
        self._kernels.run(
            part_of(self._staging.source), "down_part", D_MODEL // ROWS, THREADS,
            [*args, int(self._kinds[2]), D_EXPERT],
            self._staging.size([self._kinds[2]] * self._top_k, D_EXPERT), types=self._types,
        )  # fmt: skip


@pytest.mark.parametrize("kinds", MIXES, ids=str)
@pytest.mark.parametrize("top_k", [1, 5])
@pytest.mark.parametrize("n_devices", [1, 2, 3])
def test_mixture_of_several_devices(
    kernels: KernelRunner, rng: np.random.Generator, staging: Staging, kinds: tuple[Type, Type, Type], top_k: int,
    n_devices: int,
) -> None:  # fmt: skip
    """Each chosen expert is computed once, where it has an address; the first device adds up and counts the heat."""
    vector = Vector(kernels, D_MODEL, rng)
    experts = Experts(kernels, N_EXPERTS, kinds, D_MODEL, D_EXPERT, rng)
    scores = rng.standard_normal(N_EXPERTS).astype(np.float32)
    chosen, weights = router(scores[None], top_k)
    hidden = np.stack([swiglu(*(m @ vector.normed for m in experts.values[expert][:2])) for expert in chosen[0]])
    results = [weights[0, rank] * (experts.values[e][2] @ hidden[rank]) for rank, e in enumerate(chosen[0])]
    of_expert = rng.integers(0, n_devices, N_EXPERTS)
    rows = ROWS if staging.in_place else int(rng.choice([16, 32, 64]))
    x, weight = (rng.standard_normal(D_MODEL).astype(np.float32) for _ in range(2))
    before = x.copy()
    sums = np.full((max(1, n_devices - 1), D_MODEL), np.nan, np.float32)
    counts, shared = (np.zeros(N_EXPERTS, np.uint64) for _ in range(2))
    out_packed, out = poisoned(kernels, D_MODEL)
    for number in reversed(range(n_devices)):
        table = np.where(of_expert[:, None] == number, experts.table, 0).astype(np.uint64)
        device = Device(kernels, staging, kinds, top_k, table)
        heat = Heat(kernels.address(counts), kernels.address(shared)) if number == 0 else Heat(0, 0)
        packed, activation = device.gate_up(vector, scores, heat, rows)
        here = [rank for rank, expert in enumerate(chosen[0]) if of_expert[expert] == number]
        values = packed.view(np.float32)[: top_k * D_EXPERT].reshape(top_k, D_EXPERT)
        assert np.isnan(np.delete(values, here, axis=0)).all()
        if here:
            check("gate_up", values[here], hidden[here])
        nothing = Activation()
        if number:
            device.down(activation, scores, sums[number - 1], np.uint64(0), nothing, Sums())
            if here:
                check("down_part", sums[number - 1], np.sum([results[rank] for rank in here], axis=0))
            else:
                assert np.array_equal(sums[number - 1], np.zeros(D_MODEL))
        else:
            elsewhere = Sums(kernels.address(sums), D_MODEL, n_devices - 1)
            device.down(activation, scores, x, weight, out, elsewhere)
    check("down_part", x - before, np.sum(results, axis=0))
    check_activation(out_packed, "embed", x * weight, (x.reshape(-1, 16) ** 2).sum(axis=1))
    assert np.array_equal(counts, np.bincount(chosen[0], minlength=N_EXPERTS))
    assert np.array_equal(shared, counts)


@pytest.mark.parametrize("sizes", [(16, 0), (4112, 48), (1024, 70000)])
@pytest.mark.parametrize("blocks", [1, 7])
def test_carry(kernels: KernelRunner, rng: np.random.Generator, sizes: tuple[int, int], blocks: int) -> None:
    """Both pieces are copied whole and nothing beside them, however many blocks copy."""
    source, target = (rng.integers(0, 256, sum(sizes) + 16, np.uint8) for _ in range(2))
    before = target.copy()
    source_at, target_at = kernels.address(source), kernels.address(target)
    first = Piece.of(source_at, target_at, sizes[0])
    second = Piece.of(source_at + sizes[0], target_at + sizes[0], sizes[1])
    kernels.run("crossing.cu", "carry", blocks, CARRY_THREADS, [first, second])
    assert np.array_equal(target[: sum(sizes)], source[: sum(sizes)])
    assert np.array_equal(target[sum(sizes) :], before[sum(sizes) :])


@pytest.mark.parametrize("n, d, top_k", [(1, 256, 4), (33, 2048, 8), (2, 96, 16)])
@pytest.mark.parametrize("n_others", [0, 2])
def test_combine_part(
    kernels: KernelRunner, rng: np.random.Generator, n: int, d: int, top_k: int, n_others: int
) -> None:
    """Results of experts that are here, weighted, and others' sums; what nobody has written here is not read."""
    n_experts = 40
    experts = np.stack([rng.permutation(n_experts)[:top_k] for _ in range(n)]).astype(np.int32)
    table = rng.integers(0, 2, (n_experts, 1)).astype(np.uint64) * np.ones((1, 3), np.uint64)
    here = table[experts, 0] != 0
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((n, d), (n, top_k, d)))
    weights = rng.dirichlet(np.ones(top_k), n).astype(np.float32)
    others = rng.standard_normal((max(1, n_others), n, d)).astype(np.float32)
    wanted = np.einsum("nk,nkd->nd", weights * here, y) + others[:n_others].sum(axis=0)
    y[~here] = np.nan
    elsewhere = Sums(kernels.address(others), n * d, n_others)
    for add in (1, 0):
        result = x.copy() if add else np.full_like(x, np.nan)
        args = [result, y, weights, experts, table, elsewhere, n, d, top_k, add]
        kernels.run("crossing.cu", "combine_part", n + 2, ROW_THREADS, args)
        check("combine_prompt", result, x * add + wanted)
