"""Runs CUDA kernels on the host: the same sources, compiled by g++, a fiber for each thread of a block.

`HostKernels.compile` makes a library of a ``.cu`` file and `HostKernels.launch` runs one of its kernels over the
memory of numpy arrays. What a GPU leaves undefined is an error here where it is noticed: barriers and warp
operations that some thread never reaches, misaligned accesses, reads and writes beyond `GuardedMemory`, undefined
shifts. Shared memory holds NaNs at the start of each block, and so does what `copy_async` writes until it is waited
for.

Within `watching`, or with STRATA_WATCH=1, every access is watched (``watch.h``): accesses to shared memory that no
barrier orders, to what another block wrote, and, of a kernel that may start early, before it waits are errors. That
takes some times as long.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import math
import mmap
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from strata_kernels.compiler import SOURCES, cache_directory, types_macro
from strata_kernels.launch import Dimensions, as_value, dimensions

HERE = Path(__file__).parent
POISON = 0xFF  # the byte that memory holds before it is written: NaN as float32, float16 and bfloat16

# A misaligned load, an index out of bounds or an undefined shift ends the launch.
_CHECKS = ("-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error")
_WARNINGS = (
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
    "-Wno-sign-compare",
    "-Wno-maybe-uninitialized",
    "-Wno-attributes",
)
_OPTIONS = (
    *("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-fno-strict-aliasing", "-fno-math-errno", "-fcf-protection=none", "-DSTRATA_HOST", "-U_FORTIFY_SOURCE"),
)
_WATCH = (
    *("-DSTRATA_WATCH", "-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"),
    "-fno-threadsafe-statics",  # their guards would be atomics of the sanitizer's library
)
_KERNEL = re.compile(
    r'extern\s+"C"\s+__attribute__\s*\(\(visibility\("default"\)\)\)\s+(?:static\s+)?void\s+(\w+)\s*\('
)
_MAKERS = "\n".join(
    f'extern "C" __attribute__((visibility("default"))) void* strata_make_{what}() '
    f"{{ return strata_host::make_{what}(); }}"
    for what in ("stacks", "history")
)

_thread = threading.local()
_watches = os.environ.get("STRATA_WATCH") == "1"


class HostKernelError(Exception):
    """A kernel cannot be compiled or run; the message says which thread, and what."""


class _Shape(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("seconds", ctypes.c_uint32),
        ("stacks", ctypes.c_void_p),
        ("history", ctypes.c_void_p),
        ("number", ctypes.c_uint32),
        ("before", ctypes.c_uint32),
    )


class _Failure(ctypes.Structure):
    _fields_ = (
        ("message", ctypes.c_char_p),
        ("address", ctypes.c_size_t),
        ("code", ctypes.c_size_t),
        ("other", ctypes.c_size_t),
    )


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Watches the accesses of kernels that are compiled meanwhile."""
    global _watches
    before, _watches = _watches, True
    try:
        yield
    finally:
        _watches = before


