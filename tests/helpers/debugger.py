"""Stops a process as a debugger does: every thread of it, by ptrace."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.helpers.daemon import wait_until

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


@contextmanager
def stopped_by_debugger(pid: int) -> Iterator[None]:
    """The process stands still meanwhile; for one thread, which is the debugger. Errors: `OSError`."""
    seen: set[int] = set()
    held: list[int] = []
    try:
        while new := {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - seen:  # begun meanwhile
            seen |= new
            for thread in new:
                with suppress(ProcessLookupError):  # ended meanwhile
                    _ptrace(_SEIZE, thread)
                    held.append(thread)
                    _ptrace(_INTERRUPT, thread)
                    os.waitpid(thread, _WALL)
        yield
    finally:
        for thread in held:
            with suppress(ProcessLookupError):
                _ptrace(_DETACH, thread)


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def state_of(pid: int) -> str:
    """The letter of a process's state: T is stopped, t stopped by a debugger."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def stopped_by_signal(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state_of(pid) == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
