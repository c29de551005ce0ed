"""The kernels of a decode step, attention and sampling apart."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from strata_kernels.decode import ROUTE_THREADS, ROWS, THREADS, activation_bytes, gate_up_rows, staged_bytes
from strata_kernels.reference import router, swiglu
from strata_kernels.structs import Activation, Heat, Matrix, Step

from tests.helpers.kernel_bounds import check
from tests.helpers.kernel_runner import KernelRunner
from tests.helpers.matrices import pack_activation, random_matrix, unpack_activation

F32 = npt.NDArray[np.float32]
SOURCE = "decode.cu"
EPS = np.float32(1e-6)

KINDS = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.IQ3_S]


class Staging:
    """Which kernels run: those that copy rows to shared memory, or those that read them in place."""

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place
        self.source = "decode_in_place.cu" if in_place else "decode.cu"

    def size(self, kinds: Sequence[Type], n: int, rows: int = ROWS, beside_bytes: int = 0) -> int:
        """Shared memory for rows of n values of some types."""
        if self.in_place:
            return 0
        size = staged_bytes([row_bytes(kind, n) for kind in kinds], 227 * 1024, rows, beside_bytes)
        if size == 0:
            pytest.skip("these rows are read in place only")
        return size


def row_bytes(kind: Type, n: int) -> int:
    """Of n values."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    return n // block_values * block_bytes


@pytest.fixture(params=[False, True], ids=["staged", "in place"])
def staging(request: pytest.FixtureRequest) -> Staging:
    """Both."""
    return Staging(request.param)


class Vector:
    """An activation of RMS-normed x in a kernel's memory, and what it stands for."""

    def __init__(self, kernels: KernelRunner, n: int, rng: np.random.Generator) -> None:
        self.x = rng.standard_normal(n).astype(np.float32) * np.float32(3)
        self.weight = (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)
        squares = (self.x.reshape(-1, 16) ** 2).sum(axis=1)
        self.packed = pack_activation(self.x * self.weight, squares)
        self.argument = Activation.at(kernels.address(self.packed), n)
        self.normed: F32 = self.x * self.weight / np.sqrt(np.mean(self.x**2) + EPS)


def poisoned(kernels: KernelRunner, n: int) -> tuple[npt.NDArray[np.uint8], Activation]:
    """Room for an activation of n values."""
    packed = np.full(Activation.size_bytes(n), 0xFF, np.uint8)
    return packed, Activation.at(kernels.address(packed), n)


def matrix(kernels: KernelRunner, kind: Type, rows: int, columns: int, rng: np.random.Generator) -> tuple[Matrix, F32]:
    """A matrix in a kernel's memory, and its values."""
    raw, values = random_matrix(kind, rows, columns, rng)
    return Matrix(kernels.address(raw), int(kind), rows), values


def check_activation(packed: npt.NDArray[np.uint8], operation: str, wanted: F32, squares: F32 | None) -> None:
    """Every part of an activation against what it should stand for."""
    values, rounded, sums, found_squares = unpack_activation(packed, wanted.size)
    check(operation, values, wanted)
    assert np.abs(rounded - values).max() <= np.abs(values).max() / 32512
    assert np.abs(sums - rounded.reshape(-1, 16).sum(axis=1)).max() <= 1e-5 * np.abs(values).max()
    if squares is not None:
        assert np.allclose(found_squares, squares, rtol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, Type.Q2_K, Type.Q3_K, Type.Q5_K, Type.IQ2_XXS, Type.MXFP4], ids=str)
def test_embed(kernels: KernelRunner, rng: np.random.Generator, kind: Type) -> None:
    """A token's row becomes the residual, bit for bit, and the activation of its norm."""
    n, rows = 512, 37
    table, values = matrix(kernels, kind, rows, n, rng)
    weight = rng.standard_normal(n).astype(np.float32)
    x = np.full(n, np.nan, np.float32)
    packed, out = poisoned(kernels, n)
    step = np.frombuffer(bytearray(Step(7, 3, 36)), np.uint8).copy()
    kernels.run(SOURCE, "embed", 1, 256, [table, step, x, weight, out, n], 4 * n, types=[kind.name])
    assert np.array_equal(x, values[36])
    check_activation(packed, "embed", x * weight, (x.reshape(-1, 16) ** 2).sum(axis=1))


