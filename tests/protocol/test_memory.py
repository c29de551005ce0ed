"""Leasing memory: geometries, ranges, trades, and the daemon's end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from strata_api.v1 import admin_pb2
from strata_api.v1 import memory_pb2 as wire

from strata_client import connection
from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.debugger import stopped_by_signal
from tests.helpers.peer import Admin, Client, Remote, SmallModel, client, public_model, write_model
from vmmd.errors import Exhausted, InvalidRequest, NotFound, StaleGeneration, VmmError

CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.1
revoke_deadline_ms = {}
floor_slots = 10
[host]
devices = {}
device_bytes = "{}KiB"
ram_bytes = "4MiB"
"""
SLAB = 64 << 10

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@contextmanager
def _daemon(slabs: int, devices: int = 1, revoke_deadline_s: float = 60.0) -> Iterator[Daemon]:
    with running_daemon(CONFIG.format(int(1000 * revoke_deadline_s), devices, slabs * 64)) as running:
        running.directory.chmod(0o750)
        yield running


@pytest.fixture(scope="module")
def roomy() -> Iterator[Daemon]:
    """A daemon with 64 slabs."""
    with _daemon(64) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


# Geometry


@pytest.mark.parametrize(
    "lie",
    [
        {"layer": 9},
        {"matrix": 1},
        {"first_expert": 1},
        {"count": 0},
        {"count": 17},
        {"count": 4_000_000_000},
        {"file": 1},
        {"file": 4_000_000_000},
        {"offset_bytes": 1 << 63},
        {"offset_bytes": (1 << 64) - 4096},
        {"stride_bytes": 4095},
        {"stride_bytes": 1 << 60},
        {"expert_bytes": 0},
        {"expert_bytes": 1 << 62},
        {"expert_bytes": 65 << 10},
    ],
    ids=str,
)
def test_geometry_that_lies_is_refused(roomy: Daemon, model: SmallModel, lie: dict[str, int]) -> None:
    """A stack outside its file, its layer or 64 bits, or over another one, is refused, and nothing is kept."""
    stacks = [replace(model.stacks[0], **lie), *model.stacks[1:]]
    with client(roomy.directory) as one, Admin(roomy.directory) as admin:
        fd = os.open(model.path, os.O_RDONLY)
        before = len(admin.status().models)
        with pytest.raises(InvalidRequest):
            one.session.open_model(model.begin(), [fd], stacks, model.shape)
        os.close(fd)
        assert len(admin.status().models) == before
        assert one.open(model) in (True, False)
        assert one.wrong_experts() == 0


@pytest.mark.parametrize("shape", [(0, 16, 2), (4, 0, 2), (4, 16, 0), (4, 16, 17), (1 << 20, 1 << 20, 1), (5, 16, 2)])
def test_shapes_that_lie_are_refused(roomy: Daemon, model: SmallModel, shape: tuple[int, int, int]) -> None:
    """Layers, experts and top_k that are absurd, or not what the stacks cover, are refused."""
    begin = model.begin()
    begin.n_layers, begin.n_experts, begin.top_k = shape
    with client(roomy.directory) as one:
        fd = os.open(model.path, os.O_RDONLY)
        with pytest.raises(InvalidRequest):
            one.session.open_model(begin, [fd], model.stacks, model.shape)
        os.close(fd)


def test_expert_that_fits_no_slab_names_the_size_that_would_do(roomy: Daemon, tmp_path: Path) -> None:
    """A model whose expert is larger than a slab is refused with the slab_bytes to set."""
    big = SmallModel(tmp_path / "big", 1, 2, 1)
    big.path.write_bytes(bytes(4096 + 6 * 30_000))
    stacks = [replace(s, stride_bytes=30_000, expert_bytes=30_000, offset_bytes=4096) for s in big.stacks]
    with client(roomy.directory) as one:
        fd = os.open(big.path, os.O_RDONLY)
        with pytest.raises(InvalidRequest, match="set slab_bytes to 131072 or more"):
            one.session.open_model(big.begin(), [fd], stacks, big.shape)
        os.close(fd)


# Files that change


