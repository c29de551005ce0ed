"""Tables that a person reads at a glance."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from strata_client.text import escape_controls

_WIDTH_WITHOUT_TERMINAL = 160
_WIDTH_OF_ALL = 150
_PARTIES = (("giver", "from_range_id"), ("taker", "to_range_id"))
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def make_console() -> Console:
    """Standard output, where names are no markup; colour only on a terminal."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(width=width, markup=False, highlight=False, emoji=False)


def print_status(snapshot: dict[str, Any]) -> None:
    """Prints a snapshot (see `vmmd.ctl.status.as_dict`); colour only on a terminal."""
    console = make_console()
    console.print(_headline(snapshot["daemon"]))
    is_wide = console.width >= _WIDTH_OF_ALL
    devices: tuple[_Column, ...] = _DEVICES
    if any(device["numa_node"] >= 0 for device in snapshot["devices"]):
        devices = (*_DEVICES, _Column("node", lambda d: str(d["numa_node"]) if d["numa_node"] >= 0 else "-", True))
    for title, columns in (("devices", devices), ("models", _MODELS), ("sessions", _SESSIONS)):
        rows = snapshot[title]
        console.print(_table(columns, rows, is_wide=is_wide) if rows else f"no {title}")
    if snapshot["quarantines"]:
        console.print(_table(_QUARANTINES, snapshot["quarantines"], is_wide=is_wide))


def top_frame(snapshot: dict[str, Any], width: int, rows_max: int | None = None) -> RenderableType:
    """What `vmmctl top` shows of a snapshot: devices, arenas, and sessions, the busiest first.

    Args:
        width: characters in a line; a narrow frame leaves columns out.
        rows_max: sessions to show; None for all.
    """
    is_wide = width >= _WIDTH_OF_ALL
    growths = snapshot["daemon"]["growths"]
    answered = growths["granted"] + growths["refused"]
    lines: list[RenderableType] = [
        Text(
            f"{_headline(snapshot['daemon'])}; growths: {growths['granted']} granted, {growths['refused']} refused,"
            f" {growths['waiting']} waiting, {_milliseconds(growths['seconds'], answered)} each"
        )
    ]
    sessions = sorted(
        snapshot["sessions"],
        key=lambda s: (-s["decoded_tokens_per_s"], -s["prompt_tokens_per_s"], -s["kv_bytes"], s["session_id"]),
    )
    shown = sessions[:rows_max]
    for title, columns, rows in (
        ("devices", _TOP_DEVICES, snapshot["devices"]),
        ("models", _TOP_MODELS, snapshot["models"]),
        ("sessions", _TOP_SESSIONS, shown),
    ):
        lines += [Text(), _table(columns, rows, is_wide=is_wide) if rows else Text(f"no {title}")]
    if len(shown) < len(sessions):
        lines.append(Text(f"and {len(sessions) - len(shown)} sessions more"))
    return Group(*lines)


def print_conversations(rows: Sequence[dict[str, Any]]) -> None:
    """Prints conversations, each with the fields of `ConversationStatus`; colour only on a terminal."""
    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    is_wide = console.width >= _WIDTH_OF_ALL
    console.print(_table(_CONVERSATIONS, rows, is_wide=is_wide) if rows else "no conversations")


def print_verification(found: dict[str, Any]) -> None:
    """Prints a verification (see `vmmd.ctl.verify.as_dict`); colour only on a terminal."""
    console = make_console()
    is_wide = console.width >= _WIDTH_OF_ALL
    console.print(_table(_VERIFIED, [found], is_wide=is_wide))
    if found["mismatches"]:
        console.print(_table(_MISMATCHES, found["mismatches"], is_wide=is_wide))
    if found["file_changed"]:
        skipped = f"; {found['slots_skipped']} slots have none and were left out" if found["slots_skipped"] else ""
        console.print(f"the file has changed since the model was opened: slots were compared with homes{skipped}")
    listed = len(found["mismatches"])
    if not found["mismatched"]:
        console.print("all equal")
    elif listed < found["mismatched"]:
        console.print(f"{found['mismatched']} mismatches, the first {listed} of them listed")


