"""Continues a prompt: the decode loop and its ends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from strata_client import timings
from strata_client.text import StopStrings, Utf8Stream
from strata_client.tokenizer import Tokenizer

if TYPE_CHECKING:
    from strata_client.sampler import SamplerOptions
    from strata_client.sequence import TokenSequence

END, STOP, MAX_TOKENS, CONTEXT, NO_ROOM = "end", "stop", "max_tokens", "context", "no_room"
"""Why a text ended: an end token, a stop string, `--max-tokens`, the context, or refused memory."""


class Decoder(Protocol):
    """What evaluates one sequence and chooses its tokens; logits stay inside.

    Nothing that it does shows in which token comes: the same prompt and options with a
    seed make the same text, wherever and however it is computed.

    Attributes:
        sequence: its cells. They are filled with the tokens that were given out before the last.
    """

    @property
    def sequence(self) -> "TokenSequence": ...

    def begin(self, prompt: Sequence[int], options: "SamplerOptions") -> None:
        """Evaluates what has no cells yet of the prompt, whose tokens count as seen for the repeat penalty."""

    def next_token(self) -> int:
        """The next token: the first of the text, or the one after that given out last.

        The caller has asked the sequence's `has_room` before any but the first.
        """

    def settle(self) -> None:
        """The first token is out and more will follow: what that did not need may begin now."""


@dataclass(frozen=True)
class Generation:
    """How a generation went. `detail` is a line for the user, or empty."""

    prompt_tokens: int
    kept_tokens: int
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
    engine: Decoder,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    options: "SamplerOptions",
    stops: StopStrings,
    max_tokens: int,
    emit: Callable[[int | None, str], None],
) -> Generation:
    """Continues `prompt` until the model, the user or the memory ends it.

    Args:
        engine: has evaluated nothing, or what it may keep of.
        tokenizer: of the engine's model.
        prompt: tokens, at least one, at most the engine's context.
        options: how tokens are chosen.
        stops: strings before which the text ends.
        max_tokens: most tokens of text.
        emit: takes each token with the text that it completes, and last None with
            what was still held back.

    Errors: `Exhausted` (no room for the prompt), `LeaseRevoked`, `ModelError`
    (logits that are not finite), and whatever `emit` raises.
    """
    sequence, began = engine.sequence, time.monotonic()
    with timings.stage("prefill"):
        sequence.prepare(len(prompt))
        engine.begin(prompt, options)
    prompted = time.monotonic()
    stream = Utf8Stream()
    tokens, reason, detail = 0, MAX_TOKENS, ""
    while tokens < max_tokens:
        token = engine.next_token()
        if not tokens:
            timings.moment("first token")
        if token in tokenizer.end_tokens:
            reason = END
            break
        tokens += 1
        emit(token, stops.feed(stream.feed(tokenizer.token_bytes(token))))
        if stops.stopped:
            reason = STOP
            break
        if tokens == max_tokens:
            break
        if tokens == 1:
            engine.settle()
        if not sequence.has_room():
            full = sequence.position >= sequence.context
            reason = CONTEXT if full else NO_ROOM
            detail = f"the context of {sequence.context} cells is full" if full else sequence.refusal
            break
    # A character that a limit cut in two is left out; one that the model itself broke off is shown.
    rest = stops.feed(stream.flush()) if reason == END else ""
    rest += stops.flush()
    if rest:
        emit(None, rest)
    ended = time.monotonic()
    timings.add("decode", prompted, ended)
    return Generation(len(prompt), sequence.kept, tokens, reason, detail, prompted - began, ended - prompted)
