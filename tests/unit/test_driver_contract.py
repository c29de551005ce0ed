"""The driver contract of `vmmd.driver.base`, on every driver, with real client processes."""

import errno
import fcntl
import gc
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.faulty_driver import FaultyDriver, Operation
from tests.helpers.require_gpu import require_gpu
from tests.helpers.slab_client import SlabClient
from vmmd.driver import cuda_vmm, host_memfd
from vmmd.driver.base import Copy, Driver, FileSource, Mapper, ShortRead, Slab, SlabSource
from vmmd.driver.cuda_mapper import CudaMapper
from vmmd.driver.cuda_vmm import CudaDriver
from vmmd.driver.host_memfd import HOST_UUID, HostDriver, HostMapper
from vmmd.errors import DriverError, Exhausted, InvalidRequest, NotFound

MIB = 1 << 20


@dataclass
class Platform:
    """One driver under test: its daemon side, its client side, the device and slab size to use."""

    driver: Driver
    mapper: Mapper
    uuid: str
    slab_bytes: int

    def create(self) -> Slab:
        return self.driver.create(self.uuid, self.slab_bytes)

    def client(self, slabs_max: int = 4) -> SlabClient:
        client = SlabClient(self.driver.name)
        client.reserve(self.uuid, self.slab_bytes, slabs_max)
        return client

    def give(self, client: SlabClient, index: int, *slabs: Slab, writable: bool = False) -> object:
        """Exports slabs to a client, which maps them; no descriptor stays here."""
        return client.map(self.driver, index, slabs, writable=writable)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=["host", "fake-cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """Every driver, CUDA's also on a stand-in; descriptors are back where they were afterwards."""
    gc.collect()  # what clients of other tests had open here
    if request.param == "host":
        before = count_descriptors()
        driver = HostDriver([("SIM-0", "simulated 0", 16 * MIB), ("SIM-1", "simulated 1", 16 * MIB)], 32 * MIB)
        yield Platform(driver, HostMapper(), "SIM-0", MIB)
        driver.close()
        assert count_descriptors() <= before  # a thread of another test may close something meanwhile
        return
    if request.param == "cuda":
        require_gpu()
    else:
        monkeypatch.setenv("STRATA_FAKE_CUDA", "1")
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", FakeCuda().module)
        monkeypatch.setattr(cuda_vmm, "FRESH_CHECK_BYTES", 1)
    yield from cuda_platform()


def cuda_platform() -> Iterator[Platform]:
    """The first GPU, whose context a mapper keeps from test to test."""
    with_context = CudaDriver(256 * MIB, threads=4)
    mapper = CudaMapper(with_context.devices()[0].uuid)
    with_context.close()
    before = count_descriptors()
    driver = CudaDriver(256 * MIB, threads=4)
    device = driver.devices()[0]
    yield Platform(driver, mapper, device.uuid, device.page_bytes)
    driver.close()
    assert count_descriptors() <= before


@pytest.fixture
def model_file(tmp_path: Path) -> Iterator[int]:
    """An open file of 8 MiB whose bytes differ everywhere."""
    path = tmp_path / "model"
    path.write_bytes(b"".join(i.to_bytes(4, "little") for i in range(2 * MIB)))
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_devices_host_is_last(platform: Platform) -> None:
    """Computing devices come first, the host's RAM last, and memory is known for each."""
    devices = platform.driver.devices()
    assert [device.is_host for device in devices] == [False] * (len(devices) - 1) + [True]
    for device in devices:
        memory = platform.driver.memory(device.uuid)
        assert 0 < memory.free_bytes <= memory.total_bytes == device.total_bytes


def test_unknown_device(platform: Platform) -> None:
    """A device that does not exist is not found, by its name."""
    with pytest.raises(NotFound, match="GPU-0000"):
        platform.driver.memory("GPU-0000")
    with pytest.raises(NotFound, match="GPU-0000"):
        platform.driver.create("GPU-0000", platform.slab_bytes)


def test_create_accounts_on_the_named_device(platform: Platform) -> None:
    """A slab uses memory of the device that was named, and gives it back when destroyed."""
    free = {device.uuid: platform.driver.memory(device.uuid).free_bytes for device in platform.driver.devices()}
    slab = platform.create()
    assert platform.driver.memory(platform.uuid).free_bytes <= free[platform.uuid] - platform.slab_bytes
    for uuid in free.keys() - {platform.uuid}:
        assert platform.driver.memory(uuid).free_bytes == free[uuid]
    platform.driver.destroy(slab)
    assert platform.driver.memory(platform.uuid).free_bytes == free[platform.uuid]
    platform.driver.destroy(slab)


@pytest.mark.parametrize("size_bytes", [0, -1, 1, 4097])
def test_create_refuses_odd_sizes(platform: Platform, size_bytes: int) -> None:
    """A slab is a positive multiple of the page."""
    with pytest.raises(InvalidRequest, match=str(size_bytes)):
        platform.driver.create(platform.uuid, size_bytes)


def test_create_refuses_what_does_not_fit(platform: Platform) -> None:
    """A full device refuses with both sizes, and has lost nothing by it."""
    free_bytes = platform.driver.memory(platform.uuid).free_bytes
    asked_bytes = (free_bytes // platform.slab_bytes + 1) * platform.slab_bytes
    with pytest.raises(Exhausted) as caught:
        platform.driver.create(platform.uuid, asked_bytes)
    assert caught.value.requested_bytes == asked_bytes
    assert caught.value.free_bytes == free_bytes
    assert platform.driver.memory(platform.uuid).free_bytes == free_bytes


def test_new_slab_is_zeros(platform: Platform) -> None:
    """A slab reads as zeros, also where another one's bytes have just been."""
    slab = platform.create()
    with platform.client() as client:
        platform.give(client, 0, slab, writable=True)
        client.ask("write", offset=0, data="ff" * 64)
    platform.driver.destroy(slab)
    slab = platform.create()
    assert platform.driver.read(slab, 0, platform.slab_bytes) == bytes(platform.slab_bytes)


def test_clients_share_bytes(platform: Platform) -> None:
    """What one client writes at an offset of its range, another and the daemon read."""
    slabs = [platform.create(), platform.create()]
    with platform.client() as writer, platform.client() as reader:
        assert platform.give(writer, 0, *slabs, writable=True) is None
        assert platform.give(reader, 2, *slabs) is None
        writer.ask("write", offset=platform.slab_bytes - 2, data="01020304")
        assert reader.ask("read", offset=3 * platform.slab_bytes - 2, length=4) == "01020304"
        assert platform.driver.read(slabs[0], platform.slab_bytes - 2, 2) == b"\x01\x02"
        assert platform.driver.read(slabs[1], 0, 2) == b"\x03\x04"


def test_client_keeps_no_descriptor(platform: Platform) -> None:
    """Mapping closes what was imported, whether it succeeded or not."""
    slab = platform.create()
    with platform.client() as client:
        before = client.ask("descriptors")
        assert platform.give(client, 0, slab) is None
        assert "InvalidRequest" in str(platform.give(client, 0, slab))
        assert "InvalidRequest" in str(platform.give(client, 3, slab, slab))
        assert client.ask("descriptors") == before


def test_export_is_close_on_exec_and_new(platform: Platform) -> None:
    """Each export is a new descriptor that an exec does not inherit."""
    slab = platform.create()
    fds = [platform.driver.export(slab, writable=writable) for writable in (True, True, False)]
    assert len(set(fds)) == 3
    for fd in fds:
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(fd)


def test_memory_outlives_its_daemon_hold(platform: Platform) -> None:
    """A mapping goes on after the slab was destroyed: nothing is taken from a living process."""
    slab = platform.create()
    with platform.client() as client:
        platform.give(client, 0, slab, writable=True)
        client.ask("write", offset=0, data="2a")
        platform.driver.destroy(slab)
        assert client.ask("read", offset=0, length=1) == "2a"


def expect_held(platform: Platform, slab: Slab, held: bool) -> None:
    assert platform.driver.held_elsewhere(slab) in (held, None)


def test_held_by_a_descriptor(platform: Platform) -> None:
    """A slab is held while an export of it is open, here or elsewhere."""
    slab = platform.create()
    expect_held(platform, slab, False)
    fd = platform.driver.export(slab, writable=False)
    expect_held(platform, slab, True)
    os.close(fd)
    expect_held(platform, slab, False)
    with platform.client() as client:
        fd = platform.driver.export(slab, writable=True)
        client.ask("hold", [fd])
        os.close(fd)
        expect_held(platform, slab, True)
        client.kill()
        expect_held(platform, slab, False)


def test_held_by_a_mapping(platform: Platform) -> None:
    """A slab is held while a client maps it, until that client unmaps or dies."""
    slab = platform.create()
    with platform.client() as client:
        for writable in (False, True):
            platform.give(client, 0, slab, writable=writable)
            expect_held(platform, slab, True)
            client.ask("unmap", index=0)
            expect_held(platform, slab, False)
        platform.give(client, 0, slab)
        client.kill()
        expect_held(platform, slab, False)


def test_holders(platform: Platform) -> None:
    """Where holders can be seen, it is the process that has the slab open or mapped, and nobody once it has let go."""
    slab, other = platform.create(), platform.create()
    knows = platform.driver.held_elsewhere(slab) is not None
    assert platform.driver.holders([]) == []
    assert platform.driver.holders([slab, other]) == [0, 0]
    with platform.client() as client, platform.client() as second:
        pids = [client.process.pid, second.process.pid] if knows else [0, 0]
        platform.give(client, 0, slab)
        fd = platform.driver.export(other, writable=False)
        second.ask("hold", [fd])
        os.close(fd)
        assert platform.driver.holders([slab, other]) == pids
        client.ask("unmap", index=0)
        assert platform.driver.holders([other, slab]) == [pids[1], 0]
    platform.driver.destroy(slab)
    assert platform.driver.holders([slab]) == [0]


def test_held_by_a_message_in_flight(platform: Platform) -> None:
    """A descriptor that nobody has received yet holds the slab too."""
    slab = platform.create()
    with platform.client() as client:
        client.stop()
        fd = platform.driver.export(slab, writable=False)
        client.send_only([fd])
        os.close(fd)
        expect_held(platform, slab, True)
        client.kill()
    expect_held(platform, slab, False)


def test_forked_child_inherits_no_mapping(platform: Platform) -> None:
    """A client's forked child does not keep the slab after the client has unmapped it."""
    slab = platform.create()
    with platform.client() as client:
        platform.give(client, 0, slab)
        child = client.ask("fork")
        try:
            client.ask("unmap", index=0)
            expect_held(platform, slab, False)
        finally:
            os.kill(child, 9)


def test_fill_from_file(platform: Platform, model_file: int) -> None:
    """Pieces of a file arrive at their offsets, and nothing around them changes."""
    first, second = platform.create(), platform.create()
    copies = [
        Copy(first, 3, 1000, FileSource(model_file, 17)),
        Copy(second, 0, platform.slab_bytes, FileSource(model_file, 5)),
        Copy(first, 5000, 1, FileSource(model_file, 4 * MIB)),
    ]
    platform.driver.fill(copies)
    assert platform.driver.read(first, 0, 1004) == bytes(3) + os.pread(model_file, 1000, 17) + bytes(1)
    assert platform.driver.read(first, 5000, 1) == os.pread(model_file, 1, 4 * MIB)
    assert platform.driver.read(second, 0, platform.slab_bytes) == os.pread(model_file, platform.slab_bytes, 5)
    expect_held(platform, first, False)


def test_large_fill(platform: Platform, model_file: int) -> None:
    """A fill of many slabs, which several threads share, puts every byte in its place."""
    slabs = [platform.create() for _ in range(7)]
    size_bytes = platform.slab_bytes
    platform.driver.fill([Copy(slab, 0, size_bytes, FileSource(model_file, i * MIB)) for i, slab in enumerate(slabs)])
    for i, slab in enumerate(slabs):
        assert platform.driver.read(slab, 0, size_bytes) == os.pread(model_file, size_bytes, i * MIB)
        expect_held(platform, slab, False)


def test_fill_from_slab(platform: Platform, model_file: int) -> None:
    """Bytes of one slab are copied into another, from host memory to a device as well."""
    home = platform.driver.create(HOST_UUID, platform.slab_bytes)
    target = platform.create()
    platform.driver.fill([Copy(home, 0, platform.slab_bytes, FileSource(model_file, 0))])
    platform.driver.fill([Copy(target, 256, 4096, SlabSource(home, 512))])
    expected = bytes(256) + os.pread(model_file, 4096, 512) + bytes(256)
    assert platform.driver.read(target, 0, len(expected)) == expected


@pytest.mark.parametrize("length", [1, 4096, 30_000])
def test_fill_rows(platform: Platform, model_file: int, length: int) -> None:
    """Rows go from a file to slots, back to back there or not, and on from slab to slab; nothing between changes."""
    home, target = platform.driver.create(HOST_UUID, platform.slab_bytes), platform.create()
    slots, slot = 3, platform.slab_bytes // 4
    expected, moved = bytearray(platform.slab_bytes), bytearray(platform.slab_bytes)
    for gap in (0, 5):
        platform.driver.fill([Copy(home, gap, length, FileSource(model_file, 7 + gap), slots, slot, length + gap)])
        for i in range(slots):
            at = gap + i * slot
            expected[at : at + length] = os.pread(model_file, length, 7 + gap + i * (length + gap))
    assert platform.driver.read(home, 0, platform.slab_bytes) == expected
    platform.driver.fill([Copy(target, 256, length, SlabSource(home, 0), slots, length + 3, slot)])
    for i in range(slots):
        at = 256 + i * (length + 3)
        moved[at : at + length] = expected[i * slot : i * slot + length]
    assert platform.driver.read(target, 0, platform.slab_bytes) == moved
    for copy in (
        Copy(target, 0, 1, FileSource(model_file, 0), 2, platform.slab_bytes, 1),
        Copy(target, 0, 8, FileSource(model_file, 0), 2, 7, 8),
    ):
        with pytest.raises(InvalidRequest):
            platform.driver.fill([copy])


@pytest.mark.parametrize("n_slabs", [1, 7])
def test_fill_from_a_file_that_shrank(platform: Platform, tmp_path: Path, n_slabs: int) -> None:
    """A file that ends too early is a ShortRead, leaves no mapping behind, and the next fill works."""
    path = tmp_path / "short"
    path.write_bytes(b"x" * 1000)
    slabs = [platform.create() for _ in range(n_slabs)]
    with path.open("rb") as file:
        with pytest.raises(ShortRead):
            platform.driver.fill([Copy(slab, 0, platform.slab_bytes, FileSource(file.fileno(), 0)) for slab in slabs])
        for slab in slabs:
            expect_held(platform, slab, False)
        platform.driver.fill([Copy(slab, 0, 1000, FileSource(file.fileno(), 0)) for slab in slabs])
    assert platform.driver.read(slabs[-1], 0, 1000) == b"x" * 1000
    assert "strata-slab" not in Path("/proc/self/maps").read_text()


def test_fill_from_an_unreadable_file(platform: Platform, tmp_path: Path) -> None:
    """A failed read is an OSError."""
    slab = platform.create()
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError):
            platform.driver.fill([Copy(slab, 0, 10, FileSource(fd, 0))])
    finally:
        os.close(fd)


@pytest.mark.parametrize(("slabs", "offset", "length"), [(0, -1, 2), (0, 0, -1), (1, 0, 1), (1, -1, 2)])
def test_copies_stay_inside(platform: Platform, model_file: int, slabs: int, offset: int, length: int) -> None:
    """No fill or read reaches past a slab, on either side."""
    offset += slabs * platform.slab_bytes
    slab, other = platform.create(), platform.create()
    for copy in (
        Copy(slab, offset, length, FileSource(model_file, 0)),
        Copy(other, 0, length, SlabSource(slab, offset)),
    ):
        with pytest.raises(InvalidRequest):
            platform.driver.fill([copy])
    with pytest.raises(InvalidRequest):
        platform.driver.read(slab, offset, length)


def test_map_refuses_what_is_no_slab(platform: Platform, tmp_path: Path) -> None:
    """A descriptor of another size or kind is refused, closed, and nothing of its batch stays mapped."""
    good = platform.create()
    wrong_size = platform.driver.create(platform.uuid, 2 * platform.slab_bytes)
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(platform.slab_bytes))
    unsealed = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, platform.slab_bytes)
    left, right = socket.socketpair()
    reservation = platform.mapper.reserve(platform.slab_bytes, 4)
    bad_ones = [
        platform.driver.export(wrong_size, writable=True),
        os.open(plain, os.O_RDWR),
        unsealed,
        left.detach(),
    ]
    right.close()
    before = count_descriptors() - len(bad_ones)
    for bad in bad_ones:
        with pytest.raises(InvalidRequest):
            reservation.map(0, [platform.driver.export(good, writable=True), bad], writable=True)
        assert not reservation.is_mapped(0)
    assert count_descriptors() == before
    expect_held(platform, good, False)
    reservation.close()


