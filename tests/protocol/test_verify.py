"""`vmmctl verify` against real daemons."""

import json
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from strata_api.v1 import admin_pb2, admin_pb2_grpc, pages

from strata_client import connection
from tests.helpers.daemon import Daemon, running_daemon, vmmctl, wait_until
from tests.helpers.peer import MATRIX_BYTES, SLOT_BYTES, WEIGHTS_BYTES, Remote, SmallModel, client, write_model
from vmmd.driver.host_memfd import HostReservation

CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.05
floor_slots = 10
quiesce_deadline_ms = 60000
[host]
device_bytes = "1280KiB"
ram_bytes = "4MiB"
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG) as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> SmallModel:
    return write_model(tmp_path / "model")


def _verify(daemon: Daemon, *args: str) -> tuple[int, dict[str, Any]]:
    done = vmmctl("verify", *args, "--output", "json", "--socket", os.fspath(daemon.directory))
    assert done.stderr == b"", done.stderr
    return done.returncode, json.loads(done.stdout)


def _wait_for_homes(daemon: Daemon, count: int = 64) -> None:
    wait_until(lambda: daemon.status()["models"][0]["homes"] == count)


@contextmanager
def _stub(daemon: Daemon) -> Iterator[tuple[Any, Any]]:
    """The Admin stub, and the metadata of its calls."""
    _, sock = connection.dial([daemon.directory])
    broker = connection.Broker(sock, admin=True)
    with connection.open_channel(daemon.directory) as channel:
        yield admin_pb2_grpc.AdminStub(channel), ((connection.TOKEN_KEY, broker.token),)
    broker.close()


def test_an_intact_model_is_equal(daemon: Daemon, model: SmallModel) -> None:
    """Slots, homes and weights of an open model equal its file: exit 0, by name and by id, as JSON and as a table."""
    with client(daemon.directory) as peer:
        peer.open(model)
        _wait_for_homes(daemon)
        code, found = _verify(daemon, "model")
        assert code == 0
        assert set(found) == set(admin_pb2.VerifySummary.DESCRIPTOR.fields_by_name)
        assert (found["slots"], found["homes"], found["weights_bytes"]) == (64, 64, WEIGHTS_BYTES)
        assert (found["mismatched"], found["mismatches"], found["file_changed"]) == (0, [], False)
        assert found["compared_bytes"] == 128 * SLOT_BYTES + WEIGHTS_BYTES
        done = vmmctl("verify", str(found["model_id"]), "--socket", os.fspath(daemon.directory))
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.splitlines()[-1] == b"all equal"
        assert b"\x1b" not in done.stdout