def test_file_that_changes_while_it_is_read_opens_no_model(roomy: Daemon, tmp_path: Path) -> None:
    """A file that is cut or rewritten again and again never opens with mixed bytes, and the daemon lives on."""
    stop = threading.Event()
    model = write_model(tmp_path / "model", 8, 32)
    data = model.path.read_bytes()

    def spoil() -> None:
        while not stop.is_set():
            os.truncate(model.path, len(data) // 2)
            model.path.write_bytes(data)

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        refused = 0
        times = 0
        while times < 30 or not refused:  # as a rule nearly all are
            times += 1
            with client(roomy.directory) as one:
                try:
                    one.open(model)
                except (InvalidRequest, StaleGeneration):
                    refused += 1
    finally:
        stop.set()
        thread.join()
    with client(roomy.directory) as one:
        one.open(model)
        assert one.wrong_experts() == 0


def test_sessions_are_told_that_their_file_changed(roomy: Daemon, tmp_path: Path) -> None:
    """A file that is rewritten later makes the arena stale: its sessions keep reading, newcomers get another."""
    model = write_model(tmp_path / "model", 2, 8)
    with client(roomy.directory) as one, client(roomy.directory) as other:
        one.open(model)
        os.utime(model.path)
        wait_until(lambda: bool(one.troubles()))
        assert "changed" in one.troubles()[0]
        assert one.wrong_experts() == 0
        assert other.open(model) is False
        assert other.wrong_experts() == 0


# Sharing


def test_second_session_shares_the_model(roomy: Daemon, model: SmallModel) -> None:
    """Two sessions of one user that open the same file hold one model, by whatever path they opened it."""
    link = model.path.with_name("link")
    link.symlink_to(model.path)
    with client(roomy.directory) as one, client(roomy.directory) as other, Admin(roomy.directory) as admin:
        one.open(model)
        assert other.open(model._replace(path=link)) is True
        models = [m for m in admin.status().models if m.sessions]
        assert [m.sessions for m in models] == [2]
        assert other.wrong_experts() == 0
    link.unlink()


def test_models_larger_than_the_caps_are_refused_with_what_there_is(model: SmallModel) -> None:
    """Where neither device nor host has room for every expert, opening is refused, and nothing stays behind."""
    config = 'slab_bytes = "64KiB"\n[host]\ndevice_bytes = "256KiB"\nram_bytes = "256KiB"\n'
    with running_daemon(config) as running, client(running.directory) as one, Admin(running.directory) as admin:
        with pytest.raises(Exhausted) as refused:
            one.open(model)
        assert refused.value.requested_bytes > 0
        assert not admin.status().models
        assert all(d.free_bytes == d.cap_bytes for d in admin.status().devices)


def test_experts_without_a_home_stay_on_their_device(model: SmallModel) -> None:
    """With a host cap for some homes only, the other experts are pinned, and a growth takes none of them."""
    config = 'slab_bytes = "64KiB"\nfloor_slots = 4\n[host]\ndevice_bytes = "1MiB"\nram_bytes = "256KiB"\n'
    with running_daemon(config) as running, client(running.directory) as one, Admin(running.directory) as admin:
        one.open(model)
        wait_until(lambda: admin.status().models[0].homes == 20)
        one.create()
        one.grow(6)
        with pytest.raises(Exhausted):
            one.grow(8)
        assert admin.status().models[0].resident >= 44
        assert one.wrong_experts() == 0


# Ranges


@pytest.mark.parametrize(
    ("cells_per_slab", "cells_max"),
    [(0, 16), (8, 16), (17, 16), (1 << 20, 16), (16, 0), (16, 1 << 41), (16, (1 << 64) - 1), (16, 1 << 40)],
)
def test_absurd_ranges_are_refused(roomy: Daemon, cells_per_slab: int, cells_max: int) -> None:
    """A range of no cells, of more than addresses go round for, or of slabs of no multiple of 16 cells is refused."""
    with client(roomy.directory) as one:
        with pytest.raises(InvalidRequest):
            one.call("CreateRange", wire.CreateRangeRequest(cells_per_slab=cells_per_slab, cells_max=cells_max))
        one.create()


def test_absurd_growths_are_refused(roomy: Daemon) -> None:
    """More cells than a range was made for, ranges named twice and devices that are not there are refused."""
    with client(roomy.directory) as one, Admin(roomy.directory) as admin:
        range_id = one.create(cells_max=5000)
        for cells in (5001, 1 << 63, (1 << 64) - 1):
            with pytest.raises(InvalidRequest):
                one.call("GrowRanges", wire.GrowRangesRequest(growths=[wire.Growth(range_id=range_id, cells=cells)]))
        twice = [wire.Growth(range_id=range_id, cells=10)] * 2
        with pytest.raises(InvalidRequest):
            one.call("GrowRanges", wire.GrowRangesRequest(growths=twice))
        with pytest.raises(NotFound):
            one.call("CreateRange", wire.CreateRangeRequest(device_uuid="GPU-0", cells_per_slab=16, cells_max=16))
        nothing = one.call("GrowRanges", wire.GrowRangesRequest(growths=[wire.Growth(range_id=range_id, cells=0)]))
        assert nothing.batch_id == 0
        assert admin.device().kv_bytes == 0


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        (b"\xff" * 9 + b"\x01", InvalidRequest),  # -1, as a signed number
        (b"\xff" * 9 + b"\x7f", InvalidRequest),  # 70 bits: the wire's numbers go round, as they do for everybody
        (b"\xff" * 10 + b"\x01", InvalidRequest),  # longer than any number
        (b"\x80\x80\x80\x80\x10", Exhausted),  # 4 GiB of cells: beyond the device
    ],
    ids=["negative", "beyond 64 bits", "no number", "beyond the device"],
)
def test_numbers_that_no_honest_library_sends_are_refused(roomy: Daemon, cells: bytes, error: type[VmmError]) -> None:
    """Cells written by hand as bytes: refused, with nothing changed, and the next growth is served."""
    with client(roomy.directory) as one, Admin(roomy.directory) as admin:
        range_id = one.create(cells_max=1 << 40)
        growth = b"\x08" + _varint(range_id) + b"\x10" + cells
        call = one.session._channel.unary_unary("/strata_api.v1.Memory/GrowRanges", None, None)
        with pytest.raises(grpc.RpcError) as refused:
            call(b"\x0a" + _varint(len(growth)) + growth, metadata=((connection.TOKEN_KEY, one.token()),), timeout=30)
        assert isinstance(connection.rebuild(refused.value), error)
        assert admin.device().kv_bytes == 0
        one.grow(1)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out) + bytes([number])


