"""The choice of the next token."""

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from strata_kernels import reference
from strata_kernels.structs import (
    ONE_ROW,
    RING_WORDS,
    SAMPLE_THREADS,
    SampleOptions,
    SampleRows,
    Step,
    sample_blocks,
    sample_workspace_bytes,
)

from strata_client.sampler import Sampler, SamplerOptions
from tests.helpers.kernel_runner import KernelRunner
from vmmd.errors import InvalidRequest

F32 = npt.NDArray[np.float32]
INF = float("inf")
FAILED = (1 << 64) - 1
POISON = 0xFFC0FFEE


@dataclass(frozen=True)
class Options:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 1


class Sequence:
    """A sequence on the device: its step, its tokens and the host's ring."""

    def __init__(self, kernels: KernelRunner, n_tokens: int, blocks: int | None = None, position: int = 100) -> None:
        self._kernels = kernels
        self.n_tokens = n_tokens
        self.blocks = blocks or sample_blocks(n_tokens)
        self.seen = np.zeros(-(-n_tokens // 32) + 1, np.uint32)
        self.seen[-1] = POISON  # of ids that there are not
        self.workspace = np.zeros(sample_workspace_bytes(n_tokens, self.blocks), np.uint8)
        self.step = np.zeros(1, np.dtype([("number", np.uint64), ("position", np.int32), ("token", np.int32)]))
        self.step[0] = (7, position, 3)
        self.ring = np.full(RING_WORDS, POISON, np.uint64)
        self.retired = np.full(1, 6, np.uint64)
        self.first_position = position

    def sample(self, logits: F32, options: Options) -> int:
        """What the kernel stores in the ring; checks all else that it does."""
        given = SampleOptions(
            options.temperature,
            options.top_p,
            options.min_p,
            options.repeat_penalty,
            options.seed,
            options.top_k,
            self.first_position,
        )
        before, ring, seen = self.step[0].copy(), self.ring.copy(), self.seen.copy()
        number = int(before["number"])
        constant = [logits, np.frombuffer(bytes(given), np.uint8)]
        logits.flags.writeable = False
        arguments: list[Any] = [constant[0], self.n_tokens, constant[1], self.seen, self.workspace, self.step]
        arguments += [self.ring, self.retired, ONE_ROW]
        self._kernels.run("sample.cu", "sample", self.blocks, SAMPLE_THREADS, arguments)
        slot = int(self.ring[number % RING_WORDS])
        ring[number % RING_WORDS] = slot
        assert np.array_equal(self.ring, ring)
        assert self.retired[0] == number and self.step[0]["number"] == number + 1
        assert self.step[0]["position"] == before["position"] + 1
        if slot == FAILED:
            assert self.step[0]["token"] == before["token"]
        else:
            assert self.step[0]["token"] == slot
            seen[slot // 32] |= np.uint32(1 << slot % 32)
        assert np.array_equal(self.seen, seen)
        return slot

    def see(self, tokens: npt.NDArray[np.int64]) -> None:
        """Marks tokens of a prompt."""
        np.bitwise_or.at(self.seen, tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32))


def wanted(logits: F32, options: Options, draw: int = 0, seen: npt.NDArray[np.int64] | None = None) -> int | None:
    return reference.sample(
        logits,
        np.zeros(0, np.int64) if seen is None else seen,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        uniform=reference.uniform(options.seed, draw),
    )


def normal(n: int, scale: float = 4, seed: int = 0) -> F32:
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def sizes(kernels: KernelRunner) -> list[tuple[int, int | None]]:
    """Vocabularies and grids: odd ones, one block, more blocks than needed, and a GPU's usual ones."""
    few = [(1, None), (5, None), (33, 2), (1000, None), (1001, 7), (5121, None)]
    return [*few, (151_936, None), (151_669, 64), (327_679, None)] if kernels.on_gpu else few


LIMITS = [
    Options(),
    Options(temperature=0.0),
    Options(top_k=1),
    Options(temperature=0.7),
    Options(temperature=30.0),
    Options(top_k=40),
    Options(top_k=3, temperature=2.0),
    Options(top_k=300, temperature=5.0),
    Options(top_k=2000, temperature=5.0),
    Options(top_k=10_000_000),
    Options(top_p=0.9),
    Options(top_p=0.0),
    Options(top_p=0.9999),
    Options(min_p=0.05),
    Options(min_p=1.0),
    Options(min_p=1e-6, temperature=10.0),
    Options(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8),
    Options(top_k=2000, top_p=0.99, min_p=1e-4, temperature=3.0),
    Options(temperature=1e300, top_k=2),
    Options(temperature=5e-324),
]


@pytest.mark.parametrize("options", LIMITS, ids=str)
def test_choice(kernels: KernelRunner, options: Options) -> None:
    """Every limit, alone and with others, chooses what the reference does, on vocabularies of any size."""
    for n, blocks in sizes(kernels):
        sequence = Sequence(kernels, n, blocks)
        for draw in range(3):
            logits = normal(n, seed=draw)
            given = replace(options, seed=n)
            assert sequence.sample(logits, given) == wanted(logits, given, draw), (n, draw)


@pytest.mark.parametrize(
    "options",
    [
        Options(top_p=0.9),
        Options(top_p=0.5, min_p=0.9),
        Options(top_k=2500, temperature=0.9),
        Options(top_k=3000, top_p=0.7),
        Options(min_p=0.5, temperature=2.0),
    ],
    ids=str,
)
def test_flat_logits(kernels: KernelRunner, options: Options) -> None:
    """Limits that end far beyond the likeliest tokens are found as well."""
    for n in (5000, 151_936) if kernels.on_gpu else (5000,):
        sequence = Sequence(kernels, n, max(2, sample_blocks(n)))
        for draw in range(6 if kernels.on_gpu else 4):
            logits = normal(n, 0.2, seed=draw)
            if draw % 2:
                logits = np.repeat(logits, 2)[:n]  # limits end between equals
            assert sequence.sample(logits, options) == wanted(logits, options, draw)


@pytest.mark.parametrize("options", [*LIMITS[:2], *LIMITS[5:9], LIMITS[10], LIMITS[13], LIMITS[16]], ids=str)
def test_equals(kernels: KernelRunner, options: Options) -> None:
    """Of equal logits the lower ids count as the likelier."""
    rng = np.random.default_rng(3)
    n = 151_936 if kernels.on_gpu else 2500
    same = np.zeros(n, np.float32)
    same[::2] = -0.0
    coarse = rng.integers(-3, 3, n).astype(np.float32)
    for draw, logits in enumerate((same, coarse, coarse[::-1].copy())):
        sequence = Sequence(kernels, n, max(2, sample_blocks(n)), position=draw)
        assert sequence.sample(logits, options) == wanted(logits, options), draw


@pytest.mark.parametrize("options", [LIMITS[i] for i in (0, 1, 5, 10, 13, 16)], ids=str)
def test_shapes_of_logits(kernels: KernelRunner, options: Options) -> None:
    """Ruled out tokens, one block's tokens that are all the likeliest, and the largest numbers come right."""
    n = 151_936 if kernels.on_gpu else 3000
    few = np.full(n, -INF, np.float32)
    few[[0, 17, n - 1]] = 1, 2, 1.5
    one = np.full(n, -INF, np.float32)
    one[n - 2] = -1e38
    falling = np.linspace(20, -20, n, dtype=np.float32)
    block = normal(n, 1)
    block.reshape(-1, n // 1)[0, : n // 64 * 64].reshape(-1, 2, 32)[:, 1] += 12  # the runs of every second block
    large = np.where(normal(n) > 0, 3e38, -3e38).astype(np.float32)
    for draw, logits in enumerate((few, one, falling, falling[::-1].copy(), block, large)):
        sequence = Sequence(kernels, n, max(2, sample_blocks(n)), position=draw)
        assert sequence.sample(logits, options) == wanted(logits, options), draw


@pytest.mark.parametrize("options", [LIMITS[i] for i in (0, 1, 10, 16)], ids=str)
def test_repeat_penalty(kernels: KernelRunner, options: Options) -> None:
    """Tokens of the prompt and those chosen are penalized; so a sequence is that of the host's sampler."""
    n = 151_936 if kernels.on_gpu else 2000
    given = replace(options, repeat_penalty=1.3, seed=99)
    sequence = Sequence(kernels, n, max(2, sample_blocks(n)))
    prompt = np.array([0, 31, 32, n - 1, n // 2], np.int64)
    sequence.see(prompt)
    sampler = Sampler(SamplerOptions(**vars(given)))
    seen = set(prompt.tolist())
    for draw in range(6):
        logits = normal(n, 1, seed=draw)
        logits[prompt] += np.float32(2)
        token = sampler.sample(logits, seen)
        assert sequence.sample(logits, given) == token
        seen.add(token)


def test_extreme_penalties(kernels: KernelRunner) -> None:
    """A penalty that overflows float32 gives its largest number, and one that rules nothing in leaves -inf."""
    logits = np.array([2, -1e38, -INF, 1e38, -2], np.float32)
    for penalty in (1e-300, 1e-5, 1e5, 1e300):
        for options in (Options(temperature=0.0), Options(top_k=3, temperature=1e37)):
            given = replace(options, repeat_penalty=penalty)
            sequence = Sequence(kernels, 5)
            sequence.see(np.arange(5))
            assert sequence.sample(logits, given) == wanted(logits, given, seen=np.arange(5)), (penalty, options)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_logits_that_are_not_finite(kernels: KernelRunner, bad: float) -> None:
    """NaN, inf and no possible token are told to the host; the step is retired all the same, and the next one works."""
    n = 151_936 if kernels.on_gpu else 2000
    for options in (Options(), Options(temperature=0.0), Options(top_k=40, top_p=0.9)):
        sequence = Sequence(kernels, n, max(2, sample_blocks(n)))
        logits = normal(n)
        if bad == -INF:
            logits[:] = bad
        else:
            logits[n - 7] = bad
        assert sequence.sample(logits, options) == FAILED
        good = normal(n)
        assert sequence.sample(good, options) == wanted(good, options, draw=1)


def test_tokens_past_the_last_are_not_read(kernels: KernelRunner) -> None:
    """Logits of ids that the vocabulary does not have are left alone, whatever they are."""
    logits = normal(1500)
    logits[1111:] = np.nan
    for options in (Options(), Options(top_k=5), Options(temperature=0.0)):
        assert Sequence(kernels, 1111).sample(logits, options) == wanted(logits[:1111], options)


@pytest.mark.parametrize("options", [Options(), Options(top_k=4), Options(top_p=0.9, temperature=0.5)], ids=str)
def test_frequencies(kernels: KernelRunner, options: Options) -> None:
    """Tokens come as often as their probabilities say (chi-square)."""
    logits = np.array([0.0, 2.0, 1.0, 2.0, -1.0, 0.5], np.float32)
    n_draws = 2000 if kernels.on_gpu else 200
    sequence = Sequence(kernels, 6)
    counts = np.bincount([sequence.sample(logits, options) for _ in range(n_draws)], minlength=6)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64))
    n = options.top_k or 6
    if options.top_p < 1:
        n = 1 + int(np.count_nonzero(np.cumsum(weights / weights.sum())[:-1] < options.top_p))
    chances = np.zeros(6)
    chances[order[:n]] = weights[:n] ** (1 / options.temperature)
    chances /= chances.sum()
    assert not counts[chances == 0].any()
    expected = chances[chances > 0] * n_draws
    assert np.sum((counts[chances > 0] - expected) ** 2 / expected) < 20.5  # 5 degrees of freedom, 0.1 %


def test_seeds_and_positions(kernels: KernelRunner) -> None:
    """The draw follows from the seed and the position alone, over all 64 bits of the seed."""
    logits = normal(2000, 1)
    for seed in (0, 1, 1 << 32, (1 << 64) - 1):
        options = Options(seed=seed)
        tokens = []
        for start in (0, 50_000):
            sequence = Sequence(kernels, 2000, position=start)
            tokens.append([sequence.sample(logits, options) for _ in range(3)])
        assert tokens[0] == tokens[1] == [wanted(logits, options, draw) for draw in range(3)]


def test_rows(kernels: KernelRunner) -> None:
    """Sequences that choose at once choose as each alone would, from what is its own; none retires."""
    n_tokens, stride, n, rows_max, position = 700, 704, 3, 4, 60
    options = [Options(), Options(temperature=0.0, repeat_penalty=2.0), Options(top_k=20, seed=5)]
    given = [SampleOptions(o.temperature, o.top_p, o.min_p, o.repeat_penalty, o.seed, o.top_k, 50) for o in options]
    logits = np.stack([np.resize(normal(n_tokens, seed=row), stride) for row in range(n)])
    seen = np.zeros((n, 22), np.uint32)
    seen[1, 3] = 1 << 7
    logits[1, 3 * 32 + 7] = 30  # the likeliest, but for the penalty
    logits[1, 5] = 20
    steps = np.frombuffer(bytearray(b"".join(bytes(Step(35, position, 1)) for _ in range(n))), np.uint8).copy()
    workspace_bytes = -(-sample_workspace_bytes(n_tokens) // 16) * 16
    workspace = np.zeros((n, workspace_bytes), np.uint8)
    ring = np.full((RING_WORDS, rows_max), POISON, np.uint64)
    packed = np.frombuffer(b"".join(map(bytes, given)), np.uint8)
    args = [logits, n_tokens, packed, seen, workspace, steps, ring, ctypes.c_uint64(0)]
    args.append(SampleRows(stride, 22, workspace_bytes, rows_max))
    kernels.run("sample.cu", "sample", (sample_blocks(n_tokens), n), SAMPLE_THREADS, args)
    tokens = [
        wanted(row[:n_tokens], option, position - 50, np.array([3 * 32 + 7]) if i == 1 else None)
        for i, (row, option) in enumerate(zip(logits, options, strict=True))
    ]
    assert ring[35 % RING_WORDS].tolist() == [*tokens, POISON]
    assert np.all(np.delete(ring, 35 % RING_WORDS, axis=0) == POISON)
    for row, token in enumerate(tokens):
        after = Step.from_buffer_copy(steps[16 * row :])
        assert token is not None and (after.number, after.position, after.token) == (36, position + 1, token)
        assert seen[row, token // 32] >> (token % 32) & 1


def test_layout() -> None:
    """The structs have the sizes that the kernel knows, and a vocabulary that it cannot take is refused."""
    assert ctypes.sizeof(SampleOptions) == 48 and ctypes.sizeof(Step) == 16
    assert sample_blocks(151_936) == 30 and sample_workspace_bytes(151_936) % 8 == 0
    with pytest.raises(InvalidRequest, match="327680 are the most"):
        sample_blocks(327_681)
