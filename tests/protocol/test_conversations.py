"""Conversations over real daemons: text that goes on as if its client had never left, however it left."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from strata_client.attached import attach
from strata_client.engine import Engine, open_engine
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from strata_client.run_options import DEFAULT_MODEL
from strata_client.sampler import SamplerOptions
from tests.helpers.daemon import PIPE_BYTES, Daemon, client, running_daemon, vmmctl, wait_until
from tests.helpers.debugger import stopped_by_signal
from tests.helpers.peer import Remote, public_model
from tests.helpers.talker import Talker
from vmmd.errors import NotFound, PermissionDenied, PreconditionFailed

PROMPT = "Once upon a time, a small fox found a silver key under the old bridge."
LONGER = " Then the fox met"

GREEDY = ("--temperature", "0")
SEEDED = ("--seed", "7")

# One simulated device. The tiny model's weights take 2 slabs of 1 MiB, its experts 8, 160 K/V cells one.
CONFIG = 'slab_bytes = "1MiB"\ngive_back_delay_s = 0.2\n[host]\ndevice_bytes = "{}MiB"\nram_bytes = "64MiB"\n'

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

# Computes so many steps; the next one spoils every cell from its first on and dies in the middle.
DYING = """
import os, signal, sys
from strata_client import main
from strata_client.models.qwen3moe import Qwen3Moe

left, forward = int(sys.argv.pop(1)), Qwen3Moe.forward

def dies(self, tokens, position, memory, kv, **options):
    global left
    left -= 1
    if left < 0:
        for layer in range(self.params.n_layers):
            begin = 0
            for k, v in kv.segments(layer, kv.cells):
                k[max(0, position - begin):], v[max(0, position - begin):] = 1e9, -1e9
                begin += kv.cells_per_slab
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, tokens, position, memory, kv, **options)

Qwen3Moe.forward = dies
main.main()
"""


class Said(NamedTuple):
    """What a run of `strata-client generate` said."""

    tokens: list[int]
    text: str
    prompt: int
    kept: int
    lines: list[str]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One with room for all; each test has names of its own."""
    with running_daemon(CONFIG.format(64)) as running:
        yield running


def say(daemon: Daemon, prompt: str, *args: str, tokens: int = 40) -> Said:
    done = daemon.generate(prompt, "--json", "--max-tokens", str(tokens), *args)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.decode().splitlines()]
    statistics = rows.pop()["statistics"]
    return Said(
        [row["token"] for row in rows if row["token"] is not None],
        "".join(row["text"] for row in rows),
        statistics["prompt_tokens"],
        statistics["kept_tokens"],
        done.stderr.decode().splitlines(),
    )


FRESH: dict[tuple[str, Sequence[str], int], Said] = {}


def fresh(daemon: Daemon, prompt: str, how: Sequence[str], tokens: int = 40) -> Said:
    """What a sequence says that is no conversation; it is said once."""
    key = prompt, how, tokens
    if key not in FRESH:
        FRESH[key] = say(daemon, prompt, *how, tokens=tokens)
    return FRESH[key]


def listed(daemon: Daemon) -> dict[str, dict[str, Any]]:
    done = vmmctl("conversations", "--output", "json", "--socket", os.fspath(daemon.directory))
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["conversations"]}


@pytest.mark.parametrize("how", [GREEDY, SEEDED])
def test_text_goes_on_as_if_its_client_had_never_left(daemon: Daemon, how: Sequence[str]) -> None:
    """A prompt that goes on with what was said finds the cells of all that, and the text is a fresh sequence's."""
    name = how[0].strip("-")
    first = say(daemon, PROMPT, *how, "--conversation", name)
    assert first.kept == 0
    assert listed(daemon)[name]["cells"] == first.prompt + 39
    longer = PROMPT + first.text + LONGER
    second, stranger = say(daemon, longer, *how, "--conversation", name), fresh(daemon, longer, how)
    assert second.tokens == stranger.tokens
    assert (stranger.kept, stranger.prompt) == (0, second.prompt)
    assert second.kept >= first.prompt + 35
    assert f"prompt of {second.prompt} tokens, {second.kept} of them kept, in " in second.lines[-1]
    again = say(daemon, longer, *how, "--conversation", name)
    assert (again.tokens, again.kept) == (stranger.tokens, stranger.prompt - 1)


