"""Counters with rates, and what is believed of a client's counts."""

import numpy as np
import pytest

from vmmd.core.heat import Counts
from vmmd.core.meters import COUNT_MAX, TOKENS_PER_S_MAX, Meter, believed, by_tier, tier_of
from vmmd.core.residency import NOWHERE


def _counts(tokens: int, prompt_tokens: int, decode: list[int], prompt: list[int]) -> Counts:
    return Counts(tokens, prompt_tokens, np.array(decode, np.uint64), np.array(prompt, np.uint64))


def test_rate_is_of_the_window_and_of_a_shorter_life() -> None:
    """A young meter's rate is over its life; an older one's over about a window."""
    meter = Meter(100.0, 5.0)
    assert meter.per_second(100.0) == 0
    meter.add(10)
    assert meter.per_second(101.0) == 10
    for second in range(1, 20):
        meter.mark(100.0 + second)
        meter.add(2)
    assert meter.total == 48
    assert meter.recent == 12
    assert meter.per_second(120.0) == 2
    for second in range(20, 30):
        meter.mark(100.0 + second)
    assert (meter.recent, meter.per_second(130.0)) == (0, 0)


def test_a_counter_stays_where_the_wire_can_carry_it() -> None:
    """Whatever is added, the total fits 64 bits."""
    meter = Meter(0.0)
    for _ in range(5):
        meter.add(1 << 62)
    assert meter.total == COUNT_MAX


def test_counts_that_came_late_are_not_lost() -> None:
    """Tokens are counted before their routings; a look in between loses none of either."""
    zero = _counts(0, 0, [0, 0], [0, 0])
    first = believed(zero, _counts(1, 0, [0, 0], [0, 0]), 1.0)
    second = believed(first, _counts(1, 0, [1, 0], [0, 0]), 1.0)
    assert (first.tokens, second.tokens) == (1, 1)
    assert second.decode.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (_counts(4, 1, [2, 2], [0, 0]), _counts(5, 2, [3, 2], [1, 0])),
        (_counts(7, 3, [1 << 63, 4], [9, 0]), _counts(7, 3, [7, 4], [3, 0])),
        (_counts(1 << 62, 2, [1, 1], [1, 0]), _counts(5 + TOKENS_PER_S_MAX, 2, [3, 2], [1, 0])),
    ],
    ids=["backwards", "more routings than tokens", "more tokens than can be"],
)
def test_what_makes_no_sense_is_clamped(now: Counts, expected: Counts) -> None:
    """Nothing runs backwards, an expert is routed to once a token, and no session evaluates millions a second."""
    found = believed(_counts(5, 2, [3, 2], [1, 0]), now, 0.25)
    assert (found.tokens, found.prompt_tokens) == (expected.tokens, expected.prompt_tokens)
    assert found.decode.tolist() == expected.decode.tolist()
    assert found.prompt.tolist() == expected.prompt.tolist()


def test_amounts_are_summed_by_who_computes() -> None:
    """An expert in the computing device's part is at hand, in another part a peer's, in none at home."""
    tier = tier_of(np.array([0, 1, NOWHERE, 1]), 1)
    assert tier.tolist() == [1, 0, 2, 0]
    assert by_tier(tier, np.array([1, 2, 4, 8], np.uint64)) == [10, 1, 4]
