"""`strata-client` against real daemons, from its start to its end."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.daemon import PIPE_BYTES, Daemon, client, running_daemon, start_client, wait_until

PROMPT = "Once upon a time, a small fox found a silver key under the old bridge."

# Nearly every token is equally likely, so that no end token comes for long.
BABBLE = ("--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "1")
LONG = (*BABBLE, "--max-tokens", "2000")

# One simulated device. The tiny model's weights take 2 slabs of 1 MiB, its experts
# 8 (12 slots each), 160 K/V cells one.
CONFIG = 'slab_bytes = "1MiB"\ngive_back_delay_s = 0.2\n{}\n[host]\ndevice_bytes = "{}MiB"\nram_bytes = "64MiB"\n'

GROWTH = re.compile(
    r"strata: K/V grown to \d+ cells \(\d+\.\d\d [GM]iB\); the expert cache gave \d+ slots for it, "
    r"\d+ hotter experts moved to colder ones' slots \(\d+ of \d+ slots hold experts\)"
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG.format("", 64)) as running:
        yield running


def _tokens(done: subprocess.CompletedProcess[bytes]) -> list[int]:
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.decode().splitlines()]
    return [row["token"] for row in rows if row.get("token") is not None]


def _lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return done.stderr.decode().splitlines()


def _kv_bytes(daemon: Daemon) -> int:
    return sum(int(device["kv_bytes"]) for device in daemon.status()["devices"])


def test_text_is_the_same_with_few_experts_resident_and_while_slots_are_traded() -> None:
    """Token for token the same text with every expert resident, with few that are exchanged, and trading meanwhile."""
    arguments = (PROMPT, "--json", *BABBLE, "--max-tokens", "300", "--context", "512")
    texts, traded, exchanged = {}, {}, {}
    for name, mib in (("resident", 64), ("trading", 12), ("floor", 7)):
        with running_daemon(CONFIG.format("", mib)) as running:
            done = running.generate(*arguments)
            texts[name] = _tokens(done)
            traded[name] = [line for line in _lines(done) if "expert cache gave" in line]
            while name == "floor" and "experts.exchanged" not in running.log.read_text():
                assert _tokens(running.generate(*arguments)) == texts[name]  # it was over before the daemon looked
            exchanged[name] = "experts.exchanged" in running.log.read_text()
    assert len(texts["resident"]) == 300
    assert texts["trading"] == texts["resident"]
    assert texts["floor"] == texts["resident"]
    assert traded["resident"] == []
    assert traded["trading"]
    assert exchanged["floor"] and not exchanged["resident"]
    assert all(GROWTH.fullmatch(line) for line in traded["trading"])


def test_slots_come_back_when_the_conversation_ends() -> None:
    """After a client that traded has gone, its memory goes back to the experts."""
    with running_daemon(CONFIG.format("", 12)) as running:
        done = running.generate(PROMPT, *BABBLE, "--max-tokens", "260", "--context", "512")
        assert any("expert cache gave" in line for line in _lines(done))
        assert _kv_bytes(running) == 0
        wait_until(
            lambda: running.status()["models"][0]["resident"] == 96, otherwise=lambda: str(running.status()["models"])
        )


def test_a_growth_that_is_refused_ends_the_text_with_the_reason() -> None:
    """Without memory for more cells the text goes on to the last cell and says why it ends."""
    with running_daemon(CONFIG.format("floor_slots = 96", 12)) as running:
        done = running.generate(PROMPT, *LONG)
    assert done.returncode == 0
    assert any(line.startswith("strata: the text ends here: ") for line in _lines(done)), _lines(done)
    assert len(_lines(done)) <= 4


def test_second_client_finds_the_model_resident(daemon: Daemon) -> None:
    """Two clients share one arena, and both say the same."""
    with daemon.start_generate(PROMPT, *LONG) as first:
        done = daemon.generate(PROMPT, "--temperature", "0", "--max-tokens", "8", "--verbose")
        assert "arena shared" in done.stderr.decode()
        assert len(daemon.status()["models"]) == 1
        first.send_signal(signal.SIGINT)
        first.communicate()


def test_control_c_gives_everything_back(daemon: Daemon) -> None:
    """The first Ctrl-C ends the program with 130, without a traceback, a session or a cell left."""
    process = daemon.start_generate(PROMPT, *LONG)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    status = daemon.status()
    assert process.pid not in [session["pid"] for session in status["sessions"]]
    assert _kv_bytes(daemon) == 0


def test_a_killed_client_loses_its_memory(daemon: Daemon) -> None:
    """After SIGKILL the daemon takes the cells back, and the experts stay."""
    process = daemon.start_generate(PROMPT, *LONG)
    assert _kv_bytes(daemon) > 0
    process.kill()
    process.communicate()
    wait_until(lambda: _kv_bytes(daemon) == 0 and not daemon.status()["sessions"])
    assert daemon.status()["models"][0]["resident"] == 96


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_text_goes_on_without_the_daemon(number: signal.Signals) -> None:
    """A client whose daemon has gone ends its text as if nothing had happened."""
    arguments = (PROMPT, "--json", *BABBLE, "--max-tokens", "200")
    with running_daemon(CONFIG.format("", 64)) as running:
        *expected, _ = running.generate(*arguments).stdout.splitlines()
        process = running.start_generate(*arguments)
        running.process.send_signal(number)
        running.process.wait()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(out) > PIPE_BYTES, "the text might have ended before the daemon"
    *found, _ = out.splitlines()
    assert [expected[0][1:], *expected[1:]] == found


def test_control_z_stops_between_steps_and_goes_on_later(daemon: Daemon) -> None:
    """A stopped client is idle, so that no reader stays behind; continued, it ends its text."""
    process = daemon.start_generate(PROMPT, "--json", *BABBLE, "--max-tokens", "150")
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: _state(process.pid) == "T")
    session = next(s for s in daemon.status()["sessions"] if s["pid"] == process.pid)
    assert session["state"] == "idle"
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(out) > PIPE_BYTES, "the text might have ended before it was stopped"


def test_private_daemon_comes_and_goes_with_the_client(tmp_path: Path) -> None:
    """Without a daemon one line says that a private one was started; neither it nor its directory stays."""
    environ = {**os.environ, "XDG_RUNTIME_DIR": os.fspath(tmp_path)}
    with start_client("generate", PROMPT, "--json", *BABBLE, "--max-tokens", "150", env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        daemons = [pid for pid in _processes_with(f"XDG_RUNTIME_DIR={tmp_path}") if pid != process.pid]
        command = Path(f"/proc/{daemons[0]}/cmdline").read_text().split("\0")
        assert "--driver" not in command  # vmmd knows best
        directory = Path(command[command.index("--runtime-dir") + 1])
        assert directory.stat().st_mode & 0o777 == 0o700
        out, err = process.communicate(timeout=60)
    assert len(out) > PIPE_BYTES, "the text might have ended before anybody looked for the daemon"
    lines = err.decode().splitlines()
    assert process.returncode == 0, err
    assert lines[0] == f"strata: no daemon at {tmp_path}/strata; started a private one"
    assert len(lines) == 2
    assert not directory.exists()
    assert not _processes_with(f"XDG_RUNTIME_DIR={tmp_path}")


def test_device_that_is_not_there_is_one_line(daemon: Daemon) -> None:
    """A wrong --device names it and the devices that there are."""
    done = daemon.generate(PROMPT, "--device", "GPU-00000000-0000-0000-0000-000000000000")
    assert done.returncode == 1
    assert len(_lines(done)) == 1
    assert "GPU-00000000-0000-0000-0000-000000000000" in _lines(done)[0]
    assert "HOST-SIM-0" in _lines(done)[0]


def test_kv_of_other_types_needs_a_gpu(daemon: Daemon) -> None:
    """On the host K/V is float32: another --kv-type is refused in a line that says so."""
    done = daemon.generate(PROMPT, "--kv-type", "q8_0")
    assert done.returncode == 1
    assert len(_lines(done)) == 1
    assert "--kv-type q8_0" in _lines(done)[0]
    assert "f32" in _lines(done)[0]
    assert _tokens(daemon.generate(PROMPT, "--kv-type", "f32", "--max-tokens", "2", "--json", "--seed", "1"))


def test_text_is_the_same_from_a_kept_model(daemon: Daemon, tmp_path: Path) -> None:
    """The first program that opens a model keeps what its header says; the next one does without and says the same."""
    environ = {**os.environ, "XDG_CACHE_HOME": os.fspath(tmp_path)}
    arguments = (PROMPT, "--json", "--stats", "--max-tokens", "8", "--seed", "1")
    runs = [daemon.generate(*arguments, env=environ) for _ in range(2)]
    assert _tokens(runs[0]) == _tokens(runs[1])
    stages = [
        {row["stage"] for row in json.loads(done.stdout.splitlines()[-1])["statistics"]["stages"]} for done in runs
    ]
    assert stages[0] - stages[1] == {"read header", "read vocabulary", "keep model"}
    assert len(list((tmp_path / "strata" / "models").iterdir())) == 1


def test_stats_say_where_time_went(daemon: Daemon) -> None:
    """--stats prints a line a stage after all else, from the interpreter's start to decoding; without it none."""
    done = daemon.generate(PROMPT, "--max-tokens", "3", "--stats")
    assert done.returncode == 0
    line, head, *rows = _lines(done)
    assert line.startswith("strata: 3 tokens in ")
    assert head.split() == ["began", "s", "took", "s", "thread"]
    names = [row[: head.index(" began") - 1].strip() for row in rows]
    assert {"interpreter", "imports", "tokenizer", "connect", "open", "prefill", "first token", "decode"} <= set(names)
    assert len(_lines(daemon.generate(PROMPT, "--max-tokens", "3"))) == 1


