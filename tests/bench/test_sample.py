"""How long choosing a token takes on the device, at the end of a step, for Qwen3's vocabulary."""

import ctypes
import statistics
from typing import Any

import numpy as np
import pytest
from strata_kernels import structs
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import DeviceBuffer, Kernels
from strata_kernels.structs import SampleOptions

from strata_client.gpu.device import Device
from tests.bench import report
from tests.bench.report import Row
from tests.helpers.require_gpu import require_gpu
from vmmd.driver.cuda_calls import bindings, call, find_gpus

pytestmark = [pytest.mark.bench, pytest.mark.gpu]

N_TOKENS = 151_936
LAUNCHES, REPEATS = 32, 20  # of a graph, and of the graph

CASES = [
    ("greedy", 4.0, SampleOptions(0, 1, 0, 1, 1, 0, 0), 10),
    ("no limits", 4.0, SampleOptions(1, 1, 0, 1, 1, 0, 0), 25),
    ("top-k 40, top-p 0.95, min-p 0.05, penalty", 4.0, SampleOptions(0.8, 0.95, 0.05, 1.1, 1, 40, 0), 25),
    ("top-p 0.95", 4.0, SampleOptions(1, 0.95, 0, 1, 1, 0, 0), 25),
    ("top-p 0.95 of nearly even logits", 0.5, SampleOptions(1, 0.95, 0, 1, 1, 0, 0), None),
    ("top-k 5000, top-p 0.95", 2.0, SampleOptions(1, 0.95, 0, 1, 1, 5000, 0), None),
]
"""A name, the standard deviation of the logits, how to choose, and the most microseconds that it may take."""


def test_sample() -> None:
    """Each way to choose, as a kernel of a graph."""
    require_gpu()
    gpu = find_gpus(bindings())[0][0]
    device = Device(gpu.uuid)
    cu, stream = device.cu, device.stream
    kernels = Kernels([SOURCES / "sample.cu"])
    rng = np.random.default_rng(0)
    host = device.pinned(structs.RING_WORDS + 1, np.uint64)
    sizes = {
        "logits": 4 * N_TOKENS,
        "options": ctypes.sizeof(SampleOptions),
        "seen": -(-N_TOKENS // 32) * 4,
        "workspace": structs.sample_workspace_bytes(N_TOKENS),
        "step": ctypes.sizeof(structs.Step),
    }
    buffers = {name: DeviceBuffer(size) for name, size in sizes.items()}
    for buffer in buffers.values():
        buffer.fill(0)
    at: dict[str, Any] = {name: ctypes.c_uint64(buffer.address) for name, buffer in buffers.items()}
    ring, retired = ctypes.c_uint64(host.ctypes.data), ctypes.c_uint64(host.ctypes.data + 8 * structs.RING_WORDS)
    launch = kernels.prepare(
        "sample",
        structs.sample_blocks(N_TOKENS),
        structs.SAMPLE_THREADS,
        [
            at["logits"],
            N_TOKENS,
            at["options"],
            at["seen"],
            at["workspace"],
            at["step"],
            ring,
            retired,
            structs.ONE_ROW,
        ],
        stream=stream,
        programmatic=True,
    )
    call(cu.cuStreamBeginCapture, stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    for _ in range(LAUNCHES):
        launch()
    graph = call(cu.cuGraphInstantiate, call(cu.cuStreamEndCapture, stream), 0)
    start, end = (call(cu.cuEventCreate, 0) for _ in range(2))
    rows = []
    for name, scale, options, target in CASES:
        buffers["logits"].upload((rng.standard_normal(N_TOKENS) * scale).astype(np.float32))
        buffers["options"].upload(np.frombuffer(bytearray(options), np.uint8))
        buffers["seen"].fill(0)
        call(cu.cuCtxSynchronize)
        times = []
        for _ in range(REPEATS):
            call(cu.cuEventRecord, start, stream)
            call(cu.cuGraphLaunch, graph, stream)
            call(cu.cuEventRecord, end, stream)
            device.synchronize()
            times.append(call(cu.cuEventElapsedTime, start, end) * 1e3 / LAUNCHES)
        assert int(host[: structs.RING_WORDS].max()) < N_TOKENS
        rows.append(Row(name, statistics.median(times), "us", "lower", target=target))
    for buffer in buffers.values():
        buffer.close()
    kernels.close()
    report.write("sample", gpu.name, report.gpu_driver(), rows)
