"""Who is at the other end of a Unix socket, by the kernel's word."""

import os
import pathlib
import select
import socket
import struct
from typing import NamedTuple

from vmmd.errors import PermissionDenied

SO_PEERPIDFD = 77
"""<asm-generic/socket.h>, since Linux 6.5."""

_UCRED = struct.Struct("iII")


class Peer(NamedTuple):
    """Credentials at the time of connect."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The credentials of who connected. Errors: `PermissionDenied` for the overflow user.

    The overflow user stands for every user that this user namespace cannot name:
    many people behind one number.
    """
    peer = Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
    if peer.uid == overflow_uid():
        raise PermissionDenied(
            f"user id {peer.uid} is the kernel's overflow id, which stands for users of another namespace;"
            " run the client as a user that this host knows"
        )
    return peer


def overflow_uid() -> int:
    """The user id that the kernel shows for users it cannot map here."""
    try:
        return int(pathlib.Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process that connected, or None where the kernel lacks SO_PEERPIDFD.

    The caller closes it. Errors: `PermissionDenied` where that process is gone.
    """
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4)
    except OSError as error:
        if error.errno in (92, 22):  # ENOPROTOOPT, EINVAL
            return None
        raise PermissionDenied(f"the connecting process cannot be identified: {error.strerror}") from None
    pidfd = int(struct.unpack("i", raw)[0])
    os.set_inheritable(pidfd, False)
    return pidfd


def open_pidfd(pid: int) -> int:
    """A pidfd by number, to be confirmed by a nonce. Errors: `PermissionDenied`."""
    if pid == 0:
        raise PermissionDenied(
            "the client is in another pid namespace, and this kernel has no SO_PEERPIDFD (Linux 6.5) to identify it"
        )
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise PermissionDenied(f"process {pid} cannot be identified: {error.strerror}") from None


def is_alive(pidfd: int) -> bool:
    """Whether the process of a pidfd still runs."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)


def sender_of(ancillary: "list[tuple[int, int, bytes]]") -> Peer | None:
    """The credentials that came with one packet (SO_PASSCRED)."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _UCRED.size:
            return Peer(*_UCRED.unpack(data[: _UCRED.size]))
    return None


def executable_of(pid: int) -> str:
    """The path of a process's program, without arguments; empty where it cannot be read."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
