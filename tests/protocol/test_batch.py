"""Batches of `strata-client generate` against real daemons: texts, orders, files, memory and signals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.daemon import Daemon, client, running_daemon, wait_until

PROMPTS = (
    "Once upon a time, a small fox found a silver key under the old bridge.",
    "The dog",
    "Lily and Tom went to the park. They saw a big tree with red apples, and Tom wanted one. " * 3,
    "A",
    "It rained all day. The boy looked out of the window and",
)
GREEDY = ("--temperature", "0")
SEEDED = ("--seed", "7", "--temperature", "1.2")
BABBLE = ("--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "1")

# Weights take 2 slabs of 1 MiB, the experts 8 (12 slots each), 160 K/V cells one.
CONFIG = 'slab_bytes = "1MiB"\ngive_back_delay_s = 0.2\n{}\n[host]\ndevice_bytes = "{}MiB"\nram_bytes = "64MiB"\n'

WAITING_FIRST = """
import sys, time
from strata_client import batch, main
take = batch.Batch._take
def wait(self, row, token):
    if row.index == 0 and row.text.tokens == 10:
        print("going", file=sys.stderr, flush=True)
        while not self._attached._session.gone:
            time.sleep(0.01)
    take(self, row, token)
batch.Batch._take = wait
main.main()
"""
"""A client whose first text says when it has 10 tokens, and goes on when the daemon has gone."""

SHORT_SECOND = """
import sys
from strata_client import batch, main
take = batch.Batch._take
def short(self, row, token):
    if row.index == 1 and row.text.tokens == 3:
        row.text._max_tokens = 4
    take(self, row, token)
    if row.index == 0 and row.text.tokens == 30:
        print("going", file=sys.stderr, flush=True)
batch.Batch._take = short
main.main()
"""
"""A client whose second text ends after 4 tokens; it says when the first has 30."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG.format("", 64)) as running:
        yield running


def objects(done: subprocess.CompletedProcess[bytes]) -> list[dict[str, Any]]:
    """The objects of the prompts, and last the statistics."""
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


def alone(daemon: Daemon, prompt: str, how: Sequence[str]) -> tuple[list[int], str, str]:
    """Tokens, text and reason of a run of its own."""
    *pieces, last = objects(daemon.generate(prompt, "--json", *how))
    tokens = [piece["token"] for piece in pieces if piece["token"] is not None]
    return tokens, "".join(piece["text"] for piece in pieces), last["statistics"]["reason"]


def kv_bytes(daemon: Daemon) -> int:
    return sum(int(device["kv_bytes"]) for device in daemon.status()["devices"])


@pytest.mark.parametrize("how", [GREEDY, SEEDED])
def test_texts_are_those_of_the_prompts_alone(daemon: Daemon, how: Sequence[str]) -> None:
    """Token for token, also of prompts in several chunks and of those that wait for a place; results in order."""
    how = (*how, "--max-tokens", "40")
    wanted = [alone(daemon, prompt, how) for prompt in PROMPTS]
    for rows in ("1", "3"):
        *results, last = objects(daemon.generate(*PROMPTS, "--batch", rows, "--json", *how))
        found = [(result["tokens"], result["text"], result["statistics"]["reason"]) for result in results]
        assert found == wanted
        assert [result["prompt"] for result in results] == [1, 2, 3, 4, 5]
    assert last["statistics"]["prompts"] == 5
    assert last["statistics"]["tokens"] == sum(len(tokens) for tokens, _, _ in wanted)
    assert kv_bytes(daemon) == 0


def test_texts_are_the_same_while_slots_trade(daemon: Daemon) -> None:
    """On a device that is too small, sequences take slots, wait for each other, and say what they say elsewhere."""
    how = (*BABBLE, "--max-tokens", "150", "--context", "320", "--json")
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[1]]
    *wanted, _ = objects(daemon.generate(*prompts, *how))
    assert all(result["statistics"]["reason"] != "no_room" for result in wanted)
    with running_daemon(CONFIG.format("floor_slots = 84", 12)) as small:
        done = small.generate(*prompts, *how, "--verbose")
        *found, _ = objects(done)
        assert "the expert cache gave" in done.stderr.decode()
        assert "K/V stays at" in done.stderr.decode() or "no room" in done.stderr.decode()
        assert kv_bytes(small) == 0
    assert [result["tokens"] for result in found] == [result["tokens"] for result in wanted]


def test_memory_that_is_never_enough() -> None:
    """Where no memory is to be had at all, each prompt says so, none has a text, and the exit status is 1."""
    with running_daemon(CONFIG.format("floor_slots = 96", 10)) as small:
        done = small.generate(*PROMPTS[:2])
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert [line.split(": ")[1:3] for line in lines[:2]] == [["prompt 1", "no text"], ["prompt 2", "no text"]]
    assert lines[-1] == "strata-client: 2 of 2 prompts have no text; a line above says why for each"


