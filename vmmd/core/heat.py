"""Heat: how often each expert is going to be routed to, in routings a token, summed over a model's sessions.

Each session has a vote: what share of its next tokens goes to each expert, as averages
over several spans foretell it (`vmmd.core.averages`). It begins with what sessions
before it have taught. A fast session does not outvote a slow one. Time plays no part: a
vote is renewed by its own session's tokens, and one whose session is idle, or has gone,
fades with the tokens that others decode. What clients write is numbers to clamp,
nothing more.

What an expert in a slot is worth, in placement as in trades, is its heat times the cost
of reading it from elsewhere: `worth`. docs/policy.md compares this with simpler ways.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmmd.core.averages import DOUBT_TOKENS, Averages

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

PROMPT_WEIGHT = 0.5
"""Of a prompt's tokens as evidence: they foretell less of what follows than decoded ones."""

SHORTEST = 0.25
"""Half-life of a vote's shortest average, as a share of that with which idle votes fade."""

LEARNED_HALF_LIVES = 64
"""Of votes, in one of what is learned of a model: many conversations."""

READ_S_PER_BYTE = {"device": 1 / 3.5e12, "peer": 1 / 300e9, "host": 1 / 50e9}
"""What a kernel takes to read experts, by tier: of the order of an H100's memory, NVLink and PCIe 5."""


@dataclass(frozen=True)
class Counts:
    """A heat page at one moment (see ``strata_api.v1.pages``)."""

    tokens: int
    prompt_tokens: int
    decode: U64  # [n]
    prompt: U64  # [n]


class Profile:
    """Decayed counts of one kind of tokens: the last ones weigh most."""

    def __init__(self, n: int, half_life_tokens: float) -> None:
        self._counts: F64 = np.zeros(n, np.float64)
        self._tokens = 0.0
        self._half_life = half_life_tokens

    def add(self, counts: F64, tokens: float) -> None:
        """Adds the counts `[n]` of so many tokens, which weigh as if they had come one by one."""
        left = kept(tokens, self._half_life)
        weight = (1.0 - left) / (1.0 - kept(1, self._half_life))
        self._counts = self._counts * left + counts * (weight / tokens)
        self._tokens = self._tokens * left + weight

    def share(self) -> F64:
        """Routings a token `[n]`, 0 to 1; little after few tokens."""
        return self._counts / (self._tokens + DOUBT_TOKENS)


class Vote:
    """What one session says.

    Attributes:
        averages: of its tokens.
    """

    def __init__(self, start: Counts, routed_per_token: int, half_life_tokens: float, averages: Averages) -> None:
        """Counts from `start`, and begins with what `averages` know.

        A token is routed to `routed_per_token` (layers x top_k) experts at most.
        """
        self._before = start
        self._routed = routed_per_token
        self._half_life = half_life_tokens
        self.averages = averages
        self._presence = 1.0

    def count(self, now: Counts) -> "Routed | None":
        """Takes over what was routed since the last time; None where nothing came.

        Counts that run ahead of their tokens wait for these; those that run backwards add
        nothing. An expert is routed to at most once a token: whatever a page claims, a
        token adds no more than `routed_per_token`.
        """
        before = self._before
        decoded, prompt = now.tokens - before.tokens, now.prompt_tokens - before.prompt_tokens
        if decoded == 0 and prompt == 0:
            return None
        self._before = now
        counts, tokens = np.zeros(len(now.decode), np.float64), 0.0
        for more, fresh, old, weight in (
            (prompt, now.prompt, before.prompt, PROMPT_WEIGHT),
            (decoded, now.decode, before.decode, 1.0),
        ):
            if more > 0:
                counts += weight * _clamped(old, fresh, more, self._routed)
                tokens += weight * more
        if tokens <= 0:
            return None
        self.averages.add(counts, tokens)
        self._presence = 1.0
        return Routed(counts, tokens)

    def fade(self, tokens: float) -> None:
        """Others evaluated so many tokens while this session evaluated none."""
        self._presence *= kept(tokens, self._half_life)

    def value(self) -> F64:
        """Routings a token `[n]`: what it adds to the heat."""
        return self._presence * self.averages.share()


class Routed(NamedTuple):
    """Routings `[n]` of so many tokens, those of prompts discounted in both."""

    counts: F64
    tokens: float


def kept(tokens: float, half_life_tokens: float) -> float:
    """The share of heat that is left after so many tokens."""
    return float(0.5 ** min(tokens / half_life_tokens, 1000.0))


def _clamped(before: U64, now: U64, tokens: int, routed_per_token: int) -> F64:
    """Routings since `before` that so many tokens can have had."""
    found = np.minimum(np.where(now > before, now - before, 0).astype(np.float64), tokens)
    claimed = float(found.sum())
    return found * min(1.0, routed_per_token * tokens / claimed) if claimed > 0 else found


class Heat:
    """A model's: the votes of its sessions, and what they have taught while there are none.

    Args:
        n: experts.
        routed_per_token: of them, at most.
        half_life_tokens: with which an idle session's vote fades.
    """

    def __init__(self, n: int, routed_per_token: int, half_life_tokens: float) -> None:
        self._taught = Averages(n, SHORTEST * half_life_tokens)
        self._learned = Profile(n, LEARNED_HALF_LIVES * half_life_tokens)
        self._routed = routed_per_token
        self._half_life = half_life_tokens
        self._votes: dict[int, Vote] = {}

    def recall(self, learned: F64) -> None:
        """Begins with what `learned` returned another time, 0 to 1; so do the sessions that are there already."""
        tokens = LEARNED_HALF_LIVES * self._half_life
        total = float(learned.sum())
        if total > 0:
            learned = learned * min(1.0, self._routed / total)
        self._learned.add(learned * tokens, tokens)
        for averages in (self._taught, *(vote.averages for vote in self._votes.values())):
            averages.add(learned * tokens, tokens)

    def learned(self) -> F64:
        """Routings a token `[n]` over many conversations, 0 to 1: for the next time that the model is filled."""
        return self._learned.share()

    def join(self, session_id: int, start: Counts) -> None:
        """A session's page begins with these counts."""
        self._votes[session_id] = Vote(start, self._routed, self._half_life, self._taught.copy())

    def count(self, now: Mapping[int, Counts]) -> bool:
        """Takes over what the sessions' pages say now, by session; whether anything was routed."""
        came = {i: routed for i, counts in now.items() if (routed := self._votes[i].count(counts)) is not None}
        if not came:
            return False
        for routed in came.values():
            self._taught.add(*routed)
            self._learned.add(*routed)
        most = max(routed.tokens for routed in came.values())
        for session_id, vote in self._votes.items():
            if session_id not in came:
                vote.fade(most)
        return True

    def leave(self, session_id: int) -> None:
        """A session has gone; its last page was counted."""
        del self._votes[session_id]

    def value(self) -> F64:
        """The heat, float64 `[n]`."""
        if not self._votes:
            return self._taught.share()
        found: F64 = np.sum([vote.value() for vote in self._votes.values()], axis=0)
        return found


def worth(heat: F64, size_bytes: I64, otherwise: str = "host") -> F64:
    """What experts in device slots are worth, seconds a token ``[n]``: so much longer takes reading them elsewhere.

    Args:
        heat: routings a token ``[n]``.
        size_bytes: of each expert ``[n]``.
        otherwise: the tier where they would be read without a slot.
    """
    found: F64 = heat * size_bytes * (READ_S_PER_BYTE[otherwise] - READ_S_PER_BYTE["device"])
    return found
