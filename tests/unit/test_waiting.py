"""The order of requests that wait, and the manager that tries them again."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.helpers.in_process import SLAB_BYTES, Host, run
from tests.helpers.peer import SmallModel, public_model
from vmmd.core.ledger import Share, UserRecord
from vmmd.core.shares import Asked
from vmmd.core.waiting import Queue, Waiter
from vmmd.errors import Exhausted, LeaseRevoked
from vmmd.manager.session import Session

requests = st.lists(st.tuples(st.integers(-2, 2), st.frozensets(st.sampled_from("abc"), min_size=1)), max_size=12)


@given(requests, st.data())
def test_nobody_is_passed(asked: list[tuple[int, frozenset[str]]], data: st.DataObject) -> None:
    """However requests come and go, one is served only when none of its devices' earlier or more urgent ones waits."""
    queue, waiting = Queue(), list[Waiter]()
    for n, (priority, devices) in enumerate(asked):
        earlier = [w for w in waiting if w.priority >= priority and w.devices & devices]
        assert set(queue.before(priority, devices)) == set(earlier)
        waiting.append(queue.add(priority, devices, 7, float(n)))
        if data.draw(st.booleans()):
            leaves = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            queue.remove(leaves)
    assert list(queue) == sorted(waiting, key=lambda w: (-w.priority, w.ticket))
    assert queue.of_user(7) == len(queue) == len(waiting)
    served = []
    while waiting:
        ready = [w for w in waiting if not queue.before(w.priority, w.devices, w)]
        assert ready, "everybody waits for somebody"
        served.append(ready[-1])
        queue.remove(ready[-1])
        waiting.remove(ready[-1])
    for device in "abc":
        assert not queue.is_wanted(device)
        there = [w.order for w in served if device in w.devices]
        assert there == sorted(there), "somebody was passed"


# The manager's


@contextmanager
def full_host(slabs: int = 4) -> Iterator[tuple[Host, int]]:
    """A device that another session's K/V fills; its range."""
    host = Host(device_slabs=slabs)
    yield host, host.range()


async def grow(host: Host, session: Session, range_id: int, slabs: int, wait_s: float = 60.0) -> int:
    await host.manager.kv.grow(session, [(range_id, 16 * slabs)], wait_s)
    return slabs


async def soon(task: "asyncio.Task[int]") -> None:
    """Lets a request come to wait."""
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not task.done()


def test_a_request_waits_for_memory() -> None:
    """A growth that cannot be met is met as soon as another session gives back."""

    async def scenario() -> None:
        with full_host() as (host, held):
            await grow(host, host.session, held, 4)
            other = host.connect("user")
            waiting = asyncio.create_task(grow(host, other, host.range(other), 2))
            await soon(waiting)
            await host.manager.kv.shrink(host.session, held, 16 * 2)
            assert await asyncio.wait_for(waiting, 30) == 2
            await host.close()

    run(scenario)


def test_a_deadline_ends_it() -> None:
    """At its deadline a request is refused with how long it waited and who holds what, and is explained."""

    async def scenario() -> None:
        with full_host() as (host, held):
            await grow(host, host.session, held, 4)
            other = host.connect("user")
            range_id = host.range(other)
            with pytest.raises(Exhausted, match=r"waited 0.2 s: .*asked for on SIM-0.*holds") as refused:
                await grow(host, other, range_id, 2, 0.2)
            assert refused.value.requested_bytes == 2 * SLAB_BYTES
            facts = {fact.topic: fact.text for fact in host.manager.explain(range_id)}
            assert "waited 0.2 s" in facts["refused"]
            assert not host.manager.waiting.is_wanted("SIM-0")
            await host.close()

    run(scenario)


def test_requests_are_met_in_order() -> None:
    """A small request that comes later waits for a large one that came first, with or without a deadline of its own."""

    async def scenario() -> None:
        with full_host() as (host, held):
            await grow(host, host.session, held, 4)
            first, second = host.connect("user"), host.connect("user")
            order: list[str] = []

            async def asked(name: str, session: Session, slabs: int) -> int:
                await grow(host, session, host.range(session), slabs)
                order.append(name)
                return slabs

            large = asyncio.create_task(asked("large", first, 3))
            await soon(large)
            small = asyncio.create_task(asked("small", second, 1))
            await soon(small)
            await host.manager.kv.shrink(host.session, held, 16 * 2)  # enough for the small one
            await soon(small)
            with pytest.raises(Exhausted, match="2 requests that came first"):
                await grow(host, second, host.range(second), 1, 0.0)
            await host.manager.kv.shrink(host.session, held, 0)
            await asyncio.wait_for(asyncio.gather(large, small), 30)
            assert order == ["large", "small"]
            await host.close()

    run(scenario)


