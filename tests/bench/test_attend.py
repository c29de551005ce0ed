"""How fast attention is at the shapes of Qwen3-30B-A3B: of one token at several depths, and of a prompt's."""

import ctypes
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from strata_kernels import attention
from strata_kernels.attention import AttendArguments, PromptArguments, StoreArguments
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import DeviceBuffer, Kernels, Launch
from strata_kernels.structs import KV_BF16, KV_F16, KV_Q8_0, Activation, KvCells, Step

from strata_client.gpu.device import Device
from tests.bench import report
from tests.bench.report import Row
from tests.helpers.require_gpu import require_gpu
from vmmd.driver.cuda_calls import bindings, call, find_gpus

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(600)]

HEAD_DIM, N_KV_HEADS, N_LAYERS = 128, 4, 48
SLAB_BYTES = 64 << 20
TYPES = {"f16": KV_F16, "bf16": KV_BF16, "q8_0": KV_Q8_0}
DEPTHS = (128, 256, 272, 512, 1024, 2048, 4096, 16_384)
TARGET_US = {128: 4.0, 16_384: 500 / 48}
HBM_GB_PER_S = 4500
TFLOP_PER_S = 790
PROMPT_TOKENS = 512
REPEATS = 20


class Bench:
    """The first GPU, and cells and activations of random values in its memory."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self._kernels: dict[str, Kernels] = {}
        self._buffers: list[DeviceBuffer] = []
        block = np.random.default_rng(0).integers(0, 0x3C, SLAB_BYTES, np.uint8)  # in any type values below 1
        cells = 16_384 + 4 * PROMPT_TOKENS
        self._n_slabs = 2 + cells * N_LAYERS * 2 * N_KV_HEADS * HEAD_DIM * 2 // SLAB_BYTES * 17 // 16
        self._cells = self.room(self._n_slabs * SLAB_BYTES)
        self._buffers[-1].upload(block)
        for i in range(1, self._n_slabs):
            call(device.cu.cuMemcpyDtoD, self._cells + i * SLAB_BYTES, self._cells, SLAB_BYTES)
        self.floats = self.room(64 << 20)
        self._buffers[-1].upload(np.random.default_rng(1).standard_normal(16 << 20, np.float32))
        self.workspace = self.room(64 << 20)

    def kernels(self, source: str) -> Kernels:
        """Of a source."""
        if source not in self._kernels:
            self._kernels[source] = Kernels([SOURCES / source])
        return self._kernels[source]

    def room(self, size_bytes: int) -> int:
        """Memory of zeros."""
        self._buffers.append(DeviceBuffer(size_bytes))
        self._buffers[-1].fill(0)
        return self._buffers[-1].address

    def cells(self, kind: str, n: int) -> KvCells:
        """Cells of a type in slabs."""
        values = N_KV_HEADS * HEAD_DIM
        cell_bytes = N_LAYERS * 2 * (values + values // 16 if kind == "q8_0" else 2 * values)
        cells_per_slab = SLAB_BYTES // cell_bytes // 16 * 16
        assert n <= cells_per_slab * self._n_slabs
        return KvCells(self._cells, SLAB_BYTES, cells_per_slab, N_KV_HEADS, HEAD_DIM, TYPES[kind])

    def attend(
        self,
        kind: str,
        depth: int,
        *,
        group: int = 8,
        n_splits: int | None = None,
        shared_kib: int = 99,
        programmatic: bool = True,
    ) -> list[Launch]:
        """The launches of one step, a layer each."""
        n_heads = group * N_KV_HEADS
        splits = n_splits or attention.attend_splits(self.device.multiprocessors, N_KV_HEADS)
        step = self.room(ctypes.sizeof(Step))
        self._buffers[-1].upload(np.frombuffer(bytearray(Step(1, depth - 1, 0)), np.uint8))
        out = Activation.at(self.room(Activation.size_bytes(n_heads * HEAD_DIM)), n_heads * HEAD_DIM)
        shape = attention.attend_shape(kind, HEAD_DIM, group, shared_kib * 1024)
        q, k, v, weights, table = (self.floats + (i << 20) for i in range(5))
        cells = self.cells(kind, depth)
        arguments = [
            AttendArguments(q, k, v, weights, weights, table, step, cells, out, self.workspace, layer, n_heads, 1e-6)
            for layer in range(N_LAYERS)
        ]
        prepare, grid = self.kernels(f"attend_{kind}.cu").prepare, (N_KV_HEADS, splits)
        return [
            prepare(shape.name, grid, shape.threads, [argument], shape.shared_bytes, self.device.stream, programmatic)
            for argument in arguments
        ]

    def attend_prompt(self, kind: str, position: int) -> list[Launch]:
        """The launches of a chunk's attention, a layer each."""
        n, n_heads = PROMPT_TOKENS, 8 * N_KV_HEADS
        q = self.room(n * n_heads * HEAD_DIM * 2)
        self._buffers[-1].upload(
            np.random.default_rng(2).standard_normal(n * n_heads * HEAD_DIM, np.float32).astype(np.float16)
        )
        out = self.room(n * n_heads * HEAD_DIM * 2)
        shape = attention.attend_prompt_shape(kind, HEAD_DIM)
        grid = attention.attend_prompt_grid(n, n_heads, N_KV_HEADS)
        cells = self.cells(kind, position + n)
        return [
            self.kernels(f"attend_{kind}.cu").prepare(
                shape.name, grid, shape.threads, [PromptArguments(q, out, cells, layer, n_heads, position, n)],
                shape.shared_bytes, self.device.stream, True,
            )
            for layer in range(N_LAYERS)
        ]  # fmt: skip

    def store_kv(self, kind: str) -> list[Launch]:
        """The launches of a chunk's storing, a layer each."""
        n, n_heads = PROMPT_TOKENS, 8 * N_KV_HEADS
        q_out = self.room(n * n_heads * HEAD_DIM * 2)
        width = (n_heads + 2 * N_KV_HEADS) * HEAD_DIM
        k = self.floats + 4 * n_heads * HEAD_DIM
        v = k + 4 * N_KV_HEADS * HEAD_DIM
        grid = attention.store_kv_grid(n, n_heads, N_KV_HEADS)
        launches = []
        for layer in range(N_LAYERS):
            argument = StoreArguments(
                self.floats, k, v, self.floats, self.floats, self.floats, q_out, self.cells(kind, n), width, layer,
                n_heads, 0, n, 1e-6,
            )  # fmt: skip
            launches.append(
                self.kernels("store_kv.cu").prepare(
                    "store_kv_f32", grid, attention.STORE_THREADS, [argument], 0, self.device.stream, True
                )
            )
        return launches

    def us(self, launches: Sequence[Launch]) -> float:
        """The median time of one of these, all in a graph."""
        cu, stream = self.device.cu, self.device.stream
        call(cu.cuCtxSynchronize)
        call(cu.cuStreamBeginCapture, stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for launch in launches:
            launch()
        graph = call(cu.cuStreamEndCapture, stream)
        executable = call(cu.cuGraphInstantiate, graph, 0)
        start, end = (call(cu.cuEventCreate, 0) for _ in range(2))
        times = []
        for repeat in range(REPEATS + 3):
            call(cu.cuEventRecord, start, stream)
            call(cu.cuGraphLaunch, executable, stream)
            call(cu.cuEventRecord, end, stream)
            self.device.synchronize()
            if repeat >= 3:
                times.append(call(cu.cuEventElapsedTime, start, end) * 1e3)
        call(cu.cuGraphExecDestroy, executable)
        call(cu.cuGraphDestroy, graph)
        return statistics.median(times) / len(launches)

    def close(self) -> None:
        for kernels in self._kernels.values():
            kernels.close()
        for buffer in self._buffers:
            buffer.close()

    def write(self, name: str, rows: Sequence[Row]) -> None:
        report.write(name, self.name, report.gpu_driver(), rows)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    require_gpu()
    gpus, _ = find_gpus(bindings())
    made = Bench(Device(gpus[0].uuid), gpus[0].name)
    yield made
    made.close()


def layer_bytes(kind: str, depth: int) -> float:
    """K and V of a layer."""
    values = 2 * depth * N_KV_HEADS * HEAD_DIM
    return values * 17 / 16 if kind == "q8_0" else values * 2


def rows_of(name: str, kind: str, depth: int, us: float, **bounds: Any) -> list[Row]:
    rate = layer_bytes(kind, depth) / us / 1e3
    limit_us = layer_bytes(kind, depth) / HBM_GB_PER_S / 1e3
    rows = [Row(f"{name}, depth {depth}", us, "us", "lower", limit=limit_us, **bounds)]
    if depth >= 4096:
        rows.append(Row(f"{name}, depth {depth}", rate, "GB/s", "higher", limit=HBM_GB_PER_S))
    return rows


def test_attend(bench: Bench) -> None:
    """A layer's attention of one token, 48 layers in a graph, each with cells of its own."""
    rows = []
    for depth in DEPTHS:
        rows += rows_of("f16", "f16", depth, bench.us(bench.attend("f16", depth)), target=TARGET_US.get(depth))
    for kind in ("bf16", "q8_0"):
        for depth in (128, 16_384):
            rows += rows_of(kind, kind, depth, bench.us(bench.attend(kind, depth)))
    for depth in (128, 16_384):
        us = bench.us(bench.attend("f16", depth, group=16))
        rows += rows_of("f16, 16 query heads a K/V head", "f16", depth, us)
        us = bench.us(bench.attend("f16", depth, programmatic=False))
        rows += rows_of("f16, each launch after the one before has ended", "f16", depth, us)
    splits = attention.attend_splits(bench.device.multiprocessors, N_KV_HEADS)
    for depth in (4096, 16_384):
        for n_splits in (splits // 2, splits * 2):
            us = bench.us(bench.attend("f16", depth, n_splits=n_splits))
            rows += rows_of(f"f16, {n_splits} blocks a K/V head", "f16", depth, us)
        for shared_kib in (148, 227):
            us = bench.us(bench.attend("f16", depth, shared_kib=shared_kib))
            rows += rows_of(f"f16, {shared_kib} KiB of shared memory", "f16", depth, us)
    bench.write("attend", rows)


def test_attend_prompt(bench: Bench) -> None:
    """A layer's attention of 512 tokens."""
    rows = []
    for kind in TYPES:
        for position in (0, 4096, 16_384):
            us = bench.us(bench.attend_prompt(kind, position))
            pairs = PROMPT_TOKENS * position + PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2
            rate = 4 * pairs * 8 * N_KV_HEADS * HEAD_DIM / us / 1e6
            name = f"{kind}, {PROMPT_TOKENS} tokens at {position}"
            rows.append(Row(name, us, "us", "lower"))
            target = 150 if position else None
            rows.append(Row(name, rate, "TFLOP/s", "higher", target=target, limit=TFLOP_PER_S))
    for kind in TYPES:
        us = bench.us(bench.store_kv(kind))
        rows.append(Row(f"{kind}, norm, rotation and storing of {PROMPT_TOKENS} tokens", us, "us", "lower"))
    bench.write("attend-prompt", rows)
