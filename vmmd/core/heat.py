"""Heat: how often each expert is routed to, in routings a token, summed over a model's sessions.

Each session has a vote: what share of its last tokens went to each expert. So a
fast session does not outvote a slow one. Time plays no part: a vote is
renewed by its own session's tokens, and one whose session is idle, or has gone,
fades with the tokens that others decode. What clients write is numbers to clamp,
nothing more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

PROMPT_WEIGHT = 0.25
"""Of a prompt beside decoded tokens: it passes once, and whole chunks of it need nearly every expert."""

DOUBT_TOKENS = 8.0
"""A vote of so many tokens counts half: a handful says little about an expert in a hundred."""

LEARNED_HALF_LIVES = 64
"""Of votes, in one of what is learned of a model: many conversations."""


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
    """What one session says."""

    def __init__(self, start: Counts, routed_per_token: int, half_life_tokens: float, learned: Profile) -> None:
        """Counts from `start`, into `learned`, too.

        A token is routed to `routed_per_token` (layers x top_k) experts at most.
        """
        n = len(start.decode)
        self._before = start
        self._learned = learned
        self._routed = routed_per_token
        self._half_life = half_life_tokens
        self._decode, self._prompt = Profile(n, half_life_tokens), Profile(n, half_life_tokens / PROMPT_WEIGHT)
        self._presence = 1.0
        self._prompt_presence = PROMPT_WEIGHT

    def count(self, now: Counts) -> int | None:
        """Takes over what was routed since the last time.

        Returns how many tokens were decoded, None where nothing came. Counts that run
        ahead of their tokens wait for these; those that run backwards add nothing. An
        expert is routed to at most once a token: whatever a page claims, a token adds no
        more than `routed_per_token`.
        """
        before = self._before
        tokens, prompt = now.tokens - before.tokens, now.prompt_tokens - before.prompt_tokens
        if tokens == 0 and prompt == 0:
            return None
        self._before = now
        if prompt > 0:
            counts = _clamped(before.prompt, now.prompt, prompt, self._routed)
            self._prompt.add(counts, prompt)
            self._learned.add(PROMPT_WEIGHT * counts, PROMPT_WEIGHT * prompt)
            self._prompt_presence = PROMPT_WEIGHT
        if tokens > 0:
            counts = _clamped(before.decode, now.decode, tokens, self._routed)
            self._decode.add(counts, tokens)
            self._learned.add(counts, tokens)
            self._prompt_presence *= kept(tokens, self._half_life)
        if tokens <= 0 and prompt <= 0:
            return None
        self._presence = 1.0
        return max(tokens, 0)

    def fade(self, tokens: float) -> None:
        """Others decoded so many tokens while this session decoded none."""
        self._presence *= kept(tokens, self._half_life)

    def value(self) -> F64:
        """Routings a token `[n]`: what it adds to the heat."""
        return self._presence * (self._decode.share() + self._prompt_presence * self._prompt.share())


def kept(tokens: float, half_life_tokens: float) -> float:
    """The share of heat that is left after so many tokens."""
    return float(0.5 ** min(tokens / half_life_tokens, 1000.0))


def _clamped(before: U64, now: U64, tokens: int, routed_per_token: int) -> F64:
    """Routings since `before` that so many tokens can have had."""
    found = np.minimum(np.where(now > before, now - before, 0).astype(np.float64), tokens)
    claimed = float(found.sum())
    return found * min(1.0, routed_per_token * tokens / claimed) if claimed > 0 else found


class Heat:
    """A model's: the votes of its sessions, and of those that have gone.

    Attributes:
        left: float64 `[n]`, what sessions that have gone leave behind. It fades as
            others decode, and never counts for more than one session.
    """

    def __init__(self, n: int, routed_per_token: int, half_life_tokens: float) -> None:
        self.left: F64 = np.zeros(n, np.float64)
        self._learned = Profile(n, LEARNED_HALF_LIVES * half_life_tokens)
        self._routed = routed_per_token
        self._half_life = half_life_tokens
        self._votes: dict[int, Vote] = {}

    def recall(self, learned: F64) -> None:
        """Begins with what `learned` returned another time, 0 to 1, as if a session had left it behind."""
        tokens = LEARNED_HALF_LIVES * self._half_life
        self._learned.add(learned * tokens, tokens)
        self.left = self._one_vote(learned)

    def learned(self) -> F64:
        """Routings a token `[n]` over many conversations, 0 to 1: for the next time that the model is filled."""
        return self._learned.share()

    def join(self, session_id: int, start: Counts) -> None:
        """A session's page begins with these counts."""
        self._votes[session_id] = Vote(start, self._routed, self._half_life, self._learned)

    def count(self, now: Mapping[int, Counts]) -> bool:
        """Takes over what the sessions' pages say now, by session; whether anything was routed."""
        decoded = {session_id: self._votes[session_id].count(counts) for session_id, counts in now.items()}
        came = [tokens for tokens in decoded.values() if tokens is not None]
        most = max(came, default=0)
        if most > 0:
            self.left = self.left * kept(most, self._half_life)
            for session_id, vote in self._votes.items():
                if not decoded.get(session_id):
                    vote.fade(most)
        return bool(came)

    def leave(self, session_id: int) -> None:
        """A session has gone; its last page was counted."""
        self.left = self._one_vote(self.left + self._votes.pop(session_id).value())

    def _one_vote(self, heat: F64) -> F64:
        total = float(heat.sum())
        return heat * min(1.0, self._routed / total) if total > 0 else heat

    def value(self) -> F64:
        """The heat, float64 `[n]`."""
        return sum((vote.value() for vote in self._votes.values()), start=self.left.copy())
