"""A storm of clients that grow, shrink, read experts, stop and are killed at random: nothing is lost, nobody harmed."""

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from tests.helpers import checked_daemon
from tests.helpers.daemon import Daemon, wait_until
from tests.helpers.peer import (
    Admin,
    Remote,
    SmallModel,
    descriptors_of,
    public_model,
    slabs_of,
    wait_for_descriptors,
    write_model,
)
from vmmd.errors import Exhausted, LeaseRevoked, PreconditionFailed, Unavailable

CLIENTS = 64
SLAB_BYTES = 64 << 10
CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.2
quiesce_deadline_ms = 200
revoke_deadline_ms = 200
floor_slots = 10
[host]
device_bytes = "6MiB"
ram_bytes = "12MiB"
"""
UIDS = (0, 4242, 4243) if os.geteuid() == 0 else (0,)
CHECKED_VMMD = (checked_daemon.__file__,)


class _Rider:
    """One client of the storm, replaced by the next when it is killed. Bytes that it wrote are its own alone."""

    def __init__(self, daemon: Daemon, uid: int, models: list[SmallModel], chance: random.Random) -> None:
        self._daemon = daemon
        self._uid = uid
        self._models = models
        self._chance = chance
        self.done: Counter[str] = Counter()
        self._begin()

    def _begin(self) -> None:
        self.remote = Remote(self._daemon.directory, self._uid, connect=False)
        self._stopped_until_s = 0.0
        self._slabs = self._value = 0
        self._verbs = ["grow", "grow", "shrink", "write_kv", "read_kv"]
        self._life = iter(("connect", "open", "create"))
        self._verb = ""
        self._tell("connect")

    def _tell(self, verb: str, *args: object) -> None:
        self._verb = verb
        self.remote.tell(verb, *args)

    def turn(self) -> None:
        """Takes an answer that is there and asks for the next thing; or stops, continues or kills the client."""
        now = time.monotonic()
        if self._stopped_until_s:
            if now >= self._stopped_until_s:
                self._stopped_until_s = 0.0
                self.remote.signal(SIGCONT)
            return
        kind = self._chance.random()
        if kind < 0.004:
            self.done["killed"] += 1
            self.remote.kill()
            self._begin()
        elif kind < 0.012:
            self.done["stopped"] += 1
            self.remote.signal(SIGSTOP)
            self._stopped_until_s = now + self._chance.random()
        elif self.remote.has_answered():
            self._take_answer()
            self._next()

    def _take_answer(self) -> None:
        try:
            answer = self.remote.answer()
        except Unavailable as error:
            raise AssertionError(f"{self._verb} of client {self.remote.pid}: {error.message}") from error
        except Exhausted:
            self.done["refused"] += 1
            return
        except (LeaseRevoked, PreconditionFailed):
            self.done["revoked"] += 1
            return
        self.done[self._verb] += 1
        if self._verb == "open":
            self._verbs += ["wrong_experts", "count_reads"]
        elif self._verb == "grow":
            self._slabs = self._asked
            self._value = 0  # what came has bytes of others of its domain, till it is written
        elif self._verb == "wrong_experts":
            assert answer == 0
        elif self._verb == "count_reads":
            assert answer[2] == []
        elif self._verb == "read_kv":
            assert answer == ([self._value] if self._slabs else []), f"{answer}, not {self._value}"

    def _next(self) -> None:
        for verb in self._life:
            if verb == "open":
                self._tell("open", self._chance.choice(self._models))
                return
            if verb == "create":
                self._tell("create")
                return
        verb = self._chance.choice(self._verbs)
        if verb == "read_kv" and not self._value:
            verb = "write_kv"
        if verb == "grow":
            self._asked = max(self._slabs, self._chance.randrange(1, 8))
            self._tell("grow", self._asked)
        elif verb == "shrink":
            self._slabs = self._chance.randrange(0, self._slabs + 1)
            self._tell("shrink", self._slabs)
        elif verb == "write_kv":
            self._value = self._chance.randrange(1, 256)
            self._tell("write_kv", self._value)
        elif verb == "count_reads":
            self._tell("count_reads", self._chance.random() * 0.2, self._chance.randrange(1 << 30))
        else:
            self._tell(verb)

    def end(self) -> None:
        self.remote.kill()


def _storm(daemon: Daemon, seconds: float, seed: int) -> Counter[str]:
    """What the clients did, by kind. Checks what must hold meanwhile and afterwards."""
    print("seed", seed)
    chance = random.Random(seed)
    daemon.directory.chmod(0o750)
    pid = daemon.process.pid
    done: Counter[str] = Counter()
    with public_model() as first, ExitStack() as stack:
        models = [first, write_model(Path(first.path.parent, "second"), 2, 20)]
        admin = stack.enter_context(Admin(daemon.directory))
        for uid in UIDS:  # what the daemon makes once
            with Remote(daemon.directory, uid) as peer:
                for model in models:
                    peer.ask("open", model)
        wait_until(lambda: not admin.status().sessions)
        before = descriptors_of(pid)
        riders = [_Rider(daemon, chance.choice(UIDS), models, chance) for _ in range(CLIENTS)]
        try:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                for rider in riders:
                    rider.turn()
                _adds_up(admin)
        except BaseException:
            print(daemon.log.read_text()[-100_000:])
            raise
        finally:
            for rider in riders:
                rider.end()
                done += rider.done
        wait_until(lambda: _is_quiet(admin), 60, lambda: str(admin.status()))
        _adds_up(admin)
        wait_for_descriptors(pid, before + 8, 60)  # models' files and tables: six models at most, some were dropped
        wait_until(  # arenas still get slabs back
            lambda: slabs_of(pid) * SLAB_BYTES == _held_bytes(admin),
            otherwise=lambda: f"{slabs_of(pid)} slabs, {_held_bytes(admin)} bytes",
        )
        for uid in UIDS:
            with Remote(daemon.directory, uid) as peer:
                for model in models:
                    peer.ask("open", model)
                    assert peer.ask("wrong_experts") == 0
        log = daemon.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :].replace("\\n", "\n")[:5000]
    return done


def _adds_up(admin: Admin) -> None:
    """The parts of each device are its cap."""
    for d in admin.status().devices:
        held = d.kv_bytes + d.experts_bytes + d.weights_bytes + d.revoking_bytes + d.quarantined_bytes
        assert held + d.free_bytes == d.cap_bytes - d.unmanaged_bytes, d
        assert d.unmanaged_bytes == 0


def _held_bytes(admin: Admin) -> int:
    """Of the slabs that there are, free ones included."""
    return int(sum(d.total_bytes - d.free_bytes + d.free_slab_bytes for d in admin.status().devices))


def _is_quiet(admin: Admin) -> bool:
    status = admin.status()
    return not status.sessions and not any(
        d.kv_bytes or d.revoking_bytes or d.quarantined_bytes for d in status.devices
    )


@contextmanager
def _checked_daemon() -> Iterator[Daemon]:
    daemon = Daemon(CONFIG, program=CHECKED_VMMD)
    try:
        yield daemon
    finally:
        daemon.stop()


def test_a_storm_of_clients_leaves_everything_as_it_was() -> None:
    """For a minute 64 clients do all of it: no wrong byte, no invariant broken, nothing left behind."""
    with _checked_daemon() as daemon:
        done = _storm(daemon, 60, 1)
    print(done)
    assert done.keys() >= {"grow", "shrink", "read_kv", "count_reads", "stopped", "killed"}, done


@pytest.mark.bench
@pytest.mark.timeout(3600)
def test_a_long_storm_of_clients_leaves_everything_as_it_was() -> None:
    """The same for ten minutes, or STRATA_STRESS_S seconds, from another seed every time."""
    with _checked_daemon() as daemon:
        print(_storm(daemon, float(os.environ.get("STRATA_STRESS_S", "600")), time.time_ns() % (1 << 32)))
