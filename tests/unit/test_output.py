"""What standard output and standard error look like on terminals and elsewhere."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.helpers.daemon import client

PROGRAM = """
from strata_client.output import Output, say
output = Output()
say("first")
output.text("Once upon")
say("grown")
say("again")
output.text(" a time\\n")
say("then")
output.text("the")
output.end()
output.end()
say("last")
"""


def read_all(fd: int) -> bytes:
    data = b""
    try:
        while piece := os.read(fd, 4096):
            data += piece
    except OSError:  # what a terminal says at its end
        pass
    os.close(fd)
    return data


def shown(*, out: bool, err: bool, same: bool = True) -> tuple[list[str], list[str]]:
    """Lines that the program leaves on a terminal for standard output and one for standard error, or in pipes."""
    ends = [pty.openpty() if on_terminal else os.pipe() for on_terminal in (out, err)]
    if same and out and err:
        os.close(ends[1][0])
        os.close(ends[1][1])
        ends[1] = ends[0]
    argv = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=ends[0][1], stderr=ends[1][1])
    for end in {end[1] for end in ends}:
        os.close(end)
    texts = {fd: read_all(fd).decode().splitlines() for fd in {end[0] for end in ends}}
    assert process.wait(30) == 0
    return texts[ends[0][0]], texts[ends[1][0]]


def test_log_lines_begin_on_lines_of_their_own() -> None:
    """On a terminal for both, a line of the log does not begin within the text, and the text goes on below it."""
    lines, _ = shown(out=True, err=True)
    assert lines == ["first", "Once upon", "grown", "again", " a time", "then", "the", "last"]


@pytest.mark.parametrize("err", [False, True])
def test_nothing_is_added_elsewhere(err: bool) -> None:
    """With standard error, or standard output, somewhere else both are what was written and nothing more."""
    log = ["first", "grown", "again", "then", "last"]
    assert shown(out=True, err=err, same=False) == (["Once upon a time", "the"], log)
    assert shown(out=False, err=err) == (["Once upon a time", "the"], log)


@pytest.mark.parametrize("arguments", [("inspect",), ("generate", "The dog", "A cat", "--max-tokens", "9")])
def test_a_reader_that_has_gone(arguments: Sequence[str]) -> None:
    """Where nobody reads standard output any more the program ends as by SIGPIPE, without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    done = client(*arguments, stdout=writer)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"Error" not in done.stderr and b"strata-client: " not in done.stderr
