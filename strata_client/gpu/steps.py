"""Steps that a GPU retires by itself: publishing, the address table that each reads, and waiting."""

import os

import numpy as np
from strata_api.v1 import pages

from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.device import Device, bytes_at
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.session import OpenedModel
from vmmd.driver.cuda_calls import call

_PAGE_BYTES = 4096


class GpuSteps:
    """Steps of a model on a GPU, some in flight at once. For one thread.

    Attributes:
        retired: address of the session page's word where a step's last kernel writes its number, for kernels.
        heat: addresses of the heat page's counts of decoding and of prompts, uint64 `[n_layers, n_experts]` each,
            for kernels.
        table: where experts are, for the step that was published last.
        number: of that step.
    """

    def __init__(
        self, device: Device, model: Qwen3Moe, opened: OpenedModel, table_address: int, in_flight_max: int
    ) -> None:
        """Prepares for steps.

        Args:
            device: where they run.
            model: the model.
            opened: its memory and steps.
            table_address: where on the device kernels read the address table.
            in_flight_max: how many steps may have begun when another does.

        Errors: `DriverError`.
        """
        params, steps = model.params, opened.steps
        self.number = 0
        self._device = device
        self._steps = steps
        self._table_address = table_address
        self._in_flight_max = in_flight_max
        steps.drain = device.synchronize
        line = steps.line.ctypes.data
        page = bytes_at(line // _PAGE_BYTES * _PAGE_BYTES, _PAGE_BYTES)
        self.retired = device.register(page) + line % _PAGE_BYTES + pages.WORD_RETIRED * pages.WORD_BYTES
        decoding = device.register(opened.memory.heat) + pages.HEADER_WORDS * pages.WORD_BYTES
        self.heat = decoding, decoding + params.n_layers * params.n_experts * pages.WORD_BYTES
        self.table = AddressTable(opened.memory, model.expert_sizes())
        self._tables = device.pinned((in_flight_max + 1, *self.table.words.shape), np.uint64)
        self._read_back = np.zeros_like(self.table.words) if os.environ.get("STRATA_DEBUG") else None
        self._ended = [device.event() for _ in range(in_flight_max + 1)]

    def publish(self) -> None:
        """Publishes a step. Errors: as `Steps.publish`."""
        self.number = self._steps.publish()

    def update_table(self) -> None:
        """Reads where experts are, for the step that was published. They stay there until it ends."""
        self.wait(self.number - self._in_flight_max)
        if self.table.refresh():
            place = self.number % len(self._tables)
            self._tables[place] = self.table.words
            self._device.upload(self._table_address, self._tables[place])
        if self._read_back is not None:  # nothing runs ahead then
            self._device.download(self._read_back, self._table_address)
            self.table.check(self._read_back)

    def mark_end(self) -> None:
        """All of the step that was published is enqueued."""
        call(self._device.cu.cuEventRecord, self._ended[self.number % len(self._ended)], self._device.stream)

    def wait(self, number: int) -> None:
        """Waits for the end of a step that may be in flight, or of one before. Errors: `DriverError`."""
        call(self._device.cu.cuEventSynchronize, self._ended[number % len(self._ended)])
