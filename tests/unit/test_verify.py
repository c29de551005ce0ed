"""Verification: samples of every fill, and every byte of a model against its file, in this process."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from strata_api.v1 import admin_pb2, pages

from tests.helpers.corrupting_driver import CorruptingDriver, damage
from tests.helpers.peer import MATRIX_BYTES, SLOT_BYTES, WEIGHTS_BYTES, SmallModel, write_model
from vmmd.core import geometry
from vmmd.core.ledger import DeviceRecord, SlabState
from vmmd.driver.base import Copy, FileSource, SlabSource
from vmmd.driver.host_memfd import HOST_UUID, HostDriver
from vmmd.errors import DriverError, NotFound, StaleGeneration, Unavailable
from vmmd.manager import Manager, filling, verify
from vmmd.manager.compare import SAMPLE_BYTES, sample
from vmmd.manager.manager import Options
from vmmd.manager.model import Model
from vmmd.manager.verify import Verification
from vmmd.server.admin import Admin
from vmmd.server.rpc import TOKEN_KEY

SLAB_BYTES = 64 << 10


class Host:
    """A manager over a driver that can be corrupted, and one session of this process."""

    def __init__(self, device_slabs: int = 20) -> None:
        self.driver = CorruptingDriver(HostDriver([("SIM", "simulated", device_slabs * SLAB_BYTES)], 20 * SLAB_BYTES))
        records = [
            DeviceRecord(d.uuid, d.name, SLAB_BYTES, d.total_bytes, d.total_bytes, is_host=d.uuid == HOST_UUID)
            for d in self.driver.devices()
        ]
        options = Options(floor_slots=10, quiesce_deadline_s=60.0)  # a read that a test holds up is not stuck
        self.manager = Manager(self.driver, records, options)  # type: ignore[arg-type]
        self.session = self.manager.connect(os.getpid(), 0, 0, "user", "test", os.pidfd_open(os.getpid()))
        self._files = 0

    async def open(self, small: SmallModel) -> Model:
        """Opens a model and waits until its homes are filled, too."""
        self._files += 1
        self.session.add_files(self._files, [os.open(small.path, os.O_RDONLY)], 100)
        stacks = [geometry.Stack(*dataclasses.astuple(stack)) for stack in small.stacks]
        weights = [geometry.Extent(0, 0, WEIGHTS_BYTES)]
        shape = small.n_layers, small.n_experts, small.top_k
        model, _ = await self.manager.open_model(self.session, self._files, small.path.name, [], shape, stacks, weights)
        await asyncio.shield(model.ready)
        while model.background is not None and not model.background.done():
            self.session.batches.clear()  # acknowledged
            await asyncio.sleep(0.001)
        return model

    async def close(self) -> None:
        """Ends the session and drops every model."""
        self.manager.disconnect(self.session, "the test ends")
        for model in list(self.manager.models.values()):
            await self.manager.drop_model(model)
        await self.manager.close()


@pytest.fixture
def small(tmp_path: Path) -> SmallModel:
    return write_model(tmp_path / "model")


def _run(scenario: Callable[[Host], Coroutine[Any, Any, None]], device_slabs: int = 20) -> None:
    async def run() -> None:
        host = Host(device_slabs)
        try:
            await scenario(host)
        finally:
            await host.close()

    asyncio.run(run())


async def _verified(model: Model) -> Verification:
    verification = Verification(model)
    await verification.run()
    return verification


# Samples of fills


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver([], 4 * SLAB_BYTES)
    yield made
    made.close()


@pytest.mark.parametrize("from_slab", [False, True])
@pytest.mark.parametrize("length", [1, SAMPLE_BYTES - 1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES])
def test_a_sample_is_the_ends_of_a_copy(driver: HostDriver, tmp_path: Path, length: int, from_slab: bool) -> None:
    """The first and the last 4 KiB of a copy are compared with its source, a file or a slab, and no byte beside it."""
    (tmp_path / "file").write_bytes(os.urandom(SLAB_BYTES))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    source_slab, target = driver.create(HOST_UUID, SLAB_BYTES), driver.create(HOST_UUID, SLAB_BYTES)
    driver.fill([Copy(source_slab, 0, SLAB_BYTES, FileSource(fd, 0))])
    copy = Copy(target, 512, length, SlabSource(source_slab, 77) if from_slab else FileSource(fd, 77))
    driver.fill([copy])
    damage(target, 511)
    damage(target, 512 + length)
    assert sample(driver, [copy]) is None
    for at in {512, 512 + length - 1}:
        damage(target, at)
        assert sample(driver, [copy]) == (copy, at)
        damage(target, at)
    os.close(fd)


@pytest.mark.parametrize("chunk_bytes", [1, filling.CHUNK_BYTES])
def test_a_fill_that_does_not_arrive_is_refused(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """A model whose bytes do not arrive is not opened; the error names device, range and slab, and opening goes on."""
    monkeypatch.setattr(filling, "CHUNK_BYTES", chunk_bytes)  # 1: the weights are the first chunk

    async def scenario(host: Host) -> None:
        host.driver.corrupts = lambda copy: True
        with pytest.raises(DriverError, match=r"slab \d+ of range \d+ \(\w+\) on \S+ differs from its file") as caught:
            await host.open(small)
        assert (caught.value.call, caught.value.name) == ("fill", "MISMATCH")
        assert not host.manager.models
        host.driver.corrupts = lambda copy: False
        assert not (await _verified(await host.open(small))).mismatched

    _run(scenario)


def test_a_slot_that_does_not_arrive_is_not_published(small: SmallModel) -> None:
    """An expert whose slot differs from its home after the fill stays at home."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        slot = model.arena.slot_of(5)
        assert slot is not None
        model.arena.vacate(5)
        model.point(np.array([5]))
        host.driver.corrupts = lambda copy: True
        with pytest.raises(DriverError, match="on SIM differs from the copy in host memory at byte"):
            await filling.fill(model, filling.slots(model, np.array([5]), np.array([slot])))
        assert model.arena.slot_of(5) is None
        assert pages.unpack(model.table.entry(5)).tier == pages.TIER_HOST
        model.arena.release(slot)

    _run(scenario)