def test_a_file_of_prompts(daemon: Daemon, tmp_path: Path) -> None:
    """Each line is a prompt, whatever its line end; texts come under headings, in order."""
    path = tmp_path / "prompts"
    path.write_bytes("\r\n".join(PROMPTS[:2]).encode() + b"\n" + PROMPTS[3].encode())
    how = (*GREEDY, "--max-tokens", "9")
    done = daemon.generate("--prompts", str(path), *how)
    texts = [alone(daemon, prompt, how)[1] for prompt in (PROMPTS[0], PROMPTS[1], PROMPTS[3])]
    headed = [f"==> prompt {i} <==\n{text}\n" for i, text in enumerate(texts, 1)]
    assert done.stdout.decode() == "\n".join(headed)
    assert done.stderr.decode().splitlines()[-1].startswith(f"strata: {27} tokens of 3 texts, 3 at once, in ")


@pytest.mark.parametrize(
    ("content", "arguments", "says"),
    [
        (b"", (), "strata-client: FILE: the file is empty; write a prompt on each line"),
        (b"a\nb\xff\n", (), "strata-client: FILE, line 2: not UTF-8 text: byte 1 is 0xff; convert the file to UTF-8"),
        (b"a\n" + b"a b c d e f g h i j\n", ("--context", "8"), "strata-client: FILE, line 2: the prompt has "),
        (b"a\n", ("b",), "strata-client: --prompts and another prompt were given: give one of them"),
        (b"a\n", ("--conversation", "x"), "strata-client: --conversation is of one prompt: "),
        (b"a\n", ("--batch", "0"), "strata-client: Invalid value for '--batch': 0 is not in the range "),
    ],
)
def test_refusals(daemon: Daemon, tmp_path: Path, content: bytes, arguments: Sequence[str], says: str) -> None:
    """What cannot be run is refused in one line that names the prompt, before a daemon is asked for anything."""
    path = tmp_path / "prompts"
    path.write_bytes(content)
    done = client("generate", "--prompts", str(path), *arguments, "--socket", str(tmp_path))
    assert done.returncode in (1, 2)
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(says.replace("FILE", str(path)))


def test_an_argument_that_is_not_text() -> None:
    """The line says which of several prompts it is."""
    done = client("generate", "a", os.fsdecode(b"b\xff"))
    assert done.stderr == b"strata-client: prompt 2 is not UTF-8 text: byte 1 is 0xff\n"


def test_a_daemon_that_goes(tmp_path: Path) -> None:
    """What runs goes on with the cells that it has; a prompt that waits has no text, and says so in the same words."""
    log = tmp_path / "log"
    with running_daemon(CONFIG.format("", 64)) as running, log.open("wb") as err:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        argv = [sys.executable, "-c", WAITING_FIRST, "generate", *PROMPTS[1:3], "--batch", "1"]
        argv += [*BABBLE, "--max-tokens", "100", "--json", "--socket", os.fspath(running.directory)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=err, env=environ)
        wait_until(lambda: b"going\n" in log.read_bytes(), 60)
        running.kill()
        out, _ = process.communicate(timeout=60)
    first, second, _ = map(json.loads, out.decode().splitlines())
    assert (len(first["tokens"]), first["statistics"]["reason"]) == (100, "max_tokens")
    gone = f"the daemon at {running.directory} has gone"
    assert (second["tokens"], second["statistics"]["reason"], second["statistics"]["detail"]) == ([], "no_room", gone)
    assert f"strata: prompt 2: no text: {gone}" in log.read_text().splitlines()
    assert process.returncode == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The line names the file."""
    done = client("generate", "--prompts", str(tmp_path / "none"))
    assert done.stderr.decode() == f"strata-client: cannot read {tmp_path}/none: No such file or directory\n"


def test_control_c_prints_what_has_ended(daemon: Daemon) -> None:
    """Ctrl-C prints the texts that have ended, also those behind one that has not, and gives everything back."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", SHORT_SECOND, "generate", *PROMPTS[:3], *BABBLE, "--max-tokens", "2000", "--json"]
    argv += ["--socket", os.fspath(daemon.directory)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
    assert process.stderr is not None
    for line in process.stderr:
        if line == b"going\n":
            break
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    (result,) = map(json.loads, out.decode().splitlines())
    assert (result["prompt"], len(result["tokens"]), result["statistics"]["reason"]) == (2, 4, "max_tokens")
    assert kv_bytes(daemon) == 0


def test_a_private_daemon_and_one_prompt(tmp_path: Path) -> None:
    """--batch with one prompt prints as any batch does; without a daemon a private one serves it."""
    done = client("generate", "The dog", "--batch", "4", "--json", "--max-tokens", "3", "--socket", str(tmp_path / "x"))
    result, last = objects(done)
    assert (result["prompt"], len(result["tokens"]), last["statistics"]["prompts"]) == (1, 3, 1)