def test_a_growth_of_a_range_that_is_being_taken_back(roomy: Daemon) -> None:
    """While slabs of a range are on their way back it grows when they are; a closed one is not there any more."""
    with client(roomy.directory) as one, Admin(roomy.directory) as admin:
        one.create()
        one.grow(3)
        one.write_kv(5)
        one.shrink(1, unmap=False)  # so they are on their way until the deadline of a second
        assert admin.device().kv_bytes == SLAB
        kv = one.kv[0]
        growth = wire.Growth(range_id=kv.range.range_id, cells=3 * kv.cells_per_slab)
        reply = one.call("GrowRanges", wire.GrowRangesRequest(growths=[growth]))
        assert reply.ranges[0].size_bytes == 3 * SLAB
        device = admin.device()
        assert (device.kv_bytes, device.quarantined_bytes) == (3 * SLAB, 2 * SLAB)
        one.unmap(0)
        one.call("CloseRange", wire.CloseRangeRequest(range_id=kv.range.range_id))
        with pytest.raises(NotFound):
            one.call("GrowRanges", wire.GrowRangesRequest(growths=[growth]))
        wait_until(lambda: admin.device().kv_bytes + admin.device().quarantined_bytes == 0)


def test_growth_over_two_devices_is_all_or_nothing() -> None:
    """A growth that one of two devices has no room for takes nothing of the other."""
    with _daemon(8, devices=2) as running, client(running.directory) as one, Admin(running.directory) as admin:
        ids = [one.create(device=0), one.create(device=1)]
        cells = one.kv[0].cells_per_slab

        def grow(*slabs: int) -> Any:
            growths = [wire.Growth(range_id=i, cells=n * cells) for i, n in zip(ids, slabs, strict=True)]
            return one.call("GrowRanges", wire.GrowRangesRequest(growths=growths))

        with pytest.raises(Exhausted, match="HOST-SIM-1"):
            grow(4, 9)
        assert [d.kv_bytes for d in admin.status().devices] == [0, 0, 0]
        assert [r.size_bytes for r in grow(8, 8).ranges] == [8 * SLAB, 8 * SLAB]
        assert [d.kv_bytes for d in admin.status().devices] == [8 * SLAB, 8 * SLAB, 0]