def test_a_prompt_that_differs_midway(daemon: Daemon) -> None:
    """Only what the prompts have in common is kept, what was after that is gone, and every text is a fresh one's."""
    gold, mouse = PROMPT + " It was made of gold, and it was very old.", PROMPT + " It was made by a mouse."
    kept = []
    for prompt in (gold, mouse, gold):
        said = say(daemon, prompt, *GREEDY, "--conversation", "midway", tokens=20)
        assert said.tokens == fresh(daemon, prompt, GREEDY, 20).tokens
        kept.append(said.kept)
    common = fresh(daemon, PROMPT + " It was made", GREEDY, 1).prompt
    assert kept == [0, common, common]


def test_the_same_bits_as_a_sequence_that_stayed(daemon: Daemon) -> None:
    """Logits after leaving and coming back are those of an engine that kept its cells itself, to the bit."""
    prompt = [(7 * i) % 1000 + 5 for i in range(50)]
    with engine(daemon, None) as stays:
        said, _ = run(stays, prompt, 60)
        longer = [*prompt, *said, 8, 9, 10]
        wanted, kept = run(stays, longer, 8)[1], stays.sequence.kept
    with engine(daemon, "bits") as leaves:
        assert run(leaves, prompt, 60)[0] == said
    with engine(daemon, "bits") as comes_back:
        assert np.array_equal(run(comes_back, longer, 8)[1], wanted)
        assert comes_back.sequence.kept == kept == 109


@contextmanager
def engine(daemon: Daemon, conversation: str | None) -> Iterator[Engine]:
    model_file = open_model_file(DEFAULT_MODEL)
    with (
        attach(
            Qwen3Moe(model_file),
            model_file,
            [daemon.directory],
            context=512,
            device=None,
            kv_type=None,
            say=lambda line: None,
            say_verbose=lambda line: None,
            signals=Signals(),
            progress=lambda filled, total: None,
        ) as attached,
        open_engine(attached, conversation) as engine,
    ):
        yield engine


def run(engine: Engine, prompt: list[int], n: int) -> tuple[list[int], Any]:
    """Tokens, and the logits that they were chosen from."""
    engine.sequence.prepare(len(prompt))
    engine.begin(prompt, SamplerOptions(seed=3))
    tokens, logits = [], []
    for _ in range(n):
        tokens.append(engine.next_token())
        logits.append(engine._logits.copy())
        assert engine.sequence.has_room()
    return tokens, np.array(logits)


