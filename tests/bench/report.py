"""Writes a bench's figures as ``results/NAME-DEVICE.json`` and prints them as a table.

`target` is what is required, `limit` what physics or the machine allows, `peer`
the best other system on the same work; None where there is none.
"""

import datetime
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None
    limit: float | None = None
    peer: float | None = None

    def met(self) -> bool:
        """Whether the target, if there is one, is reached."""
        if self.target is None:
            return True
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def write(name: str, device: str, driver: str, rows: Sequence[Row]) -> Path:
    """Writes and prints the rows; returns the file.

    STRATA_BENCH_RESULTS names another directory, STRATA_COMMIT the commit where
    the tree is no repository.
    """
    directory = Path(os.environ.get("STRATA_BENCH_RESULTS", RESULTS))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{device.replace(' ', '-')}.json"
    report = {
        "name": name,
        "device": device,
        "driver": driver,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": os.environ.get("STRATA_COMMIT") or _commit(),
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{name} on {device}, {driver}")
    for row in rows:
        bounds = "".join(f", {k} {v:g}" for k in ("target", "limit", "peer") if (v := getattr(row, k)) is not None)
        print(f"  {row.name:<60} {row.value:>10.4g} {row.unit:<5} {'' if row.met() else 'MISSED'}{bounds}")
    return path


def gpu_driver() -> str:
    """The driver's name, with its version where the kernel tells it."""
    version = Path("/sys/module/nvidia/version")
    return f"NVIDIA {version.read_text().strip()}" if version.exists() else "NVIDIA"


def _commit() -> str:
    try:
        command = ["git", "-C", str(RESULTS.parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