def test_refusal_names_who_holds_what_and_changes_nothing(model: SmallModel) -> None:
    """A growth that is refused says what was asked, what is free and who holds the rest, and nothing has changed."""
    with _daemon(16) as running, client(running.directory) as one, Remote(running.directory) as other:
        one.open(model)
        other.ask("create")
        other.ask("grow", 3)
        one.create()
        with Admin(running.directory) as admin:
            wait_until(lambda: _is_settled(admin.status().models[0], model))
            before = admin.status()
            with pytest.raises(Exhausted) as refused:
                one.grow(40)
            after = admin.status()
            for field in ("kv_bytes", "experts_bytes", "weights_bytes", "free_bytes", "revoking_bytes"):
                assert [getattr(d, field) for d in before.devices] == [getattr(d, field) for d in after.devices]
            assert [m.resident for m in before.models] == [m.resident for m in after.models]
        error = refused.value
        assert error.requested_bytes == 40 * SLAB
        assert error.free_bytes == 0
        assert any(f"pid {other.pid}" in holder for holder in error.holders)
        assert any("model" in holder for holder in error.holders)
        assert "2.50 MiB" in error.message
        assert one.wrong_experts() == 0


def _is_settled(status: admin_pb2.ModelStatus, model: SmallModel) -> bool:
    """Whether all homes are there, and no slot is empty that could be filled yet."""
    return (status.homes, status.resident) == (model.n, min(model.n, status.slots))


def _race(times: int) -> None:
    with (
        _daemon(4) as running,
        Remote(running.directory) as one,
        Remote(running.directory) as other,
        client(running.directory) as holder,
        Admin(running.directory) as admin,
    ):
        holder.create()
        holder.grow(3)
        for peer in (one, other):
            peer.ask("create")
        for _ in range(times):
            for peer in (one, other):
                peer.tell("grow", 1)
            served = []
            for peer in (one, other):
                try:
                    peer.answer()
                    served.append(peer)
                except Exhausted:
                    pass
            assert len(served) == 1
            served[0].ask("shrink", 0)
        assert admin.device().kv_bytes == 3 * SLAB


def test_one_of_two_gets_the_last_slab() -> None:
    """When two clients ask for the last slab at once, exactly one is served, 200 times out of 200."""
    _race(200)


@pytest.mark.bench
def test_one_of_two_gets_the_last_slab_a_thousand_times() -> None:
    """The same, a thousand times."""
    _race(1000)


def test_slabs_given_back_and_still_mapped_are_quarantined(roomy: Daemon) -> None:
    """What a client says to have unmapped and has not stays charged to it, and is free once it does."""
    with Remote(roomy.directory) as liar, Admin(roomy.directory) as admin:
        liar.ask("create")
        liar.ask("grow", 4)
        liar.ask("shrink", 1, unmap=False)
        wait_until(lambda: admin.device().quarantined_bytes == 3 * SLAB)
        session = next(s for s in admin.status().sessions if s.pid == liar.pid)
        assert session.quarantined_bytes == 3 * SLAB
        assert session.kv_bytes == SLAB
        liar.ask("unmap", 1)
        wait_until(lambda: admin.device().quarantined_bytes == 0)
        assert liar.ask("grow", 3) == 0


# Trades


def test_experts_come_back_with_the_right_bytes_when_a_client_ends(model: SmallModel) -> None:
    """What an arena gave is filled again when the cells' owner has gone, every slot with its own expert."""
    with _daemon(16) as running, client(running.directory) as one, Admin(running.directory) as admin:
        one.open(model)
        for _ in range(3):
            with Remote(running.directory) as grower:
                grower.ask("create")
                assert grower.ask("grow", 9) == 7
                grower.ask("write_kv", 255)
                assert admin.status().models[0].resident < model.n
                assert one.wrong_experts() == 0
            wait_until(lambda: admin.status().models[0].resident == model.n, otherwise=lambda: str(admin.status()))
            assert one.wrong_experts() == 0
            assert admin.device().kv_bytes == 0


@needs_root
def test_idle_models_of_other_users_make_room(model: SmallModel) -> None:
    """A model that nobody has open is dropped when another user needs its memory, who reads zeros."""
    with _daemon(16) as running, Admin(running.directory) as admin:
        with Remote(running.directory, uid=4242) as gone:
            gone.ask("open", model)
        with Remote(running.directory, uid=4243) as user:
            user.ask("create")
            user.ask("grow", 15)
            assert user.ask("read_kv") == [0]
        assert not admin.status().models


