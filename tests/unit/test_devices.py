"""Which devices a session uses, by what its user calls them and what its process sees."""

import sys

import pytest
from strata_api.v1 import memory_pb2 as wire

from strata_client.devices import VISIBLE_SIMULATED, choose_device, choose_peers
from strata_client.session import mapper_of
from tests.helpers.fake_cuda import FakeCuda, gpu_uuid
from vmmd.core.ledger import DeviceRecord
from vmmd.driver.cuda_mapper import CudaMapper
from vmmd.driver.host_memfd import HostDriver
from vmmd.errors import InvalidRequest, NoDevice
from vmmd.server import convert

DEVICES = [wire.Device(uuid="HOST-SIM-0"), wire.Device(uuid="HOST-SIM-1"), wire.Device(uuid="HOST-RAM", is_host=True)]


def simulated(*, peer_paths: bool = True) -> list[wire.Device]:
    """Three devices and the host's memory, as a daemon lists them."""
    sizes = [(f"HOST-SIM-{i}", "simulated", 1 << 20) for i in range(3)]
    driver = HostDriver(sizes, 1 << 20, peer_paths=peer_paths)
    found = [
        convert.device(DeviceRecord(i.uuid, i.name, 4096, i.total_bytes, 0, 0, i.is_host), i) for i in driver.devices()
    ]
    driver.close()
    return found


def gpus(n: int) -> list[wire.Device]:
    """GPUs with paths to each other, and the host's memory."""
    uuids = [gpu_uuid(i) for i in range(n)]
    made = [wire.Device(uuid=uuid, reached_by_uuids=[u for u in uuids if u != uuid]) for uuid in uuids]
    return [*made, wire.Device(uuid="HOST-RAM", is_host=True)]


def names(peers: object) -> list[tuple[int, str]]:
    return [(peer.number, peer.device.uuid) for peer in peers]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, "HOST-SIM-0"),
        ("HOST-SIM-1", "HOST-SIM-1"),
        ("1", "HOST-SIM-1"),
        ("HOST-R", "HOST-RAM"),
        ("2", "HOST-RAM"),
    ],
)
def test_device_by_uuid_prefix_or_index(wanted: str | None, found: str) -> None:
    """A device is named by its UUID, a unique beginning of it, or its index."""
    assert choose_device(DEVICES, wanted).uuid == found


@pytest.mark.parametrize("wanted", ["GPU-00000000", "3", "-1", "HOST-SIM", "", "²"])
def test_device_that_is_not_there_names_those_that_are(wanted: str) -> None:
    """A wrong or ambiguous name is refused with the list of devices."""
    with pytest.raises(NoDevice, match=r"0: HOST-SIM-0, 1: HOST-SIM-1, 2: HOST-RAM"):
        choose_device(DEVICES, wanted)


def test_gpus_are_chosen_as_other_devices() -> None:
    """Without a wish the first that computes is taken, also a GPU; the host beside it can be asked for."""
    devices = [wire.Device(uuid="GPU-1"), wire.Device(uuid="HOST-RAM", is_host=True)]
    assert choose_device(devices, None).uuid == "GPU-1"
    assert choose_device(devices, "GPU-").uuid == "GPU-1"
    assert choose_device(devices, "HOST-RAM").uuid == "HOST-RAM"


def test_peers_by_uuid_prefix_or_index() -> None:
    """Peers are named as the computing device is, and known by their numbers in the daemon's list."""
    devices = simulated()
    assert names(choose_peers(devices, devices[0], ["2", "HOST-SIM-1"])) == [(2, "HOST-SIM-2"), (1, "HOST-SIM-1")]
    assert names(choose_peers(devices, devices[1], ["0"])) == [(0, "HOST-SIM-0")]
    assert choose_peers(devices, devices[1], []) == []


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (["5"], NoDevice, "--peer-device 5 is not a device of the daemon; there are 0: HOST-SIM-0, 1: HOST-SIM-1"),
        (["HOST-SIM"], NoDevice, "--peer-device HOST-SIM is the beginning of several devices"),
        (["0"], InvalidRequest, "--peer-device 0: HOST-SIM-0 computes already"),
        (["1", "HOST-SIM-1"], InvalidRequest, "--peer-device HOST-SIM-1: HOST-SIM-1 was named before"),
        (["HOST-RAM"], NoDevice, "--peer-device HOST-RAM: HOST-RAM computes nothing"),
    ],
)
def test_peers_that_cannot_be(wanted: list[str], error: type[Exception], message: str) -> None:
    """No such device, the computing one, one named twice and the host's memory are each refused in their own words."""
    devices = simulated()
    with pytest.raises(error, match=message):
        choose_peers(devices, devices[0], wanted)


