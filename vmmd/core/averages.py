"""How often experts are routed to: decayed averages over several spans, each heard as much as it foretells.

Where routing is steady, the longest average is the best, as it is the least noisy; after
a change of topic the shortest is. Which it is shows in what comes: before tokens are
counted, each average is judged by how likely it held them. docs/policy.md compares the
result with single averages on traces.
"""

from copy import copy

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

SPANS = 4
SPAN_RATIO = 8.0
"""Each average looks back so many times further than the one before."""

EVIDENCE = 1.25
"""How strongly one token speaks for the averages that foretold it better, per nat of likelihood a routing."""

FORGETTING = 0.014
"""Share of the averages' weights that each token deals out evenly: who was wrong for long is still heard."""

UNSEEN_TOKENS = 4.0
"""Of even routing that each average is judged as if it had seen: nothing is impossible."""

BATCH_TOKENS = 16
"""Judged at a time: likelihoods of thousands of experts take a third of a millisecond."""

DOUBT_TOKENS = 8.0
"""So many tokens count half: a handful says little about an expert in a hundred."""


class Averages:
    """Decayed counts of one kind of tokens.

    Args:
        n: experts.
        half_life_tokens: of the shortest average.
    """

    def __init__(self, n: int, half_life_tokens: float) -> None:
        self._left = 0.5 ** (1.0 / (half_life_tokens * SPAN_RATIO ** np.arange(SPANS)))  # [spans] after a token
        self._sums = np.zeros((SPANS, n), np.float64)
        self._tokens = np.zeros(SPANS, np.float64)  # that each average is over, decayed
        self._weights = np.full(SPANS, 1.0 / SPANS)
        self._fresh: F64 = np.zeros(n, np.float64)  # of tokens that are not in the sums yet
        self._fresh_tokens = 0.0

    def copy(self) -> "Averages":
        """One that has learned the same, and goes on by itself."""
        made = copy(self)
        made._sums, made._tokens, made._fresh = self._sums.copy(), self._tokens.copy(), self._fresh.copy()
        return made

    def add(self, counts: F64, tokens: float) -> None:
        """Adds the counts ``[n]`` of so many tokens, more than 0, as if they had come one by one."""
        self._fresh = self._fresh + counts
        self._fresh_tokens += tokens
        if self._fresh_tokens < BATCH_TOKENS:
            return
        counts, tokens = self._fresh, self._fresh_tokens
        self._fresh, self._fresh_tokens = np.zeros_like(counts), 0.0
        total = float(counts.sum())
        if total > 0 and self._tokens[0] > 0:
            self._judge(counts, total, tokens)
        left = self._left**tokens
        weight = (1.0 - left) / (1.0 - self._left)  # of the tokens together
        self._sums *= left[:, None]
        self._sums += weight[:, None] * (counts / tokens)
        self._tokens = self._tokens * left + weight

    def share(self) -> F64:
        """Routings a token that are to be expected, float64 ``[n]``, 0 to 1; little after few tokens."""
        over = self._tokens + self._fresh_tokens
        trust = over[-1] / (over[-1] + DOUBT_TOKENS)
        scale = trust * self._weights / np.maximum(over, np.finfo(np.float64).tiny)
        found: F64 = scale @ self._sums + scale.sum() * self._fresh
        return found

    def _judge(self, counts: F64, total: float, tokens: float) -> None:
        """Moves weight to the averages under which what has come was likelier."""
        even = UNSEEN_TOKENS * total / tokens
        expected = (self._sums + even / len(counts)) / (self._sums.sum(axis=1) + even)[:, None]
        likelihood = np.log(expected) @ counts / total
        weights = self._weights * np.exp(EVIDENCE * tokens * (likelihood - likelihood.max()))
        kept = (1.0 - FORGETTING) ** min(tokens, BATCH_TOKENS)  # of many at once the last speak for the next, too
        self._weights = kept * weights / weights.sum() + (1.0 - kept) / SPANS
