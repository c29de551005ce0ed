"""Noise on both sockets, in calls and in shared pages: the daemon goes on serving whoever behaves."""

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.fuzzing import Fuzzer
from tests.helpers.peer import Admin, Remote, descriptors_of, public_model, wait_for_descriptors, write_model

SLAB_BYTES = 64 << 10
CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.05
quiesce_deadline_ms = 200
revoke_deadline_ms = 200
floor_slots = 10
[host]
device_bytes = "4MiB"
ram_bytes = "8MiB"
"""
ATTACKERS = 2
ATTACKS = 20
"""Between two answers of an attacker."""

EVIL_UID = 4343 if os.geteuid() == 0 else 0
"""Attackers are another user's where there can be one, in a domain of their own."""


def _serves(honest: Remote, turn: int) -> None:
    """The well-behaved client grows, finds its own bytes in what it got, reads every expert and gives back."""
    slabs, value = 1 + turn % 4, 1 + turn % 250
    honest.ask("grow", slabs)
    honest.ask("write_kv", value)
    assert honest.ask("wrong_experts") == 0
    assert honest.ask("read_kv") == [value]
    honest.ask("shrink", 0)


def _is_free(admin: Admin) -> bool:
    """Whether no K/V is left, and nothing is on its way back."""
    device = admin.device()
    return not device.kv_bytes + device.quarantined_bytes + device.revoking_bytes


def _fuzz(daemon: Daemon, seconds: float, seed: int) -> dict[str, int]:
    """Attacks by kind. Every attacker's session ends and another begins now and then, as the seed goes on."""
    done: dict[str, int] = {}
    daemon.directory.chmod(0o750)
    with public_model() as good, ExitStack() as stack:
        evil = write_model(Path(good.path.parent, "evil"))
        honest = stack.enter_context(Remote(daemon.directory))
        honest.ask("open", good)
        honest.ask("create")
        admin = stack.enter_context(Admin(daemon.directory))
        with Remote(daemon.directory, EVIL_UID, kind=Fuzzer) as first:
            first.ask("prepare", evil, seed)
        wait_until(lambda: len(admin.status().sessions) == 1)
        before = descriptors_of(daemon.process.pid)
        until, turn = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            with ExitStack() as attackers:
                fuzzers = []
                for _ in range(ATTACKERS):
                    seed += 1
                    fuzzer = attackers.enter_context(Remote(daemon.directory, EVIL_UID, kind=Fuzzer))
                    fuzzer.ask("prepare", evil, seed)
                    fuzzer.tell("attack_for", ATTACKS)
                    fuzzers.append(fuzzer)
                    print("seed", seed)
                for fuzzer in fuzzers:
                    while not fuzzer.has_answered():
                        turn += 1
                        _serves(honest, turn)
                    for kind, count in fuzzer.answer().items():
                        done[kind] = done.get(kind, 0) + count
        assert daemon.process.poll() is None
        _serves(honest, 1)
        assert honest.ask("troubles") == []
        wait_until(lambda: len(admin.status().sessions) == 1)
        wait_for_descriptors(daemon.process.pid, before, 30)
        wait_until(lambda: _is_free(admin), otherwise=lambda: str(admin.device()))
        log = daemon.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :].replace("\\n", "\n")[:5000]
    return done


def test_noise_harms_nobody_who_behaves() -> None:
    """For half a minute of packets, frames, calls and pages of noise a client is served, and nothing is left over."""
    with running_daemon(CONFIG) as daemon:
        done = _fuzz(daemon, 30, 1)
    assert len(done) == 4, done


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_noise_for_long_harms_nobody_who_behaves() -> None:
    """The same for ten minutes, or STRATA_STRESS_S seconds, from another seed every time."""
    with running_daemon(CONFIG) as daemon:
        print("attacks:", _fuzz(daemon, float(os.environ.get("STRATA_STRESS_S", "600")), time.time_ns() % (1 << 32)))
