"""Model files that clients lend: checked, identified, read with `pread` only."""

import fcntl
import hashlib
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from vmmd.errors import InvalidRequest, StaleGeneration

_SAMPLES = 16
_SAMPLE_BYTES = 4096


class FileIdentity(NamedTuple):
    """What makes two descriptors the same unchanged file."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    digest: str  # of sampled blocks


def check_descriptor(fd: int) -> None:
    """Refuses what is not a regular file opened read-only. Errors: `InvalidRequest`."""
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        raise InvalidRequest("a model file must be a regular file; a pipe, device or directory was sent")
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_PATH:
        raise InvalidRequest("a model file must be opened read-only; the descriptor that was sent is not")


def identify(fd: int) -> FileIdentity:
    """The identity of a file now; reads about 64 KiB. Errors: `OSError`."""
    s = os.fstat(fd)
    digest = hashlib.sha256()
    step = max(1, s.st_size // _SAMPLES)
    for offset in range(0, s.st_size, step):
        digest.update(os.pread(fd, _SAMPLE_BYTES, offset))
    digest.update(os.pread(fd, _SAMPLE_BYTES, max(0, s.st_size - _SAMPLE_BYTES)))
    return FileIdentity(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns, digest.hexdigest())


def check_unchanged(fds: Sequence[int], identities: Sequence[FileIdentity]) -> None:
    """Refuses files that were written, cut or extended since. Errors: `StaleGeneration`."""
    for i, (fd, was) in enumerate(zip(fds, identities, strict=True)):
        s = os.fstat(fd)
        if (s.st_size, s.st_mtime_ns, s.st_ctime_ns) != (was.size_bytes, was.mtime_ns, was.ctime_ns):
            raise StaleGeneration(
                f"file {i + 1} of the model changed while it was read"
                f" ({was.size_bytes} bytes when opened, {s.st_size} now); open the model again"
            )
