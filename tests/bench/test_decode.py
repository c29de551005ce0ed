"""How fast a model of Qwen3-30B-A3B's shape decodes on one GPU, all of it resident and not."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from strata_client.sampler import SamplerOptions
from tests.bench.large_model import attached_engine, random_model, write
from tests.bench.report import Row
from tests.helpers.cuda_peer import GIB, Machine
from vmmd.driver.cuda_calls import call

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(400)]

TOKENS = 128
WARMING = 512
DEPTH = 16384
EXPERTS_GIB = 16.4
REST_GIB = 1.9
"""Weights, and K/V of the warming."""

CAPS = {
    # by skew: share resident, tokens a second wanted, llama.cpp's, what PCIe allows with uniform routing
    "0.5": ((0.75, 400, 79, None), (0.50, 200, 49, None), (0.25, 90, 35, None)),
    "0": ((0.75, 130, 79, 150), (0.50, 75, 49, 84), (0.25, 50, 35, 57)),
}


@pytest.fixture(scope="module")
def machine() -> Machine:
    """The GPU."""
    return Machine.real()


@pytest.fixture(scope="module", params=CAPS)
def skew(request: pytest.FixtureRequest) -> str:
    """How much hotter some experts are than others."""
    return str(request.param)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, skew: str) -> Iterator[Path]:
    """18.5 GB of random weights."""
    with random_model(tmp_path_factory.mktemp("model"), "--mix", "q4_k_m", "--skew", skew) as path:
        yield path


@contextmanager
def opened(machine: Machine, path: Path, context: int, config: str = "") -> Iterator[Any]:
    """An engine with a daemon of its own."""
    config = f"host_cap_bytes = {40 * GIB}\ngive_back_delay_s = 0.2\n{config}"
    with machine.daemon(config) as daemon, attached_engine(daemon.directory, path, context) as engine:
        yield engine


def tokens_per_s(engine: Any, prompt: int, tokens: int = TOKENS) -> float:
    """Decodes after a prompt of so many tokens."""
    engine.sequence.restart()
    engine.sequence.prepare(prompt)
    engine.begin([i * 7919 % 150000 for i in range(prompt)], SamplerOptions(temperature=0))
    engine.next_token()
    began = time.perf_counter()
    for _ in range(tokens):
        assert engine.sequence.has_room()
        engine.next_token()
    return tokens / (time.perf_counter() - began)


def decoded(engine: Any, warming: int) -> tuple[float, Any]:
    """Tokens a second, and how often each expert was routed to, after tokens that made the hot ones known."""
    engine.sequence.restart()
    engine.sequence.prepare(8)
    engine.begin(list(range(8)), SamplerOptions(temperature=1, seed=1))
    for _ in range(warming):
        engine.next_token()
        assert engine.sequence.has_room()
    before, began = counts(engine), time.perf_counter()
    for _ in range(TOKENS):
        engine.next_token()
        assert engine.sequence.has_room()
    took_s = time.perf_counter() - began
    return TOKENS / took_s, counts(engine) - before


def warmed(engine: Any) -> tuple[float, float]:
    """Tokens a second, and the share of their experts that was in slots."""
    rate, routed = decoded(engine, WARMING)
    return rate, 1 - float((routed * engine._stages[0].steps.table.in_host.reshape(-1)).sum() / routed.sum())


def counts(engine: Any) -> Any:
    """How often each expert was routed to while decoding."""
    shape = engine._stages[0].steps.table.in_host.size
    return engine.attached.opened.memory.heat[pages.HEADER_WORDS : pages.HEADER_WORDS + shape].astype(np.int64)


def kernel_times_us(engine: Any) -> list[tuple[str, int, float]]:
    """Name, number in a step, and time of each kernel, from replays of a graph of those of one name alone."""
    decoder, device = engine._stages[0].decoder, engine._stages[0].device
    cu, found = device.cu, []
    for name, count in Counter(name for name, _ in decoder.launches).items():
        call(cu.cuStreamBeginCapture, device.stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for other, launch in decoder.launches:
            if other == name:
                launch()
        graph = call(cu.cuGraphInstantiate, call(cu.cuStreamEndCapture, device.stream), 0)
        times = []
        for _ in range(20):
            begin, end = (call(cu.cuEventCreate, 0) for _ in range(2))
            call(cu.cuEventRecord, begin, device.stream)
            call(cu.cuGraphLaunch, graph, device.stream)
            call(cu.cuEventRecord, end, device.stream)
            device.synchronize()
            times.append(call(cu.cuEventElapsedTime, begin, end) * 1000)
        found.append((name, count, statistics.median(times)))
    line = engine.attached.opened.steps.line  # `sample` alone has retired steps that nobody launched
    line[pages.WORD_RETIRED] = line[pages.WORD_LAUNCHED]
    return found


def test_resident(machine: Machine, model_path: Path, skew: str) -> None:
    """All experts on the GPU: from an empty context, deep in one, and kernel by kernel."""
    if skew != "0.5":
        pytest.skip("one model is enough")
    with opened(machine, model_path, DEPTH + 2 * TOKENS) as engine:
        rates = [tokens_per_s(engine, 6) for _ in range(3)]
        rows = [Row("all resident, 128 tokens from an empty context", max(rates), "tok/s", "higher", 620, 2250, 310)]
        gb_per_s = max(rates) * 2.0
        rows.append(Row("the same as a share of the HBM limit", gb_per_s / 45, "%", "higher", 28, 100, 14))
        rows.append(Row("at depth 16,384", tokens_per_s(engine, DEPTH), "tok/s", "higher", 480, None, 242))
        rows += [
            Row(f"{count} x {name}, alone in a graph", us, "us", "lower") for name, count, us in kernel_times_us(engine)
        ]
    write("decode", rows)


def test_partly_resident(machine: Machine, model_path: Path, skew: str) -> None:
    """Device memory capped so that a share of the experts is resident."""
    rows = []
    for share, wanted, peer, limit in CAPS[skew]:
        config = f"cap_bytes = {int((REST_GIB + share * EXPERTS_GIB) * GIB)}\n"
        with opened(machine, model_path, 1024, config) as engine:
            rate, hits = warmed(engine)
            resident = 1 - float(engine._stages[0].steps.table.in_host.mean())
        name = f"{share:.0%} of the experts resident, skew {skew}"
        rows.append(Row(name, rate, "tok/s", "higher", wanted, limit, peer))
        rows.append(Row(f"{share:.0%}: experts in slots at the end", 100 * resident, "%", "higher"))
        rows.append(Row(f"{share:.0%}: hit rate", 100 * hits, "%", "higher"))
    write(f"decode-capped-skew-{skew}", rows)


def test_growth_in_mid_sentence(machine: Machine, model_path: Path, skew: str) -> None:
    """What a token takes longer for which K/V grows by a slab that experts give."""
    if skew != "0.5":
        pytest.skip("one model is enough")
    config = f"cap_bytes = {int((REST_GIB + 0.75 * EXPERTS_GIB) * GIB)}\n"
    with opened(machine, model_path, 8192, config) as engine:
        sequence = engine.sequence
        sequence.prepare(8)
        engine.begin(list(range(8)), SamplerOptions(temperature=1, seed=1))
        times_ms: dict[bool, list[float]] = {False: [], True: []}
        while len(times_ms[True]) < 8:
            cells, began = sequence.kv.cells, time.perf_counter()
            assert sequence.has_room(), sequence.refusal
            engine.next_token()
            times_ms[sequence.kv.cells > cells].append((time.perf_counter() - began) * 1000)
    usual = statistics.median(times_ms[False][WARMING:])
    added = [took - usual for took in times_ms[True][1:]]  # the first reply brings more than a slab
    write(
        "decode-growth",
        [
            Row("a token for which K/V grows by a slab: added, median", statistics.median(added), "ms", "lower", 5),
            Row("the largest of 7", max(added), "ms", "lower"),
            Row("a token without", usual, "ms", "lower"),
        ],
    )
