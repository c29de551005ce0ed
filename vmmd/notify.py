"""What systemd and the daemon tell each other: readiness, status, watchdog, passed sockets.

Without systemd nothing is sent and nothing is passed.
"""

import os
import socket
from collections.abc import Mapping

import sdnotify

from vmmd.errors import InvalidRequest
from vmmd.log import printable

_FIRST_FD = 3  # sd_listen_fds(3)


class Notifier:
    """Sends states to systemd; for one thread at a time."""

    def __init__(self) -> None:
        # sdnotify leaks a socket where the variable is missing
        self._systemd = sdnotify.SystemdNotifier() if os.environ.get("NOTIFY_SOCKET") else None
        self.watchdog_interval_s = _watchdog_interval_s(os.environ, os.getpid())
        """Seconds between two calls of `watchdog`, half of what systemd waits; None: no watchdog."""

    def ready(self, status: str) -> None:
        """The sockets answer."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """One line for ``systemctl status``."""
        self._send(f"STATUS={_one_line(status)}")

    def watchdog(self) -> None:
        """The daemon is alive; call it from the thread whose life matters."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str = "stopping") -> None:
        """The daemon leaves."""
        self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def close(self) -> None:
        """Closes the connection to systemd; a second call does nothing."""
        if self._systemd is not None and self._systemd.socket is not None:
            self._systemd.socket.close()
        self._systemd = None

    def _send(self, state: str) -> None:
        if self._systemd is not None:
            self._systemd.notify(state)


def passed_broker_socket() -> socket.socket | None:
    """The listening ``handles.sock`` that systemd passed, or None; the caller closes it.

    The variables are removed, so that no child takes them for its own. gRPC in
    Python cannot adopt a socket: ``vmmd.sock`` is never passed.

    Errors: `InvalidRequest` if what was passed is something else.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or int(count) == 0:
        return None
    if int(count) != 1:
        raise InvalidRequest(f"systemd passed {count} sockets: only handles.sock can be passed")
    passed = socket.socket(fileno=_FIRST_FD)
    passed.set_inheritable(False)
    listening = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if passed.family != socket.AF_UNIX or passed.type != socket.SOCK_SEQPACKET or not listening:
        passed.close()
        raise InvalidRequest("systemd passed a socket that is no handles.sock: it takes ListenSequentialPacket=")
    passed.setblocking(True)
    return passed


def _watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None  # meant for the process that started us
    usec = environ.get("WATCHDOG_USEC", "")
    return int(usec) / 2e6 if usec.isdigit() and int(usec) > 0 else None


def _one_line(status: str) -> str:
    """ASCII without line ends: sdnotify sends Latin-1 and drops what does not fit."""
    return printable(status).encode("ascii", "backslashreplace").decode("ascii")
