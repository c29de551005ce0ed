"""The engine on a GPU: steps run ahead of the tokens that are read.

A step of decoding is one graph launch. While the host reads a step's token, the next
one runs already: the GPU chose that token itself. The step that was enqueued last is
therefore one that nobody may want; it is simply not read. A prompt's steps are chunks
of it, launched kernel by kernel.
"""

import ctypes
import os
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from strata_api.v1 import pages
from strata_kernels import structs
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import Kernels
from strata_kernels.structs import Activation, KvCells, SampleOptions, Step

from strata_client import timings
from strata_client.attached import Attached
from strata_client.engine import Engine
from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.decoder import Decoder
from strata_client.gpu.device import Device, bytes_at
from strata_client.gpu.prompt import LOGITS_TOKENS, STAGING_BYTES, Prompt
from strata_client.gpu.streaming import ExpertStream
from strata_client.models.base import F32, I32, ModelError
from strata_client.sampler import SamplerOptions
from strata_client.sequence import TokenSequence
from vmmd.driver.cuda_calls import call

KV_TYPES = {"f16": structs.KV_F16, "bf16": structs.KV_BF16, "q8_0": structs.KV_Q8_0}
KV_TYPE_DEFAULT = "f16"

_SOURCES = ("decode", "sample", "prompt_matmul", "prompt_route", "prompt_rows", "store_kv")
_IN_FLIGHT_MAX = 3
NOT_FINITE = (1 << 64) - 1
"""What `ring` has instead of a token."""

_TOKEN_OFFSET = Step.token.offset
_PAGE_BYTES = 4096


def load(device_uuid: str, kv_type: str, types: Sequence[str], sources: Sequence[str] = ()) -> tuple[Device, Kernels]:
    """A GPU, and on it the kernels for K/V cells of a type, a key of `KV_TYPES`, and tensors of some types.

    `sources`: names of further files with kernels.

    For any thread. Errors: `NoDevice`, `NotFound`, `DriverError`; as `compile_source` where they are not compiled yet.
    """
    with timings.stage("context"):
        device = Device(device_uuid)
    with timings.stage("kernels"):
        return device, Kernels([SOURCES / f"{name}.cu" for name in (*_SOURCES, f"attend_{kv_type}", *sources)], types)


