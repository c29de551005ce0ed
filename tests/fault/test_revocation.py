"""Clients that cannot give back, or will not: their memory stays theirs, and everybody else's trades go on."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from strata_api.v1 import admin_pb2

from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.debugger import state_of, stopped_by_debugger, stopped_by_signal
from tests.helpers.liars import Hoarder, Liar
from tests.helpers.peer import Admin, Remote, SmallModel, public_model, write_model
from vmmd.errors import Exhausted, LeaseRevoked

SLAB = 64 << 10
CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.05
quiesce_deadline_ms = 200
revoke_deadline_ms = 300
floor_slots = 10
[host]
device_bytes = "{}KiB"
ram_bytes = "8MiB"
"""
VICTIM, OTHER = 4242, 4243

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming other users needs root")


class Scene:
    """A daemon whose device is full of two users' models: 14 slabs each, of which 11 can be traded.

    `victim` has one open; `reader` and `grower`, both of the other user, have the other,
    and `grower` a range.
    """

    def __init__(self, daemon: Daemon, stack: ExitStack, first: SmallModel, second: SmallModel) -> None:
        self.daemon = daemon
        self.admin = stack.enter_context(Admin(daemon.directory))
        self.victim = stack.enter_context(Remote(daemon.directory, VICTIM, kind=Liar))
        self.victim.ask("open", first)
        self.reader, self.grower = (stack.enter_context(Remote(daemon.directory, OTHER)) for _ in range(2))
        for peer in (self.reader, self.grower):
            peer.ask("open", second)
        self.grower.ask("create")
        wait_until(lambda: all(m.homes == m.resident == 64 for m in self.admin.status().models))

    def trades_go_on(self) -> None:
        """The other user's arena gives and gets back, again and again, and nobody reads or finds wrong bytes."""
        for turn in range(1, 4):
            device = self._settled()
            self.grower.ask("grow", device.free_bytes // SLAB + 4)
            assert self.admin.device().traded_slabs > device.traded_slabs
            self.grower.ask("write_kv", turn)
            assert self.reader.ask("wrong_experts") == 0
            assert self.grower.ask("read_kv") == [turn]
            self.grower.ask("shrink", 0)
            self._wait_until_returned(device.returned_slabs)
        assert self.reader.ask("wrong_experts") == 0

    def _settled(self) -> admin_pb2.DeviceStatus:
        """The device once arenas have what was free."""
        wait_until(lambda: not self.admin.device().free_slab_bytes, otherwise=lambda: str(self.admin.status()))
        return self.admin.device()

    def _wait_until_returned(self, before: int) -> None:
        """Until arenas have got slabs back: those are counted a moment after they are free no more."""
        wait_until(lambda: self.admin.device().returned_slabs > before, otherwise=lambda: str(self.admin.status()))

    def quarantined(self) -> int:
        """Slabs that are quarantined on the device."""
        return int(self.admin.device().quarantined_bytes) // SLAB

    def charged(self) -> dict[int, int]:
        """Quarantined slabs by pid."""
        rows = [q for q in self.admin.status().quarantines if q.device_uuid != "HOST-RAM"]
        return {pid: sum(q.bytes for q in rows if q.pid == pid) // SLAB for pid in {q.pid for q in rows}}

    def take_from_victim(self) -> None:
        """The grower asks for more than its own user's arena has above the floor: it is refused."""
        with pytest.raises(Exhausted, match="quarantined"):
            self.grower.ask("grow", 14)

    def nothing_is_left(self) -> None:
        """No quarantine, no memory on its way, and the log has no bug."""
        wait_until(lambda: self.quarantined() == 0, otherwise=lambda: str(self.admin.status()))
        wait_until(lambda: self.admin.device().revoking_bytes == 0)
        log = self.daemon.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :].replace("\\n", "\n")[:5000]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with public_model() as first, running_daemon(CONFIG.format(28 * 64)) as daemon, ExitStack() as stack:
        daemon.directory.chmod(0o750)
        second = write_model(Path(first.path.parent, "second"))
        scene = Scene(daemon, stack, first, second)
        yield scene
        scene.nothing_is_left()


STOPS = {"SIGSTOP": stopped_by_signal, "debugger": stopped_by_debugger}


@pytest.mark.parametrize("stop", STOPS)
def test_a_client_stopped_in_a_step_keeps_what_it_reads(scene: Scene, stop: str) -> None:
    """Its arena gives nothing while it stands in a step, it is named, and the others trade among themselves."""
    scene.victim.ask("begin_step")
    with STOPS[stop](scene.victim.pid):
        assert state_of(scene.victim.pid) == {"SIGSTOP": "T", "debugger": "t"}[stop]
        with pytest.raises(Exhausted):
            scene.grower.ask("grow", 14)
        assert list(scene.admin.status().models[0].stuck_pids) == [scene.victim.pid]
        scene.trades_go_on()
        assert list(scene.admin.status().models[0].stuck_pids) == [scene.victim.pid]
    scene.victim.ask("end_step")
    wait_until(lambda: not scene.admin.status().models[0].stuck_pids)
    assert scene.victim.ask("wrong_experts") == 0
    wait_until(lambda: scene.admin.status().models[0].resident == 64, otherwise=lambda: str(scene.admin.status()))
    assert scene.victim.ask("wrong_experts") == 0
    scene.trades_go_on()


@pytest.mark.parametrize("stop", STOPS)
def test_a_client_stopped_between_steps_is_charged_for_what_was_revoked(scene: Scene, stop: str) -> None:
    """What it cannot unmap is quarantined under its pid; the others trade, and it heals when it goes on."""
    with STOPS[stop](scene.victim.pid):
        scene.take_from_victim()
        taken = scene.quarantined()
        assert taken > 0 and scene.charged() == {scene.victim.pid: taken}
        scene.trades_go_on()
        assert scene.quarantined() == taken
    scene.nothing_is_left()
    assert scene.victim.ask("wrong_experts") == 0
    scene.trades_go_on()


@pytest.mark.parametrize("cut", ["cut_stream", "cut_broker"])
def test_a_client_that_is_cut_off_and_lives_is_charged_for_what_it_has(scene: Scene, cut: str) -> None:
    """Whatever connection breaks, memory that its process still maps stays charged to it until that ends."""
    scene.victim.ask("create")
    own = 0
    if cut == "cut_broker":  # its session ends: its K/V is due, too
        own = 1
        scene.victim.ask("grow", own)
    scene.victim.ask(cut)
    if own:
        wait_until(lambda: scene.charged() == {scene.victim.pid: own}, otherwise=lambda: str(scene.admin.status()))
    else:
        scene.take_from_victim()
        assert scene.charged() == {scene.victim.pid: scene.quarantined()}
    held = scene.quarantined()
    scene.trades_go_on()
    assert scene.quarantined() == held
    if own:  # experts move without waiting for it: it must not read them, and says so
        with pytest.raises(LeaseRevoked, match="goes on without it"):
            scene.victim.ask("wrong_experts")
    else:
        assert scene.victim.ask("wrong_experts") == 0
    scene.victim.kill()
    scene.nothing_is_left()
    scene.trades_go_on()


def test_a_client_that_answers_and_keeps_the_import_is_charged_for_it(scene: Scene) -> None:
    """Nobody gets what it still holds, whatever it says, until it lets go."""
    scene.victim.ask("lie")
    scene.take_from_victim()
    taken = scene.quarantined()
    assert taken > 0 and scene.charged() == {scene.victim.pid: taken}
    session = next(s for s in scene.admin.status().sessions if s.pid == scene.victim.pid)
    assert session.quarantined_bytes == taken * SLAB
    scene.trades_go_on()
    assert scene.charged() == {scene.victim.pid: taken}
    assert scene.victim.ask("come_clean") >= taken
    scene.nothing_is_left()
    assert scene.victim.ask("wrong_experts") == 0


@pytest.mark.parametrize("parent", ["lives", "dies"])
def test_a_forked_child_that_inherited_everything_is_charged_for_it(scene: Scene, parent: str) -> None:
    """Descriptors of slabs in a child are held by it: quarantined until it ends, whether its parent lives or not."""
    scene.victim.kill()  # its memory makes room
    wait_until(lambda: len(scene.admin.status().sessions) == 2)
    with Remote(scene.daemon.directory, VICTIM, kind=Hoarder) as hoarder:
        range_id = hoarder.ask("grow", 3)
        child = hoarder.ask("fork")
        try:
            if parent == "lives":
                hoarder.ask("let_go")
                hoarder.ask("shrink", range_id)
            else:
                hoarder.kill()
            wait_until(lambda: scene.quarantined() == 3, otherwise=lambda: str(scene.admin.status()))
            if parent == "dies":
                wait_until(lambda: scene.charged() == {child: 3}, otherwise=lambda: str(scene.admin.status()))
            scene.trades_go_on()
            assert scene.quarantined() == 3
        finally:
            os.kill(child, signal.SIGKILL)
        scene.nothing_is_left()
        scene.trades_go_on()


def test_a_client_that_stops_before_it_has_mapped_the_homes_holds_nobody_up() -> None:
    """Homes that a stopped client was granted are used without it, so its arena gives; it reads rightly afterwards."""
    with public_model() as model, running_daemon(CONFIG.format(14 * 64)) as daemon, ExitStack() as stack:
        stopped, grower = (stack.enter_context(Remote(daemon.directory)) for _ in range(2))
        admin = stack.enter_context(Admin(daemon.directory))
        stopped.ask("open", model)
        grower.ask("create")
        with stopped_by_signal(stopped.pid):
            assert grower.ask("grow", 6) == 6
            grower.ask("write_kv", 9)
            assert admin.status().models[0].homes == model.n
        assert stopped.ask("wrong_experts") == 0
        assert grower.ask("read_kv") == [9]
        assert stopped.ask("troubles") == []
