"""Choosing the next token."""

import numpy as np
import numpy.typing as npt

_LARGEST = float(np.finfo(np.float32).max)
_WORD = 0xFFFFFFFF


def sample(
    logits: npt.NDArray[np.float32],
    seen: npt.NDArray[np.int64],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    repeat_penalty: float,
    uniform: float,
) -> int | None:
    """The token that a random number chooses.

    In this order: the repeat penalty divides positive and multiplies negative logits of tokens seen; top-k keeps
    the k greatest; top-p those, from the greatest, before which less than that probability lies, at least one; min-p
    those at least that likely, relative to the likeliest; temperature 0 takes the greatest, any other divides the
    logits; then the token is the first, by id, at which the sum of probabilities exceeds `uniform`. Of equal logits
    the lower id is the greater. Penalized logits are rounded to float32, probabilities are float64.

    Args:
        logits: float32 `[n_tokens]`; -inf rules a token out.
        seen: int64 `[n]`, different ids.
        temperature: 0 or more.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        repeat_penalty: 1 changes nothing.
        uniform: in [0, 1); see `uniform`.

    Returns:
        the token, or None where a logit is NaN or inf, or none is finite.
    """
    scores = logits + np.float32(0)  # -0 becomes 0
    if not scores.max() < np.inf or scores.max() == -np.inf:  # NaN is not below inf
        return None
    if repeat_penalty != 1.0 and len(seen):
        chosen = scores[seen].astype(np.float64)
        with np.errstate(over="ignore"):
            penalized = np.where(chosen > 0, chosen / repeat_penalty, chosen * repeat_penalty)
        clipped = np.clip(penalized, -_LARGEST, _LARGEST).astype(np.float32) + np.float32(0)
        scores[seen] = np.where(chosen == -np.inf, np.float32(-np.inf), clipped)
    if temperature == 0 or top_k == 1:
        return int(scores.argmax())  # the first, thus the lowest id, of equals
    order = np.argsort(-scores, kind="stable")[: int(np.count_nonzero(scores > -np.inf))]
    if top_k:
        order = order[:top_k]
    wide = scores.astype(np.float64)
    top = wide[order[0]]
    weights = np.exp(wide[order] - top)
    if top_p < 1:
        before = np.cumsum(weights) - weights
        order = order[: max(1, int(np.count_nonzero(before < top_p * weights.sum())))]
    order = np.sort(order[weights[: len(order)] >= min_p])
    with np.errstate(over="ignore"):  # a tiny temperature: the others become impossible
        sums = np.cumsum(np.exp((wide[order] - top) / temperature))
    drawn = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return int(order[min(drawn, len(order) - 1)])


def uniform(seed: int, draw: int) -> float:
    """A random number in [0, 1), the same for the same seed and number of the draw.

    53 bits of Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), with the seed as
    its key and the draw as its counter.

    Args:
        seed: below 2^64.
        draw: below 2^64.
    """
    first, second, _, _ = philox(seed, draw)
    return ((first >> 5) * (1 << 26) + (second >> 6)) / (1 << 53)


def philox(key: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: four words of 32 bits for a key of 64 and a counter of 128."""
    k0, k1 = key & _WORD, key >> 32 & _WORD
    c0, c1, c2, c3 = (counter >> shift & _WORD for shift in (0, 32, 64, 96))
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & _WORD, left >> 32 ^ c3 ^ k1, left & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3
