"""Compiles the CUDA kernels with NVRTC.

The result is a cubin, machine code of one architecture, and never PTX, which a driver
older than the compiler could not load. NVRTC needs no GPU. What it made is kept in
``$XDG_CACHE_HOME/strata/kernels`` (``~/.cache/strata/kernels``), named by a hash of all
that went in: a changed source or compiler is a new file, and an old one is never wrong.
Whoever finds all kernels there does without NVRTC, and does not load it.

``python -m strata_kernels.compiler --arch sm_80,sm_90`` compiles every kernel.
"""

import contextlib
import functools
import hashlib
import importlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from strata_kernels import cache
from vmmd.driver.cuda_calls import call
from vmmd.errors import DriverError, InvalidRequest, Unavailable, VmmError

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What continuous integration compiles for. Code for sm_80 runs on sm_86 too, and so on within a first digit."""

OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
HEADERS = ("cuda_fp16.h", "cuda_bf16.h")
COMPILER_PACKAGE, HEADERS_PACKAGE = "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"

_compiling = threading.Lock()
"""NVRTC compiles one program at a time in a process."""

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class CompileError(VmmError):
    """A source does not compile; `log` is all that NVRTC said."""

    reason = "compile_error"

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True)
class KernelReport:
    """What one kernel takes on the GPU, as ptxas reports it."""

    name: str
    registers: int  # a thread
    spill_store_bytes: int  # a thread, as the next two
    spill_load_bytes: int
    stack_bytes: int  # local memory: spills, and arrays that are not indexed by constants
    shared_bytes: int  # a block; what is asked for at launch comes on top


@dataclass(frozen=True)
class Compiled:
    """A source as machine code."""

    source: str
    architecture: str
    cubin: bytes
    log: str
    kernels: tuple[KernelReport, ...]


def kernel_sources() -> tuple[Path, ...]:
    """The ``.cu`` files of this package."""
    return tuple(sorted(SOURCES.glob("*.cu")))


def compile_source(source: Path, architecture: str, types: Sequence[str] | None = None) -> Compiled:
    """Compiles one ``.cu`` file, or takes what an earlier call compiled.

    Any thread and process may call it at the same time as any other: at worst two processes compile the same.

    Args:
        source: the file. What it includes with quotes lies beside it, or else beside the product's kernels.
        architecture: like "sm_90".
        types: tensor types that it must know, like "Q4_K", in any order; None for all. Ignored for a source that
            reads no tensors by type.

    Errors: `CompileError` with NVRTC's log; `Unavailable`, which names what is not installed;
    `InvalidRequest` for another kind of architecture or type.
    """
    if not re.fullmatch(r"sm_\d+[af]?", architecture):
        raise InvalidRequest(f'architecture {architecture!r}: give one like "sm_90"')
    texts = _with_includes(source)
    macros = types_macro(types)
    if not any(b"STRATA_TYPES" in text for text in texts.values()):
        macros = ()
    options = (*OPTIONS, f"--gpu-architecture={architecture}", *(f"-D{macro}" for macro in macros))
    key = _digest(
        *(part for name, text in texts.items() for part in (name.encode(), text)),
        *(option.encode() for option in options),
        *_toolchain(),
    )
    directory = cache_directory()
    found = _load(directory, key)
    if found is None:
        with _compiling:
            found = _load(directory, key)  # another thread may have compiled it meanwhile, for another GPU
            if found is None:
                nvrtc, _ = _nvrtc()
                options = (*options, f"--include-path={include_directory()}")
                found = _compile(nvrtc, source.name, texts, options, architecture)
                _keep(directory, key, *found)
    cubin, log = found
    return Compiled(source.stem, architecture, cubin, log, parse_report(log))


def types_macro(types: Sequence[str] | None) -> tuple[str, ...]:
    """The definition that `cuda/types.cuh` reads, for `-D`; none for all types. Errors: `InvalidRequest`."""
    if types is None:
        return ()
    for name in types:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise InvalidRequest(f'tensor type {name!r}: give one like "Q4_K"')
    return (f"STRATA_TYPES={' '.join(f'X({name})' for name in sorted(set(types)))}",)


def compile_all(
    sources: Sequence[Path],
    architectures: Sequence[str],
    workers: int | None = None,
    types: Sequence[str] | None = None,
) -> Iterator[Compiled]:
    """Every source for every architecture, in that order; `types` as `compile_source` takes them.

    In processes, since NVRTC compiles one program at a time in each; `workers` of them, by default one
    for each processor. Errors: as `compile_source`, at the first that fails.
    """
    work = [(source, architecture, types) for source in sources for architecture in architectures]
    n = min(workers or os.cpu_count() or 1, len(work))
    if n < 2:
        yield from (compile_source(*item) for item in work)
        return
    import multiprocessing  # slow to import, and whoever takes kept kernels does without
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compile_source, *zip(*work, strict=True))


def parse_report(log: str) -> tuple[KernelReport, ...]:
    """The kernels in a log of NVRTC with ``--ptxas-options=-v``, by name.

    Spills of functions that were not inlined count for the kernel they were compiled with.
    """
    reports = []
    for part in re.split(r"(?=^.*Compiling entry function)", log, flags=re.MULTILINE):
        entry, used = _ENTRY.search(part), _USED.search(part)
        if entry is None or used is None:
            continue
        frames = [tuple(map(int, numbers)) for numbers in _SPILLS.findall(part)]
        stack, stores, loads = (sum(column) for column in zip(*frames, strict=True)) if frames else (0, 0, 0)
        shared = _SHARED.search(part)
        reports.append(
            KernelReport(entry[1], int(used[1]), stores, loads, stack, int(shared[1]) if shared is not None else 0)
        )
    return tuple(sorted(reports, key=lambda report: report.name))


def missing_features() -> list[str]:
    """What this host lacks for compiling, by name; empty where it can."""
    try:
        _nvrtc()
        include_directory()
    except Unavailable as error:
        return [error.message]
    return []


def include_directory() -> Path:
    """Where CUDA's headers are: those of the installed package, else of ``$CUDA_HOME``. Errors: `Unavailable`."""
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.files(HEADERS_PACKAGE) or ():
            if file.name == HEADERS[0] and (path := Path(str(file.locate()))).is_file():
                return path.parent.resolve()
    home = os.environ.get("CUDA_HOME")
    if home and (directory := Path(home) / "include").joinpath(HEADERS[0]).is_file():
        return directory
    raise Unavailable(
        f"CUDA's headers ({', '.join(HEADERS)}); install strata-vmm[cuda], or set CUDA_HOME to a CUDA toolkit"
    )


