"""How fast a model of Qwen3-30B-A3B's shape runs with a second GPU as a peer, each too small for its experts.

Of two GPUs one holds about 20 % of the experts, and both hold about 65 %.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_client.sampler import SamplerOptions
from tests.bench.large_model import attached_engine, random_model, write
from tests.bench.report import Row
from tests.bench.test_decode import EXPERTS_GIB, REST_GIB, decoded
from tests.helpers.cuda_peer import GIB, Machine
from tests.helpers.daemon import Daemon

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(400)]

WARMING = {False: 256, True: 512}
"""Tokens before those that are timed, alone and with the peer: as many as make the hot experts known and bring them."""

PROMPT = 16_399
PROMPT_KV_GIB = 1.6
PRIMARY_SHARE, PEER_SHARE = 0.20, 0.45
TIMES_SOLO = {"auto": {"0.5": 2.5, "0": 1.6}, "never": {"0.5": 1.7, "0": 1.3}}
"""By `peer_access`: with a path, and without one, so that the peer computes its experts itself."""

HOST_GB_PER_S = 55
"""What a copy engine takes from host memory."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Two GPUs."""
    return Machine.pair()


@pytest.fixture(scope="module", params=TIMES_SOLO["auto"])
def skew(request: pytest.FixtureRequest) -> str:
    """How much hotter some experts are than others."""
    return str(request.param)


@pytest.fixture(scope="module")
def model_path(machine: Machine, tmp_path_factory: pytest.TempPathFactory, skew: str) -> Iterator[Path]:
    """18.5 GB of random weights."""
    with random_model(tmp_path_factory.mktemp("model"), "--mix", "q4_k_m", "--skew", skew) as path:
        yield path


def config(machine: Machine, caps_gib: tuple[float, float], peer_access: str = "auto") -> str:
    """Lines of the configuration."""
    lines = [f"host_cap_bytes = {40 * GIB}", "give_back_delay_s = 0.2", f'peer_access = "{peer_access}"']
    for uuid, cap_gib in zip(machine.uuids, caps_gib, strict=False):
        lines += ["[[device]]", f'uuid = "{uuid}"', f"cap_bytes = {int(cap_gib * GIB)}"]
    return "\n".join(lines) + "\n"


@contextmanager
def opened(
    daemon: Daemon, path: Path, machine: Machine, context: int, *, peer: bool
) -> Iterator[tuple[Any, list[str]]]:
    """An engine on the first GPU, alone or with the second as its peer, and what it says."""
    lines: list[str] = []
    peers = machine.uuids[1:2] if peer else []
    with attached_engine(
        daemon.directory, path, context, lines.append, device=machine.uuids[0], peer_devices=peers
    ) as engine:
        yield engine, lines
    print(*lines, sep="\n")


def warmed(engine: Any, warming: int) -> tuple[float, list[float]]:
    """Tokens a second, and the share of their experts that was on the first GPU, the peer, and in host memory."""
    rate, routed = decoded(engine, warming)
    on = [int(routed[engine.attached.opened.memory.experts_on(part)].sum()) for part in (0, 1)]
    shares = [n / routed.sum() for n in (*on, routed.sum() - sum(on))]
    return rate, [100 * float(share) for share in shares]


def attach_gb_per_s(engine: Any) -> float:
    """How fast the peer's part was filled from host slabs."""
    memory = engine.attached.opened.memory
    sizes = engine.attached.model.expert_sizes().reshape(-1, 3).sum(axis=1)
    return float(np.sum(sizes[memory.experts_on(1)]) / engine.attached.opened.filled_s[1] / 1e9)