@needs_root
def test_slabs_that_change_domains_are_made_anew(model: SmallModel) -> None:
    """A trade between users revokes, destroys and creates: the new owner reads zeros, the old one no wrong expert."""
    with (
        _daemon(16) as running,
        Remote(running.directory, uid=4242) as holder,
        Remote(running.directory, uid=4243) as taker,
        Admin(running.directory) as admin,
    ):
        holder.ask("open", model)
        taker.ask("create")
        assert taker.ask("grow", 10) == 8
        assert taker.ask("read_kv") == [0]
        taker.ask("write_kv", 255)
        assert holder.ask("wrong_experts") == 0
        assert admin.device().quarantined_bytes == 0
        taker.ask("shrink", 0)
        wait_until(lambda: admin.status().models[0].resident == model.n, otherwise=lambda: str(admin.status()))
        assert holder.ask("wrong_experts") == 0
        assert holder.ask("troubles") == []


@needs_root
def test_revocation_that_nobody_answers_is_quarantined_and_told(model: SmallModel) -> None:
    """A stopped client of another user keeps what was revoked charged to it, and heals when it goes on."""
    with (
        _daemon(16, revoke_deadline_s=3.0) as running,
        Remote(running.directory, uid=4242) as holder,
        Remote(running.directory, uid=4243) as taker,
        Admin(running.directory) as admin,
    ):
        holder.ask("open", model)
        taker.ask("create")
        with stopped_by_signal(holder.pid):
            with pytest.raises(Exhausted, match="quarantined"):
                taker.ask("grow", 6)
            session = next(s for s in admin.status().sessions if s.pid == holder.pid)
            assert session.quarantined_bytes == admin.device().quarantined_bytes == 4 * SLAB
        wait_until(lambda: admin.device().quarantined_bytes == 0)
        assert holder.ask("wrong_experts") == 0
        taker.ask("grow", 6)


# The daemon's end, and looking at it


def _with_memory(directory: Path, model: SmallModel) -> Remote:
    peer = Remote(directory)
    peer.ask("open", model)
    peer.ask("create")
    peer.ask("grow", 2)
    peer.ask("write_kv", 9)
    return peer


def test_sigterm_ends_the_daemon_and_clients_go_on(model: SmallModel) -> None:
    """A client is told that the daemon leaves, keeps reading what it has mapped, and hears why nothing grows."""
    with _daemon(32) as running, _with_memory(running.directory, model) as peer:
        peer.tell("count_reads", 1.5)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        reads, _, wrong = peer.answer()
        assert reads and wrong == []
        wait_until(lambda: peer.ask("gone") != "")
        assert "stopping" in peer.ask("gone")
        assert peer.ask("wrong_experts") == 0
        assert peer.ask("read_kv") == [9]
        with pytest.raises(VmmError, match="stopping"):
            peer.ask("grow", 3)
        assert not (running.directory / "vmmd.sock").exists()
        assert not (running.directory / "handles.sock").exists()


SLOW_TO_LEAVE = """
import asyncio
from vmmd import main
from vmmd.server.server import Server
async def stop(self, grace_s):
    await asyncio.sleep(600)
Server.stop = stop
main.main()
"""


def test_a_daemon_that_is_slow_to_leave_leaves_no_sockets() -> None:
    """Where something hangs while it leaves it ends all the same, and its sockets go."""
    running = Daemon(program=("-c", SLOW_TO_LEAVE))
    try:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        assert not list(running.directory.glob("*.sock"))
    finally:
        running.stop()


def test_draining_refuses_newcomers_and_serves_those_who_are_there(model: SmallModel) -> None:
    """A draining daemon grows its sessions, refuses new ones with that reason and leaves with the last."""
    with _daemon(32) as running, _with_memory(running.directory, model) as peer:
        admin = Admin(running.directory)
        reply = admin._stub.Drain(
            admin_pb2.DrainRequest(), metadata=((connection.TOKEN_KEY, admin._broker.token),), timeout=30
        )
        assert reply.sessions == 1
        with pytest.raises(VmmError, match="draining") as refused:
            Client(os.fspath(running.directory))
        assert refused.value.reason == "draining"
        assert admin.status().daemon.draining
        peer.ask("grow", 3)
        wait_until(lambda: any("draining" in line for line in peer.ask("troubles")))
        peer.ask("close")
        assert running.process.wait(30) == 0
        admin.close()


