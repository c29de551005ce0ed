"""Tables that a person reads at a glance."""

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strata_client.text import escape_controls

_WIDTH_WITHOUT_TERMINAL = 160
_SIZES = ("total", "cap", "free", "kv", "experts", "weights", "revoking", "quarantined", "unmanaged", "slab")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_status(snapshot: dict[str, Any]) -> None:
    """Prints a snapshot (see `vmmd.ctl.status.as_dict`); colour only on a terminal."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    daemon = snapshot["daemon"]
    state = ", draining" if daemon["draining"] else ""
    console.print(
        f"vmmd {_text(daemon['version'])}, pid {daemon['pid']}, {_text(daemon['driver'])} driver, "
        f"up {duration(daemon['uptime_s'])}{state}"
    )
    console.print(_devices(snapshot["devices"]))
    for title, rows, table in (
        ("models", snapshot["models"], _models),
        ("sessions", snapshot["sessions"], _sessions),
    ):
        console.print(table(rows) if rows else f"no {title}")


def size(n_bytes: int) -> str:
    """Bytes with three digits or so in the largest fitting unit: `1.50 GiB`, `-` for none."""
    if n_bytes == 0:
        return "-"
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 100 else f"{value:.3g} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds as `42s`, `3m07s`, `5h12m` or `2d03h`."""
    s = int(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s // 60 % 60:02d}m"
    return f"{s // 86400}d{s // 3600 % 24:02d}h"


def _devices(devices: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "device", "name", "total", "cap", "free", "K/V", "experts", "weights", "revoking", "quarantined",
        "unmanaged", "slab", "state", numbers=range(2, 12),
    )  # fmt: skip
    for d in devices:
        sizes = (d[f"{name}_bytes"] for name in _SIZES)
        state = Text(_text(d["state"]), style="green" if d["state"] == "ok" else "bold red")
        table.add_row(_text(d["uuid"]), _text(d["name"]), *map(size, sizes), state)
    return table


def _models(models: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "model", "domain", "resident", "of heat", "at home", "slots", "experts", "weights", "sessions", "notes",
        numbers=range(2, 9),
    )  # fmt: skip
    for m in models:
        notes = ["file changed"] if m["stale"] else []
        notes += [f"reader {pid} is behind" for pid in m["stuck_pids"]]
        table.add_row(
            _text(m["name"]),
            _text(m["domain"] or m["uid"]),
            f"{m['resident']} of {m['experts']}",
            f"{m['heat_covered']:.0%}",
            str(m["homes"]),
            str(m["slots"]),
            size(m["experts_bytes"]),
            size(m["weights_bytes"]),
            str(m["sessions"]),
            Text(", ".join(notes), style="yellow"),
        )
    return table


def _sessions(sessions: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        "pid", "user", "executable", "K/V cells", "K/V", "quarantined", "age", "state", numbers=(0, 3, 4, 5, 6)
    )
    for s in sessions:
        table.add_row(
            str(s["pid"]),
            _text(s["user"] or s["uid"]),
            _text(s["executable"]),
            str(s["kv_cells"]),
            size(s["kv_bytes"]),
            size(s["quarantined_bytes"]),
            duration(s["age_s"]),
            _text(s["state"]),
        )
    return table


def _table(*headers: str, numbers: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in numbers else "left", overflow="fold")
    return table


def _text(value: object) -> str:
    return escape_controls(str(value), keep="")