def test_a_killed_client_leaves_what_it_had_computed(daemon: Daemon) -> None:
    """After SIGKILL the next client goes on from the last step that ended, with the text of a fresh sequence."""
    process = daemon.start_generate(PROMPT, *SEEDED, "--max-tokens", "300", "--conversation", "killed")
    assert process.stdout is not None
    for _ in range(80):
        assert process.stdout.read(1)
    process.kill()
    process.wait()
    wait_until(lambda: listed(daemon)["killed"]["state"] == "parked")
    cells = listed(daemon)["killed"]["cells"]
    said, stranger = say(daemon, PROMPT, *SEEDED, "--conversation", "killed"), fresh(daemon, PROMPT, SEEDED)
    assert (said.tokens, said.kept) == (stranger.tokens, stranger.prompt - 1)
    assert cells > stranger.prompt


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_a_client_that_dies_within_a_step_leaves_no_wrong_cell(daemon: Daemon, steps: int) -> None:
    """Cells of the step that a client died in, spoiled, count for nothing, also where others had been there before."""
    name = f"dying-{steps}"
    earlier = say(daemon, PROMPT + " It was gold.", *GREEDY, "--conversation", name, tokens=20)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", DYING, str(steps), "generate", PROMPT + " It was old.", *GREEDY]
    argv += ["--conversation", name, "--socket", os.fspath(daemon.directory)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for end in (" It was old.", " It was gold."):
        said = say(daemon, PROMPT + end, *GREEDY, "--conversation", name, tokens=20)
        assert said.tokens == fresh(daemon, PROMPT + end, GREEDY, 20).tokens
        assert 0 < said.kept < earlier.prompt + 20


def test_ctrl_c_leaves_the_conversation(daemon: Daemon) -> None:
    """A client that is told to end leaves what it has computed."""
    process = daemon.start_generate(PROMPT, *SEEDED, "--max-tokens", "300", "--conversation", "ctrl-c")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert listed(daemon)["ctrl-c"]["state"] == "parked"
    assert say(daemon, PROMPT, *SEEDED, "--conversation", "ctrl-c", tokens=2).kept > 0


def test_a_conversation_that_is_in_use_is_refused(daemon: Daemon) -> None:
    """The second client for a name is told in one line who uses it, vmmctl does not drop it, and the first goes on."""
    how = ("--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "1", "--max-tokens", "2000")
    process = daemon.start_generate(PROMPT, *how, "--conversation", "busy")
    assert process.stdout is not None
    with stopped_by_signal(process.pid):  # so that it does not end before all have asked
        row = listed(daemon)["busy"]
        assert (row["state"], row["pid"]) == ("in use", process.pid)
        done = daemon.generate(PROMPT, "--conversation", "busy")
        assert done.returncode == 1
        (line,) = done.stderr.decode().splitlines()
        assert line.startswith(f"strata-client: conversation 'busy' is in use by pid {process.pid};")
        dropped = vmmctl("drop", "busy", "--socket", os.fspath(daemon.directory))
        assert dropped.returncode == 1 and b"in use by pid" in dropped.stderr
        os.set_blocking(process.stdout.fileno(), False)
        while process.stdout.read(PIPE_BYTES):
            pass
        os.set_blocking(process.stdout.fileno(), True)
    assert process.stdout.read(1), "it does not go on"
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert say(daemon, PROMPT, "--conversation", "busy", tokens=2).kept > 0


def test_a_model_file_that_has_changed(daemon: Daemon, tmp_path: Path) -> None:
    """A conversation of a file that has changed since begins anew and says so; the text is right."""
    model = tmp_path / "model.gguf"
    shutil.copy(DEFAULT_MODEL, model)
    how = ("--model", os.fspath(model), *GREEDY, "--conversation", "file")
    first = say(daemon, PROMPT, *how)
    os.utime(model)
    second = say(daemon, PROMPT, *how)
    assert (second.tokens, second.kept) == (first.tokens, 0)
    assert second.lines[0].startswith("strata: conversation file begins anew: what was left is of model ")
    assert say(daemon, PROMPT, *how).kept == first.prompt - 1


def test_another_device_begins_anew() -> None:
    """Cells of one device are of no use on another."""
    config = 'slab_bytes = "1MiB"\n[host]\ndevices = 2\ndevice_bytes = "32MiB"\nram_bytes = "64MiB"\n'
    with running_daemon(config) as daemon:
        first = say(daemon, PROMPT, *GREEDY, "--conversation", "story")
        second = say(daemon, PROMPT, *GREEDY, "--conversation", "story", "--device", "1")
    assert (second.tokens, second.kept) == (first.tokens, 0)
    assert second.lines[0] == "strata: conversation story begins anew: what was left is of device HOST-SIM-0"


def test_the_longest_parked_gives_before_experts_do() -> None:
    """Short of memory, a growth takes the end of the longest parked conversation, and no slot of the expert cache."""
    with running_daemon(CONFIG.format(13)) as daemon:
        for name in ("old", "new"):
            say(daemon, PROMPT, *GREEDY, "--conversation", name, tokens=20)
        assert set(listed(daemon)) == {"old", "new"}
        grown = say(daemon, PROMPT, *GREEDY, "--context", "512", tokens=4)
        assert set(listed(daemon)) == {"new"}
        assert not any("expert cache gave" in line for line in grown.lines)
        assert say(daemon, PROMPT, *GREEDY, "--conversation", "new", tokens=4).kept == grown.prompt - 1


def test_a_spilled_conversation_says_the_same() -> None:
    """With memory on the host to go to, a conversation that made way comes back whole."""
    config = CONFIG.format(13) + '[conversations]\nspill_bytes = "8MiB"\n'
    with running_daemon(config) as daemon:
        first = say(daemon, PROMPT, *GREEDY, "--conversation", "story", tokens=20)
        say(daemon, PROMPT, *GREEDY, "--conversation", "newer", tokens=4)
        say(daemon, PROMPT, *GREEDY, "--context", "512", tokens=4)
        assert listed(daemon)["story"]["state"] == "spilled"
        second = say(daemon, PROMPT, *GREEDY, "--conversation", "story", tokens=20)
        assert (second.tokens, second.kept) == (first.tokens, first.prompt - 1)


def test_expiry_is_configured(tmp_path: Path) -> None:
    """A conversation that nobody goes on with is dropped in time."""
    with running_daemon(CONFIG.format(64) + "[conversations]\nexpiry_s = 2\n") as daemon:
        say(daemon, PROMPT, "--conversation", "story", tokens=4)
        while rows := listed(daemon):
            assert 0 <= rows["story"]["expires_in_s"] <= 2
        assert "it has expired" in daemon.log.read_text()
        wait_until(lambda: all(device["kv_bytes"] == 0 for device in daemon.status()["devices"]))


def test_vmmctl_lists_and_drops() -> None:
    """Conversations are a table for people and JSON for programs; a dropped one's memory is free."""
    with running_daemon(CONFIG.format(64)) as daemon:
        _list_and_drop(daemon)


def _list_and_drop(daemon: Daemon) -> None:
    socket = ("--socket", os.fspath(daemon.directory))
    assert vmmctl("conversations", *socket).stdout == b"no conversations\n"
    said = say(daemon, PROMPT, "--conversation", "story", tokens=4)
    say(daemon, PROMPT, "--conversation", "tale", tokens=4)
    row = listed(daemon)["story"]
    assert (row["uid"], row["state"], row["cells"], row["bytes"]) == (os.getuid(), "parked", said.prompt + 3, 1 << 20)
    assert (row["device_uuid"], row["pid"]) == ("HOST-SIM-0", 0)
    assert 0 < row["expires_in_s"] <= 21_600 and row["parked_s"] >= 0
    shown = vmmctl("conversations", *socket)
    assert shown.returncode == 0 and b"\x1b" not in shown.stdout
    assert [line.split()[0] for line in shown.stdout.decode().splitlines()[2:]] == ["story", "tale"]
    done = vmmctl("drop", "story", *socket)
    assert (done.returncode, done.stdout.decode()) == (0, f"dropped story: {row['cells']} cells, 1 MiB\n")
    done = vmmctl("drop", "tale", "--output", "json", *socket)
    assert json.loads(done.stdout) == {"name": "tale", "cells": row["cells"], "bytes": 1 << 20}
    assert all(device["kv_bytes"] == 0 for device in daemon.status()["devices"])
    for arguments, status, message in (
        (("drop", "story"), 1, "has no conversation 'story'"),
        (("drop", "story", "--user", "no such user"), 2, "there is no user 'no such user'"),
    ):
        done = vmmctl(*arguments, *socket)
        assert done.returncode == status
        (line,) = done.stderr.decode().splitlines()
        assert message in line


def test_names_and_private_daemons(tmp_path: Path) -> None:
    """A bad name is refused before anything starts; without a daemon it is said that the conversation will be lost."""
    done = client("generate", PROMPT, "--conversation", "a/b", "--socket", os.fspath(tmp_path))
    assert done.returncode == 2
    line = done.stderr.decode().splitlines()[-1]
    assert line.startswith("strata-client: Invalid value for '--conversation': 'a/b' is no name")
    done = client("generate", PROMPT, "--conversation", "x", "--max-tokens", "1", "--socket", os.fspath(tmp_path))
    assert done.returncode == 0
    assert done.stderr.decode().splitlines()[1] == "strata: conversation x ends with the private daemon"


@needs_root
def test_other_users_neither_see_nor_have_it() -> None:
    """A conversation is its user's: others get one of their own, and only an administrator sees or drops it."""
    with public_model() as model, running_daemon('slab_bytes = "64KiB"\n[domains]\nteam = [4242, 4243]\n') as daemon:
        daemon.directory.chmod(0o750)
        remotes = [Remote(daemon.directory, uid, kind=Talker) for uid in (4242, 4243, 0)]
        alice, bob, root = remotes
        for talker in remotes:
            talker.ask("open", model)
        assert alice.ask("converse", "x") == 0
        alice.ask("compute", [5, 6, 7])
        alice.ask("leave")
        assert bob.ask("listed") == {}
        assert bob.ask("converse", "x") == 0
        with pytest.raises(NotFound):
            bob.ask("drop", "y")
        with pytest.raises(PermissionDenied):
            bob.ask("drop", "x", uid=4242)
        assert alice.ask("listed") == {"x": (4242, "parked", 3)}
        with pytest.raises(NotFound):
            root.ask("drop", "x")
        assert root.ask("drop", "x", uid=4242) == 3
        assert root.ask("listed") == {"x": (4243, "in use", 0)}
        for talker in remotes:
            talker.kill()


def test_a_killed_client_is_waited_for() -> None:
    """Who asks for the conversation of a client that was just killed gets it when that client's memory is let go."""
    with public_model() as model, running_daemon('slab_bytes = "64KiB"\n') as daemon:
        with Remote(daemon.directory, kind=Talker) as second:
            second.ask("open", model)
            tokens = list(range(1, 3000))
            for i in range(20):
                with Remote(daemon.directory, kind=Talker) as first:
                    first.ask("open", model)
                    assert first.ask("converse", "x") == 3 * i
                    first.ask("compute", tokens[3 * i : 3 * i + 3])
                    with pytest.raises(PreconditionFailed):
                        second.ask("converse", "x")
                    first.signal(signal.SIGKILL)
                    first.kill()
                assert second.ask("converse", "x") == 3 * i + 3
                assert second.ask("said") == tokens[: 3 * i + 3]
                second.ask("leave")
        assert daemon.status()["quarantines"] == []
