"""Chunks of a prompt through a model's layers on one GPU. `docs/kernels.md` tells what the kernels do.

Everything is enqueued: no result comes back to the host before the chunk's last
launch, whose successor turns the last token's row into logits.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from strata_kernels import prompt as shapes
from strata_kernels.attention import (
    STORE_THREADS,
    PromptArguments,
    StoreArguments,
    attend_prompt_grid,
    attend_prompt_shape,
    store_kv_grid,
)
from strata_kernels.launch import DeviceBuffer, Dimensions, Kernels, Launch
from strata_kernels.prompt import Experts, Groups, HalfRows
from strata_kernels.structs import Activation, Heat, KvCells, Matrix

from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.decoder import Buffers, Weights
from strata_client.gpu.device import Device
from strata_client.gpu.launches import SizedLaunches
from strata_client.gpu.streaming import ExpertStream
from strata_client.model_memory import ClientMemory
from strata_client.models.base import I32
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.models.qwen3moe_file import Params
from vmmd.errors import InvalidRequest

if TYPE_CHECKING:
    from strata_client.gpu.owners import Owners

TOKENS_MAX = 512
"""Tokens of a chunk, unless more are asked for."""

LOGITS_TOKENS = 64
"""The most tokens of a chunk whose logits are all wanted."""

TOKENS_IN_PLACE = 8
"""Up to so many tokens, experts in host slabs are read where they lie: few of them are wanted at all."""

STAGING_BYTES = 128 << 20
"""For experts in host slabs, unless more are asked for."""


def routing_bytes(n: int, params: Params) -> dict[str, int]:
    """Sizes of what says which experts n tokens of a chunk go to."""
    pairs_bytes, first_tiles_bytes, tiles_bytes = Groups.sizes_bytes(n, params.n_experts, params.top_k)
    return {
        "experts": 4 * n * params.top_k,
        "weights": 4 * n * params.top_k,
        "pairs": pairs_bytes,
        "first_tiles": first_tiles_bytes,
        "tiles": tiles_bytes,
    }


def product_bytes(n: int, params: Params) -> dict[str, int]:
    """Sizes of what experts make of n tokens: between their matrices, and in the end."""
    pairs = n * params.top_k
    return {
        "hidden": 2 * pairs * params.d_expert,
        "hidden_scales": 4 * pairs * -(-params.d_expert // shapes.SCALE_WIDTH),
        "results": 4 * pairs * params.d_model,
    }


class ExpertProducts:
    """A layer's routed experts on one GPU, launched once for each part of them.

    Reads `halves` and what `routing_bytes` has in the buffers, and writes what `product_bytes` has.
    """

    def __init__(
        self, launches: SizedLaunches, kernels: Kernels, model: Qwen3Moe, layer: int, buffers: Buffers
    ) -> None:
        self._n = launches.n
        self._params = params = model.params
        self._experts = Experts()  # what the next launches compute
        groups = Groups(*(buffers[name].value for name in ("pairs", "first_tiles", "tiles")))
        gate_type, up_type, down_type = map(int, model.expert_types(layer))
        scales = buffers["hidden_scales"]
        hidden = HalfRows(buffers["hidden"].value, scales.value, params.d_expert, shapes.SCALE_WIDTH)
        self._gate_up = launches.prepare(
            kernels, "gate_up_prompt",
            lambda n: shapes.gate_up_grid(n, params.n_experts, params.top_k, params.d_expert), shapes.TILE_THREADS,
            HalfRows.unscaled(buffers["halves"].value, params.d_model), groups, self._experts, gate_type, up_type,
            buffers["hidden"], scales, params.d_expert, params.top_k, shared_bytes=shapes.TILE_SHARED_BYTES,
        )  # fmt: skip
        self._down = launches.prepare(
            kernels, "down_prompt",
            lambda n: shapes.down_grid(n, params.n_experts, params.top_k, params.d_model), shapes.TILE_THREADS,
            hidden, groups, self._experts, down_type, buffers["results"], params.d_model,
            shared_bytes=shapes.TILE_SHARED_BYTES,
        )  # fmt: skip

    def enqueue(self, part: Experts) -> None:
        """Enqueues a part of the experts. Errors: `DriverError`."""
        ctypes.memmove(ctypes.addressof(self._experts), ctypes.addressof(part), ctypes.sizeof(Experts))
        params, n, n_experts = self._params, self._n.value, part.last - part.first
        self._gate_up.resize(shapes.gate_up_grid(n, n_experts, params.top_k, params.d_expert))
        self._down.resize(shapes.down_grid(n, n_experts, params.top_k, params.d_model))
        self._gate_up()
        self._down()


class Prompt:
    """A model's prompt processing on one GPU, of whose experts owners may compute some. For the thread of the steps.

    Attributes:
        tokens_max: the most tokens of a chunk.
        buffers: `x` float32 `[n, d_model]`, the residual after the last layer, and what passes between kernels.
        logits: address of float32 `[n, n_vocab]`, once `enqueue_logits` was called.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model: Qwen3Moe,
        memory: ClientMemory,
        kv_type: str,
        *,
        table: int,
        heat: int,
        h: Activation,
        stream: ExpertStream,
        owners: "Owners | None" = None,
        tokens_max: int = TOKENS_MAX,
    ) -> None:
        """Prepares the launches.

        Args:
            device: where chunks run.
            kernels: `SOURCES`, compiled for the model's types.
            model: checked; its weights and experts are mapped in `memory`.
            memory: of the model.
            kv_type: what a K/V cell holds: "f16", "bf16" or "q8_0".
            table: address of the address table on the device, as decode has it.
            heat: address of the heat page's prompt counts, uint64 `[n_layers, n_experts]`, for kernels.
            h: what `head` takes; holds the last token's row after a chunk, in the last stage.
            stream: brings experts that are in host slabs.
            owners: compute the experts that the address table has no addresses for; None where it has them all.
            tokens_max: the most tokens of a chunk.

        Errors: `ModelError`, `DriverError`.
        """
        self.tokens_max = tokens_max
        self._device = device
        self._model = model
        self._weights = Weights(model, memory)
        self._kv_type = kv_type
        self._table = table
        self._heat = heat
        self._stream = stream
        self._owners = owners
        self._order_is_there = False
        self._all_logits: list[Launch] | None = None
        self._logits_buffer: DeviceBuffer | None = None
        params = model.params
        d_attention = params.n_heads * params.head_dim
        d_qkv = d_attention + 2 * params.n_kv_heads * params.head_dim
        n, products = tokens_max, product_bytes(tokens_max, params)
        # The experts' results come when attention is over.
        products["results"] = max(products["results"], 4 * n * d_qkv + 2 * (2 * n * d_attention))
        self.buffers = Buffers(
            {
                "tokens": 4 * n,
                "x": 4 * n * params.d_model,
                "halves": 2 * n * params.d_model,
                "floats": 4 * n * params.d_model,
                "scores": 4 * n * params.n_experts * shapes.router_splits(params.d_model),
                **routing_bytes(n, params),
                "order": 4 * params.n_layers * params.n_experts,
                "heat": 8 * params.n_layers * params.n_experts,
                **products,
                "rope": 4 * n * params.head_dim,
            }
        )
        self._launches = SizedLaunches(device, n)
        self._kernels = kernels
        self._position = ctypes.c_int32(0)
        self._hand_over = owners.prepare_chunk(self._launches, self.buffers) if owners is not None else None
        buffers, weights = self.buffers, self._weights
        self._embed = self._last = None
        if model.is_first:
            self._embed = self._prepare(
                "embed_prompt", lambda n: n, shapes.ROW_THREADS,
                weights.matrix("token_embd.weight"), buffers["tokens"], 1, buffers["x"], self._launches.n,
                params.d_model,
            )  # fmt: skip
        self._rope = self._prepare(
            "rope_table_prompt", lambda n: n, params.head_dim // 2,
            buffers["rope"], self._position, ctypes.c_double(params.rope_freq_base),
            ctypes.c_double(params.rope_scale), params.head_dim,
        )  # fmt: skip
        self._arguments: list[StoreArguments | PromptArguments] = []  # that hold n, position and cells
        self._attention = [self._prepare_attention(layer) for layer in range(params.n_layers)]
        self._mixture = [self._prepare_mixture(layer) for layer in range(params.n_layers)]
        if model.is_last:
            self._last = self._prepare(
                "last_activation", lambda _: -(-params.d_model // 16 // shapes.ROW_THREADS), shapes.ROW_THREADS,
                buffers["x"], weights.vector("output_norm.weight"), h, self._launches.n, params.d_model,
            )  # fmt: skip

    def enqueue(self, tokens: I32, position: int, cells: KvCells, table: AddressTable) -> None:
        """Enqueues a chunk of a sequence.

        A stage that is not the first begins with the residual that is in the buffer `x` by then.

        Args:
            tokens: int32 `[n]`, 1 to `tokens_max`; may change at once.
            position: cell of the first; the cells before it are filled, and there is memory for all.
            cells: the sequence's, of the type that this was made for; another chunk may be of another sequence.
            table: where experts are, for the step that was published; its words are on the device.

        Errors: `InvalidRequest`, `DriverError`.
        """
        n = len(tokens)
        if not 0 < n <= self.tokens_max:
            raise InvalidRequest(f"a chunk of {n} tokens; 1 to {self.tokens_max} can be computed at once")
        is_in_place = n <= TOKENS_IN_PLACE
        needs_order = not is_in_place or self._owners is not None
        if (needs_order and self._stream.begin(table)) or not self._order_is_there:
            self._device.upload(self.buffers["order"].value, self._stream.order)
            self._order_is_there = True
        self._launches.resize(n)
        self._position.value = position
        for arguments in self._arguments:
            arguments.n, arguments.position, arguments.cells = n, position, cells
        if self._embed is not None:
            self._device.upload(self.buffers["tokens"].value, np.ascontiguousarray(tokens, np.int32))
            self._embed()
        self._rope()
        for layer, (attention, mixture) in enumerate(zip(self._attention, self._mixture, strict=True)):
            for launch in attention:
                launch()
            self._enqueue_mixture(layer, mixture, is_in_place)
        if self._last is not None:
            self._last()

    def enqueue_logits(self) -> None:
        """Enqueues the logits of all tokens of the chunk before, at most `LOGITS_TOKENS`.

        Errors: `DriverError`.
        """
        if self._all_logits is None:
            self._all_logits = self._prepare_logits()
        for launch in self._all_logits:
            launch()

    @property
    def logits(self) -> int:
        assert self._logits_buffer is not None
        return self._logits_buffer.address

    def close(self) -> None:
        """Frees the memory; nothing may run."""
        self.buffers.close()
        self._stream.close()
        if self._logits_buffer is not None:
            self._logits_buffer.close()

    def _prepare(self, name: str, grid: Callable[[int], Dimensions], block: int, *args: Any, **options: Any) -> Launch:
        return self._launches.prepare(self._kernels, name, grid, block, *args, **options)

    def _prepare_tiles(self, name: str, grid: Callable[[int], Dimensions], *args: Any) -> Launch:
        """A launch of matrix products."""
        return self._prepare(name, grid, shapes.TILE_THREADS, *args, shared_bytes=shapes.TILE_SHARED_BYTES)

    def _prepare_logits(self) -> list[Launch]:
        """Memory and launches that nothing but a look at all logits needs."""
        model, buffers, n = self._model, self.buffers, self._launches.n
        d_model, n_vocab = model.params.d_model, model.params.n_vocab
        self._logits_buffer = DeviceBuffer(4 * LOGITS_TOKENS * n_vocab)
        none = Matrix(0, 0, 0)
        return [
            self._prepare_norm("output_norm.weight", floats=False),
            self._prepare_tiles(
                "matmul_prompt", lambda n: shapes.matmul_grid(n, n_vocab),
                HalfRows.unscaled(buffers["halves"].value, d_model),
                self._weights.matrix("token_embd.weight" if model.tied_output else "output.weight"),
                none, none, ctypes.c_uint64(self._logits_buffer.address), n, n_vocab, 0,
            ),
        ]  # fmt: skip

    def _prepare_norm(self, name: str, *, floats: bool) -> Launch:
        """The residual, normed."""
        buffers, params = self.buffers, self._model.params
        return self._prepare(
            "rms_norm_prompt", lambda n: n, shapes.ROW_THREADS,
            buffers["x"], self._weights.vector(name), buffers["halves"],
            buffers["floats"] if floats else ctypes.c_uint64(0), self._launches.n, params.d_model, params.rms_eps,
        )  # fmt: skip

    def _prepare_attention(self, layer: int) -> list[Launch]:
        """The launches of a layer's attention, in their order."""
        params, buffers, weights = self._model.params, self.buffers, self._weights
        blk = f"blk.{layer}."
        q, k, v = (weights.matrix(f"{blk}attn_{name}.weight") for name in "qkv")
        output, none = weights.matrix(blk + "attn_output.weight"), Matrix(0, 0, 0)
        d_attention, d_qkv = q.rows, q.rows + k.rows + v.rows
        qkv = buffers["results"]
        turned = qkv.value + 4 * self.tokens_max * d_qkv
        attended = turned + 2 * self.tokens_max * d_attention
        store = StoreArguments(
            qkv.value, qkv.value + 4 * d_attention, qkv.value + 4 * (d_attention + k.rows),
            weights.vector(blk + "attn_q_norm.weight").value, weights.vector(blk + "attn_k_norm.weight").value,
            buffers["rope"].value, turned, KvCells(), d_qkv, layer, params.n_heads, 0, 0, params.rms_eps,
        )  # fmt: skip
        attend = PromptArguments(turned, attended, KvCells(), layer, params.n_heads, 0, 0)
        self._arguments += [store, attend]
        shape = attend_prompt_shape(self._kv_type, params.head_dim)
        rows = HalfRows.unscaled(buffers["halves"].value, params.d_model)
        prepare, n = self._prepare_tiles, self._launches.n
        return [
            self._prepare_norm(blk + "attn_norm.weight", floats=False),
            prepare(
                "matmul_prompt", lambda n: shapes.matmul_grid(n, q.rows, k.rows, v.rows),
                rows, q, k, v, qkv, n, d_qkv, 0,
            ),
            self._prepare(
                "store_kv_f32", lambda n: store_kv_grid(n, params.n_heads, params.n_kv_heads), STORE_THREADS, store
            ),
            self._prepare(
                shape.name, lambda n: attend_prompt_grid(n, params.n_heads, params.n_kv_heads), shape.threads, attend,
                shared_bytes=shape.shared_bytes,
            ),
            prepare(
                "matmul_prompt", lambda n: shapes.matmul_grid(n, output.rows),
                HalfRows.unscaled(attended, d_attention), output, none, none, buffers["x"], n, params.d_model, 1,
            ),
        ]  # fmt: skip

    def _prepare_mixture(self, layer: int) -> "_Mixture":
        """The launches of a layer's routed experts."""
        params, buffers, n = self._model.params, self.buffers, self._launches.n
        d_model, n_experts, top_k = params.d_model, params.n_experts, params.top_k
        blk = f"blk.{layer}."
        at = layer * n_experts
        groups = Groups(*(buffers[name].value for name in ("pairs", "first_tiles", "tiles")))
        heat = Heat(buffers["heat"].value + 8 * at, self._heat + 8 * at)
        order = ctypes.c_uint64(buffers["order"].value + 4 * at)
        experts, weights, results = buffers["experts"], buffers["weights"], buffers["results"]
        prepare, owners = self._prepare, self._owners
        before = [
            self._prepare_norm(blk + "ffn_norm.weight", floats=True),
            prepare(
                "router_prompt", lambda n: shapes.router_grid(n, n_experts, d_model), shapes.ROUTER_THREADS,
                buffers["floats"], self._weights.matrix(blk + "ffn_gate_inp.weight"), buffers["scores"], n, d_model,
            ),
            prepare(
                "route_prompt", lambda n: n, shapes.ROUTER_THREADS,
                buffers["scores"], shapes.router_splits(d_model), experts, weights, n, n_experts, top_k,
            ),
            prepare(
                "group_prompt", lambda _: n_experts, shapes.GROUP_THREADS,
                experts, order, groups, heat, n, n_experts, top_k,
            ),
        ]  # fmt: skip
        if owners is None:
            combine = prepare(
                "combine_prompt", lambda n: n, shapes.ROW_THREADS, buffers["x"], results, weights, n, d_model, top_k
            )
        else:
            combine = prepare(
                "combine_part", lambda n: n, shapes.ROW_THREADS,
                buffers["x"], results, weights, experts, ctypes.c_uint64(self._table + 3 * 8 * at), owners.chunk_sums,
                n, d_model, top_k, 1, programmatic=False,
            )  # fmt: skip
        return _Mixture(before, ExpertProducts(self._launches, self._kernels, self._model, layer, buffers), combine)

    def _enqueue_mixture(self, layer: int, mixture: "_Mixture", is_in_place: bool) -> None:
        for launch in mixture.before:
            launch()
        addresses = self._table + layer * self._model.params.n_experts * 3 * 8
        if self._hand_over is not None:
            self._hand_over(layer, self._stream)
        for part in self._stream.parts(layer, addresses, is_in_place=is_in_place):
            mixture.products.enqueue(part)
        if self._owners is not None:
            self._owners.join()
        mixture.combine()


class _Mixture(NamedTuple):
    """The launches of a layer's routed experts; `products` come once for each part of them."""

    before: list[Launch]
    products: ExpertProducts
    combine: Launch