def test_peers_without_a_path_compute() -> None:
    """A peer is an owner exactly where the computing device cannot read its memory, each for itself."""
    devices = simulated()
    assert [peer.is_owner for peer in choose_peers(devices, devices[0], ["1", "2"])] == [False, False]
    devices[2].reached_by_uuids.remove("HOST-SIM-0")
    assert [peer.is_owner for peer in choose_peers(devices, devices[0], ["1", "2"])] == [False, True]
    assert [peer.is_owner for peer in choose_peers(devices, devices[1], ["0", "2"])] == [False, False]
    devices = simulated(peer_paths=False)
    assert [peer.is_owner for peer in choose_peers(devices, devices[0], ["2"])] == [True]


def test_simulated_devices_that_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sees those that the variable names, by number or UUID; the first computes, others are refused."""
    devices = simulated()
    monkeypatch.setenv(VISIBLE_SIMULATED, "HOST-SIM-2, 1")
    assert choose_device(devices, None).uuid == "HOST-SIM-1"
    assert choose_device(devices, "2").uuid == "HOST-SIM-2"
    assert names(choose_peers(devices, devices[1], ["2"])) == [(2, "HOST-SIM-2")]
    refusal = r"does not see HOST-SIM-0; of the daemon's devices it sees 1: HOST-SIM-1, 2: HOST-SIM-2 \(STRATA_VIS"
    with pytest.raises(NoDevice, match=f"--device 0: .*{refusal}"):
        choose_device(devices, "0")
    with pytest.raises(NoDevice, match=f"--peer-device 0: .*{refusal}"):
        choose_peers(devices, devices[1], ["0"])
    monkeypatch.setenv(VISIBLE_SIMULATED, "")
    with pytest.raises(NoDevice, match="it sees none"):
        choose_device(devices, None)


def test_slots_of_an_owner_are_mapped_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an owner reads no other GPU of the process may touch, even with a path; what is read in place both may."""
    fake = FakeCuda(2, peers=True)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake.module)
    first, second = (mapper_of(gpu_uuid(i), gpu_uuid(i)) for i in range(2))
    assert isinstance(first, CudaMapper) and isinstance(second, CudaMapper)
    in_place, alone = mapper_of(gpu_uuid(1), gpu_uuid(0)), mapper_of(gpu_uuid(1), gpu_uuid(1), alone=True)
    assert isinstance(in_place, CudaMapper) and isinstance(alone, CudaMapper)
    assert (in_place.readers(), alone.readers()) == ([1, 0], [1])


@pytest.mark.parametrize(("visible", "first"), [([0, 1], 0), ([1, 0], 0), ([1], 1), ([2, 1], 1)])
def test_gpus_that_are_seen(monkeypatch: pytest.MonkeyPatch, visible: list[int], first: int) -> None:
    """Numbers are the daemon's in whatever order a process sees its GPUs; without a wish it takes the first it sees."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", FakeCuda(3, visible=visible).module)
    devices = gpus(3)
    assert choose_device(devices, None).uuid == gpu_uuid(first)
    for i in range(3):
        if i in visible:
            assert choose_device(devices, str(i)).uuid == gpu_uuid(i)
        else:
            with pytest.raises(NoDevice, match=rf"--device {i}: .*does not see {gpu_uuid(i)}.*CUDA_VISIBLE_DEVICES"):
                choose_device(devices, str(i))


def test_a_single_gpu_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no choice CUDA is not loaded for it: the start does not wait for that."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert choose_device(gpus(1), None).uuid == gpu_uuid(0)