def test_priority_goes_first() -> None:
    """Of requests that wait, the one of highest priority is met first."""

    async def scenario() -> None:
        with full_host() as (host, held):
            await grow(host, host.session, held, 4)
            low = host.connect("user", Asked(priority=-1))
            high = host.connect("user")
            first = asyncio.create_task(grow(host, low, host.range(low), 2))
            await soon(first)
            second = asyncio.create_task(grow(host, high, host.range(high), 2))
            await soon(second)
            await host.manager.kv.shrink(host.session, held, 16 * 2)
            assert await asyncio.wait_for(second, 30) == 2
            assert not first.done()
            host.manager.disconnect(low, "the test says so")
            with pytest.raises(LeaseRevoked):
                await asyncio.wait_for(first, 30)
            await host.close()

    run(scenario)


def test_a_client_that_hangs_up_waits_no_longer() -> None:
    """A request whose caller went away leaves the queue, and gets nothing afterwards."""

    async def scenario() -> None:
        with full_host() as (host, held):
            await grow(host, host.session, held, 4)
            other = host.connect("user")
            waiting = asyncio.create_task(grow(host, other, host.range(other), 2))
            await soon(waiting)
            assert host.manager.waiting.is_wanted("SIM-0")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with asyncio.timeout(30):
                while host.manager.waiting.is_wanted("SIM-0"):
                    await asyncio.sleep(0.01)
            await host.manager.kv.shrink(host.session, held, 0)
            await asyncio.sleep(0.05)
            assert not host.manager.ledger.held_bytes(host.manager.ledger.session_ranges(other.session_id))
            await host.close()

    run(scenario)


def test_a_user_has_a_limit_of_waiting_requests() -> None:
    """More waiting requests of one user than waiting_per_user_max are refused at once, each clearly."""

    async def scenario() -> None:
        with full_host() as (host, held):
            host.limit_waiting(2)
            await grow(host, host.session, held, 4)
            others = [host.connect("user") for _ in range(3)]
            ranges = [host.range(other) for other in others]
            tasks = []
            for other, range_id in list(zip(others, ranges, strict=True))[:2]:
                tasks.append(asyncio.create_task(grow(host, other, range_id, 1)))
                await soon(tasks[-1])
            with pytest.raises(Exhausted, match="waiting_per_user_max"):
                await grow(host, others[2], ranges[2], 1)
            await host.manager.kv.shrink(host.session, held, 0)
            await asyncio.wait_for(asyncio.gather(*tasks), 30)
            await host.close()

    run(scenario)


def test_a_guarantee_passes_those_that_wait() -> None:
    """A growth within a guarantee is met though others wait, from memory that an arena was lent."""

    async def scenario(model: SmallModel) -> None:
        host = Host(device_slabs=14)  # what the model has at most
        host.manager.ledger.users[0] = UserRecord("user", Share(6 * SLAB_BYTES))
        opened = await host.open(model)
        lent = opened.arena.slots
        stranger = host.connect("other", uid=1)
        range_id = host.range(stranger)
        waiting = asyncio.create_task(grow(host, stranger, range_id, 12))
        await soon(waiting)
        own = host.range()
        used = 1 + opened.floor_slabs  # weights and floor
        await grow(host, host.session, own, 6 - used, 0.0)
        assert opened.arena.slots < lent
        assert not waiting.done()
        waiting.cancel()
        await host.close()

    with public_model() as model:
        run(lambda: scenario(model))


def test_a_model_waits_to_be_opened() -> None:
    """Opening waits like a growth, and gives up when nobody wants the model any more."""

    async def scenario(model: SmallModel) -> None:
        host = Host(device_slabs=6)
        held = host.range()
        await grow(host, host.session, held, 6)
        opening = asyncio.create_task(host.begin(model, wait_s=60.0))
        await asyncio.sleep(0.1)
        assert not opening.done()
        await host.manager.kv.shrink(host.session, held, 0)
        opened = await asyncio.wait_for(opening, 30)
        assert opened.arena.slots >= opened.arena.floor_slots
        await asyncio.wait([opened.background])
        await host.close()

    with public_model() as model:
        run(lambda: scenario(model))
