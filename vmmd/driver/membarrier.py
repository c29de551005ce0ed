"""membarrier(2): makes every registered process see the daemon's writes to shared pages.

A client publishes its generation with a plain store and then reads a residency
table with plain loads. The daemon writes the table, calls `issue`, and then reads
what clients have published: the kernel puts a full barrier on every CPU that runs
a registered process, so one of the two sees the other.
"""

import ctypes
import platform

_GLOBAL_EXPEDITED = 1 << 1
_REGISTER_GLOBAL_EXPEDITED = 1 << 2
_SYSCALL = {"x86_64": 324, "aarch64": 283}.get(platform.machine())

_libc = ctypes.CDLL(None, use_errno=True)


def register() -> bool:
    """Clients, once at start. False: this kernel or sandbox has no such call."""
    return _call(_REGISTER_GLOBAL_EXPEDITED)


def issue() -> bool:
    """The daemon, between writing and reading; some microseconds, from any thread. False as above."""
    return _call(_GLOBAL_EXPEDITED)


def _call(command: int) -> bool:
    if _SYSCALL is None:
        return False
    result: int = _libc.syscall(ctypes.c_long(_SYSCALL), ctypes.c_int(command), ctypes.c_uint(0), ctypes.c_int(0))
    return result == 0
