"""Chooses the next token from logits."""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strata_client.models.base import F32, ModelError


@dataclass(frozen=True)
class SamplerOptions:
    """How to choose a token. Each default but the temperature's leaves the distribution as it is.

    The order is: repeat penalty, top-k, top-p, min-p, temperature (llama.cpp's).

    Attributes:
        temperature: 0 always takes the likeliest token.
        top_k: keeps the k likeliest tokens; 0 keeps all.
        top_p: keeps the likeliest tokens that together reach this probability, at least one.
        min_p: keeps tokens at least this likely, relative to the likeliest.
        repeat_penalty: divides positive and multiplies negative logits of tokens seen before.
        seed: of the random numbers; None takes a fresh one.

    Raises:
        ValueError: a value is out of range; the message names the flag and the range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        ranges = (
            ("--temperature", self.temperature, 0 <= self.temperature < math.inf, "0 or more"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("--top-p", self.top_p, 0 <= self.top_p <= 1, "0 to 1"),
            ("--min-p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("--repeat-penalty", self.repeat_penalty, 0 < self.repeat_penalty < math.inf, "above 0"),
            ("--seed", self.seed, self.seed is None or self.seed >= 0, "0 or more"),
        )
        for flag, value, good, allowed in ranges:
            if not good:
                raise ValueError(f"{flag} is {value}; it must be {allowed}")


class Sampler:
    """Draws tokens; the same options with a seed draw the same tokens from the same logits."""

    def __init__(self, options: SamplerOptions) -> None:
        self._options = options
        self._random = np.random.default_rng(options.seed)

    def sample(self, logits: F32, seen: Collection[int] = ()) -> int:
        """The next token.

        Args:
            logits: float32 `[vocab]`; -inf rules a token out.
            seen: tokens of the prompt and of the text so far. Each counts once, however often it is there.

        Raises:
            ModelError: a logit is NaN or +inf, or every one is -inf.
        """
        options = self._options
        scores = logits.astype(np.float64)
        if not scores.max() < math.inf or scores.max() == -math.inf:  # NaN is not below inf
            raise ModelError("the logits are not finite; the model file is damaged or needs more than float32")
        if options.repeat_penalty != 1.0 and seen:
            ids = np.unique(np.fromiter(seen, dtype=np.int64))
            chosen = scores[ids]
            scores[ids] = np.where(chosen > 0, chosen / options.repeat_penalty, chosen * options.repeat_penalty)
        if options.temperature == 0 or options.top_k == 1:
            return int(scores.argmax())  # the first, thus the lowest id, of equals
        order = np.argsort(-scores, kind="stable")[: int(np.count_nonzero(scores > -math.inf))]
        if options.top_k:
            order = order[: options.top_k]
        probabilities = _softmax(scores[order])
        if options.top_p < 1:
            before = np.cumsum(probabilities) - probabilities
            order = order[: max(1, int(np.count_nonzero(before < options.top_p)))]
        order = order[probabilities[: len(order)] >= options.min_p * probabilities[0]]
        with np.errstate(over="ignore"):  # a tiny temperature: the others become impossible
            probabilities = _softmax((scores[order] - scores[order[0]]) / options.temperature)
        drawn = np.searchsorted(np.cumsum(probabilities), self._random.random(), side="right")
        return int(order[min(int(drawn), len(order) - 1)])


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities of scores whose first is the greatest."""
    weights = np.exp(scores - scores[0])
    return np.asarray(weights / weights.sum())
