"""`strata-client` on a GPU: a whole model's logits and text.

The packaged model's are tested, and those of other files where STRATA_REFERENCES names a
folder with NAME.gguf and ref-NAME.npz, which have `tests/data/ref-IQ3_S.npz`'s arrays.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from strata_client.attached import attach
from strata_client.engine import Engine, open_engine
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from strata_client.run_options import DEFAULT_MODEL
from strata_client.sampler import SamplerOptions
from tests.helpers.cuda_peer import GIB, MIB, Machine
from tests.helpers.daemon import Daemon, client, vmmctl
from tests.helpers.library_peer import LibraryEngine
from tests.helpers.peer import Remote
from vmmd.errors import Exhausted

pytestmark = pytest.mark.gpu


class Reference(NamedTuple):
    """A model's file, and what transformers computes of it in float32."""

    model: str
    arrays: Path

    @property
    def is_float(self) -> bool:
        """Whether weights are floats, so that the text is the same to its last token."""
        return "f16" in Path(self.model).stem


PACKAGED = Reference(DEFAULT_MODEL, Path(__file__).parents[1] / "data" / "ref-IQ3_S.npz")
OTHERS = [
    Reference(str(path), path.with_name(f"ref-{path.stem.removeprefix('tiny-')}.npz"))
    for path in sorted(Path(os.environ.get("STRATA_REFERENCES", os.devnull)).glob("*.gguf"))
]
REFERENCES = pytest.mark.parametrize("reference", [PACKAGED, *OTHERS], ids=lambda r: Path(r.model).stem)
TEXTS = range(3)
LOGITS_MEDIAN = {"f16": 0.03, "bf16": 0.03, "q8_0": 0.06}
LOGITS_MEDIAN_FLOAT = {"f16": 0.01, "bf16": 0.03, "q8_0": 0.06}
"""Median absolute difference from transformers in float32, by type of K/V cells."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """The GPUs."""
    return Machine.real()


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    """A vmmd with room for everything."""
    with machine.daemon(f"host_cap_bytes = {4 * GIB}\n") as daemon:
        yield daemon


def logits_of(daemon: Daemon, model: str, text: str, directory: Path, *options: str) -> np.ndarray:
    """The logits that the client saves for a text."""
    (directory / "text").write_text(text)
    saved = directory / "logits.npy"
    saved.unlink(missing_ok=True)
    arguments = (str(directory / "text"), "--socket", str(daemon.directory), "--save-logits", str(saved))
    done = client("perplexity", *arguments, "--model", model, *options)
    assert done.returncode == 0, done.stderr.decode()
    return np.load(saved)


@REFERENCES
@pytest.mark.parametrize("kv_type", LOGITS_MEDIAN)
def test_logits(daemon: Daemon, tmp_path: Path, reference: Reference, kv_type: str) -> None:
    """Logits are those of transformers on the file's own weights, but for rounding of K/V and activations."""
    arrays = np.load(reference.arrays)
    bounds = LOGITS_MEDIAN_FLOAT if reference.is_float else LOGITS_MEDIAN
    for i in TEXTS:
        logits = logits_of(daemon, reference.model, str(arrays[f"text_{i}"]), tmp_path, "--kv-type", kv_type)
        difference = np.abs(logits - arrays[f"logits_{i}"])
        print(kv_type, i, "median", np.median(difference), "largest", difference.max())
        assert np.median(difference) <= bounds[kv_type]


@REFERENCES
def test_greedy_text(daemon: Daemon, reference: Reference) -> None:
    """Greedy tokens are the reference's until rounding decides between two that are as likely."""
    arrays = np.load(reference.arrays)
    for i in TEXTS:
        arguments = ("--max-tokens", "64", "--temperature", "0", "--json", "--socket", str(daemon.directory))
        done = client("generate", str(arrays[f"text_{i}"]), "--model", reference.model, *arguments)
        assert done.returncode == 0, done.stderr.decode()
        lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
        tokens = [line["token"] for line in lines if line.get("token") is not None]
        assert len(tokens) == 64
        alike = int(np.argmin([*(arrays[f"greedy_{i}"] == tokens), False]))
        print(i, "alike", alike)
        assert alike >= (64 if reference.is_float else 32)


