"""Batches on a GPU that the host plays, with a real daemon: texts beside those of single runs."""

import pytest

from strata_client.batch import Batch, Result, load_batch, open_batch_engine
from strata_client.engine import open_engine
from strata_client.gpu.batch import GpuBatch
from strata_client.sampler import SamplerOptions
from tests.helpers.daemon import Daemon, running_daemon
from tests.helpers.played_gpu import attached_micro, play

PROMPTS = [
    [5, 9, 44, 101, 3, 77, 12, 12, 200, 31, 8],
    [7],
    list(range(20, 60)),
    [101, 3, 77],
    [200, 31, 8, 5, 9],
]
TOKENS = [12, 9, 5, 20, 1]


class NoEnd:
    """A tokenizer without end tokens."""

    end_tokens = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


def alone(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, options: SamplerOptions, n: int, *, gpu: bool
) -> list[list[int]]:
    """Each prompt's tokens, in a run of its own."""
    texts = []
    with attached_micro(daemon, monkeypatch, gpu=gpu) as attached, open_engine(attached) as engine:
        for prompt in PROMPTS:
            engine.sequence.restart()
            engine.sequence.prepare(len(prompt))
            engine.begin(prompt, options)
            tokens = [engine.next_token()]
            while len(tokens) < n:
                assert engine.sequence.has_room()
                tokens.append(engine.next_token())
            texts.append(tokens)
    return texts


def batch(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, options: SamplerOptions, n: int, rows: int, context: int = 256
) -> list[list[int]]:
    """Each prompt's tokens, so many at once."""
    results: list[Result] = []
    with (
        attached_micro(daemon, monkeypatch, gpu=True, context=context, load=load_batch) as attached,
        open_batch_engine(attached, rows) as engine,
    ):
        assert isinstance(engine, GpuBatch)
        engine._prompt.tokens_max = 16
        Batch(
            engine, NoEnd(), options=options, stop_strings=(), max_tokens=n, rows_max=rows, on_result=results.append
        ).run(PROMPTS)
        assert attached.opened.steps.idle or not engine._device.synchronize()
    assert sorted(result.index for result in results) == list(range(len(PROMPTS)))
    return [list(result.tokens) for result in sorted(results, key=lambda result: result.index)]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_greedy_texts(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The texts are those of single runs, also where prompts wait for a place."""
    greedy = SamplerOptions(temperature=0)
    with running_daemon() as daemon:
        wanted = alone(daemon, monkeypatch, greedy, 8, gpu=True)
        assert batch(daemon, monkeypatch, greedy, 8, rows) == wanted