class GpuEngine(Engine):
    """One sequence, on a GPU. For one thread."""

    def __init__(self, attached: Attached, sequence: TokenSequence) -> None:
        """Takes what `Engine` does; `attached.kernels` are what `load` makes.

        Errors: `ModelError` where the kernels cannot run the model; `DriverError`; as `load`.
        """
        super().__init__(attached, sequence)
        assert attached.kernels is not None
        model, memory, steps = attached.model, attached.opened.memory, attached.opened.steps
        params = model.params
        with timings.stage("wait for kernels"):
            self._device, kernels = attached.kernels.result()
        device = self._device
        device.make_current()
        steps.drain = device.synchronize
        self._cells = KvCells(
            sequence.kv.range.address,
            sequence.kv.range.slab_bytes,
            sequence.kv.cells_per_slab,
            params.n_kv_heads,
            params.head_dim,
            KV_TYPES[attached.kv_type],
        )
        line = steps.line.ctypes.data
        page = bytes_at(line // _PAGE_BYTES * _PAGE_BYTES, _PAGE_BYTES)
        retired = device.register(page) + line % _PAGE_BYTES + pages.WORD_RETIRED * pages.WORD_BYTES
        heat = device.register(memory.heat) + pages.HEADER_WORDS * pages.WORD_BYTES
        with timings.stage("graph"):
            self._decoder = Decoder(
                device, kernels, model, memory, self._cells, retired, heat,
                in_place=lambda: Kernels([SOURCES / "decode_in_place.cu"], model.type_names()),
            )  # fmt: skip
            self._decoder.capture()
            buffers = self._decoder.buffers
            launches = dict(self._decoder.launches)
            self._head, self._sample = launches["head"], launches["sample"]
            self._skip, self._end = (
                kernels.prepare(
                    "end_step", 1, 32, [buffers["step"], cells, ctypes.c_uint64(retired)], stream=device.stream
                )
                for cells in (0, 1)
            )
        with timings.stage("prompt kernels"):
            self._prompt = Prompt(
                device, kernels, model, memory, attached.kv_type, table=buffers["table"].value,
                heat=heat + params.n_layers * params.n_experts * pages.WORD_BYTES,
                h=Activation.at(buffers["h"].value, params.d_model),
                stream=ExpertStream(device, model.expert_sizes(), STAGING_BYTES),
            )  # fmt: skip
        self._table = AddressTable(memory, model.expert_sizes())
        self._tables = device.pinned((_IN_FLIGHT_MAX + 1, *self._table.words.shape), np.uint64)
        self._read_back = np.zeros_like(self._table.words) if os.environ.get("STRATA_DEBUG") else None
        self._tokens = device.pinned((_IN_FLIGHT_MAX + 1, 1), np.int32)
        self._ended = [device.event() for _ in range(_IN_FLIGHT_MAX + 1)]
        self._pending: deque[int] = deque()  # steps whose tokens are not read
        self._enqueued = 0  # cells that are filled once all steps have ended
        self._computing: list[int] = []  # tokens whose cells are filled once the next token is read
        self._place(0)

    def begin(self, prompt: Sequence[int], options: SamplerOptions) -> None:
        """Evaluates a prompt, at least one token, and takes how to choose those that follow it.

        Cells that hold its beginning already are kept. Errors: `LeaseRevoked`, `DriverError`.
        """
        sequence = self.sequence
        sequence.keep(prompt)
        if self._pending or self._enqueued != sequence.kept:
            self._place(sequence.kept)
        seed = int.from_bytes(os.urandom(7)) if options.seed is None else options.seed % (1 << 64)
        how = SampleOptions(
            options.temperature,
            options.top_p,
            options.min_p,
            options.repeat_penalty,
            seed,
            min(options.top_k, (1 << 31) - 1),
            len(prompt) - 1,
        )
        buffers, device = self._decoder.buffers, self._device
        device.upload(buffers["options"].value, np.frombuffer(bytearray(how), np.uint8))
        seen = np.zeros(-(-self.attached.model.params.n_vocab // 32) * 32, np.uint8)
        seen[np.asarray(prompt)] = 1
        device.upload(buffers["seen"].value, np.packbits(seen, bitorder="little"))
        rest = np.asarray(prompt[sequence.kept :], np.int32)
        while len(rest) > self._prompt.tokens_max:
            self._enqueue_chunk(rest[: self._prompt.tokens_max], self._end)
            rest = rest[self._prompt.tokens_max :]
        self._pending.append(self._enqueue_chunk(rest, self._head, self._sample))
        sequence.position = self._enqueued
        self._computing = list(prompt[sequence.kept :])
        self._last = None

    def next_token(self) -> int:
        """The next token of the text. For each but the first, the sequence's `has_room` is asked before.

        Errors: `LeaseRevoked`; `ModelError` if the logits are not finite; `DriverError`.
        """
        if self._last is not None:
            self.sequence.position += 1
            self._computing.append(self._last)
        if not self._pending:
            self._pending.append(self._enqueue_token(None))
        number = self._pending.popleft()
        if self._enqueued < self.sequence.cells:
            self._pending.append(self._enqueue_token(None))
        self._wait(number)
        token = int(self._decoder.ring[number % structs.RING_WORDS])
        if token == NOT_FINITE:
            raise ModelError("the logits are not finite; the model file is damaged or needs more than float32")
        self.sequence.transcript.add(self._computing)
        self._computing.clear()
        self._last = token
        return token

    def step(self, tokens: Sequence[int], *, prompt: bool, all_logits: bool = False) -> F32:
        """Evaluates tokens at the end of the sequence.

        Returns:
            Logits float32 `[n_vocab]` of the last token, or `[n, n_vocab]` of all.

        Errors: `LeaseRevoked` if the daemon has taken cells back; `DriverError`.
        """
        if self._pending or self._enqueued != self.sequence.position:
            self._place(self.sequence.position)
        width = LOGITS_TOKENS if prompt else 1
        rows = [self._logits_of(tokens[at : at + width], prompt) for at in range(0, len(tokens), width)]
        logits = np.concatenate(rows if all_logits else rows[-1:])
        logits[:, self.attached.model.params.n_tokens :] = -np.inf
        self.sequence.transcript.add(tokens)
        self.sequence.position = self._enqueued
        return logits if all_logits else logits[-1]

    def close(self) -> None:
        """Waits until nothing runs any more, and gives back what this has on the GPU."""
        self._device.close()
        self._prompt.close()
        self._decoder.buffers.close()

    def _logits_of(self, tokens: Sequence[int], prompt: bool) -> F32:
        """Evaluates up to `LOGITS_TOKENS` tokens of a prompt, or one as decoding does; logits `[n, n_vocab]`."""
        logits = np.empty((len(tokens), self.attached.model.params.n_vocab), np.float32)
        if prompt:
            self._enqueue_chunk(np.asarray(tokens, np.int32), self._prompt.enqueue_logits, self._end)
            self._device.download(logits, self._prompt.logits)
        else:
            self._enqueue_token(tokens[0])
            self._device.download(logits, self._decoder.buffers["logits"].value)
        return logits

    def _enqueue_token(self, token: int | None) -> int:
        """Enqueues a step of decoding for a token, or for the one that the step before chooses; its number."""

        def launch(number: int) -> None:
            if token is not None:
                place = number % len(self._tokens)
                self._tokens[place] = token
                self._device.upload(self._decoder.buffers["step"].value + _TOKEN_OFFSET, self._tokens[place])
            self._decoder.launch()

        return self._enqueue(1, launch, prompt=False)

    def _enqueue_chunk(self, tokens: I32, *ends: Callable[[], None]) -> int:
        """Enqueues a chunk of a prompt and what shall follow it, the last of which ends the step; its number."""

        def launch(number: int) -> None:
            self._prompt.enqueue(tokens, self._enqueued, self._cells, self._table)
            self._set_step(number, self._enqueued + len(tokens) - 1)
            for end in ends:
                end()

        return self._enqueue(len(tokens), launch, prompt=True)

    def _enqueue(self, n: int, launch: Callable[[int], None], *, prompt: bool) -> int:
        """Publishes a step of n tokens and launches it; its number."""
        signals, opened = self.attached.signals, self.attached.opened
        signals.between_steps()
        signals.hold()
        try:
            number = opened.steps.publish()
            try:
                self._update_table(number, n)
                opened.memory.count(n, prompt=prompt)
                launch(number)
            except BaseException:
                self._skip()
                raise
        finally:
            signals.release()
        call(self._device.cu.cuEventRecord, self._ended[number % len(self._ended)], self._device.stream)
        self._enqueued += n
        opened.steps.count(n, self._enqueued)
        return number

    def _update_table(self, number: int, n: int) -> None:
        """Reads where experts are, for the step that was published. They stay there until it ends."""
        self.sequence.check_cells(self._enqueued + n)
        self._wait(number - _IN_FLIGHT_MAX)
        if self._table.refresh():
            place = number % len(self._tables)
            self._tables[place] = self._table.words
            self._device.upload(self._decoder.buffers["table"].value, self._tables[place])
        if self._read_back is not None:  # nothing runs ahead then
            self._device.download(self._read_back, self._decoder.buffers["table"].value)
            self._table.check(self._read_back)

    def _wait(self, number: int) -> None:
        """Waits for a step's end. Errors: `DriverError`."""
        call(self._device.cu.cuEventSynchronize, self._ended[number % len(self._ended)])

    def _place(self, position: int) -> None:
        """Lets the next step begin in a cell, whatever was enqueued."""
        self._device.synchronize()
        self._pending.clear()
        self._enqueued = position
        self._set_step(int(self.attached.opened.steps.line[pages.WORD_LAUNCHED]) + 1, position)

    def _set_step(self, number: int, position: int) -> None:
        """Lets what is enqueued next run as that step, in that cell."""
        step = np.frombuffer(bytearray(Step(number, position, 0)), np.uint8)
        self._device.upload(self._decoder.buffers["step"].value, step)
