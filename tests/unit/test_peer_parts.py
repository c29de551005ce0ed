"""Parts on peers: where a model's experts are, and go, when it has slots on several devices."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import memory_pb2, pages

from tests.helpers.in_process import SLAB_BYTES, Host, run
from tests.helpers.peer import SLOT_BYTES, SmallModel, public_model
from tests.unit.test_exchange import begin_step, check, end_step, exchange, route, until
from vmmd.core.residency import EMPTY
from vmmd.errors import NoDevice, PreconditionFailed
from vmmd.manager.releases import TELL_AFTER_S
from vmmd.manager.session import Session

SLABS = 4  # of each device: one of weights on the first, so 3 and 4 of 5 slots: 15 and 20 of 64 experts
FIRST, PEER, THIRD = "SIM-0", "SIM-1", "SIM-2"


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


async def opened_on(model: SmallModel, *devices: str, slabs: int = SLABS) -> tuple[Host, Any]:
    host = Host(slabs, n_devices=3)
    return host, await host.open(model, None, devices[0], devices[1:])


async def open_for(host: Host, model: SmallModel, session: Session, *devices: str) -> Any:
    return await host.begin(model, session, devices[0], devices[1:])


async def grow(host: Host, device: str, slabs: int) -> tuple[int, Any]:
    range_id = host.range(device=device)
    grown = await host.manager.kv.grow(host.session, [(range_id, 16 * slabs)])
    host.fetch(grown.batch_id)
    return range_id, grown


def on(opened: Any, part: int) -> list[int]:
    return [int(e) for e in np.flatnonzero(opened.arena.place[:, 0] == part)]


def coldest(opened: Any, part: int) -> float:
    return float(opened.arena.heat[on(opened, part)].min())


def granted_slabs(session: Session, range_id: int) -> int:
    return sum(item.id == range_id for items in session.batches.values() for item in items)


def test_a_cold_model_is_on_both(model: SmallModel) -> None:
    """Devices are filled one after the other, no expert is on two, and the others are at home."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        try:
            assert [len(on(opened, part)) for part in (0, 1)] == [15, 20]
            assert int(opened.arena.resident.sum()) == 35
            assert on(opened, 0) == list(range(15)) and on(opened, 1) == list(range(15, 35))
            check(host, opened, model.path)
            assert opened.filled_s.keys() == {FIRST, PEER} and all(s > 0 for s in opened.filled_s.values())
        finally:
            await host.close()

    run(scenario)


def test_the_hottest_are_on_the_first_device(model: SmallModel) -> None:
    """Whatever is routed to most comes to the first device, the next to the peer: also what was there already."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        try:
            rank = list(range(63, -1, -1))
            for some in (rank[:15], rank[:35]):  # 63 to 49 twice
                route(opened, host.session, some, 60)
            await exchange(host, opened)
            assert on(opened, 0) == sorted(rank[:15]) and on(opened, 1) == sorted(rank[15:35])
            check(host, opened, model.path)
            route(opened, host.session, rank[15:30], 2000)
            await exchange(host, opened)
            assert on(opened, 0) == sorted(rank[15:30])
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_what_was_learned_fills_the_first_device_first(model: SmallModel, tmp_path: Path) -> None:
    """The next time that it is filled, the hottest experts come to the first device, the next to the peer."""

    async def scenario() -> None:
        for again in (False, True):
            host = Host(SLABS, n_devices=2, state_dir=tmp_path)
            try:
                opened = await host.open(model, None, FIRST, [PEER])
                if again:
                    assert on(opened, 0) == list(range(49, 64)) and on(opened, 1) == list(range(29, 49))
                else:
                    route(opened, host.session, range(49, 64), 600)
                    route(opened, host.session, range(29, 64), 600)
            finally:
                await host.close()

    run(scenario)


def test_a_model_that_is_open_gets_a_part(model: SmallModel) -> None:
    """A session that names a peer finds the open model, whose experts come to the peer from their homes."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST)
        try:
            path = model.path
            second = host.connect("user")
            filled_bytes = opened.filled_bytes
            assert await open_for(host, model, second, FIRST, PEER) is opened
            assert [len(on(opened, part)) for part in (0, 1)] == [15, 20]
            assert opened.filled_bytes - filled_bytes == 20 * SLOT_BYTES
            check(host, opened, path)
            first_range, peer_range = opened.ranges
            assert opened.sessions_with(first_range) == [host.session, second]
            assert opened.sessions_with(peer_range) == [second]
            batch, _ = host.manager.grant_model(second, opened)
            assert sum(item.id == peer_range.range_id for item in second.batches[batch]) == 4
            batch, _ = host.manager.grant_model(host.session, opened)
            assert granted_slabs(host.session, peer_range.range_id) == 0
            # named again, by a third session: nothing is left to do
            generation = opened.table.generation
            await open_for(host, model, host.connect("user"), FIRST, PEER)
            assert opened.table.generation == generation
        finally:
            await host.close()

    run(scenario)


