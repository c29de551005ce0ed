"""How fast a daemon on one GPU trades, shares and fills: 18 GiB of experts of 2.8 MiB in slabs of 64 MiB.

Clients are processes of their own. With STRATA_FAKE_CUDA=1 everything runs on the
stand-in with small sizes, to try the bench itself; its figures mean nothing.
"""

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench import report
from tests.bench.report import Row
from tests.helpers.cuda_peer import GIB, MIB, LargeModel, Machine
from tests.helpers.daemon import Daemon, wait_until
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.peer import Admin, Remote
from vmmd.driver import cuda_calls
from vmmd.driver.base import Slab
from vmmd.driver.cuda_calls import call, current
from vmmd.driver.cuda_vmm import CudaDriver
from vmmd.driver.host_memfd import HOST_UUID

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(900)]

GROWTH_SLABS = 6
FREE_SLABS = 12
CONFIG = """
give_back_delay_s = 0
log_level = "{}"
log_format = "json"
host_cap_bytes = {}
cap_bytes = {}
"""


@dataclass(frozen=True)
class Sizes:
    """What is big on a GPU and small in a rehearsal."""

    n_layers: int
    n_experts: int
    growths: int
    refill_slabs: int
    rest_bytes: int
    rest_s: float


FULL = Sizes(51, 128, 60, 64, 104 * GIB, 20.0)
REHEARSAL = Sizes(4, 32, 4, 4, 64 * MIB, 1.0)


@dataclass
class Bench:
    """The machine, the model's file, and how to report."""

    machine: Machine
    model: LargeModel
    sizes: Sizes
    device: str

    @property
    def is_real(self) -> bool:
        """Whether kernels run and figures mean something."""
        return self.machine.fake is None

    @property
    def all_slabs(self) -> int:
        """Slabs of the model when every expert is in a slot."""
        size = self.machine.slab_bytes
        return self.model.slabs(size) + self.model.weights_slabs(size)

    @property
    def experts_bytes(self) -> int:
        """Of the model."""
        return self.model.n * self.model.slot_bytes

    def config(self, *, homes: bool, slabs: int, log_level: str = "warning") -> str:
        """The daemon's configuration: at most so many slabs of the GPU, and homes for all experts or next to none."""
        host_slabs = self.model.slabs(self.machine.slab_bytes) + 1 if homes else 1
        host_bytes = max(host_slabs * self.machine.slab_bytes, 64 * MIB)
        return CONFIG.format(log_level, host_bytes, slabs * self.machine.slab_bytes)

    def for_16_gib(self, seconds: float) -> float:
        """A fill's duration, had the experts been 16 GiB."""
        return seconds * 16 * GIB / self.experts_bytes

    def write(self, name: str, rows: Sequence[Row]) -> None:
        """Reports rows."""
        report.write(name, self.device, report.gpu_driver(), rows)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The machine with the model's file in the page cache."""
    if os.environ.get("STRATA_FAKE_CUDA"):
        machine, sizes, device = Machine.stand_in(tmp_path_factory.mktemp("others"), gpus=2), REHEARSAL, "rehearsal"
    else:
        machine, sizes = Machine.real(), FULL
        device = cuda_calls.find_gpus(cuda_calls.bindings())[0][0].name
    with machine.model(sizes.n_layers, sizes.n_experts, durable=True) as model:
        yield Bench(machine, model, sizes, device)


@dataclass
class Trading:
    """A daemon whose GPU is full: all experts, and room that a second range holds; its client and an admin."""

    daemon: Daemon
    client: Remote
    admin: Admin


@pytest.fixture(scope="module")
def trading(bench: Bench) -> Iterator[Trading]:
    """The client has the model open, range 0 without memory, and range 1 with every free slab."""
    with ExitStack() as stack:
        lines = bench.config(homes=True, slabs=bench.all_slabs + FREE_SLABS)
        daemon = stack.enter_context(bench.machine.daemon(lines))
        client = stack.enter_context(bench.machine.client(daemon))
        client.ask("time_open", bench.model)
        client.ask("wait_for_homes", 120)
        client.ask("create")
        client.ask("create")
        _, traded, _ = client.ask("time_growth", FREE_SLABS, at=1)
        assert traded == 0
        yield Trading(daemon, client, stack.enter_context(Admin(daemon.directory)))


def wait_until_resident(admin: Admin, n: int) -> None:
    """Waits until so many experts of the only model are in slots."""
    wait_until(lambda: admin.status().models[0].resident == n, 60)


