"""The sequences of a batch, on the host."""

from collections.abc import Sequence

import numpy as np

from strata_client.attached import Attached
from strata_client.batch import Row
from strata_client.engine import CHUNK_TOKENS
from strata_client.models.base import F32
from strata_client.sampler import Sampler


class HostBatch:
    """A `strata_client.batch.BatchEngine`: a step evaluates a token of each row at once. For one thread."""

    def __init__(self, attached: Attached) -> None:
        """Takes what stays the caller's."""
        self.attached = attached
        self._rows: list[Row] = []
        self._first: dict[Row, F32] = {}  # logits of those whose prompts are evaluated, and no token

    def prefill(self, row: Row) -> bool:
        """Evaluates the next chunk of a prompt: the chunks are those of a prompt alone, and so are the bits."""
        attached, sequence = self.attached, row.sequence
        tokens = row.prompt[sequence.position : sequence.position + CHUNK_TOKENS]
        logits = attached.step_on_host(
            [(sequence, tokens)],
            np.asarray(tokens, np.int32),
            lambda at, given: attached.stages[at].model.forward(
                given, sequence.position, attached.stages[at].opened.memory, sequence.kvs[at], prompt=True
            ),
            prompt=True,
        )
        if sequence.position < len(row.prompt):
            return False
        self._first[row] = logits
        return True

    def join(self, row: Row) -> None:
        """Lets it take part in steps."""
        self._rows.append(row)

    def leave(self, row: Row) -> None:
        """Lets it take part no more."""
        self._rows.remove(row)

    def step(self) -> Sequence[tuple[Row, int]]:
        """The next token of every row."""
        going = [row for row in self._rows if row not in self._first]
        logits = dict(zip(going, self._decode(going), strict=True)) if going else {}
        logits |= self._first
        tokens = [(row, _choose(row, logits[row])) for row in self._rows]
        self._first.clear()
        return tokens

    def _decode(self, rows: Sequence[Row]) -> F32:
        """Evaluates the last token of each row; logits `[n_rows, n_vocab]`."""
        attached = self.attached
        last = np.array([row.tokens[-1] for row in rows], np.int32)
        sequences = [row.sequence for row in rows]
        return attached.step_on_host(
            [(row.sequence, row.tokens[-1:]) for row in rows],
            last,
            lambda at, given: attached.stages[at].model.decode(
                given,
                [s.position for s in sequences],
                attached.stages[at].opened.memory,
                [s.kvs[at] for s in sequences],
            ),
            prompt=False,
        )


def _choose(row: Row, logits: F32) -> int:
    return Sampler(row.options, len(row.tokens)).sample(logits, row.seen)
