"""How long calls to the daemon take: with many clients, for a resident model, after a client's death, to its end."""

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bench.report import Row, write
from tests.helpers.daemon import Daemon, running_daemon, vmmctl, wait_until
from tests.helpers.peer import Admin, Remote, SmallModel, client, public_model

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

CLIENTS = 16
CONFIG = """
slab_bytes = "64KiB"
log_level = "{}"
[host]
device_bytes = "32MiB"
ram_bytes = "32MiB"
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG.format("info")) as running:
        yield running


@pytest.fixture
def model() -> Iterator[SmallModel]:
    with public_model(8, 32) as made:
        yield made


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} {len(os.sched_getaffinity(0))} CPUs"


def _load(daemon: Daemon, seconds: float, rate_hz: float) -> np.ndarray:
    """Durations in ms of ListDevices by 16 processes at once."""
    peers = [Remote(daemon.directory) for _ in range(CLIENTS)]
    try:
        for seed, peer in enumerate(peers):
            peer.tell("time_calls", seconds, rate_hz, seed)
        return np.concatenate([np.array(peer.answer(seconds + 60)) for peer in peers]) * 1e3
    finally:
        for peer in peers:
            peer.kill()


def test_calls_of_sixteen_clients(daemon: Daemon) -> None:
    """The slowest of a hundred calls, of 16 processes without a pause and at ten calls a second each."""
    closed = _load(daemon, 8, 0)
    paced = _load(daemon, 10, 10)
    rows = [
        Row("closed loop, p50", float(np.percentile(closed, 50)), "ms", "lower"),
        Row("closed loop, p99", float(np.percentile(closed, 99)), "ms", "lower", target=15),
        Row("closed loop, calls", len(closed) / 8, "/s", "higher"),
        Row("10 calls a second each, p50", float(np.percentile(paced, 50)), "ms", "lower"),
        Row("10 calls a second each, p99", float(np.percentile(paced, 99)), "ms", "lower", target=8),
    ]
    write("rpc", _processor(), "host", rows)


def test_opening_a_resident_model(daemon: Daemon, model: SmallModel) -> None:
    """From OpenModel to every slab mapped, where the arena is resident already."""
    with client(daemon.directory) as first:
        first.open(model)
        times = []
        for _ in range(30):
            with client(daemon.directory) as one:
                began = time.perf_counter()
                assert one.open(model)
                times.append((time.perf_counter() - began) * 1e3)
    rows = [
        Row("open, p50", float(np.percentile(times, 50)), "ms", "lower", target=50),
        Row("open, slowest", max(times), "ms", "lower"),
    ]
    write("open", _processor(), "host", rows)


def test_memory_after_a_kill(daemon: Daemon, model: SmallModel) -> None:
    """From SIGKILL until the status shows the client's cells as free."""
    times = []
    with Admin(daemon.directory) as admin:
        for _ in range(20):
            peer = Remote(daemon.directory)
            peer.ask("open", model)
            peer.ask("create")
            peer.ask("grow", 64)
            assert admin.device().kv_bytes == 64 << 16
            began = time.perf_counter()
            peer.process.kill()
            while admin.device().kv_bytes or admin.device().revoking_bytes:
                assert time.perf_counter() - began < 5
            times.append((time.perf_counter() - began) * 1e3)
            peer.kill()
            wait_until(lambda: not admin.status().sessions, 5)
    rows = [
        Row("SIGKILL to memory free, p50", float(np.percentile(times, 50)), "ms", "lower"),
        Row("SIGKILL to memory free, slowest", max(times), "ms", "lower", target=1000),
    ]
    write("kill", _processor(), "host", rows)


def test_leaving(model: SmallModel, tmp_path: Path) -> None:
    """From SIGTERM until a daemon with a client has ended, and how long vmmctl takes to say that there is none."""
    leaving, finding = [], []
    for _ in range(9):
        with running_daemon(CONFIG.format("info")) as running, Remote(running.directory) as peer:
            peer.ask("open", model)
            began = time.perf_counter()
            running.process.terminate()
            running.process.wait()
            leaving.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert vmmctl("status", "--socket", os.fspath(tmp_path)).returncode == 3
        finding.append(time.perf_counter() - began)
    rows = [
        Row("SIGTERM to the daemon's end, p50", float(np.percentile(leaving, 50)), "s", "lower"),
        Row("SIGTERM to the daemon's end, slowest", max(leaving), "s", "lower", target=1),
        Row("vmmctl status without a daemon, p50", float(np.percentile(finding, 50)), "s", "lower", target=1),
    ]
    write("leaving", _processor(), "host", rows)
