"""Devices that die, other programs that take the room, and memory that a client keeps."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers.faulty_driver import FaultyDriver
from tests.helpers.in_process import SLAB_BYTES, Host, run, until
from tests.helpers.peer import SmallModel, public_model
from vmmd.core import arbiter
from vmmd.core.ledger import SlabState
from vmmd.driver.base import DeviceMemory, Slab
from vmmd.errors import Exhausted, NoDevice
from vmmd.manager import releases
from vmmd.server import status


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


def test_a_device_that_died_is_failed_and_the_others_go_on(model: SmallModel) -> None:
    """Its sessions are told, nothing is granted on it any more, and another device serves."""

    async def scenario() -> None:
        host = Host(40, 60, n_devices=2)
        try:
            await host.open(model)
            range_id = host.range()
            await host.manager.kv.grow(host.session, [(range_id, 16)])
            host.inner.set_failed("SIM-0")
            host.manager.devices.measure()
            assert any("SIM-0 has failed" in notice for notice in host.notices)
            with pytest.raises(Exhausted, match="SIM-0 has failed"):
                await host.manager.kv.grow(host.session, [(range_id, 160)])
            with pytest.raises(NoDevice, match="SIM-0 has failed"):
                await host.open(model, host.connect("user"), "SIM-0")
            again = await host.open(model, host.connect("user"))
            assert {r.device for r in again.ranges} == {"SIM-1"}
            states = {d.uuid: d.state for part in status.parts(host.manager) for d in part.devices}
            assert states == {"SIM-0": "failed", "SIM-1": "ok", "HOST-RAM": "ok"}
        finally:
            await host.close()

    run(scenario)


def test_arenas_shrink_for_other_programs_and_no_further_than_their_floor(model: SmallModel) -> None:
    """Memory that another program takes comes from the coldest experts, down to the floor; they live on at home."""

    async def scenario() -> None:
        host = Host(18, 40)
        try:
            opened = await host.open(model)
            ledger = host.manager.ledger
            before = ledger.slab_count("SIM-0")
            ledger.devices["SIM-0"].reserve_bytes = 3 * SLAB_BYTES
            host.inner.set_unmanaged_bytes("SIM-0", (18 - before) * SLAB_BYTES)
            host.manager.devices.measure()
            assert ledger.balance_slabs("SIM-0") == -3
            await host.manager.slabs.shed("SIM-0", 3)
            assert ledger.balance_slabs("SIM-0") == 0
            await host.manager.slabs.shed("SIM-0", 18)
            assert opened.arena.slots >= opened.arena.floor_slots
            assert opened.arena.resident.sum() < opened.arena.geometry.n
            assert all(opened.table.entry(e) for e in range(opened.arena.geometry.n))
            host.state()
        finally:
            await host.close()

    run(scenario)


class _Blind(FaultyDriver):
    """Cannot tell who holds a slab, as CUDA cannot; while `keeps`, destroyed memory does not come back."""

    keeps = False
    kept_bytes = 0

    def held_elsewhere(self, slab: Slab) -> bool | None:
        return None

    def destroy(self, slab: Slab) -> None:
        super().destroy(slab)
        self.kept_bytes += slab.size_bytes if self.keeps else 0

    def memory(self, device_uuid: str) -> DeviceMemory:
        memory = super().memory(device_uuid)
        return DeviceMemory(memory.total_bytes, memory.free_bytes - self.kept_bytes)


def test_memory_that_does_not_come_back_stays_charged_to_who_kept_it(model: SmallModel) -> None:
    """A client that answers a revocation and keeps the import is shown with its pid; nobody else gets the memory."""

    async def scenario() -> None:
        host = Host(18, 60, wrap=_Blind)
        driver = host.driver
        assert isinstance(driver, _Blind)
        try:
            await host.open(model)
            other = host.connect("somebody else")
            range_id = host.range(other)
            ledger = host.manager.ledger
            wanted = 16 * (ledger.room_slabs("SIM-0") + 2)
            driver.keeps = True
            with pytest.raises(Exhausted, match="quarantined"):
                await host.manager.kv.grow(other, [(range_id, wanted)])
            driver.keeps = False
            held = ledger.slabs_in("SIM-0", SlabState.QUARANTINED)
            assert len(held) == 2
            rows = [q for part in status.parts(host.manager) for q in part.quarantines]
            assert [(q.bytes, q.pid, q.session_id) for q in rows] == [
                (2 * SLAB_BYTES, host.session.record.pid, host.session.session_id)
            ]
            host.manager.devices.measure()
            assert ledger.devices["SIM-0"].unmanaged_bytes == 0  # charged once
            host.manager.releases.lift_quarantine()
            assert ledger.slabs_in("SIM-0", SlabState.QUARANTINED) == held
            host.manager.disconnect(host.session, "it died")
            driver.kept_bytes = 0
            host.manager.releases.lift_quarantine()
            assert not ledger.slabs_in("SIM-0", SlabState.QUARANTINED)
            host.manager.devices.measure()
            await host.manager.kv.grow(other, [(range_id, wanted)])
        finally:
            await host.close()

    run(scenario)


def test_places_that_a_client_has_not_unmapped_are_not_granted(model: SmallModel) -> None:
    """An arena takes no more slabs than it has places that no session has anything else mapped at; nothing changes."""

    async def scenario() -> None:
        host = Host(18)
        try:
            opened = await host.open(model)
            host.session.watcher = host.session.events.clear  # maps nothing, unmaps nothing
            arena, range_id = opened.ranges[0], host.range()
            free = arbiter.free_for(host.manager.ledger, "SIM-0", "user")
            granted = await host.manager.kv.grow(host.session, [(range_id, 16 * (free + 3))])
            assert sum(trade.slabs for trade in granted.trades) == 3
            await host.manager.kv.shrink(host.session, range_id, 0)
            places = arena.slabs_max - len(arena.slabs) - 3
            assert host.manager.slabs.places(arena) == places
            before = host.state()
            with pytest.raises(Exhausted, match=f"has places for {places} slabs, not for {places + 1}"):
                await host.manager.slabs.provide([arbiter.Request(arena.range_id, places + 1)])
            assert host.state() == before
            host.session.revocations.clear()
            assert host.manager.slabs.places(arena) == places + 3
            await host.manager.slabs.provide([arbiter.Request(arena.range_id, places + 1)])
        finally:
            await host.close()

    run(scenario)


_MAP = "import mmap, os, sys; kept = mmap.mmap(0, int(sys.argv[1]), prot=mmap.PROT_READ); os.close(0); os.read(3, 1)"
_HOLD = "import os; os.read(3, 1)"


@pytest.mark.parametrize("code", [_MAP, _HOLD])
def test_who_holds_the_memory_of_a_dead_client_is_shown(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Memory that a client left to another process is quarantined under that process's pid until it lets go."""
    monkeypatch.setattr(releases, "HELD_DEADLINE_S", 0.05)
    monkeypatch.setattr(releases, "LOOK_S", 0.05)

    async def scenario() -> None:
        host = Host()
        try:
            granted = await host.manager.kv.grow(host.session, [(host.range(), 32)])
            found, _, _ = host.manager.descriptors(host.session, granted.batch_id, 0, 250)
            read_end, write_end = os.pipe()
            child = subprocess.Popen(
                [sys.executable, "-c", f"import os; os.dup2({read_end}, 3)\n{code}", str(SLAB_BYTES)],
                stdin=found[0][1],
                pass_fds=[read_end],
            )
            for fd in (read_end, *(fd for _, fd in found)):
                os.close(fd)
            host.manager.disconnect(host.session, "it died")

            def quarantined() -> list[tuple[int, int]]:
                host.manager.releases.lift_quarantine()
                return [(q.bytes, q.pid) for part in status.parts(host.manager) for q in part.quarantines]

            await until(lambda: quarantined() == [(SLAB_BYTES, child.pid)])
            os.close(write_end)
            assert await asyncio.to_thread(child.wait, 60) == 0
            await until(lambda: not quarantined())
            host.state()
        finally:
            await host.close()

    run(scenario)
