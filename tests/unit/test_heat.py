"""Heat: what a session's counts are worth, and how little a hostile one can claim."""

import numpy as np
import pytest

from vmmd.core.heat import PROMPT_WEIGHT, Counts, contribution, decayed

HUGE = (1 << 64) - 1
N = 4


def counts(tokens: int, decode: list[int], prompt_tokens: int = 0, prompt: list[int] | None = None) -> Counts:
    return Counts(tokens, prompt_tokens, np.array(decode, np.uint64), np.array(prompt or [0] * N, np.uint64))


NOTHING = counts(0, [0] * N)


def test_routings_a_token() -> None:
    """A session adds its routings a token since the last time."""
    before = counts(10, [10, 0, 0, 5])
    found = contribution(before, counts(14, [12, 4, 0, 7]), 2)
    assert found is not None
    np.testing.assert_allclose(found, [0.5, 1.0, 0.0, 0.5])


def test_fast_sessions_do_not_outvote() -> None:
    """A session of a thousand tokens adds what one of ten does."""
    slow = contribution(NOTHING, counts(10, [10, 5, 0, 5]), 2)
    fast = contribution(NOTHING, counts(1000, [1000, 500, 0, 500]), 2)
    assert slow is not None and fast is not None
    np.testing.assert_allclose(slow, fast)


def test_prompts_count_less() -> None:
    """A prompt's tokens weigh less than decoded ones."""
    found = contribution(NOTHING, counts(0, [0] * N, 8, [8, 0, 4, 4]), 2)
    assert found is not None
    np.testing.assert_allclose(found, PROMPT_WEIGHT * np.array([1, 0, 0.5, 0.5]))


@pytest.mark.parametrize(
    "now",
    [
        counts(0, [HUGE] * N),
        counts(0, [0] * N, 0, [HUGE] * N),
        counts(5, [0] * N),
        counts(HUGE, [0] * N),
        NOTHING,
    ],
    ids=["no tokens", "no prompt tokens", "no counts", "tokens without counts", "nothing"],
)
def test_nothing_routed(now: Counts) -> None:
    """A page without tokens or without counts adds nothing."""
    assert contribution(NOTHING, now, 2) is None


def test_backwards() -> None:
    """Counters that run backwards add nothing, each for itself."""
    before = counts(10, [9, 9, HUGE, 9], 10, [9] * N)
    assert contribution(before, counts(9, [HUGE] * N), 2) is None
    assert contribution(before, counts(12, [0] * N, 12, [0] * N), 2) is None
    found = contribution(before, counts(12, [11, 0, 0, 0], 0, [HUGE] * N), 2)
    assert found is not None
    np.testing.assert_allclose(found, [1, 0, 0, 0])


@pytest.mark.parametrize("tokens", [1, 1000, 1 << 62, HUGE])
@pytest.mark.parametrize("prompt_tokens", [0, 1, 1 << 62, HUGE])
@pytest.mark.parametrize("claim", [1, HUGE - 1, HUGE])
def test_hostile_claims(tokens: int, prompt_tokens: int, claim: int) -> None:
    """Whatever a page claims, what it adds is finite, positive and at most what its tokens can have routed to."""
    found = contribution(NOTHING, counts(tokens, [claim] * N, prompt_tokens, [claim] * N), 2)
    assert found is not None
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert found.sum() <= 2 + 1e-9
    assert found.max() <= 1 + PROMPT_WEIGHT


def test_one_expert_at_most_once_a_token() -> None:
    """A page that claims one expert for everything adds one routing a token."""
    found = contribution(NOTHING, counts(10, [HUGE, 0, 0, 0]), 2)
    assert found is not None
    np.testing.assert_allclose(found, [1, 0, 0, 0])


def test_inputs_stay() -> None:
    """Neither page is changed."""
    before, now = counts(1, [1, 2, 3, 4]), counts(9, [9, 9, 9, 9])
    contribution(before, now, 1)
    assert before.decode.tolist() == [1, 2, 3, 4]
    assert now.decode.tolist() == [9, 9, 9, 9]


def test_decay() -> None:
    """An interval in which somebody routed decays what was, and one without changes nothing."""
    heat = np.array([4.0, 0.0])
    assert decayed(heat, [], 0.5) is heat
    np.testing.assert_allclose(decayed(heat, [np.array([0.0, 1.0]), np.array([1.0, 1.0])], 0.5), [3, 2])
    np.testing.assert_allclose(heat, [4, 0])


def test_heat_is_bounded() -> None:
    """A session that claims everything for ever is worth a bounded heat."""
    heat = np.zeros(N)
    most = contribution(NOTHING, counts(1, [HUGE] * N, 1, [HUGE] * N), 2)
    assert most is not None
    for _ in range(1000):
        heat = decayed(heat, [most], 0.7)
    assert heat.sum() <= 2 / (1 - 0.7) + 1e-6
