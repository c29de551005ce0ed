"""How fast the kernels of prompt processing are, attention apart, at the shapes of Qwen3-30B-A3B in Q4_K_M."""

import ctypes
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from strata_api.v1 import pages
from strata_kernels import prompt as shapes
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import DeviceBuffer, Dimensions, Kernels, Launch
from strata_kernels.prompt import Experts, Groups, HalfRows
from strata_kernels.structs import Heat, Matrix

from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.device import Device
from strata_client.gpu.streaming import ExpertStream
from tests.bench import report
from tests.bench.report import Row
from tests.helpers.matrices import random_matrix
from tests.helpers.require_gpu import require_gpu
from vmmd.driver.cuda_calls import bindings, call, find_gpus

STAGING_BYTES = 128 << 20

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(600)]

D_MODEL, D_EXPERT, N_EXPERTS, TOP_K, N_LAYERS = 2048, 768, 128, 8, 48
D_ATTENTION, D_KV, N_VOCAB = 4096, 512, 151936
TYPES = ["Q4_K", "Q6_K", "F32"]
COPIES = 6  # of weights that would fit the cache
REPEATS = 10
LAUNCHES = 18  # in a row, at least
HOST_GB_PER_S = 55
CHUNKS_OF_HOST = (8, 16, 32, 64, 512, 2048)

TARGET_TOKENS_PER_S = 3000
PEER_TOKENS_PER_S = {512: 7143, 2048: 11615}