def test_a_home_that_does_not_arrive_is_refused(small: SmallModel) -> None:
    """An expert whose home differs from its file after the fill is refused; the error names the homes."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        host.driver.corrupts = lambda copy: True
        with pytest.raises(DriverError, match=r"slab \d+ of range \d+ \(homes\) on HOST-RAM differs from its file"):
            await filling.fill(model, filling.homes(model, np.array([5])))

    _run(scenario)


def test_a_file_that_changes_during_a_fill_is_no_mismatch(small: SmallModel) -> None:
    """Where the file is rewritten between the fill and its sample, the error says that the file changed."""

    async def scenario(host: Host) -> None:
        host.driver.after_fill = lambda: small.path.write_bytes(bytes(small.path.stat().st_size)) and None
        with pytest.raises(StaleGeneration, match=r"changed|shrunk"):
            await host.open(small)

    _run(scenario)


# Whole models


def test_an_intact_model_is_equal(small: SmallModel) -> None:
    """Every slot, home and byte of the weights is compared, and nothing differs."""

    async def scenario(host: Host) -> None:
        found = await _verified(await host.open(small))
        assert (found.slots, found.homes, found.weights_bytes, found.mismatched) == (64, 64, WEIGHTS_BYTES, 0)
        assert found.compared_bytes == found.total_bytes == 128 * SLOT_BYTES + WEIGHTS_BYTES
        assert not found.file_changed

    _run(scenario)


@pytest.mark.parametrize("piece_bytes", [1000, verify.PIECE_BYTES])
def test_damage_is_named(small: SmallModel, monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    """Damage in a slot, a home and the weights is listed with its place and count, whatever the pieces."""
    monkeypatch.setattr(verify, "PIECE_BYTES", piece_bytes)

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        slot = model.arena.slot_of(17)
        assert slot is not None
        at = slot.slot * SLOT_BYTES + MATRIX_BYTES
        in_slot = model.slabs[model.ranges[0].slabs[slot.slab]]
        damage(in_slot, at + 100)
        damage(in_slot, at + 3000)
        home_slab, home_slot = map(int, model.arena.home[35])
        damage(model.slabs[model.homes.slabs[home_slab]], home_slot * SLOT_BYTES)
        damage(model.slabs[model.weights.slabs[0]], 9)
        found = await _verified(model)
        assert found.mismatched == 3
        assert [dataclasses.astuple(m) for m in found.mismatches] == [
            ("weights", "SIM", model.weights.range_id, 0, 9, 1, None, None, None),
            ("slot", "SIM", model.ranges[0].range_id, slot.slab, at + 100, 2, 1, 1, "up"),
            ("home", HOST_UUID, model.homes.range_id, home_slab, home_slot * SLOT_BYTES, 1, 2, 3, "gate"),
        ]

    _run(scenario)


def test_mismatches_are_listed_up_to_a_hundred(small: SmallModel) -> None:
    """However much differs, all of it is counted and a hundred places are listed."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        for slab_id in model.ranges[0].slabs.values():
            os.pwrite(model.slabs[slab_id].handle.fd, bytes(SLAB_BYTES), 0)
        found = await _verified(model)
        assert (found.mismatched, len(found.mismatches)) == (3 * 64, verify.MISMATCHES_MAX)
        assert found.mismatches[0].differing_bytes > 0

    _run(scenario)


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_changed_file_leaves_the_homes(small: SmallModel, shrinks: bool) -> None:
    """Once the file has changed, also while it is compared, slots are compared with homes and that is said."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        slot = model.arena.slot_of(2)
        assert slot is not None
        damage(model.slabs[model.ranges[0].slabs[slot.slab]], slot.slot * SLOT_BYTES)
        reads = 0

        def change(_: object) -> None:
            nonlocal reads
            reads += 1
            if reads == 30:
                os.truncate(small.path, 100) if shrinks else small.path.write_bytes(bytes(small.path.stat().st_size))

        host.driver.before_read = change
        during = await _verified(model)
        assert during.file_changed and (during.slots, during.mismatched) == (64, 1)
        assert 0 < during.homes < 64
        after = await _verified(model)
        assert after.file_changed
        assert (after.slots, after.homes, after.weights_bytes, after.slots_skipped) == (64, 0, 0, 0)
        assert [(m.place, m.expert, m.matrix) for m in after.mismatches] == [("slot", 2, "gate")]

    _run(scenario)


def test_a_trade_waits_for_a_slot_that_is_read_and_it_is_compared_again(small: SmallModel) -> None:
    """A growth gets its slab only when no slot of it is being read; the expert that moved is compared anew."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        begun, go_on = threading.Event(), threading.Event()
        arena_slabs = {id(model.slabs[i]) for i in model.ranges[0].slabs.values()}

        def block(slab: object) -> None:
            if id(slab) in arena_slabs and not begun.is_set():
                begun.set()
                go_on.wait(60)

        host.driver.before_read = block
        verifying = asyncio.create_task(_verified(model))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        range_id = host.manager.kv.create(host.session, "", 0, 16, 16 * 100).range_id
        free = 20 - len(host.manager.ledger.slabs_in("SIM", SlabState.LEASED))
        growing = asyncio.create_task(host.manager.kv.grow(host.session, [(range_id, 16 * (free + 10))]))
        await asyncio.sleep(0.1)
        assert not growing.done()
        host.driver.before_read = lambda slab: None
        go_on.set()
        await growing
        found = await verifying
        assert found.mismatched == 0
        assert found.slots == int(model.arena.resident.sum()) < 64
        assert found.homes == 64

    _run(scenario)


