"""Experts move while processes read them: every byte that a step reads is the right expert's."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count

import pytest
from strata_api.v1 import memory_pb2

from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.peer import Admin, Remote, SmallModel, client, public_model

# 64 experts in 13 slabs of 5 slots; the device has room for 16 slabs, one of them weights. No reader is stuck: one that
# does not get to run is waited for.
CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.0
quiesce_deadline_ms = 60000
floor_slots = 10
[host]
device_bytes = "1MiB"
ram_bytes = "4MiB"
"""


@pytest.fixture
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


ROUNDS_MAX = 10
"""Of reading: a busy machine needs more of them until there was enough to see."""

Counts = tuple[int, int, list[str]]
"""Reads, of device slots, and what was wrong."""


def _read_beside(
    act: Callable[[int], object], peers: Sequence[Remote], seconds: float, is_enough: Callable[[list[Counts]], bool]
) -> list[Counts]:
    """What each peer has read, in rounds of so many seconds, while a thread calls `act` with 0, 1, and so on.

    Goes on until `is_enough` of all rounds together.
    """
    stop = threading.Event()

    def go_on() -> None:
        for n in count():
            if stop.is_set():
                return
            act(n)

    thread = threading.Thread(target=go_on)
    thread.start()
    found: list[Counts] = [(0, 0, []) for _ in peers]
    try:
        for n in range(ROUNDS_MAX):
            for at, peer in enumerate(peers):
                peer.tell("count_reads", seconds, n * len(peers) + at)
            found = [_sum([before, peer.answer(seconds + 60)]) for before, peer in zip(found, peers, strict=True)]
            if is_enough(found):
                break
    finally:
        stop.set()
        thread.join()
    return found


def _sum(found: Sequence[Counts]) -> Counts:
    reads, on_device, wrong = zip(*found, strict=True)
    return sum(reads), sum(on_device), [line for lines in wrong for line in lines]


