"""Clients that die or stop at any moment, and drivers that fail: what was there before is there afterwards."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.faulty_driver import Operation
from tests.helpers.in_process import Host, run
from tests.helpers.peer import (
    MATRIX_BYTES,
    Admin,
    Remote,
    SmallModel,
    descriptors_of,
    memory_of,
    public_model,
    threads_of,
    wait_for_descriptors,
    write_model,
)
from vmmd.core.ledger import SlabState
from vmmd.errors import VmmError
from vmmd.manager import filling

SLAB_BYTES = 64 << 10
CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.05
quiesce_deadline_ms = 300
floor_slots = 10
[host]
device_bytes = "2MiB"
ram_bytes = "4MiB"
"""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


def _kv_bytes(admin: Admin) -> int:
    device = admin.device()
    return int(device.kv_bytes + device.revoking_bytes + device.quarantined_bytes)


def test_memory_of_a_killed_client_is_free(daemon: Daemon, model: SmallModel) -> None:
    """After SIGKILL in a step with K/V mapped, its cells are free without having been quarantined; the experts stay."""
    with Admin(daemon.directory) as admin, Remote(daemon.directory) as stays:
        stays.ask("open", model)
        for _ in range(5):
            peer = Remote(daemon.directory)
            peer.ask("open", model)
            peer.ask("create")
            peer.ask("grow", 8)
            peer.ask("begin_step")
            assert _kv_bytes(admin) == 8 * SLAB_BYTES
            peer.kill()
            wait_until(lambda: _kv_bytes(admin) == 0 and len(admin.status().sessions) == 1)
        assert "slab.quarantined" not in daemon.log.read_text()
        assert stays.ask("wrong_experts") == 0


def _live(peer: Remote, deed: str, model: SmallModel, chance: random.Random) -> None:
    """Begins what the client is to be killed in."""
    if deed == "connect":
        peer.tell("connect")
        return
    peer.ask("connect")
    if deed == "open":
        peer.tell("open", model)
        return
    peer.ask("open", model)
    peer.ask("create")
    if deed == "decode":
        peer.ask("grow", 3)
        peer.tell("count_reads", 60.0)
        return
    peer.tell("grow", chance.choice([4, 20, 26]))


