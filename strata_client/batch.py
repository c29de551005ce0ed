"""Continuous batching: many prompts in one process, some of them at once, each with elastic K/V cells of its own.

The rules:

- At most one chunk of one prompt is evaluated between two steps of decoding. So a sequence that runs never waits for
  longer than that, and prompts begin one after the other, in their order.
- A sequence that ends gives its cells back, and the next prompt begins in its place.
- Options hold for each sequence, the seed too. Its text is that of the same prompt alone with that seed.
- A prompt for whose cells there is no memory waits until a sequence has ended, and so does a sequence that runs out of
  cells; no prompt begins before such sequences go on. Where all wait, whichever began last ends with what it has
  (`no_room`), and the others go on. Alone, a sequence ends as in a run of its own; a prompt for which there
  is no memory then has no text.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from strata_client import timings
from strata_client.attached import Attached
from strata_client.generate import NO_ROOM, Generation, Text
from strata_client.sampler import SamplerOptions
from strata_client.sequence import TokenSequence
from strata_client.text import StopStrings
from strata_client.tokenizer import Tokenizer
from vmmd.errors import Exhausted, Unavailable, VmmError


@dataclass(eq=False)
class Row:
    """A sequence of a batch.

    Attributes:
        index: of its prompt.
        prompt: tokens, at least one.
        options: how its tokens are chosen; they have a seed.
        sequence: its cells.
        text: what has become of its tokens.
        tokens: those given out; the last is not evaluated.
        seen: those of the prompt and of `tokens`.
    """

    index: int
    prompt: Sequence[int]
    options: SamplerOptions
    sequence: TokenSequence
    text: Text
    tokens: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    pieces: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    prompted_s: float = 0.0


class BatchEngine(Protocol):
    """What evaluates the sequences of a batch and chooses their tokens. For one thread.

    Attributes:
        attached: the model, and what makes its sequences.
    """

    @property
    def attached(self) -> Attached: ...

    def prefill(self, row: Row) -> bool:
        """Evaluates the next chunk of a prompt; whether that was the last, so that the row may join.

        Errors: `LeaseRevoked` if the daemon has ended the session.
        """

    def join(self, row: Row) -> None:
        """The row takes part in steps from now on: its prompt was evaluated, and there is a cell for its next token."""

    def leave(self, row: Row) -> None:
        """The row takes part in no step from now on, and none that runs uses its cells. It may join again."""

    def step(self) -> Sequence[tuple[Row, int]]:
        """The next token of rows that take part, at least one. There is a cell for the last one of each.

        Errors: `LeaseRevoked` if the daemon has ended the session; `ModelError` if logits are not finite.
        """


@dataclass(frozen=True)
class Result:
    """What became of a prompt.

    Attributes:
        index: of the prompt.
        text: what follows it.
        tokens: those of the text.
        generation: figures. Waiting before the first chunk is not in the prompt's time.
        began: there was memory to begin with.
    """

    index: int
    text: str
    tokens: Sequence[int]
    generation: Generation
    began: bool = True


class Batch:
    """Continues prompts, some at once. For one thread."""

    def __init__(
        self,
        engine: BatchEngine,
        tokenizer: Tokenizer,
        *,
        options: SamplerOptions,
        stop_strings: Sequence[str],
        max_tokens: int,
        rows_max: int,
        on_result: Callable[[Result], None],
    ) -> None:
        """Takes what all prompts share.

        Args:
            engine: evaluates them.
            tokenizer: of the model.
            options: how tokens are chosen; without a seed each sequence has a fresh one.
            stop_strings: before which a text ends.
            max_tokens: most tokens of a text.
            rows_max: most sequences at once.
            on_result: takes what became of each prompt, in the order in which they end.
        """
        self._attached = engine.attached
        self._engine = engine
        self._tokenizer = tokenizer
        self._options = options
        self._stop_strings = stop_strings
        self._max_tokens = max_tokens
        self._rows_max = rows_max
        self._on_result = on_result
        self._queue: deque[tuple[int, Sequence[int]]] = deque()
        self._beginning: Row | None = None
        self._running: list[Row] = []
        self._stalled: list[Row] = []  # without a cell for their last token, in the order of their beginning
        self._refused = False  # the next prompt; until a sequence ends

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Continues prompts, each of at least one token and at most the context.

        Errors: as `BatchEngine.step`; whatever `on_result` raises. Then sequences are left open.
        """
        self._queue.extend(enumerate(prompts))
        with timings.stage("batch"):
            while self._queue or self._beginning or self._running or self._stalled:
                if self._beginning is None:
                    self._begin_next()
                if self._beginning is not None:
                    self._evaluate_chunk(self._beginning)
                if self._running:
                    for row, token in self._engine.step():
                        self._take(row, token)
                elif self._beginning is None and self._stalled:
                    self._end_stalemate()

    def _begin_next(self) -> None:
        """Makes a sequence for the next prompt, if there is one, a place for it, and memory."""
        if not self._queue or self._refused or self._stalled or len(self._running) >= self._rows_max:
            return
        index, prompt = self._queue[0]
        try:
            sequence = self._attached.open_sequence()
            try:
                sequence.prepare(len(prompt), wait=not self._running)
            except BaseException:
                self._attached.close_sequence(sequence)
                raise
        except (Exhausted, Unavailable) as error:
            if self._running:
                self._refused = True
            else:
                self._queue.popleft()
                generation = Generation(len(prompt), 0, 0, NO_ROOM, error.message, 0.0, 0.0)
                self._on_result(Result(index, "", (), generation, began=False))
            return
        self._queue.popleft()
        options = self._options
        if options.seed is None:
            options = replace(options, seed=int.from_bytes(os.urandom(8)))
        text = Text(self._tokenizer, StopStrings(self._stop_strings), self._max_tokens)
        self._beginning = Row(index, prompt, options, sequence, text, seen=set(prompt))

    def _evaluate_chunk(self, row: Row) -> None:
        if self._engine.prefill(row):
            self._beginning = None
            row.prompted_s = time.monotonic()
            if row.text.reason:  # no token is wanted
                self._end(row)
            else:
                self._join(row)

    def _take(self, row: Row, token: int) -> None:
        """Takes a row's next token, and lets it go on, wait or end."""
        piece = row.text.take(token)
        if piece is not None:
            row.tokens.append(token)
            row.seen.add(token)
            row.pieces.append(piece)
        if row.text.reason:
            self._leave(row)
            self._end(row)
            return
        if row.text.tokens == 1:
            self._attached.settle()
        if not row.sequence.has_room(wait=False):
            self._leave(row)
            if row.sequence.position >= row.sequence.context:
                row.text.end_without_room(row.sequence)
                self._end(row)
            else:
                self._stalled.append(row)
                self._stalled.sort(key=lambda stalled: stalled.index)

    def _end_stalemate(self) -> None:
        """Every sequence waits for memory: the one that began last ends if not even the first can have any."""
        if self._stalled[0].sequence.has_room():
            self._join(self._stalled.pop(0))
        else:
            row = self._stalled.pop()
            row.text.end_without_room(row.sequence)
            self._end(row)

    def _join(self, row: Row) -> None:
        self._running.append(row)
        self._engine.join(row)

    def _leave(self, row: Row) -> None:
        self._engine.leave(row)
        self._running.remove(row)

    def _end(self, row: Row) -> None:
        """Gives an ended row's memory back, to those that wait for some first."""
        self._attached.close_sequence(row.sequence)
        self._refused = False
        row.pieces.append(row.text.rest())
        now_s = time.monotonic()
        generation = Generation(
            len(row.prompt),
            row.sequence.kept,
            row.text.tokens,
            row.text.reason,
            row.text.detail,
            row.prompted_s - row.began_s,
            now_s - row.prompted_s,
        )
        self._on_result(Result(row.index, "".join(row.pieces), row.tokens, generation))
        while self._stalled and self._stalled[0].sequence.has_room(wait=False):
            self._join(self._stalled.pop(0))


def load_batch(device_uuid: str, kv_type: str, types: Sequence[str], owners: Sequence[str]) -> Any:
    """A GPU with the kernels that a batch needs: `load` of `strata_client.attached.attach`."""
    from strata_client.gpu.batch import load  # loads CUDA, which clients on the host do without

    return load(device_uuid, kv_type, types, owners)


@contextmanager
def open_batch_engine(attached: Attached, rows_max: int) -> Iterator[BatchEngine]:
    """What evaluates up to so many sequences of a model at once, on the device that it is attached to.

    Errors: `ModelError` where a GPU's kernels cannot run the model; `InvalidRequest` for more rows than they take.
    """
    if attached.kernels is None:
        from strata_client.host_batch import HostBatch

        yield HostBatch(attached)
        return
    from strata_client.gpu.batch import GpuBatch

    engine = GpuBatch(attached, rows_max)
    try:
        yield engine
    finally:
        with suppress(VmmError):
            engine.close()
