"""Owners: peers that the computing device has no path to, so that each computes the experts that it holds.

What passes between goes through pinned host memory, which every GPU reaches: the computing device
leaves a token's activation and scores there, or a chunk's rows and where they are routed to; each owner
takes them to its memory, multiplies its experts' matrices with them, and leaves the weighted sum of the
results, which the computing device adds to its own experts'. The host decides nothing between: events order
the streams of all devices, also within the graph of a step, which spans them. So all that owners do for a
step has ended when the step is retired.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from strata_kernels import prompt as shapes
from strata_kernels.launch import Kernels, Launch
from strata_kernels.prompt import Experts
from strata_kernels.structs import Activation, Heat, Piece, Sums

from strata_client.gpu.decoder import Buffers, RowLaunches
from strata_client.gpu.device import Array, Device
from strata_client.gpu.launches import SizedLaunches
from strata_client.gpu.prompt import TOKENS_MAX, ExpertProducts, product_bytes, routing_bytes
from strata_client.gpu.streaming import ExpertStream
from strata_client.mapping import U64
from strata_client.models.qwen3moe import Qwen3Moe
from vmmd.driver.cuda_calls import call

_CARRY_BLOCKS_MAX = 64
"""They keep the way to host memory busy, and leave room for other kernels."""


class LoadedOwner(NamedTuple):
    """A peer with its kernels, and what makes those that read rows where they lie."""

    device: Device
    kernels: Kernels
    in_place: Callable[[], Kernels]


class Owners:
    """The owners beside a computing device, which is current. For the thread that publishes steps.

    Attributes:
        token_sums: what they have summed up for a token, `[d_model]` each.
        chunk_sums: what they have summed up for a chunk, `[n, d_model]` each.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model: Qwen3Moe,
        owners: Sequence[LoadedOwner],
        tokens_max: int = TOKENS_MAX,
    ) -> None:
        """Prepares the launches.

        Args:
            device: the computing one.
            kernels: its own, those of ``crossing.cu`` among them.
            model: checked.
            owners: in the order of `ClientMemory.owners`.
            tokens_max: the most tokens of a chunk.

        Errors: `DriverError`.
        """
        self._device = device
        self._kernels = kernels
        self._handed = device.event()
        self._between = _Between(device, model, len(owners), tokens_max)
        self.token_sums, self.chunk_sums = (
            Sums(sums.ctypes.data, sums[0].size, len(sums))
            for sums in (self._between.token_sums, self._between.chunk_sums)
        )
        self._owners = [_Owner(number, loaded, model, self._between) for number, loaded in enumerate(owners)]
        device.make_current()

    def upload_tables(self, tables: Sequence[U64]) -> None:
        """Gives them their address tables, pinned arrays, for what is enqueued from here on. Errors: `DriverError`."""
        self._let_each(lambda owner: owner.upload_table(tables[owner.number]))
        self.join()

    def download_tables(self, tables: Sequence[U64]) -> None:
        """Fills arrays with their address tables, after all that was enqueued. Errors: `DriverError`."""
        for owner in self._owners:
            owner.download_table(tables[owner.number])
        self._device.make_current()

    def prepare_token(self, layer: int, h: Activation, scores: ctypes.c_uint64) -> Callable[[], None]:
        """What hands a token over in a layer, and lets the owners begin."""
        pieces = self._between.give("h", h.values), self._between.give("scores", scores.value)
        carry = self._between.prepare_token(self._kernels, self._device, pieces, programmatic=True)

        def hand_over() -> None:
            carry()
            self._let_each(lambda owner: owner.compute_token(layer))

        return hand_over

    def prepare_chunk(self, launches: SizedLaunches, buffers: Buffers) -> Callable[[int, ExpertStream], None]:
        """What hands a chunk over in a layer, and lets the owners begin.

        Args:
            launches: for chunks of the length that this one has then.
            buffers: `halves`, and what `routing_bytes` has, in that order.
        """
        carry = self._between.prepare_chunk(
            self._kernels,
            launches,
            self._between.give("halves", buffers["halves"].value),
            self._between.give("routing", buffers["experts"].value),
        )

        def hand_over(layer: int, stream: ExpertStream) -> None:
            carry()
            n = launches.n.value
            self._let_each(lambda owner: owner.compute_chunk(layer, n, *stream.owned(layer, owner.number)))

        return hand_over

    def join(self) -> None:
        """Lets what is enqueued on the computing device from here on wait for the owners. Errors: `DriverError`."""
        for owner in self._owners:
            call(self._device.cu.cuStreamWaitEvent, self._device.stream, owner.done, 0)

    def abandon(self) -> None:
        """The same, whatever was being enqueued when something failed. Errors: `DriverError`."""
        self._let_each(lambda owner: None)
        self.join()

    def close(self) -> None:
        """Waits until nothing runs any more, and frees the memory."""
        try:
            for owner in self._owners:
                owner.close()
        finally:
            self._device.make_current()

    def _let_each(self, compute: Callable[["_Owner"], None]) -> None:
        """Lets each owner enqueue something behind what the computing device has enqueued."""
        cu = self._device.cu
        call(cu.cuEventRecord, self._handed, self._device.stream)
        try:
            for owner in self._owners:
                owner.device.make_current()
                call(cu.cuStreamWaitEvent, owner.device.stream, self._handed, 0)
                compute(owner)
                call(cu.cuEventRecord, owner.done, owner.device.stream)
        finally:
            self._device.make_current()