class Bench:
    """The first GPU, the kernels, and memory of random bytes."""

    def __init__(self, device: Device, name: str) -> None:
        self.device = device
        self.name = name
        self.kernels = Kernels([SOURCES / f"prompt_{part}.cu" for part in ("matmul", "route", "rows")], TYPES)
        self.rng = np.random.default_rng(0)
        self._buffers: list[DeviceBuffer] = []
        self.pairs: dict[int, npt.NDArray[np.int32]] = {}

    def room(self, size_bytes: int) -> int:
        """Memory that holds something finite."""
        buffer = DeviceBuffer(size_bytes)
        buffer.fill(0x3C)
        self._buffers.append(buffer)
        return buffer.address

    def put(self, array: npt.NDArray[Any]) -> int:
        """An array on the GPU."""
        address = self.room(array.nbytes)
        self._buffers[-1].upload(np.ascontiguousarray(array))
        return address

    def blocks(self, kind: Type, rows: int, columns: int) -> npt.NDArray[np.uint8]:
        """A matrix of a few random rows, again and again."""
        raw, _ = random_matrix(kind, min(rows, 256), columns, self.rng)
        return np.resize(raw, (rows, raw.shape[1]))

    def matrix(self, kind: Type, rows: int, columns: int) -> Matrix:
        """The same on the GPU."""
        return Matrix(self.put(self.blocks(kind, rows, columns)), int(kind), rows)

    def halves(self, rows: int, columns: int) -> int:
        """Activations."""
        return self.put(self.rng.standard_normal((rows, columns)).astype(np.float16))

    def prepare(self, name: str, grid: Dimensions, block: int, *args: Any, shared_bytes: int = 0) -> Launch:
        """A launch on the device's stream."""
        return self.kernels.prepare(name, grid, block, args, shared_bytes, self.device.stream)

    def tiles(self, name: str, grid: Dimensions, *args: Any) -> Launch:
        """A launch of matrix products."""
        return self.prepare(name, grid, shapes.TILE_THREADS, *args, shared_bytes=shapes.TILE_SHARED_BYTES)

    def seconds(self, launches: Sequence[Launch]) -> float:
        """The median time of one of these, run in turn as a graph, so that launching takes no time."""
        cu, stream = self.device.cu, self.device.stream
        runs = -(-LAUNCHES // len(launches))
        call(cu.cuStreamBeginCapture, stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for _ in range(runs):
            for launch in launches:
                launch()
        graph = call(cu.cuStreamEndCapture, stream)
        executable = call(cu.cuGraphInstantiate, graph, 0)
        s = self.seconds_of(lambda: call(cu.cuGraphLaunch, executable, stream))
        call(cu.cuGraphExecDestroy, executable)
        call(cu.cuGraphDestroy, graph)
        return s / (runs * len(launches))

    def seconds_of(self, work: Callable[[], Any]) -> float:
        """The median time on the GPU of what `work` enqueues."""
        cu, stream = self.device.cu, self.device.stream
        start, end = (call(cu.cuEventCreate, 0) for _ in range(2))
        times = []
        for repeat in range(REPEATS + 2):
            call(cu.cuEventRecord, start, stream)
            work()
            call(cu.cuEventRecord, end, stream)
            self.device.synchronize()
            if repeat >= 2:
                times.append(call(cu.cuEventElapsedTime, start, end) / 1e3)
        return statistics.median(times)

    def free(self) -> None:
        """Frees the memory."""
        while self._buffers:
            self._buffers.pop().close()

    def write(self, name: str, rows: Sequence[Row]) -> None:
        report.write(name, self.name, report.gpu_driver(), rows)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    require_gpu()
    gpu = find_gpus(bindings())[0][0]
    made = Bench(Device(gpu.uuid), gpu.name)
    yield made
    made.free()
    made.kernels.close()


class Mixture:
    """A layer's experts on the GPU, and room for what passes between their kernels, for n tokens."""

    KINDS = (Type.Q4_K, Type.Q4_K, Type.Q6_K)
    MATRICES = ((D_EXPERT, D_MODEL), (D_EXPERT, D_MODEL), (D_MODEL, D_EXPERT))

    @classmethod
    def sizes(cls, bench: Bench) -> list[int]:
        """Bytes of an expert's matrices."""
        shapes = zip(cls.KINDS, cls.MATRICES, strict=True)
        return [bench.blocks(kind, 1, columns).nbytes * rows for kind, (rows, columns) in shapes]

    def __init__(self, bench: Bench, n: int) -> None:
        self.bench, self.n = bench, n
        tables = []
        for kind, (rows, columns), size in zip(self.KINDS, self.MATRICES, self.sizes(bench), strict=True):
            stack = bench.matrix(kind, N_EXPERTS * rows, columns)
            tables.append(stack.blocks + size * np.arange(N_EXPERTS))
        self.addresses = bench.put(np.stack(tables, axis=1).astype(np.uint64))
        # Popularity as of a model with a mild preference.
        popularity = bench.rng.lognormal(0, 0.5, N_EXPERTS)
        chances = bench.rng.gumbel(size=(n, N_EXPERTS)) + np.log(popularity)
        experts = np.argsort(-chances, axis=1)[:, :TOP_K].astype(np.int32)
        self.experts, self.order = bench.put(experts), bench.put(np.arange(N_EXPERTS, dtype=np.int32))
        self.groups = Groups(*(bench.room(size) for size in Groups.sizes_bytes(n, N_EXPERTS, TOP_K)))
        self.heat = Heat(bench.put(np.zeros(N_EXPERTS, np.uint64)), bench.put(np.zeros(N_EXPERTS, np.uint64)))
        self.x = HalfRows.unscaled(bench.halves(n, D_MODEL), D_MODEL)
        h, scales = bench.room(2 * n * TOP_K * D_EXPERT), bench.room(4 * n * TOP_K * D_EXPERT // shapes.SCALE_WIDTH)
        self.h = HalfRows(h, scales, D_EXPERT, shapes.SCALE_WIDTH)
        self.y = ctypes.c_uint64(bench.room(4 * n * TOP_K * D_MODEL))
        self.part = Experts.in_place(self.addresses, 0, N_EXPERTS)

    def group(self) -> Launch:
        """The tokens of each expert."""
        return self.bench.prepare(
            "group_prompt", N_EXPERTS, shapes.GROUP_THREADS,
            ctypes.c_uint64(self.experts), ctypes.c_uint64(self.order), self.groups, self.heat,
            self.n, N_EXPERTS, TOP_K,
        )  # fmt: skip

    def gate_up(self) -> Launch:
        """The experts' hidden values, of `part`."""
        return self.bench.tiles(
            "gate_up_prompt", shapes.gate_up_grid(self.n, N_EXPERTS, TOP_K, D_EXPERT),
            self.x, self.groups, self.part, int(self.KINDS[0]), int(self.KINDS[1]),
            ctypes.c_uint64(self.h.values), ctypes.c_uint64(self.h.scales), D_EXPERT, TOP_K,
        )  # fmt: skip

    def down(self) -> Launch:
        """The experts' results, of `part`."""
        return self.bench.tiles(
            "down_prompt", shapes.down_grid(self.n, N_EXPERTS, TOP_K, D_MODEL),
            self.h, self.groups, self.part, int(self.KINDS[2]), self.y, D_MODEL,
        )  # fmt: skip


@pytest.mark.parametrize("n", [64, 512, 2048])
def test_kernels(bench: Bench, n: int) -> None:
    """Each kernel of a layer by itself, and what all layers' come to."""
    count = ctypes.c_int32(n)
    eps = ctypes.c_float(1e-6)
    x, floats = (
        ctypes.c_uint64(bench.put(bench.rng.standard_normal((n, D_MODEL)).astype(np.float32))) for _ in range(2)
    )
    halves, weight = ctypes.c_uint64(bench.halves(n, D_MODEL)), ctypes.c_uint64(bench.put(np.ones(D_MODEL, np.float32)))
    none = Matrix(0, 0, 0)
    rows = HalfRows.unscaled(halves.value, D_MODEL)
    attended = HalfRows.unscaled(bench.halves(n, D_ATTENTION), D_ATTENTION)
    d_qkv = D_ATTENTION + 2 * D_KV
    qkv = ctypes.c_uint64(bench.room(4 * n * d_qkv))
    splits = shapes.router_splits(D_MODEL)
    scores = ctypes.c_uint64(bench.room(4 * n * N_EXPERTS * splits))
    mixture = Mixture(bench, n)
    experts, weights = (ctypes.c_uint64(bench.room(4 * n * TOP_K)) for _ in range(2))

    def dense(kinds: Sequence[Type], sizes: Sequence[int], values: HalfRows, to: ctypes.c_uint64, add: int) -> Any:
        found = []
        for _ in range(COPIES):
            three = [bench.matrix(kind, size, values.k) for kind, size in zip(kinds, sizes, strict=True)]
            three += [none] * (3 - len(three))
            grid = shapes.matmul_grid(n, *sizes)
            found.append(bench.tiles("matmul_prompt", grid, values, *three, to, count, sum(sizes), add))
        return found

    router = bench.matrix(Type.F32, N_EXPERTS, D_MODEL)
    embedding = bench.matrix(Type.Q4_K, N_VOCAB, D_MODEL)
    tokens = ctypes.c_uint64(bench.put(bench.rng.integers(0, N_VOCAB, n).astype(np.int32)))
    launches = {
        "rms_norm": [
            bench.prepare("rms_norm_prompt", n, shapes.ROW_THREADS, x, weight, halves, floats, count, D_MODEL, eps)
        ],
        "q, k, v": dense((Type.Q4_K, Type.Q4_K, Type.Q6_K), (D_ATTENTION, D_KV, D_KV), rows, qkv, 0),
        "attention output": dense((Type.Q4_K,), (D_MODEL,), attended, x, 1),
        "router": [
            bench.prepare(
                "router_prompt", shapes.router_grid(n, N_EXPERTS, D_MODEL), shapes.ROUTER_THREADS,
                floats, router, scores, count, D_MODEL,
            )
        ],
        "route": [
            bench.prepare(
                "route_prompt", n, shapes.ROUTER_THREADS, scores, splits, experts, weights, count, N_EXPERTS, TOP_K
            )
        ],
        "group": [mixture.group()],
        "gate, up": [mixture.gate_up()],
        "down": [mixture.down()],
        "combine": [
            bench.prepare("combine_prompt", n, shapes.ROW_THREADS, x, mixture.y, weights, count, D_MODEL, TOP_K)
        ],
        "embed": [
            bench.prepare("embed_prompt", n, shapes.ROW_THREADS, embedding, tokens, 1, x, count, D_MODEL)
        ],
    }  # fmt: skip
    flop = {
        "q, k, v": 2 * n * D_MODEL * d_qkv,
        "attention output": 2 * n * D_MODEL * D_ATTENTION,
        "router": 2 * n * D_MODEL * N_EXPERTS,
        "gate, up": 4 * n * TOP_K * D_MODEL * D_EXPERT,
        "down": 2 * n * TOP_K * D_MODEL * D_EXPERT,
    }
    figures, layer_s = [], 0.0
    for name, launch in launches.items():
        s = bench.seconds(launch)
        figures.append(Row(f"{name}, {n} tokens", s * 1e6, "us", "lower"))
        if name in flop:
            figures.append(Row(f"{name}, {n} tokens, rate", flop[name] / s / 1e12, "TFLOP/s", "higher"))
        layer_s += s * (0 if name == "embed" else 2 if name == "rms_norm" else 1)
    rate = n / (layer_s * N_LAYERS)
    target, peer = (TARGET_TOKENS_PER_S if n >= 512 else None), PEER_TOKENS_PER_S.get(n)
    figures.append(
        Row(f"{n} tokens through {N_LAYERS} layers, attention apart", rate, "tok/s", "higher", target, None, peer)
    )
    bench.write(f"prompt-kernels-{n}", figures)
    bench.free()


class HostTable:
    """Experts of some layers in pinned host memory, half of them or all that are not on the GPU."""

    def __init__(self, bench: Bench, n_layers: int, share: float, slot_bytes: int) -> None:
        self.slots = bench.device.pinned((N_EXPERTS, slot_bytes), np.uint8)
        self.slots[:] = 0x3C
        self.in_host = np.zeros((n_layers, N_EXPERTS), np.bool_)
        self.in_host[:, : int(share * N_EXPERTS)] = True
        self.computed_by = np.zeros((n_layers, N_EXPERTS), np.int8)
        first = self.slots.ctypes.data + np.arange(N_EXPERTS, dtype=np.uint64) * np.uint64(slot_bytes)
        self.words = np.tile(first[None, :, None], (n_layers, 1, 3))


def test_experts_in_host_memory(bench: Bench) -> None:
    """The experts of a layer where half of them are in host memory: brought by the copy engine, and read in place."""
    n_layers, share = 8, 0.5
    figures = []
    up, down, slot_bytes = pages.slot_layout(*Mixture.sizes(bench))[1:]
    table = HostTable(bench, n_layers, share, slot_bytes)
    host_bytes = share * N_EXPERTS * slot_bytes
    for n in CHUNKS_OF_HOST:
        mixture = Mixture(bench, n)
        sizes = np.tile(np.array(Mixture.sizes(bench), np.int64), (n_layers, N_EXPERTS, 1))
        stream = ExpertStream(bench.device, sizes, STAGING_BYTES)
        gate_up, down_launch = mixture.gate_up(), mixture.down()
        parts = (gate_up.args[2], down_launch.args[2])
        mixture.group()()

        def compute(part: Experts, parts: Any = parts, launches: Any = (gate_up, down_launch), n: int = n) -> None:
            for to in parts:
                ctypes.memmove(ctypes.addressof(to), ctypes.addressof(part), ctypes.sizeof(Experts))
            count = part.last - part.first
            launches[0].resize(shapes.gate_up_grid(n, count, TOP_K, D_EXPERT))
            launches[1].resize(shapes.down_grid(n, count, TOP_K, D_MODEL))
            for launch in launches:
                launch()

        def streamed(stream: ExpertStream = stream, mixture: Mixture = mixture, compute: Any = compute) -> None:
            stream.begin(cast(AddressTable, table))
            for layer in range(n_layers):
                for part in stream.parts(layer, mixture.addresses):
                    compute(part)

        in_device = np.empty((N_EXPERTS, 3), np.uint64)
        call(bench.device.cu.cuMemcpyDtoH, in_device.ctypes.data, mixture.addresses, in_device.nbytes)
        offsets = np.array([0, up, down], np.uint64)
        mixed = np.where(table.in_host[0][:, None], table.words[0] + offsets, in_device)
        in_place = Experts.in_place(bench.put(mixed), 0, N_EXPERTS)
        resident = Experts.in_place(mixture.addresses, 0, N_EXPERTS)
        for name, work, times, limit in (
            ("on the GPU", lambda resident=resident, compute=compute: compute(resident), 1, None),
            ("half brought", streamed, n_layers, host_bytes / HOST_GB_PER_S / 1e6),
            ("half read in place", lambda in_place=in_place, compute=compute: compute(in_place), 1, None),
        ):
            ms = bench.seconds_of(work) / times * 1e3
            figures.append(Row(f"a layer's experts, {n} tokens, {name}", ms, "ms", "lower", None, limit))
        stream.close()
        bench.free()
    bench.write("prompt-host-experts", figures)
