"""Learned profiles: what a model's experts were routed to, kept for the next time that it is filled.

One file a model and domain in the state directory (mode 0700): the magic, the key
again, how many experts, a CRC-32 of what follows, and the heat as little-endian
float32. Files are written under another name and renamed, so any number of daemons
may share the directory. One that is not as it should be counts as not there, with a
warning, and is written anew. No disk is filled: beyond 64 MiB the oldest go.
"""

import hashlib
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog

from vmmd.manager.files import FileIdentity

log = structlog.get_logger("vmmd.profiles")

F64 = npt.NDArray[np.float64]

TOTAL_BYTES_MAX = 64 << 20
"""Of all profiles: two thousand models of 8,192 experts."""

_MAGIC = b"strata profile 1"
_HEAD = struct.Struct("<16s32sQI")  # magic, key, experts, CRC-32
_SUFFIX, _WRITTEN = ".profile", ".new"


def key_of(domain: str, identities: Sequence[FileIdentity], geometry_digest: str) -> str:
    """What a profile goes by, in hexadecimal: whose it is, and the model's files by what is in them.

    A copy of a file, or the same one on another mount, is the same model.
    """
    files = [(identity.size_bytes, identity.digest) for identity in identities]
    return hashlib.sha256(repr((domain, files, geometry_digest)).encode()).hexdigest()


def state_directory(configured: str, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where the daemon keeps what it learns; None for "off", or where no place is known.

    Args:
        configured: "off", a directory, or "auto": ``STATE_DIRECTORY`` (systemd's), else
            ``XDG_STATE_HOME/strata``, else ``~/.local/state/strata``.
    """
    if configured == "off":
        return None
    if configured != "auto":
        return Path(configured)
    if given := environ.get("STATE_DIRECTORY", "").partition(":")[0]:
        return Path(given)
    base = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # the specification has relative ones ignored
        return Path(base) / "strata"
    try:
        return Path.home() / ".local" / "state" / "strata"
    except RuntimeError:  # no HOME, and nobody in the user database
        return None


class Profiles:
    """The profiles of a state directory, which may not exist yet; None keeps nothing. No call fails.

    A disk that hangs holds up `load` and `close`; `save` leaves writing to a thread.
    """

    def __init__(self, state_dir: Path | None) -> None:
        self._directory = state_dir / "profiles" if state_dir is not None else None
        self._told = False  # that nothing can be written
        self._writer = ThreadPoolExecutor(1, "vmmd-profiles")

    def load(self, key: str, n: int) -> F64 | None:
        """The heat `[n]` that was saved under this key, 0 to 1; None if none was, or it cannot be believed."""
        if self._directory is None:
            return None
        path = self._directory / f"{key}{_SUFFIX}"
        try:
            heat = _read(path, bytes.fromhex(key), n)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("profile.ignored", path=str(path), why=str(error))
            return None
        log.info("profile.loaded", path=str(path))
        return heat

    def save(self, key: str, heat: F64) -> None:
        """Keeps a heat `[n]`, 0 to 1, in place of what was there. A failure is told once, until one succeeds."""
        if self._directory is not None:
            self._writer.submit(self._save, self._directory / f"{key}{_SUFFIX}", bytes.fromhex(key), heat)

    def close(self) -> None:
        """Waits for what is being written."""
        self._writer.shutdown()

    def _save(self, path: Path, key: bytes, heat: F64) -> None:
        body = heat.astype("<f4").tobytes()
        try:
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            _write(path, _HEAD.pack(_MAGIC, key, len(heat), zlib.crc32(body)) + body)
            _prune(path)
        except OSError as error:
            if not self._told:
                log.warning("profile.not_saved", path=str(path), why=error.strerror or str(error))
            self._told = True
        else:
            self._told = False


def _read(path: Path, key: bytes, n: int) -> F64:
    """Errors: `OSError`, `ValueError`, which says what is wrong."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ValueError(f"user {status.st_uid} owns it with mode {stat.S_IMODE(status.st_mode):04o}")
        expected = _HEAD.size + 4 * n
        contents = file.read(expected + 1)
    if len(contents) != expected:
        raise ValueError(f"it is not {expected} bytes long")
    magic, of, experts, crc = _HEAD.unpack_from(contents)
    body = contents[_HEAD.size :]
    if (magic, of, experts) != (_MAGIC, key, n):
        raise ValueError("it is of another model or version")
    if zlib.crc32(body) != crc:
        raise ValueError("its checksum is wrong")
    heat = np.frombuffer(body, "<f4").astype(np.float64)
    if not ((heat >= 0) & (heat <= 1)).all():
        raise ValueError("it holds what is no heat")
    return heat


def _write(path: Path, contents: bytes) -> None:
    """Writes a file, mode 0600, at once: a reader finds all of it or the one before. Errors: `OSError`."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=_WRITTEN)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _prune(newest: Path) -> None:
    """Removes the oldest files beyond the limit, those included that daemons which died in writing left."""
    found = []
    for path in newest.parent.iterdir():
        if path.suffix in (_SUFFIX, _WRITTEN):
            with suppress(FileNotFoundError):  # another daemon was faster
                status = path.stat(follow_symlinks=False)
                found.append((path != newest, -status.st_mtime_ns, status.st_size, path))
    total_bytes = 0
    for _, _, size_bytes, path in sorted(found):
        total_bytes += size_bytes
        if total_bytes > TOTAL_BYTES_MAX:
            with suppress(OSError):
                path.unlink()
