"""How fast a step of several sequences is at the shapes of Qwen3-30B-A3B in Q4_K_M, all resident, and its kernels.

The model is made in device memory, without a file or a daemon. Sequences draw their tokens, so they differ.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGML_QUANT_SIZES
from strata_kernels import structs
from strata_kernels.compiler import SOURCES as KERNELS
from strata_kernels.launch import DeviceBuffer, Kernels, Launch
from strata_kernels.structs import Heat, KvCells, SampleOptions

from strata_client.gpu import batch_decoder, launches
from strata_client.gpu.batch_decoder import BatchDecoder
from strata_client.gpu.device import Device
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from tests.bench import make_random_gguf, report
from tests.bench.make_random_gguf import Options, Plan, Shape
from tests.bench.report import Row
from tests.helpers.require_gpu import require_gpu
from vmmd.driver.cuda_calls import bindings, call, find_gpus

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(400)]

ROWS = (1, 2, 4, 8, 16, 32, 64)
STEPS = 24
REPEATS = 10
HBM_GB_PER_S = 4800
POOL_BYTES = 32 << 20
BEGIN = 100  # the cell of a sequence's first step
CELLS = -(-(BEGIN + len(ROWS) * (1 + STEPS)) // 16) * 16  # one slab has them all
TARGET_TOKENS_PER_S = {16: 3100.0}


class PlacedModel:
    """A model of random weights in device memory; stands for `ClientMemory`.

    Attributes:
        model: its shapes and types.
        words: uint64 `[n_layers, n_experts, 3]`, where its experts' matrices lie.
        dense_bytes: of what every step reads.
        expert_bytes: of an expert, in the mean.
    """

    def __init__(self, device: Device, path: Path, shape: Shape, options: Options) -> None:
        head, size_bytes = make_random_gguf.header(shape, options)
        path.write_bytes(head)
        os.truncate(path, len(head) + size_bytes)  # for its tables alone
        self.model = Qwen3Moe(open_model_file(str(path)))
        self._device = device
        self._rng = np.random.default_rng(0)
        self._buffers: dict[str, DeviceBuffer] = {}
        self._pools: dict[tuple[Any, float], int] = {}
        self.words = np.zeros((shape.layers, shape.experts, 3), np.uint64)
        self.dense_bytes = 0
        self.expert_bytes = 0.0
        for tensor in make_random_gguf.plan(shape, options):
            address = self._put(tensor)
            if len(tensor.dims) < 3:
                self.dense_bytes += 0 if tensor.name == "token_embd.weight" else tensor.size_bytes
                continue
            _, layer, name, _ = tensor.name.split(".")
            each = tensor.size_bytes // shape.experts
            matrix = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps").index(name)
            self.words[int(layer), :, matrix] = address + np.arange(shape.experts, dtype=np.uint64) * np.uint64(each)
            self.expert_bytes += each / shape.layers
        device.synchronize()

    def weight_address(self, name: str) -> int:
        """Where a tensor begins."""
        return self._buffers[name].address

    def room(self, name: str, size_bytes: int) -> int:
        """Memory of zeros."""
        self._buffers[name] = DeviceBuffer(size_bytes)
        self._buffers[name].fill(0)
        return self._buffers[name].address

    def close(self) -> None:
        """Frees all of it."""
        for buffer in self._buffers.values():
            buffer.close()

    def _put(self, tensor: Plan) -> int:
        address = self.room(tensor.name, tensor.size_bytes)
        if isinstance(tensor.fill, str):
            values = self._rng.standard_normal(tensor.dims[::-1], np.float32)
            values = 1 + values / 10 if tensor.fill == "norm" else values / np.sqrt(np.float32(tensor.dims[0]))
            self._device.upload(address, values)
            return address
        key = tensor.type, tensor.fill
        if key not in self._pools:
            n = min(POOL_BYTES, tensor.size_bytes) // GGML_QUANT_SIZES[tensor.type][1]
            blocks = make_random_gguf.random_blocks(self._rng, tensor.type, n, tensor.fill).reshape(-1)
            self._pools[key] = self.room(f"pool {key}", blocks.nbytes)
            self._device.upload(self._pools[key], blocks)
        pool_bytes = self._buffers[f"pool {key}"].size_bytes
        for at in range(0, tensor.size_bytes, pool_bytes):
            size_bytes = min(pool_bytes, tensor.size_bytes - at)
            call(self._device.cu.cuMemcpyAsync, address + at, self._pools[key], size_bytes, self._device.stream)
        return address


class Bench:
    """A batch's decoder with all its rows."""

    def __init__(self, device: Device, placed: PlacedModel, rows_max: int) -> None:
        self.device, self.placed = device, placed
        model, params = placed.model, placed.model.params
        names = (*batch_decoder.SOURCES, "prompt_rows", "sample", "decode", "attend_rows_f16")
        kernels = Kernels([KERNELS / f"{name}.cu" for name in names], model.type_names())
        table = placed.room("table", placed.words.nbytes)
        device.upload(table, placed.words)
        heat = Heat(*(placed.room(f"heat {i}", placed.words.nbytes // 3) for i in range(2)))
        self._retired: npt.NDArray[np.uint64] = device.pinned(1, np.uint64)
        self.decoder = BatchDecoder(
            device, kernels, model, cast(Any, placed), "f16", rows_max, table, self._retired.ctypes.data, heat,
            in_place=lambda: Kernels([KERNELS / "batch_matmul_in_place.cu"], model.type_names()),
        )  # fmt: skip
        slab_bytes = CELLS * params.n_layers * 2 * params.n_kv_heads * params.head_dim * 2
        seen = np.zeros(-(-params.n_vocab // 32) * 4, np.uint8)
        for row in range(rows_max):
            slab = placed.room(f"cells {row}", slab_bytes)
            cells = KvCells(slab, slab_bytes, CELLS, params.n_kv_heads, params.head_dim, structs.KV_F16)
            how = SampleOptions(1, 1, 0, 1, row, 0, BEGIN)
            self.decoder.set_row(row, cells, BEGIN, 7919 * (row + 1) % params.n_tokens, how, seen)
        self._number = 0

    def step(self, n: int) -> tuple[float, int]:
        """Seconds of a step, and the experts that its last layer read."""
        self._number += 1
        begin, end = (call(self.device.cu.cuEventCreate, 0) for _ in range(2))
        call(self.device.cu.cuEventRecord, begin, self.device.stream)
        self.decoder.launch(n, self._number)
        call(self.device.cu.cuEventRecord, end, self.device.stream)
        first_tiles = np.empty(self.placed.model.params.n_experts + 1, np.int32)
        self.device.download(first_tiles, self.decoder.buffers["first_tiles"].value)
        chosen = self.decoder.ring[self._number % structs.RING_WORDS, :n]
        assert self._retired[0] == self._number and chosen.max() < self.placed.model.params.n_tokens
        return call(self.device.cu.cuEventElapsedTime, begin, end) / 1e3, int(first_tiles[-1])

    def kernel_times_us(self, n: int) -> Iterator[tuple[str, int, float]]:
        """Name, number in a step, and time of all kernels of that name, from replays of a graph of them alone."""
        by_name: dict[str, list[Launch]] = defaultdict(list)
        self.decoder.resize(n)
        for name, launch in self.decoder.launches:
            by_name[name].append(launch)
        cu, stream = self.device.cu, self.device.stream
        for name, some in by_name.items():
            if name in ("sample", "end_step"):  # they move sequences on
                continue
            graph = launches.capture(self.device, some)
            times = []
            for _ in range(REPEATS):
                begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
                call(cu.cuEventRecord, begin, stream)
                launches.launch_graph(self.device, graph)
                call(cu.cuEventRecord, end, stream)
                self.device.synchronize()
                times.append(call(cu.cuEventElapsedTime, begin, end) * 1e3)
            call(cu.cuGraphExecDestroy, graph)
            yield name, len(some), statistics.median(times)


def test_steps(tmp_path: Path) -> None:
    """Steps of several numbers of rows, from short contexts, and their kernels."""
    require_gpu()
    gpu = find_gpus(bindings())[0][0]
    device = Device(gpu.uuid)
    placed = PlacedModel(device, tmp_path / "30b.gguf", make_random_gguf.PRESETS["30b"], Options(mix="q4_k_m"))
    bench = Bench(device, placed, max(ROWS))
    figures = measure(bench, ROWS)
    bench.decoder.close()
    placed.close()
    device.close()
    report.write("batch-decoder", gpu.name, report.gpu_driver(), figures)


def measure(bench: Bench, numbers_of_rows: tuple[int, ...]) -> list[Row]:
    """The figures of steps of so many rows each."""
    figures = []
    placed, params = bench.placed, bench.placed.model.params
    for n in numbers_of_rows:
        bench.step(n)  # makes the graph
        steps = [bench.step(n) for _ in range(STEPS)]
        s, experts = statistics.median(s for s, _ in steps), statistics.mean(count for _, count in steps)
        size_bytes = placed.dense_bytes + experts * params.n_layers * placed.expert_bytes
        limit = n / (size_bytes / HBM_GB_PER_S / 1e9)
        target = TARGET_TOKENS_PER_S.get(n)
        figures.append(Row(f"{n} rows, in sum", n / s, "tok/s", "higher", target, limit))
        figures.append(Row(f"{n} rows, a step", s * 1e3, "ms", "lower", None, size_bytes / HBM_GB_PER_S / 1e6))
        figures.append(Row(f"{n} rows, experts of a layer that are read", experts, "", "lower"))
        figures += [
            Row(f"{n} rows, {count} x {name}, alone in a graph", us, "us", "lower")
            for name, count, us in bench.kernel_times_us(n)
        ]
    return figures
