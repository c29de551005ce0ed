"""What is sent to systemd, and what it passes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmmd.notify import Notifier, passed_broker_socket


@pytest.fixture
def systemd(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket on which systemd listens."""
    path = tmp_path_factory.mktemp("n") / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(path))
        listener.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield listener


def test_states(systemd: socket.socket) -> None:
    """Readiness, status, watchdog and stopping arrive in systemd's words."""
    notifier = Notifier()
    notifier.ready("2 devices")
    notifier.status("filling")
    notifier.watchdog()
    notifier.stopping()
    notifier.close()
    notifier.close()
    notifier.watchdog()
    assert [systemd.recv(4096) for _ in range(4)] == [
        b"READY=1\nSTATUS=2 devices",
        b"STATUS=filling",
        b"WATCHDOG=1",
        b"STOPPING=1\nSTATUS=stopping",
    ]


def test_status_is_one_safe_line(systemd: socket.socket) -> None:
    """A name from outside can neither add a state nor get a status lost."""
    notifier = Notifier()
    notifier.status("x\nREADY=1\x1b[31m é 中")
    notifier.close()
    assert systemd.recv(4096) == rb"STATUS=x\nREADY=1\x1b[31m \xe9 \u4e2d"


def test_without_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without systemd, or with its socket gone, nothing happens."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notifier = Notifier()
    notifier.ready("")
    notifier.close()


@pytest.mark.parametrize(
    ("usec", "pid", "interval_s"),
    [
        ("2000000", None, 1.0),
        ("2000000", str(os.getpid()), 1.0),
        ("2000000", "1", None),
        ("0", None, None),
        ("x", None, None),
        (None, None, None),
    ],
)
def test_watchdog_interval(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, interval_s: float | None
) -> None:
    """Half of what systemd waits, if it waits for this process."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert Notifier().watchdog_interval_s == interval_s


ADOPT = """
import os, socket, sys
kind, count, pid_offset, fd = sys.argv[1:]
os.dup2(int(fd), 3, inheritable=True)
os.environ["LISTEN_FDS"] = count
os.environ["LISTEN_PID"] = str(os.getpid() + int(pid_offset))
os.environ["LISTEN_FDNAMES"] = "handles"
from vmmd.notify import passed_broker_socket
from vmmd.errors import InvalidRequest
try:
    passed = passed_broker_socket()
except InvalidRequest as error:
    print(error.message)
else:
    print(passed and (passed.getsockname(), passed.get_inheritable()))
print([name for name in os.environ if name.startswith("LISTEN_")])
"""


@pytest.mark.parametrize(
    ("kind", "listen", "count", "pid_offset", "says"),
    [
        (socket.SOCK_SEQPACKET, True, 1, 0, "handles.sock', False)"),
        (socket.SOCK_SEQPACKET, True, 1, 1, "None"),
        (socket.SOCK_SEQPACKET, True, 0, 0, "None"),
        (socket.SOCK_SEQPACKET, True, 2, 0, "systemd passed 2 sockets"),
        (socket.SOCK_SEQPACKET, False, 1, 0, "no handles.sock"),
        (socket.SOCK_STREAM, True, 1, 0, "no handles.sock"),
    ],
)
def test_passed_broker_socket(
    tmp_path_factory: pytest.TempPathFactory,
    kind: socket.SocketKind,
    listen: bool,
    count: int,
    pid_offset: int,
    says: str,
) -> None:
    """handles.sock is taken from systemd if it is meant for us and is one; no child sees the variables."""
    path: Path = tmp_path_factory.mktemp("p") / "handles.sock"
    with socket.socket(socket.AF_UNIX, kind) as listener:
        listener.bind(str(path))
        if listen:
            listener.listen()
        result = subprocess.run(
            [sys.executable, "-c", ADOPT, str(int(kind)), str(count), str(pid_offset), str(listener.fileno())],
            pass_fds=[listener.fileno()],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert says in first
    assert second == "[]"


def test_nothing_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without systemd's variables there is no passed socket."""
    monkeypatch.delenv("LISTEN_FDS", raising=False)
    assert passed_broker_socket() is None
