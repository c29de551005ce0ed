"""`strata-client` on a GPU: a whole model's logits and text."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.cuda_peer import GIB, Machine
from tests.helpers.daemon import Daemon, client
from tests.helpers.require_gpu import require_gpu

pytestmark = pytest.mark.gpu

REFERENCE = np.load(Path(__file__).parents[1] / "data" / "ref-IQ3_S.npz")
TEXTS = range(3)
LOGITS_MEDIAN = {"f16": 0.03, "bf16": 0.03, "q8_0": 0.06}
"""Median absolute difference from transformers in float32."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """The GPUs."""
    require_gpu()
    return Machine.real()


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    """A vmmd with room for everything."""
    with machine.daemon(f"host_cap_bytes = {4 * GIB}\n") as daemon:
        yield daemon


def logits_of(daemon: Daemon, text: str, directory: Path, *options: str) -> np.ndarray:
    """The logits that the client saves for a text."""
    (directory / "text").write_text(text)
    saved = directory / "logits.npy"
    saved.unlink(missing_ok=True)
    arguments = (str(directory / "text"), "--socket", str(daemon.directory), "--save-logits", str(saved))
    done = client("perplexity", *arguments, *options)
    assert done.returncode == 0, done.stderr.decode()
    return np.load(saved)


@pytest.mark.parametrize("kv_type", LOGITS_MEDIAN)
def test_logits(daemon: Daemon, tmp_path: Path, kv_type: str) -> None:
    """Logits are those of transformers on the file's own weights, but for rounding of K/V and activations."""
    for i in TEXTS:
        wanted = REFERENCE[f"logits_{i}"]
        logits = logits_of(daemon, str(REFERENCE[f"text_{i}"]), tmp_path, "--kv-type", kv_type)
        difference = np.abs(logits - wanted)
        print(kv_type, i, "median", np.median(difference), "largest", difference.max())
        assert np.median(difference) <= LOGITS_MEDIAN[kv_type]


def test_greedy_text(daemon: Daemon) -> None:
    """Greedy tokens are the reference's until rounding decides between two that are as likely."""
    for i in TEXTS:
        arguments = ("--max-tokens", "64", "--temperature", "0", "--json", "--socket", str(daemon.directory))
        done = client("generate", str(REFERENCE[f"text_{i}"]), *arguments)
        assert done.returncode == 0, done.stderr.decode()
        lines = [json.loads(line) for line in done.stdout.decode().splitlines()]
        tokens = [line["token"] for line in lines if line.get("token") is not None]
        assert len(tokens) == 64
        alike = int(np.argmin([*(REFERENCE[f"greedy_{i}"] == tokens), False]))
        print(i, "alike", alike)
        assert alike >= 32


def test_the_same_bits_wherever_experts_are(daemon: Daemon, machine: Machine, tmp_path: Path) -> None:
    """Logits do not depend on what is resident."""
    text = str(REFERENCE["text_1"])
    resident = logits_of(daemon, text, tmp_path)
    few = f"host_cap_bytes = {4 * GIB}\ncap_bytes = {3 * machine.slab_bytes}\n"
    daemon.stop()
    with machine.daemon(few) as small:
        assert np.array_equal(logits_of(small, text, tmp_path), resident)
