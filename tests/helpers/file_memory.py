"""A model's memory straight from its file, and a K/V cache in plain arrays."""

import os
from collections.abc import Sequence

import numpy as np

from strata_client.models.base import F32, I32, U8, ExpertBytes
from strata_client.models.gguf_file import ModelFile
from strata_client.models.qwen3moe import Qwen3Moe


class FileMemory:
    """Reads tensors with `pread` whenever they are asked for; counts what is routed."""

    def __init__(self, model_file: ModelFile, model: Qwen3Moe) -> None:
        self._file = model_file
        self._weights = {extent.name: extent for extent in model.weight_extents()}
        self._stacks = {
            (stack.layer, stack.matrix, stack.first_expert + n): (stack, n)
            for stack in model.stacks()
            for n in range(stack.count)
        }
        self.entry = 0
        self.expert_reads = 0
        self.heat: dict[tuple[int, bool], list[I32]] = {}

    def _read(self, file: int, offset_bytes: int, length_bytes: int) -> U8:
        data = os.pread(self._file.files[file].fd, length_bytes, offset_bytes)
        assert len(data) == length_bytes
        return np.frombuffer(data, np.uint8)

    def weight(self, name: str) -> U8:
        """Raw bytes of a tensor."""
        extent = self._weights[name]
        return self._read(extent.file, extent.offset_bytes, extent.length_bytes)

    def expert(self, layer: int, expert: int) -> ExpertBytes:
        """Raw bytes of an expert under the residency entry `self.entry`."""
        self.expert_reads += 1
        matrices = []
        for matrix in range(3):
            stack, n = self._stacks[layer, matrix, expert]
            matrices.append(self._read(stack.file, stack.offset_bytes + n * stack.stride_bytes, stack.expert_bytes))
        return ExpertBytes(self.entry, *matrices)

    def routed(self, layer: int, experts: I32, *, prompt: bool) -> None:
        """Keeps what was routed to."""
        self.heat.setdefault((layer, prompt), []).append(experts)


class ArrayCache:
    """K/V cells in arrays of `segment_cells` each."""

    def __init__(self, model: Qwen3Moe, n_cells: int, segment_cells: int = 64) -> None:
        shape = (segment_cells, model.params.n_kv_heads, model.params.head_dim)
        self._layers = [
            [
                (np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32))
                for _ in range(-(-n_cells // segment_cells))
            ]
            for _ in range(model.params.n_layers)
        ]
        self._segment_cells = segment_cells

    def segments(self, layer: int, n_cells: int) -> Sequence[tuple[F32, F32]]:
        """K and V of the first `n_cells` cells."""
        size = self._segment_cells
        return [
            (k[: n_cells - n * size], v[: n_cells - n * size])
            for n, (k, v) in enumerate(self._layers[layer])
            if n * size < n_cells
        ]


def greedy(model: Qwen3Moe, memory: FileMemory, tokens: Sequence[int], count: int) -> list[int]:
    """The `count` likeliest tokens after `tokens`, one by one."""
    cache = ArrayCache(model, len(tokens) + count)
    logits = model.forward(np.array(tokens, np.int32), 0, memory, cache, prompt=True)
    found: list[int] = []
    while len(found) < count:
        found.append(int(logits.argmax()))
        position = len(tokens) + len(found) - 1
        logits = model.forward(np.array(found[-1:], np.int32), position, memory, cache, prompt=False)
    return found
