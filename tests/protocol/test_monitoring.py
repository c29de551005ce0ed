"""`vmmctl top` and metrics of a real daemon."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.daemon import LONG, VMMD, Daemon, running_daemon, vmmctl, wait_until
from tests.helpers.peer import client, public_model

DOCS = Path(__file__).parents[2] / "docs"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Watched:
    """A daemon with metrics."""

    def __init__(self, daemon: Daemon, port: int) -> None:
        self.daemon = daemon
        self.port = port
        self.url = f"http://127.0.0.1:{port}/metrics"

    def text(self, path: str = "/metrics", **request: str) -> str:
        with urllib.request.urlopen(urllib.request.Request(self.url[: -len("/metrics")] + path, **request)) as reply:
            return str(reply.read().decode())

    def families(self) -> dict[str, Metric]:
        return {family.name: family for family in text_string_to_metric_families(self.text())}

    def refusal(self, path: str = "/metrics", **request: str) -> int:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.text(path, **request)
        with caught.value as error:
            return int(error.code)


@pytest.fixture(scope="module")
def watched() -> Iterator[_Watched]:
    def start(again: int = 5) -> tuple[Daemon, int]:
        port = _free_port()
        try:
            return Daemon(f'metrics_port = {port}\n[host]\ndevice_bytes = "64MiB"\nram_bytes = "64MiB"\n'), port
        except AssertionError as error:  # somebody else got it meanwhile
            if not again or "Address already in use" not in str(error):
                raise
            return start(again - 1)

    daemon, port = start()
    try:
        yield _Watched(daemon, port)
    finally:
        daemon.stop()


def _samples(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(v for _, v in sorted(s.labels.items())): s.value for s in family.samples}


def test_top_shows_a_running_session() -> None:
    """A frame, as text in a pipe, has the device, the arena with its hits, and the session's tokens a second."""
    with running_daemon('[host]\ndevice_bytes = "64MiB"\nram_bytes = "64MiB"\n') as daemon:
        process = daemon.start_generate("Once upon a time", *LONG)
        wait_until(lambda: daemon.status()["sessions"][0]["decoded_tokens_per_s"] > 0)
        where = ("--socket", os.fspath(daemon.directory))
        done = vmmctl("top", "--iterations", "2", "--interval", "0.2", *where)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    assert "\x1b" not in out
    frame = out[: out.index("vmmd ", 1)]
    assert out.count(" driver, up ") == 2
    assert re.search(r"growths: [1-9]\d* granted, 0 refused, 0 waiting", frame)
    assert re.search(r"HOST-SIM-0 +\[\|+ +\d+%\]", frame)
    assert re.search(r"Strata tiny MoE.* 96 of 96 +100\.0% +0\.0% +0\.0%.* MiB ", frame)
    row = next(line for line in frame.splitlines() if line.split()[:1] == [str(process.pid)])
    assert " running " in row or " idle " in row
    assert re.search(r"\d+ of \d+", row)


def test_top_on_a_terminal_ends_with_q(watched: _Watched) -> None:
    """It shows frames on a screen of its own, ends when q is pressed, and leaves the terminal as it was."""
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    argv = [
        sys.executable,
        "-m",
        "vmmd.ctl.main",
        "top",
        "--interval",
        "0.1",
        "--socket",
        str(watched.daemon.directory),
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment)
    try:
        said = b""
        while said.count(b"HOST-SIM-0") < 3:
            said += os.read(ours, 65536)
        os.write(ours, b"xq")
        while process.poll() is None:
            if select.select([ours], [], [], 0.1)[0]:
                said += os.read(ours, 65536)
        assert (process.returncode, process.communicate()[1]) == (0, b"")
        while select.select([ours], [], [], 0)[0]:
            said += os.read(ours, 65536)
        assert b"\x1b[?1049h" in said and b"\x1b[?1049l" in said
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_top_without_a_daemon_is_one_line(tmp_path: Path) -> None:
    """As every command: exit status 3 and one line."""
    done = vmmctl("top", "--socket", os.fspath(tmp_path))
    assert done.returncode == 3
    assert done.stderr.decode().splitlines() == [f"vmmctl: no daemon at {tmp_path}: No such file or directory"]