def test_map_undoes_at_every_step(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """When mapping the n-th slab fails, the ones before it are unmapped and every descriptor is closed."""
    if platform.driver.name != "host":
        pytest.skip("the mmap call to fail is the host driver's")
    slabs = [platform.create() for _ in range(3)]
    real = host_memfd._mmap
    reservation = platform.mapper.reserve(platform.slab_bytes, 4)
    before = count_descriptors()
    for failing in range(3):
        calls = iter(range(100))

        def fails(address: int, size: int, prot: int, flags: int, fd: int, at: int = failing, n=calls) -> int:  # type: ignore[no-untyped-def]
            if fd >= 0 and next(n) == at:
                raise DriverError("mmap failed with ENOMEM", "mmap", errno.ENOMEM, "ENOMEM")
            return real(address, size, prot, flags, fd)

        monkeypatch.setattr(host_memfd, "_mmap", fails)
        with pytest.raises(DriverError):
            reservation.map(1, [platform.driver.export(slab, writable=False) for slab in slabs], writable=False)
        assert not any(reservation.is_mapped(i) for i in range(4))
        for slab in slabs:
            expect_held(platform, slab, False)
    assert count_descriptors() == before
    reservation.close()


def test_read_only_export_maps_read_only(platform: Platform) -> None:
    """On the host, an export that is not writable cannot be mapped for writing."""
    if platform.driver.name != "host":
        pytest.skip("on CUDA the importer chooses its own access")
    reservation = platform.mapper.reserve(platform.slab_bytes, 1)
    slab = platform.create()
    with pytest.raises(DriverError) as caught:
        reservation.map(0, [platform.driver.export(slab, writable=False)], writable=True)
    assert (caught.value.call, caught.value.name) == ("mmap", "EACCES")
    reservation.close()


def test_reservation_lifecycle(platform: Platform) -> None:
    """Ranges refuse odd sizes, unmap once, and release everything on close."""
    for slab_bytes, slabs_max in ((0, 1), (1, 1), (platform.slab_bytes, 0)):
        with pytest.raises(InvalidRequest):
            platform.mapper.reserve(slab_bytes, slabs_max)
    reservation = platform.mapper.reserve(platform.slab_bytes, 2)
    slab = platform.create()
    reservation.map(1, [platform.driver.export(slab, writable=True)], writable=True)
    assert reservation.is_mapped(1) and not reservation.is_mapped(0)
    reservation.unmap(1)
    with pytest.raises(InvalidRequest):
        reservation.unmap(1)
    reservation.map(1, [platform.driver.export(slab, writable=True)], writable=True)
    reservation.close()
    reservation.close()
    expect_held(platform, slab, False)
    with pytest.raises(InvalidRequest):
        reservation.map(0, [platform.driver.export(slab, writable=True)], writable=True)
    with pytest.raises(InvalidRequest):
        reservation.view()


@pytest.mark.parametrize("spare", [0, 1])
def test_descriptor_limit_is_named(platform: Platform, spare: int) -> None:
    """Out of descriptors is said to be just that, with the limit, and undone."""
    slab = platform.create()
    free_bytes = platform.driver.memory(platform.uuid).free_bytes
    before = count_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    try:
        for action, limit in (
            (platform.create, lowest_free + spare),
            (lambda: platform.driver.export(slab, writable=True), lowest_free),
        ):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            with pytest.raises(Exhausted, match=r"descriptor.*LimitNOFILE") as caught:
                action()
            assert "memory" not in caught.value.message
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert count_descriptors() == before
    assert platform.driver.memory(platform.uuid).free_bytes == free_bytes


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
def test_no_memory_is_named(platform: Platform, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A host without memory refuses at create, with sizes, and keeps no descriptor."""
    if platform.driver.name != "host":
        pytest.skip("the fallocate call to fail is the host driver's")

    def fails(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    before = count_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", fails)
    with pytest.raises(Exhausted, match=str(platform.slab_bytes)):
        platform.create()
    assert count_descriptors() == before


def test_unmanaged_bytes_shrink_what_is_free(platform: Platform) -> None:
    """Simulated other programs take room from slabs."""
    if not isinstance(platform.driver, HostDriver):
        pytest.skip("only the host driver simulates other programs")
    total_bytes = platform.driver.memory(platform.uuid).total_bytes
    platform.driver.set_unmanaged_bytes(platform.uuid, total_bytes - platform.slab_bytes)
    slab = platform.create()
    with pytest.raises(Exhausted):
        platform.create()
    platform.driver.destroy(slab)
    assert platform.driver.memory(platform.uuid).free_bytes == platform.slab_bytes


def test_too_many_mappings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOMEM from mmap tells the number of mappings and vm.max_map_count."""
    resource_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, resource_limit[1]))
    try:
        with pytest.raises(DriverError, match=r"\d+ mappings and vm.max_map_count is \d+"):
            HostMapper().reserve(1 << 30, 1 << 11)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, resource_limit)


@pytest.mark.parametrize("operation", ["create", "export", "fill", "read"])
def test_faulty_driver(platform: Platform, operation: Operation) -> None:
    """The faulty driver fails at the n-th call of one operation only, then works again."""
    driver = FaultyDriver(platform.driver)
    slab = driver.create(platform.uuid, platform.slab_bytes)
    calls: dict[str, Callable[[], object]] = {
        "create": lambda: driver.destroy(driver.create(platform.uuid, platform.slab_bytes)),
        "export": lambda: os.close(driver.export(slab, writable=False)),
        "fill": lambda: driver.fill([]),
        "read": lambda: driver.read(slab, 0, 1),
    }
    driver.fail_at(operation, 2)
    for name, call in calls.items():
        call()
        if name == operation:
            with pytest.raises(DriverError, match=operation):
                call()
        call()
    driver.fail_at(operation, 1, OSError(5, "broken"), always=True)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            calls[operation]()
    driver.heal()
    calls[operation]()
    assert len(driver.live) == 1