def test_full_disk_is_one_line_about_space(daemon: Daemon) -> None:
    """Text that cannot be written ends the program with one line."""
    with open("/dev/full", "wb") as full:
        done = daemon.generate(PROMPT, "--max-tokens", "8", stdout=full)
    assert done.returncode == 1
    assert _lines(done) == ["strata-client: cannot write to standard output: no space left on device"]
    assert _kv_bytes(daemon) == 0


def test_perplexity_in_windows_saves_logits_of_every_token(daemon: Daemon, tmp_path: Path) -> None:
    """A text longer than the context is evaluated in windows, and the file holds a row a token."""
    np = pytest.importorskip("numpy")
    text = tmp_path / "text"
    text.write_text(PROMPT * 5)
    saved = {}
    for context in (4096, 64):
        out = tmp_path / f"{context}.npy"
        arguments = ("--context", str(context), "--save-logits", os.fspath(out), "--json")
        done = client("perplexity", os.fspath(text), *arguments, "--socket", os.fspath(daemon.directory))
        assert done.returncode == 0, done.stderr
        saved[context] = np.load(out)
        assert saved[context].shape == (json.loads(done.stdout)["statistics"]["tokens"], 4096)
        assert saved[context].dtype == np.float32
    assert np.abs(saved[4096][:64] - saved[64][:64]).max() < 1e-3
    assert sorted(tmp_path.iterdir()) == sorted([text, tmp_path / "64.npy", tmp_path / "4096.npy"])


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _processes_with(variable: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