def test_decode(machine: Machine, model_path: Path, skew: str) -> None:
    """Tokens a second alone, then with the peer, which is attached to the model that is open; K/V grows in both.

    Then with the peer again, as if there were no path to it.
    """
    rows, rates = [], {}
    caps_gib = REST_GIB + PRIMARY_SHARE * EXPERTS_GIB, PEER_SHARE * EXPERTS_GIB
    runs = {
        "alone": ("auto", False),
        "with the peer": ("auto", True),
        "with the peer, no path": ("never", True),
    }
    for peer_access in TIMES_SOLO:
        with machine.daemon(config(machine, caps_gib, peer_access)) as daemon:
            for what, (access, peer) in runs.items():
                if access != peer_access:
                    continue
                with opened(daemon, model_path, machine, 1024, peer=peer) as (engine, lines):
                    if what == "with the peer":
                        rate = attach_gb_per_s(engine)
                        name = "attaching the peer from host slabs"
                        rows.append(Row(name, rate, "GB/s", "higher", 45, HOST_GB_PER_S))
                    rates[what], shares = warmed(engine, WARMING[peer])
                    assert any("the expert cache gave" in line for line in lines), "K/V did not grow out of slots"
                rows.append(Row(f"decode {what}, skew {skew}", rates[what], "tok/s", "higher"))
                for where, share in zip(("the first GPU", "the peer", "host memory"), shares, strict=True):
                    rows.append(
                        Row(f"{what}: routings to {where}", share, "%", "lower" if "host" in where else "higher")
                    )
                if peer:
                    times, target = rates[what] / rates["alone"], TIMES_SOLO[access][skew]
                    rows.append(Row(f"{what}, times alone, skew {skew}", times, "times", "higher", target))
    write(f"peer-decode-skew-{skew}", rows)


def test_crossings(machine: Machine, model_path: Path, skew: str) -> None:
    """Decoding with half of the experts on each GPU and no path, none in host memory: what handing over costs."""
    if skew != "0.5":
        pytest.skip("one model is enough")
    rates = {}
    for caps_gib, peer in (((100.0, 0.0), False), ((REST_GIB + 0.5 * EXPERTS_GIB, 0.6 * EXPERTS_GIB), True)):
        with (
            machine.daemon(config(machine, caps_gib, "never")) as daemon,
            opened(daemon, model_path, machine, 1024, peer=peer) as (engine, _),
        ):
            rates[peer], shares = warmed(engine, WARMING[False])
    per_layer_us = 1e6 * (1 / rates[True] - 1 / rates[False]) / 48
    rows = [
        Row("all experts on one GPU", rates[False], "tok/s", "higher"),
        Row("half of them on a peer without a path", rates[True], "tok/s", "higher"),
        Row("a layer's time more", per_layer_us, "us", "lower"),
        Row("routings to the peer", shares[1], "%", "higher"),
    ]
    write("peer-crossings", rows)


def test_prompt(machine: Machine, model_path: Path, skew: str) -> None:
    """A long prompt with the peer, with a path and without, against the same with all experts on one GPU."""
    if skew != "0.5":
        pytest.skip("one model is enough")
    rates = {}
    shares_gib = REST_GIB + PROMPT_KV_GIB + PRIMARY_SHARE * EXPERTS_GIB, PEER_SHARE * EXPERTS_GIB
    runs = {"alone": ((100.0, 0.0), "auto"), "auto": (shares_gib, "auto"), "never": (shares_gib, "never")}
    for name, (caps_gib, peer_access) in runs.items():
        with (
            machine.daemon(config(machine, caps_gib, peer_access)) as daemon,
            opened(daemon, model_path, machine, PROMPT + 256, peer=name != "alone") as (engine, _),
        ):
            tokens = [i * 7919 % 150000 for i in range(PROMPT)]
            engine.sequence.prepare(PROMPT)
            took_s = []
            for _ in range(2):
                engine.sequence.restart()
                began = time.perf_counter()
                engine.begin(tokens, SamplerOptions(temperature=0))
                engine.next_token()
                took_s.append(time.perf_counter() - began)
            rates[name] = PROMPT / min(took_s)
    rows = [
        Row("prompt of 16,399 tokens, all experts on one GPU", rates["alone"], "tok/s", "higher"),
        Row("the same with the peer", rates["auto"], "tok/s", "higher"),
        Row("with the peer, times all on one GPU", rates["auto"] / rates["alone"], "times", "higher", 0.9),
        Row("the same with the peer, no path", rates["never"], "tok/s", "higher"),
        Row("with the peer, no path, times all on one GPU", rates["never"] / rates["alone"], "times", "higher"),
    ]
    write("peer-prompt", rows)