def logged(daemon: Daemon, event: str, timeout_s: float = 10) -> list[dict[str, Any]]:
    """The lines of one kind in the daemon's log, one at least."""

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("event") == event]

    wait_until(lambda: bool(lines()), timeout_s)
    return lines()


def percentile(values: Sequence[float], q: float) -> float:
    """Of a series, linear between its values."""
    return float(np.percentile(values, q))


def test_fill_without_homes_and_rest(bench: Bench) -> None:
    """Slots alone from a cached file, a kernel beside that, a kill during it; then 100 GiB of slabs at rest."""
    rest_slabs = bench.sizes.rest_bytes // bench.machine.slab_bytes
    kernel_slabs = bench.sizes.refill_slabs
    lines = bench.config(homes=False, slabs=bench.all_slabs + rest_slabs + kernel_slabs, log_level="info")
    parts = [bench.model._replace(n_layers=bench.model.n_layers - i) for i in range(4)]  # other geometries: filled anew
    rows, idle = [], []
    with ExitStack() as stack:
        daemon = stack.enter_context(bench.machine.daemon(lines))
        admin = stack.enter_context(Admin(daemon.directory))
        anonymous_before = anonymous_bytes(daemon.process.pid)
        reader = stack.enter_context(bench.machine.client(daemon))
        reader.ask("create")
        reader.ask("time_growth", kernel_slabs)

        fills, maps, losses, alone = [], [], [], 0.0
        if bench.is_real:
            alone = median_rate(reader.ask("read_rates", 1.0), 0, float("inf"))
        for i, part in enumerate(parts[:3]):
            with bench.machine.client(daemon) as opener:
                if i == 2 and bench.is_real:
                    reader.tell("read_rates", 3.0)
                    time.sleep(0.3)
                spent = opener.ask("time_open", part)
                if i == 2 and bench.is_real:
                    losses.append(100 * (1 - median_rate(reader.answer(), spent["began"], spent["ended"]) / alone))
                else:
                    fills.append((spent["ended"] - spent["began"]) * bench.model.n / part.n)
                    maps.append(spent["arena"])
        kept = admin.device().kv_bytes
        killed = bench.machine.client(daemon)
        killed.ask("create")
        killed.ask("time_growth", GROWTH_SLABS)
        killed.tell("time_open", parts[3])
        time.sleep(0.2)
        began = time.perf_counter()
        killed.process.kill()
        while not is_gone(admin, killed.pid, kept):
            assert time.perf_counter() < began + 10
        kill_ms = (time.perf_counter() - began) * 1e3
        killed.kill()
        rows += [
            Row("16 GiB of experts into slots, no homes", bench.for_16_gib(min(fills)), "s", "lower", 0.7, 0.31),
            Row("the same, first time", bench.for_16_gib(fills[0]), "s", "lower"),
            *(
                Row(f"of 18 GiB, in the daemon until {what}, opening {i + 1}", line[key], "s", "lower")
                for i, line in enumerate(logged(daemon, "model.filled")[:2])
                for key, what in (
                    ("provided_s", "slabs are made"),
                    ("slots_s", "slots are filled"),
                    ("ready_s", "ready"),
                )
            ),
            Row("in the client: importing and mapping the arena", min(maps), "s", "lower"),
            *(Row("a kernel's loss meanwhile", loss, "%", "lower", target=10, limit=7) for loss in losses),
            Row("SIGKILL while it opens a model until its slabs are free", kill_ms, "ms", "lower", target=100),
        ]

        reader.ask("create")
        reader.ask("time_growth", rest_slabs, at=1)
        wait_until_resident_settles(admin)
        device = admin.device()
        in_slabs = device.kv_bytes + device.experts_bytes + device.weights_bytes
        time.sleep(2)
        for _ in range(2):
            cpu_before, wall = cpu_seconds(daemon.process.pid), time.perf_counter()
            time.sleep(bench.sizes.rest_s / 2)
            idle.append(100 * (cpu_seconds(daemon.process.pid) - cpu_before) / (time.perf_counter() - wall))
        grown = anonymous_bytes(daemon.process.pid) - anonymous_before
        rows += [
            Row("slabs at rest", in_slabs / GIB, "GiB", "higher", target=100),
            Row("the daemon's processor time at rest, of a core", statistics.mean(idle), "%", "lower", target=1),
            Row("its anonymous memory beyond that at start", grown / MIB, "MiB", "lower", target=300),
            Row("its anonymous memory at start, CUDA's contexts included", anonymous_before / MIB, "MiB", "lower"),
        ]
    bench.write("cuda-daemon-fill", rows)


