"""What is CUDA's own in the driver, on a stand-in: undo at every call, access, dead contexts, old bytes, memfds."""

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.fake_cuda import MIB, PAGE_BYTES, CUresult, FakeCuda, gpu_uuid
from vmmd.driver import cuda_calls, cuda_vmm
from vmmd.driver.base import Copy, FileSource, ShortRead, Slab, SlabSource
from vmmd.driver.cuda_mapper import CudaMapper
from vmmd.driver.cuda_vmm import CudaDriver, available
from vmmd.driver.host_memfd import HOST_UUID
from vmmd.driver.runs import Pieces, from_files, from_slabs
from vmmd.errors import DriverError, Exhausted, InvalidRequest, NoDevice, NotFound

FIRST, SECOND = gpu_uuid(0), gpu_uuid(1)
DEVICE, HOST_NUMA = 1, 2  # location types of the stand-in
READ, READ_WRITE = 1, 2


@pytest.fixture(autouse=True)
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_vmm, "FRESH_CHECK_BYTES", 1)


class Stand:
    """Installs stand-ins in place of the bindings; `fake` is the one that is there now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.fake = self.use()

    def use(self, **options: Any) -> FakeCuda:
        self.fake = FakeCuda(**options)
        self._monkeypatch.setitem(sys.modules, "cuda.bindings.driver", self.fake.module)
        return self.fake


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """Two GPUs that do not exist; whatever happens, no context stays current and no descriptor open."""
    gc.collect()  # what processes of other tests had open here
    before = descriptors()
    stand = Stand(monkeypatch)
    yield stand
    assert not stand.fake._stack()
    assert descriptors() <= before  # a thread of another test may close something meanwhile


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def make_driver(**options: Any) -> CudaDriver:
    return CudaDriver(64 * MIB, threads=2, chunk_bytes=MIB, **options)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * PAGE_BYTES))
    with path.open("rb") as opened:
        yield opened.fileno()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bindings, what is missing is their package, and its extra."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    (missing,) = available()
    assert "cuda-bindings" in missing and "strata-vmm[cuda]" in missing
    with pytest.raises(NoDevice, match="cuda-bindings"):
        CudaDriver(0)


def test_missing_gpu_is_named(stand: Stand) -> None:
    """Without a GPU, what is missing is the GPU, with the driver's own word; with one, nothing is."""
    assert available() == []
    stand.use(gpus=0)
    (missing,) = available()
    assert "GPU" in missing and "CUDA_ERROR_NO_DEVICE" in missing