def test_a_session_that_computes_elsewhere_has_a_model_of_its_own(model: SmallModel) -> None:
    """The device that computes has the weights: another order of the same devices is another model."""

    async def scenario() -> None:
        host = Host(12, 40, n_devices=2)
        try:
            opened = await host.open(model, None, FIRST, [PEER])
            other = await open_for(host, model, host.connect("user"), PEER, FIRST)
            assert other is not opened and other.weights.device == PEER
            assert [r.device for r in other.ranges] == [PEER, FIRST]
            check(host, opened, model.path)
            check(host, other, model.path)
        finally:
            await host.close()

    run(scenario)


def test_a_peer_without_room_is_filled_when_there_is_some(model: SmallModel) -> None:
    """A device that other programs use up gets an empty part, which fills once they have gone."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST)
        try:
            host.inner.set_unmanaged_bytes(PEER, SLABS * SLAB_BYTES)
            host.manager.devices.measure()
            await open_for(host, model, host.connect("user"), FIRST, PEER)
            assert [len(on(opened, part)) for part in (0, 1)] == [15, 0]
            host.inner.set_unmanaged_bytes(PEER, SLAB_BYTES)
            host.manager.devices.measure()
            host.manager.upkeep._no_room_s.clear()
            await host.manager.upkeep._give_back(opened)
            assert [len(on(opened, part)) for part in (0, 1)] == [15, 15]
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_copies_that_fail_leave_a_part_to_be_filled_later(model: SmallModel) -> None:
    """A fill of the peer that fails costs nobody anything: the model opens, and upkeep tries again."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST)
        try:
            host.driver.fail_at("fill", 1)
            await open_for(host, model, host.connect("user"), FIRST, PEER)
            check(host, opened, model.path)
            assert len(on(opened, 1)) == 0 and opened.arena.parts[1].slots == 20
            await host.manager.upkeep._give_back(opened)
            assert len(on(opened, 1)) == 20
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_a_growth_pushes_hot_experts_on_to_the_peer(model: SmallModel) -> None:
    """What the first device gives up takes the slots of colder ones on the peer; all is where the table says."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        try:
            for some in (range(15), range(15), range(25)):
                route(opened, host.session, list(some), 60)
            _, grown = await grow(host, FIRST, 2)
            (trade,) = grown.trades
            assert (trade.device_uuid, trade.slabs, trade.slots) == (FIRST, 2, 10)
            assert trade.experts_moved == 10, "ten of the first device's, to slots of ten that nobody routes to"
            assert (trade.slots_occupied, trade.slots_total) == (5, 5)
            assert [len(on(opened, part)) for part in (0, 1)] == [5, 20]
            assert opened.arena.resident[:25].all() and not opened.arena.resident[25:].any()
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_no_step_reads_a_slot_that_a_growth_rewrites(model: SmallModel) -> None:
    """Slots on the peer are rewritten only once the running steps have ended."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        try:
            opened.quiesce_deadline_s = 30.0
            route(opened, host.session, list(range(15)), 600)
            begin_step(opened, host.session)
            bytes_before = [host.driver.read(opened.slabs[i], 0, SLAB_BYTES) for i in opened.ranges[1].slabs.values()]
            growth = asyncio.create_task(grow(host, FIRST, 1))
            await until(lambda: opened.working)
            await asyncio.sleep(0.02)
            assert bytes_before == [
                host.driver.read(opened.slabs[i], 0, SLAB_BYTES) for i in opened.ranges[1].slabs.values()
            ]
            end_step(opened, host.session)
            await growth
            assert opened.arena.resident[:15].all()
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