def test_metrics_are_the_figures_of_the_status(watched: _Watched) -> None:
    """Tokens, routings, bytes, growths and trades are the same numbers in both."""
    with public_model() as model, client(watched.daemon.directory) as peer:
        peer.open(model)
        peer.create()
        peer.grow(2)
        peer.heat(1, [3, 4], 5)
        families = watched.families()
        status = watched.daemon.status()
        found = next(m for m in status["models"] if m["sessions"])
        key = (found["domain"], str(found["model_id"]), found["name"])
        assert _samples(families["strata_tokens"])[*key, "decode"] == found["decoded_tokens"] == 5
        tiers = {tier["tier"]: tier for tier in found["tiers"]}
        assert _samples(families["strata_routings"])[*key, "decode", "device"] == 10
        assert tiers["device"]["decode_routings"] == 10
        assert _samples(families["strata_read_bytes"])[*key, "device"] == tiers["device"]["read_bytes"] > 0
        growths = status["daemon"]["growths"]
        assert _samples(families["strata_growths"])[("granted",)] == growths["granted"] == 1
        assert status["sessions"][0]["growths"]["slabs"] == 2
        device = status["devices"][0]
        used = _samples(families["strata_device_used_bytes"])
        assert used["HOST-SIM-0", "kv"] == device["kv_bytes"] == 2 * device["slab_bytes"]
        assert _samples(families["strata_sessions"])[status["sessions"][0]["state"], status["sessions"][0]["user"]] == 1


def test_models_of_one_name_do_not_clash(watched: _Watched) -> None:
    """Two models of the same name, one of which would drive a terminal, are two series."""
    with public_model() as one, public_model(2, 8) as two, client(watched.daemon.directory) as peer:
        peer.open(one)
        peer.open(two)
        wait_until(lambda: len(_samples(watched.families()["strata_experts"])) >= 2)
        names = [sample.labels["model"] for sample in watched.families()["strata_experts"].samples]
        assert names.count("model") >= 2


def test_docs_and_dashboard_name_what_there_is(watched: _Watched) -> None:
    """Every metric is in the docs' table, and the dashboard uses no other."""
    served = set(re.findall(r"^# TYPE (\w+)", watched.text(), re.MULTILINE))
    documented = set(re.findall(r"`(strata_\w+)`", (DOCS / "monitoring.md").read_text()))
    assert served == documented
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    used = set(re.findall(r"\bstrata_\w+", " ".join(expressions)))
    assert used
    assert used <= served


def test_nothing_but_metrics_is_served(watched: _Watched) -> None:
    """Other paths and methods are refused; a HEAD has no body; query strings do no harm."""
    assert watched.refusal("/") == 404
    assert watched.refusal(method="POST", data=b"x") == 405  # type: ignore[arg-type]
    assert watched.text(method="HEAD") == ""
    assert "strata_uptime_seconds" in watched.text("/metrics?x=1")


def test_rude_readers_harm_nobody(watched: _Watched) -> None:
    """Who says nothing, too much or nonsense is cut off; others are served meanwhile, and no connection is kept."""
    before = len(os.listdir(f"/proc/{watched.daemon.process.pid}/fd"))
    rude = [socket.create_connection(("127.0.0.1", watched.port)) for _ in range(40)]
    for sock in rude:
        sock.settimeout(60)
    for sock, said in zip(rude, (b"\xff" * 20_000, b"\r\n\r\n", b"GET", b"GET  \r\n\r\n"), strict=False):
        with suppress(OSError):
            sock.sendall(said)
    assert watched.daemon.status()["daemon"]["pid"] == watched.daemon.process.pid
    for sock in rude:
        with suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
        sock.close()
    assert "strata_uptime_seconds" in watched.text()
    wait_until(lambda: len(os.listdir(f"/proc/{watched.daemon.process.pid}/fd")) <= before)


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    """The daemon says which key to change, and leaves nothing behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = tmp_path / "vmmd.toml"
        config.write_text(f'driver = "host"\nlog_level = "error"\nmetrics_port = {taken.getsockname()[1]}\n')
        argv = [sys.executable, *VMMD, "--config", os.fspath(config), "--runtime-dir", os.fspath(tmp_path / "run")]
        done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    said = done.stderr.decode()
    assert re.fullmatch(
        r"vmmd: cannot listen on 127\.0\.0\.1:\d+ for metrics: Address already in use; see metrics_port\n", said
    )
    assert not list((tmp_path / "run").glob("*.sock"))
