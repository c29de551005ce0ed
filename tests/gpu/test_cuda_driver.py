"""The CUDA driver on real GPUs: location, peer access, old bytes, faults, host slabs, fills."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.require_gpu import require_gpu
from tests.helpers.slab_client import SlabClient
from vmmd.driver import cuda_calls
from vmmd.driver.base import Copy, FileSource, Slab, SlabSource
from vmmd.driver.cuda_calls import PeerAccess, call
from vmmd.driver.cuda_fill import window
from vmmd.driver.cuda_mapper import CudaMapper
from vmmd.driver.cuda_vmm import CudaDriver
from vmmd.driver.host_memfd import HOST_UUID
from vmmd.errors import DriverError, InvalidRequest

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SLAB_BYTES = 64 * MIB

Make = Callable[..., CudaDriver]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes drivers, and closes them."""
    require_gpu()
    made: list[CudaDriver] = []

    def make_driver(**options: Any) -> CudaDriver:
        made.append(CudaDriver(2 << 30, **options))
        return made[-1]

    yield make_driver
    for driver in made:
        driver.close()


@pytest.fixture(scope="module")
def random_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An open file of 160 MiB of random bytes."""
    path = tmp_path_factory.mktemp("fill") / "random"
    np.random.default_rng(0).integers(0, 256, 160 * MIB, np.uint8).tofile(path)
    with path.open("rb") as file:
        yield file.fileno()


def gpu_uuids(driver: CudaDriver) -> list[str]:
    return [device.uuid for device in driver.devices() if not device.is_host]


def two_gpus(driver: CudaDriver) -> tuple[str, str]:
    uuids = gpu_uuids(driver)
    if len(uuids) < 2:
        pytest.skip("this host has one GPU; the test needs two")
    return uuids[0], uuids[1]


def properties(driver: CudaDriver, slab: Slab) -> Any:
    return call(driver._cu.cuMemGetAllocationPropertiesFromHandle, slab.handle.handle)


def test_devices_are_known_by_uuid(make: Make) -> None:
    """Names, totals and pages of GPUs are the driver's; their UUIDs are those of nvidia-smi."""
    driver = make()
    for device in driver.devices()[:-1]:
        assert device.uuid.startswith("GPU-") and len(device.uuid) == 40
        assert device.name and device.total_bytes > 0 and device.page_bytes == 2 * MIB
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert set(gpu_uuids(driver)) <= set(listed)


