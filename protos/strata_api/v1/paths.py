"""Where the daemon's sockets are: rules that daemon, clients and vmmctl share.

The runtime directory is the first of

1. what ``--runtime-dir`` says,
2. ``RUNTIME_DIRECTORY`` (systemd sets it; the first of a list separated by colons),
3. ``$XDG_RUNTIME_DIR/strata``,
4. ``/run/strata`` for root,
5. ``/tmp/strata-UID``, which the daemon makes and which counts only if it is the user's own.

A client looks in that one first and then in ``/run/strata``, where the host's
daemon is when systemd runs it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

GRPC_SOCKET = "vmmd.sock"
BROKER_SOCKET = "handles.sock"

HOST_RUNTIME_DIR = Path("/run/strata")

SOCKET_PATH_BYTES_MAX = 107
"""``sun_path`` has 108 bytes, the last of which is 0."""


def default_runtime_dir(environ: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """The runtime directory where no ``--runtime-dir`` names one; it need not exist."""
    environ = os.environ if environ is None else environ
    uid = os.geteuid() if uid is None else uid
    from_systemd = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if from_systemd:
        return Path(from_systemd)
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(xdg):  # the specification ignores relative ones
        return Path(xdg, "strata")
    return HOST_RUNTIME_DIR if uid == 0 else Path(f"/tmp/strata-{uid}")


def client_runtime_dirs(environ: Mapping[str, str] | None = None, uid: int | None = None) -> list[Path]:
    """Where a client without ``--runtime-dir`` looks for a daemon, in order.

    A directory that neither this user nor root vouches for is left out: anyone
    may make one of that name under ``/tmp``.
    """
    uid = os.geteuid() if uid is None else uid
    first = default_runtime_dir(environ, uid)
    found = []
    for directory in dict.fromkeys((first, HOST_RUNTIME_DIR)):
        try:
            owner = directory.lstat().st_uid
        except OSError:
            continue
        if directory == HOST_RUNTIME_DIR or owner in (uid, 0):
            found.append(directory)
    return found


def socket_path_problem(path: Path) -> str | None:
    """One line where a path is too long for a Unix socket, else None."""
    length_bytes = len(os.fsencode(path))
    if length_bytes <= SOCKET_PATH_BYTES_MAX:
        return None
    return (
        f"the socket path {path} is too long: {length_bytes} bytes, at most {SOCKET_PATH_BYTES_MAX} are possible; "
        "choose a shorter directory with --runtime-dir"
    )
