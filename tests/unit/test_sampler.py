"""Choosing tokens."""

import numpy as np
import pytest
from strata_kernels import reference

from strata_client.models.base import ModelError
from strata_client.sampler import Sampler, SamplerOptions

INF = float("inf")
LOGITS = np.array([0.0, 2.0, 1.0, 2.0, -1.0], np.float32)


def drawn(options: SamplerOptions, logits: np.ndarray = LOGITS, n: int = 300) -> list[int]:
    sampler = Sampler(options)
    return [sampler.sample(logits) for _ in range(n)]


def test_temperature_zero_takes_the_first_of_the_likeliest() -> None:
    """Greedy decoding needs no random numbers, and takes the lowest id of equals."""
    assert set(drawn(SamplerOptions(temperature=0))) == {1}
    assert set(drawn(SamplerOptions(top_k=1))) == {1}


def test_frequencies_follow_the_softmax() -> None:
    """At temperature 1 without limits, tokens appear as often as their probabilities say."""
    counts = np.bincount(drawn(SamplerOptions(seed=1), n=20_000), minlength=5) / 20_000
    wanted = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert np.abs(counts - wanted).max() < 0.015


def test_a_seed_repeats() -> None:
    """The same seed draws the same tokens, another one others."""
    assert drawn(SamplerOptions(seed=7)) == drawn(SamplerOptions(seed=7)) != drawn(SamplerOptions(seed=8))


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        (SamplerOptions(top_k=2, seed=0), {1, 3}),
        (SamplerOptions(top_k=3, seed=0), {1, 2, 3}),
        (SamplerOptions(top_k=99, seed=0), {0, 1, 2, 3, 4}),
        (SamplerOptions(top_p=0.0, seed=0), {1}),
        (SamplerOptions(top_p=0.5, seed=0), {1, 3}),
        (SamplerOptions(min_p=1.0, seed=0), {1, 3}),
        (SamplerOptions(min_p=0.3, seed=0), {1, 2, 3}),
        (SamplerOptions(temperature=1e-6, seed=0), {1, 3}),
        (SamplerOptions(temperature=5e-324, seed=0), {1, 3}),
        (SamplerOptions(temperature=1000, seed=0), {0, 1, 2, 3, 4}),
        (SamplerOptions(temperature=1e300, top_k=2, seed=0), {1, 3}),
    ],
)
def test_limits(options: SamplerOptions, possible: set[int]) -> None:
    """Each limit leaves exactly the tokens that it should, also at its ends."""
    assert set(drawn(options)) == possible


def test_ruled_out_tokens_never_appear() -> None:
    """A logit of -inf is never drawn, however high the temperature."""
    logits = np.array([-INF, 0, -INF, 1, -INF], np.float32)
    assert set(drawn(SamplerOptions(temperature=1e9, seed=0), logits)) == {1, 3}


def test_repeat_penalty_counts_each_token_once() -> None:
    """Positive logits are divided and negative ones multiplied, once however often a token was seen."""
    logits = np.array([-1.0, -1.25, -1.4], np.float32)
    sampler, seen, said = Sampler(SamplerOptions(temperature=0, repeat_penalty=1.3)), [], []
    for _ in range(5):
        said.append(sampler.sample(logits, seen))
        seen.append(said[-1])
    assert said == [0, 1, 0, 0, 0]
    assert Sampler(SamplerOptions(temperature=0, repeat_penalty=3)).sample(np.float32([3, 2]), [0, 0]) == 1
    assert Sampler(SamplerOptions(temperature=0, repeat_penalty=1)).sample(np.float32([3, 2]), [0, 0]) == 0
    assert logits.tolist() == np.float32([-1.0, -1.25, -1.4]).tolist()


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("temperature", [-1.0, INF, float("nan")]),
        ("top_k", [-1]),
        ("top_p", [-0.1, 1.5, float("nan")]),
        ("min_p", [-0.1, 2.0, float("nan")]),
        ("repeat_penalty", [0.0, -1.0, INF, float("nan")]),
        ("seed", [-1, 1 << 64]),
    ],
)
def test_values_out_of_range_name_the_flag(flag: str, values: list[float]) -> None:
    """A senseless value is refused with the flag as it is typed and the range."""
    for value in values:
        with pytest.raises(ValueError, match=f"^--{flag.replace('_', '-')} is .*; it must be "):
            SamplerOptions(**{flag: value})


@pytest.mark.parametrize("bad", [[float("nan"), 1], [1, INF], [-INF, -INF]])
def test_logits_must_be_finite(bad: list[float]) -> None:
    """NaN, infinity and no possible token are errors, not tokens."""
    for options in (SamplerOptions(temperature=0), SamplerOptions()):
        with pytest.raises(ModelError, match="not finite"):
            Sampler(options).sample(np.array(bad, np.float32))


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((1 << 64) - 1, (1 << 128) - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (0x299F31D0A4093822, 0x0370734413198A2E85A308D3243F6A88, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_random_numbers_are_philox(key: int, counter: int, words: str) -> None:
    """The generator gives the words that its authors published."""
    assert reference.philox(key, counter) == tuple(int(word, 16) for word in words.split())


def test_uniform_is_even() -> None:
    """Random numbers fill [0, 1) evenly, and differ between draws and seeds."""
    numbers = np.array([[reference.uniform(seed, draw) for draw in range(5000)] for seed in (0, 1 << 63)])
    assert numbers.min() >= 0 and numbers.max() < 1 and np.unique(numbers).size == 10_000
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert np.sum((counts - 500) ** 2 / 500) < 43.8  # chi-square, 19 degrees of freedom, 0.1 %
    assert abs(np.corrcoef(numbers)[0, 1]) < 0.05
