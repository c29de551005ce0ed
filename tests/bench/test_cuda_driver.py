"""How fast the CUDA driver creates, shares and fills slabs of 64 MiB, with real client processes."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest

from tests.bench import report
from tests.bench.report import Row
from tests.helpers.require_gpu import require_gpu
from tests.helpers.slab_client import SlabClient
from vmmd.driver.base import Copy, DeviceInfo, FileSource, Slab, SlabSource
from vmmd.driver.cuda_vmm import CudaDriver
from vmmd.driver.host_memfd import HOST_UUID

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(600)]

MIB, GIB = 1 << 20, 1 << 30
SLAB_BYTES = 64 * MIB
FILE_BYTES = 16 * GIB
SLOT_BYTES = 2_949_120  # one expert of Qwen3-30B-A3B at about 5 bits a weight
MESSAGE_SLABS = 250  # descriptors a message may carry


@dataclass
class Bench:
    """The driver, its first GPU, and how to report."""

    driver: CudaDriver
    gpu: DeviceInfo

    def create(self, count: int, uuid: str | None = None, threads: int = 1) -> list[Slab]:
        if threads == 1:
            return [self.driver.create(uuid or self.gpu.uuid, SLAB_BYTES) for _ in range(count)]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda _: self.driver.create(uuid or self.gpu.uuid, SLAB_BYTES), range(count)))

    def destroy(self, slabs: Sequence[Slab]) -> None:
        for slab in slabs:
            self.driver.destroy(slab)

    def client(self, slabs_max: int) -> SlabClient:
        client = SlabClient("cuda")
        client.reserve(self.gpu.uuid, SLAB_BYTES, slabs_max)
        return client

    def give(self, client: SlabClient, slabs: Sequence[Slab], *, writable: bool = False) -> None:
        for first in range(0, len(slabs), MESSAGE_SLABS):
            some = slabs[first : first + MESSAGE_SLABS]
            assert client.map(self.driver, first, some, writable=writable) is None

    def write(self, name: str, rows: Sequence[Row]) -> None:
        report.write(name, self.gpu.name, report.gpu_driver(), rows)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    require_gpu()
    driver = CudaDriver(20 * GIB)
    yield Bench(driver, driver.devices()[0])
    driver.close()


@pytest.fixture(scope="module")
def cached_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An open file of 16 GiB in the page cache: STRATA_BENCH_FILE, or one that is made here."""
    if "STRATA_BENCH_FILE" in os.environ:
        fd = os.open(os.environ["STRATA_BENCH_FILE"], os.O_RDONLY)
        assert os.fstat(fd).st_size >= FILE_BYTES
        yield fd
        os.close(fd)
        return
    path = tmp_path_factory.mktemp("bench") / "model"
    block = np.random.default_rng(0).integers(0, 256, 256 * MIB, np.uint8)
    with path.open("wb") as file:
        for i in range(FILE_BYTES // block.nbytes):
            block[:8] = np.frombuffer(i.to_bytes(8, "little"), np.uint8)
            block.tofile(file)
        file.flush()
        os.fdatasync(file.fileno())
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)
    path.unlink()


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def from_file(slabs: Sequence[Slab], fd: int) -> list[Copy]:
    return [Copy(slab, 0, SLAB_BYTES, FileSource(fd, i * SLAB_BYTES)) for i, slab in enumerate(slabs)]


def test_slabs(bench: Bench) -> None:
    """What one slab costs in the daemon, and in a client that maps many at once."""
    count, made = 64, list[Slab]()
    driver = bench.driver
    create_s = seconds(lambda: made.extend(bench.create(count)))
    fds: list[int] = []
    export_s = seconds(lambda: fds.extend(driver.export(slab, writable=True) for slab in made))
    map_s = sum(seconds(lambda slab=slab: driver.fill([Copy(slab, 0, 4, SlabSource(slab, 64))])) for slab in made)  # type: ignore[misc]
    with bench.client(count) as client:
        import_s = seconds(lambda: client.ask("map", fds, index=0, writable=True))
        unmap_s = seconds(lambda: [client.ask("unmap", index=i) for i in range(count)])
    for fd in fds:
        os.close(fd)
    destroy_s = seconds(lambda: bench.destroy(made))
    bench.write(
        "cuda-slabs",
        [
            Row(name, total_s / count * 1e6, "us", "lower", limit=limit)
            for name, total_s, limit in (
                ("create and first export of a 64 MiB slab", create_s, 42),
                ("each further export", export_s, None),
                ("daemon: first map, with a copy of 4 bytes", map_s, 77),
                ("client: import, map, access, message included", import_s, 65),
                ("client: unmap, message included", unmap_s, 18),
                ("destroy", destroy_s, 38),
            )
        ],
    )