def _kill_many(daemon: Daemon, model: SmallModel, times: int, seed: int) -> tuple[int, int]:
    """Bytes of memory of the daemon before and after; all else is checked here."""
    print("seed", seed)
    chance = random.Random(seed)
    pid = daemon.process.pid
    with Admin(daemon.directory) as admin, Remote(daemon.directory) as stays:
        stays.ask("open", model)

        def kill(count: int) -> None:
            for _ in range(count):
                peer = Remote(daemon.directory, connect=False)
                _live(peer, chance.choice(["connect", "open", "grow", "grow", "decode"]), model, chance)
                peer.process.join(chance.random() * 0.02)  # which it does not: a random moment later
                peer.kill()

        def settle() -> None:
            wait_until(lambda: len(admin.status().sessions) == 1 and _kv_bytes(admin) == 0)
            wait_until(lambda: admin.status().models[0].resident == model.n, otherwise=lambda: str(admin.status()))

        kill(max(8, times // 10))  # threads and whatever else comes with the first ones
        settle()
        descriptors, threads, memory = descriptors_of(pid), threads_of(pid), memory_of(pid)
        kill(times)
        settle()
        wait_for_descriptors(pid, descriptors)
        assert threads_of(pid) <= threads + 12  # workers of the daemon's pools that were not needed before
        device = admin.device()
        held = device.experts_bytes + device.weights_bytes
        assert held + device.free_bytes == device.total_bytes
        assert (device.quarantined_bytes, device.revoking_bytes, device.unmanaged_bytes) == (0, 0, 0)
        assert stays.ask("wrong_experts") == 0
        assert "Traceback" not in daemon.log.read_text()
        return memory, memory_of(pid)


def test_a_hundred_kills_leave_nothing(daemon: Daemon, model: SmallModel) -> None:
    """Clients killed while they connect, open, grow or decode leave bytes, descriptors and threads where they were."""
    _kill_many(daemon, model, 100, 1)


@pytest.mark.bench
@pytest.mark.timeout(1800)
def test_a_thousand_kills_leave_no_memory(daemon: Daemon, model: SmallModel) -> None:
    """The same a thousand times from another seed each time, and the daemon's own memory is where it was, too."""
    before, after = _kill_many(daemon, model, 1000, time.time_ns() % (1 << 32))
    print(f"the daemon's memory: {before >> 10} KiB before, {after >> 10} KiB after")
    assert after - before < 4 << 20  # a session's state is some 30 KiB: a hundred that stay would be more


def test_a_stopped_reader_delays_its_own_arena_only(daemon: Daemon, tmp_path: Path) -> None:
    """SIGSTOP in a step: its arena's trades end at the deadline, others go on, its pid is shown, SIGCONT heals it."""
    first, second = write_model(tmp_path / "first"), write_model(tmp_path / "second", 2, 20)
    with (
        Admin(daemon.directory) as admin,
        Remote(daemon.directory) as stopped,
        Remote(daemon.directory) as other,
        Remote(daemon.directory) as grower,
    ):
        stopped.ask("open", first)
        other.ask("open", second)
        stopped.ask("begin_step")
        stopped.signal(signal.SIGSTOP)
        grower.ask("create")
        free = (admin.device().free_bytes) // SLAB_BYTES
        grower.ask("grow", free + 4)  # the first arena's slabs are as cold as the second's: it is asked, too
        models = {m.name: m for m in admin.status().models}
        if models["first"].stuck_pids:
            assert list(models["first"].stuck_pids) == [stopped.pid]
        with pytest.raises(VmmError):
            grower.ask("grow", free + 18)
        models = {m.name: m for m in admin.status().models}
        assert list(models["first"].stuck_pids) == [stopped.pid]
        assert not models["second"].stuck_pids
        assert other.ask("wrong_experts") == 0
        stopped.signal(signal.SIGCONT)
        stopped.ask("end_step")
        wait_until(lambda: not any(m.stuck_pids for m in admin.status().models))
        grower.ask("grow", free + 12)
        assert stopped.ask("wrong_experts") == 0
        assert other.ask("wrong_experts") == 0


# A driver that fails, under the manager in this process


def _errors(operation: Operation) -> Sequence[Exception | None]:
    return [None, OSError(5, "Input/output error")] if operation == "fill" else [None]


@pytest.mark.parametrize("operation", ["create", "fill"])
def test_a_failing_driver_leaves_nothing_of_an_opening(model: SmallModel, operation: Operation) -> None:
    """Whichever call fails while a model is opened, nothing of it is left, and the next opening succeeds."""

    async def scenario() -> None:
        host = Host(40)
        try:
            before = host.state()
            failures = 0
            for error in _errors(operation):
                for n in range(1, 60):
                    host.driver.fail_at(operation, n, error)
                    try:
                        opened = await host.open(model)
                    except VmmError:
                        failures += 1
                        assert host.state() == before
                        continue
                    host.driver.heal()
                    host.manager.close_model(host.session, opened.model_id)
                    await host.manager.drop_model(opened)
                    assert host.state() == before
                    break
                else:
                    raise AssertionError("every opening failed")
            assert failures >= (2 if operation == "create" else 1)  # slabs that were made stay, free, for the next try
            await host.open(model)
        finally:
            await host.close()

    run(scenario)


@pytest.mark.parametrize("chunk_bytes", [1, 32 << 20])
@pytest.mark.parametrize("operation", ["create", "fill", "export"])
def test_a_failing_driver_leaves_nothing_of_a_growth(
    model: SmallModel, operation: Operation, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call fails while a range grows out of free slabs and an arena, the next growth finds everything."""
    monkeypatch.setattr(filling, "CHUNK_BYTES", chunk_bytes)

    async def scenario() -> None:
        host = Host(18)
        try:
            opened = await host.open(model)
            heat = opened.arena.heat
            heat[:] = range(model.n, 0, -1)  # the first experts are hot
            opened.arena.heat[::7] = 1000.0
            range_id = host.range()
            before = host.state()
            failures = 0
            for n in range(1, 60):
                host.driver.fail_at(operation, n)
                try:
                    grown = await host.manager.kv.grow(host.session, [(range_id, 16 * 9)])
                    host.fetch(grown.batch_id)
                    succeeded = True
                except VmmError:
                    failures += 1
                    succeeded = False
                host.driver.heal()
                await _settle(host)
                if not succeeded and operation != "export":
                    await _give_back(host, opened)  # what the arena gave before is free
                    assert host.state() == before, n
                grown = await host.manager.kv.grow(host.session, [(range_id, 16 * 9)])
                if grown.batch_id:
                    assert host.fetch(grown.batch_id) == 9
                await host.manager.kv.shrink(host.session, range_id, 0)
                host.session.batches.clear()
                await _give_back(host, opened)
                assert host.state() == before, n
                _check_bytes(host, opened, model)
                if succeeded:
                    break
            else:
                raise AssertionError("every growth failed")
            assert failures >= 1
        finally:
            await host.close()

    run(scenario)


def test_a_failing_creation_leaves_nothing_of_a_revocation(model: SmallModel) -> None:
    """Where the new slabs of a trade between domains cannot be made, the old ones are gone and nothing else is."""

    async def scenario() -> None:
        host = Host(16)
        try:
            await host.open(model)
            stranger = host.connect("stranger")
            range_id = host.range(stranger)
            for n in range(1, 8):
                host.driver.fail_at("create", n)
                with suppress(VmmError):
                    await host.manager.kv.grow(stranger, [(range_id, 16 * 6)])
                host.driver.heal()
                host.state()
                grown = await host.manager.kv.grow(stranger, [(range_id, 16 * 6)])
                if grown.batch_id:
                    assert host.fetch(grown.batch_id, stranger) == 6
                await host.manager.kv.shrink(stranger, range_id, 0)
                stranger.batches.clear()
                host.state()
        finally:
            await host.close()

    run(scenario)


def test_a_growth_whose_caller_hangs_up_is_given_back(model: SmallModel) -> None:
    """Cancelled at any moment, a growth leaves no slab leased and none on its way."""

    async def scenario() -> None:
        host = Host(18)
        try:
            opened = await host.open(model)
            range_id = host.range()
            before = host.state()
            for turns in range(12):
                growing = asyncio.create_task(host.manager.kv.grow(host.session, [(range_id, 16 * 9)]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                growing.cancel()
                with suppress(asyncio.CancelledError):
                    await growing
                await _settle(host)
                await host.manager.kv.shrink(host.session, range_id, 0)
                await _give_back(host, opened)
                assert host.state() == before
        finally:
            await host.close()

    run(scenario)


def test_two_growths_of_one_range_at_once_are_one(model: SmallModel) -> None:
    """A session that asks twice at once for the same cells gets them once."""

    async def scenario() -> None:
        host = Host(18)
        try:
            await host.open(model)
            range_id = host.manager.kv.create(host.session, "", 0, 16, 16 * 9).range_id
            growths = [host.manager.kv.grow(host.session, [(range_id, 16 * 9)]) for _ in range(4)]
            done = await asyncio.gather(*growths)
            assert sorted(bool(grown.batch_id) for grown in done) == [False, False, False, True]
            assert len(host.manager.ledger.ranges[range_id].slabs) == 9
        finally:
            await host.close()

    run(scenario)


async def _settle(host: Host) -> None:
    """Waits until nothing is on its way."""
    until = time.monotonic() + 30
    ledger = host.manager.ledger
    while any(ledger.slabs_in(d, SlabState.REVOKING) for d in ledger.devices) or any(
        m.working or m.releasing for m in host.manager.models.values()
    ):
        assert time.monotonic() < until
        await asyncio.sleep(0.001)


async def _give_back(host: Host, opened: Any) -> None:
    """What upkeep does, at once: slabs go back to the arena and are filled."""
    await _settle(host)
    host.session.revocations.clear()  # as a client that has unmapped
    for slab in host.manager.ledger.slabs.values():
        slab.traded_s = None
    await host.manager.upkeep._give_back(opened)


def _check_bytes(host: Host, opened: Any, model: SmallModel) -> None:
    data = model.path.read_bytes()
    assert opened.arena.resident.all()
    for expert in range(model.n):
        slot = opened.arena.slot_of(expert)
        slab = host.manager.physical[opened.ranges[slot.part].slabs[slot.slab]]
        at = slot.slot * 3 * MATRIX_BYTES
        got = host.driver.read(slab, at, 3 * MATRIX_BYTES)
        for matrix in range(3):
            offset = int(opened.arena.geometry.offset_bytes[expert, matrix])
            expected = data[offset : offset + MATRIX_BYTES]
            assert got[matrix * MATRIX_BYTES :][:MATRIX_BYTES] == expected, (expert, matrix)
