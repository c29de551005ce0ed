"""The sequences of a batch on a GPU: one graph launch evaluates a token of each, one step ahead of what is read.

A row has a place on the device, and places are dense: when one is left, the last row moves there. While the host
reads a step's tokens the next runs already, also for rows that turn out to have ended; what those get is not read.

All but the last token of a prompt is evaluated in chunks. The last is the first that a step of decoding evaluates, so
that a prompt needs neither logits nor a choice of its own.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from strata_kernels import structs
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import Kernels
from strata_kernels.structs import Activation, Heat, KvCells, Step

from strata_client import timings
from strata_client.attached import Attached
from strata_client.batch import Row
from strata_client.gpu import batch_decoder, steps
from strata_client.gpu import engine as one_sequence
from strata_client.gpu.arguments import kv_cells, sample_options, seen_bits
from strata_client.gpu.batch_decoder import BatchDecoder
from strata_client.gpu.decoder import Buffers
from strata_client.gpu.engine import NOT_FINITE
from strata_client.gpu.prompt import STAGING_BYTES, Prompt
from strata_client.gpu.stage import Loaded
from strata_client.gpu.steps import GpuSteps
from strata_client.gpu.streaming import ExpertStream
from strata_client.models.base import ModelError
from vmmd.errors import InvalidRequest


def load(device_uuid: str, kv_type: str, types: Sequence[str], owners: Sequence[str]) -> Loaded:
    """A GPU, and on it the kernels of a batch: as `strata_client.gpu.engine.load`.

    Errors: `InvalidRequest` where it has owners.
    """
    if owners:
        raise InvalidRequest(
            f"--peer-device: {device_uuid} has no path to {', '.join(owners)}, so they would compute the experts there;"
            " that is done for one sequence at a time, not for a batch: leave out --batch, or these peers"
        )
    return one_sequence.load(device_uuid, kv_type, types, sources=(*batch_decoder.SOURCES, f"attend_rows_{kv_type}"))


class GpuBatch:
    """A `strata_client.batch.BatchEngine` on a GPU. For one thread."""

    def __init__(self, attached: Attached, rows_max: int) -> None:
        """Takes what stays the caller's; `attached.kernels` are what `load` makes.

        Errors: `ModelError` where the kernels cannot run the model; `InvalidRequest` for more rows than they take;
        `DriverError`; as `load`.
        """
        assert attached.kernels is not None
        self.attached = attached
        model, memory, params = attached.model, attached.opened.memory, attached.model.params
        with timings.stage("wait for kernels"):
            loaded: Loaded = attached.kernels.result()
        device, kernels = loaded.device, loaded.kernels
        device.make_current()
        n_experts = params.n_layers * params.n_experts
        self._device = device
        self._buffers = Buffers(
            {"table": 3 * 8 * n_experts, "heat": 8 * n_experts, "h": Activation.size_bytes(params.d_model)}
        )
        table = self._buffers["table"].value
        self._steps = GpuSteps(attached.stage, device)
        self._steps.table_address = table
        decoding, prompts = self._steps.heat
        with timings.stage("prepare"):
            self._decoder = BatchDecoder(
                device, kernels, model, memory, attached.kv_type, rows_max, table, self._steps.retired,
                Heat(self._buffers["heat"].value, decoding),
                in_place=lambda: Kernels([SOURCES / "batch_matmul_in_place.cu"], model.type_names()),
            )  # fmt: skip
            self._prompt = Prompt(
                device, kernels, model, memory, attached.kv_type, table=table, heat=prompts,
                h=Activation.at(self._buffers["h"].value, params.d_model),
                stream=ExpertStream(device, model.expert_sizes(), STAGING_BYTES),
            )  # fmt: skip
            retired = ctypes.c_uint64(self._steps.retired)
            self._end = kernels.prepare(
                "end_step", 1, 32, [self._decoder.buffers["step"], 0, retired], stream=device.stream
            )
        self._rows: list[Row] = []  # by place
        self._enqueued: dict[Row, int] = {}  # cells that are filled once all steps have ended
        self._pending: deque[tuple[int, list[Row | None]]] = deque()  # numbers of steps that are not read, and rows

    def prefill(self, row: Row) -> bool:
        """Enqueues the next chunk of a prompt; whether there is none left."""
        sequence, left = row.sequence, len(row.prompt) - 1 - row.sequence.position
        tokens = np.asarray(row.prompt[sequence.position :][: min(left, self._prompt.tokens_max)], np.int32)
        if left:

            def launch(at: int) -> None:
                self._set_number()
                self._prompt.enqueue(tokens, sequence.position, self._cells(row), self._steps.table)
                self._end()

            self._enqueue([(row, sequence.position + len(tokens))], len(tokens), launch, prompt=True)
            sequence.position += len(tokens)
            sequence.transcript.add(tokens.tolist())
        return sequence.position == len(row.prompt) - 1

    def join(self, row: Row) -> None:
        """Lets it take part in the steps that are enqueued from now on."""
        tokens = [*row.prompt, *row.tokens]
        options, self._enqueued[row] = row.options, len(tokens) - 1
        assert options.seed is not None
        how = sample_options(options, options.seed, len(row.prompt))
        seen = seen_bits(row.seen, self.attached.model.params.n_vocab)
        self._decoder.set_row(len(self._rows), self._cells(row), len(tokens) - 1, tokens[-1], how, seen)
        self._rows.append(row)

    def leave(self, row: Row) -> None:
        """Lets it take part no more; waits until no step does anything for it."""
        place, last = self._rows.index(row), self._rows.pop()
        if last is not row:
            self._rows[place] = last
            self._decoder.move_row(len(self._rows), place)
        del self._enqueued[row]
        self._device.synchronize()
        for _, rows in self._pending:
            rows[:] = [None if other is row else other for other in rows]
        while self._pending and not any(self._pending[0][1]):
            self._pending.popleft()

    def step(self) -> Sequence[tuple[Row, int]]:
        """The next token of each row that took part in the oldest step that is not read."""
        if not self._pending:
            self._launch()
        number, rows = self._pending.popleft()
        if all(self._enqueued[row] < row.sequence.cells for row in self._rows):
            self._launch()
        self._steps.wait(number)
        chosen = self._decoder.ring[number % structs.RING_WORDS].tolist()
        found = [(row, token) for row, token in zip(rows, chosen, strict=False) if row is not None]
        if any(token == NOT_FINITE for _, token in found):
            raise ModelError("the logits are not finite; the model file is damaged or needs more than float32")
        for row, _ in found:
            row.sequence.position += 1
            row.sequence.transcript.add([row.tokens[-1] if row.tokens else row.prompt[-1]])
        return found

    def close(self) -> None:
        """Waits until nothing runs any more, and gives back what this has on the GPU."""
        self._device.close()
        self._prompt.close()
        self._decoder.close()
        self._buffers.close()

    def _launch(self) -> None:
        """Enqueues a step that evaluates the next token of every row."""
        rows = list(self._rows)
        self._enqueue(
            [(row, self._enqueued[row] + 1) for row in rows],
            len(rows),
            lambda at: self._decoder.launch(len(rows), self._steps.number),
            prompt=False,
        )
        for row in rows:
            self._enqueued[row] += 1
        self._pending.append((self._steps.number, [*rows]))

    def _enqueue(
        self, cells: Sequence[tuple[Row, int]], n: int, launch: Callable[[int], None], *, prompt: bool
    ) -> None:
        """Enqueues a step that evaluates n tokens, for which rows need so many cells."""

        def check() -> None:
            for row, wanted in cells:
                row.sequence.check_cells(wanted)

        steps.enqueue(self.attached, [self._steps], n, launch, prompt=prompt, check=check, skip=self._skip)
        self.attached.count(n, self.attached.cells)

    def _skip(self, at: int) -> None:
        """Retires a step that does nothing."""
        self._set_number()
        self._end()

    def _set_number(self) -> None:
        """Lets what is enqueued next, other than rows' steps, run as the step that was published."""
        step = np.frombuffer(bytearray(Step(self._steps.number, 0, 0)), np.uint8)
        self._device.upload(self._decoder.buffers["step"].value, step)

    def _cells(self, row: Row) -> KvCells:
        return kv_cells(row.sequence.kv, self.attached.model.params, self.attached.kv_type)