def test_import_of_18_gib(bench: Bench) -> None:
    """A second process imports and maps 18 GiB of slabs, from the first export to its last answer."""
    slabs = bench.create(18 * GIB // SLAB_BYTES)
    with bench.client(len(slabs)) as client:
        value_s = seconds(lambda: bench.give(client, slabs))
        assert client.ask("read", offset=len(slabs) * SLAB_BYTES - 4, length=4) == "00000000"
    bench.destroy(slabs)
    row = Row("export, import and map 18 GiB (288 slabs)", value_s * 1e3, "ms", "lower", target=100, limit=19, peer=800)
    bench.write("cuda-import", [row])


def test_fill(bench: Bench, cached_file: int) -> None:
    """Filling from a file in the page cache, and from host slabs."""
    driver, count = bench.driver, FILE_BYTES // SLAB_BYTES
    homes = bench.create(count, HOST_UUID, 8)  # lets a virtual machine's memory grow, before anything is timed
    bench.destroy(homes)
    slabs = bench.create(count)
    first_s = seconds(lambda: driver.fill(from_file(slabs, cached_file)))
    again_s = min(seconds(lambda: driver.fill(from_file(slabs, cached_file))) for _ in range(2))
    homes.clear()
    create_s = seconds(lambda: homes.extend(bench.create(count, HOST_UUID, 8)))
    host_s = seconds(lambda: driver.fill(from_file(homes, cached_file)))
    host_again_s = seconds(lambda: driver.fill(from_file(homes, cached_file)))
    bench.destroy(homes)
    homes.clear()

    def make_and_fill(i: int) -> Slab:
        home = driver.create(HOST_UUID, SLAB_BYTES)
        driver.fill([Copy(home, 0, SLAB_BYTES, FileSource(cached_file, i * SLAB_BYTES))])
        return home

    def make_all() -> None:
        with ThreadPoolExecutor(8) as pool:
            homes.extend(pool.map(make_and_fill, range(count)))

    def fill_both() -> None:
        with ThreadPoolExecutor(1) as pool:
            device = pool.submit(driver.fill, from_file(slabs, cached_file))
            make_all()
            device.result()

    both_s = seconds(fill_both)
    check(driver, [*slabs[::37], *homes[::37]], [*range(0, count, 37)] * 2, cached_file)

    n_slots = 4 * GIB // SLOT_BYTES
    slots_per_slab = SLAB_BYTES // SLOT_BYTES
    places = [(i // slots_per_slab, i % slots_per_slab * SLOT_BYTES) for i in range(count * slots_per_slab)]
    order = np.random.default_rng(1).permutation(len(places))
    copies = [
        Copy(slabs[places[to][0]], places[to][1], SLOT_BYTES, SlabSource(homes[places[of][0]], places[of][1]))
        for to, of in zip(order[:n_slots], order[-n_slots:], strict=True)
    ]
    refill_s = statistics.median(seconds(lambda: driver.fill(copies)) for _ in range(5))
    one_s = statistics.median(seconds(lambda: driver.fill(copies[:1])) for _ in range(20))
    for copy in copies[::97]:
        assert isinstance(copy.source, SlabSource)
        expected = driver.read(copy.source.slab, copy.source.offset_bytes, SLOT_BYTES)
        assert driver.read(copy.target, copy.offset_bytes, SLOT_BYTES) == expected
    bench.destroy([*slabs, *homes])
    bench.write(
        "cuda-fill",
        [
            Row("16 GiB of cached file to new device slabs", first_s, "s", "lower", target=0.7, limit=0.31),
            Row("the same, slabs mapped already", again_s, "s", "lower", target=0.7, limit=0.31),
            Row("16 GiB of host slabs: create, 8 threads", create_s, "s", "lower", limit=3.4),
            Row("16 GiB of cached file to new host slabs", host_s, "s", "lower", target=4 - 0.7),
            Row("the same, host slabs mapped already", host_again_s, "s", "lower"),
            Row(
                "16 GiB into device slabs and into host slabs that are created meanwhile",
                both_s,
                "s",
                "lower",
                target=4,
            ),
            Row("4 GiB of slots from host slabs", refill_s, "s", "lower", target=0.09, limit=0.078),
            Row("the same", n_slots * SLOT_BYTES / refill_s / 1e9, "GB/s", "higher", target=47, limit=55),
            Row("one slot from host slabs", one_s * 1e6, "us", "lower", limit=54),
        ],
    )


@pytest.mark.parametrize("kind", ["auto", "memfd"])
def test_host_slabs(bench: Bench, cached_file: int, kind: Literal["auto", "memfd"]) -> None:
    """What host slabs of either kind cost to make and to use, and what others feel while they are made."""
    count, rows = 4 * GIB // SLAB_BYTES, []
    driver = bench.driver if kind == "auto" else CudaDriver(20 * GIB, host_slabs="memfd")
    one = Bench(driver, bench.gpu)
    one.destroy(one.create(4 * count, HOST_UUID, 8))  # lets a virtual machine's memory grow
    for threads in (1, 2, 4, 8):
        homes: list[Slab] = []
        took_s = seconds(lambda homes=homes, n=threads: homes.extend(one.create(count, HOST_UUID, n)))  # type: ignore[misc]
        rows.append(Row(f"made and mapped, {threads} threads", took_s / 4, "s/GiB", "lower"))
        one.destroy(homes)

    slabs = one.create(count)
    alone_s = seconds(lambda: driver.fill(from_file(slabs, cached_file)))
    for threads in (2, 4):
        making = ThreadPoolExecutor(threads)
        with one.client(6) as client:
            began = time.perf_counter()
            ends: list[float] = []
            made = [making.submit(driver.create, HOST_UUID, SLAB_BYTES) for _ in range(2 * count)]
            for future in made:
                future.add_done_callback(lambda _, ends=ends: ends.append(time.perf_counter()))  # type: ignore[misc]
            fresh = one.create(count)
            beside_s = seconds(lambda fresh=fresh: driver.fill(from_file(fresh, cached_file)))  # type: ignore[misc]
            growths = []
            while not all(future.done() for future in made) and len(growths) < 50:
                start = time.perf_counter()
                few = one.create(6)
                one.give(client, few, writable=True)
                growths.append((time.perf_counter() - start) * 1e3)
                for i in range(6):
                    client.ask("unmap", index=i)
                one.destroy(few)
            homes = [future.result() for future in made]
            rows += [
                Row(f"8 GiB made by {threads} threads beside others' work", max(ends) - began, "s", "lower"),
                Row(f"meanwhile 4 GiB of file to new slots (alone {alone_s:.3f} s)", beside_s, "s", "lower"),
                Row("meanwhile a growth by 6 new slabs, median", statistics.median(growths or [0.0]), "ms", "lower"),
                Row("the same, slowest", max(growths, default=0.0), "ms", "lower"),
            ]
        making.shutdown()
        one.destroy(fresh)
        one.destroy(homes)

    homes = one.create(count, HOST_UUID, 4)
    file_s = seconds(lambda: driver.fill(from_file(homes, cached_file)))
    copies = [Copy(slab, 0, SLAB_BYTES, SlabSource(home, 0)) for slab, home in zip(slabs, homes, strict=True)]
    slots_s = statistics.median(seconds(lambda: driver.fill(copies)) for _ in range(3))
    with SlabClient("cuda") as client:
        client.reserve(bench.gpu.uuid, SLAB_BYTES, count, options={"host": True})
        map_s = seconds(lambda: one.give(client, homes))
        rate = client.ask("kernel", name="read_gb_per_s", offset=0, args=[count * SLAB_BYTES, 0.5])
        assert isinstance(rate, float), rate
    rows += [
        Row("4 GiB of cached file into them", 4 * GIB / file_s / 1e9, "GB/s", "higher", limit=55),
        Row("from them into slots", 4 * GIB / slots_s / 1e9, "GB/s", "higher", limit=55),
        Row("a client imports and maps them", map_s / 4 * 1e3, "ms/GiB", "lower", limit=12),
        Row("its kernel reads them", rate, "GB/s", "higher", limit=51),
    ]
    check(driver, homes[::37], [*range(0, count, 37)], cached_file)
    one.destroy([*slabs, *homes])
    if driver is not bench.driver:
        driver.close()
    bench.write(f"cuda-host-slabs-{kind}", rows)


def check(driver: CudaDriver, slabs: Sequence[Slab], indexes: Sequence[int], fd: int) -> None:
    for slab, index in zip(slabs, indexes, strict=True):
        assert driver.read(slab, 0, SLAB_BYTES) == os.pread(fd, SLAB_BYTES, index * SLAB_BYTES)


def test_growth(bench: Bench) -> None:
    """A client's range grows by 6 new slabs: created, exported, imported, mapped."""
    times = []
    with bench.client(6) as client:
        for _ in range(20):
            start = time.perf_counter()
            slabs = bench.create(6)
            bench.give(client, slabs, writable=True)
            times.append(time.perf_counter() - start)
            for i in range(6):
                client.ask("unmap", index=i)
            bench.destroy(slabs)
    bench.write(
        "cuda-growth",
        [
            Row("growth by 6 new slabs of 64 MiB, median", statistics.median(times) * 1e3, "ms", "lower", target=3),
            Row("growth by 6 new slabs of 64 MiB, slowest of 20", max(times) * 1e3, "ms", "lower"),
        ],
    )


def test_fill_beside_a_kernel(bench: Bench, cached_file: int) -> None:
    """What a bandwidth-bound kernel of a client loses while the daemon fills."""
    driver = bench.driver
    slabs, homes = bench.create(4 * GIB // SLAB_BYTES), bench.create(GIB // SLAB_BYTES, HOST_UUID, 8)
    targets = bench.create(4 * GIB // SLAB_BYTES)
    driver.fill(from_file(homes, cached_file))
    from_host = [Copy(target, 0, SLAB_BYTES, SlabSource(homes[i % len(homes)], 0)) for i, target in enumerate(targets)]
    work: dict[str, list[Copy]] = {"a file": from_file(targets, cached_file), "host slabs": from_host}
    rows = []
    with bench.client(len(slabs)) as client:
        bench.give(client, slabs)

        def rate() -> float:
            value = client.ask("kernel", name="read_gb_per_s", offset=0, args=[len(slabs) * SLAB_BYTES, 1.0])
            assert isinstance(value, float), value
            return value

        rate()
        alone = rate()
        rows.append(Row("a client's kernel reads, alone", alone, "GB/s", "higher", limit=4500))
        for source, copies in work.items():
            done = threading.Event()
            filled = 0
            with ThreadPoolExecutor(1) as pool:
                kernel = pool.submit(rate)
                kernel.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
                start = time.perf_counter()
                while not done.is_set():
                    driver.fill(copies)
                    filled += len(copies) * SLAB_BYTES
                fill_rate = filled / (time.perf_counter() - start) / 1e9
                beside = kernel.result()
            loss = 100 * (1 - beside / alone)
            rows.append(Row(f"its loss while the daemon fills from {source}", loss, "%", "lower", target=10, limit=7))
            rows.append(Row(f"the fill from {source} meanwhile", fill_rate, "GB/s", "higher", limit=55))
    bench.destroy([*slabs, *homes, *targets])
    bench.write("cuda-beside-kernel", rows)


def test_killed_client(bench: Bench) -> None:
    """From SIGKILL of a client that alone holds 4 GiB until the driver shows them free."""
    driver, times = bench.driver, []
    count = 4 * GIB // SLAB_BYTES
    for _ in range(3):
        slabs = bench.create(count)
        with bench.client(count) as client:
            bench.give(client, slabs, writable=True)
            bench.destroy(slabs)
            held = driver.memory(bench.gpu.uuid).free_bytes
            start = time.perf_counter()
            client.process.kill()
            while driver.memory(bench.gpu.uuid).free_bytes < held + count * SLAB_BYTES:
                assert time.perf_counter() < start + 10
                time.sleep(0.0005)
            times.append(time.perf_counter() - start)
    row = Row("SIGKILL of a client until 4 GiB are free, slowest of 3", max(times) * 1e3, "ms", "lower", target=100)
    bench.write("cuda-killed-client", [row])
