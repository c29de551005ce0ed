"""What vmmctl prints of a snapshot."""

import json
import os

import pytest
from rich.console import Console
from strata_api.v1 import admin_pb2

from vmmd.ctl import verify
from vmmd.ctl.printers import duration, print_status, print_verification, size, top_frame
from vmmd.ctl.status import as_dict


def _parts() -> list[admin_pb2.StatusPart]:
    daemon = admin_pb2.DaemonStatus(epoch=1 << 60, pid=7, version="0.1.0", driver="host", uptime_s=61)
    device = admin_pb2.DeviceStatus(
        uuid="HOST-SIM-0", name="host", total_bytes=1 << 30, kv_bytes=3 << 20, state="ok", numa_node=-1
    )
    model = admin_pb2.ModelStatus(name="evil\x1b[31m[bold]x", experts=96, resident=72, stuck_pids=[9])
    sessions = [admin_pb2.SessionStatus(pid=i, user="u", executable="/bin/x", state="idle") for i in (11, 12)]
    return [
        admin_pb2.StatusPart(daemon=daemon, devices=[device], models=[model], sessions=sessions[:1]),
        admin_pb2.StatusPart(sessions=sessions[1:]),
    ]


def test_snapshot_joins_parts_and_keeps_numbers() -> None:
    """JSON holds every field of the wire, 64-bit numbers as numbers, and the sessions of all parts."""
    snapshot = json.loads(json.dumps(as_dict(_parts())))
    assert snapshot["daemon"]["epoch"] == 1 << 60
    assert snapshot["devices"][0]["kv_bytes"] == 3 << 20
    assert [s["pid"] for s in snapshot["sessions"]] == [11, 12]
    for kind, message in (("devices", admin_pb2.DeviceStatus), ("models", admin_pb2.ModelStatus)):
        assert set(snapshot[kind][0]) == set(message.DESCRIPTOR.fields_by_name)


def test_table_escapes_names_and_has_no_colour_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Names cannot drive the terminal, and markup in them is text."""
    print_status(as_dict(_parts()))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"evil\x1b[31m[bold]x" in out
    assert "72 of 96" in out
    assert "reader 9 is behind" in out


def test_nodes_and_quarantines_are_shown_where_there_are_any(capsys: pytest.CaptureFixture[str]) -> None:
    """A host with several memory nodes shows each device's; held memory is shown with pid and age.

    A process that has ended may have left it to a child.
    """
    parts = _parts()
    print_status(as_dict(parts))
    out = capsys.readouterr().out
    assert " node" not in out.split("models")[0].splitlines()[1]
    assert "quarantined on" not in out
    parts[0].devices[0].numa_node = 1
    parts[0].quarantines.add(device_uuid="HOST-SIM-0", bytes=2 << 20, session_id=5, pid=os.getpid(), age_s=62)
    parts[0].quarantines.add(device_uuid="HOST-SIM-0", bytes=4 << 20, session_id=6, pid=1 << 30, age_s=3)
    parts[0].quarantines.add(device_uuid="HOST-SIM-0", bytes=6 << 20, age_s=4)
    print_status(as_dict(parts))
    out = capsys.readouterr().out
    assert " node" in out.splitlines()[1]
    rows = {line.split()[1]: line for line in out.splitlines()[-3:]}
    assert f" {os.getpid()} " in rows["2"] and "1m02s" in rows["2"]
    assert f"{1 << 30} or a child of it" in rows["4"]
    assert "unknown" in rows["6"]


def _frame(parts: list[admin_pb2.StatusPart], width: int, rows_max: int | None = None) -> str:
    console = Console(width=width, markup=False, highlight=False, emoji=False, color_system=None)
    with console.capture() as captured:
        console.print(top_frame(as_dict(parts), width, rows_max))
    return captured.get()


def _busy_parts() -> list[admin_pb2.StatusPart]:
    parts = _parts()
    parts[0].daemon.growths.MergeFrom(admin_pb2.Growths(granted=3, refused=1, seconds=0.02, waiting=1))
    parts[0].devices[0].MergeFrom(
        admin_pb2.DeviceStatus(cap_bytes=8 << 20, free_bytes=2 << 20, trades_last_min=4, traded_slabs=9)
    )
    for tier, share, rate in (("device", 0.75, 3 << 20), ("peer", 0.0, 0), ("host", 0.25, 1 << 20)):
        parts[0].models[0].tiers.add(tier=tier, share=share, read_bytes_per_s=rate)
    parts[0].models[0].decoded_tokens_per_s = 41.26
    parts[1].sessions[0].MergeFrom(
        admin_pb2.SessionStatus(decoded_tokens_per_s=41.26, kv_cells=160, kv_cells_used=70, growths={"waiting": 1})
    )
    return parts


def test_a_frame_shows_what_moves_and_the_busiest_session_first() -> None:
    """Bars, hits, traffic, rates and waits are in their places; names cannot drive the terminal."""
    frame = _frame(_busy_parts(), 170)
    assert frame.startswith("vmmd 0.1.0, pid 7, host driver, up 1m01s; growths: 3 granted, 1 refused, 1 waiting, 5 ms ")
    lines = {line.split()[0]: " ".join(line.split()) for line in frame.splitlines() if line.strip()}
    assert lines["HOST-SIM-0"].startswith("HOST-SIM-0 [||||||||| 75%] 8 MiB 3 MiB - - ")
    assert " 4 9 - ok" in lines["HOST-SIM-0"]
    assert "75.0% 0.0% 25.0% 3 MiB - 1 MiB - 41.3 - 0 reader 9 is behind" in lines[r"evil\x1b[31m[bold]x"]
    assert lines["12"] == "12 u /bin/x idle 41.3 - 70 of 160 - - - - - waits"
    assert list(lines).index("12") < list(lines).index("11")


def test_a_small_terminal_gets_fewer_columns_and_sessions() -> None:
    """Where there is no room, the least telling columns go, and the sessions that are left out are counted."""
    frame = _frame(_busy_parts(), 100, 1)
    assert max(map(len, frame.splitlines())) <= 100
    assert "peer" not in frame
    assert "and 1 sessions more" in frame
    assert "quarantined" not in frame


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "-"), (17, "17 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB"), (700 << 20, "700 MiB")]
)
def test_size(n_bytes: int, text: str) -> None:
    """Sizes take the largest fitting unit; nothing is a dash."""
    assert size(n_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(42, "42s"), (187, "3m07s"), (18720, "5h12m"), (183600, "2d03h")])
def test_duration(seconds: float, text: str) -> None:
    """Durations have two units at most."""
    assert duration(seconds) == text


def test_a_verification_says_what_was_compared_and_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    """The result names places, escapes names, and says what was left out and what is not listed."""
    mismatches = [
        admin_pb2.Mismatch(place="slot", layer=0, expert=1, matrix="up", device_uuid="GPU-1", offset_bytes=44),
        admin_pb2.Mismatch(place="weights", device_uuid="GPU-1"),
    ]
    summary = admin_pb2.VerifySummary(
        model_id=3, name="evil\x1b[31m", file_changed=True, slots_skipped=2, mismatched=200, mismatches=mismatches
    )
    found = verify.as_dict(summary)
    assert (found["mismatches"][0]["layer"], found["mismatches"][1]["layer"]) == (0, None)
    assert json.loads(json.dumps(found)) == found
    print_verification(found)
    out = capsys.readouterr().out
    assert r"evil\x1b[31m" in out
    assert "slots were compared with homes; 2 slots have none and were left out" in out
    assert out.splitlines()[-1] == "200 mismatches, the first 2 of them listed"
