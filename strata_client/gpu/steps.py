"""Steps that GPUs retire by themselves: publishing, the address table that each reads, and waiting."""

import os
from collections.abc import Callable, Sequence

import numpy as np
from strata_api.v1 import pages

from strata_client.attached import Attached, Stage
from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.device import Device, bytes_at
from strata_client.gpu.owners import Owners
from strata_client.mapping import U64
from vmmd.driver.cuda_calls import call

IN_FLIGHT_MAX = 3
"""Steps that may run in a stage when another is published: one that ends, one that runs, and one that is to come."""

_PAGE_BYTES = 4096


class GpuSteps:
    """The steps of a stage on its GPU, some in flight at once. For one thread.

    Attributes:
        device: the GPU.
        retired: address of the session page's word where a step's last kernel writes its number, for kernels.
        heat: addresses of the heat page's counts of decoding and of prompts, uint64 `[n_layers, n_experts]` each,
            for kernels.
        table: where experts are, for the step that was published last.
        table_address: where on the GPU kernels read that; whoever has memory for it puts it here.
        owners: compute experts beside the GPU and have tables of their own; whoever has them puts them here.
    """

    def __init__(self, stage: Stage, device: Device, in_flight_max: int = IN_FLIGHT_MAX) -> None:
        """Takes the GPU, which is current, and how many steps may run when another is published.

        Errors: `DriverError`.
        """
        params, opened = stage.model.params, stage.opened
        self.device = device
        self.table_address = 0
        self.owners: Owners | None = None
        self._opened = opened
        self._in_flight_max = in_flight_max
        opened.steps.drain = device.synchronize
        line = opened.steps.line.ctypes.data
        page = bytes_at(line // _PAGE_BYTES * _PAGE_BYTES, _PAGE_BYTES)
        self.retired = device.register(page) + line % _PAGE_BYTES + pages.WORD_RETIRED * pages.WORD_BYTES
        decoding = device.register(opened.memory.heat) + pages.HEADER_WORDS * pages.WORD_BYTES
        self.heat = decoding, decoding + params.n_layers * params.n_experts * pages.WORD_BYTES
        self.table = AddressTable(opened.memory, stage.model.expert_sizes())
        shape = (1 + len(opened.memory.owners), *self.table.words.shape)  # the GPU's, then the owners'
        self._tables = device.pinned((in_flight_max + 1, *shape), np.uint64)
        self._read_back: U64 | None = np.zeros(shape, np.uint64) if os.environ.get("STRATA_DEBUG") else None
        self._ended = [device.event() for _ in range(in_flight_max + 1)]

    @property
    def number(self) -> int:
        """Of the step that was published last."""
        return int(self._opened.steps.line[pages.WORD_LAUNCHED])

    def wait(self, number: int) -> None:
        """Waits for the end of one of the last steps that may be in flight, or one before. Errors: `DriverError`."""
        call(self.device.cu.cuEventSynchronize, self._ended[number % len(self._ended)])

    def publish(self) -> None:
        """Publishes a step. Errors: as `Steps.publish`."""
        self._opened.steps.publish()

    def prepare(self, n: int, *, prompt: bool) -> None:
        """Reads where experts are, for the step of n tokens that was published. They stay there until it ends."""
        number = self.number
        self.wait(number - self._in_flight_max)
        if self.table.refresh():
            tables = self._tables[number % len(self._tables)]
            tables[:] = self.table.words, *self.table.of_owners
            self.device.upload(self.table_address, tables[0])
            if self.owners is not None:
                self.owners.upload_tables(tables[1:])
        if self._read_back is not None:  # nothing runs ahead then
            tables = [*self._read_back]
            self.device.download(tables[0], self.table_address)
            if self.owners is not None:
                self.owners.download_tables(tables[1:])
            self.table.check(tables)
        self._opened.memory.count(n, prompt=prompt)

    def abandon(self) -> None:
        """What is enqueued from here on waits for all that owners have begun. Errors: `DriverError`."""
        if self.owners is not None:
            self.owners.abandon()

    def mark_end(self) -> None:
        """All of the step that was published is enqueued. Errors: `DriverError`."""
        call(self.device.cu.cuEventRecord, self._ended[self.number % len(self._ended)], self.device.stream)


def enqueue(
    attached: Attached,
    stages: Sequence[GpuSteps],
    n: int,
    launch: Callable[[int], None],
    *,
    prompt: bool,
    check: Callable[[], None],
    skip: Callable[[int], None],
) -> None:
    """Publishes a step that evaluates n tokens and launches it, stage by stage.

    Args:
        attached: the model.
        stages: its stages' steps.
        n: tokens.
        launch: enqueues the step in a stage, by its place in `stages`, whose GPU is current; the stage's last kernel
            retires it.
        prompt: the tokens are a prompt's.
        check: called once the step is published; raises where there is no memory for it.
        skip: enqueues in a stage what retires the step without doing anything.

    Errors: `LeaseRevoked`, `DriverError`; what `check` and `launch` raise.
    """
    signals = attached.signals
    signals.between_steps()
    signals.hold()
    begun: list[int] = []
    try:
        for at, steps in enumerate(stages):
            steps.publish()
            begun.append(at)
        check()
        for steps in stages:
            steps.prepare(n, prompt=prompt)
        for at, steps in enumerate(stages):
            steps.device.make_current()
            launch(at)
            begun.remove(at)
            steps.mark_end()
    except BaseException:
        for at in begun:
            stages[at].device.make_current()
            try:
                stages[at].abandon()
            finally:
                skip(at)
        raise
    finally:
        signals.release()
