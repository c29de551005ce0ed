"""One decode step as a CUDA graph. `docs/kernels.md` tells what the kernels do and what they hand on."""

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from strata_kernels import attention, decode, structs, tensor_type
from strata_kernels.attention import AttendArguments
from strata_kernels.launch import DeviceBuffer, Kernels, Launch
from strata_kernels.structs import Activation, Heat, KvCells, Matrix, SampleOptions, Step

from strata_client.gpu.device import Device
from strata_client.gpu.launches import capture, launch_graph
from strata_client.model_memory import ClientMemory
from strata_client.models.base import ModelError
from strata_client.models.qwen3moe import Qwen3Moe

if TYPE_CHECKING:
    from strata_client.gpu.owners import Owners

EXPERTS_MAX, TOP_K_MAX = 512, 16
"""`routing.cuh`."""


class Weights:
    """The tensors of the weights range as kernels take them."""

    def __init__(self, model: Qwen3Moe, memory: ClientMemory) -> None:
        """Errors: `ModelError` where the kernels cannot run the model."""
        self._model = model
        self._memory = memory
        params = model.params
        if params.n_experts > EXPERTS_MAX or params.top_k > TOP_K_MAX:
            raise ModelError(
                f"{params.top_k} of {params.n_experts} experts: a GPU's kernels take {TOP_K_MAX} of {EXPERTS_MAX}"
            )
        for name, n in (("embedding_length", params.d_model), ("expert_feed_forward_length", params.d_expert)):
            if n % 32:
                raise ModelError(f"{name} is {n}: a GPU's kernels take multiples of 32")

    def matrix(self, name: str) -> Matrix:
        """A matrix of any type."""
        tensor = self._model.tensor(name)
        return Matrix(self._memory.weight_address(name), int(tensor.type), tensor.dims[1])

    def row_bytes(self, name: str) -> int:
        """Of a matrix."""
        tensor = self._model.tensor(name)
        return tensor.size_bytes // tensor.dims[1]

    def vector(self, name: str) -> ctypes.c_uint64:
        """The address of a float32 vector. Errors: `ModelError` for another type."""
        tensor = self._model.tensor(name)
        if tensor.type != tensor_type.F32:
            raise ModelError(f"tensor {name} has the type {tensor.type.name}; a GPU's kernels take norms in F32")
        return ctypes.c_uint64(self._memory.weight_address(name))