class _Between:
    """Pinned host memory between a computing device and its owners, and what copies to and from it."""

    def __init__(self, device: Device, model: Qwen3Moe, n_owners: int, tokens_max: int) -> None:
        params = model.params
        self.tokens_max = tokens_max
        self.token_sums = device.pinned((n_owners, params.d_model), np.float32)
        self.chunk_sums = device.pinned((n_owners, tokens_max, params.d_model), np.float32)
        self._row_bytes = 2 * params.d_model
        self._sizes_bytes = {
            "h": Activation.size_bytes(params.d_model),
            "scores": 4 * params.n_experts,
            "halves": tokens_max * self._row_bytes,
            "routing": Buffers.layout(routing_bytes(tokens_max, params))[1],
        }
        self._arrays: dict[str, Array] = {
            name: device.pinned(-(-size_bytes // 16) * 16, np.uint8) for name, size_bytes in self._sizes_bytes.items()
        }

    def give(self, name: str, source: int) -> Piece:
        """Of a copy to there."""
        return Piece.of(source, self._arrays[name].ctypes.data, self._sizes_bytes[name])

    def take(self, name: str, target: int) -> Piece:
        """Of a copy from there."""
        return Piece.of(self._arrays[name].ctypes.data, target, self._sizes_bytes[name])

    def prepare_token(
        self, kernels: Kernels, device: Device, pieces: tuple[Piece, Piece], *, programmatic: bool
    ) -> Launch:
        """What copies a token's activation and scores."""
        blocks = _carry_blocks(self._sizes_bytes["h"])
        return kernels.prepare(
            "carry", blocks, shapes.CARRY_THREADS, pieces, stream=device.stream, programmatic=programmatic
        )

    def prepare_chunk(
        self, kernels: Kernels, launches: SizedLaunches, halves: Piece, routing: Piece
    ) -> Callable[[], None]:
        """What copies a chunk's rows, as many as it has then, and where they are routed to."""
        carry = launches.prepare(
            kernels, "carry", lambda n: _carry_blocks(n * self._row_bytes), shapes.CARRY_THREADS, halves, routing,
            programmatic=False,
        )  # fmt: skip

        def copy() -> None:
            halves.n = -(-launches.n.value * self._row_bytes // 16)
            carry()

        return copy


class _Owner:
    """One owner: its memory, and what it launches. It is current in all but `__init__` and `download_table`."""

    def __init__(self, number: int, loaded: LoadedOwner, model: Qwen3Moe, between: _Between) -> None:
        self.number = number
        self.device = device = loaded.device
        device.make_current()
        params, n = model.params, between.tokens_max
        d_model, top_k = params.d_model, params.top_k
        self.done = device.event()
        self._buffers = buffers = Buffers(
            {
                "table": params.n_layers * params.n_experts * 3 * 8,
                "h": Activation.size_bytes(d_model),
                "scores": 4 * params.n_experts,
                "g": Activation.size_bytes(top_k * params.d_expert),
                "halves": 2 * n * d_model,
                **routing_bytes(n, params),
                **product_bytes(n, params),
            }
        )
        self._tables = [buffers["table"].value + layer * params.n_experts * 3 * 8 for layer in range(params.n_layers)]
        scores, nothing = buffers["scores"], ctypes.c_uint64(0)
        h = Activation.at(buffers["h"].value, d_model)
        g = Activation.at(buffers["g"].value, top_k * params.d_expert)
        sums = ctypes.c_uint64(between.token_sums[number].ctypes.data)
        rows = RowLaunches(device, loaded.kernels, loaded.in_place)
        pieces = between.take("h", h.values), between.take("scores", scores.value)
        self._take_token = between.prepare_token(loaded.kernels, device, pieces, programmatic=False)
        self._token = [
            (
                rows.prepare_gate_up("gate_up_part", model, layer, h, scores, table, g, Heat(0, 0), programmatic=False),
                rows.prepare_down("down_part", model, layer, g, scores, table, sums, nothing, Activation(), Sums()),
            )
            for layer, table in enumerate(self._tables)
        ]
        self._launches = launches = SizedLaunches(device, n)
        self._take_chunk = between.prepare_chunk(
            loaded.kernels,
            launches,
            between.take("halves", buffers["halves"].value),
            between.take("routing", buffers["experts"].value),
        )
        self._products = [
            ExpertProducts(launches, loaded.kernels, model, layer, buffers) for layer in range(params.n_layers)
        ]
        self._combine = [
            launches.prepare(
                loaded.kernels, "combine_part", lambda n: n, shapes.ROW_THREADS,
                ctypes.c_uint64(between.chunk_sums[number].ctypes.data), buffers["results"], buffers["weights"],
                buffers["experts"], ctypes.c_uint64(table), Sums(), launches.n, d_model, top_k, 0,
            )
            for table in self._tables
        ]  # fmt: skip

    def compute_token(self, layer: int) -> None:
        """Enqueues its experts of a layer, for the token that was handed over."""
        gate_up, down = self._token[layer]
        self._take_token()
        gate_up()
        down()

    def compute_chunk(self, layer: int, n: int, first: int, last: int) -> None:
        """Enqueues its experts of a layer, at places `first` to `last`, for the `n` tokens that were handed over."""
        self._launches.resize(n)
        self._take_chunk()
        if first < last:
            self._products[layer].enqueue(Experts.in_place(self._tables[layer], first, last))
        self._combine[layer]()

    def upload_table(self, table: U64) -> None:
        """Enqueues the copy of its address table."""
        self.device.upload(self._buffers["table"].value, table)

    def download_table(self, table: U64) -> None:
        """Fills an array with its address table."""
        self.device.make_current()
        self.device.download(table, self._buffers["table"].value)

    def close(self) -> None:
        """Waits, and frees its memory."""
        self.device.make_current()
        self.device.close()
        self._buffers.close()


def _carry_blocks(size_bytes: int) -> int:
    """The grid of ``carry`` for so many bytes."""
    return min(_CARRY_BLOCKS_MAX, -(-size_bytes // (16 * shapes.CARRY_THREADS)))