@pytest.mark.parametrize("taker", ["exchange", "refill"])
def test_an_expert_that_a_growth_moves_on_comes_to_one_slot(model: SmallModel, taker: str) -> None:
    """While it is on its way to the peer, neither an exchange nor an empty slot takes it, and no slot stays busy."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        arena = opened.arena
        try:
            opened.quiesce_deadline_s = 30.0
            route(opened, host.session, [0], 100)
            route(opened, host.session, range(1, 11), 900)
            begin_step(opened, host.session)
            growth = asyncio.create_task(grow(host, FIRST, 1))  # 10 comes to the slot of 0, which moves on to the peer
            await until(lambda: opened.working)
            assert arena.slot_of(0) is None
            route(opened, host.session, [0], 5000)  # none in a slot is as hot
            if taker == "exchange":
                host.manager.placement.begin(opened)
                await asyncio.sleep(0.01)
            else:
                empty = arena.slot_of(20)
                arena.vacate(20)
                opened.point(np.array([20]))
                arena.release(empty)
                await host.manager.upkeep._give_back(opened)
                assert not arena.slots_that_are(EMPTY, 1, [empty.slab]).size
            end_step(opened, host.session)
            await growth
            await until(lambda: not host.manager.placement.is_under_way(opened))
            assert arena.slot_of(0) is not None
            assert sum(slab.busy for part in arena.parts for slab in part.slabs.values()) == 0
            assert int(arena.resident.sum()) == arena.slots == 30
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_each_device_lends_to_its_own_ranges(model: SmallModel) -> None:
    """Ranges on both devices grow out of the parts on theirs, at once and all or nothing."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        try:
            route(opened, host.session, list(range(35)), 600)
            ranges = [host.range(device=device) for device in (FIRST, PEER)]
            grown = await host.manager.kv.grow(host.session, [(ranges[0], 16), (ranges[1], 32)])
            host.fetch(grown.batch_id)
            assert {t.device_uuid: t.slabs for t in grown.trades} == {FIRST: 1, PEER: 2}
            assert [part.slots for part in opened.arena.parts] == [10, 10]
            check(host, opened, model.path)
            held = host.state()
            with pytest.raises(Exception, match=r"slabs\) asked for on SIM-1"):
                await host.manager.kv.grow(host.session, [(ranges[0], 32), (ranges[1], 16 * 9)])
            assert host.state() == held
        finally:
            await host.close()

    run(scenario)


def test_what_comes_back_to_the_first_device_is_filled_from_the_peer(model: SmallModel) -> None:
    """Where all experts are resident, slabs that a conversation gives back take the hottest of the peer's."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER, slabs=8)  # 35 and 29 of 64
        try:
            host.manager.options = replace(host.manager.options, give_back_delay_s=0.0)
            range_id, _ = await grow(host, FIRST, 4)
            await host.manager.upkeep._give_back(opened)
            assert [len(on(opened, part)) for part in (0, 1)] == [15, 40]
            await host.manager.kv.shrink(host.session, range_id, 0)
            host.manager.upkeep._no_room_s.clear()
            await host.manager.upkeep._give_back(opened)
            route(opened, host.session, on(opened, 1)[-9:], 600)
            for _ in range(3):
                await host.manager.upkeep._give_back(opened)
                await exchange(host, opened)
            assert int(opened.arena.resident.sum()) == 64
            assert len(on(opened, 0)) == 35
            assert coldest(opened, 0) >= 0 and set(np.flatnonzero(opened.arena.heat > 0.5)) <= set(on(opened, 0))
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_a_climb_waits_for_running_steps_and_may_fail(model: SmallModel) -> None:
    """A step that hangs, and copies that fail, lose no expert and no slot on the way to the first device."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER, slabs=8)
        try:
            host.manager.options = replace(host.manager.options, give_back_delay_s=0.0)
            range_id, _ = await grow(host, FIRST, 4)
            await host.manager.upkeep._give_back(opened)
            await host.manager.kv.shrink(host.session, range_id, 0)
            host.manager.upkeep._no_room_s.clear()
            await host.manager.upkeep._give_back(opened)
            while opened.arena.missing.any():
                await host.manager.upkeep._give_back(opened)
            slots = opened.arena.slots
            begin_step(opened, host.session)
            route(opened, host.session, on(opened, 1)[:5], 600)
            await exchange(host, opened)
            end_step(opened, host.session)
            await until(lambda: not opened.releasing)
            check(host, opened, model.path)
            await host.manager.upkeep._give_back(opened)
            host.driver.fail_at("fill", 1)
            await exchange(host, opened)
            check(host, opened, model.path)
            for _ in range(3):
                await host.manager.upkeep._give_back(opened)
                await exchange(host, opened)
            assert int(opened.arena.resident.sum()) == 64 and opened.arena.slots == slots
            assert sum(slab.busy for part in opened.arena.parts for slab in part.slabs.values()) == 0
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_slabs_of_a_part_concern_those_who_map_it(model: SmallModel) -> None:
    """Who did not name the peer is neither granted its slabs nor asked to unmap them."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST)
        try:
            second = host.connect("user")
            await open_for(host, model, second, FIRST, PEER)
            events: dict[int, list[memory_pb2.WatchEvent]] = {}
            for session in (host.session, second):
                session.watcher = None
                session.events.clear()
                events[session.session_id] = session.events  # type: ignore[assignment]
            range_id = host.manager.kv.create(second, PEER, 0, 16, 16 * 8).range_id
            host.fetch((await host.manager.kv.grow(second, [(range_id, 16 * 2)])).batch_id, second)
            host.manager.options = replace(host.manager.options, give_back_delay_s=0.0)
            await host.manager.kv.shrink(second, range_id, 0)
            await asyncio.sleep(2 * TELL_AFTER_S)
            host.manager.released(second, next(iter(second.revocations)))
            host.manager.upkeep._no_room_s.clear()
            await host.manager.upkeep._give_back(opened)
            kinds = [event.WhichOneof("event") for event in events[second.session_id]]
            assert kinds == ["slabs_removed", "slabs_added"]
            assert not host.session.revocations and not events[host.session.session_id]
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_who_cannot_reach_a_pinned_expert_is_refused(model: SmallModel) -> None:
    """Experts without a home on a device that a session did not name: the refusal says what to do."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST, PEER)
        try:
            lost = on(opened, 1)[:3]
            opened.arena.home_ready[lost] = False
            second = host.connect("user")
            with pytest.raises(PreconditionFailed, match=r"3 experts .* lie on SIM-1: name that device as a peer"):
                await open_for(host, model, second, FIRST)
            assert second not in opened.sessions and host.session in opened.sessions
            await open_for(host, model, second, FIRST, PEER)
            assert second in opened.sessions
            opened.arena.home_ready[lost] = True
        finally:
            await host.close()

    run(scenario)


