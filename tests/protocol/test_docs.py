"""The commands that README.md and docs/ give for a daemon of one's own do what they say, pasted as they are."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("README.md", "docs/devices.md")
    for number, block in enumerate(BLOCK.findall((ROOT / page).read_text()))
    if "vmmd --config" in block
]


@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_to_be_pasted(block: str) -> None:
    """The client finds the daemon that was started a line before, and ends well."""
    place = tempfile.mkdtemp(prefix="st-", dir="/tmp")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    try:
        script = f"set -e\n{block.replace('/tmp/strata-', f'{place}/')}\nwait"
        done = subprocess.run(
            ["bash", "-c", script], cwd=place, env=environment, capture_output=True, timeout=120, check=False
        )
    finally:
        shutil.rmtree(place)
    assert done.returncode == 0, done.stderr.decode()
    assert "private" not in done.stderr.decode()
    assert done.stdout.strip()


def test_there_are_such_commands() -> None:
    """Of each kind."""
    assert len(BLOCKS) == 3
