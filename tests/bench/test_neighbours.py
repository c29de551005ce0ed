"""What clients cost each other: a growth with 16 idle neighbours, and a step while a neighbour grows."""

import os
import platform
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.bench.report import Row, write
from tests.helpers.daemon import running_daemon
from tests.helpers.peer import Remote, public_model

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]

IDLE = 16
GROWTHS, GROWTH_SLABS = 120, 6
PAUSE_S = 0.35
"""Upkeep looks four times a second: by then the arena has its slabs back."""

READS_PER_STEP = 48
# 256 experts in 13 slabs of 21, and one of weights: all of the device is in use
CONFIG = """
slab_bytes = "256KiB"
give_back_delay_s = 0.02
floor_slots = 40
[host]
device_bytes = "3584KiB"
ram_bytes = "32MiB"
"""


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()} {len(os.sched_getaffinity(0))} CPUs"


def _percentiles(name: str, milliseconds: np.ndarray, target: float) -> list[Row]:
    return [
        Row(f"{name}, p50", float(np.percentile(milliseconds, 50)), "ms", "lower"),
        Row(f"{name}, p99", float(np.percentile(milliseconds, 99)), "ms", "lower", target=target),
        Row(f"{name}, slowest", float(milliseconds.max()), "ms", "lower"),
    ]


def test_growth_beside_idle_clients_and_steps_beside_growths() -> None:
    """Growths of a client by trades, mapping included, with 16 others idle; steps of another one meanwhile."""
    with running_daemon(CONFIG) as daemon, public_model(8, 32) as model, ExitStack() as stack:
        grower, stepper, *idle = (stack.enter_context(Remote(daemon.directory)) for _ in range(IDLE + 2))
        for peer in (grower, stepper, *idle):
            peer.ask("open", model)
        grower.ask("create")
        alone = grower.ask("time_growths", 10, GROWTH_SLABS, 0.5)  # the homes are there, and everything is warm
        assert alone[-1][2]
        growths = np.array(grower.ask("time_growths", GROWTHS, GROWTH_SLABS, PAUSE_S))

        quiet = np.array(stepper.ask("time_steps", 5.0, READS_PER_STEP))
        seconds = GROWTHS * (PAUSE_S + 0.03)
        stepper.tell("time_steps", seconds, READS_PER_STEP)
        beside = np.array(grower.ask("time_growths", GROWTHS, GROWTH_SLABS, PAUSE_S))
        steps = np.array(stepper.answer(seconds + 60))
    growths, beside = (found[found[:, 2] > 0] for found in (growths, beside))
    assert min(len(growths), len(beside)) > 0.8 * GROWTHS, "hardly a growth was a trade"
    usual_s = np.median(quiet[:, 1] - quiet[:, 0])
    slowest_s = np.percentile(quiet[:, 1] - quiet[:, 0], 99)
    hit = (steps[:, 0, None] < beside[None, :, 1]) & (steps[:, 1, None] > beside[None, :, 0])
    longer_ms = (np.diff(steps[hit.any(axis=1)], axis=1)[:, 0] - usual_s) * 1e3
    rows = [
        *_percentiles("growth by 6 slabs, 16 idle clients", (growths[:, 1] - growths[:, 0]) * 1e3, 20),
        Row("a step of another client, p50", usual_s * 1e3, "ms", "lower"),
        Row("a step of another client, p99", slowest_s * 1e3, "ms", "lower"),
        *_percentiles("a step is longer while a neighbour grows", longer_ms, 20),
        *_percentiles("that neighbour's growth", (beside[:, 1] - beside[:, 0]) * 1e3, 20 + usual_s * 1e3),
    ]
    write("neighbours", _processor(), "host", rows)
