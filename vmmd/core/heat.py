"""Heat: a decayed, per-session-normalised count of how often each expert was routed to.

What clients write is numbers to clamp, nothing more. A session's contribution is
routings a token, so that a fast session does not outvote a slow one; a prompt's
tokens count less than decoded ones, since a prompt passes once.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]

PROMPT_WEIGHT = 0.25


@dataclass(frozen=True)
class Counts:
    """A heat page at one moment (see ``strata_api.v1.pages``)."""

    tokens: int
    prompt_tokens: int
    decode: U64  # [n]
    prompt: U64  # [n]


def contribution(before: Counts, now: Counts, routed_per_token: int) -> F64 | None:
    """Heat that one session adds: routings a token since `before`, float64 ``[n]``.

    None where it routed nothing, or the page makes no sense. An expert is routed
    to at most once a token, and a token to `routed_per_token` (layers x top_k) of
    them: whatever a page claims, a session adds no more than that.
    """
    total = np.zeros(len(now.decode), np.float64)
    for tokens, fresh, old, weight in (
        (now.tokens - before.tokens, now.decode, before.decode, 1.0),
        (now.prompt_tokens - before.prompt_tokens, now.prompt, before.prompt, PROMPT_WEIGHT),
    ):
        if tokens <= 0:
            continue
        delta = np.where(fresh > old, fresh - old, 0).astype(np.float64)
        total += weight * np.minimum(delta, tokens) / tokens
    claimed = float(total.sum())
    if claimed <= 0:
        return None
    return total * min(1.0, routed_per_token / claimed)


def decayed(heat: F64, contributions: list[F64], decay: float) -> F64:
    """The heat after one interval in which somebody routed; idle time decays nothing."""
    return heat if not contributions else heat * decay + np.sum(contributions, axis=0)