def test_dropping_waits_for_the_read_and_ends_the_verification(small: SmallModel) -> None:
    """A model that is dropped keeps slabs and file until the read under way has ended; the verification says so."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        begun, go_on = threading.Event(), threading.Event()

        def block(_: object) -> None:
            begun.set()
            go_on.wait(60)

        host.driver.before_read = block
        verifying = asyncio.create_task(_verified(model))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        host.manager.detach(host.session, model)
        dropping = asyncio.create_task(host.manager.drop_model(model))
        await asyncio.sleep(0.05)
        assert not dropping.done()
        go_on.set()
        await dropping
        with pytest.raises(Unavailable, match="was dropped while it was verified"):
            await verifying

    _run(scenario)


def test_a_cancelled_verification_holds_until_its_read_ends(small: SmallModel) -> None:
    """Whoever cancels a verification does not let go of a slot that a thread still reads."""

    async def scenario(host: Host) -> None:
        model = await host.open(small)
        begun, go_on = threading.Event(), threading.Event()

        def block(_: object) -> None:
            begun.set()
            go_on.wait(60)

        host.driver.before_read = block
        verifying = asyncio.create_task(_verified(model))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        verifying.cancel()
        await asyncio.wait([verifying])
        assert model.reading
        go_on.set()
        while model.reading:
            await asyncio.sleep(0.001)

    _run(scenario)


def test_models_go_by_id_and_name(small: SmallModel, tmp_path: Path) -> None:
    """A model is found by id or name; a name of two, or of none, is answered with what there is, in a short line."""

    async def scenario(host: Host) -> None:
        models = host.manager.models
        with pytest.raises(NotFound, match="no model 'x' here; none is open"):
            verify.find(models, "x")
        first = await host.open(small)
        assert verify.find(models, "model") is verify.find(models, str(first.model_id)) is first
        with pytest.raises(NotFound, match=rf"there are {first.model_id} \('model'\)"):
            verify.find(models, "x\x1b[31m")
        (tmp_path / "other").mkdir()
        second = await host.open(write_model(tmp_path / "other" / "model", 1, 4))
        with pytest.raises(NotFound, match=rf"2 models are called 'model': {first.model_id}.*{second.model_id}.* id"):
            verify.find(models, "model")
        first.name = "n" * 100_000
        with pytest.raises(NotFound) as caught:
            verify.find(models, "m" * 100_000)
        assert len(caught.value.message) < 400

    _run(scenario)


class Context:
    """A call's context: a token, and an abort that raises what the client gets."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, "token"),)

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object) -> None:
        raise PermissionError(code, details)


@pytest.mark.parametrize("uid", [0, 4321])
def test_only_administrators_verify(small: SmallModel, uid: int) -> None:
    """Of those who may look, `admin_uids` may verify."""

    async def scenario(host: Host) -> None:
        await host.open(small)
        admin = Admin(host.manager, {"token": uid}, {0})
        events = admin.Verify(admin_pb2.VerifyRequest(model="model"), Context())  # type: ignore[arg-type]
        if uid == 0:
            assert [event.summary.homes async for event in events][-1] == 64
            return
        with pytest.raises(PermissionError, match="user 4321 may not verify") as caught:
            _ = [event async for event in events]
        assert caught.value.args[0] is grpc.StatusCode.PERMISSION_DENIED

    _run(scenario)