def test_other_programs_are_seen_device_by_device(model: SmallModel) -> None:
    """A job on the peer takes that device's slabs alone, down to its reserve; the first keeps what it has."""

    async def scenario() -> None:
        host = Host(SLABS, n_devices=2)
        host.manager.ledger.devices[PEER].reserve_bytes = SLAB_BYTES
        opened = await host.open(model, None, FIRST, [PEER])
        try:
            assert [part.slots for part in opened.arena.parts] == [15, 15], "the reserve is kept from the beginning"
            host.inner.set_unmanaged_bytes(PEER, SLAB_BYTES)
            await host.manager.upkeep._tick()
            await until(lambda: opened.arena.parts[1].slots == 10)
            assert opened.arena.parts[0].slots == 15
            await until(lambda: host.driver.memory(PEER).free_bytes == SLAB_BYTES)
            check(host, opened, model.path)
            host.inner.set_unmanaged_bytes(PEER, 0)
            host.manager.options = replace(host.manager.options, give_back_delay_s=0.0)
            host.manager.upkeep._no_room_s.clear()
            await host.manager.upkeep._tick()
            assert opened.arena.parts[1].slots == 15
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_a_peer_that_failed_is_refused(model: SmallModel) -> None:
    """A dead device gets no part; the model on the others stays open."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST)
        try:
            host.inner.set_failed(PEER)
            host.manager.devices.measure()
            with pytest.raises(NoDevice, match="SIM-1 has failed"):
                await open_for(host, model, host.connect("user"), FIRST, PEER)
            await open_for(host, model, host.connect("user"), FIRST, THIRD)
            assert [r.device for r in opened.ranges] == [FIRST, THIRD]
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)


def test_two_sessions_extend_at_once(model: SmallModel) -> None:
    """Two that name the same peer at the same time, one of them hanging up, make one part."""

    async def scenario() -> None:
        host, opened = await opened_on(model, FIRST)
        try:
            openings = [
                asyncio.create_task(open_for(host, model, host.connect("user"), FIRST, PEER, THIRD)) for _ in range(3)
            ]
            await until(lambda: opened.refilling.locked())
            openings[0].cancel()
            await asyncio.wait(openings)
            assert [r.device for r in opened.ranges] == [FIRST, PEER, THIRD]
            assert [len(on(opened, part)) for part in range(3)] == [15, 20, 20]
            assert all(opened.table.entry(e) >> 62 == pages.TIER_DEVICE for e in on(opened, 2))
            check(host, opened, model.path)
        finally:
            await host.close()

    run(scenario)