def print_decisions(decisions: Sequence[dict[str, Any]]) -> None:
    """Prints decisions (see `vmmd.ctl.trades`), a line each, and one for its reason."""
    console = make_console()
    if not decisions:
        console.print("no decisions yet")
    for decision in decisions:
        ids = [f"{_text(decision[who])}{_range_id(decision[key])}" for who, key in _PARTIES]
        times = f" ({decision['times']} times)" if decision["times"] > 1 else ""
        slabs = f"{decision['slabs']} slab" + "s" * (decision["slabs"] != 1)
        parties = f"for {ids[1]}" if decision["kind"] == "refusal" else f"{ids[0]} to {ids[1]}"
        head = f"{duration(decision['age_s'])} ago  {_text(decision['kind'])}{times}: {slabs}, {parties}"
        console.print(Text(f"{head}, on {_text(decision['device_uuid'])}", style="bold"))
        console.print(Text(f"    {_text(decision['reason'])}"))


def print_facts(facts: Sequence[dict[str, str]]) -> None:
    """Prints an explanation (see `vmmd.ctl.trades`): topics beside texts."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for fact in facts:
        table.add_row(_text(fact["topic"]), _text(fact["text"]))
    make_console().print(table)


def _range_id(range_id: int) -> str:
    return f" [range {range_id}]" if range_id else ""


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


def _headline(daemon: dict[str, Any]) -> str:
    state = ", draining" if daemon["draining"] else ""
    return (
        f"vmmd {_text(daemon['version'])}, pid {daemon['pid']}, {_text(daemon['driver'])} driver, "
        f"up {duration(daemon['uptime_s'])}{state}"
    )


def _milliseconds(seconds: float, times: int) -> str:
    return f"{seconds / times * 1000:.3g} ms" if times else "-"


def _rate(per_second: float) -> str:
    """A rate with three digits or so, a dash for none."""
    return f"{per_second:.{0 if per_second >= 100 else 1}f}" if per_second else "-"


class _Column(NamedTuple):
    """A column: what it shows of a row, and whether a narrow terminal can do without it."""

    header: str
    show: Callable[[dict[str, Any]], str | Text]
    is_number: bool = False
    narrow: Literal["keep", "drop", "if used"] = "keep"


def _size_of(field: str, header: str, narrow: Literal["keep", "drop", "if used"] = "keep") -> _Column:
    return _Column(header, lambda row: size(row[field]), True, narrow)


def _notes(model: dict[str, Any]) -> Text:
    notes = ["file changed"] if model["stale"] else []
    notes += [f"reader {pid} is behind" for pid in model["stuck_pids"]]
    return Text(", ".join(notes), style="yellow")


def _holder(quarantine: dict[str, Any]) -> str:
    """Who holds it; a process that has ended left it to another, which nobody could see."""
    pid = quarantine["pid"]
    if not pid:
        return "unknown"
    return str(pid) if Path(f"/proc/{pid}").exists() else f"{pid} or a child of it"


_DEVICES = (
    _Column("device", lambda d: _text(d["uuid"])),
    _Column("name", lambda d: _text(d["name"]), narrow="drop"),
    _size_of("total_bytes", "total"),
    _size_of("cap_bytes", "cap"),
    _size_of("free_bytes", "free"),
    _size_of("kv_bytes", "K/V"),
    _size_of("experts_bytes", "experts"),
    _size_of("weights_bytes", "weights"),
    _size_of("revoking_bytes", "revoking", "if used"),
    _size_of("quarantined_bytes", "quarantined", "if used"),
    _size_of("unmanaged_bytes", "unmanaged", "if used"),
    _size_of("slab_bytes", "slab", "drop"),
    _Column("state", lambda d: Text(_text(d["state"]), style="green" if d["state"] == "ok" else "bold red")),
)
_MODELS = (
    _Column("id", lambda m: str(m["model_id"]), True),
    _Column("model", lambda m: _text(m["name"])),
    _Column("domain", lambda m: _text(m["domain"] or m["uid"])),
    _Column("resident", lambda m: f"{m['resident']} of {m['experts']}", True),
    _Column("of heat", lambda m: f"{m['heat_covered']:.0%}", True),
    _Column("at home", lambda m: str(m["homes"]), True, "drop"),
    _Column("slots", lambda m: str(m["slots"]), True, "drop"),
    _size_of("experts_bytes", "experts"),
    _size_of("weights_bytes", "weights"),
    _Column("sessions", lambda m: str(m["sessions"]), True),
    _Column("notes", _notes, narrow="if used"),
)
_SESSIONS = (
    _Column("id", lambda s: str(s["session_id"]), True),
    _Column("pid", lambda s: str(s["pid"]), True),
    _Column("user", lambda s: _text(s["user"] or s["uid"])),
    _Column("executable", lambda s: _text(s["executable"])),
    _Column("K/V cells", lambda s: str(s["kv_cells"]), True),
    _size_of("kv_bytes", "K/V"),
    _size_of("quarantined_bytes", "quarantined", "if used"),
    _Column("age", lambda s: duration(s["age_s"]), True),
    _Column("state", lambda s: _text(s["state"])),
)

_CONVERSATIONS = (
    _Column("conversation", lambda c: _text(c["name"])),
    _Column("user", lambda c: _text(c["user"] or c["uid"])),
    _Column("model", lambda c: _text(c["model"])),
    _Column("device", lambda c: _text(c["device_uuid"]), narrow="drop"),
    _Column("cells", lambda c: str(c["cells"]), True),
    _size_of("bytes", "K/V"),
    _Column("state", lambda c: _text(c["state"])),
    _Column("by pid", lambda c: str(c["pid"] or "-"), True),
    _Column("for", lambda c: duration(c["parked_s"]) if c["expires_in_s"] else "-", True),
    _Column("expires in", lambda c: duration(c["expires_in_s"]) if c["expires_in_s"] else "-", True),
)

_QUARANTINES = (
    _Column("quarantined on", lambda q: _text(q["device_uuid"])),
    _size_of("bytes", "held"),
    _Column("by pid", _holder, True),
    _Column("for", lambda q: duration(q["age_s"]), True),
)

_BAR_CELLS = 12


def _used(device: dict[str, Any]) -> Text:
    """A bar of what is used of the cap."""
    cap_bytes = device["cap_bytes"]
    share = min(1.0, 1 - device["free_bytes"] / cap_bytes) if cap_bytes else 0.0
    bar = "|" * round(share * _BAR_CELLS)
    style = "green" if share < 0.75 else "yellow" if share < 0.95 else "red"
    return Text.assemble("[", (bar, style), " " * (_BAR_CELLS - len(bar)), f"{share:4.0%}]")


def _tier(model: dict[str, Any], name: str) -> dict[str, Any]:
    return next(tier for tier in model["tiers"] if tier["tier"] == name)


def _share_of(name: str, header: str, narrow: Literal["keep", "drop", "if used"] = "keep") -> _Column:
    def show(model: dict[str, Any]) -> str:
        is_used = any(tier["share"] for tier in model["tiers"])
        return f"{_tier(model, name)['share']:.1%}" if is_used else "-"

    return _Column(header, show, True, narrow)


def _traffic_of(name: str, narrow: Literal["keep", "drop", "if used"] = "keep") -> _Column:
    return _Column(f"{name}/s", lambda m: size(_tier(m, name)["read_bytes_per_s"]), True, narrow)


def _waited(session: dict[str, Any]) -> str:
    growths = session["growths"]
    if growths["waiting"]:
        return "waits"
    return _milliseconds(growths["seconds"], growths["granted"] + growths["refused"])


_TOP_DEVICES = (
    _Column("device", lambda d: _text(d["uuid"])),
    _Column("used", _used, True),
    _size_of("cap_bytes", "cap"),
    _size_of("kv_bytes", "K/V"),
    _size_of("experts_bytes", "experts"),
    _size_of("weights_bytes", "weights"),
    _size_of("quarantined_bytes", "quarantined", "if used"),
    _size_of("unmanaged_bytes", "unmanaged", "if used"),
    _Column("trades/min", lambda d: str(d["trades_last_min"] or "-"), True),
    _Column("slabs given", lambda d: str(d["traded_slabs"] or "-"), True, "if used"),
    _Column("returned", lambda d: str(d["returned_slabs"] or "-"), True, "if used"),
    _Column("state", lambda d: Text(_text(d["state"]), style="green" if d["state"] == "ok" else "bold red")),
)
_TOP_MODELS = (
    _Column("arena", lambda m: _text(m["name"])),
    _Column("domain", lambda m: _text(m["domain"] or m["uid"]), narrow="drop"),
    _Column("resident", lambda m: f"{m['resident']} of {m['experts']}", True),
    _share_of("device", "hits"),
    _share_of("peer", "peer", "drop"),
    _share_of("host", "host", "drop"),
    _traffic_of("device"),
    _traffic_of("peer", "if used"),
    _traffic_of("host"),
    _Column("filled/s", lambda m: size(m["filled_bytes_per_s"]), True, "if used"),
    _Column("tokens/s", lambda m: _rate(m["decoded_tokens_per_s"]), True),
    _Column("prompt/s", lambda m: _rate(m["prompt_tokens_per_s"]), True),
    _Column("sessions", lambda m: str(m["sessions"]), True),
    _Column("notes", _notes, narrow="if used"),
)
_TOP_SESSIONS = (
    _Column("pid", lambda s: str(s["pid"]), True),
    _Column("user", lambda s: _text(s["user"] or s["uid"])),
    _Column("executable", lambda s: _text(s["executable"]), narrow="drop"),
    _Column("state", lambda s: _text(s["state"])),
    _Column("tokens/s", lambda s: _rate(s["decoded_tokens_per_s"]), True),
    _Column("prompt/s", lambda s: _rate(s["prompt_tokens_per_s"]), True),
    _Column("cells", lambda s: f"{s['kv_cells_used']} of {s['kv_cells']}", True),
    _size_of("kv_bytes", "K/V"),
    _size_of("quarantined_bytes", "quarantined", "if used"),
    _Column("grown", lambda s: str(s["growths"]["granted"] or "-"), True),
    _Column("refused", lambda s: str(s["growths"]["refused"] or "-"), True, "if used"),
    _Column("traded", lambda s: str(s["growths"]["traded_slabs"] or "-"), True, "if used"),
    _Column("growth takes", _waited, True),
)

_VERIFIED = (
    _Column("model", lambda v: _text(v["name"])),
    _Column("id", lambda v: str(v["model_id"]), True),
    _Column("slots", lambda v: str(v["slots"]), True),
    _Column("homes", lambda v: str(v["homes"]), True),
    _size_of("weights_bytes", "weights"),
    _size_of("compared_bytes", "compared"),
    _Column("mismatches", lambda v: Text(str(v["mismatched"]), style="bold red" if v["mismatched"] else "green"), True),
)
_MISMATCHES = (
    _Column("differs", lambda m: _text(m["place"])),
    _Column("layer", lambda m: _or_dash(m["layer"]), True),
    _Column("expert", lambda m: _or_dash(m["expert"]), True),
    _Column("matrix", lambda m: _or_dash(m["matrix"])),
    _Column("device", lambda m: _text(m["device_uuid"])),
    _Column("range", lambda m: str(m["range_id"]), True, "drop"),
    _Column("slab", lambda m: str(m["slab_index"]), True),
    _Column("first byte", lambda m: str(m["offset_bytes"]), True),
    _Column("bytes", lambda m: str(m["differing_bytes"]), True),
)


def _table(columns: Sequence[_Column], rows: Sequence[dict[str, Any]], *, is_wide: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    cells = []
    for column in columns:
        shown = [column.show(row) for row in rows]
        is_used = any(str(cell) not in ("", "-") for cell in shown)
        if is_wide or column.narrow == "keep" or (column.narrow == "if used" and is_used):
            cells.append(shown)
            justify: Literal["left", "right"] = "right" if column.is_number else "left"
            table.add_column(column.header, justify=justify, overflow="fold", no_wrap=column.is_number)
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table


def _text(value: object) -> str:
    return escape_controls(str(value), keep="")


def _or_dash(value: object) -> str:
    return "-" if value is None else _text(value)
