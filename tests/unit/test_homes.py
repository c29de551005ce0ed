"""Homes: made from the start, filled behind the slots, published when every session has mapped them."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from strata_api.v1 import pages

from tests.helpers.faulty_driver import FaultyDriver
from tests.helpers.in_process import SLAB_BYTES, Host, run, until
from tests.helpers.peer import MATRIX_BYTES, SLOT_BYTES, SmallModel, public_model
from vmmd.core.residency import NOWHERE
from vmmd.driver.base import Slab
from vmmd.driver.host_memfd import HOST_UUID
from vmmd.errors import DriverError
from vmmd.manager import homes

GROUPS = 7  # of two slabs, of five experts


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "GROUP_BYTES", 2 * SLAB_BYTES)


class Gated(FaultyDriver):
    """Makes host slabs when it is told to."""

    def __init__(self, driver: Any) -> None:
        super().__init__(driver)
        self.gate = threading.Event()

    def create(self, device_uuid: str, size_bytes: int) -> Slab:
        if device_uuid == HOST_UUID:
            assert self.gate.wait(30)
        return super().create(device_uuid, size_bytes)


def gate(host: Host) -> threading.Event:
    assert isinstance(host.driver, Gated)
    return host.driver.gate


def wait_for_maps(host: Host) -> None:
    """Homes wait for sessions that have not mapped them for as long as it takes."""
    host.manager.options = dataclasses.replace(host.manager.options, revoke_deadline_s=600.0)


def published(opened: Any) -> list[int]:
    """Experts whose home readers find."""
    return [expert for expert in range(opened.arena.geometry.n) if opened.table.home(expert)]


def are_filled(host: Host, opened: Any, model: SmallModel, experts: list[int]) -> bool:
    """Whether every byte of these experts' homes is the file's."""
    data = model.path.read_bytes()
    for expert in experts:
        slab, slot = opened.arena.home[expert].tolist()
        found = host.driver.read(opened.slabs[opened.homes.slabs[slab]], slot * SLOT_BYTES, SLOT_BYTES)
        at = opened.arena.geometry.offset_bytes[expert].tolist()
        if found != b"".join(data[offset : offset + MATRIX_BYTES] for offset in at):
            return False
    return True


def check_homes(host: Host, opened: Any, model: SmallModel, experts: list[int]) -> None:
    """These experts' homes are filled, and the table says where they are, if anything."""
    assert are_filled(host, opened, model, experts)
    for expert in experts:
        word, (slab, slot) = opened.table.home(expert), opened.arena.home[expert].tolist()
        assert not word or pages.unpack(word) == (pages.TIER_HOST, 0, slab, slot)


def test_a_home_is_published_when_every_session_has_mapped_it(model: SmallModel) -> None:
    """All homes are made and filled however slow a session is; none is seen before that session has mapped it."""

    async def scenario() -> None:
        host = Host(wrap=Gated)
        try:
            wait_for_maps(host)
            slow = host.connect("user")
            slow.watcher = None
            opened, _ = await asyncio.gather(host.begin(model), host.begin(model, slow))
            assert published(opened) == []
            gate(host).set()
            await until(lambda: len(slow.batches) == GROUPS and not host.session.batches)
            await until(lambda: are_filled(host, opened, model, list(range(model.n))))
            await asyncio.sleep(0.05)
            assert published(opened) == [] and not opened.arena.home_ready.any()
            first, *others = list(slow.batches)
            for batch in reversed(others):
                host.manager.acknowledge(slow, batch)
            await asyncio.sleep(0.05)
            assert published(opened) == []
            host.manager.acknowledge(slow, first)
            await until(lambda: opened.background.done())
            assert published(opened) == list(range(model.n)) and opened.arena.home_ready.all()
            check_homes(host, opened, model, list(range(model.n)))
            host.state()
        finally:
            await host.close()

    run(scenario)


def test_homes_come_group_by_group(model: SmallModel) -> None:
    """What a session has mapped is published before it maps the rest, the last experts first."""

    async def scenario() -> None:
        host = Host(wrap=Gated)
        try:
            wait_for_maps(host)
            host.session.watcher = None
            opened = await host.begin(model)
            gate(host).set()
            await until(lambda: len(host.session.batches) == GROUPS)
            host.manager.acknowledge(host.session, next(iter(host.session.batches)))
            await until(lambda: published(opened) == list(range(54, 64)))
            host.manager.disconnect(host.session, "it died")  # and is not waited for any more
            await until(lambda: opened.background.done())
            assert published(opened) == list(range(model.n))
        finally:
            await host.close()

    run(scenario)


def test_experts_without_a_slot_have_homes_before_steps_start(model: SmallModel) -> None:
    """A model is ready when every expert has a place, whatever is acknowledged; those on the device get homes later."""

    async def scenario() -> None:
        host = Host(8, wrap=Gated)
        try:
            host.session.watcher = None
            opening = asyncio.create_task(host.begin(model))
            await asyncio.sleep(0.1)
            assert not opening.done()
            gate(host).set()
            opened = await opening
            assert all(opened.table.entry(expert) for expert in range(model.n))
            away = [expert for expert in range(model.n) if opened.arena.slot_of(expert) is None]
            assert away and set(away) <= set(published(opened))
            check_homes(host, opened, model, away)
            await until(lambda: host.session.batches.clear() or opened.background.done())
            assert published(opened) == list(range(model.n))
        finally:
            await host.close()

    run(scenario)


def test_host_memory_that_runs_out_pins_the_rest(model: SmallModel) -> None:
    """Where a slab cannot be made, the homes before it are used, and other experts stay where they are."""

    async def scenario() -> None:
        host = Host(wrap=Gated)
        try:
            opened = await host.begin(model)
            host.driver.fail_at("create", 6, always=True)
            gate(host).set()
            await until(lambda: opened.background.done())
            host.driver.heal()
            assert published(opened) == list(range(44, 64))  # two groups; the third lacks its second slab
            without = opened.arena.home[:, 0] == NOWHERE
            assert without.tolist() == [expert < 44 for expert in range(model.n)]
            assert opened.arena.resident.all() and not opened.stale
            host.state()
        finally:
            await host.close()

    run(scenario)


@pytest.mark.parametrize("device_slabs", [8, 20])
def test_a_failed_opening_waits_for_what_is_being_made(model: SmallModel, device_slabs: int) -> None:
    """An opening that fails while host memory is being made leaves nothing leased, and the next one succeeds."""

    async def scenario() -> None:
        host = Host(device_slabs, wrap=Gated)
        try:
            host.driver.fail_at("fill", 1)
            opening = asyncio.create_task(host.begin(model))
            await asyncio.sleep(0.05)
            assert not opening.done()
            gate(host).set()
            with pytest.raises(DriverError, match="on purpose"):
                await opening
            sums, held, _ = host.state()
            assert not any(sums.values()) and held == 0 and not host.manager.models
            opened = await host.open(model)
            assert published(opened) == list(range(model.n))
        finally:
            await host.close()

    run(scenario)


def test_a_file_that_changes_before_the_homes_are_filled(model: SmallModel) -> None:
    """The model is stale, and its experts stay in their slots."""

    async def scenario() -> None:
        host = Host(wrap=Gated)
        try:
            opened = await host.begin(model)
            os.utime(model.path, (1, 1))
            gate(host).set()
            await until(lambda: opened.background.done())
            assert opened.stale and published(opened) == []
            assert (opened.arena.home == NOWHERE).all() and opened.arena.resident.all()
            host.state()
        finally:
            await host.close()

    run(scenario)