def test_slab_lies_on_its_owner(make: Make) -> None:
    """A slab lies on the device that was named, whichever context is current, and asks for no RDMA."""
    driver = make()
    uuids = gpu_uuids(driver)
    for uuid in uuids:
        gpu = driver._gpus[uuid]
        for other in uuids:
            with cuda_calls.current(driver._cu, driver._contexts[other]):
                slab = driver.create(uuid, SLAB_BYTES)
            prop = properties(driver, slab)
            assert int(prop.location.type) == int(driver._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
            assert prop.location.id == gpu.ordinal
            assert prop.allocFlags.gpuDirectRDMACapable == 0
            driver.destroy(slab)


@pytest.mark.parametrize("peer_access", ["auto", "never"])
def test_peer_access(make: Make, random_file: int, peer_access: PeerAccess) -> None:
    """Another GPU's kernel reads a slab with "auto" and faults with "never"; copies arrive either way."""
    driver = make(peer_access=peer_access)
    owner, other = two_gpus(driver)
    if not driver._gpus[owner].reached_by and peer_access == "auto":
        pytest.skip("these GPUs have no path to each other")
    slab, target = driver.create(owner, SLAB_BYTES), driver.create(other, SLAB_BYTES)
    driver.fill([Copy(slab, 0, SLAB_BYTES, FileSource(random_file, 0))])
    driver.fill([Copy(target, 4096, 9 * MIB, SlabSource(slab, 512))])
    assert driver.read(target, 4096, 9 * MIB) == os.pread(random_file, 9 * MIB, 512)

    with SlabClient("cuda") as client:
        client.reserve(owner, SLAB_BYTES, 1, options={"peer_access": peer_access}, contexts=[other])
        assert client.map(driver, 0, [slab]) is None
        reply = client.ask("kernel", name="load", offset=4096, args=[])
        if peer_access == "auto":
            assert reply == int.from_bytes(os.pread(random_file, 4, 4096), "little")
        else:
            assert "CUDA_ERROR_ILLEGAL_ADDRESS" in reply
    assert driver.failed_devices() == []


def test_import_on_the_wrong_device(make: Make) -> None:
    """A range of one GPU refuses another's slab, and one of host slabs refuses a GPU's."""
    driver = make()
    uuids = gpu_uuids(driver)
    slab = driver.create(uuids[-1], SLAB_BYTES)
    mappers = [CudaMapper(uuids[0], host=True)]
    if len(uuids) > 1:
        mappers.append(CudaMapper(uuids[0]))
    for mapper in mappers:
        reservation = mapper.reserve(SLAB_BYTES, 1)
        with pytest.raises(InvalidRequest, match="is no slab of"):
            reservation.map(0, [driver.export(slab, writable=False)], writable=False)
        reservation.close()


def test_descriptor_that_is_no_slab(make: Make) -> None:
    """Descriptors of other kinds are refused, and the process can go on mapping."""
    driver = make()
    uuid = gpu_uuids(driver)[0]
    reservation = CudaMapper(uuid).reserve(SLAB_BYTES, 1)
    read_end, write_end = os.pipe()
    others = [os.open("/dev/null", os.O_RDWR), os.eventfd(0), read_end, write_end, os.open("/", os.O_RDONLY)]
    for name in ("/dev/nvidiactl", "/dev/nvidia0"):
        if os.path.exists(name):
            others.append(os.open(name, os.O_RDWR))
    for fd in others:
        with pytest.raises(InvalidRequest, match="no slab"):
            reservation.map(0, [fd], writable=True)
    reservation.map(0, [driver.export(driver.create(uuid, SLAB_BYTES), writable=True)], writable=True)
    reservation.close()


def test_fresh_slabs_hold_no_secret(make: Make) -> None:
    """Of 4 GiB of dirtied and released slabs, no byte shows in the next ones, on no device."""
    driver = make()
    for device in driver.devices():
        count = 8 if device.is_host else 64
        slabs = [driver.create(device.uuid, SLAB_BYTES) for _ in range(count)]
        for slab in slabs:
            driver._filler.set_bytes(driver._slab_place(slab), 0xA5, SLAB_BYTES)
            driver.destroy(slab)
        slabs = [driver.create(device.uuid, SLAB_BYTES) for _ in range(count)]
        for slab in slabs:
            assert not np.frombuffer(driver.read(slab, 0, SLAB_BYTES), np.uint64).any()
            driver.destroy(slab)


def test_read_only_mapping_faults_only_the_client(make: Make, random_file: int) -> None:
    """A store through a read-only mapping kills that client's context; the daemon and others go on."""
    driver = make()
    uuid = gpu_uuids(driver)[0]
    slab = driver.create(uuid, SLAB_BYTES)
    driver.fill([Copy(slab, 0, SLAB_BYTES, FileSource(random_file, 0))])
    first_word = os.pread(random_file, 4, 0)
    with SlabClient("cuda") as client, SlabClient("cuda") as other:
        for one in (client, other):
            one.reserve(uuid, SLAB_BYTES, 1)
            assert one.map(driver, 0, [slab]) is None
            word = one.ask("kernel", name="load", offset=0, args=[])
            assert word == int.from_bytes(first_word, "little")
        reply = client.ask("kernel", name="store", offset=0, args=[1])
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in reply
        assert other.ask("read", offset=0, length=4) == first_word.hex()
    assert driver.read(slab, 0, 4) == first_word
    driver.fill([Copy(slab, 0, 4096, FileSource(random_file, 8))])
    assert driver.failed_devices() == []


@pytest.mark.parametrize("host_slabs", ["auto", "memfd"])
def test_host_slabs(make: Make, random_file: int, host_slabs: str) -> None:
    """Host slabs are filled from a file, fill a GPU's, and are read in place by kernels; also as memfds."""
    driver = make(host_slabs=host_slabs)
    uuid = gpu_uuids(driver)[0]
    home, other, slab = (driver.create(where, SLAB_BYTES) for where in (HOST_UUID, HOST_UUID, uuid))
    driver.fill([Copy(some, 0, SLAB_BYTES, FileSource(random_file, 11 + i)) for i, some in enumerate((home, other))])
    driver.fill([Copy(slab, 256, 3 * MIB, SlabSource(home, 512)), Copy(other, 0, 4096, SlabSource(home, 64))])
    assert driver.read(home, 0, SLAB_BYTES) == os.pread(random_file, SLAB_BYTES, 11)
    assert driver.read(slab, 256, 3 * MIB) == os.pread(random_file, 3 * MIB, 11 + 512)
    assert driver.read(other, 0, 4096) == os.pread(random_file, 4096, 11 + 64)
    driver.fill([Copy(home, 4096, 100, SlabSource(slab, 256))])
    assert driver.read(home, 4096, 100) == os.pread(random_file, 100, 11 + 512)
    word = int.from_bytes(os.pread(random_file, 4, 11), "little")
    for writable in (False, True):
        with SlabClient("cuda") as client:
            client.reserve(uuid, SLAB_BYTES, 2, options={"host": True})
            assert client.map(driver, 0, [home, other], writable=writable) is None
            assert client.ask("kernel", name="load", offset=0, args=[]) == word
            reply = client.ask("kernel", name="store", offset=SLAB_BYTES, args=[7])
            assert reply is None if writable else "CUDA_ERROR" in reply
    assert driver.read(other, 0, 4) == bytes([7, 0, 0, 0])
    for slab in (home, other):
        driver.destroy(slab)


@pytest.mark.parametrize("host_slabs", ["auto", "memfd"])
@pytest.mark.parametrize("writable", [False, True])
def test_processor_reads_host_slabs(make: Make, random_file: int, host_slabs: str, writable: bool) -> None:
    """With host access, the processor reads a mapped host slab at the range's address."""
    driver = make(host_slabs=host_slabs)
    home = driver.create(HOST_UUID, SLAB_BYTES)
    driver.fill([Copy(home, 0, SLAB_BYTES, FileSource(random_file, 0))])
    reservation = CudaMapper(gpu_uuids(driver)[0], host=True, host_access=True).reserve(SLAB_BYTES, 1)
    reservation.map(0, [driver.export(home, writable=writable)], writable=writable)

    assert bytes(window(reservation.view(), 4096)) == os.pread(random_file, 4096, 0)
    reservation.close()


@pytest.mark.parametrize("chunk_bytes", [MIB, 4 * MIB])
def test_fill_puts_every_byte_in_its_place(make: Make, random_file: int, chunk_bytes: int) -> None:
    """Large, small, odd and adjacent pieces of a file arrive where they belong, and nothing else changes."""
    driver = make(chunk_bytes=chunk_bytes, threads=5)
    uuid = gpu_uuids(driver)[0]
    slabs = [driver.create(uuid, SLAB_BYTES) for _ in range(2)]
    expected = [bytearray(SLAB_BYTES) for _ in slabs]
    copies = []
    generator = np.random.default_rng(1)
    for i, slab in enumerate(slabs):
        offset = int(generator.integers(1, 5000))
        while offset < SLAB_BYTES:
            length = min(int(generator.integers(1, 9 * MIB)), SLAB_BYTES - offset)
            source = int(generator.integers(0, 160 * MIB - length))
            copies.append(Copy(slab, offset, length, FileSource(random_file, source)))
            expected[i][offset : offset + length] = os.pread(random_file, length, source)
            offset += length + int(generator.integers(0, 3)) * 777
    driver.fill(copies)
    for slab, data in zip(slabs, expected, strict=True):
        assert driver.read(slab, 0, SLAB_BYTES) == data


@pytest.mark.parametrize("host_slabs", ["auto", "memfd"])
@pytest.mark.parametrize(("length", "slot"), [(929_280, 2_790_400), (929_281, 2_787_847), (7, 22), (5 * MIB, 11 * MIB)])
def test_rows_arrive_at_any_pitch(make: Make, random_file: int, host_slabs: str, length: int, slot: int) -> None:
    """Experts from a file to slots, of a GPU and of the host, and on from slots to slots; nothing between changes."""
    driver = make(host_slabs=host_slabs)
    uuid = gpu_uuids(driver)[0]
    slots = min(23, SLAB_BYTES // slot)
    home, slab, again = (driver.create(where, SLAB_BYTES) for where in (HOST_UUID, uuid, uuid))
    expected, moved = bytearray(SLAB_BYTES), bytearray(SLAB_BYTES)
    copies = []
    for m in range(2):
        of_file = FileSource(random_file, 3 + m * slots * length)
        copies += [Copy(some, m * length, length, of_file, slots, slot, length) for some in (home, slab)]
        for i in range(slots):
            at = i * slot + m * length
            expected[at : at + length] = os.pread(random_file, length, of_file.offset_bytes + i * length)
    driver.fill(copies)
    assert driver.read(home, 0, SLAB_BYTES) == expected
    assert driver.read(slab, 0, SLAB_BYTES) == expected
    for i in range(slots):
        moved[i * slot + 1 : i * slot + 1 + length] = expected[i * slot : i * slot + length]
    for target, source_slab in ((again, home), (again, slab), (home, slab)):
        driver.fill([Copy(target, 1, length, SlabSource(source_slab, 0), slots, slot, slot)])
        if target is again:
            assert driver.read(again, 0, SLAB_BYTES) == moved
    for i in range(slots):
        assert driver.read(home, i * slot + 1, length) == moved[i * slot + 1 : i * slot + 1 + length]


def test_errors_have_call_code_and_name(make: Make) -> None:
    """A failed call is a DriverError that a caller can branch on."""
    driver = make()
    with pytest.raises(DriverError) as caught:
        call(driver._cu.cuMemAddressReserve, 3, 0, 0, 0)
    error = caught.value
    assert (error.call, error.code, error.name) == ("cuMemAddressReserve", 1, "CUDA_ERROR_INVALID_VALUE")


def test_killed_client_frees_its_memory(make: Make) -> None:
    """What a client alone still holds is free soon after SIGKILL, and nothing of it stays."""
    driver = make()
    uuid = gpu_uuids(driver)[0]
    before = driver.memory(uuid).free_bytes
    slabs = [driver.create(uuid, SLAB_BYTES) for _ in range(8)]
    with SlabClient("cuda") as client:
        client.reserve(uuid, SLAB_BYTES, 8)
        assert client.map(driver, 0, slabs, writable=True) is None
        for slab in slabs:
            driver.destroy(slab)
        assert driver.memory(uuid).free_bytes <= before - 8 * SLAB_BYTES
        client.kill()
        end = time.monotonic() + 1
        while driver.memory(uuid).free_bytes < before and time.monotonic() < end:
            time.sleep(0.001)
    assert driver.memory(uuid).free_bytes == before


def test_descriptors_come_back(make: Make) -> None:
    """Creating, filling and destroying many slabs leaves no descriptor open."""
    driver = make()
    uuid = gpu_uuids(driver)[0]

    def cycle() -> int:
        for slab in [driver.create(uuid, 2 * MIB) for _ in range(20)]:
            driver.read(slab, 0, 8)
            driver.destroy(slab)
        return len(list(Path("/proc/self/fd").iterdir()))

    assert cycle() == cycle()
