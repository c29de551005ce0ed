"""Heat: what sessions' counts are worth, how it fades, and how little a hostile page can claim."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from vmmd.core.heat import DOUBT_TOKENS, F64, PROMPT_WEIGHT, Counts, Heat

HUGE = (1 << 64) - 1
N, ROUTED, HALF_LIFE = 4, 2, 100.0


def counts(tokens: int, decode: list[int], prompt_tokens: int = 0, prompt: list[int] | None = None) -> Counts:
    return Counts(tokens, prompt_tokens, np.array(decode, np.uint64), np.array(prompt or [0] * N, np.uint64))


NOTHING = counts(0, [0] * N)


def heat_of(*pages: Counts, start: Counts = NOTHING) -> F64:
    """The heat of one session whose page says this, one after the other."""
    heat = Heat(N, ROUTED, HALF_LIFE)
    heat.join(1, start)
    for page in pages:
        heat.count({1: page})
    return heat.value()


def test_routings_a_token() -> None:
    """A long session's heat is its routings a token."""
    found = heat_of(counts(10_010, [5_010, 10_000, 10, 5_000]), start=counts(10, [10, 0, 10, 0]))
    np.testing.assert_allclose(found, [0.5, 1, 0, 0.5], rtol=0.06)


def test_few_tokens_say_little() -> None:
    """The first tokens of a session count in part, about eight of them half."""
    first = heat_of(counts(1, [1, 1, 0, 0]))
    np.testing.assert_allclose(first, np.array([1, 1, 0, 0]) / (1 + DOUBT_TOKENS))
    later = heat_of(counts(8, [8, 8, 0, 0]))
    np.testing.assert_allclose(later[:2], 0.5, atol=0.02)


