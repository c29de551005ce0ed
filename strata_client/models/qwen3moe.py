"""The Qwen3-MoE architecture (`qwen3moe`), in float32 on the numpy reference kernels.

Names of tensors and keys are those of GGUF files. Source: Qwen3 Technical Report, 2025; the arithmetic is that
of transformers' `Qwen3MoeForCausalLM` with `norm_topk_prob`.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
from strata_kernels.reference import (
    attention,
    dequantize,
    embedding,
    expert_ffn,
    kv_store,
    matmul,
    rms_norm,
    rope,
    router,
)
from strata_kernels.tensor_type import TensorType

from strata_client.models.base import (
    F32,
    I32,
    U8,
    ExpertBytes,
    ExpertStack,
    KVCache,
    Memory,
    ModelError,
    WeightExtent,
)
from strata_client.models.gguf_file import ModelFile, TensorInfo
from strata_client.models.qwen3moe_file import (
    MATRICES,
    Params,
    check_tensors,
    expert_tensor,
    read_params,
    weight_shapes,
)

EXPERT_CACHE_BYTES = 256 << 20


class Qwen3Moe:
    """A model: where its tensors lie, and how tokens become logits.

    Not for use by several threads at once.

    Attributes:
        params: the model's shape.
        tied_output: the embedding is the output matrix as well.
        kv_cell_bytes: float32 K and V of one token position in all layers.
        is_first, is_last: it begins with the embedding, and ends with logits; both but for a `stage`.
    """

    def __init__(self, model_file: ModelFile, expert_cache_bytes: int = EXPERT_CACHE_BYTES) -> None:
        """Checks the file's metadata and tensors.

        Args:
            model_file: the opened file; only its tables are used.
            expert_cache_bytes: how many bytes of decoded experts are kept.

        Raises:
            ModelError: a key or tensor is missing, of the wrong shape, or of a kind that would give wrong results.
        """
        self.params: Params = read_params(model_file)
        self._tensors = check_tensors(model_file, self.params)
        self.tied_output = "output.weight" not in self._tensors
        self._type_names = sorted({tensor.type.name for tensor in self._tensors.values()})
        self._expert_cache_bytes = expert_cache_bytes
        self.kv_cell_bytes = self.params.n_layers * 2 * self.params.n_kv_heads * self.params.head_dim * 4
        self.is_first = self.is_last = True
        self._weights: dict[str, F32] = {}
        self._experts = _ExpertCache(expert_cache_bytes)

    def stage(self, layers: range) -> "Qwen3Moe":
        """A run of the layers as a model of its own, which counts them from 0: what one device of a split computes.

        The first stage has the embedding, the last the output matrix. The others hand on the residual, which the
        next layer norms before all else: they have that norm as their `output_norm.weight`.
        """
        assert self.is_first and self.is_last, "a stage of a stage"
        n_all = self.params.n_layers
        part = copy.copy(self)
        part.params = replace(self.params, n_layers=len(layers))
        part.is_first, part.is_last = layers.start == 0, layers.stop == n_all
        part.kv_cell_bytes = self.kv_cell_bytes // n_all * len(layers)
        names = {} if part.is_last else {f"blk.{layers.stop}.attn_norm.weight": "output_norm.weight"}
        if part.is_first or (part.is_last and self.tied_output):
            names["token_embd.weight"] = "token_embd.weight"
        if part.is_last:
            names |= {name: name for name in ("output_norm.weight", "output.weight")}
        part._tensors = {}
        for tensor in self._tensors.values():
            _, *number = tensor.name.split(".", 2)
            if len(number) > 1 and int(number[0]) in layers:
                name: str | None = f"blk.{int(number[0]) - layers.start}.{number[1]}"
            else:
                name = names.get(tensor.name)
            if name is not None:
                part._tensors[name] = tensor._replace(name=name)
        part._weights = {}
        part._experts = _ExpertCache(self._expert_cache_bytes)
        return part

    def stacks(self) -> list[ExpertStack]:
        """Where the routed experts lie; separate tensors at equal distances are one stack."""
        return [
            stack
            for layer, matrix in product(range(self.params.n_layers), range(len(MATRICES)))
            for stack in self._stacks_of(layer, matrix)
        ]

    def _stacks_of(self, layer: int, matrix: int) -> Iterator[ExpertStack]:
        """The stacks of one layer's matrix."""
        n = self.params.n_experts
        tensor, offset_bytes, size_bytes = self._expert_place(layer, matrix, 0)
        if len(tensor.dims) == 3:
            yield ExpertStack(layer, matrix, 0, n, tensor.file, offset_bytes, size_bytes, size_bytes)
            return
        places = [self._expert_place(layer, matrix, expert) for expert in range(n)]
        first = 0
        while first < n:
            (tensor, offset_bytes, size_bytes), end = places[first], first + 1
            stride_bytes = places[end][1] - offset_bytes if end < n else 0
            while stride_bytes > 0 and end < n:
                other, other_bytes, other_size_bytes = places[end]
                if (other.file, other_size_bytes) != (tensor.file, size_bytes):
                    break
                if other_bytes != offset_bytes + (end - first) * stride_bytes:
                    break
                end += 1
            if end - first == 1:
                stride_bytes = size_bytes
            yield ExpertStack(layer, matrix, first, end - first, tensor.file, offset_bytes, stride_bytes, size_bytes)
            first = end

    def _expert_place(self, layer: int, matrix: int, expert: int) -> tuple[TensorInfo, int, int]:
        """The tensor that holds an expert's matrix, and the matrix's offset in the file and its bytes."""
        tensor = expert_tensor(self._tensors, layer, MATRICES[matrix], expert)
        if len(tensor.dims) == 2:
            return tensor, tensor.offset_bytes, tensor.size_bytes
        size_bytes = tensor.size_bytes // self.params.n_experts
        return tensor, tensor.offset_bytes + expert * size_bytes, size_bytes

    def weight_extents(self) -> list[WeightExtent]:
        """Every tensor that is not a routed expert, once each."""
        names = weight_shapes(self.params)
        return [
            WeightExtent(tensor.name, tensor.file, tensor.offset_bytes, tensor.size_bytes)
            for tensor in self._tensors.values()
            if tensor.name in names
        ]

    def expert_bytes(self, layer: int, expert: int) -> tuple[int, int, int]:
        """Bytes of an expert's gate, up and down as they lie in the file."""
        gate, up, down = (self._expert_place(layer, matrix, expert)[2] for matrix in range(len(MATRICES)))
        return gate, up, down

    def expert_sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of every expert's gate, up and down, int64 `[n_layers, n_experts, 3]`."""
        sizes = np.empty((self.params.n_layers, self.params.n_experts, len(MATRICES)), np.int64)
        for layer, matrix in product(range(self.params.n_layers), range(len(MATRICES))):
            first = expert_tensor(self._tensors, layer, MATRICES[matrix], 0)
            if len(first.dims) == 3:
                sizes[layer, :, matrix] = first.size_bytes // self.params.n_experts
            else:
                for expert in range(self.params.n_experts):
                    sizes[layer, expert, matrix] = self._expert_place(layer, matrix, expert)[2]
        return sizes

    def expert_types(self, layer: int) -> tuple[TensorType, ...]:
        """The types of a layer's gate, up and down.

        Raises:
            ModelError: experts of one matrix differ, which only the host's kernels take.
        """
        types = []
        for matrix in MATRICES:
            first = expert_tensor(self._tensors, layer, matrix, 0)
            n_separate = self.params.n_experts if len(first.dims) == 2 else 1
            found = {expert_tensor(self._tensors, layer, matrix, expert).type for expert in range(n_separate)}
            if len(found) > 1:
                names = ", ".join(sorted(kind.name for kind in found))
                raise ModelError(
                    f"the experts of {matrix} in layer {layer} have different types ({names}), which a GPU's kernels"
                    " do not take: quantize them alike, or run on the host"
                )
            types.append(first.type)
        return tuple(types)

    def type_names(self) -> list[str]:
        """The types of the tensors of the whole model, by name, each once: all stages have the same kernels."""
        return list(self._type_names)

    def tensor(self, name: str) -> TensorInfo:
        """A tensor of the model."""
        return self._tensors[name]

    def forward(
        self,
        given: I32 | F32,
        position: int,
        memory: Memory,
        cache: KVCache,
        *,
        prompt: bool,
        all_logits: bool = False,
    ) -> F32:
        """Runs tokens through the model; their K and V go into the cache.

        Args:
            given: the tokens, int32 `[n]`, at least one. A stage that is not the first takes what the one before gave.
            position: cell of the first token; the cells before it are filled.
            memory: of this model's file. Within a published step.
            cache: with room for `position + n` cells.
            prompt: the tokens are a prompt's (their routing counts less).
            all_logits: for each token, not only for the last.

        Returns:
            Logits float32 `[n_vocab]`, or `[n, n_vocab]`. Ids that the vocabulary has no token for are -inf;
            weights that are not finite make logits that are not. Of a stage that is not the last the residual
            after its layers, float32 `[n, d_model]`.

        Raises:
            ModelError: a token is not below `n_vocab`.
        """
        rows: F32 = self._forward(given[None], [position], memory, [cache], prompt=prompt, all_logits=all_logits)[0]
        return rows if all_logits or not self.is_last else rows[0]

    def decode(self, given: I32 | F32, positions: Sequence[int], memory: Memory, caches: Sequence[KVCache]) -> F32:
        """Runs one token of each of several sequences through the model; each's K and V go into its cache.

        An expert is decoded once for all. The logits are those that `forward` gives for each alone, to the bit.

        Args:
            given: the tokens, int32 `[n_sequences]`, at least one; for a stage as `forward` has it.
            positions: each one's cell; the cells before it are filled.
            memory: of this model's file. Within a published step.
            caches: the sequences', with room for the tokens.

        Returns:
            Logits float32 `[n_sequences, n_vocab]`, as `forward` has them.

        Raises:
            ModelError: a token is not below `n_vocab`.
        """
        found = self._forward(given[:, None], positions, memory, caches, prompt=False, all_logits=False)
        return found.reshape(len(given), -1)

    def _forward(
        self,
        given: I32 | F32,
        positions: Sequence[int],
        memory: Memory,
        caches: Sequence[KVCache],
        *,
        prompt: bool,
        all_logits: bool,
    ) -> F32:
        """Several tokens of one sequence, or one of each of several: int32 `[n_sequences, n]`, or their residuals.

        Sequences are an axis of their own up to the last product, so that what a row gives does not depend on how
        many others there are: numpy multiplies each sequence's `[n, d]` by itself.

        Returns:
            Logits float32 `[n_sequences, n or 1, n_vocab]`, or residuals `[n_sequences, n, d_model]`.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # damaged weights show in the logits
            if self.is_first:
                x = self._embedding(np.asarray(given, np.int32), memory)
            else:
                x = np.asarray(given, np.float32)
            for layer in range(self.params.n_layers):
                x = x + self._attention(layer, x, positions, memory, caches)
                x = x + self._mixture(layer, x, memory, prompt)
            if not self.is_last:
                return x
            return self._logits(x if all_logits else x[:, -1:], memory)

    def _embedding(self, tokens: I32, memory: Memory) -> F32:
        """Rows of the embedding, float32 `[n_sequences, n, d_model]`."""
        if tokens.min() < 0 or tokens.max() >= self.params.n_vocab:
            raise ModelError(f"token {tokens.max()} does not exist: the model has {self.params.n_vocab}")
        table = self._tensors["token_embd.weight"]
        rows = embedding(tokens.ravel(), memory.weight(table.name).reshape(self.params.n_vocab, -1), table.type)
        return rows.reshape(*tokens.shape, -1)

    def _logits(self, x: F32, memory: Memory) -> F32:
        """Scores of all ids, float32 `[n_sequences, n, n_vocab]`."""
        x = rms_norm(x, self._weight(memory, "output_norm.weight"), self.params.rms_eps)
        logits = matmul(x, self._weight(memory, "token_embd.weight" if self.tied_output else "output.weight"))
        logits[..., self.params.n_tokens :] = -np.inf
        return logits

    def _attention(
        self, layer: int, x: F32, positions: Sequence[int], memory: Memory, caches: Sequence[KVCache]
    ) -> F32:
        """Attention of one layer, float32 `[n_sequences, n, d_model]`."""
        params, blk, shape = self.params, f"blk.{layer}.", x.shape[:2]
        h = rms_norm(x, self._weight(memory, blk + "attn_norm.weight"), params.rms_eps)
        q = matmul(h, self._weight(memory, blk + "attn_q.weight")).reshape(*shape, params.n_heads, params.head_dim)
        k = matmul(h, self._weight(memory, blk + "attn_k.weight")).reshape(*shape, params.n_kv_heads, params.head_dim)
        v = matmul(h, self._weight(memory, blk + "attn_v.weight")).reshape(*shape, params.n_kv_heads, params.head_dim)
        q = rms_norm(q, self._weight(memory, blk + "attn_q_norm.weight"), params.rms_eps)
        k = rms_norm(k, self._weight(memory, blk + "attn_k_norm.weight"), params.rms_eps)
        out = np.empty_like(q)
        for i, (position, cache) in enumerate(zip(positions, caches, strict=True)):
            segments = cache.segments(layer, position + shape[1])
            kv_store(rope(k[i], position, params.rope_freq_base, params.rope_scale), v[i], segments, position)
            out[i] = attention(rope(q[i], position, params.rope_freq_base, params.rope_scale), segments, position)
        return matmul(out.reshape(*shape, -1), self._weight(memory, blk + "attn_output.weight"))

    def _mixture(self, layer: int, x: F32, memory: Memory, prompt: bool) -> F32:
        """The routed experts of one layer, float32 `[n_sequences, n, d_model]`."""
        params, blk = self.params, f"blk.{layer}."
        n_sequences, _, d_model = x.shape
        h = rms_norm(x, self._weight(memory, blk + "ffn_norm.weight"), params.rms_eps)
        scores = matmul(h, self._weight(memory, blk + "ffn_gate_inp.weight"))
        experts, weights = router(scores.reshape(-1, params.n_experts), params.top_k)
        memory.routed(layer, experts, prompt=prompt)
        h = h.reshape(-1, d_model)
        out = np.zeros_like(h)
        for expert in np.unique(experts).tolist():
            rows, ranks = np.nonzero(experts == expert)
            chosen = h[rows].reshape(-1, 1 if n_sequences > 1 else len(rows), d_model)
            y = expert_ffn(chosen, *self._expert(memory, layer, expert))
            out[rows] += weights[rows, ranks, None] * y.reshape(-1, d_model)
        return out.reshape(x.shape)

    def _weight(self, memory: Memory, name: str) -> F32:
        """A tensor of the weights range, decoded once: float32, slowest dimension first."""
        if name not in self._weights:
            tensor = self._tensors[name]
            raw = memory.weight(name).reshape(*reversed(tensor.dims[1:]), -1)
            self._weights[name] = dequantize(raw, tensor.type)
        return self._weights[name]

    def _expert(self, memory: Memory, layer: int, expert: int) -> tuple[F32, F32, F32]:
        """An expert's gate, up and down, decoded: float32 `[d_out, d_in]`."""
        raw = memory.expert(layer, expert)
        found = self._experts.get(layer, expert, raw)
        if found is None:
            gate, up, down = (
                self._decode(layer, matrix, expert, data) for matrix, data in enumerate((raw.gate, raw.up, raw.down))
            )
            found = self._experts.put(layer, expert, raw, (gate, up, down))
        return found

    def _decode(self, layer: int, matrix: int, expert: int, raw: U8) -> F32:
        tensor = expert_tensor(self._tensors, layer, MATRICES[matrix], expert)
        return dequantize(raw.reshape(tensor.dims[1], -1), tensor.type)


