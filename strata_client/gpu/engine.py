"""The engine on a GPU, or on several that a model is split over: steps run ahead of the tokens that are read.

A step of decoding is one graph launch on each GPU. While the host reads a step's token,
the next one runs already: the GPU chose that token itself, and the last stage of a split
model sends it to the first. The step that was enqueued last is therefore one that nobody
may want; it is simply not read. A prompt's steps are chunks of it, launched kernel by
kernel; those of a split model are in all of its stages at once, one in each.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from strata_kernels import structs
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import DeviceBuffer, Kernels

from strata_client import timings
from strata_client.attached import Attached
from strata_client.engine import Engine
from strata_client.gpu import steps
from strata_client.gpu.arguments import sample_options, seen_bits
from strata_client.gpu.device import Device
from strata_client.gpu.owners import LoadedOwner
from strata_client.gpu.prompt import LOGITS_TOKENS
from strata_client.gpu.stage import Crossing, GpuStage, Loaded
from strata_client.models.base import F32, I32, ModelError
from strata_client.sampler import SamplerOptions
from strata_client.sequence import TokenSequence
from vmmd.driver.cuda_calls import call

_SOURCES = ("decode", "sample", "prompt_matmul", "prompt_route", "prompt_rows", "store_kv")
_PART_SOURCES = ("decode_part", "crossing")
"""What a computing device needs besides where it has owners; they need no more than these and ``prompt_matmul``."""

CHUNKS_AHEAD = 2
"""Chunks of a prompt that may wait for a stage."""

TOKEN_BYTES = 4
"""Of a token in device memory."""

NOT_FINITE = (1 << 64) - 1
"""What `ring` has instead of a token."""


def load(
    device_uuid: str, kv_type: str, types: Sequence[str], owners: Sequence[str] = (), sources: Sequence[str] = ()
) -> Loaded:
    """A GPU, and on it the kernels for K/V cells of a type, a key of `KV_TYPES`, and tensors of some types.

    Args:
        device_uuid: the GPU.
        kv_type: a key of `KV_TYPES`.
        types: of the model's tensors.
        owners: peers that it has no path to, by UUID.
        sources: names of further files with kernels.

    For any thread. Errors: `NoDevice`, `NotFound`, `DriverError`; as `compile_source` where they are not compiled yet.
    """

    def kernels(*names: str) -> Kernels:
        return Kernels([SOURCES / f"{name}.cu" for name in names], types)

    with timings.stage("context"):
        device = Device(device_uuid)
    with timings.stage("kernels"):
        part = _PART_SOURCES if owners else ()
        in_place = ("decode_in_place", "decode_part_in_place") if owners else ("decode_in_place",)
        made = kernels(*_SOURCES, *part, f"attend_{kv_type}", *sources)
    loaded = {}
    for uuid in owners:
        with timings.stage("context"):
            owner = Device(uuid)
        with timings.stage("kernels"):
            loaded[uuid] = LoadedOwner(
                owner, kernels(*_PART_SOURCES, "prompt_matmul"), lambda: kernels("decode_part_in_place")
            )
    return Loaded(device, made, lambda: kernels(*in_place), loaded)


class GpuEngine(Engine):
    """One sequence, on a GPU or on one for each stage. For one thread."""

    def __init__(self, attached: Attached, sequence: TokenSequence) -> None:
        """Takes what `Engine` does; the stages' `kernels` are what `load` makes.

        Errors: `ModelError` where the kernels cannot run the model; `DriverError`; as `load`.
        """
        super().__init__(attached, sequence)
        self._stages = [
            GpuStage(stage, kv, steps.IN_FLIGHT_MAX + len(attached.stages) - 1)
            for stage, kv in zip(attached.stages, sequence.kvs, strict=True)
        ]
        self._first_stage, self._last_stage = self._stages[0], self._stages[-1]
        for stage in attached.stages:
            stage.opened.steps.drain = self._synchronize
        launches = dict(self._last_stage.decoder.launches)
        self._head, self._sample = launches["head"], launches["sample"]
        self._chunk_bytes = 4 * self._first_stage.prompt.tokens_max * attached.model.params.d_model
        self._inboxes: list[DeviceBuffer] = []
        self._chunks: list[Crossing] = []  # from each stage to the next, the residuals of a chunk
        self._activations: list[Crossing] = []  # and what a token's last layer gives
        for source, target in pairwise(self._stages):
            target.device.make_current()
            self._inboxes.append(DeviceBuffer(CHUNKS_AHEAD * self._chunk_bytes))
            places = [self._inboxes[-1].address + i * self._chunk_bytes for i in range(CHUNKS_AHEAD)]
            self._chunks.append(Crossing(source, target, places, self._chunk_bytes))
            address, size_bytes = target.decoder.passed
            self._activations.append(Crossing(source, target, [address], size_bytes))
        self._chosen: Crossing | None = None  # from the last to the first, the token that comes next
        if len(self._stages) > 1:
            self._chosen = Crossing(self._last_stage, self._first_stage, [self._first_stage.token], TOKEN_BYTES)
        self._pending: deque[int] = deque()  # steps whose tokens are not read
        self._enqueued: int | None = 0  # cells that are filled once all steps have ended; None: nobody knows
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
        seed = int.from_bytes(os.urandom(7)) if options.seed is None else options.seed
        how = sample_options(options, seed, len(prompt))
        buffers, device = self._last_stage.decoder.buffers, self._last_stage.device
        device.upload(buffers["options"].value, np.frombuffer(bytearray(how), np.uint8))
        device.upload(buffers["seen"].value, seen_bits(set(prompt), self.attached.model.params.n_vocab))
        rest = np.asarray(prompt[sequence.kept :], np.int32)
        tokens_max = self._first_stage.prompt.tokens_max
        while len(rest) > tokens_max:
            self._enqueue_chunk(rest[:tokens_max], self._last_stage.end)
            rest = rest[tokens_max:]
        self._pending.append(self._enqueue_chunk(rest, self._head, self._sample, self._send_token))
        sequence.position = len(prompt)
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
        if self._cells_enqueued < self.sequence.cells:
            self._pending.append(self._enqueue_token(None))
        self._last_stage.steps.wait(number)
        token = int(self._last_stage.decoder.ring[number % structs.RING_WORDS])
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
        self.sequence.position += len(tokens)
        return logits if all_logits else logits[-1]

    def close(self) -> None:
        """Waits until nothing runs any more, and gives back what this has on the GPUs."""
        self._synchronize()
        for stage in self._stages:
            stage.close()
        for inbox, stage in zip(self._inboxes, self._stages[1:], strict=True):
            stage.device.make_current()
            inbox.close()

    def _logits_of(self, tokens: Sequence[int], prompt: bool) -> F32:
        """Evaluates up to `LOGITS_TOKENS` tokens of a prompt, or one as decoding does; logits `[n, n_vocab]`."""
        logits, last = np.empty((len(tokens), self.attached.model.params.n_vocab), np.float32), self._last_stage
        if prompt:
            self._enqueue_chunk(np.asarray(tokens, np.int32), last.prompt.enqueue_logits, last.end)
            last.device.download(logits, last.prompt.logits)
        else:
            self._enqueue_token(tokens[0])
            last.device.download(logits, last.decoder.buffers["logits"].value)
        return logits

    def _enqueue_token(self, token: int | None) -> int:
        """Enqueues a step of decoding for a token, or for the one that the step before chooses; its number."""

        def launch(at: int) -> None:
            stage, before = self._stages[at], self._activations[at - 1] if at else self._chosen
            if before is not None:
                before.receive()
            if token is not None and stage is self._first_stage:
                stage.set_token(token)
            stage.decoder.launch()
            if before is not None:
                before.release()
            if stage is self._last_stage:
                self._send_token()
            else:
                self._activations[at].send(*stage.decoder.passed)
                stage.end()

        return self._enqueue(1, launch, prompt=False)

    def _enqueue_chunk(self, tokens: I32, *ends: Callable[[], None]) -> int:
        """Enqueues a chunk of a prompt and what shall follow it, which ends the last stage's step; its number."""
        position = self._cells_enqueued

        def launch(at: int) -> None:
            stage, size_bytes = self._stages[at], 4 * len(tokens) * self.attached.model.params.d_model
            x = stage.prompt.buffers["x"].value
            if at:
                call(stage.device.cu.cuMemcpyAsync, x, self._chunks[at - 1].receive(), size_bytes, stage.device.stream)
                self._chunks[at - 1].release()
            stage.enqueue_chunk(tokens, position)
            if stage is self._last_stage:
                for end in ends:
                    end()
            else:
                self._chunks[at].send(x, size_bytes)
                stage.end()

        return self._enqueue(len(tokens), launch, prompt=True)

    def _send_token(self) -> None:
        """What `sample` has chosen goes to the first stage, if that is another."""
        if self._chosen is not None:
            self._chosen.send(self._last_stage.token, TOKEN_BYTES)

    def _enqueue(self, n: int, launch: Callable[[int], None], *, prompt: bool) -> int:
        """Enqueues a step of n tokens, which `launch` does stage by stage; its number in the last."""
        cells = self._cells_enqueued + n

        def launch_unless_it_fails(at: int) -> None:
            self._enqueued = None
            launch(at)

        steps.enqueue(
            self.attached,
            [stage.steps for stage in self._stages],
            n,
            launch_unless_it_fails,
            prompt=prompt,
            check=lambda: self.sequence.check_cells(cells),
            skip=lambda at: self._stages[at].skip(),
        )
        self._enqueued = cells
        self.attached.count(n, cells)
        return self._last_stage.steps.number

    @property
    def _cells_enqueued(self) -> int:
        assert self._enqueued is not None, "a launch failed, and the sequence did not begin anew"
        return self._enqueued

    def _place(self, position: int) -> None:
        """Lets the next step begin in a cell, whatever was enqueued."""
        self._synchronize()
        self._pending.clear()
        for crossing in (*self._chunks, *self._activations):
            crossing.restart()
        self._enqueued = position
        for stage in self._stages:
            stage.set_step(stage.steps.number + 1, position)

    def _synchronize(self) -> None:
        """Waits for all that was launched. Errors: `DriverError`."""
        for stage in self._stages:
            stage.device.synchronize()
