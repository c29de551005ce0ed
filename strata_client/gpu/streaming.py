"""Experts in host slabs, brought to the GPU while others are computed.

The copy engine fills two staging buffers in turn, a group of experts each, on a stream
of its own. It waits only for the launches that read what a buffer held before, so it
runs ahead of the kernels, across layers, as far as two buffers allow.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from strata_api.v1 import pages
from strata_kernels.launch import DeviceBuffer
from strata_kernels.prompt import Experts

from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.device import Device
from strata_client.models.base import I32
from vmmd.driver.cuda_calls import call

I64 = npt.NDArray[np.int64]

N_BUFFERS = 2


class ExpertStream:
    """Two staging buffers and the stream that fills them. For the thread that publishes steps.

    A chunk's order and addresses are those of the table at `begin`; what they point to must stay as it is until
    the chunk's launches are done, as it does for a published step.

    Attributes:
        order: int32 `[n_layers, n_experts]`: the experts of each layer, those on a GPU first, then those in host slabs,
            last those that each owner computes.
    """

    def __init__(self, device: Device, expert_bytes: I64, staging_bytes: int) -> None:
        """Allocates.

        Args:
            device: whose stream computes.
            expert_bytes: int64 `[n_layers, n_experts, 3]`, gate, up and down; the same for all experts of a layer.
            staging_bytes: of both buffers together; each takes one expert at least.

        Errors: `DriverError`.
        """
        layouts = [pages.slot_layout(*map(int, layer)) for layer in expert_bytes.max(axis=1)]
        self._up, self._down, self._stride = ([layout[i] for layout in layouts] for i in (1, 2, 3))
        self._length = [
            layout[2] + int(layer) for layout, layer in zip(layouts, expert_bytes.max(axis=1)[:, 2], strict=True)
        ]
        self._n_layers, self._n_experts = expert_bytes.shape[:2]
        self._buffer_bytes = max(staging_bytes // N_BUFFERS, *self._stride)
        self._buffer = DeviceBuffer(N_BUFFERS * self._buffer_bytes)
        self._device = device
        cu = device.cu
        self._stream = int(call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        flag = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self._filled = [call(cu.cuEventCreate, flag) for _ in range(N_BUFFERS)]
        self._used = [call(cu.cuEventCreate, flag) for _ in range(N_BUFFERS)]
        self._next = 0
        self.order: I32 = np.tile(np.arange(self._n_experts, dtype=np.int32), (self._n_layers, 1))
        self._n_resident = np.full(self._n_layers, self._n_experts)
        self._n_here = np.full(self._n_layers, self._n_experts)
        self._computed_by: I64 = np.zeros((self._n_layers, self._n_experts), np.int64)
        self._sources: list[list[int]] = []

    def begin(self, table: AddressTable) -> bool:
        """Takes over where experts are now; whether `order` is another one."""
        self._computed_by = table.computed_by.astype(np.int64)
        order = np.argsort(np.where(table.in_host, 1, 2 * self._computed_by), axis=1, kind="stable").astype(np.int32)
        self._n_here = np.sum(self._computed_by == 0, axis=1)
        self._n_resident = self._n_here - table.in_host.sum(axis=1)
        self._sources = table.words[:, :, 0].tolist()
        is_new = not np.array_equal(order, self.order)
        self.order = order
        return is_new

    def parts(self, layer: int, addresses: int, *, is_in_place: bool = False) -> Iterator[Experts]:
        """The experts of a layer that are computed here in parts, in the order's places.

        Each part is to be enqueued on the device's stream before the next is asked for.

        Args:
            layer: the layers' number.
            addresses: of the layer's table on the device, for those that are read where they lie.
            is_in_place: so are all.

        Errors: `DriverError`.
        """
        end = int(self._n_here[layer])
        first = end if is_in_place else int(self._n_resident[layer])
        if first:
            yield Experts.in_place(addresses, 0, first)
        size = self._buffer_bytes // self._stride[layer]
        while first < end:
            last = min(first + size, end)
            at, self._next = self._next, (self._next + 1) % N_BUFFERS
            staged = self._fill(at, layer, first, last)
            yield Experts(0, staged, self._stride[layer], self._up[layer], self._down[layer], first, last)
            call(self._device.cu.cuEventRecord, self._used[at], self._device.stream)
            first = last

    def owned(self, layer: int, owner: int) -> tuple[int, int]:
        """Between which places those are that an owner computes, by its number from 0 on."""
        before = np.sum(self._computed_by[layer] <= owner)
        return int(before), int(before + np.sum(self._computed_by[layer] == owner + 1))

    def close(self) -> None:
        """Frees everything once the copies are done."""
        cu = self._device.cu
        call(cu.cuStreamSynchronize, self._stream)
        for event in (*self._filled, *self._used):
            call(cu.cuEventDestroy, event)
        call(cu.cuStreamDestroy, self._stream)
        self._buffer.close()

    def _fill(self, at: int, layer: int, first: int, last: int) -> int:
        """Enqueues the copies of a group, and that the launches to come wait for them; the buffer's address."""
        cu, sources = self._device.cu, self._sources[layer]
        address, length, stride = (
            self._buffer.address + at * self._buffer_bytes,
            self._length[layer],
            self._stride[layer],
        )
        call(cu.cuStreamWaitEvent, self._stream, self._used[at], 0)
        for i, expert in enumerate(self.order[layer, first:last].tolist()):
            call(cu.cuMemcpyAsync, address + i * stride, sources[expert], length, self._stream)
        call(cu.cuEventRecord, self._filled[at], self._stream)
        call(cu.cuStreamWaitEvent, self._device.stream, self._filled[at], 0)
        return address
