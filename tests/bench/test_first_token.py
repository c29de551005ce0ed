"""From exec to the first token of `strata-client generate`, with a model of Qwen3-30B-A3B's shape."""

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strata_client import model_cache
from tests.bench import report
from tests.bench.large_model import random_model
from tests.bench.report import Row
from tests.helpers.cuda_peer import GIB, Machine
from tests.helpers.daemon import Daemon, client, running_daemon, wait_until
from vmmd.driver import cuda_calls

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

RUNS = 9
COLD_RUNS = 2
PROMPT = "abcdefgh" * 64
"""512 tokens: the vocabulary of random models has no merges for it."""

STAGES = ("imports", "connect", "open", "map", "tokenizer", "context", "kernels", "wait for kernels", "prefill")


@contextmanager
def settled_model(directory: Path, *options: str) -> Iterator[Path]:
    """A file of 48 layers with 128 experts that has been there for as long as it takes for its header to be kept."""
    with random_model(directory, *options) as path:
        time.sleep(model_cache.SETTLED_S + 0.1)
        yield path


def generate(daemon: Daemon, model: Path, prompt: str = PROMPT) -> dict[str, float]:
    """Seconds that the stages took, all of a name together, `ready` and `first token` since exec."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    options = ("--max-tokens", "1", "--json", "--stats", "--model", str(model), "--socket", str(daemon.directory))
    done = client("generate", prompt, *options, env=environ)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["statistics"]
    times = {"ready": found["start_up_s"]}
    for stage in found["stages"]:
        name = stage["stage"]
        times[name] = stage["began_s"] if name == "first token" else times.get(name, 0.0) + stage["took_s"]
    return times


def rows_of(runs: list[dict[str, float]]) -> list[Row]:
    """Medians of the stages, which overlap."""
    names = [name for name in STAGES if name in runs[0]]
    return [Row(f"of it {name}", statistics.median(run[name] for run in runs), "s", "lower") for name in names]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """With the model resident, and with a daemon that has just started and finds the file in the page cache."""
    machine = Machine.real()
    config = f"host_cap_bytes = {40 * GIB}\n"
    with settled_model(tmp_path, "--mix", "q4_k_m") as model:
        with machine.daemon(config) as daemon:
            generate(daemon, model)  # compiles
            wait_until(lambda: daemon.status()["models"][0]["homes"] == 48 * 128, 60)
            warm = [generate(daemon, model) for _ in range(RUNS)]
        cold = []
        for _ in range(COLD_RUNS):
            with machine.daemon(config) as daemon:
                cold.append(generate(daemon, model))
    rows = [
        Row("warm daemon, exec to the first token", _first(warm), "s", "lower", 1.2, None, 3.4),
        *rows_of(warm),
        Row("cold daemon, file in the page cache", _first(cold), "s", "lower", 3.0, None, 3.4),
    ]
    gpus, _ = cuda_calls.find_gpus(cuda_calls.bindings())
    report.write("first-token", gpus[0].name, "NVIDIA", rows)


def test_on_the_host(tmp_path: Path) -> None:
    """As many experts, but small ones, on the host driver; numpy's prefill apart, what a start costs without a GPU."""
    options = ("--hidden", "64", "--expert-hidden", "64", "--type", "Q8_0", "--type-output", "Q8_0")
    with settled_model(tmp_path, *options) as model, running_daemon("slab_bytes = 4194304\n") as daemon:
        generate(daemon, model, "a")
        warm = [generate(daemon, model, "a") for _ in range(RUNS)]
    rows = [
        Row(
            "warm daemon, exec until the engine is ready", statistics.median(run["ready"] for run in warm), "s", "lower"
        )
    ]
    report.write("first-token", f"{os.cpu_count()} CPUs", "host", [*rows, *rows_of(warm)])


def _first(runs: list[dict[str, float]]) -> float:
    return statistics.median(run["first token"] for run in runs)