class Buffers:
    """Device memory of one allocation, parted by name; each part is aligned to 256 bytes."""

    def __init__(self, sizes_bytes: Mapping[str, int]) -> None:
        self._places, size_bytes = self.layout(sizes_bytes)
        self._buffer = DeviceBuffer(size_bytes)
        self._buffer.fill(0)

    @staticmethod
    def layout(sizes_bytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
        """Where each part begins, one after the other, and the bytes of all."""
        places, at = {}, 0
        for name, size_bytes in sizes_bytes.items():
            places[name] = at
            at += -(-size_bytes // 256) * 256
        return places, at

    def __getitem__(self, name: str) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._buffer.address + self._places[name])

    def close(self) -> None:
        """Frees the memory."""
        self._buffer.close()


class RowLaunches:
    """Prepares launches of kernels that multiply rows of matrices with a token's activation, on one GPU."""

    def __init__(self, device: Device, kernels: Kernels, in_place: Callable[[], Kernels]) -> None:
        """Takes kernels that copy rows to shared memory, and what makes those for rows that are too long for it."""
        self._device = device
        self._kernels = kernels
        self._make_in_place = in_place

    @cached_property
    def _in_place(self) -> Kernels:
        return self._make_in_place()

    def prepare(
        self, name: str, grid: int | tuple[int, ...], block: int, *args: Any, rows: int = decode.ROWS,
        matrices: Sequence[int], beside_bytes: int = 0, programmatic: bool = True,
    ) -> Launch:  # fmt: skip
        """Of a kernel that takes `rows` rows of each of some matrices, with rows of so many bytes, in a block."""
        shared_bytes = decode.staged_bytes(matrices, self._device.shared_bytes_max, rows, beside_bytes)
        kernels = self._kernels if shared_bytes else self._in_place
        return kernels.prepare(name, grid, block, args, shared_bytes, self._device.stream, programmatic)

    def prepare_gate_up(
        self, name: str, model: Qwen3Moe, layer: int, h: Activation, scores: ctypes.c_uint64, table: int, g: Activation,
        heat: Heat, *, programmatic: bool = True,
    ) -> Launch:  # fmt: skip
        """Of ``gate_up`` or ``gate_up_part``. `table`: address of the layer's addresses."""
        params = model.params
        gate_type, up_type, _ = map(int, model.expert_types(layer))
        matrices = [size // params.d_expert for size in model.expert_bytes(layer, 0)[:2]]
        beside_bytes = decode.activation_bytes(params.d_model)
        rows = decode.gate_up_rows(
            params.d_expert, params.top_k, self._device.multiprocessors, self._device.shared_bytes_max, matrices,
            beside_bytes,
        )  # fmt: skip
        return self.prepare(
            name, (params.d_expert // rows, params.top_k), 16 * rows,
            h, scores, ctypes.c_uint64(table), g, heat, params.n_experts, params.top_k, gate_type, up_type,
            params.d_model, params.d_expert, ctypes.c_float(params.rms_eps),
            rows=rows, matrices=matrices, beside_bytes=beside_bytes, programmatic=programmatic,
        )  # fmt: skip

    def prepare_down(
        self, name: str, model: Qwen3Moe, layer: int, g: Activation, scores: ctypes.c_uint64, table: int, *args: Any,
        programmatic: bool = True,
    ) -> Launch:  # fmt: skip
        """Of ``down`` or ``down_part``, with what stands between the addresses and the numbers."""
        params = model.params
        return self.prepare(
            name, params.d_model // decode.ROWS, decode.THREADS,
            g, scores, ctypes.c_uint64(table), *args, params.n_experts, params.top_k,
            int(model.expert_types(layer)[2]), params.d_expert,
            matrices=[model.expert_bytes(layer, 0)[2] // params.d_model] * params.top_k, programmatic=programmatic,
        )  # fmt: skip


class Decoder:
    """A model's decode step on one GPU, or a stage of it. A stage begins with what `passed` holds, or ends with it.

    Owners may compute some of the experts.

    Attributes:
        buffers: `step`, `options`, `seen`, `table`, `logits`, `x` and what passes between kernels.
        ring: uint64 `[RING_WORDS]`, host: the token that step `number` chose is at `number % RING_WORDS`; all ones
            where the logits were not finite.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model: Qwen3Moe,
        memory: ClientMemory,
        kv: KvCells,
        retired: int,
        heat: int,
        in_place: Callable[[], Kernels],
        owners: "Owners | None" = None,
    ) -> None:
        """Prepares the launches.

        Args:
            device: where the step runs.
            kernels: `SOURCES`, compiled for the model's types.
            model: checked; its weights and experts are mapped in `memory`.
            memory: of the model.
            kv: the sequence's cells.
            retired: address of the session page's word, for kernels.
            heat: address of the heat page's decode counts, uint64 `[n_layers, n_experts]`, for kernels.
            in_place: makes the kernels that read rows where they lie, for matrices that need them.
            owners: compute the experts that the address table has no addresses for; None where it has them all.

        Errors: `ModelError`, `DriverError`.
        """
        self._device = device
        self._kernels = kernels
        self._rows = RowLaunches(device, kernels, in_place)
        self._owners = owners
        self._model = model
        self._weights = Weights(model, memory)
        self._kv = kv
        self._kv_type = {structs.KV_F16: "f16", structs.KV_BF16: "bf16", structs.KV_Q8_0: "q8_0"}[kv.type]
        self._heat = heat
        params = model.params
        d_attention = params.n_heads * params.head_dim
        n = params.n_layers * params.n_experts
        self.splits = attention.attend_splits(device.multiprocessors, params.n_kv_heads)
        self.buffers = Buffers(
            {
                "step": ctypes.sizeof(Step),
                "options": ctypes.sizeof(SampleOptions),
                "seen": -(-params.n_vocab // 32) * 4,
                "table": n * 3 * 8,
                "heat": n * 8,
                "x": params.d_model * 4,
                "h": Activation.size_bytes(params.d_model),
                "qkv": (d_attention + 2 * params.n_kv_heads * params.head_dim) * 4,
                "rope": params.head_dim * 4,
                "attended": Activation.size_bytes(d_attention),
                "scores": params.n_experts * 4,
                "g": Activation.size_bytes(params.top_k * params.d_expert),
                "logits": params.n_vocab * 4,
                "sample": structs.sample_workspace_bytes(params.n_tokens),
                "attend": attention.workspace_bytes(params.n_heads, params.n_kv_heads, params.head_dim, self.splits),
            }
        )
        self.ring: npt.NDArray[np.uint64] = device.pinned(structs.RING_WORDS, np.uint64)
        self._retired = ctypes.c_uint64(retired)
        self.launches = list(self._launches())
        self._graph: Any = None

    @property
    def passed(self) -> tuple[int, int]:
        """Address and bytes of what a stage hands to the next, where it lies alike: the residual `x`, and `h`."""
        begin = self.buffers["x"].value
        return begin, self.buffers["h"].value + Activation.size_bytes(self._model.params.d_model) - begin

    def capture(self) -> None:
        """Makes the graph. Errors: `DriverError`."""
        self._graph = capture(self._device, (launch for _, launch in self.launches))

    def launch(self) -> None:
        """Enqueues the step that `step` in device memory describes; it was published. Errors: `DriverError`."""
        launch_graph(self._device, self._graph)

    def _launches(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The kernels of a step in their order, by name; and, between them, what has to do with owners."""
        params, buffers, weights = self._model.params, self.buffers, self._weights
        d_model, d_expert, top_k = params.d_model, params.d_expert, params.top_k
        d_attention, d_kv = params.n_heads * params.head_dim, params.n_kv_heads * params.head_dim
        eps = ctypes.c_float(params.rms_eps)
        step, x, qkv, scores = buffers["step"], buffers["x"], buffers["qkv"], buffers["scores"]
        h = Activation.at(buffers["h"].value, d_model)
        attended = Activation.at(buffers["attended"].value, d_attention)
        g = Activation.at(buffers["g"].value, top_k * d_expert)

        def launch(name: str, grid: int | tuple[int, ...], block: int, *args: Any, shared_bytes: int = 0) -> Any:
            first = name == ("embed" if self._model.is_first else "rope_table")  # behind a copy, or the step before
            stream = self._device.stream
            return name, self._kernels.prepare(name, grid, block, args, shared_bytes, stream, programmatic=not first)

        def launch_rows(name: str, *args: Any, **options: Any) -> Any:
            return name, self._rows.prepare(name, *args, **options)

        if self._model.is_first:
            yield launch(
                "embed",
                1,
                256,
                weights.matrix("token_embd.weight"),
                step,
                x,
                weights.vector("blk.0.attn_norm.weight"),
                h,
                d_model,
                shared_bytes=4 * d_model,
            )
        yield launch(
            "rope_table", 1, params.head_dim // 2,
            buffers["rope"], step, ctypes.c_double(params.rope_freq_base), ctypes.c_double(params.rope_scale),
            params.head_dim,
        )  # fmt: skip
        attend = attention.attend_shape(
            self._kv_type, params.head_dim, params.n_heads // params.n_kv_heads,
            attention.shared_bytes_max(self._device.shared_bytes_max),
        )  # fmt: skip
        for layer in range(params.n_layers):
            blk = f"blk.{layer}."
            q, k, v = (weights.matrix(f"{blk}attn_{name}.weight") for name in "qkv")
            yield launch_rows(
                "qkv", (d_attention + 2 * d_kv) // decode.ROWS, decode.THREADS, h, q, k, v, qkv, d_model, eps,
                matrices=[max(weights.row_bytes(f"{blk}attn_{name}.weight") for name in "qkv")],
            )  # fmt: skip
            yield launch(
                attend.name, (params.n_kv_heads, self.splits), attend.threads,
                AttendArguments(
                    qkv.value, qkv.value + 4 * d_attention, qkv.value + 4 * (d_attention + d_kv),
                    weights.vector(blk + "attn_q_norm.weight").value, weights.vector(blk + "attn_k_norm.weight").value,
                    buffers["rope"].value, step.value, self._kv, attended, buffers["attend"].value,
                    layer, params.n_heads, params.rms_eps,
                ),
                shared_bytes=attend.shared_bytes,
            )  # fmt: skip
            yield launch_rows(
                "attend_out", d_model // decode.ROWS, decode.THREADS,
                attended, weights.matrix(blk + "attn_output.weight"), x, weights.vector(blk + "ffn_norm.weight"), h,
                d_attention, matrices=[weights.row_bytes(blk + "attn_output.weight")],
            )  # fmt: skip
            router = blk + "ffn_gate_inp.weight"
            yield launch_rows(
                "route", params.n_experts, decode.ROUTE_THREADS, h, weights.matrix(router), scores, d_model, eps,
                matrices=[weights.row_bytes(router)], rows=1,
            )  # fmt: skip
            yield from self._mixture(layer, h, g)
        if not self._model.is_last:
            return
        output = "token_embd.weight" if self._model.tied_output else "output.weight"
        yield launch_rows(
            "head", -(-params.n_vocab // decode.ROWS), decode.THREADS,
            h, weights.matrix(output), buffers["logits"], d_model, eps, matrices=[weights.row_bytes(output)],
        )  # fmt: skip
        ring = ctypes.c_uint64(self.ring.ctypes.data)
        yield launch(
            "sample", structs.sample_blocks(params.n_tokens), structs.SAMPLE_THREADS,
            buffers["logits"], params.n_tokens, buffers["options"], buffers["seen"], buffers["sample"],
            step, ring, self._retired, structs.ONE_ROW,
        )  # fmt: skip

    def _mixture(self, layer: int, h: Activation, g: Activation) -> Iterator[tuple[str, Callable[[], None]]]:
        """The routed experts of a layer, those of the owners beside."""
        params, buffers, owners, model = self._model.params, self.buffers, self._owners, self._model
        x, scores = buffers["x"], buffers["scores"]
        offset = layer * params.n_experts * 8
        table = buffers["table"].value + 3 * offset
        heat = Heat(buffers["heat"].value + offset, self._heat + offset)
        last = layer == params.n_layers - 1
        norm = self._weights.vector("output_norm.weight" if last else f"blk.{layer + 1}.attn_norm.weight")
        if owners is None:
            yield "gate_up", self._rows.prepare_gate_up("gate_up", model, layer, h, scores, table, g, heat)
            yield "down", self._rows.prepare_down("down", model, layer, g, scores, table, x, norm, h)
            return
        yield "hand_over", owners.prepare_token(layer, h, scores)
        yield "gate_up_part", self._rows.prepare_gate_up("gate_up_part", model, layer, h, scores, table, g, heat)
        yield "join", owners.join
        yield (
            "down_part",
            self._rows.prepare_down(
                "down_part", model, layer, g, scores, table, x, norm, h, owners.token_sums, programmatic=False
            ),
        )
