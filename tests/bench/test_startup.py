"""From exec to a tokenized prompt, with a vocabulary of Qwen3's size: first opening, and later ones."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata_client import model_cache
from tests.bench.report import Row, write
from tests.helpers.gguf_builder import build, small_keys, small_tensors
from tests.helpers.vocabulary import sample_text, vocabulary_keys

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]

RUNS = 9
PROMPT_WORDS = 110  # some 500 tokens

PROGRAM = """
import gc, json, sys, time
gc.disable()
from pathlib import Path
import numpy
from strata_client.model_cache import open_model
from strata_client.output import seconds_since_start
from strata_client.tokenizer import Tokenizer
began = time.thread_time()
model_file, vocabulary = open_model(sys.argv[1], Path(sys.argv[2]))
opened = time.thread_time()
tokens = Tokenizer(vocabulary).encode(sys.argv[3])
ended = time.thread_time()
print(json.dumps([seconds_since_start(), opened - began, ended - opened, len(tokens)]))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    keys = {key: value for key, value in small_keys().items() if not key.startswith("tokenizer.")}
    path = tmp_path / "model.gguf"
    path.write_bytes(build(keys | vocabulary_keys(), small_tensors()))
    time.sleep(model_cache.SETTLED_S + 0.1)  # else it is not kept
    return path


def _run(model: Path, cache: Path) -> list[float]:
    argv = [sys.executable, "-c", PROGRAM, os.fspath(model), os.fspath(cache), sample_text(PROMPT_WORDS)]
    return list(json.loads(subprocess.run(argv, capture_output=True, check=True, timeout=120).stdout))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} {len(os.sched_getaffinity(0))} CPUs"


def test_tokenizer_of_a_large_vocabulary(model: Path, tmp_path: Path) -> None:
    """From the start of the process until a prompt of some 500 tokens is tokenized, and the processor's time of it."""
    cold = [_run(model, tmp_path / f"cold{n}") for n in range(3)]
    _run(model, tmp_path / "warm")
    warm = [_run(model, tmp_path / "warm") for _ in range(RUNS)]

    def median(runs: list[list[float]], *columns: int) -> float:
        return statistics.median(sum(run[column] for column in columns) for run in runs)

    assert 400 < warm[0][3] < 700
    rows = [
        Row("cold, exec to prompt tokenized", median(cold, 0), "s", "lower"),
        Row("cold, open and vocabulary, processor", median(cold, 1), "s", "lower"),
        Row("warm, exec to prompt tokenized", median(warm, 0), "s", "lower"),
        Row("warm, open and vocabulary, processor", median(warm, 1), "s", "lower"),
        Row("warm, tokenizers imported and prompt encoded, processor", median(warm, 2), "s", "lower"),
        Row("warm, open to prompt tokenized, processor", median(warm, 1, 2), "s", "lower", target=0.15),
    ]
    write("startup", _processor(), "host", rows)


def test_help() -> None:
    """From exec to the end of a program that only prints help, and of an interpreter that does nothing."""
    rows = []
    for name, arguments in {
        "python, nothing": ["-c", "pass"],
        "--help": ["-m", "strata_client.main", "--help"],
        "generate --help": ["-m", "strata_client.main", "generate", "--help"],
    }.items():
        times = []
        for _ in range(RUNS):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            times.append(time.perf_counter() - began)
        rows.append(Row(name, statistics.median(times), "s", "lower"))
    write("help", _processor(), "host", rows)