def test_damage_by_a_member_of_the_domain_is_found(
    daemon: Daemon, model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of the domain that writes into a slot and a home is found out: exit 1, with layer, expert and place."""
    kept: dict[tuple[object, int], int] = {}
    map_slabs = HostReservation.map

    def spy(self: HostReservation, first_index: int, fds: list[int], *, writable: bool) -> None:
        for index, fd in enumerate(fds, first_index):
            kept[self, index] = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # it is this user's memfd
        map_slabs(self, first_index, fds, writable=writable)

    monkeypatch.setattr(HostReservation, "map", spy)
    with client(daemon.directory) as peer:
        peer.open(model)
        _wait_for_homes(daemon)
        memory = peer.opened[-1].memory
        assert memory.home(2, 5) is not None  # maps it, and all the others that came before the answer
        in_slot = pages.unpack(memory.expert(1, 3).entry)
        in_home = pages.unpack(int(memory.home_entries[2 * model.n_experts + 5]))
        assert (in_slot.tier, in_home.tier) == (pages.TIER_DEVICE, pages.TIER_HOST)
        slot_at, home_at = in_slot.slot * SLOT_BYTES + 2 * MATRIX_BYTES + 7, in_home.slot * SLOT_BYTES
        os.pwrite(kept[memory.arena[0]._reservation, in_slot.slab], b"\xff\xff", slot_at)
        os.pwrite(kept[memory.homes._reservation, in_home.slab], b"\xff", home_at)
        code, found = _verify(daemon, "model")
        assert (code, found["mismatched"]) == (1, 2)
        slot, home = found["mismatches"]
        assert (slot["place"], slot["layer"], slot["expert"], slot["matrix"]) == ("slot", 1, 3, "down")
        assert (slot["slab_index"], slot["offset_bytes"]) == (in_slot.slab, slot_at)
        assert (home["place"], home["layer"], home["expert"], home["matrix"]) == ("home", 2, 5, "gate")
        assert (home["device_uuid"], home["slab_index"], home["offset_bytes"]) == ("HOST-RAM", in_home.slab, home_at)
        done = vmmctl("verify", "model", "--socket", os.fspath(daemon.directory))
        assert (done.returncode, done.stderr) == (1, b"")
        assert b"slot" in done.stdout and b"HOST-RAM" in done.stdout and b"all equal" not in done.stdout
    for fd in kept.values():
        os.close(fd)


def test_a_changed_file_is_said(daemon: Daemon, model: SmallModel) -> None:
    """Where the file has been rewritten, slots are compared with homes, and the output says so."""
    with client(daemon.directory) as peer:
        peer.open(model)
        _wait_for_homes(daemon)
        model.path.write_bytes(bytes(model.path.stat().st_size))
        code, found = _verify(daemon, "model")
        assert (code, found["file_changed"], found["slots"], found["homes"]) == (0, True, 64, 0)
        done = vmmctl("verify", "model", "--socket", os.fspath(daemon.directory))
        assert b"the file has changed since the model was opened" in done.stdout


def test_others_trade_and_read_meanwhile(daemon: Daemon, model: SmallModel) -> None:
    """While clients trade and read, verification after verification finds everything equal, and so do the reads."""
    with Remote(daemon.directory) as reader, Remote(daemon.directory) as trader:
        reader.ask("open", model)
        trader.ask("open", model)
        trader.ask("create")
        _wait_for_homes(daemon)
        stop = threading.Event()
        slots = set()
        failures: list[BaseException] = []

        def trade() -> None:
            try:
                while not stop.is_set():
                    trader.ask("grow", 12)
                    trader.ask("shrink", 0)
                    time.sleep(0.06)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=trade)
        thread.start()
        try:
            reader.tell("count_reads", 3.0)
            with _stub(daemon) as (stub, metadata):
                until = time.monotonic() + 3
                while time.monotonic() < until or len(slots) < 2:  # no trade came between as yet
                    *_, last = stub.Verify(admin_pb2.VerifyRequest(model="model"), metadata=metadata, timeout=60)
                    assert last.summary.mismatched == 0, last
                    assert last.summary.homes == 64
                    slots.add(last.summary.slots)
            reads, _, wrong = reader.answer()
        finally:
            stop.set()
            thread.join()
        assert not failures, failures
        assert reads and not wrong, wrong


def test_unknown_names_are_one_line(daemon: Daemon, model: SmallModel) -> None:
    """A model that is not there is one line that names those that are; without a daemon one line and exit 3."""
    where = "--socket", os.fspath(daemon.directory)
    done = vmmctl("verify", "x", *where)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"vmmctl: there is no model 'x' here; none is open\n"
    with client(daemon.directory) as peer:
        peer.open(model)
        done = vmmctl("verify", "x", *where)
        assert done.returncode == 1
        assert done.stderr.startswith(b"vmmctl: there is no model 'x' here; there are ")
        assert done.stderr.endswith(b" ('model')\n")
    done = vmmctl("verify", "x", "--socket", os.fspath(model.path.parent))
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1


def test_progress_is_for_terminals(daemon: Daemon, model: SmallModel) -> None:
    """On a terminal a line tells how far it is, and is taken away; the result on standard output stays whole."""
    with client(daemon.directory) as peer:
        peer.open(model)
        ours, theirs = pty.openpty()
        show = (
            "import vmmd.ctl.verify as v; p = v._Progress(); p.show(1 << 29, 1 << 30); p.clear();"
            "import sys; from vmmd.ctl.main import main; sys.argv[0] = 'vmmctl'; main()"
        )
        argv = [sys.executable, "-c", show, "verify", "model", "--output", "json"]
        argv += ["--socket", os.fspath(daemon.directory)]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, timeout=60)
        os.close(theirs)
        shown = os.read(ours, 4096)
        os.close(ours)
        assert done.returncode == 0
        assert json.loads(done.stdout)["mismatched"] == 0
        assert shown.startswith(b"\rcomparing:  50% of 1.00 GiB\r\x1b[K")