def _stress(
    daemon: Daemon, model: SmallModel, seconds: float, readers: int, enough: tuple[int, int, int] = (0, 0, 0)
) -> tuple[int, int, int, int]:
    """(reads, of device slots, generations, slabs traded) while one client grows and shrinks; none may be wrong.

    Goes on until there were `enough` reads, generations and traded slabs.
    """
    with ExitStack() as stack:
        peers = [stack.enter_context(Remote(daemon.directory)) for _ in range(readers)]
        mover = stack.enter_context(Remote(daemon.directory))
        for peer in [*peers, mover]:
            peer.ask("open", model)
        admin = stack.enter_context(Admin(daemon.directory))
        generation = admin.status().models[0].generation
        mover.ask("create")
        growths, generations = [0, 0], 0

        def move(_: int) -> None:
            for slabs in (4, 9, 2, 11, 0):
                growths[0] += 1
                growths[1] += mover.ask("grow", slabs) if slabs else 0
                mover.ask("shrink", slabs // 2)
            mover.ask("heat", growths[0] % model.n_layers, [growths[0] % 16, (growths[0] * 7 + 3) % 16], 50)

        def is_enough(found: list[Counts]) -> bool:
            nonlocal generations
            generations = admin.status().models[0].generation - generation
            seen = (_sum(found)[0], generations, growths[1])
            return all(a >= b for a, b in zip(seen, enough, strict=True))

        reads, on_device, wrong = _sum(_read_beside(move, peers, seconds, is_enough))
        assert wrong == []
        assert all(peer.ask("troubles") == [] for peer in peers)
        return reads, on_device, generations, growths[1]


def test_no_reader_ever_sees_another_experts_bytes(model: SmallModel) -> None:
    """While slabs are traded to and fro, readers in steps find in every slot the expert that the table names."""
    with running_daemon(CONFIG) as daemon:
        enough = (50_000, 200, 50)
        reads, on_device, generations, traded = _stress(daemon, model, 12, 2, enough)
    assert all(count >= least for count, least in zip((reads, generations, traded), enough, strict=True))
    assert reads // 20 < on_device < reads


def test_no_reader_ever_sees_another_experts_bytes_while_experts_are_exchanged(model: SmallModel) -> None:
    """Nor while experts that a client routes to, others every time, take the slots of colder ones."""
    seconds = 8.0
    with running_daemon(CONFIG.replace("1MiB", "640KiB")) as daemon, ExitStack() as stack:
        readers = [stack.enter_context(Remote(daemon.directory)) for _ in range(2)]
        router = stack.enter_context(Remote(daemon.directory))
        for peer in [*readers, router]:
            peer.ask("open", model)
        admin = stack.enter_context(Admin(daemon.directory))
        before = admin.status().models[0]
        assert before.resident == 45
        after = before

        def route(n: int) -> None:
            router.ask("heat", n % model.n_layers, [(n * 7 + i) % 16 for i in range(12)], 300)
            time.sleep(0.1)

        def is_enough(_: list[Counts]) -> bool:
            nonlocal after
            after = admin.status().models[0]
            return after.generation - before.generation > 60

        reads, on_device, wrong = _sum(_read_beside(route, readers, seconds, is_enough))
    assert wrong == []
    assert reads // 2 < on_device < reads
    assert after.generation - before.generation > 60, "experts were hardly exchanged"
    assert after.resident > 40


def test_no_reader_ever_sees_another_experts_bytes_on_two_devices(model: SmallModel) -> None:
    """Nor while ranges on both devices grow and shrink and hot experts climb to the first.

    One reader maps both devices; the other had the model open before there was a part on the second.
    """
    seconds = 10.0
    devices = ["HOST-SIM-0", "HOST-SIM-1"]
    config = CONFIG.replace("1MiB", "384KiB").replace("[host]", "[host]\ndevices = 2")
    with running_daemon(config) as daemon, ExitStack() as stack:
        solo, reader, mover = (stack.enter_context(Remote(daemon.directory)) for _ in range(3))
        for peer, named in ((solo, devices[:1]), (reader, devices), (mover, devices)):
            peer.ask("open", model, named)
        for device in (0, 1):
            mover.ask("create", device=device)
        admin = stack.enter_context(Admin(daemon.directory))

        def is_full() -> bool:
            return admin.status().models[0].resident == 55

        wait_until(is_full, otherwise=lambda: str(admin.status().models))
        before = after = admin.status().models[0]
        traded = [0, 0]

        def move(n: int) -> None:
            for at in (0, 1):
                traded[at] += mover.ask("grow", 1 + (n + at) % 4, at=at)
            mover.ask("heat", n % model.n_layers, [(n * 7 + i) % 16 for i in range(8)], 300)
            time.sleep(0.05)
            for at in (0, 1):
                mover.ask("shrink", n % 2, at=at)

        def is_enough(_: list[Counts]) -> bool:
            nonlocal after
            after = admin.status().models[0]
            return min(traded) > 10 and after.generation - before.generation > 100

        each = _read_beside(move, (solo, reader), seconds, is_enough)
        assert solo.ask("troubles") == reader.ask("troubles") == []
        for at in (0, 1):
            mover.ask("shrink", 0, at=at)
        wait_until(is_full, otherwise=lambda: f"slots were lost: {admin.status()}")
    assert [wrong for _, _, wrong in each] == [[], []]
    assert all(reads // 50 < on_device < reads for reads, on_device, _ in each)
    assert min(traded) > 10
    assert after.generation - before.generation > 100


def test_a_client_that_hears_late_reads_no_slab_that_has_gone(model: SmallModel) -> None:
    """No slab comes where a session may still have another one mapped; once it has unmapped that, one does."""
    with running_daemon(CONFIG) as daemon, client(daemon.directory) as late, Admin(daemon.directory) as admin:
        late.open(model)
        heard: list[memory_pb2.WatchEvent] = []
        on_event = late.session._on_event
        late.session._on_event = heard.append  # type: ignore[method-assign]
        with Remote(daemon.directory) as grower:
            grower.ask("open", model)
            grower.ask("create")
            for slabs in (9, 12, 7, 12):
                grower.ask("grow", slabs)
                grower.ask("write_kv", 255)
                assert late.wrong_experts() == 0
                grower.ask("shrink", 0)
                assert late.wrong_experts() == 0
        wait_until(lambda: admin.device().kv_bytes == 0 and len(heard) > 0)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # upkeep looks four times a second
            assert late.wrong_experts() == 0
            assert admin.status().models[0].resident < model.n
        late.session._on_event = on_event  # type: ignore[method-assign]
        for event in heard:
            on_event(event)
        wait_until(lambda: admin.status().models[0].resident == model.n, otherwise=lambda: str(admin.status()))
        assert late.wrong_experts() == 0


@pytest.mark.bench
@pytest.mark.timeout(1200)
def test_millions_of_reads(model: SmallModel) -> None:
    """The same for ten minutes, or STRATA_STRESS_S seconds."""
    with running_daemon(CONFIG) as daemon:
        seconds = float(os.environ.get("STRATA_STRESS_S", "600"))
        counts = _stress(daemon, model, seconds, 3)
    print("reads, on device, generations, slabs traded:", *counts)
    assert counts[0] > 5000 * seconds