def test_fill_with_homes(bench: Bench) -> None:
    """The first opening of a model: its slots from a cached file, then the homes in host slabs."""
    rows = []
    for name in ("first", "again"):  # at first a virtual machine's memory still has to grow
        with ExitStack() as stack:
            lines = bench.config(homes=True, slabs=bench.all_slabs, log_level="info")
            daemon = stack.enter_context(bench.machine.daemon(lines))
            client = stack.enter_context(bench.machine.client(daemon))
            opened = client.ask("time_open", bench.model)
            homes_s = client.ask("wait_for_homes", 120) - opened["began"]
            (filled,), (stages,) = logged(daemon, "model.filled"), logged(daemon, "homes.filled")
            target = 4 if name == "again" else None
            opened_s = opened["ended"] - opened["began"]
            rows += [
                Row(f"{name}: 16 GiB of experts until steps can start", bench.for_16_gib(opened_s), "s", "lower"),
                Row(f"{name}: until every home is filled", bench.for_16_gib(homes_s), "s", "lower", target=target),
                *(
                    Row(f"{name}: of 18 GiB, in the daemon until {what}", value, "s", "lower")
                    for what, value in (
                        ("slabs are made", filled["provided_s"]),
                        ("slots are filled", filled["slots_s"]),
                        ("host slabs are made", filled["provided_s"] + stages["made_s"]),
                        ("homes are filled", filled["provided_s"] + stages["filled_s"]),
                        ("homes are published", filled["provided_s"] + stages["published_s"]),
                    )
                ),
                Row(f"{name}: in the client, importing and mapping the arena", opened["arena"], "s", "lower"),
            ]
    bench.write("cuda-daemon-fill-homes", rows)


