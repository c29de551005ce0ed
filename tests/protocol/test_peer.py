"""`strata-client --peer-device` against real daemons that simulate several devices."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata_client.devices import VISIBLE_SIMULATED
from tests.helpers.daemon import Daemon, client, running_daemon, wait_until
from tests.protocol.test_generate import BABBLE, GROWTH, PROMPT

# The tiny model's weights take 2 slabs of 1 MiB, its experts 8 (12 slots each), 160 K/V cells one.
CONFIG = """
slab_bytes = "1MiB"
give_back_delay_s = 0.2
peer_access = "{peer_access}"
[host]
devices = 3
device_bytes = "64MiB"
ram_bytes = "64MiB"
"""
CAP = '[[device]]\nuuid = "HOST-SIM-{}"\ncap_bytes = "{}MiB"\n'
CAPS = (5, 3, 2)  # 36, 36 and 24 of 96 experts before there is K/V

LINE = re.compile(
    r"strata: peer GPU (\d): (\d+) experts, \d+\.\d\d [GM]iB \((filled in \d+\.\d s|resident already)\); with the "
    r"primary's (\d+) (?:and (\d+) on other peers )?that is (\d+) of (\d+) on the GPUs"
)


def config(caps: tuple[int, ...] = CAPS, peer_access: str = "auto") -> str:
    """Lines of the configuration: three devices with caps in MiB."""
    return CONFIG.format(peer_access=peer_access) + "".join(CAP.format(i, cap) for i, cap in enumerate(caps))


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(config()) as running:
        yield running


def _lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return done.stderr.decode().splitlines()


def _peer_lines(done: subprocess.CompletedProcess[bytes]) -> list[tuple[int, int, str, int, int, int, int]]:
    """Number, experts, how they came, the primary's, other peers', the sum and all, of each line about a peer."""
    assert done.returncode == 0, done.stderr
    found = [LINE.fullmatch(line) for line in _lines(done) if "peer GPU" in line]
    assert all(found)
    return [(int(m[1]), int(m[2]), m[3], int(m[4]), int(m[5] or 0), int(m[6]), int(m[7])) for m in found if m]


def _resident(daemon: Daemon) -> int:
    return int(daemon.status()["models"][0]["resident"])


def test_experts_are_on_the_peers() -> None:
    """The line says what each peer holds; a model that is open gets the part that is new, and nothing comes twice."""
    with running_daemon("placement_bytes_per_s = 0\n" + config()) as daemon:  # else slots are empty for moments
        _check_peers(daemon)


def _check_peers(daemon: Daemon) -> None:
    arguments = (PROMPT, "--max-tokens", "1", "--temperature", "0", "--verbose")
    assert _peer_lines(daemon.generate(*arguments)) == []
    wait_until(lambda: _resident(daemon) == 36)
    ((number, experts, how, primary, others, together, total),) = _peer_lines(
        daemon.generate(*arguments, "--peer-device", "1")
    )
    assert (number, experts, primary, others, together, total) == (1, 36, 36, 0, 72, 96)
    assert how.startswith("filled in ")
    wait_until(lambda: _resident(daemon) == 72)
    lines = _peer_lines(daemon.generate(*arguments, "--peer-device", "HOST-SIM-1", "--peer-device", "2"))
    assert [line[:2] for line in lines] == [(1, 36), (2, 24)]
    assert [line[2].startswith("filled") for line in lines] == [False, True]
    assert [line[4:6] for line in lines] == [(0, 72), (36, 96)]
    device = {d["uuid"]: d["experts_bytes"] >> 20 for d in daemon.status()["devices"] if not d["is_host"]}
    assert device["HOST-SIM-1"] == 3 and device["HOST-SIM-2"] == 2


def test_a_cold_model_is_filled_on_both() -> None:
    """The first to open a model may name a peer: both are filled, and the line says so."""
    with running_daemon("placement_bytes_per_s = 0\n" + config()) as running:
        done = running.generate(PROMPT, "--max-tokens", "1", "--peer-device", "2", "--stats", "--json")
        ((number, experts, how, primary, _, together, _),) = _peer_lines(done)
        assert (number, experts, primary, together) == (2, 24, 36, 60)
        assert how.startswith("filled in ")
        statistics = json.loads(done.stdout.splitlines()[-1])["statistics"]
        assert statistics["peers"] == [{"device": "HOST-SIM-2", "read": "in place", "experts": 24}]


def test_text_and_logits_are_the_same_with_peers(tmp_path: Path) -> None:
    """Token for token and bit for bit, solo and with peers, while K/V grows and experts move between devices."""
    arguments = (PROMPT, "--json", *BABBLE, "--max-tokens", "150", "--context", "512")
    texts, logits, growths = {}, {}, {}
    text = tmp_path / "text"
    text.write_text(PROMPT * 4)
    runs: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "resident": ((64, 64, 64), ()),
        "peer": ((6, 3, 2), ("--peer-device", "1")),
        "peers": ((6, 3, 2), ("--peer-device", "2", "--peer-device", "1")),
        "small": ((5, 1, 1), ("--peer-device", "1")),
        "without paths": ((6, 3, 2), ("--peer-device", "2", "--peer-device", "1")),
    }
    for name, (caps, options) in runs.items():
        with running_daemon(config(caps, "never" if name == "without paths" else "auto")) as running:
            done = running.generate(*arguments, *options)
            assert done.returncode == 0, done.stderr
            rows = [json.loads(line) for line in done.stdout.splitlines()]
            texts[name] = [row["token"] for row in rows if row.get("token") is not None]
            growths[name] = [line for line in _lines(done) if "expert cache gave" in line]
            out = tmp_path / f"{name}.npy"
            measured = client(
                "perplexity", os.fspath(text), "--save-logits", os.fspath(out), *options,
                "--socket", os.fspath(running.directory),
            )  # fmt: skip
            assert measured.returncode == 0, measured.stderr
            logits[name] = np.load(out)
    assert len(texts["resident"]) == 150 and growths["resident"] == []
    for name in ("peer", "peers", "without paths"):
        assert texts[name] == texts["resident"]
        assert growths[name] and all(GROWTH.fullmatch(line) for line in growths[name])
    assert texts["resident"][: len(texts["small"])] == texts["small"] != []
    assert all(np.array_equal(logits[name], logits["resident"]) for name in runs)


def test_a_growth_moves_experts_to_the_peer(daemon: Daemon) -> None:
    """K/V stays elastic: it takes the primary's slots, whose hotter experts displace colder ones on the peer."""
    growths: list[str] = []
    moved = 0
    while not moved:  # in the first text the daemon may not have looked at what is hot before its cells grow
        done = daemon.generate(PROMPT, *BABBLE, "--max-tokens", "280", "--context", "512", "--peer-device", "1")
        assert done.returncode == 0, done.stderr
        growths += [line for line in _lines(done) if "expert cache gave" in line]
        moved = sum(int(re.search(r"(\d+) hotter experts moved", line)[1]) for line in growths)  # type: ignore[index]
    assert len(growths) >= 2
    devices = {d["uuid"]: d for d in daemon.status()["devices"]}
    assert devices["HOST-SIM-0"]["traded_slabs"] >= 2 and devices["HOST-SIM-1"]["traded_slabs"] == 0
    wait_until(lambda: _resident(daemon) == 72, otherwise=lambda: str(daemon.status()))


