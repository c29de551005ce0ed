"""How well a model predicts a text: logits of every position, and their mean loss."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from strata_client.engine import CHUNK_TOKENS, Engine
from strata_client.models.base import F32, ModelError


@dataclass(frozen=True)
class Perplexity:
    """`mean_nll` is the mean of -ln p over `predicted` tokens; not a number if there are none."""

    tokens: int
    predicted: int
    mean_nll: float

    @property
    def perplexity(self) -> float:
        """exp of the mean loss."""
        return float(np.exp(self.mean_nll))


def perplexity(engine: Engine, tokens: Sequence[int], logits_file: IO[bytes] | None) -> Perplexity:
    """Evaluates a text in windows of the engine's context, each from an empty cache.

    A window's first token is not predicted. Every position's logits go to
    `logits_file` as float32 `[n_tokens, n_vocab]` in numpy's format.

    Errors: `ModelError` (logits that are not finite), `OSError` (the file), any `VmmError`.
    """
    if logits_file is not None:
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(tokens), engine.attached.model.params.n_vocab)}
        np.lib.format.write_array_header_1_0(logits_file, header)
    total, predicted = 0.0, 0
    for start in range(0, len(tokens), engine.sequence.context):
        window = tokens[start : start + engine.sequence.context]
        engine.sequence.restart()
        engine.sequence.prepare(len(window))
        for at in range(0, len(window), CHUNK_TOKENS):
            chunk = window[at : at + CHUNK_TOKENS]
            logits = engine.step(chunk, prompt=True, all_logits=True)
            targets = window[at + 1 : at + 1 + len(chunk)]
            total += _loss(logits[: len(targets)], targets)
            predicted += len(targets)
            if logits_file is not None:
                logits_file.write(np.ascontiguousarray(logits, "<f4").tobytes())
    return Perplexity(len(tokens), predicted, total / predicted if predicted else float("nan"))


def _loss(logits: F32, targets: Sequence[int]) -> float:
    """Sum of -ln p of each row's target."""
    if not len(targets):
        return 0.0
    scores = logits.astype(np.float64)
    highest = scores.max(axis=1, keepdims=True)
    if not np.isfinite(highest).all():
        raise ModelError("the logits are not finite: the model file is damaged or its types overflow")
    log_sums = highest[:, 0] + np.log(np.exp(scores - highest).sum(axis=1))
    return float((log_sums - scores[np.arange(len(targets)), targets]).sum())


@contextmanager
def replacing(path: Path | None) -> Iterator[IO[bytes] | None]:
    """A temporary file beside `path` that becomes it at the end, or is removed on an error."""
    if path is None:
        yield None
        return
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