@pytest.mark.parametrize("kinds", [(kind,) * 3 for kind in KINDS] + [(Type.Q4_K, Type.Q4_K, Type.Q6_K)], ids=str)
@pytest.mark.parametrize("n", [256, 2048])
def test_qkv(
    kernels: KernelRunner, rng: np.random.Generator, staging: Staging, kinds: tuple[Type, ...], n: int
) -> None:
    """Query, key and value rows of any types, the key's and value's behind the query's."""
    rows = (96, 32, 14)
    vector = Vector(kernels, n, rng)
    found = [matrix(kernels, kind, count, n, rng) for kind, count in zip(kinds, rows, strict=True)]
    out = np.full(sum(rows), np.nan, np.float32)
    args = [vector.argument, *(m for m, _ in found), out, n, EPS]
    shared_bytes = max(staging.size([kind], n) for kind in kinds)
    types = [kind.name for kind in set(kinds)]
    kernels.run(staging.source, "qkv", -(-sum(rows) // ROWS), THREADS, args, shared_bytes, types=types)
    check("matmul", out, np.concatenate([values @ vector.normed for _, values in found]))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", [256, 4096])
def test_attend_out(kernels: KernelRunner, rng: np.random.Generator, staging: Staging, kind: Type, n: int) -> None:
    """The product is added to the residual, and its norm's activation handed on."""
    d_model = 64
    attended = rng.standard_normal(n).astype(np.float32)
    given = pack_activation(attended)
    m, values = matrix(kernels, kind, d_model, n, rng)
    x, weight = (rng.standard_normal(d_model).astype(np.float32) for _ in range(2))
    wanted = x + values @ attended
    packed, out = poisoned(kernels, d_model)
    args = [Activation.at(kernels.address(given), n), m, x, weight, out, n]
    kernels.run(
        staging.source, "attend_out", d_model // ROWS, THREADS, args, staging.size([kind], n), types=[kind.name]
    )
    check("matmul", x, wanted)
    check_activation(packed, "embed", x * weight, (x.reshape(-1, 16) ** 2).sum(axis=1))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("n", [256, 2048])
def test_route(kernels: KernelRunner, rng: np.random.Generator, staging: Staging, kind: Type, n: int) -> None:
    """Scores of every expert."""
    vector = Vector(kernels, n, rng)
    m, values = matrix(kernels, kind, 19, n, rng)
    scores = np.full(19, np.nan, np.float32)
    args = [vector.argument, m, scores, n, EPS]
    kernels.run(staging.source, "route", 19, ROUTE_THREADS, args, staging.size([kind], n, rows=1), types=[kind.name])
    check("matmul", scores, values @ vector.normed)


class Experts:
    """A layer's experts in memory, each matrix by itself."""

    def __init__(
        self, kernels: KernelRunner, n_experts: int, kinds: tuple[Type, Type, Type], d_model: int, d_expert: int,
        rng: np.random.Generator,
    ) -> None:  # fmt: skip
        shapes = ((d_expert, d_model), (d_expert, d_model), (d_model, d_expert))
        self._found = [
            [random_matrix(kind, *shape, rng) for kind, shape in zip(kinds, shapes, strict=True)]
            for _ in range(n_experts)
        ]
        self.values = [[values for _, values in matrices] for matrices in self._found]
        self.table = np.array([[kernels.address(raw) for raw, _ in row] for row in self._found], np.uint64)


MIXES: list[tuple[Type, Type, Type]] = [
    (Type.Q4_K, Type.Q4_K, Type.Q6_K),
    (Type.Q4_K, Type.Q4_K, Type.Q4_K),
    (Type.F16, Type.F16, Type.F16),
    (Type.IQ3_S, Type.Q4_K, Type.IQ4_XS),
    (Type.Q8_0, Type.F32, Type.BF16),
]


@pytest.mark.parametrize("kinds", MIXES, ids=str)
@pytest.mark.parametrize("top_k", [1, 4])
def test_mixture(
    kernels: KernelRunner, rng: np.random.Generator, staging: Staging, kinds: tuple[Type, Type, Type], top_k: int
) -> None:
    """The chosen experts' networks, weighted and added to the residual; each counted once as heat."""
    n_experts, d_model, d_expert = 9, 512, 256
    vector = Vector(kernels, d_model, rng)
    experts = Experts(kernels, n_experts, kinds, d_model, d_expert, rng)
    scores = rng.standard_normal(n_experts).astype(np.float32)
    chosen, weights = router(scores[None], top_k)
    types = [kind.name for kind in set(kinds)]

    counts = np.arange(n_experts, dtype=np.uint64)
    shared = np.zeros(n_experts, np.uint64)
    heat = Heat(kernels.address(counts), kernels.address(shared))
    packed, hidden = poisoned(kernels, top_k * d_expert)
    args: list[Any] = [vector.argument, scores, experts.table, hidden, heat, n_experts, top_k]
    args += [int(kinds[0]), int(kinds[1]), d_model, d_expert, EPS]
    rows = ROWS if staging.in_place else int(rng.choice([16, 32, 64]))
    shared_bytes = staging.size(kinds[:2], d_model, rows, activation_bytes(d_model))
    kernels.run(staging.source, "gate_up", (d_expert // rows, top_k), 16 * rows, args, shared_bytes, types=types)
    wanted = np.stack(
        [swiglu(*(matrix @ vector.normed for matrix in experts.values[expert][:2])) for expert in chosen[0]]
    )
    check_activation(packed, "gate_up", wanted.reshape(-1), None)
    touched = np.bincount(chosen[0], minlength=n_experts)
    assert np.array_equal(counts, np.arange(n_experts) + touched)
    assert np.array_equal(shared, np.where(touched, counts, 0))

    x, weight = (rng.standard_normal(d_model).astype(np.float32) for _ in range(2))
    before = x.copy()
    out_packed, out = poisoned(kernels, d_model)
    args = [hidden, scores, experts.table, x, weight, out, n_experts, top_k, int(kinds[2]), d_expert]
    shared_bytes = staging.size([kinds[2]] * top_k, d_expert)
    kernels.run(staging.source, "down", d_model // ROWS, THREADS, args, shared_bytes, types=types)
    results = [experts.values[expert][2] @ wanted[rank] for rank, expert in enumerate(chosen[0])]
    check("down", x - before, sum(weights[0, rank] * result for rank, result in enumerate(results)))
    check_activation(out_packed, "embed", x * weight, (x.reshape(-1, 16) ** 2).sum(axis=1))


@pytest.mark.parametrize("n_experts, top_k", [(128, 8), (512, 16), (16, 16), (3, 1)])
def test_any_scores_choose_top_k_different_experts(
    kernels: KernelRunner, rng: np.random.Generator, n_experts: int, top_k: int
) -> None:
    """Equal scores go to the lower numbers, and scores that are not numbers choose different experts as well."""
    d_model, d_expert = 64, 16
    vector = Vector(kernels, d_model, rng)
    raw, _ = random_matrix(Type.F32, d_expert, d_model, rng)
    table = np.full((n_experts, 3), kernels.address(raw), np.uint64)
    for scores in (
        np.zeros(n_experts, np.float32),
        np.where(np.arange(n_experts) % 2, np.nan, 1).astype(np.float32),
        rng.integers(0, 3, n_experts).astype(np.float32),
    ):
        counts, shared = (np.zeros(n_experts, np.uint64) for _ in range(2))
        heat = Heat(kernels.address(counts), kernels.address(shared))
        _, hidden = poisoned(kernels, top_k * d_expert)
        args = [vector.argument, scores, table, hidden, heat, n_experts, top_k, 0, 0, d_model, d_expert, EPS]
        kernels.run("decode_in_place.cu", "gate_up", (1, top_k), 256, args, types=["F32"])
        assert counts.max() == 1 and counts.sum() == top_k
        if not np.isnan(scores).any():
            assert sorted(np.flatnonzero(counts)) == sorted(router(scores[None], top_k)[0][0].tolist())


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [17, 33, 64])
def test_head(kernels: KernelRunner, rng: np.random.Generator, staging: Staging, kind: Type, rows: int) -> None:
    """Logits of every id, odd numbers of them too."""
    n = 512
    vector = Vector(kernels, n, rng)
    m, values = matrix(kernels, kind, rows, n, rng)
    logits = np.full(rows, np.nan, np.float32)
    args = [vector.argument, m, logits, n, EPS]
    kernels.run(staging.source, "head", -(-rows // ROWS), THREADS, args, staging.size([kind], n), types=[kind.name])
    check("matmul", logits, values @ vector.normed)


@pytest.mark.parametrize("d_expert, top_k, rows", [(768, 8, 48), (768, 1, 16), (64, 4, 16), (512, 16, 64)])
def test_rows_of_gate_up(d_expert: int, top_k: int, rows: int) -> None:
    """As many as leave no multiprocessor with more than it need have, of those that fit."""
    assert gate_up_rows(d_expert, top_k, 132, 1 << 20, [1152, 1152], 0) == rows
    assert gate_up_rows(d_expert, top_k, 132, 48 << 10, [1152, 1152], 0) == ROWS
    assert gate_up_rows(d_expert, top_k, 132, 16 << 10, [1152, 1152], 0) == ROWS


def test_end_step(kernels: KernelRunner) -> None:
    """A step without a token moves on and is retired under its number."""
    step = np.frombuffer(bytearray(Step(41, 100, 5)), np.uint8).copy()
    retired = np.zeros(1, np.uint64)
    kernels.run(SOURCE, "end_step", 1, 32, [step, ctypes.c_int32(64), retired], types=["F32"])
    after = Step.from_buffer_copy(step)
    assert (after.number, after.position, after.token, retired[0]) == (42, 164, 5, 41)
