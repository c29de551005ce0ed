"""`vmmctl` against real daemons."""

import os
import signal
from pathlib import Path

from tests.helpers.daemon import LONG, running_daemon, vmmctl, wait_until

PARTS = ("kv", "experts", "weights", "free_slab", "revoking", "quarantined", "unmanaged")


def test_no_daemon_is_one_line_and_exit_3(tmp_path: Path) -> None:
    """Without a daemon one line says so, with exit status 3."""
    done = vmmctl("status", "--socket", os.fspath(tmp_path))
    assert done.returncode == 3
    assert done.stderr.decode().splitlines() == [f"vmmctl: no daemon at {tmp_path}: No such file or directory"]
    assert done.stdout == b""


def test_status_adds_up_while_a_client_runs() -> None:
    """What a device's slabs are used for adds up within its total, and the session shows its cells."""
    with running_daemon('[host]\ndevice_bytes = "64MiB"\nram_bytes = "64MiB"\n') as daemon:
        process = daemon.start_generate("Once upon a time", *LONG)
        status = daemon.status()
        process.send_signal(signal.SIGINT)
        process.communicate()
    device = next(device for device in status["devices"] if not device["is_host"])
    used = sum(device[f"{part}_bytes"] for part in PARTS)
    assert used <= device["total_bytes"]
    in_use = used - device["free_slab_bytes"] - device["unmanaged_bytes"]
    assert in_use + device["free_bytes"] == device["cap_bytes"]
    session = next(session for session in status["sessions"] if session["pid"] == process.pid)
    assert session["uid"] == os.getuid()
    assert session["kv_cells"] >= 256
    assert session["kv_bytes"] == device["kv_bytes"] > 0
    model = status["models"][0]
    assert (model["experts"], model["resident"], model["sessions"]) == (96, 96, 1)
    assert session["model_ids"] == [model["model_id"]]


def test_status_is_a_table_for_people() -> None:
    """Devices come as a table without colour in a pipe; an admin's look is no session."""
    with running_daemon() as daemon:
        done = vmmctl("status", "--socket", os.fspath(daemon.directory / "vmmd.sock"))
        assert done.returncode == 0, done.stderr
        assert b"\x1b" not in done.stdout
        assert b"HOST-SIM-0" in done.stdout
        assert b"no sessions" in done.stdout


def test_drain_refuses_new_sessions_and_ends_the_daemon() -> None:
    """A draining daemon takes no new session and leaves when the last one has ended."""
    with running_daemon() as daemon:
        process = daemon.start_generate("Once upon a time", *LONG)
        done = vmmctl("drain", "--socket", os.fspath(daemon.directory))
        assert (done.returncode, done.stdout) == (0, b"draining: waits for 1 sessions\n"), done.stderr
        refused = daemon.generate("go", "--max-tokens", "1")
        assert refused.returncode == 1
        assert b"drain" in refused.stderr.lower()
        process.send_signal(signal.SIGINT)
        process.communicate()
        wait_until(lambda: daemon.process.poll() is not None)
        assert daemon.process.returncode == 0
