"""Experts move while processes read them: every byte that a step reads is the right expert's."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from strata_api.v1 import memory_pb2

from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.peer import Admin, Remote, SmallModel, client, public_model
from vmmd.errors import Exhausted

# 64 experts in 13 slabs of 5 slots; the device has room for 16 slabs, one of them weights
CONFIG = """
slab_bytes = "64KiB"
give_back_delay_s = 0.0
floor_slots = 10
[host]
device_bytes = "1MiB"
ram_bytes = "4MiB"
"""


@pytest.fixture
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


def _stress(daemon: Daemon, model: SmallModel, seconds: float, readers: int) -> tuple[int, int, int, int]:
    """(reads, of device slots, generations, slabs traded) while one client grows and shrinks; none may be wrong."""
    with ExitStack() as stack:
        peers = [stack.enter_context(Remote(daemon.directory)) for _ in range(readers)]
        mover = stack.enter_context(Remote(daemon.directory))
        for peer in [*peers, mover]:
            peer.ask("open", model)
        admin = stack.enter_context(Admin(daemon.directory))
        generation = admin.status().models[0].generation
        mover.ask("create")
        stop = threading.Event()
        growths = [0, 0]

        def move() -> None:
            while not stop.is_set():
                for slabs in (4, 9, 2, 11, 0):
                    growths[0] += 1
                    growths[1] += mover.ask("grow", slabs) if slabs else 0
                    mover.ask("shrink", slabs // 2)
                mover.ask("heat", growths[0] % model.n_layers, [growths[0] % 16, (growths[0] * 7 + 3) % 16], 50)

        for seed, peer in enumerate(peers):
            peer.tell("count_reads", seconds, seed)
        thread = threading.Thread(target=move)
        thread.start()
        found = [peer.answer(seconds + 60) for peer in peers]
        stop.set()
        thread.join()
        reads, on_device, wrong = (sum(values, type(values[0])()) for values in zip(*found, strict=True))
        assert wrong == []
        assert all(peer.ask("troubles") == [] for peer in peers)
        return reads, on_device, admin.status().models[0].generation - generation, growths[1]


def test_no_reader_ever_sees_another_experts_bytes(model: SmallModel) -> None:
    """While slabs are traded to and fro, readers in steps find in every slot the expert that the table names."""
    with running_daemon(CONFIG) as daemon:
        reads, on_device, generations, traded = _stress(daemon, model, 12, 2)
    assert reads > 50_000
    assert reads // 20 < on_device < reads
    assert generations > 200
    assert traded > 50


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
        for seed, peer in enumerate(readers):
            peer.tell("count_reads", seconds, seed)
        until, n = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            router.ask("heat", n % model.n_layers, [(n * 7 + i) % 16 for i in range(12)], 300)
            n += 1
            time.sleep(0.1)
        found = [peer.answer(seconds + 60) for peer in readers]
        after = admin.status().models[0]
    reads, on_device, wrong = (sum(values, type(values[0])()) for values in zip(*found, strict=True))
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
        wait_until(lambda: admin.status().models[0].resident == 55, 5, lambda: str(admin.status().models))
        before = admin.status().models[0]
        for seed, peer in enumerate((solo, reader)):
            peer.tell("count_reads", seconds, seed)
        until, n, traded = time.monotonic() + seconds, 0, [0, 0]
        while time.monotonic() < until:
            for at in (0, 1):
                with suppress(Exhausted):  # slots may be busy for as long as a reader does not get to run
                    traded[at] += mover.ask("grow", 1 + (n + at) % 4, at=at)
            mover.ask("heat", n % model.n_layers, [(n * 7 + i) % 16 for i in range(8)], 300)
            time.sleep(0.05)
            for at in (0, 1):
                mover.ask("shrink", n % 2, at=at)
            n += 1
        found = [peer.answer(seconds + 60) for peer in (solo, reader)]
        after = admin.status().models[0]
        assert solo.ask("troubles") == reader.ask("troubles") == []
    assert [wrong for _, _, wrong in found] == [[], []]
    assert all(reads // 10 < on_device < reads for reads, on_device, _ in found)
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
        wait_until(lambda: admin.device().kv_bytes == 0 and len(heard) > 0, 5)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:  # upkeep looks four times a second
            assert late.wrong_experts() == 0
            assert admin.status().models[0].resident < model.n
        late.session._on_event = on_event  # type: ignore[method-assign]
        for event in heard:
            on_event(event)
        wait_until(lambda: admin.status().models[0].resident == model.n, 5, lambda: str(admin.status()))
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