def require_host_compiler() -> None:
    """Skips a test where kernels cannot be compiled for the host; fails instead with STRATA_REQUIRE_HOST_COMPILER=1."""
    if shutil.which("g++"):
        return
    reason = "kernels cannot run on this host; missing: the host compiler g++"
    if os.environ.get("STRATA_REQUIRE_HOST_COMPILER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class HostKernels:
    """The kernels of one source, on the host. Launches run in the calling thread, one at a time."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._path = path
        self._library = ctypes.CDLL(str(path))
        self._parameters: dict[str, list[int]] = {}
        for name in names:
            sizes = (ctypes.c_uint32 * 64)()
            n = getattr(self._library, f"strata_describe_{name}")(sizes, len(sizes))
            self._parameters[name] = list(sizes[:n])

    @property
    def names(self) -> tuple[str, ...]:
        """The ``extern "C"`` kernels of the source."""
        return tuple(self._parameters)

    @classmethod
    def compile(cls, source: Path, types: Sequence[str] | None = None, contracted: bool = False) -> "HostKernels":
        """Compiles a ``.cu`` file, or takes what was compiled before from the same text.

        Args:
            source: the file. What it includes with quotes lies beside it or beside the product's kernels.
            types: tensor types, as for `strata_kernels.compiler.compile_source`.
            contracted: products and sums become one operation, rounded once, where the compiler can.

        Errors: `HostKernelError` with the compiler's messages.
        """
        options = [*_OPTIONS, *_CHECKS, *_WARNINGS, *_contraction(contracted)]
        options += [f"-D{macro}" for macro in types_macro(types)]
        options += _WATCH if _watches else ()
        return _compiled(source, tuple(options), _stamp(source))

    def launch(
        self,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int = 0,
        seconds: int = 120,
        before: int = 0,
    ) -> int:
        """Runs a kernel to its end.

        Args:
            name: of the kernel.
            grid: blocks; one number or up to three.
            block: threads of a block, the same.
            args: what `strata_kernels.launch.as_value` takes; arrays become their addresses.
            shared_bytes: of dynamic shared memory.
            seconds: of the processor's time that it may take.
            before: what the launch of a kernel returned that may not have ended before this one waits for it, or 0.

        Returns:
            The launch's number, of those of this thread.

        Errors: `HostKernelError`.
        """
        if name not in self._parameters:
            raise HostKernelError(f"no kernel {name}; there are {', '.join(self.names)}")
        values = [as_value(arg) for arg in args]
        sizes = [ctypes.sizeof(value) for value in values]
        if sizes != self._parameters[name]:
            raise HostKernelError(f"{name} takes arguments of {self._parameters[name]} bytes; these have {sizes}")
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        _thread.number = number = getattr(_thread, "number", 0) + 1
        stacks, history = self._made("stacks"), self._made("history")
        shape = _Shape(dimensions(grid), dimensions(block), shared_bytes, seconds, stacks, history, number, before)
        failure = _Failure()
        if getattr(self._library, f"strata_launch_{name}")(ctypes.byref(shape), pointers, ctypes.byref(failure)):
            message = f"{name}: {failure.message.decode(errors='replace')}"
            if failure.address:
                message += f"; {GuardedMemory.describe(failure.address)}"
            if failure.code:
                message += f"; at {self._line(failure.code)}"
            if failure.other:
                message += f"; before at {self._line(failure.other)}"
            raise HostKernelError(message)
        return number

    def _made(self, what: str) -> int:
        """The calling thread's stacks for a block, or history of accesses, whichever library's."""
        if not hasattr(_thread, what):
            make = getattr(self._library, f"strata_make_{what}")
            make.restype = ctypes.c_void_p
            setattr(_thread, what, make())
        return int(getattr(_thread, what))

    def _line(self, code: int) -> str:
        """Where an address in the library comes from, the innermost function first."""
        command = ["addr2line", "-i", "-s", "-e", str(self._path), hex(code)]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            return " in ".join(done.stdout.split("\n")[:-1])
        return hex(code)


class GuardedMemory:
    """Memory that ends where an inaccessible page begins, aligned to 16 bytes; full of `POISON` at first.

    Up to 15 bytes at its end and what lies before it in its first page stay free: `check` finds what was written there.
    """

    _all: ClassVar["weakref.WeakSet[GuardedMemory]"] = weakref.WeakSet()

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        page = mmap.PAGESIZE
        inner = max(1, math.ceil((size_bytes + 16) / page)) * page
        self._map = mmap.mmap(-1, inner + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(self._map, np.uint8)
        base = self._bytes.ctypes.data
        for guard in (base, base + page + inner):
            if _libc().mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self._inner = self._bytes[page : page + inner]
        self._inner[:] = POISON
        self._first = inner - (size_bytes + 15) // 16 * 16
        self.array = self._inner[self._first : self._first + size_bytes]
        """The memory, uint8."""
        self.address = base + page + self._first
        GuardedMemory._all.add(self)

    def close(self) -> None:
        """Gives the memory back once nothing views it."""
        GuardedMemory._all.discard(self)

    def check(self) -> None:
        """Errors: `HostKernelError` where something was written just before or behind it."""
        for what, part in (
            ("before", self._inner[max(0, self._first - 256) : self._first]),
            ("behind", self._inner[self._first + self.size_bytes :]),
        ):
            if part.size and not np.all(part == POISON):
                raise HostKernelError(f"written just {what} a buffer of {self.size_bytes} bytes")

    @classmethod
    def describe(cls, address: int) -> str:
        """An address, by the nearest buffer."""
        buffers = list(cls._all)
        if not buffers:
            return f"address 0x{address:x}"
        nearest = min(buffers, key=lambda b: min(abs(address - b.address), abs(address - b.address - b.size_bytes)))
        offset = address - nearest.address
        if abs(offset) > nearest.size_bytes + (1 << 24):
            return f"address 0x{address:x}"
        return f"address 0x{address:x}, byte {offset} of a buffer of {nearest.size_bytes}"


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _contraction(contracted: bool) -> list[str]:
    if not contracted:
        return ["-ffp-contract=off"]
    if platform.machine() == "x86_64":
        if not can_contract():
            raise HostKernelError("this processor has no fused multiply-add")
        return ["-ffp-contract=fast", "-mfma"]
    return ["-ffp-contract=fast"]


def can_contract() -> bool:
    """Whether this processor multiplies and adds in one operation."""
    return platform.machine() != "x86_64" or " fma " in Path("/proc/cpuinfo").read_text()


def _stamp(source: Path) -> tuple[tuple[str, int], ...]:
    """Changes with what a source may include."""
    files = sorted({source, *source.parent.glob("*.cuh"), *SOURCES.glob("*.cuh"), *HERE.glob("*.h")})
    return tuple((str(file), file.stat().st_mtime_ns) for file in files)


@functools.lru_cache(maxsize=64)
def _compiled(source: Path, options: tuple[str, ...], stamp: tuple[tuple[str, int], ...]) -> HostKernels:
    """Preprocesses, finds the kernels, adds for each what launches it, compiles."""
    command = ["g++", *options, f"-I{HERE}", f"-I{source.parent}", f"-I{SOURCES}", "-include", "cuda_host.h"]
    text = _run([*command, "-E", "-x", "c++", str(source)])
    names = tuple(dict.fromkeys(_KERNEL.findall(text)))
    entries = "\n".join(
        f'extern "C" __attribute__((visibility("default"))) int strata_{what}_{name}({parameters}) {{ '
        f"return strata_host::Entry<&{name}>::{what}({arguments}); }}"
        for name in names
        for what, parameters, arguments in (
            ("launch", "const strata_host::Shape* s, void** a, strata_host::Failure* f", "s, a, f"),
            ("describe", "unsigned* s, int n", "s, n"),
        )
    )
    return HostKernels(_built(f"{text}\n{entries}\n{_MAKERS}\n", options), names)


def _built(text: str, options: tuple[str, ...]) -> Path:
    """The library of a preprocessed source, compiled where it was not kept."""
    directory = _cache()
    key = hashlib.sha256("\0".join((text, *options, _compiler_version())).encode()).hexdigest()[:32]
    path = directory / f"{key}.so"
    with open(directory / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes want the same: one of them compiles
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=directory) as work:
                source = Path(work) / "kernels.ii"
                source.write_text(text)
                _run(["g++", *options, "-c", str(source), "-o", f"{work}/kernels.o"])
                # without the options: they would add a sanitizer's own library
                _run(["g++", "-shared", f"{work}/kernels.o", "-o", f"{work}/kernels.so"])
                os.replace(f"{work}/kernels.so", path)
    return path


@functools.cache
def _cache() -> Path:
    base = cache_directory()
    for path in (base.parent / "cuda_host" if base else None, Path(tempfile.gettempdir()) / f"strata-{os.getuid()}"):
        with contextlib.suppress(OSError):
            if path is not None:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK):
                    return path
    return Path(tempfile.mkdtemp(prefix="strata-"))


@functools.cache
def _compiler_version() -> str:
    return _run(["g++", "--version"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode != 0:
        raise HostKernelError(f"{command[0]} failed:\n{done.stderr[-6000:]}")
    return done.stdout
