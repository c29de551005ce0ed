"""How fast a model of Qwen3-30B-A3B's shape runs split over two GPUs, against one, all of it resident."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata_client.sampler import SamplerOptions
from strata_client.split import Split
from tests.bench.large_model import attached_engine, random_model, write
from tests.bench.report import Row
from tests.bench.test_decode import tokens_per_s
from tests.bench.test_peer import PROMPT
from tests.helpers.cuda_peer import GIB, Machine

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(400)]

DEPTH = 4096


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Two GPUs."""
    return Machine.pair()


@pytest.fixture(scope="module")
def model_path(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """18.5 GB of random weights."""
    with random_model(tmp_path_factory.mktemp("model"), "--mix", "q4_k_m") as path:
        yield path


@contextmanager
def opened(machine: Machine, path: Path, split: Split | None) -> Iterator[Any]:
    """An engine with a daemon of its own, on the first GPU or on two."""
    with (
        machine.daemon(f"host_cap_bytes = {40 * GIB}\n") as daemon,
        attached_engine(daemon.directory, path, PROMPT + 256, print, device=machine.uuids[0], split=split) as engine,
    ):
        yield engine


def prompt_tokens_per_s(engine: Any) -> float:
    """Of the best of three times."""
    tokens, took_s = [i * 7919 % 150000 for i in range(PROMPT)], []
    engine.sequence.prepare(PROMPT)
    for _ in range(3):
        engine.sequence.restart()
        began = time.perf_counter()
        engine.begin(tokens, SamplerOptions(temperature=0))
        engine.next_token()
        took_s.append(time.perf_counter() - began)
    return PROMPT / min(took_s)


def test_split(machine: Machine, model_path: Path) -> None:
    """Decoding and a long prompt on one GPU, and split over two; what `auto` takes is printed."""
    rates: dict[str, dict[bool, float]] = {"decode": {}, "deep": {}, "prompt": {}}
    for split in (None, Split(None, machine.uuids[:2])):
        with opened(machine, model_path, split) as engine:
            is_split = split is not None
            assert len(engine.attached.stages) == 1 + is_split
            rates["decode"][is_split] = max(tokens_per_s(engine, 6) for _ in range(3))
            rates["deep"][is_split] = tokens_per_s(engine, DEPTH)
            rates["prompt"][is_split] = prompt_tokens_per_s(engine)
    rows = []
    names = {
        "decode": ("decode from an empty context", 0.95, 0.96),
        "deep": (f"decode at depth {DEPTH:,}", None, None),
        "prompt": (f"prompt of {PROMPT:,} tokens", 1.7, 1.67),
    }
    for key, (name, target, peer) in names.items():
        rows += [
            Row(f"{name}, one GPU", rates[key][False], "tok/s", "higher"),
            Row(f"{name}, split over two", rates[key][True], "tok/s", "higher"),
            Row(f"{name}, times one GPU", rates[key][True] / rates[key][False], "times", "higher", target, None, peer),
        ]
        if key == "decode":
            cost_us = 1e6 / rates[key][True] - 1e6 / rates[key][False]
            rows.append(Row("what the split costs a token", cost_us, "us", "lower", 80))
    write("split", rows)