def test_it_makes_no_difference_how_often_one_looks() -> None:
    """The same routing counted token by token, or at once, comes to the same heat."""
    pages = [counts(t, [t, t // 2, 0, t - t // 2]) for t in range(1, 301)]
    np.testing.assert_allclose(heat_of(*pages), heat_of(pages[-1]), atol=0.02)


def test_fast_sessions_do_not_outvote() -> None:
    """A session that decodes ten times as many tokens meanwhile adds what a slow one does."""
    heat = Heat(N, 1, HALF_LIFE)
    heat.join(1, NOTHING)
    heat.join(2, NOTHING)
    for n in range(1, 1000):
        heat.count({1: counts(10 * n, [10 * n, 0, 0, 0]), 2: counts(n, [0, n, 0, 0])})
    found = heat.value()
    np.testing.assert_allclose(found[0], found[1], rtol=0.01)
    assert found[2:].sum() == 0


def test_the_last_tokens_count_most() -> None:
    """After a half-life of other tokens, what was routed before counts less than what has been since."""
    found = heat_of(counts(10_000, [10_000, 0, 0, 0]), counts(10_000 + int(HALF_LIFE), [10_000, int(HALF_LIFE), 0, 0]))
    assert found[0] < 0.4 < found[1]


def test_an_idle_session_fades_as_others_decode_and_no_sooner() -> None:
    """Idle time changes nothing; others' tokens halve an idle vote at every half-life; a token brings it back."""
    heat = Heat(N, ROUTED, HALF_LIFE)
    heat.join(1, NOTHING)
    heat.join(2, NOTHING)
    busy = counts(1000, [1000, 0, 0, 0])
    heat.count({1: busy, 2: NOTHING})
    before = heat.value()
    assert not heat.count({1: busy, 2: NOTHING})
    np.testing.assert_array_equal(heat.value(), before)
    for n in range(1, 11):
        assert heat.count({1: busy, 2: counts(10 * n, [0, 10 * n, 0, 0])})
    np.testing.assert_allclose(heat.value()[0], before[0] / 2)
    heat.count({1: counts(1001, [1001, 0, 0, 0]), 2: counts(100, [0, 100, 0, 0])})
    assert heat.value()[0] >= before[0]


def test_prompts_count_less() -> None:
    """A prompt's tokens are weaker evidence: it takes more of them to say the same."""
    prompt = heat_of(counts(0, [0] * N, 16, [16, 0, 8, 8]))
    decoded = heat_of(counts(16, [16, 0, 8, 8]))
    fewer = int(16 * PROMPT_WEIGHT)
    np.testing.assert_allclose(prompt, heat_of(counts(fewer, [fewer, 0, fewer // 2, fewer // 2])))
    assert (prompt <= decoded).all() and prompt[0] < decoded[0]


def test_who_comes_begins_with_what_others_taught() -> None:
    """A session's vote begins with what sessions before it have taught; alone, that is never more than one vote."""
    heat = Heat(N, ROUTED, HALF_LIFE)
    for session in range(1, 50):
        heat.join(session, NOTHING)
        heat.count({session: counts(1000, [1000, 1000, 0, 0])})
        heat.leave(session)
        assert heat.value().sum() <= ROUTED + 1e-9
    taught = heat.value()
    assert taught.sum() > 0.9 * ROUTED
    heat.join(99, NOTHING)
    np.testing.assert_allclose(heat.value(), taught)
    for n in range(16, 97, 16):
        heat.count({99: counts(n, [0, 0, n, n])})
    assert heat.value()[2] > heat.value()[0]


@pytest.mark.parametrize(
    "now",
    [counts(0, [HUGE] * N), counts(0, [0] * N, 0, [HUGE] * N), counts(5, [0] * N), counts(HUGE, [0] * N), NOTHING],
    ids=["no tokens", "no prompt tokens", "no counts", "tokens without counts", "nothing"],
)
def test_nothing_routed(now: Counts) -> None:
    """A page without tokens or without counts adds nothing."""
    assert heat_of(now).tolist() == [0] * N


def test_counts_ahead_of_their_tokens_wait_for_them() -> None:
    """Counts that arrive before their token are not lost."""
    found = heat_of(counts(0, [1, 1, 0, 0]), counts(1, [1, 1, 0, 0]))
    np.testing.assert_array_equal(found, heat_of(counts(1, [1, 1, 0, 0])))


def test_backwards() -> None:
    """Counters that run backwards add nothing, each for itself, and later tokens count again."""
    before = counts(10, [9, 9, HUGE, 9], 10, [9] * N)
    assert heat_of(counts(9, [HUGE] * N), start=before).tolist() == [0] * N
    assert heat_of(counts(12, [0] * N, 12, [0] * N), start=before).tolist() == [0] * N
    found = heat_of(counts(12, [11, 0, 0, 0], 0, [HUGE] * N), start=before)
    assert found[0] > 0 and found[1:].tolist() == [0, 0, 0]
    assert heat_of(counts(9, [0] * N), counts(10, [1, 0, 0, 0]), start=before)[0] > 0


numbers = st.one_of(st.integers(0, 40), st.sampled_from([1 << 31, 1 << 62, HUGE - 1, HUGE]))
rows = st.lists(numbers, min_size=N, max_size=N)
pages = st.builds(counts, numbers, rows, numbers, rows)


@given(st.lists(st.tuples(st.integers(1, 3), pages), max_size=12))
def test_hostile_claims(said: list[tuple[int, Counts]]) -> None:
    """Whatever pages claim, heat is finite, positive, and at most what its sessions' tokens can have routed to."""
    heat = Heat(N, ROUTED, HALF_LIFE)
    for session in (1, 2, 3):
        heat.join(session, NOTHING)
    for session, page in said:
        heat.count({session: page})
        found = heat.value()
        assert np.isfinite(found).all() and (found >= 0).all()
        assert found.sum() <= 3 * ROUTED + 1e-6
        assert found.max() <= 3 + 1e-6
    for session in (1, 2, 3):
        heat.leave(session)
    assert heat.value().sum() <= ROUTED + 1e-6
    assert ((heat.learned() >= 0) & (heat.learned() <= 1)).all()


def test_inputs_stay() -> None:
    """No page is changed."""
    before, now = counts(1, [1, 2, 3, 4]), counts(9, [9, 9, 9, 9])
    heat_of(now, start=before)
    assert before.decode.tolist() == [1, 2, 3, 4]
    assert now.decode.tolist() == [9, 9, 9, 9]


def test_what_is_learned_outlives_conversations() -> None:
    """What many conversations routed to is remembered long after their votes have faded, and recalled as one vote."""
    heat = Heat(N, ROUTED, HALF_LIFE)
    heat.join(1, NOTHING)
    heat.count({1: counts(2000, [2000, 0, 0, 0])})
    heat.count({1: counts(4000, [2000, 2000, 0, 0])})
    assert heat.value()[0] < 0.1
    learned = heat.learned()
    np.testing.assert_allclose(learned, [0.46, 0.54, 0, 0], atol=0.02)
    again = Heat(N, ROUTED, HALF_LIFE)
    again.recall(learned)
    np.testing.assert_allclose(again.value(), learned, rtol=0.01)
    np.testing.assert_allclose(again.learned(), learned, atol=0.01)
    again.recall(np.ones(N))
    assert again.value().sum() <= ROUTED + 1e-9
