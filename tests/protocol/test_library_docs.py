"""What the library's page and its example say is what happens."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import strata_client
from tests.helpers.daemon import Daemon, running_daemon

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = '{}[host]\ndevice_bytes = "3MiB"\nram_bytes = "1MiB"\n'


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG.format("")) as running:
        yield running


def test_the_page_s_code_runs(daemon: Daemon) -> None:
    """Word for word, against a daemon in the usual place that has too little for the last growth."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "library.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    environment = {**os.environ, "RUNTIME_DIRECTORY": os.fspath(daemon.directory)}
    argv = [sys.executable, "-W", "error", "-c", "\n".join(blocks)]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    assert "2.00 MiB (2 slabs) asked for" in done.stdout.decode()
    assert not daemon.status()["sessions"]


def test_the_page_names_every_error() -> None:
    """And nothing that the package does not have."""
    text = (DOCS / "library.md").read_text()
    names = [name for name in strata_client.__all__ if name not in ("View", "Device")]
    assert [name for name in names if f"{name}" not in text] == []


def test_the_example_gives_way() -> None:
    """Arrays of whatever framework is there, in leased memory, of which half goes when another client needs it."""
    with running_daemon('slab_bytes = "64KiB"\n[host]\ndevice_bytes = "1MiB"\nram_bytes = "1MiB"\n') as running:
        argv = [sys.executable, "-W", "error", os.fspath(DOCS / "examples" / "lend_memory.py")]
        done = subprocess.run([*argv, os.fspath(running.directory)], capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr.decode()
        first, second = done.stdout.decode().splitlines()
        sums = ", ".join(str(32768.0 * n) for n in range(1, 9))
        assert re.fullmatch(rf"8 arrays of (numpy|PyTorch) in leased memory, sums \[{re.escape(sums)}\]", first)
        assert second == "another client has half of the device; 4 arrays are left"
        assert not running.status()["sessions"]