def test_health_needs_no_token(roomy: Daemon) -> None:
    """The standard health service answers for the daemon and each service without a token."""
    channel = connection.open_channel(roomy.directory)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    for service in ("", "strata_api.v1.Memory", "strata_api.v1.Admin"):
        reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError):
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=30)
    channel.close()


def test_status_adds_up_under_load(model: SmallModel) -> None:
    """In every snapshot taken while clients grow, shrink and trade, the parts of each device are its cap."""
    with _daemon(16) as running, Admin(running.directory) as admin:
        peers = [Remote(running.directory) for _ in range(3)]
        stop = threading.Event()

        def load(peer: Remote, slabs: int) -> None:
            while not stop.is_set():
                try:
                    peer.ask("grow", slabs)
                except Exhausted:
                    pass
                peer.ask("shrink", 0)

        threads = []
        try:
            for n, peer in enumerate(peers):
                peer.ask("open", model)
                peer.ask("create")
                threads.append(threading.Thread(target=load, args=(peer, 3 + 2 * n)))
                threads[-1].start()
            until = time.monotonic() + 4
            busy = 0
            while time.monotonic() < until or busy <= 10:
                status = admin.status()
                for d in status.devices:
                    held = d.kv_bytes + d.experts_bytes + d.weights_bytes + d.revoking_bytes + d.quarantined_bytes
                    assert held + d.free_bytes == d.cap_bytes - d.unmanaged_bytes, d
                    assert d.unmanaged_bytes == 0
                    busy += d.kv_bytes > 0
                assert status.models[0].resident <= status.models[0].slots
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for peer in peers:
                peer.kill()
        log = running.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :].replace("\\n", "\n")[:5000]


@contextmanager
def _vmmd(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "vmmd.main", "--runtime-dir", os.fspath(directory), "--slab-bytes", "65536"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "options", [["--slab-bytes-min", "1000"], ["--slab-bytes", "0"], ["--slab-bytes-min", "-4096"]]
)
def test_wrong_slab_sizes_on_the_command_line(options: list[str]) -> None:
    """A slab size that no page fits is refused in one line that names the option."""
    argv = [sys.executable, "-m", "vmmd.main", *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert re.fullmatch(rf"vmmd: {options[0]} {options[1]}: must be a multiple of .*\n", done.stderr), done.stderr


def test_second_daemon_is_refused() -> None:
    """In a runtime directory where a daemon runs a second one ends with one line that has the first one's pid."""
    with _daemon(8) as running:
        with _vmmd(running.directory) as second:
            assert second.wait(60) == 1
            assert second.stderr is not None
            line = second.stderr.read().decode()
        assert re.fullmatch(rf"vmmd: another vmmd \(pid {running.process.pid}\) is running in .*\n", line), line
        with client(running.directory) as one:
            one.create()
            one.grow(1)


def test_next_daemon_takes_over_after_sigkill(model: SmallModel) -> None:
    """Where a daemon was killed the next one starts at once; old clients go on with what they have mapped."""
    directory = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    try:
        with _vmmd(directory) as first:
            wait_until(lambda: (directory / "vmmd.sock").exists() and (directory / "handles.sock").exists())
            with _with_memory(directory, model) as peer:
                token = peer.ask("token")
                first.kill()
                first.wait()
                with _vmmd(directory):
                    wait_until(lambda: _serves(directory))
                    assert peer.ask("wrong_experts") == 0
                    assert peer.ask("read_kv") == [9]
                    with pytest.raises(VmmError):
                        peer.ask("grow", 3)
                    with client(directory) as one, pytest.raises(grpc.RpcError):
                        one.open(model)
                        assert one.wrong_experts() == 0
                        one.stub.ListDevices(wire.ListDevicesRequest(), metadata=((connection.TOKEN_KEY, token),))
    finally:
        shutil.rmtree(directory)


def _serves(directory: Path) -> bool:
    try:
        with Admin(directory) as admin:
            return admin.status().daemon.pid > 0
    except VmmError:
        return False
