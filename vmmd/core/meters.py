"""Meters: counters with a rate, and whose memory routings were read from.

What clients write is numbers to clamp, nothing more: a session that lies spoils its
own model's figures and nobody else's.
"""

from collections import deque

import numpy as np
import numpy.typing as npt

from vmmd.core.heat import F64, U64, Counts
from vmmd.core.residency import NOWHERE

I64 = npt.NDArray[np.int64]

WINDOW_S = 5.0
"""What rates are taken over."""

TOKENS_PER_S_MAX = 1_000_000
"""No session is believed to evaluate more: it bounds what a lie adds to a counter."""

COUNT_MAX = 1 << 62
"""Where counters stay, so that they always fit the wire."""

TIERS = ("device", "peer", "host")


class Meter:
    """A counter, and how it moves within a window of the caller's clock."""

    def __init__(self, now_s: float, window_s: float = WINDOW_S) -> None:
        self.total = 0
        self._window_s = window_s
        self._marks = deque([(now_s, 0)])

    def add(self, count: int) -> None:
        """Counts."""
        self.total = min(self.total + count, COUNT_MAX)

    def mark(self, now_s: float) -> None:
        """Remembers the count at this moment, to see later what has come since."""
        self._marks.append((now_s, self.total))
        while len(self._marks) > 1 and self._marks[1][0] <= now_s - self._window_s:
            self._marks.popleft()

    def per_second(self, now_s: float) -> float:
        """The rate over the window, or over the meter's life where that is shorter."""
        elapsed_s = now_s - self._marks[0][0]
        return self.recent / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def recent(self) -> int:
        """What has come within the window."""
        return self.total - self._marks[0][1]


def believed(before: Counts, now: Counts, elapsed_s: float) -> Counts:
    """What is believed of a heat page: nothing runs backwards, no token is routed to an expert twice.

    Args:
        before: what was believed at the last look, `elapsed_s` ago.
        now: what the page says.
    """
    most = int(TOKENS_PER_S_MAX * max(1.0, elapsed_s))
    tokens, prompt_tokens = (
        min(max(old, new), old + most)
        for old, new in ((before.tokens, now.tokens), (before.prompt_tokens, now.prompt_tokens))
    )
    decode = np.maximum(before.decode, np.minimum(now.decode, np.uint64(tokens)))
    prompt = np.maximum(before.prompt, np.minimum(now.prompt, np.uint64(prompt_tokens)))
    return Counts(tokens, prompt_tokens, decode, prompt)


def tier_of(part: I64, computing: int) -> I64:
    """The tier ``[n]``, an index of `TIERS`, of experts in arena parts ``[n]`` for who computes on one of them."""
    found: I64 = np.where(part == NOWHERE, 2, np.where(part == computing, 0, 1))
    return found


def by_tier(tier: I64, amounts: U64 | F64) -> list[int]:
    """Sums of amounts ``[n]`` by tier."""
    return [int(amounts[tier == t].sum()) for t in range(len(TIERS))]
