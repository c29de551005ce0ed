"""Chooses the next token from logits."""

import math
import os
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from strata_kernels import reference

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
        seed: of the random numbers, below 2^64; None takes a fresh one.

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
            ("--seed", self.seed, self.seed is None or 0 <= self.seed < 1 << 64, "0 to 2^64 - 1"),
        )
        for flag, value, good, allowed in ranges:
            if not good:
                raise ValueError(f"{flag} is {value}; it must be {allowed}")


class Sampler:
    """Draws tokens; the same options with a seed draw the same tokens from the same logits, as those of a GPU do."""

    def __init__(self, options: SamplerOptions, draws: int = 0) -> None:
        """Goes on after so many tokens that were drawn before."""
        self._options = options
        self._seed = int.from_bytes(os.urandom(8)) if options.seed is None else options.seed
        self._draws = draws

    def sample(self, logits: F32, seen: Collection[int] = ()) -> int:
        """The next token.

        Args:
            logits: float32 `[vocab]`; -inf rules a token out.
            seen: tokens of the prompt and of the text so far. Each counts once, however often it is there.

        Raises:
            ModelError: a logit is NaN or +inf, or every one is -inf.
        """
        options = self._options
        token = reference.sample(
            logits,
            np.unique(np.fromiter(seen, dtype=np.int64)),
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repeat_penalty=options.repeat_penalty,
            uniform=reference.uniform(self._seed, self._draws),
        )
        if token is None:
            raise ModelError("the logits are not finite; the model file is damaged or needs more than float32")
        self._draws += 1
        return token
