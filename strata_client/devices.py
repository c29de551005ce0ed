"""Which of the daemon's devices a session uses: the one that computes, and peers that hold experts for it.

The daemon sees every GPU of the host, a process perhaps some, and in another order
(CUDA_VISIBLE_DEVICES). So devices go by UUID, numbers are those of the daemon's
list, and what this process does not see is refused before anything is opened there.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from strata_api.v1 import memory_pb2 as wire

from vmmd.errors import InvalidRequest, NoDevice

VISIBLE_SIMULATED = "STRATA_VISIBLE_DEVICES"
"""Indexes or UUIDs of the simulated devices that a process sees, as CUDA_VISIBLE_DEVICES is for GPUs."""


class Peer(NamedTuple):
    """A device that holds experts for another, and its number in the daemon's list.

    Attributes:
        is_owner: there is no path to it, so it computes the experts that it owns. Else they are read in place.
    """

    number: int
    device: wire.Device
    is_owner: bool


def is_gpu(device_uuid: str) -> bool:
    """Whether a device is a GPU; else it computes in the host's memory."""
    return device_uuid.startswith(("GPU-", "MIG-"))


def choose_device(devices: Sequence[wire.Device], wanted: str | None) -> wire.Device:
    """The device that a user means.

    Args:
        devices: the daemon's list.
        wanted: a UUID, the beginning of exactly one, or an index of the list; None
            takes the first that computes and that this process sees.

    Errors: `NoDevice`, naming what was wanted and what there is.
    """
    if not devices:
        raise NoDevice("the daemon has no device")
    seen = _seen(devices)
    if wanted is not None:
        return devices[_visible(devices, _index(devices, wanted, "--device"), seen, f"--device {wanted}")]
    computing = [i for i, device in enumerate(devices) if not device.is_host] or [0]
    first = next((i for i in computing if i in seen), computing[0])
    return devices[_visible(devices, first, seen, "--device")]


def choose_devices(devices: Sequence[wire.Device], wanted: Sequence[str]) -> list[wire.Device]:
    """The devices that shall compute together, named as for `choose_device`; without names all that this process sees.

    Errors: `NoDevice`, `InvalidRequest` (named twice).
    """
    if not wanted:
        first = choose_device(devices, None)
        seen = _seen(devices)
        return [device for i, device in enumerate(devices) if device is first or (i in seen and not device.is_host)]
    chosen: list[wire.Device] = []
    for name in wanted:
        device = choose_device(devices, name)
        if device.is_host:
            raise NoDevice(f"--device {name}: {device.uuid} computes nothing")
        if device in chosen:
            raise InvalidRequest(f"--device {name}: {device.uuid} was named before; name each device once")
        chosen.append(device)
    return chosen


def choose_peers(devices: Sequence[wire.Device], computing: wire.Device, wanted: Sequence[str]) -> list[Peer]:
    """The devices that shall hold experts for the computing one, named as for `choose_device`.

    Errors: `NoDevice` (there is none such, or it cannot serve), `InvalidRequest` (named twice, or the computing one).
    """
    seen = _seen(devices) if wanted else set()
    peers: list[Peer] = []
    for name in wanted:
        option = f"--peer-device {name}"
        index = _visible(devices, _index(devices, name, "--peer-device"), seen, option)
        device = devices[index]
        if device.is_host:
            raise NoDevice(f"{option}: {device.uuid} computes nothing, and experts without a slot are there anyway")
        if device.uuid == computing.uuid or any(peer.number == index for peer in peers):
            what = "computes already" if device.uuid == computing.uuid else "was named before"
            raise InvalidRequest(f"{option}: {device.uuid} {what}; name each device once")
        peers.append(Peer(index, device, computing.uuid not in device.reached_by_uuids))
    return peers


def _index(devices: Sequence[wire.Device], wanted: str, option: str) -> int:
    """Which of the list a name means. Errors: `NoDevice`."""
    exact = [i for i, device in enumerate(devices) if device.uuid == wanted]
    found = exact or [i for i, device in enumerate(devices) if wanted and device.uuid.startswith(wanted)]
    if not found and wanted.isascii() and wanted.isdigit() and int(wanted) < len(devices):
        found = [int(wanted)]
    if len(found) == 1:
        return found[0]
    problem = "is not a device of the daemon" if not found else "is the beginning of several devices"
    raise NoDevice(f"{option} {wanted} {problem}; there are {_listed(devices, range(len(devices)))}")


def _visible(devices: Sequence[wire.Device], index: int, seen: set[int], option: str) -> int:
    """The index, if this process sees the device. Errors: `NoDevice`."""
    if index in seen:
        return index
    variable = "CUDA_VISIBLE_DEVICES" if is_gpu(devices[index].uuid) else VISIBLE_SIMULATED
    there = _listed(devices, sorted(i for i in seen if not devices[i].is_host)) or "none"
    raise NoDevice(
        f"{option}: this process does not see {devices[index].uuid}; of the daemon's devices it sees {there}"
        f" ({variable})"
    )


def _listed(devices: Sequence[wire.Device], indexes: Sequence[int]) -> str:
    return ", ".join(f"{i}: {devices[i].uuid}" for i in indexes)


def _seen(devices: Sequence[wire.Device]) -> set[int]:
    """Indexes of the devices that this process can use. Where there is no choice it is not asked: CUDA will tell."""
    computing = [i for i, device in enumerate(devices) if not device.is_host]
    if len(computing) < 2:
        return set(range(len(devices)))
    gpus = [i for i in computing if is_gpu(devices[i].uuid)]
    hidden = set(gpus) - _seen_gpus(devices) if gpus else set()
    names = os.environ.get(VISIBLE_SIMULATED)
    if names is not None:
        named = {name.strip() for name in names.split(",")}
        hidden |= {i for i in computing if i not in gpus and not named & {str(i), devices[i].uuid}}
    return set(range(len(devices))) - hidden


def _seen_gpus(devices: Sequence[wire.Device]) -> set[int]:
    from vmmd.driver import cuda_calls  # loads CUDA, which clients on the host do without

    gpus, _ = cuda_calls.find_gpus(cuda_calls.bindings())
    uuids = {gpu.uuid for gpu in gpus}
    return {i for i, device in enumerate(devices) if device.uuid in uuids}