def test_missing_library_is_named(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libcuda, what is missing is that."""

    def not_found(flags: int) -> None:
        raise RuntimeError("not found")

    monkeypatch.setattr(stand.fake.module, "cuInit", not_found)
    assert available() == ["the NVIDIA driver's libcuda.so.1"]


def test_missing_feature_is_named(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that cannot export descriptors is left out, by the feature's name."""
    monkeypatch.setattr(stand.fake.module, "cuDeviceGetAttribute", lambda code, device: (0, int(code != 2)))
    assert available() == [f"memory export as POSIX descriptors on {uuid}" for uuid in (FIRST, SECOND)]
    with pytest.raises(NoDevice, match="POSIX descriptors"):
        make_driver()


@pytest.mark.parametrize(
    "function", ["cuDeviceGet", "cuDeviceGetUuid", "cuDeviceGetName", "cuMemGetAllocationGranularity"]
)
def test_gpu_that_does_not_answer_is_left_out(stand: Stand, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """A GPU that fails is missing with its reason; the others are used, and their slabs are not opened to it."""
    fake = stand.fake
    plain = getattr(fake.module, function)

    def second_fails(*args: Any) -> Any:
        ordinal = args[0].location.id if function == "cuMemGetAllocationGranularity" else args[-1]
        return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,) if ordinal == 1 else plain(*args)

    second_fails.__name__ = function
    monkeypatch.setattr(fake.module, function, second_fails)
    gpus, (missing,) = cuda_calls.find_gpus(fake.module)
    assert [(gpu.uuid, gpu.reached_by) for gpu in gpus] == [(FIRST, frozenset())]
    assert f"{function} failed with CUDA_ERROR_ILLEGAL_ADDRESS" in missing
    assert missing.endswith("on GPU 1" if function in ("cuDeviceGet", "cuDeviceGetUuid") else f"on {SECOND}")
    driver = make_driver()
    assert [device.uuid for device in driver.devices()] == [FIRST, HOST_UUID]
    driver.close()


def test_options_are_checked(stand: Stand) -> None:
    """An option that cannot be is refused before anything is made."""
    for make in (make_driver, lambda **options: CudaMapper(FIRST, **options)):
        with pytest.raises(InvalidRequest, match="sometimes"):
            make(peer_access="sometimes")


def test_start_undoes_at_every_call(stand: Stand) -> None:
    """Whichever call fails at start, and whenever, nothing is left behind."""
    fake = stand.fake
    make_driver().close()
    nothing = fake.live()
    counts = dict(fake.calls)
    assert not any(nothing.values())
    undo = {
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
        "cuMemFreeHost",
        "cuStreamDestroy",
        "cuDevicePrimaryCtxRelease",
        "cuCtxPopCurrent",
        "cuCtxPushCurrent",
    }
    for function in counts.keys() - undo:
        for n in {1, 2, counts[function]}:
            if n > counts[function]:
                continue
            fake.fail_at(function, n, "CUDA_ERROR_INVALID_VALUE")
            try:
                driver = make_driver()
            except (DriverError, NoDevice) as error:
                assert isinstance(error, NoDevice) or (error.call, error.code) == (function, 1)
            else:  # without the second GPU, without a path to it, or with memfds for the host's memory
                infos, slab = driver.devices(), driver.create(HOST_UUID, PAGE_BYTES)
                without_path = not all(gpu.reached_by for gpu in driver._gpus.values())
                assert len(infos) == 2 or without_path or slab.handle.memfd is not None
                fake.heal()
                driver.close()
            fake.heal()
            assert fake.live() == nothing, (function, n)


@pytest.mark.parametrize(
    ("uuid", "function"),
    [
        *(
            (uuid, function)
            for uuid in (SECOND, HOST_UUID)
            for function in ("cuMemCreate", "cuMemExportToShareableHandle")
        ),
        *((HOST_UUID, function) for function in ("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")),
    ],
)
def test_create_undoes(stand: Stand, uuid: str, function: str) -> None:
    """A slab that could not be made leaves nothing and is not charged; the error has call, code and name."""
    fake = stand.fake
    driver = make_driver()
    before, memory = fake.live(), driver.memory(uuid)
    fake.fail_at(function, 1, "CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(DriverError) as caught:
        driver.create(uuid, PAGE_BYTES)
    assert (caught.value.call, caught.value.code, caught.value.name) == (function, 801, "CUDA_ERROR_NOT_SUPPORTED")
    assert (fake.live(), driver.memory(uuid)) == (before, memory)
    driver.close()


@pytest.mark.parametrize("function", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_map_for_a_fill_undoes(stand: Stand, file: int, function: str) -> None:
    """A GPU's slab that could not be mapped for a fill is as before, and the next fill maps it."""
    fake = stand.fake
    driver = make_driver()
    slab = driver.create(SECOND, PAGE_BYTES)
    before = fake.live()
    fake.fail_at(function, 1, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match=function):
        driver.fill([Copy(slab, 0, 8, FileSource(file, 0))])
    assert fake.live() == before
    fake.heal()
    driver.fill([Copy(slab, 0, 8, FileSource(file, 0))])
    assert driver.read(slab, 0, 8) == os.pread(file, 8, 0)
    driver.close()


class Filling:
    """A driver with a few slabs on every device, and what their bytes should be."""

    def __init__(self, file: int, **options: Any) -> None:
        self.driver = make_driver(**options)
        self.file = file
        self.slabs = [self.driver.create(uuid, PAGE_BYTES) for uuid in (FIRST, SECOND, HOST_UUID, FIRST)]
        self.expected = [bytearray(PAGE_BYTES) for _ in self.slabs]

    def fill(self, copies: list[Copy]) -> None:
        for copy in (one.row(i) for one in copies for i in range(one.rows)):
            at, end, source = copy.offset_bytes, copy.offset_bytes + copy.length_bytes, copy.source
            if isinstance(source, FileSource):
                data = os.pread(source.fd, copy.length_bytes, source.offset_bytes)
            else:
                old = self.expected[self.slabs.index(source.slab)]
                data = bytes(old[source.offset_bytes : source.offset_bytes + copy.length_bytes])
            self.expected[self.slabs.index(copy.target)][at:end] = data
        self.driver.fill(copies)

    def check(self) -> None:
        for slab, data in zip(self.slabs, self.expected, strict=True):
            assert self.driver.read(slab, 0, PAGE_BYTES) == data


def runs(generator: random.Random, fds: list[int], slabs: list[Slab]) -> list[Copy]:
    """Runs of copies from files with gaps, other lengths, other files and overlaps in the source; no target twice."""
    copies = []
    for slab in slabs:
        at = generator.randrange(100)
        while at < PAGE_BYTES:
            length = generator.choice([1, 7, 1000, 4096, 33_333, 100_000, 300_000, 600_000])
            slot = length + generator.choice([0, 0, 5, length, 2 * length + 1])
            fd, source = generator.choice(fds), generator.randrange(PAGE_BYTES)
            for _ in range(generator.randrange(1, 20)):
                if generator.random() < 0.1:
                    at += generator.randrange(9)  # a gap in the target
                if generator.random() < 0.1:
                    source = max(0, source + generator.randrange(-9, 9))  # a gap or an overlap in the source
                short = generator.randrange(1, length + 1) if generator.random() < 0.1 else length
                if at + slot > PAGE_BYTES or source + short > 2 * PAGE_BYTES:
                    break
                copies.append(
                    Copy(slab, at, short, FileSource(generator.choice(fds) if short != length else fd, source))
                )
                at, source = at + slot, source + short
            at += slot
    return copies


def merged(copies: list[Copy]) -> list[Copy]:
    """The same as rows: of files in their order, then of slabs as they come."""
    targets = list(dict.fromkeys(copy.target for copy in copies))
    found = []
    for kind, make in ((FileSource, from_files), (SlabSource, from_slabs)):
        some = [copy for copy in copies if isinstance(copy.source, kind)]
        sources = list(dict.fromkeys(copy.source[0] for copy in some))
        columns = [
            [0 for _ in some],
            [targets.index(copy.target) for copy in some],
            [copy.offset_bytes for copy in some],
            [sources.index(copy.source[0]) for copy in some],
            [copy.source.offset_bytes for copy in some],
            [copy.length_bytes for copy in some],
        ]
        found += make(targets, sources, Pieces(*np.array(columns, np.int64)))[0]  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("seed", range(12))
def test_merged_fills_put_every_byte_in_its_place(stand: Stand, file: int, tmp_path: Path, seed: int) -> None:
    """Runs in any order leave the bytes that one copy after the other leaves, in file order and in none."""
    stand.use(peers=seed % 2 == 0)
    generator = random.Random(seed)
    path = tmp_path / "other"
    path.write_bytes(generator.randbytes(2 * PAGE_BYTES))
    with path.open("rb") as other:
        filling = Filling(file, host_slabs="memfd" if seed % 3 == 0 else "auto")
        for _ in range(2):
            copies = runs(generator, [file, other.fileno()], filling.slabs)
            if generator.random() < 0.7:
                generator.shuffle(copies)
            filling.fill(merged(copies) if generator.random() < 0.8 else copies)
            filling.check()
    first, second, home, third = filling.slabs
    length, slot = generator.randrange(1, 5000), generator.randrange(5000, 9000)
    for target, source in ((first, home), (second, first), (home, second), (third, first), (first, first)):
        n = PAGE_BYTES // 2 // slot
        moves = [
            Copy(target, i * slot, length, SlabSource(source, PAGE_BYTES // 2 + i * 7000)) for i in range(min(n, 140))
        ]
        filling.fill(moves if target is source else merged(moves))
        filling.check()
    filling.driver.close()


def test_moves_within_a_slab_keep_their_order(stand: Stand, file: int) -> None:
    """A copy between slabs sees what those before it in the same fill have written."""
    filling = Filling(file)
    first = filling.slabs[0]
    filling.fill([Copy(first, 0, PAGE_BYTES, FileSource(file, 0))])
    filling.fill([Copy(first, 8 + i, 8, SlabSource(first, i)) for i in range(0, 800, 8)])
    filling.check()
    filling.driver.close()


@pytest.mark.parametrize("uuid", [FIRST, HOST_UUID])
def test_rows_take_few_calls(stand: Stand, file: int, uuid: str) -> None:
    """Experts that lie back to back in a file and slot by slot in a slab are moved several at a time."""
    fake = stand.fake
    driver = make_driver()
    slab, other = driver.create(uuid, 2 * PAGE_BYTES), driver.create(SECOND, 2 * PAGE_BYTES)
    length, slot, slots = 60_000, 181_000, 23  # 17 rows a buffer of 1 MiB
    copies = [
        Copy(slab, i * slot + m * length, length, FileSource(file, (m * slots + i) * length))
        for i in range(slots)
        for m in range(3)
    ]
    driver.fill([Copy(slab, 0, 8, FileSource(file, 0))])
    before = fake.calls.copy()
    driver.fill(merged(copies))
    calls = fake.calls - before
    assert calls.pop("cuMemcpy2DAsync") == 3 * 2  # of 17 and 6 rows
    assert calls.pop("cuStreamSynchronize") == 6
    assert set(calls) == {"cuCtxPushCurrent", "cuCtxPopCurrent"} and calls.total() <= 2 * 2  # one a thread
    for i in range(slots):
        for m in range(3):
            data = os.pread(file, length, (m * slots + i) * length)
            assert driver.read(slab, i * slot + m * length, length) == data

    before = fake.calls.copy()
    driver.fill([Copy(other, 0, length, SlabSource(slab, length), slots, slot, slot)])
    calls = fake.calls - before
    assert calls["cuMemcpy2DAsync"] == (uuid == HOST_UUID)
    assert calls["cuMemcpyAsync"] == (0 if uuid == HOST_UUID else slots)
    assert driver.read(other, 22 * slot, length) == os.pread(file, length, (slots + 22) * length)
    driver.close()


def test_errors_of_rows(stand: Stand, file: int) -> None:
    """A file that ends within rows, a file that cannot be read, and a copy that fails, end the fill with their name."""
    fake = stand.fake
    driver = make_driver()
    slab, home = driver.create(FIRST, PAGE_BYTES), driver.create(HOST_UUID, PAGE_BYTES)

    def rows(fd: int, start: int) -> list[Copy]:
        return [Copy(slab, 0, 4000, FileSource(fd, start), 300, 5000, 4000)]

    with pytest.raises(ShortRead):
        driver.fill(rows(file, 2 * PAGE_BYTES - 900_001))
    with pytest.raises(OSError):
        driver.fill(rows(-1, 0))
    for copies in (rows(file, 0), [Copy(slab, 0, 40, SlabSource(home, 0), 9, 50, 60)]):
        fake.fail_at("cuMemcpy2DAsync", 1, "CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(DriverError) as caught:
            driver.fill(copies)
        assert (caught.value.call, caught.value.name) == ("cuMemcpy2DAsync", "CUDA_ERROR_INVALID_VALUE")
        fake.heal()
    driver.fill(rows(file, 0))
    assert driver.read(slab, 299 * 5000, 4000) == os.pread(file, 4000, 299 * 4000)
    driver.close()


def test_each_gpu_writes_its_own_slabs(stand: Stand, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that goes from one GPU's chunks to another's changes contexts: without a path it has to."""
    fake = stand.use(peers=False)
    driver = make_driver()
    slabs = [driver.create(uuid, PAGE_BYTES) for uuid in (FIRST, SECOND) * 3]
    writers = []
    copy = fake.module.cuMemcpyHtoDAsync

    def watched(target: int, *args: Any) -> Any:
        writers.append((target, fake._stack()[-1]))
        return copy(target, *args)

    monkeypatch.setattr(fake.module, "cuMemcpyHtoDAsync", watched)
    driver.fill([Copy(slab, 0, PAGE_BYTES, FileSource(file, 0)) for slab in slabs])
    owner = {slab.handle.address + i * MIB: slab.handle.gpu.ordinal for slab in slabs for i in range(2)}
    assert dict(writers) == owner
    driver.close()


def test_failed_reader_is_the_one_named(stand: Stand, file: int) -> None:
    """Without a path between two GPUs, the one whose context died is named, and the other is not marked."""
    fake = stand.use(peers=False)
    driver = make_driver()
    slab, other = driver.create(FIRST, PAGE_BYTES), driver.create(SECOND, PAGE_BYTES)
    fake.fail_at("cuMemcpyDtoHAsync", 1, "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match=FIRST):
        driver.fill([Copy(other, i * MIB, 8, SlabSource(slab, 0)) for i in range(2)])
    assert driver.failed_devices() == [FIRST]
    fake.heal()
    driver.close()


def test_fill_that_fails_leaves_nothing_under_way(stand: Stand, file: int) -> None:
    """A copy that fails ends the fill with its error; the buffers go on working."""
    fake = stand.fake
    driver = make_driver()
    home, slab, other = (driver.create(uuid, PAGE_BYTES) for uuid in (HOST_UUID, FIRST, FIRST))
    copies = [
        Copy(slab, 0, PAGE_BYTES, FileSource(file, 0)),
        Copy(home, 0, PAGE_BYTES, FileSource(file, 0)),
        Copy(other, 0, 512, SlabSource(home, 0)),
    ]
    copying = "cuMemcpyHtoDAsync", "cuMemcpyAsync", "cuStreamSynchronize"
    for function in (*copying, "cuEventCreate", "cuEventRecord", "cuEventSynchronize"):
        fake.fail_at(function, 1, "CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(DriverError, match=function):
            driver.fill(copies)
        fake.heal()
    driver.fill(copies)
    assert driver.read(slab, 0, PAGE_BYTES) == os.pread(file, PAGE_BYTES, 0)
    assert fake.live()["pinned"] == 2
    driver.close()


def test_steady_state_allocates_nothing(stand: Stand, file: int) -> None:
    """Filling a mapped slab again makes no buffer, stream, address or mapping."""
    fake = stand.fake
    driver = make_driver()
    slab = driver.create(FIRST, PAGE_BYTES)
    copies = [Copy(slab, 0, PAGE_BYTES, FileSource(file, 0))]
    driver.fill(copies)
    before = {name: n for name, n in fake.calls.items() if "Sync" not in name and "Ctx" not in name}
    driver.fill(copies)
    after = {name: n for name, n in fake.calls.items() if "Sync" not in name and "Ctx" not in name}
    assert {name for name in after if after[name] != before[name]} == {"cuMemcpyHtoDAsync"}
    driver.close()


def test_no_memory_is_named(stand: Stand) -> None:
    """CUDA's own failure for lack of memory is Exhausted, with what was asked and what is free."""
    driver = make_driver()
    slab = driver.create(FIRST, 254 * MIB)
    with pytest.raises(Exhausted) as caught:
        driver.create(FIRST, 4 * MIB)
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (4 * MIB, 2 * MIB)
    driver.create(SECOND, 4 * MIB)
    driver.destroy(slab)
    driver.create(FIRST, 4 * MIB)
    driver.close()


@pytest.mark.parametrize(
    ("peers", "peer_access", "expected"), [(True, "auto", [0, 1]), (True, "never", [0]), (False, "auto", [0])]
)
def test_access_of_other_gpus(stand: Stand, file: int, peers: bool, peer_access: str, expected: list[int]) -> None:
    """Others may touch a slab only where a path exists and it is wanted; bytes reach it all the same."""
    fake = stand.use(peers=peers)
    driver = make_driver(peer_access=peer_access)
    others = {FIRST: {SECOND}, SECOND: {FIRST}} if len(expected) > 1 else {}
    assert {info.uuid: set(info.reached_by) for info in driver.devices() if info.reached_by} == others
    assert [info.bandwidth_bytes_per_s for info in driver.devices()] == [4_916_736_000_000] * 2 + [0]
    slabs = [driver.create(uuid, PAGE_BYTES) for uuid in (FIRST, SECOND)]
    driver.fill([Copy(slabs[0], 0, PAGE_BYTES, FileSource(file, 0))])
    access = fake.access[slabs[0].handle.address]
    assert sorted(number for kind, number, _ in access if kind == DEVICE) == expected
    driver.fill([Copy(slabs[1], 64, MIB, SlabSource(slabs[0], 100))])
    assert driver.read(slabs[1], 64, MIB) == os.pread(file, MIB, 100)

    mappers = [CudaMapper(uuid, peer_access=peer_access) for uuid in (FIRST, SECOND)]  # type: ignore[arg-type]
    reservation = mappers[0].reserve(PAGE_BYTES, 1)
    reservation.map(0, [driver.export(slabs[0], writable=False)], writable=False)
    access = fake.access[reservation.view()]
    assert sorted(number for _, number, _ in access) == expected and {flags for _, _, flags in access} == {READ}
    reservation.close()
    driver.close()


def test_dead_context_is_named(stand: Stand, file: int) -> None:
    """A sticky error names the device and marks it failed; the other devices go on."""
    fake = stand.fake
    driver = make_driver()
    slab, other = driver.create(FIRST, PAGE_BYTES), driver.create(SECOND, PAGE_BYTES)
    assert driver.failed_devices() == []
    fake.fail_at("cuMemcpyHtoDAsync", 1, "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DriverError, match=FIRST) as caught:
        driver.fill([Copy(slab, 0, 8, FileSource(file, 0))])
    assert (caught.value.call, caught.value.code) == ("cuMemcpyHtoDAsync", 700)
    assert driver.failed_devices() == [FIRST]
    fake.heal()
    driver.fill([Copy(other, 0, 8, FileSource(file, 0))])
    fake.fail_at("cuCtxPushCurrent", 1, "CUDA_ERROR_ILLEGAL_ADDRESS")
    driver.destroy(slab)
    fake.heal()
    driver.close()


@pytest.mark.parametrize("host_slabs", ["auto", "memfd"])
@pytest.mark.parametrize("dead", [0, 1])
def test_host_memory_outlives_a_gpu(stand: Stand, file: int, host_slabs: str, dead: int) -> None:
    """Where one GPU's context has died, host slabs are made, filled and read through the other."""
    fake = stand.fake
    driver = make_driver(host_slabs=host_slabs)
    lost, kept = (driver.create(uuid, PAGE_BYTES) for uuid in ((FIRST, SECOND) if dead == 0 else (SECOND, FIRST)))
    before = [driver.create(HOST_UUID, PAGE_BYTES) for _ in range(2)]
    driver.fill([Copy(slab, 0, 4096, FileSource(file, 0)) for slab in (*before, kept)])
    fake.dead.add(dead)
    with pytest.raises(DriverError, match="is dead"):
        driver.fill([Copy(lost, 0, 4096, FileSource(file, 0))])
    homes = [*before, *(driver.create(HOST_UUID, PAGE_BYTES) for _ in range(2))]
    driver.fill([Copy(slab, 0, 4096, FileSource(file, 9)) for slab in homes])
    driver.fill([Copy(kept, 0, 4096, SlabSource(slab, 1)) for slab in homes])
    assert driver.read(homes[-1], 0, 4096) == os.pread(file, 4096, 9)
    assert driver.read(kept, 0, 4095) == os.pread(file, 4095, 10)
    assert driver.failed_devices() == [(FIRST, SECOND)[dead]]
    fake.dead.clear()
    driver.close()


@pytest.mark.parametrize("host_memory", [True, False])
def test_old_bytes_are_cleared(stand: Stand, host_memory: bool) -> None:
    """Where new slabs show old bytes, every slab is cleared when it is created."""
    stand.use(dirty=True, host_memory=host_memory)
    driver = make_driver()
    dirty = [FIRST, SECOND, HOST_UUID] if host_memory else [FIRST, SECOND]
    assert driver.check_fresh_slabs() == dirty
    for device in driver.devices():
        slab = driver.create(device.uuid, PAGE_BYTES)
        assert not any(driver.read(slab, 0, PAGE_BYTES))
    driver.close()


def test_no_room_for_the_check_means_clearing(stand: Stand) -> None:
    """A device that is full at start is not trusted."""
    stand.use(total_bytes=0)
    driver = make_driver()
    assert driver.check_fresh_slabs() == [FIRST, SECOND]
    driver.close()


@pytest.mark.parametrize("n", range(1, 4))
@pytest.mark.parametrize("function", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_client_map_undoes(stand: Stand, function: str, n: int) -> None:
    """Mapping several slabs is all or none, whichever call fails, and closes every descriptor."""
    fake = stand.fake
    driver = make_driver()
    slabs = [driver.create(FIRST, PAGE_BYTES) for _ in range(3)]
    reservation = CudaMapper(FIRST).reserve(PAGE_BYTES, 4)
    before, open_before = fake.live(), descriptors()
    if function == "cuMemSetAccess":
        n = 1
    fake.fail_at(function, n, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match=function):
        reservation.map(1, export(driver, slabs), writable=True)
    assert (fake.live(), descriptors()) == (before, open_before)
    assert not any(reservation.is_mapped(i) for i in range(4))
    fake.heal()
    calls = fake.calls["cuMemSetAccess"]
    reservation.map(1, export(driver, slabs), writable=True)
    assert fake.calls["cuMemSetAccess"] == calls + 1
    reservation.close()
    driver.close()


def export(driver: CudaDriver, slabs: list[Slab], *, writable: bool = True) -> list[int]:
    return [driver.export(slab, writable=writable) for slab in slabs]


def test_wrong_device_is_refused(stand: Stand) -> None:
    """A range takes slabs of its own device alone, and an unknown GPU is not found."""
    driver = make_driver()
    for uuid, options in ((FIRST, {}), (FIRST, {"host": True})):
        reservation = CudaMapper(uuid, **options).reserve(PAGE_BYTES, 1)
        with pytest.raises(InvalidRequest, match="is no slab of"):
            reservation.map(0, export(driver, [driver.create(SECOND, PAGE_BYTES)]), writable=True)
        reservation.close()
    with pytest.raises(NotFound, match=r"GPU-none.*CUDA_VISIBLE_DEVICES"):
        CudaMapper("GPU-none")
    driver.close()


@pytest.mark.parametrize(("host_access", "kinds"), [(False, {DEVICE}), (True, {DEVICE, HOST_NUMA})])
def test_client_maps_host_slabs(stand: Stand, host_access: bool, kinds: set[int]) -> None:
    """Host slabs are open to the GPUs, and to the processor where that is asked for."""
    fake = stand.fake
    driver = make_driver()
    reservation = CudaMapper(FIRST, host=True, host_access=host_access).reserve(PAGE_BYTES, 2)
    reservation.map(0, export(driver, [driver.create(HOST_UUID, PAGE_BYTES)]), writable=True)
    assert {kind for kind, _, _ in fake.access[reservation.view()]} == kinds
    reservation.close()
    reservation.close()
    driver.close()


@pytest.mark.parametrize("chosen", ["asked for", "refused"])
def test_host_slabs_as_memfds(stand: Stand, file: int, chosen: str) -> None:
    """Where host allocations are refused, or memfds asked for, host slabs are registered memfds on both sides."""
    fake = stand.use(host_memory=chosen != "refused")
    driver = make_driver(host_slabs="memfd" if chosen == "asked for" else "auto")
    home, slab = driver.create(HOST_UUID, PAGE_BYTES), driver.create(FIRST, PAGE_BYTES)
    driver.fill([Copy(home, 0, PAGE_BYTES, FileSource(file, 7))])
    driver.fill([Copy(slab, 0, PAGE_BYTES, SlabSource(home, 0))])
    assert driver.read(slab, 0, PAGE_BYTES) == os.pread(file, PAGE_BYTES, 7)
    assert driver.held_elsewhere(home) is None
    registered = fake.live()["registered"]

    reservation = CudaMapper(FIRST, host=True).reserve(PAGE_BYTES, 3)
    fake.fail_at("cuMemHostRegister", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError):
        reservation.map(0, export(driver, [home, home], writable=False), writable=False)
    fake.heal()
    assert fake.live()["registered"] == registered
    reservation.map(1, export(driver, [home, home], writable=False), writable=False)
    assert fake.live()["registered"] == registered + 2
    assert reservation.view() + PAGE_BYTES in fake.registered
    reservation.unmap(2)
    with pytest.raises(InvalidRequest, match="no CUDA allocation can join"):
        reservation.map(2, export(driver, [slab]), writable=True)
    assert not reservation.is_mapped(2)
    reservation.close()
    driver.destroy(home)
    assert fake.live()["registered"] == 0
    driver.close()


def test_memfds_come_before_the_view(stand: Stand) -> None:
    """A range of host slabs whose address was taken too early refuses memfds and says what to do."""
    driver = make_driver(host_slabs="memfd")
    reservation = CudaMapper(FIRST, host=True).reserve(PAGE_BYTES, 1)
    assert reservation.view()
    with pytest.raises(InvalidRequest, match="only after the first map"):
        reservation.map(0, export(driver, [driver.create(HOST_UUID, PAGE_BYTES)]), writable=True)
    reservation.close()
    driver.close()