class _ExpertCache:
    """Decoded experts, the least recently used dropped first.

    What is decoded holds while the residency entry that it was read by is unchanged.
    """

    def __init__(self, size_bytes: int) -> None:
        self._left_bytes = size_bytes
        self._found: OrderedDict[tuple[int, int], tuple[int, tuple[F32, F32, F32]]] = OrderedDict()

    def get(self, layer: int, expert: int, raw: ExpertBytes) -> tuple[F32, F32, F32] | None:
        """The decoded matrices, if they are still those of `raw`."""
        entry, matrices = self._found.get((layer, expert), (None, None))
        if entry != raw.entry:
            return None
        self._found.move_to_end((layer, expert))
        return matrices

    def put(self, layer: int, expert: int, raw: ExpertBytes, matrices: tuple[F32, F32, F32]) -> tuple[F32, F32, F32]:
        """Keeps decoded matrices, as far as there is room, and returns them."""
        self._drop((layer, expert))
        self._found[layer, expert] = raw.entry, matrices
        self._left_bytes -= sum(matrix.nbytes for matrix in matrices)
        while self._left_bytes < 0:
            self._drop(next(iter(self._found)))
        return matrices

    def _drop(self, key: tuple[int, int]) -> None:
        if key in self._found:
            self._left_bytes += sum(matrix.nbytes for matrix in self._found.pop(key)[1])