def cache_directory() -> Path | None:
    """Where cubins are kept; None where no such place is known. It may not exist or not be writable."""
    return cache.cache_directory("kernels")


def _nvrtc() -> tuple[Any, str]:
    """``cuda.bindings.nvrtc`` and the compiler's version. Errors: `Unavailable`."""
    from importlib import metadata

    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        version = ".".join(map(str, call(nvrtc.nvrtcVersion)))
    except ImportError as error:
        raise Unavailable(f"the Python package cuda-bindings ({error}); install strata-vmm[cuda]") from error
    except RuntimeError as error:  # what the bindings raise where there is no library
        raise Unavailable("CUDA's run-time compiler, libnvrtc; install strata-vmm[cuda]") from error
    with contextlib.suppress(metadata.PackageNotFoundError):  # NVRTC itself does not tell its patch level
        version += f" ({metadata.version(COMPILER_PACKAGE)})"
    return nvrtc, version


def _toolchain() -> tuple[bytes, ...]:
    """What tells the compiler and CUDA's headers from all others. Errors: `Unavailable`.

    Where both are installed as packages these are the packages' names with their versions, which a look into the
    folders of modules tells. Asking the compiler and reading the headers takes a tenth of a second.
    """
    packages = tuple(_installed(package, tuple(sys.path)) for package in (COMPILER_PACKAGE, HEADERS_PACKAGE))
    if all(packages):
        return packages
    _, version = _nvrtc()
    include = include_directory()
    return version.encode(), *(header.read_bytes() for name in HEADERS if (header := include / name).is_file())


