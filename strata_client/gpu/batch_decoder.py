"""One decode step of several sequences as a CUDA graph. `docs/kernels.md` tells what the kernels do.

A row is a sequence's place in the step: its cells, its position, the token to be evaluated
and how to choose the next, all in device memory, where the step advances them. So a step
is one graph launch, and the next can be enqueued before the tokens of this one are read.
"""

import ctypes
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from strata_kernels import attention, batch, prompt, structs
from strata_kernels.attention import AttendRowsArguments
from strata_kernels.launch import Kernels, Launch
from strata_kernels.prompt import Groups
from strata_kernels.structs import Heat, KvCells, Matrix, SampleOptions, Step

from strata_client.gpu.decoder import Buffers, Weights
from strata_client.gpu.device import Array, Device
from strata_client.gpu.launches import SizedLaunches, capture, launch_graph
from strata_client.model_memory import ClientMemory
from strata_client.models.base import U8
from strata_client.models.qwen3moe import Qwen3Moe
from vmmd.driver.cuda_calls import call
from vmmd.errors import InvalidRequest

SOURCES = ("batch_matmul", "batch_rows")
"""Sources of kernels beside those of a `Decoder` and a `Prompt`; and ``attend_rows_TYPE``."""


class BatchDecoder:
    """A model's decode step for several sequences on one GPU. For the thread that publishes steps.

    Rows are dense: a step evaluates rows 0 .. n - 1. What a sequence gets does not depend on the rows beside it, bit
    for bit, nor on which row it has.

    Attributes:
        rows_max: how many rows there are.
        buffers: `steps` (`Step [rows_max]`), `options`, `seen`, `cells`, `logits` float32 `[rows_max, n_vocab]`, `x`
            float32 `[rows_max, d_model]`, and what passes between kernels.
        launches: the kernels of a step in their order, by name, for the number of rows of `resize`.
        ring: uint64 `[RING_WORDS, rows_max]`, host: the token that a row chose at step `number` is at
            `[number % RING_WORDS, row]`; all ones where its logits were not finite.
    """

    def __init__(
        self,
        device: Device,
        kernels: Kernels,
        model: Qwen3Moe,
        memory: ClientMemory,
        kv_type: str,
        rows_max: int,
        table: int,
        retired: int,
        heat: Heat,
        in_place: Callable[[], Kernels],
    ) -> None:
        """Prepares the launches.

        Args:
            device: where the step runs.
            kernels: `SOURCES`, ``attend_rows_TYPE``, and what `Decoder` and `Prompt` take, for the model's types.
            model: checked; its weights and experts are mapped in `memory`.
            memory: of the model.
            kv_type: what a K/V cell holds: "f16", "bf16" or "q8_0".
            rows_max: the most sequences at once, 1 to `strata_kernels.batch.ROWS_MAX`.
            table: address of the address table on the device, as `Decoder` has it.
            retired: address of the session page's word, for kernels.
            heat: the decode counts of all layers, each uint64 `[n_layers, n_experts]`: on the device, where nobody else
                may count to the same page from other counts, and in the page.
            in_place: makes ``batch_matmul_in_place.cu``'s kernels, for matrices that need them.

        Errors: `InvalidRequest` for another number of rows; `ModelError`, `DriverError`.
        """
        if not 0 < rows_max <= batch.ROWS_MAX:
            raise InvalidRequest(f"{rows_max} sequences at once; a GPU's kernels take 1 to {batch.ROWS_MAX}")
        self.rows_max = rows_max
        self._device = device
        self._kernels = kernels
        self._make_in_place = in_place
        self._model = model
        self._weights = Weights(model, memory)
        self._kv_type = kv_type
        self._table = table
        self._retired = ctypes.c_uint64(retired)
        self._heat = heat
        params = model.params
        n, pairs = rows_max, rows_max * params.top_k
        d_attention = params.n_heads * params.head_dim
        d_kv = params.n_kv_heads * params.head_dim
        self.splits = batch.attend_splits(device.multiprocessors, params.n_kv_heads, n)
        self._seen_bytes = -(-params.n_vocab // 32) * 4
        self._attend_bytes = attention.workspace_bytes(params.n_heads, params.n_kv_heads, params.head_dim, self.splits)
        self._attend_bytes = -(-self._attend_bytes // 16) * 16
        self._sample_bytes = -(-structs.sample_workspace_bytes(params.n_tokens) // 16) * 16
        pairs_bytes, first_tiles_bytes, tiles_bytes = Groups.sizes_bytes(n, params.n_experts, params.top_k)
        padded = -(-n // batch.DENSE_ROWS) * batch.DENSE_ROWS
        self.buffers = Buffers(
            {
                "step": ctypes.sizeof(Step),  # of which the number counts
                "steps": n * ctypes.sizeof(Step),
                "options": n * ctypes.sizeof(SampleOptions),
                "seen": n * self._seen_bytes,
                "cells": n * ctypes.sizeof(KvCells),
                "rope": n * params.head_dim * 4,
                "x": n * params.d_model * 4,
                "normed": n * params.d_model * 2,
                "normed_in_eights": padded * params.d_model * 2,
                "qkv": n * (d_attention + 2 * d_kv) * 4,
                "attended": padded * d_attention * 2,  # in eights
                "attend": n * self._attend_bytes,
                "scores": n * params.n_experts * 4,
                "arrived": (n + 1) * 4,
                "experts": pairs * 4,
                "weights": pairs * 4,
                "pairs": pairs_bytes,
                "first_tiles": first_tiles_bytes,
                "tiles": tiles_bytes,
                "hidden": pairs * params.d_expert * 2,
                "results": pairs * params.d_model * 4,
                "logits": n * params.n_vocab * 4,
                "sample": n * self._sample_bytes,
            }
        )
        self.ring: npt.NDArray[np.uint64] = device.pinned((structs.RING_WORDS, n), np.uint64)
        self._sized = SizedLaunches(device, n)
        self.launches: list[tuple[str, Launch]] = list(self._launches())
        self._graphs: dict[int, Any] = {}
        self._number = -1  # of the step that the device takes the next launch for

    def set_row(
        self, row: int, cells: KvCells, position: int, token: int, options: SampleOptions, seen: U8
    ) -> None:  # fmt: skip
        """Puts a sequence into a row, in order with the steps.

        Args:
            row: 0 .. `rows_max` - 1.
            cells: the sequence's, of the type that this was made for. The memory must be there for every cell that a
                step evaluates; of a range that grows only the cells that are reached need be.
            position: cell of the token that is evaluated next; those before it are filled.
            token: to be evaluated next.
            options: how to choose the one after it.
            seen: uint8 `[ceil(n_vocab / 32) * 4]`, a bit for each token of the text so far, the lowest first.

        Errors: `InvalidRequest` for a row that is not there or other bits; `DriverError`.
        """
        self._check(row)
        if seen.nbytes != self._seen_bytes:
            raise InvalidRequest(f"the bits of seen tokens take {self._seen_bytes} bytes; these are {seen.nbytes}")
        self._upload("steps", row, Step(0, position, token))
        self._upload("options", row, options)
        self._upload("cells", row, cells)
        self._device.upload(self._place("seen", row), seen)

    def move_row(self, from_row: int, to_row: int) -> None:
        """Puts a row's sequence into another row as well, in order with the steps; so that rows stay dense.

        What steps that were enqueued before choose for it is still in its old column of `ring`.
        Errors: `InvalidRequest`, `DriverError`.
        """
        self._check(from_row)
        self._check(to_row)
        if from_row == to_row:
            return
        for name in ("steps", "options", "seen", "cells"):
            self._copy(self._place(name, to_row), self._place(name, from_row), self._row_bytes(name))

    def launch(self, n_rows: int, number: int) -> None:
        """Enqueues a step that evaluates rows 0 .. n_rows - 1, published under that number.

        The first launch for a number of rows makes its graph.
        Errors: `InvalidRequest`, `DriverError`.
        """
        self._check(n_rows - 1)
        if n_rows not in self._graphs:
            self.resize(n_rows)
            self._graphs[n_rows] = capture(self._device, (launch for _, launch in self.launches))
        if number != self._number:
            self._device.upload(self.buffers["step"].value, np.frombuffer(bytearray(Step(number, 0, 0)), np.uint8))
        launch_graph(self._device, self._graphs[n_rows])
        self._number = number + 1

    def resize(self, n_rows: int) -> None:
        """Makes `launches` those of so many rows; graphs stay what they are."""
        self._sized.resize(n_rows)

    def close(self) -> None:
        """Frees the memory; nothing may run."""
        self.buffers.close()

    def _check(self, row: int) -> None:
        if not 0 <= row < self.rows_max:
            raise InvalidRequest(f"row {row}; there are 0 to {self.rows_max - 1}")

    def _row_bytes(self, name: str) -> int:
        """Between rows of a buffer that describes them."""
        return {
            "steps": ctypes.sizeof(Step),
            "options": ctypes.sizeof(SampleOptions),
            "cells": ctypes.sizeof(KvCells),
            "seen": self._seen_bytes,
        }[name]

    def _place(self, name: str, row: int) -> int:
        return int(self.buffers[name].value) + row * self._row_bytes(name)

    def _upload(self, name: str, row: int, value: ctypes.Structure) -> None:
        data: Array = np.frombuffer(bytearray(value), np.uint8)
        self._device.upload(self._place(name, row), data)

    def _copy(self, to: int, from_: int, size_bytes: int) -> None:
        call(self._device.cu.cuMemcpyAsync, to, from_, size_bytes, self._device.stream)

    @cached_property
    def _in_place(self) -> Kernels:
        return self._make_in_place()

    def _launches(self) -> Iterator[tuple[str, Launch]]:
        """The kernels of a step in their order, by name."""
        params, buffers, weights, n = self._model.params, self.buffers, self._weights, self._sized.n
        d_model, d_expert, top_k, n_experts = params.d_model, params.d_expert, params.top_k, params.n_experts
        d_attention, d_kv = params.n_heads * params.head_dim, params.n_kv_heads * params.head_dim
        d_qkv = d_attention + 2 * d_kv
        eps = ctypes.c_float(params.rms_eps)
        none = Matrix(0, 0, 0)
        x, normed, qkv = buffers["x"], buffers["normed"], buffers["qkv"]
        in_eights = buffers["normed_in_eights"]
        steps = buffers["steps"]
        groups = Groups(*(buffers[name].value for name in ("pairs", "first_tiles", "tiles")))

        def launch(
            name: str, grid: Callable[[int], Any], block: int, *args: Any, shared_bytes: int = 0, first: bool = False
        ) -> tuple[str, Launch]:
            prepare = self._sized.prepare
            return name, prepare(
                self._kernels, name, grid, block, *args, shared_bytes=shared_bytes, programmatic=not first
            )

        def launch_staged(name: str, grid: Callable[[int], Any], *args: Any, staged: int) -> tuple[str, Launch]:
            """Of a kernel that copies so many bytes of matrices to shared memory, or reads them in place."""
            kernels = self._kernels if staged else self._in_place
            return name, self._sized.prepare(kernels, name, grid, batch.THREADS, *args, shared_bytes=staged)

        def matmul(
            name: str, rows: ctypes.c_uint64, k: int, *matrices: str, out: ctypes.c_uint64, out_stride: int, add: bool
        ) -> tuple[str, Launch]:
            """out [n][out_stride] = or += the products of rows in eights, of k values, with up to three matrices."""
            found = [weights.matrix(matrix) for matrix in matrices]
            staged = batch.staged_bytes(
                [max(weights.row_bytes(matrix) for matrix in matrices)], self._device.shared_bytes_max
            )
            blocks = batch.matmul_blocks(*(matrix.rows for matrix in found))
            _, prepared = launch_staged(
                "matmul_rows", lambda _: blocks, rows, *[*found, none, none][:3], out, n, k, out_stride, int(add),
                staged=staged,
            )  # fmt: skip
            return name, prepared

        def combine(norm: str, of_experts: int) -> tuple[str, Launch]:
            """Adds the results of so many experts to each row, and norms it for a dense product."""
            return launch(
                "combine_rows", lambda n: n, batch.ROW_THREADS,
                x, buffers["results"], buffers["weights"], weights.vector(norm), in_eights, d_model, of_experts, eps,
            )  # fmt: skip

        def experts(name: str, strips: int, row_bytes: list[int], *args: Any) -> tuple[str, Launch]:
            """Of a kernel over the chosen experts, with so many pairs of strips each."""
            shape = batch.expert_shape(self._device.multiprocessors, self._device.shared_bytes_max, row_bytes)
            return launch_staged(
                name, lambda n: min(shape.blocks, min(n * top_k, n_experts) * strips),
                *args, shape.stages, shape.stage_bytes, staged=shape.shared_bytes,
            )  # fmt: skip

        yield launch(
            "begin_rows", lambda n: n, params.head_dim // 2,
            buffers["rope"], buffers["step"], steps, ctypes.c_double(params.rope_freq_base),
            ctypes.c_double(params.rope_scale), params.head_dim, first=True,
        )  # fmt: skip
        yield launch(
            "embed_prompt", lambda n: n, prompt.ROW_THREADS,
            weights.matrix("token_embd.weight"), ctypes.c_uint64(steps.value + Step.token.offset),
            ctypes.sizeof(Step) // 4, x, n, d_model,
        )  # fmt: skip
        yield combine("blk.0.attn_norm.weight", 0)
        attend = attention.attend_shape(self._kv_type, params.head_dim, params.n_heads // params.n_kv_heads)
        for layer in range(params.n_layers):
            blk = f"blk.{layer}."
            yield matmul(
                "qkv", in_eights, d_model, *(f"{blk}attn_{name}.weight" for name in "qkv"),
                out=qkv, out_stride=d_qkv, add=False,
            )  # fmt: skip
            yield launch(
                attend.name.replace("attend_", "attend_rows_"), lambda n: (params.n_kv_heads, self.splits, n),
                attend.threads,
                AttendRowsArguments(
                    qkv.value, qkv.value + 4 * d_attention, qkv.value + 4 * (d_attention + d_kv),
                    weights.vector(blk + "attn_q_norm.weight").value, weights.vector(blk + "attn_k_norm.weight").value,
                    buffers["rope"].value, steps.value, buffers["cells"].value, buffers["attended"].value,
                    buffers["attend"].value, d_qkv, self._attend_bytes, layer, params.n_heads, params.rms_eps,
                ),
                shared_bytes=attend.shared_bytes,
            )  # fmt: skip
            yield matmul(
                "attend_out", buffers["attended"], d_attention, blk + "attn_output.weight",
                out=x, out_stride=d_model, add=True,
            )  # fmt: skip
            at = layer * n_experts * 8
            router = blk + "ffn_gate_inp.weight"
            yield launch(
                "route_rows", lambda n: batch.route_grid(n, n_experts), batch.ROW_THREADS,
                x, weights.vector(blk + "ffn_norm.weight"), weights.matrix(router), normed,
                buffers["scores"], buffers["arrived"], buffers["experts"], buffers["weights"], groups,
                Heat(self._heat.counts + at, self._heat.shared + at), d_model, top_k, eps,
                shared_bytes=batch.route_shared_bytes(
                    d_model, weights.row_bytes(router), self._device.shared_bytes_max
                ),
            )  # fmt: skip
            table = ctypes.c_uint64(self._table + 3 * at)
            gate_type, up_type, down_type = map(int, self._model.expert_types(layer))
            gate_bytes, up_bytes, down_bytes = self._model.expert_bytes(layer, 0)
            yield experts(
                "gate_up_rows", d_expert // batch.STRIP_ROWS, [gate_bytes // d_expert, up_bytes // d_expert],
                normed, groups, table, gate_type, up_type, buffers["hidden"], n_experts, top_k, d_model, d_expert,
            )  # fmt: skip
            yield experts(
                "down_rows", d_model // (2 * batch.STRIP_ROWS), [down_bytes // d_model] * 2,
                buffers["hidden"], groups, table, down_type, buffers["results"], n_experts, d_model, d_expert,
            )  # fmt: skip
            last = layer == params.n_layers - 1
            yield combine("output_norm.weight" if last else f"blk.{layer + 1}.attn_norm.weight", top_k)
        yield matmul(
            "head", in_eights, d_model, "token_embd.weight" if self._model.tied_output else "output.weight",
            out=buffers["logits"], out_stride=params.n_vocab, add=False,
        )  # fmt: skip
        blocks = structs.sample_blocks(params.n_tokens)
        yield launch(
            "sample", lambda n: (blocks, n), structs.SAMPLE_THREADS,
            buffers["logits"], params.n_tokens, buffers["options"], buffers["seen"], buffers["sample"], steps,
            ctypes.c_uint64(self.ring.ctypes.data), ctypes.c_uint64(0),
            structs.SampleRows(params.n_vocab, self._seen_bytes // 4, self._sample_bytes, self.rows_max),
        )  # fmt: skip
        yield launch("end_step", lambda _: 1, 32, buffers["step"], 0, self._retired)
