"""The runtime directory, the lock in it, its sockets, and the claim of a device.

Which directory it is, `strata_api.v1.paths` says. In it lie ``vmmd.sock``,
``handles.sock`` and ``private/`` (lock and journal; mode 0700). The directory has
mode 0750 and the sockets 0660: its group may be clients, nobody else.
"""

import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from strata_api.v1.paths import (
    BROKER_SOCKET,
    GRPC_SOCKET,
    SOCKET_PATH_BYTES_MAX,
    default_runtime_dir,
    socket_path_problem,
)

from vmmd.errors import InvalidRequest, NoDevice, PermissionDenied, PreconditionFailed

_CLAIM_PREFIX = "\0strata-vmmd-device-"
_CLAIM_BACKLOG = 128  # refused daemons that connected to ask for the owner's pid


@dataclass(frozen=True)
class RuntimeDir:
    """A directory that exists, is ours and is safe."""

    path: Path

    @property
    def grpc_socket(self) -> Path:
        return self.path / GRPC_SOCKET

    @property
    def broker_socket(self) -> Path:
        return self.path / BROKER_SOCKET

    @property
    def private(self) -> Path:
        return self.path / "private"


def prepare(explicit: Path | None = None, environ: Mapping[str, str] | None = None) -> RuntimeDir:
    """Chooses the runtime directory, and makes it where it is missing.

    Args:
        explicit: what ``--runtime-dir`` says, or None.
        environ: the environment, for tests.

    Errors: `InvalidRequest` (paths too long, a missing parent), `PermissionDenied`
    (somebody else's, or others may write).
    """
    directory = RuntimeDir(Path(explicit or default_runtime_dir(environ)).absolute())
    for path in (directory.grpc_socket, directory.broker_socket):
        if problem := socket_path_problem(path):
            raise InvalidRequest(problem)
    own_directory(directory.path, 0o750, forbidden_mode=0o022)
    own_directory(directory.private, 0o700, forbidden_mode=0o077)
    return directory


def own_directory(path: Path, mode: int, forbidden_mode: int) -> None:
    """Makes a directory where it is missing. Errors: `PermissionDenied` (not ours, or too open), `InvalidRequest`."""
    try:
        path.mkdir(mode)
        path.chmod(mode)  # whatever the umask is
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        raise InvalidRequest(f"cannot make the directory {path}: {path.parent} does not exist") from error
    except OSError as error:
        raise PermissionDenied(f"cannot make the directory {path}: {error.strerror}") from error
    try:
        status = path.lstat()
    except OSError as error:
        raise PermissionDenied(f"cannot use the directory {path}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidRequest(f"{path} is no directory; move it away or choose another one with --runtime-dir")
    if status.st_uid != os.geteuid():
        raise PermissionDenied(
            f"the directory {path} belongs to user {status.st_uid}, not to {os.geteuid()}; choose another one "
            "with --runtime-dir"
        )
    mode_now = stat.S_IMODE(status.st_mode)
    if mode_now & forbidden_mode:
        raise PermissionDenied(
            f"the directory {path} has mode {mode_now:04o}, which gives others too much; `chmod {mode:o}` it first"
        )


class Lock:
    """One daemon per runtime directory, for as long as this object is open.

    The lock ends with the process, however that ends. A child made by fork alone
    would share it; one made by exec does not inherit it.

    Errors: `PreconditionFailed`, with the pid of the daemon that runs there.
    """

    def __init__(self, directory: RuntimeDir) -> None:
        path = directory.private / "lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PermissionDenied(f"cannot open {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            who = f"another vmmd (pid {pid})" if pid.isdigit() else "another vmmd"
            raise PreconditionFailed(f"{who} is running in {directory.path}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Lets another daemon start here; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove_socket(path: Path) -> None:
    """Removes a socket that a dead daemon left, or our own; call it under the lock.

    Errors: `PreconditionFailed` if something else is there, which stays.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise PreconditionFailed(f"{path} is in the way and no socket; move it away")
    with suppress(FileNotFoundError):
        path.unlink()


def open_socket_to_group(path: Path) -> None:
    """Lets our group connect: mode 0660. The directory keeps others out before, too."""
    path.chmod(0o660)


def bind_broker(directory: RuntimeDir, backlog: int = 128) -> socket.socket:
    """Makes and listens on ``handles.sock``; the caller closes it and removes the path."""
    path = directory.broker_socket
    remove_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        listener.bind(os.fspath(path))
        open_socket_to_group(path)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anybody can connect
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


class DeviceClaim:
    """Ownership of a physical device between the daemons of all users of a host.

    An abstract Unix socket, bound for life: it vanishes with the process, and no
    directory's permissions are in the way. Abstract names belong to a network
    namespace: containers with one of their own do not see each other's claims.
    Simulated devices need no claim.

    Errors: `NoDevice`, with the uuid and, where it can be had, the owner's pid.
    """

    def __init__(self, uuid: str) -> None:
        name = _CLAIM_PREFIX + uuid
        if len(os.fsencode(name)) > SOCKET_PATH_BYTES_MAX:
            raise InvalidRequest(f"the device name {uuid!r} is too long to be claimed")
        self.uuid = uuid
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.bind(name)
            self._socket.listen(_CLAIM_BACKLOG)  # so that SO_PEERCRED names us to others
        except OSError as error:
            self._socket.close()
            if error.errno != errno.EADDRINUSE:
                raise
            pid = device_owner(uuid)
            who = f"another vmmd (pid {pid})" if pid else "another vmmd"
            raise NoDevice(f"device {uuid} is managed by {who}") from None

    def close(self) -> None:
        """Lets another daemon have the device; a second call does nothing."""
        self._socket.close()


def device_owner(uuid: str) -> int | None:
    """The pid of the daemon that has claimed a device; None where none has, or where it is in another pid namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(_CLAIM_PREFIX + uuid)
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid or None
