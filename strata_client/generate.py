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


class Text:
    """The text that a sequence's tokens make, and why it ends.

    Attributes:
        tokens: how many it has.
        reason: why it ended; empty while it goes on.
        detail: a line for the user about that, or empty.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopStrings, max_tokens: int) -> None:
        """Takes stop strings before which it ends, for itself alone, and the most tokens that it may have."""
        self.tokens = 0
        self.reason = "" if max_tokens else MAX_TOKENS
        self.detail = ""
        self._tokenizer = tokenizer
        self._stops = stops
        self._stream = Utf8Stream()
        self._max_tokens = max_tokens

    def take(self, token: int) -> str | None:
        """Takes the next token; the piece of text that it completes, or None for an end token, which is none of it."""
        if token in self._tokenizer.end_tokens:
            self.reason = END
            return None
        self.tokens += 1
        piece = self._stops.feed(self._stream.feed(self._tokenizer.token_bytes(token)))
        if self._stops.stopped:
            self.reason = STOP
        elif self.tokens == self._max_tokens:
            self.reason = MAX_TOKENS
        return piece

    def end_without_room(self, sequence: "TokenSequence") -> None:
        """Ends the text: no cell is left for its last token."""
        if sequence.position >= sequence.context:
            self.reason, self.detail = CONTEXT, f"the context of {sequence.context} cells is full"
        else:
            self.reason, self.detail = NO_ROOM, sequence.refusal

    def rest(self) -> str:
        """What was held back, now that the text has ended.

        A character that a limit cut in two is left out; one that the model itself broke off is shown.
        """
        rest = self._stops.feed(self._stream.flush()) if self.reason == END else ""
        return rest + self._stops.flush()


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
    text = Text(tokenizer, stops, max_tokens)
    while not text.reason:
        token = engine.next_token()
        if not text.tokens:
            timings.moment("first token")
        piece = text.take(token)
        if piece is not None:
            emit(token, piece)
        if not text.reason:
            if text.tokens == 1:
                engine.settle()
            if not sequence.has_room():
                text.end_without_room(sequence)
    rest = text.rest()
    if rest:
        emit(None, rest)
    ended = time.monotonic()
    timings.add("decode", prompted, ended)
    return Generation(
        len(prompt), sequence.kept, text.tokens, text.reason, text.detail, prompted - began, ended - prompted
    )