@pytest.mark.parametrize("peer_access", ["auto", "never"])
def test_second_gpu(bench: Bench, peer_access: str) -> None:
    """Arena, homes and K/V of the second GPU, while the first one is current in the client; with a path and without."""
    machine, slabs = bench.machine, bench.sizes.refill_slabs
    if len(machine.uuids) < 2:
        pytest.skip("this host has one GPU; the bench needs two")
    lines = bench.config(homes=True, slabs=bench.all_slabs + FREE_SLABS) + f'peer_access = "{peer_access}"\n'
    by_slots, moves, by_free, rates, rows = [], [], [], [], []
    with machine.daemon(lines) as daemon, machine.client(daemon) as client, Admin(daemon.directory) as admin:
        client.ask("make_current", 0)
        opened = client.ask("time_open", bench.model, [machine.uuids[1]])
        homes_s = client.ask("wait_for_homes", 120) - opened["began"]
        for _ in range(2):
            client.ask("create", device=1)
        assert client.ask("time_growth", FREE_SLABS, at=1)[1] == 0
        for turn in range(bench.sizes.growths // 3 + 1):
            client.ask("route", 2000 + turn, 200)
            took_s, traded, moved = client.ask("time_growth", GROWTH_SLABS)
            assert traded == GROWTH_SLABS
            if turn:  # the first finds everything cold
                by_slots.append(took_s * 1e3)
                moves.append(moved)
            client.ask("shrink", 0)
            wait_until_resident(admin, bench.model.n)
        for turn in range(3):
            client.ask("route", turn, 200)
            assert client.ask("time_growth", slabs)[1] == slabs
            seen = client.ask("time_give_back", 0)
            rates.append(seen["experts"] * bench.model.slot_bytes / (seen["last"] - seen["first"]) / 1e9)
        left = FREE_SLABS - GROWTH_SLABS
        client.ask("shrink", left, at=1)
        for _ in range(bench.sizes.growths // 3):
            wait_until(lambda: admin.device(1).kv_bytes == left * machine.slab_bytes, 10)
            took_s, traded, _ = client.ask("time_growth", GROWTH_SLABS)
            assert traded == 0
            by_free.append(took_s * 1e3)
            client.ask("shrink", 0)
        first, second = admin.status().devices[:2]
        assert first.kv_bytes + first.experts_bytes + first.weights_bytes == 0
        assert second.experts_bytes > 0
        assert client.ask("count_reads", 0.5)[2] == []
        if bench.is_real and peer_access == "auto":
            rate = median_rate(client.ask("read_rates", 1.0, at=1), 0, float("inf"))
            rows.append(Row("a kernel of the first GPU reads the second's K/V", rate, "GB/s", "higher", limit=374))
    seconds = opened["ended"] - opened["began"]
    rows += [
        Row("16 GiB of experts into the second GPU's slots", bench.for_16_gib(seconds), "s", "lower", limit=0.31),
        Row("the same, until every home is filled", bench.for_16_gib(homes_s), "s", "lower"),
        Row("K/V there grows by 6 slabs of its arena, p50", percentile(by_slots, 50), "ms", "lower", target=10),
        Row("the same, p99", percentile(by_slots, 99), "ms", "lower", target=25),
        Row("experts moved for it, p50", percentile(moves, 50), "", "lower"),
        Row("K/V there grows by 6 free slabs, p50", percentile(by_free, 50), "ms", "lower", target=3),
        Row("refill of 4 GiB of its slots, median of 3", percentile(rates, 50), "GB/s", "higher", 47, 55),
    ]
    bench.write(f"cuda-daemon-second-gpu-peer-{peer_access}", rows)


class Bare:
    """The same growth without a daemon: copies from host slabs, imports, maps, one access, by bare calls."""

    def __init__(self, directory: str, fake: dict[str, Any] | None, slab_bytes: int, slot_bytes: int) -> None:
        if fake is not None:
            FakeCuda(**fake).install()
        self._driver = driver = CudaDriver((GROWTH_SLABS + 1) * max(slab_bytes, 64 * MIB), threads=1)
        gpu = driver.devices()[0].uuid
        self._gpu, self._cu = driver._gpus[gpu], driver._cu
        self._slab_bytes, self._slot_bytes = slab_bytes, slot_bytes
        self._homes = self._mapped([driver.create(HOST_UUID, slab_bytes) for _ in range(GROWTH_SLABS)])
        self._slots = self._mapped([driver.create(gpu, slab_bytes) for _ in range(GROWTH_SLABS)])
        self._given = [driver.create(gpu, slab_bytes) for _ in range(GROWTH_SLABS)]
        with driver._on(self._gpu):
            self._base = int(call(self._cu.cuMemAddressReserve, GROWTH_SLABS * slab_bytes, 0, 0, 0))
            self._stream = call(self._cu.cuStreamCreate, self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def _mapped(self, slabs: Sequence[Slab]) -> list[int]:
        return [self._driver._slab_place(slab).address for slab in slabs]

    def time_growth(self, moved: int) -> float:
        """Seconds that it takes with so many experts to move."""
        cu, size, slots = self._cu, self._slab_bytes, self._slab_bytes // self._slot_bytes
        places = [divmod(i % (GROWTH_SLABS * slots), slots) for i in range(moved)]
        with current(cu, self._driver._contexts[self._gpu.uuid]):
            who = cuda_calls.access(cu, [self._gpu.ordinal])
            began = time.perf_counter()
            for slab, slot in places:
                source, target = (one[slab] + slot * self._slot_bytes for one in (self._homes, self._slots))
                call(cu.cuMemcpyAsync, target, source, self._slot_bytes, self._stream)
            call(cu.cuStreamSynchronize, self._stream)
            for i, slab in enumerate(self._given):
                fd = os.dup(slab.handle.fd)
                handle = call(cu.cuMemImportFromShareableHandle, fd, cuda_calls.descriptor_type(cu))
                os.close(fd)
                call(cu.cuMemMap, self._base + i * size, size, 0, handle, 0)
                call(cu.cuMemRelease, handle)
            call(cu.cuMemSetAccess, self._base, GROWTH_SLABS * size, who, len(who))
            took_s = time.perf_counter() - began
            for i in range(GROWTH_SLABS):
                call(cu.cuMemUnmap, self._base + i * size, size)
        return took_s


def test_growth_by_slots(bench: Bench, trading: Trading) -> None:
    """K/V grows by 6 slabs that the arena gives, against the bare calls and copies that this takes."""
    kind = functools.partial(
        Bare, fake=bench.machine.fake, slab_bytes=bench.machine.slab_bytes, slot_bytes=bench.model.slot_bytes
    )
    rows = []
    with Remote(Path(), kind=kind) as bare:
        for _ in range(5):
            bare.ask("time_growth", 100)
        for redraw, heat in ((False, "heat as routed"), (True, "popular experts redrawn")):
            times, bares, moves = [], [], []
            for turn in range(bench.sizes.growths + 1):
                trading.client.ask("route", 1000 + turn, 200, redraw=redraw)
                took_s, traded, moved = trading.client.ask("time_growth", GROWTH_SLABS)
                assert traded == GROWTH_SLABS
                if turn:  # the first finds everything cold
                    times.append(took_s * 1e3)
                    moves.append(moved)
                    bares.append(bare.ask("time_growth", moved) * 1e3)
                trading.client.ask("shrink", 0)
                wait_until_resident(trading.admin, bench.model.n)
            ratios = [took / alone for took, alone in zip(times, bares, strict=True)]
            p50, p99 = (None, None) if redraw else (10, 25)
            rows += [
                Row(f"{heat}: 6 slabs of an arena, p50", percentile(times, 50), "ms", "lower", target=p50),
                Row(f"{heat}: the same, p99", percentile(times, 99), "ms", "lower", target=p99),
                Row(f"{heat}: experts moved, p50", percentile(moves, 50), "", "lower"),
                Row(f"{heat}: bare calls and copies, p50", percentile(bares, 50), "ms", "lower"),
                Row(f"{heat}: the daemon's as a multiple, p50", percentile(ratios, 50), "x", "lower", target=4),
            ]
    assert trading.client.ask("count_reads", 0.5)[2] == []
    bench.write("cuda-daemon-growth", rows)


def test_growth_by_free_slabs(bench: Bench, trading: Trading) -> None:
    """K/V grows by 6 slabs that nobody has."""
    times = []
    client, admin = trading.client, trading.admin
    client.ask("shrink", FREE_SLABS - GROWTH_SLABS, at=1)
    wait_until(lambda: admin.device().kv_bytes == (FREE_SLABS - GROWTH_SLABS) * bench.machine.slab_bytes, 10)
    for turn in range(bench.sizes.growths + 1):
        took_s, traded, _ = client.ask("time_growth", GROWTH_SLABS)
        assert traded == 0
        if turn:
            times.append(took_s * 1e3)
        client.ask("shrink", 0)
        wait_until(lambda: admin.device().kv_bytes == (FREE_SLABS - GROWTH_SLABS) * bench.machine.slab_bytes, 10)
    client.ask("time_growth", FREE_SLABS, at=1)
    rows = [
        Row("6 free slabs, p50", percentile(times, 50), "ms", "lower", target=3),
        Row("the same, p99", percentile(times, 99), "ms", "lower"),
    ]
    bench.write("cuda-daemon-free", rows)


def test_opening_a_resident_model(bench: Bench, trading: Trading) -> None:
    """A second client opens the resident model and maps all of it: arena, weights and homes."""
    times, homes, arena = [], [], []
    for _ in range(5):
        with bench.machine.client(trading.daemon) as second:
            spent = second.ask("time_open", bench.model)
            assert second.ask("count_reads", 0.2)[2] == []
        times.append((spent["ended"] - spent["began"]) * 1e3)
        homes.append(spent["homes"] * 1e3)
        arena.append(spent["arena"] * 1e3)
    rows = [
        Row("open and map 18 GiB resident on the GPU, and their homes, p50", percentile(times, 50), "ms", "lower"),
        Row(
            "the same without the mapping of the homes",
            statistics.median(t - h for t, h in zip(times, homes, strict=True)),
            "ms",
            "lower",
            target=100,
            peer=800,
        ),
        Row("of it importing and mapping the arena", percentile(arena, 50), "ms", "lower", limit=19),
        Row("importing and mapping the homes", percentile(homes, 50), "ms", "lower", limit=215),
    ]
    bench.write("cuda-daemon-open", rows)


def test_refill(bench: Bench, trading: Trading) -> None:
    """A large K/V range is given back, and 4 GiB of slots are filled from host slabs."""
    rates, waits = [], []
    slabs = bench.sizes.refill_slabs
    for turn in range(3):
        trading.client.ask("route", turn, 200)
        assert trading.client.ask("time_growth", slabs)[1] == slabs
        seen = trading.client.ask("time_give_back", 0)
        rates.append(seen["experts"] * bench.model.slot_bytes / (seen["last"] - seen["first"]) / 1e9)
        waits.append((seen["last"] - seen["began"]) * 1e3)
    rows = [
        Row("refill of 4 GiB of slots from host slabs, median of 3", percentile(rates, 50), "GB/s", "higher", 47, 55),
        Row("from ShrinkRange until every expert is in a slot", percentile(waits, 50), "ms", "lower"),
    ]
    bench.write("cuda-daemon-refill", rows)


def test_kernel_beside_a_refill(bench: Bench, trading: Trading) -> None:
    """What a client's bandwidth-bound kernel loses while the daemon fills slots from host slabs."""
    if not bench.is_real:
        pytest.skip("the stand-in has no kernels")
    slabs = bench.sizes.refill_slabs
    other = trading.client
    with bench.machine.client(trading.daemon) as reader:
        reader.ask("create")
        reader.ask("time_growth", slabs)
        wait_until_resident_settles(trading.admin)
        alone = median_rate(reader.ask("read_rates", 1.0), 0, float("inf"))
        during = []
        for _ in range(3):
            other.ask("time_growth", slabs)
            n = trading.admin.status().models[0].resident
            reader.tell("read_rates", 1.5)
            time.sleep(0.3)
            began = time.monotonic()
            other.ask("shrink", 0)
            wait_until(lambda n=n: trading.admin.status().models[0].resident > n + 18 * slabs, 20)  # type: ignore[misc]
            ended = time.monotonic()
            during.append(median_rate(reader.answer(), began, ended))
            wait_until_resident_settles(trading.admin)
    wait_until_resident(trading.admin, bench.model.n)
    loss = 100 * (1 - statistics.median(during) / alone)
    rows = [
        Row("a client's kernel reads 4 GiB, alone", alone, "GB/s", "higher", limit=4500),
        Row("its loss while slots are filled from host slabs", loss, "%", "lower", target=10, limit=7),
    ]
    bench.write("cuda-daemon-beside-refill", rows)


def wait_until_resident_settles(admin: Admin) -> None:
    """Waits until no expert has come for half a second."""
    seen = [-1]

    def settled() -> bool:
        seen.append(admin.status().models[0].resident)
        time.sleep(0.5)
        return seen[-1] == seen[-2]

    wait_until(settled, 60)


def median_rate(rates: Sequence[tuple[float, float]], began: float, ended: float) -> float:
    """Of the launches that ended between two moments."""
    within = [rate for at, rate in rates if began <= at <= ended]
    assert len(within) > 5, f"{len(within)} of {len(rates)} launches in {ended - began:.3f} s"
    return statistics.median(within)


def test_kill(bench: Bench, trading: Trading) -> None:
    """From SIGKILL of a client until the daemon has none of its slabs, at different moments."""
    rows = []
    kept_bytes = FREE_SLABS * bench.machine.slab_bytes
    trading.client.ask("shrink", FREE_SLABS - GROWTH_SLABS, at=1)
    kept_bytes -= GROWTH_SLABS * bench.machine.slab_bytes

    def hold(peer: Remote) -> None:
        peer.ask("time_open", bench.model)
        peer.ask("create")
        peer.ask("time_growth", GROWTH_SLABS)

    def while_opening(peer: Remote) -> None:
        peer.ask("create")
        peer.ask("time_growth", GROWTH_SLABS)
        peer.tell("time_open", bench.model)
        time.sleep(0.03)

    def while_growing(peer: Remote) -> None:
        hold(peer)
        peer.ask("route", 5, 200, redraw=True)
        peer.tell("time_growth", 2 * GROWTH_SLABS)
        time.sleep(0.004)

    def in_a_step(peer: Remote) -> None:
        hold(peer)
        peer.ask("begin_step")

    moments: list[tuple[str, Callable[[Remote], None]]] = [
        ("while it opens a resident model", while_opening),
        ("while its range grows by slots", while_growing),
        ("within a step", in_a_step),
    ]
    for name, prepare in moments:
        times = []
        for _ in range(4):
            peer = bench.machine.client(trading.daemon)
            prepare(peer)
            began = time.perf_counter()
            peer.process.kill()
            while not is_gone(trading.admin, peer.pid, kept_bytes):
                assert time.perf_counter() < began + 10
            times.append((time.perf_counter() - began) * 1e3)
            peer.kill()
            wait_until_resident(trading.admin, bench.model.n)
        rows.append(Row(f"SIGKILL {name} until its slabs are free, slowest", max(times), "ms", "lower", target=100))
    trading.client.ask("time_growth", FREE_SLABS, at=1)
    bench.write("cuda-daemon-kill", rows)


def is_gone(admin: Admin, pid: int, kept_bytes: int) -> bool:
    """Whether a process has no session and only others' K/V is left."""
    status = admin.status()
    device = status.devices[0]
    return (
        all(session.pid != pid for session in status.sessions)
        and device.kv_bytes == kept_bytes
        and device.revoking_bytes + device.quarantined_bytes == 0
    )


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
