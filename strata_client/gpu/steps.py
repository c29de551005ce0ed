"""Steps that a GPU retires by itself: publishing, the address table that each reads, and waiting."""

import os
from collections.abc import Callable

import numpy as np
from strata_api.v1 import pages

from strata_client.attached import Attached
from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.device import Device, bytes_at
from vmmd.driver.cuda_calls import call

IN_FLIGHT_MAX = 3

_PAGE_BYTES = 4096


class GpuSteps:
    """Steps of an attached model on a GPU, some in flight at once. For one thread.

    Attributes:
        retired: address of the session page's word where a step's last kernel writes its number, for kernels.
        heat: addresses of the heat page's counts of decoding and of prompts, uint64 `[n_layers, n_experts]` each,
            for kernels.
        table: where experts are, for the step that was published last.
    """

    def __init__(self, attached: Attached, device: Device, table_address: int) -> None:
        """Takes the GPU, and where on it kernels read the address table. Errors: `DriverError`."""
        params, opened = attached.model.params, attached.opened
        self._attached = attached
        self._device = device
        self._table_address = table_address
        opened.steps.drain = device.synchronize
        line = opened.steps.line.ctypes.data
        page = bytes_at(line // _PAGE_BYTES * _PAGE_BYTES, _PAGE_BYTES)
        self.retired = device.register(page) + line % _PAGE_BYTES + pages.WORD_RETIRED * pages.WORD_BYTES
        decoding = device.register(opened.memory.heat) + pages.HEADER_WORDS * pages.WORD_BYTES
        self.heat = decoding, decoding + params.n_layers * params.n_experts * pages.WORD_BYTES
        self.table = AddressTable(opened.memory, attached.model.expert_sizes())
        self._tables = device.pinned((IN_FLIGHT_MAX + 1, *self.table.words.shape), np.uint64)
        self._read_back = np.zeros_like(self.table.words) if os.environ.get("STRATA_DEBUG") else None
        self._ended = [device.event() for _ in range(IN_FLIGHT_MAX + 1)]

    def enqueue(
        self,
        n: int,
        launch: Callable[[int], None],
        *,
        prompt: bool,
        check: Callable[[], None],
        skip: Callable[[int], None],
    ) -> int:
        """Publishes a step that evaluates n tokens and launches it; its number.

        Args:
            n: tokens.
            launch: enqueues the step of a number, which retires itself at its end.
            prompt: the tokens are a prompt's.
            check: called once it is published; raises where there is no memory for it.
            skip: enqueues what retires the step of a number without doing anything.

        Errors: `LeaseRevoked`, `DriverError`; what `check` and `launch` raise.
        """
        signals, opened = self._attached.signals, self._attached.opened
        signals.between_steps()
        signals.hold()
        try:
            number = opened.steps.publish()
            try:
                check()
                self._update_table(number)
                opened.memory.count(n, prompt=prompt)
                launch(number)
            except BaseException:
                skip(number)
                raise
        finally:
            signals.release()
        call(self._device.cu.cuEventRecord, self._ended[number % len(self._ended)], self._device.stream)
        return number

    def wait(self, number: int) -> None:
        """Waits for the end of one of the last `IN_FLIGHT_MAX` steps, or one before. Errors: `DriverError`."""
        call(self._device.cu.cuEventSynchronize, self._ended[number % len(self._ended)])

    def _update_table(self, number: int) -> None:
        """Reads where experts are, for the step that was published. They stay there until it ends."""
        self.wait(number - IN_FLIGHT_MAX)
        if self.table.refresh():
            place = number % len(self._tables)
            self._tables[place] = self.table.words
            self._device.upload(self._table_address, self._tables[place])
        if self._read_back is not None:  # nothing runs ahead then
            self._device.download(self._read_back, self._table_address)
            self.table.check(self._read_back)
