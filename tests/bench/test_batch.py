"""How many tokens a second several sequences of a model of Qwen3-30B-A3B's shape have in sum on one GPU."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata_client.batch import Batch, BatchEngine, Result, Row, load_batch, open_batch_engine
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.sampler import SamplerOptions
from tests.bench import report
from tests.bench.large_model import attached_model, random_model, write
from tests.helpers.cuda_peer import GIB, Machine

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(400)]

TOKENS = 160
CONTEXT = 1024
HBM_BYTES_PER_S = 4.8e12
TARGETS = {16: (3100, 1056)}
"""By sequences: tokens a second wanted, and llama.cpp's."""


class NoEnd:
    """A tokenizer without end tokens: random weights mean nothing."""

    end_tokens = frozenset[int]()

    def token_bytes(self, token: int) -> bytes:
        """Some text."""
        return b"x"


class Timed:
    """A batch engine, and when each step of how many rows had been read."""

    def __init__(self, engine: BatchEngine) -> None:
        self.attached = engine.attached
        self.steps: list[tuple[float, int]] = []
        self.prefill, self.join, self.leave = engine.prefill, engine.join, engine.leave
        self._step = engine.step

    def step(self) -> Sequence[tuple[Row, int]]:
        """One step, noted."""
        tokens = self._step()
        self.steps.append((time.perf_counter(), len(tokens)))
        return tokens

    def tokens_per_s(self, rows: int) -> float:
        """In sum, of the longest run of steps of all rows, without the first of them, which makes the graph."""
        runs: list[list[float]] = [[]]
        for when, n in self.steps:
            if n == rows:
                runs[-1].append(when)
            else:
                runs.append([])
        run = max(runs, key=len)[2:]
        return rows * (len(run) - 1) / (run[-1] - run[0])


@pytest.fixture(scope="module")
def machine() -> Machine:
    """The GPU."""
    return Machine.real()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """18.5 GB of random weights; every expert is as likely."""
    with random_model(tmp_path_factory.mktemp("model"), "--mix", "q4_k_m", "--skew", "0") as path:
        yield path


@contextmanager
def opened(machine: Machine, path: Path, rows: int) -> Iterator[BatchEngine]:
    """What evaluates so many sequences, with a daemon of its own."""
    with (
        machine.daemon(f"host_cap_bytes = {40 * GIB}\n") as daemon,
        attached_model(daemon.directory, path, CONTEXT, sequences=rows, load=load_batch) as attached,
        open_batch_engine(attached, rows) as engine,
    ):
        yield engine


def run(engine: Any, prompts: Sequence[Sequence[int]], rows: int, tokens: int) -> float:
    """Seconds in which prompts are continued."""
    results: list[Result] = []
    began = time.perf_counter()
    Batch(
        engine, NoEnd(), options=SamplerOptions(temperature=0.8, top_k=40, seed=1), stop_strings=(), max_tokens=tokens,
        rows_max=rows, on_result=results.append,
    ).run(prompts)  # fmt: skip
    assert [len(result.tokens) for result in results] == [tokens] * len(prompts)
    return time.perf_counter() - began


def prompts(n: int, length: int) -> list[list[int]]:
    """Different ones."""
    return [[(7919 * i + 104729 * row) % 150000 for i in range(length)] for row in range(n)]


def limit_tokens_per_s(model: Qwen3Moe, rows: int) -> float:
    """What the memory's bandwidth allows: weights once a step, and each expert that a row is routed to."""
    params = model.params
    distinct = params.n_experts * (1 - (1 - params.top_k / params.n_experts) ** rows)
    experts = params.n_layers * distinct * model.expert_sizes().sum() / (params.n_layers * params.n_experts)
    weights = sum(extent.length_bytes for extent in model.weight_extents() if extent.name != "token_embd.weight")
    return rows * HBM_BYTES_PER_S / (float(experts) + weights)


def test_batches(machine: Machine, model_path: Path) -> None:
    """Tokens a second in sum while so many run, and of 64 prompts of 512 tokens that come and go, 16 at once."""
    rows = []
    with opened(machine, model_path, 32) as engine:
        for n in (1, 4, 8, 16, 32):
            timed = Timed(engine)
            run(timed, prompts(n, 8), n, TOKENS)
            target, peer = TARGETS.get(n, (None, None))
            limit = limit_tokens_per_s(engine.attached.model, n)
            name = f"{n} sequences, all resident: tokens a second in sum"
            rows.append(report.Row(name, timed.tokens_per_s(n), "tok/s", "higher", target, limit, peer))
        took_s = run(engine, prompts(64, 512), 16, TOKENS)
        rows.append(report.Row("64 prompts of 512 tokens, 16 at once", 64 * TOKENS / took_s, "tok/s", "higher"))
    write("batch", rows)