def test_a_peer_without_a_path_computes() -> None:
    """Where devices cannot read each other's memory, a peer holds experts all the same, and --stats says how."""
    lines = "placement_bytes_per_s = 0\n" + config(peer_access="never")
    with running_daemon(lines) as running:
        arguments = (PROMPT, "--max-tokens", "1", "--peer-device", "2", "--stats")
        done = running.generate(*arguments, "--json")
        ((number, experts, _, primary, _, together, _),) = _peer_lines(done)
        assert (number, experts, primary, together) == (2, 24, 36, 60)
        statistics = json.loads(done.stdout.splitlines()[-1])["statistics"]
        assert statistics["peers"] == [{"device": "HOST-SIM-2", "read": "by itself", "experts": 24}]
        assert "strata: HOST-SIM-2 computes by itself and holds 24 experts" in _lines(running.generate(*arguments))


def test_clients_that_see_one_device_each() -> None:
    """A client computes on the first device that it sees; one that it does not see is refused before anything opens."""
    with running_daemon(config((16, 16, 16))) as running:
        for mine, other in (("HOST-SIM-0", "1"), ("HOST-SIM-1", "0")):
            env = {**os.environ, VISIBLE_SIMULATED: mine}
            done = running.generate(PROMPT, "--max-tokens", "1", "--verbose", env=env)
            assert done.returncode == 0, done.stderr
            assert f"strata: device {mine}" in done.stderr.decode()
            for option in ("--device", "--peer-device"):
                done = running.generate(PROMPT, option, other, env=env)
                assert done.returncode == 1
                (line,) = _lines(done)
                assert f"{option} {other}: this process does not see HOST-SIM-{other}" in line
                assert f"it sees {mine[-1]}: {mine}" in line
        assert len(running.status()["models"]) == 2, "each has the weights on its own device"
