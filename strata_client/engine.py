"""The engine of one sequence: evaluates its tokens and chooses the next."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from strata_client.attached import Attached
from strata_client.models.base import F32, I32
from strata_client.sampler import Sampler, SamplerOptions
from strata_client.sequence import TokenSequence
from vmmd.errors import VmmError

CHUNK_TOKENS = 64
"""Tokens of a prompt in one step."""


class Engine:
    """One sequence, on the host. For one thread.

    Attributes:
        attached: the model and its memory.
        sequence: the sequence's cells.
    """

    def __init__(self, attached: Attached, sequence: TokenSequence) -> None:
        """Takes what stays the caller's."""
        self.attached = attached
        self.sequence = sequence
        self._sampler = Sampler(SamplerOptions())
        self._seen: set[int] = set()
        self._last: int | None = None  # chosen, but not evaluated
        self._logits: F32

    def step(self, tokens: Sequence[int], *, prompt: bool, all_logits: bool = False) -> F32:
        """Evaluates tokens at the end of the sequence.

        Returns:
            Logits float32 `[n_vocab]` of the last token, or `[n, n_vocab]` of all.

        Errors: `LeaseRevoked` if the daemon has taken cells back.
        """
        attached, sequence = self.attached, self.sequence

        def evaluate(at: int, given: I32 | F32) -> F32:
            stage = attached.stages[at]
            return stage.model.forward(
                given,
                sequence.position,
                stage.opened.memory,
                sequence.kvs[at],
                prompt=prompt,
                all_logits=all_logits,
            )

        return attached.step_on_host([(sequence, tokens)], np.asarray(tokens, np.int32), evaluate, prompt=prompt)

    def prefill(self, tokens: Sequence[int]) -> F32:
        """Evaluates a prompt in chunks; logits float32 `[n_vocab]` of its last token."""
        for at in range(0, len(tokens), CHUNK_TOKENS):
            logits = self.step(tokens[at : at + CHUNK_TOKENS], prompt=True)
        return logits

    def begin(self, prompt: Sequence[int], options: SamplerOptions) -> None:
        """Evaluates a prompt, at least one token, and takes how to choose those that follow it.

        Cells that hold its beginning already are kept. Errors: as `step`.
        """
        self.sequence.keep(prompt)
        self._sampler, self._seen, self._last = Sampler(options), set(prompt), None
        self._logits = self.prefill(prompt[self.sequence.kept :])

    def next_token(self) -> int:
        """The next token of the text. For each but the first, the sequence's `has_room` is asked before.

        Errors: as `step`; `ModelError` if the logits are not finite.
        """
        if self._last is not None:
            self._seen.add(self._last)
            self._logits = self.step([self._last], prompt=False)
        self._last = self._sampler.sample(self._logits, self._seen)
        return self._last

    def settle(self) -> None:
        """The first token is out and more will follow."""
        self.attached.settle()

    def close(self) -> None:
        """Waits until no step runs any more."""


@contextmanager
def open_engine(attached: Attached, conversation: str | None = None) -> Iterator[Engine]:
    """One sequence of a model, new or a conversation's: see `Attached.sequence`.

    Errors: any `VmmError`; `ModelError` where a GPU's kernels cannot run the model.
    """
    with attached.sequence(conversation) as sequence:
        if attached.stages[0].kernels is None:
            engine = Engine(attached, sequence)
        else:
            from strata_client.gpu.engine import GpuEngine  # loads CUDA, which clients on the host do without

            engine = GpuEngine(attached, sequence)
        try:
            yield engine
        finally:
            with suppress(VmmError):
                engine.close()
