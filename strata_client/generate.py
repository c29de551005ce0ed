"""Continues a prompt: the decode loop and its ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata_client.engine import Engine
from strata_client.sampler import Sampler
from strata_client.text import StopStrings, Utf8Stream
from strata_client.tokenizer import Tokenizer

END, STOP, MAX_TOKENS, CONTEXT, NO_ROOM = "end", "stop", "max_tokens", "context", "no_room"
"""Why a text ended: an end token, a stop string, `--max-tokens`, the context, or refused memory."""


@dataclass(frozen=True)
class Generation:
    """How a generation went. `detail` is a line for the user, or empty."""

    prompt_tokens: int
    tokens: int
    reason: str
    detail: str
    prompt_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second while decoding; the prompt's time apart."""
        return self.tokens / self.decode_s if self.decode_s > 0 else 0.0


def generate(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    sampler: Sampler,
    stops: StopStrings,
    max_tokens: int,
    emit: Callable[[int | None, str], None],
) -> Generation:
    """Continues `prompt` until the model, the user or the memory ends it.

    Args:
        engine: at position 0.
        tokenizer: of the engine's model.
        prompt: tokens, at least one, at most the engine's context.
        sampler: chooses tokens.
        stops: strings before which the text ends.
        max_tokens: most tokens of text.
        emit: takes each token with the text that it completes, and last None with
            what was still held back.

    Errors: `Exhausted` (no room for the prompt), `LeaseRevoked`, `ModelError`
    (logits that are not finite), and whatever `emit` raises.
    """
    began = time.monotonic()
    engine.prepare(len(prompt))
    logits = engine.prefill(prompt)
    prompted = time.monotonic()
    stream = Utf8Stream()
    seen = set(prompt)
    tokens, reason, detail = 0, MAX_TOKENS, ""
    while tokens < max_tokens:
        token = sampler.sample(logits, seen)
        if token in tokenizer.end_tokens:
            reason = END
            break
        tokens += 1
        seen.add(token)
        emit(token, stops.feed(stream.feed(tokenizer.token_bytes(token))))
        if stops.stopped:
            reason = STOP
            break
        if tokens == max_tokens:
            break
        if not engine.has_room():
            full = engine.position >= engine.context
            reason = CONTEXT if full else NO_ROOM
            detail = f"the context of {engine.context} cells is full" if full else engine.refusal
            break
        logits = engine.step([token], prompt=False)
    # A character that a limit cut in two is left out; one that the model itself broke off is shown.
    rest = stops.feed(stream.flush()) if reason == END else ""
    rest += stops.flush()
    if rest:
        emit(None, rest)
    ended = time.monotonic()
    return Generation(len(prompt), tokens, reason, detail, prompted - began, ended - prompted)
