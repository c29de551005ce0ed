"""Experts that are brought to a GPU: what is computed, in which order, and from which bytes."""

import ctypes
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from strata_client.gpu import streaming
from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.streaming import ExpertStream
from tests.helpers.host_device import HostBuffer, HostDevice

SIZES = (300, 260, 500)  # of gate, up and down: no multiples of 256
UP, DOWN, STRIDE = 512, 1024, 1536


class Table:
    """Experts in host memory, each with bytes of its own."""

    def __init__(self, n_layers: int, n_experts: int, rng: np.random.Generator) -> None:
        self.slots = rng.integers(0, 256, (n_layers, n_experts, STRIDE), np.uint8)
        self.in_host = np.zeros((n_layers, n_experts), np.bool_)
        self.computed_by = np.zeros((n_layers, n_experts), np.int8)
        first = self.slots.ctypes.data + np.arange(n_layers * n_experts, dtype=np.uint64) * np.uint64(STRIDE)
        offsets = np.array([0, UP, DOWN], np.uint64)
        self.words = (first[:, None] + offsets).reshape(n_layers, n_experts, 3)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> HostDevice:
    """A GPU that the host plays."""
    monkeypatch.setattr(streaming, "DeviceBuffer", HostBuffer)
    return HostDevice(rng)


def make(device: HostDevice, n_layers: int, n_experts: int, experts_a_buffer: int) -> ExpertStream:
    """Two buffers of so many experts."""
    sizes = np.tile(np.array(SIZES, np.int64), (n_layers, n_experts, 1))
    return ExpertStream(cast(Any, device), sizes, 2 * experts_a_buffer * STRIDE)


Reads = list[tuple[int, int, npt.NDArray[np.uint8]]]


def run(device: HostDevice, stream: ExpertStream, table: Table, n_chunks: int) -> list[Reads]:
    """Reads every expert of every layer as kernels would, and tells layer, expert and bytes of each chunk."""
    found: list[Reads] = [[] for _ in range(n_chunks)]
    for reads in found:
        stream.begin(cast(AddressTable, table))
        order = stream.order.copy()
        for layer in range(len(order)):
            for part in stream.parts(layer, 4096 * (layer + 1)):
                for place in range(part.first, part.last):
                    expert = int(order[layer, place])
                    if part.addresses:
                        assert part.addresses == 4096 * (layer + 1)
                        address = int(table.words[layer, expert, 0])
                        offsets = (0, UP, DOWN)
                    else:
                        address, offsets = part.staged + (place - part.first) * part.stride, (0, part.up, part.down)

                    def read(
                        address: int = address, offsets: Any = offsets, key: Any = (layer, expert), to: Reads = reads
                    ) -> None:
                        parts = [ctypes.string_at(address + at, size) for at, size in zip(offsets, SIZES, strict=True)]
                        to.append((*key, np.frombuffer(b"".join(parts), np.uint8)))

                    device.cu.enqueue(device.stream, read)
    device.synchronize()
    return found


@pytest.mark.parametrize("experts_a_buffer", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_expert_is_read_once(
    device: HostDevice, rng: np.random.Generator, experts_a_buffer: int, share: float
) -> None:
    """Whatever runs first, kernels find each expert's own bytes, and only those in host slabs are copied."""
    n_layers, n_experts = 3, 11
    stream = make(device, n_layers, n_experts, experts_a_buffer)
    table = Table(n_layers, n_experts, rng)
    table.in_host = rng.random((n_layers, n_experts)) < share
    for reads in run(device, stream, table, n_chunks=3):
        assert sorted((layer, expert) for layer, expert, _ in reads) == list(np.ndindex(n_layers, n_experts))
        for layer, expert, data in reads:
            slot = table.slots[layer, expert]
            parts = [slot[at : at + size] for at, size in zip((0, UP, DOWN), SIZES, strict=True)]
            assert np.array_equal(data, np.concatenate(parts))
    assert device.cu.copied_bytes == 3 * table.in_host.sum() * (DOWN + SIZES[2])
    stream.close()


def test_order(device: HostDevice, rng: np.random.Generator) -> None:
    """Experts on the GPU come first, and the order is told to be new only where it is."""
    stream, table = make(device, 2, 6, 2), Table(2, 6, rng)
    assert not stream.begin(cast(AddressTable, table))
    table.in_host[1, [0, 3]] = True
    assert stream.begin(cast(AddressTable, table))
    assert stream.order.tolist() == [[0, 1, 2, 3, 4, 5], [1, 2, 4, 5, 0, 3]]
    assert not stream.begin(cast(AddressTable, table))
    assert [(part.first, part.last, bool(part.addresses)) for part in stream.parts(0, 8)] == [(0, 6, True)]
    parts = [(part.first, part.last, bool(part.addresses)) for part in stream.parts(1, 8)]
    assert parts == [(0, 4, True), (4, 6, False)]
    device.synchronize()
    stream.close()


def test_what_owners_compute_is_neither_read_nor_copied(device: HostDevice, rng: np.random.Generator) -> None:
    """An owner's experts are last in the order, and in no part of the computing device's, with copies or without."""
    stream, table = make(device, 2, 7, 2), Table(2, 7, rng)
    table.computed_by[0, [0, 5]], table.computed_by[0, 3], table.computed_by[1] = 1, 2, 1
    table.in_host[0, [1, 2, 6]] = True
    assert stream.begin(cast(AddressTable, table))
    assert stream.order.tolist() == [[4, 1, 2, 6, 0, 5, 3], [0, 1, 2, 3, 4, 5, 6]]
    assert [[stream.owned(layer, owner) for owner in (0, 1)] for layer in (0, 1)] == [
        [(4, 6), (6, 7)],
        [(0, 7), (7, 7)],
    ]

    def parts(layer: int, is_in_place: bool) -> list[tuple[int, int, bool]]:
        found = stream.parts(layer, 8, is_in_place=is_in_place)
        return [(part.first, part.last, bool(part.addresses)) for part in found]

    assert parts(0, is_in_place=False) == [(0, 1, True), (1, 3, False), (3, 4, False)]
    assert parts(0, is_in_place=True) == [(0, 4, True)]
    assert parts(1, is_in_place=False) == parts(1, is_in_place=True) == []
    table.computed_by[:], table.in_host[:] = 0, False
    assert stream.begin(cast(AddressTable, table)) and stream.order.tolist() == [[*range(7)]] * 2
    device.synchronize()
    stream.close()


def test_an_expert_larger_than_the_staging_memory(device: HostDevice) -> None:
    """Each buffer takes one expert at least."""
    stream, table = make(device, 1, 3, 0), Table(1, 3, np.random.default_rng(0))
    table.in_host[:] = True
    assert len(run(device, stream, table, 1)[0]) == 3
    stream.close()