@pytest.mark.parametrize("rows", ["1", "3", "8"])
def test_greedy_texts_of_a_batch(daemon: Daemon, rows: str) -> None:
    """Each prompt's greedy tokens are the reference's as far as a run of its own has them, whatever runs beside it."""
    arrays = np.load(PACKAGED.arrays)
    prompts = [str(arrays[f"text_{i}"]) for i in TEXTS] * 3
    arguments = ("--max-tokens", "64", "--temperature", "0", "--json", "--socket", str(daemon.directory))
    done = client("generate", *prompts, "--batch", rows, *arguments)
    assert done.returncode == 0, done.stderr.decode()
    *results, _ = [json.loads(line) for line in done.stdout.decode().splitlines()]
    texts = [result["tokens"] for result in results]
    assert texts[3:6] == texts[6:] == texts[:3]
    alike = [int(np.argmin([*(arrays[f"greedy_{i}"] == texts[i]), False])) for i in TEXTS]
    print(rows, "alike", alike)
    assert min(alike) >= 32


def test_the_same_bits_wherever_experts_are(daemon: Daemon, machine: Machine, tmp_path: Path) -> None:
    """Logits do not depend on what is resident."""
    text = str(np.load(PACKAGED.arrays)["text_1"])
    resident = logits_of(daemon, DEFAULT_MODEL, text, tmp_path)
    daemon.stop()
    with machine.daemon(f"host_cap_bytes = {4 * GIB}\ncap_bytes = {3 * machine.slab_bytes}\n") as small:
        assert np.array_equal(logits_of(small, DEFAULT_MODEL, text, tmp_path), resident)


def test_the_same_text_while_slots_trade(machine: Machine) -> None:
    """Texts of an engine whose experts give slots to another program, and get them back, in mid-sentence."""
    config = f"host_cap_bytes = {4 * GIB}\ncap_bytes = {12 * MIB}\ngive_back_delay_s = 0.05\n"
    machine = replace(machine, slab_bytes=2 * MIB)
    with machine.daemon(config) as daemon, open_model_file(DEFAULT_MODEL) as model_file:
        with attach(
            Qwen3Moe(model_file), model_file, [daemon.directory], context=512, device=None, kv_type=None,
            say=print, say_verbose=print, signals=Signals(), progress=lambda filled, total: None,
        ) as attached, open_engine(attached) as engine:  # fmt: skip
            quiet = text(engine)
            with Remote(daemon.directory, kind=functools.partial(LibraryEngine, fake=None)) as other:
                other.ask("lease", 0, 4)
                until, texts = time.monotonic() + 5, 0
                slabs = [1, 3, 0, 2, 0]
                while time.monotonic() < until:
                    slabs.append(slabs.pop(0))
                    other.tell("grow" if slabs[-1] else "shrink", slabs[-1])
                    while not other.has_answered():
                        assert text(engine) == quiet
                        texts += 1
                    with suppress(Exhausted):
                        other.answer()
        listed = vmmctl("trades", "--output", "json", "--socket", str(daemon.directory))
    decisions = json.loads(listed.stdout)["decisions"]
    print(texts, "texts beside", len(decisions), "decisions")
    assert texts >= 5
    assert len(decisions) >= 20


def text(engine: Engine, n: int = 300) -> list[int]:
    """Tokens that follow a prompt; nothing is kept."""
    sequence = engine.sequence
    sequence.restart()
    sequence.prepare(16)
    engine.begin(list(range(100, 116)), SamplerOptions(temperature=3, top_k=0, top_p=1, min_p=0, seed=1))
    tokens = [engine.next_token()]
    while len(tokens) < n:
        assert sequence.has_room(), sequence.refusal
        tokens.append(engine.next_token())
    return tokens


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(daemon: Daemon, tool: str) -> None:
    """CUDA's own checker finds nothing in a prompt of several chunks and some tokens of text."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    prompt = str(np.load(PACKAGED.arrays)["text_1"])
    command = ["-m", "strata_client.main", "generate", prompt, "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run(
        [program, "--tool", tool, "--error-exitcode", "7", sys.executable, *command, "--socket", str(daemon.directory)],
        capture_output=True, timeout=240, check=False, text=True,
    )  # fmt: skip
    print(done.stdout[-4000:], done.stderr[-2000:])
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0
