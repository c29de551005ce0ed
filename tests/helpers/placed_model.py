"""A model's bytes where kernels that the host plays find them."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from strata_api.v1 import pages

from strata_client.models.qwen3moe import Qwen3Moe
from tests.helpers.file_memory import FileMemory
from tests.helpers.host_device import HostBuffer


def array_at(address: int, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A copy of what lies at an address."""
    size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(ctypes.string_at(address, size_bytes), dtype).reshape(shape)


class PlacedModel:
    """A model's bytes where kernels find them; stands for `ClientMemory` and `AddressTable`."""

    def __init__(self, model: Qwen3Moe, memory: FileMemory) -> None:
        self._buffers: dict[str, HostBuffer] = {}
        self._memory = memory
        params = model.params
        self.words = np.zeros((params.n_layers, params.n_experts, 3), np.uint64)
        self.in_host = np.zeros((params.n_layers, params.n_experts), np.bool_)
        self.computed_by = np.zeros((params.n_layers, params.n_experts), np.int8)
        for layer, expert in np.ndindex(self.in_host.shape):
            matrices = memory.expert(layer, expert)[1:]
            *offsets, slot_bytes = pages.slot_layout(*map(len, matrices))
            slot = self._put(f"{layer}.{expert}", slot_bytes)
            for matrix, (offset, data) in enumerate(zip(offsets, matrices, strict=True)):
                ctypes.memmove(slot + offset, data.ctypes.data, len(data))
                self.words[layer, expert, matrix] = slot + offset

    def weight_address(self, name: str) -> int:
        """Where a tensor begins."""
        if name not in self._buffers:
            data = self._memory.weight(name)
            ctypes.memmove(self._put(name, len(data)), data.ctypes.data, len(data))
        return self._buffers[name].address

    def _put(self, name: str, size_bytes: int) -> int:
        self._buffers[name] = HostBuffer(size_bytes)
        return self._buffers[name].address