@functools.cache
def _installed(package: str, folders: tuple[str, ...]) -> bytes:
    """Name and version of a package in folders of modules, as its folder of metadata has them; empty if none has."""
    start = f"{package.replace('-', '_')}-"
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or os.curdir):
                if name.startswith(start) and name.endswith(".dist-info"):
                    return name.encode()
    return b""


def _with_includes(source: Path) -> dict[str, bytes]:
    """A source and all that it includes with quotes, by name; the source comes first.

    What is included lies beside the source, or else beside the product's kernels.

    NVRTC is given these very bytes, so that the hash is of what was compiled even while files change.
    """
    texts: dict[str, bytes] = {}
    names = [source.name]
    while names:
        name = names.pop()
        path = next((path for folder in (source.parent, SOURCES) if (path := folder / name).is_file()), None)
        if name not in texts and path is not None:
            texts[name] = path.read_bytes()
            names += _INCLUDE.findall(texts[name].decode())
    return texts


def _compile(
    nvrtc: Any, name: str, texts: dict[str, bytes], options: Sequence[str], architecture: str
) -> tuple[bytes, str]:
    """The cubin and the log."""
    source, *includes = texts.items()
    program = call(
        nvrtc.nvrtcCreateProgram,
        source[1],
        name.encode(),
        len(includes),
        [text for _, text in includes],
        [included.encode() for included, _ in includes],
    )
    try:
        try:
            call(nvrtc.nvrtcCompileProgram, program, len(options), [option.encode() for option in options])
        except DriverError as error:
            log = _log(nvrtc, program)
            first = next((line for line in log.splitlines() if "error" in line), error.name)
            raise CompileError(f"{name} does not compile for {architecture}: {first}", log) from error
        return _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), _log(nvrtc, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(nvrtc: Any, program: Any) -> str:
    log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    return log.rstrip(b"\0").decode(errors="replace")


def _output(size: Any, get: Any, program: Any) -> bytes:
    """What `get` writes into a buffer of `size` bytes."""
    buffer = bytearray(call(size, program))
    call(get, program, buffer)
    return bytes(buffer)


def _digest(*parts: bytes) -> str:
    """One hash of several byte strings; moving bytes from one to the next changes it."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _load(directory: Path | None, key: str) -> tuple[bytes, str] | None:
    """A kept cubin and its log; None unless both are there and whole."""
    if directory is None:
        return None
    try:
        cubin = (directory / f"{key}.cubin").read_bytes()
        log = (directory / f"{key}.log").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    # A host that lost power may keep a renamed file without its contents.
    return (cubin, log) if cubin.startswith(b"\x7fELF") and parse_report(log) else None


def _keep(directory: Path | None, key: str, cubin: bytes, log: str) -> None:
    """Keeps a cubin and its log where that is possible."""
    if directory is None:
        return
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        cache.write_at_once(directory / f"{key}.log", log.encode())
        cache.write_at_once(directory / f"{key}.cubin", cubin)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--arch", default=",".join(ARCHITECTURES), show_default=True, help="Architectures, with commas between.")
@click.option("--report", is_flag=True, help="Show what each kernel takes: registers, spills, local and shared memory.")
def cli(arch: str, report: bool) -> None:
    """Compiles every kernel for the architectures, and keeps the machine code for later."""
    for compiled in compile_all(kernel_sources(), arch.split(",")):
        click.echo(
            f"{compiled.source} for {compiled.architecture}: {len(compiled.kernels)} kernels, "
            f"{len(compiled.cubin)} bytes"
        )
        if not report:
            continue
        click.echo(
            f"  {'kernel':24} {'registers':>9} {'spill stores':>12} {'spill loads':>11} {'stack':>6} {'shared':>6}"
        )
        for kernel in compiled.kernels:
            click.echo(
                f"  {kernel.name:24} {kernel.registers:9} {kernel.spill_store_bytes:12} {kernel.spill_load_bytes:11} "
                f"{kernel.stack_bytes:6} {kernel.shared_bytes:6}"
            )


def main() -> None:
    """Runs the command line; an error goes to standard error, a compile error with NVRTC's log."""
    try:
        cli()
    except VmmError as error:
        click.echo(f"strata_kernels.compiler: {error.message}", err=True)
        if isinstance(error, CompileError):
            click.echo(error.log, err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
