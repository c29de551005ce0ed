"""The compiler of the CUDA kernels: what it compiles, what it keeps and what it says."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from strata_kernels import compiler
from strata_kernels.compiler import CompileError, KernelReport, compile_all, compile_source, kernel_sources

from tests.helpers.tensor_blocks import KINDS
from vmmd.errors import InvalidRequest, Unavailable

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tile' for 'sm_90'
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for tile
ptxas         .     256 bytes stack frame, 32 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 256 bytes cumulative stack size, 49152 bytes smem
ptxas info    : Compile time = 2.249 ms
ptxas info    : Compiling entry function 'copy' for 'sm_90'
ptxas info    : Function properties for copy
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
ptxas info    : Compile time = 1.002 ms
"""

CUBIN = b"\x7fELF and the rest"

INSTALLED = compiler._installed

SOURCE = '#include "scale.cuh"\nextern "C" __global__ void copy(float* x) { x[0] = SCALE; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "strata" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source that includes a file beside it."""
    (tmp_path / "scale.cuh").write_text("#define SCALE 2.0f\n")
    path = tmp_path / "copy.cu"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Stands in for NVRTC; lists the architectures that it was asked for."""
    asked: list[str] = []

    def fake(nvrtc: Any, name: str, texts: Any, options: Any, architecture: str) -> tuple[bytes, str]:
        asked.append(architecture)
        return CUBIN, LOG

    monkeypatch.setattr(compiler, "_compile", fake)
    monkeypatch.setattr(compiler, "_nvrtc", lambda: (None, "13.0"))
    monkeypatch.setattr(compiler, "_installed", lambda package, folders: b"")
    monkeypatch.setattr(compiler, "include_directory", lambda: tmp_path)
    yield asked


@pytest.fixture
def nvrtc() -> None:
    """Skips where kernels cannot be compiled, by what is missing; fails instead with STRATA_REQUIRE_NVRTC=1."""
    if missing := compiler.missing_features():
        reason = f"kernels cannot be compiled here; missing: {'; '.join(missing)}"
        if os.environ.get("STRATA_REQUIRE_NVRTC") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


ONE_MODEL = ("F32", "Q4_K", "Q6_K")
"""Tensor types of a usual model."""

DECODE = ("attend", "batch", "decode", "sample")
"""Sources of which the kernels of a decode step come, by their names' beginnings."""


@pytest.mark.timeout(1200)
def test_every_kernel_compiles_for_every_architecture(nvrtc: None, cache: Path) -> None:
    """All sources become machine code without a warning; on sm_90 the kernels of a decode step never spill."""
    results = list(compile_all(kernel_sources(), compiler.ARCHITECTURES, types=ONE_MODEL))
    assert [(result.source, result.architecture) for result in results] == [
        (path.stem, architecture) for path in kernel_sources() for architecture in compiler.ARCHITECTURES
    ]
    for result in results:
        assert result.cubin.startswith(b"\x7fELF") and b".target sm_" not in result.cubin
        assert "warning" not in result.log
        declared = re.findall(rb"\.text\.(\w+)", result.cubin)
        assert {kernel.name.encode() for kernel in result.kernels} == set(declared)
        for kernel in result.kernels:
            assert 0 < kernel.registers <= 255
            if result.architecture == "sm_90" and result.source.startswith(DECODE):
                assert kernel.spill_store_bytes == kernel.spill_load_bytes == 0, kernel
    names = {kernel.name for result in results for kernel in result.kernels}
    assert names >= {f"dequantize_{kind.name}" for kind in KINDS}


def test_compile_error_has_the_log(nvrtc: None, cache: Path, source: Path) -> None:
    """A source that does not compile raises one error with all that NVRTC said, and is not kept."""
    (source.parent / "scale.cuh").write_text("#define SCALE unknown + other\n")
    with pytest.raises(CompileError, match=r"copy\.cu does not compile for sm_90: .*unknown") as caught:
        compile_source(source, "sm_90")
    assert '"unknown" is undefined' in caught.value.log and '"other" is undefined' in caught.value.log
    assert not cache.exists()


def test_architecture_that_the_compiler_does_not_know(nvrtc: None, cache: Path, source: Path) -> None:
    """An architecture that NVRTC does not know is a compile error too."""
    with pytest.raises(CompileError, match="gpu-architecture"):
        compile_source(source, "sm_79")


def test_concurrent_compilers(nvrtc: None, cache: Path, source: Path) -> None:
    """Several processes that compile the same at the same time all succeed and leave whole files alone."""
    results = list(compile_all([source] * 4, ["sm_90"], workers=4))
    assert len({result.cubin for result in results}) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".cubin", ".log"]
    assert next(cache.glob("*.cubin")).read_bytes() == results[0].cubin


def test_kept_cubin_is_taken(compiled: list[str], cache: Path, source: Path) -> None:
    """The second call compiles nothing and gives the same."""
    first = compile_source(source, "sm_90")
    assert compile_source(source, "sm_90") == first
    assert first.cubin == CUBIN and first.source == "copy"
    assert compiled == ["sm_90"]


def test_threads_compile_once(compiled: list[str], cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that find nothing kept, as for the two GPUs of a split model, one compiles."""
    both, load, looked = threading.Barrier(2), compiler._load, threading.local()

    def load_together(directory: Path | None, key: str) -> Any:
        found = load(directory, key)
        if not hasattr(looked, "once"):
            looked.once = both.wait(10)
        return found

    monkeypatch.setattr(compiler, "_load", load_together)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(compile_source, [source] * 2, ["sm_90"] * 2)
    assert first == second
    assert compiled == ["sm_90"]


def test_changes_compile_again(compiled: list[str], cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another architecture, source, include, header or compiler is compiled; the old results stay."""
    compile_source(source, "sm_90")
    compile_source(source, "sm_80")
    source.write_text(SOURCE + "// changed\n")
    compile_source(source, "sm_80")
    (source.parent / "scale.cuh").write_text("#define SCALE 3.0f\n")
    compile_source(source, "sm_80")
    (source.parent / compiler.HEADERS[0]).write_text("// another release\n")
    compile_source(source, "sm_80")
    monkeypatch.setattr(compiler, "_nvrtc", lambda: (None, "13.1"))
    compile_source(source, "sm_80")
    assert len(compiled) == len(list(cache.glob("*.cubin"))) == 6


def test_installed_compiler_is_not_loaded_for_kept_kernels(
    compiled: list[str], cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions of the installed packages tell what to take; other ones are compiled with again."""
    monkeypatch.setattr(compiler, "_installed", INSTALLED)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "missing"), str(tmp_path / "site")])
    names = ["nvidia_cuda_nvrtc-13.0.88.dist-info", "nvidia_cuda_runtime-13.0.96.dist-info"]
    for name in names:
        (tmp_path / "site" / name).mkdir(parents=True)
    first = compile_source(source, "sm_90")

    def fail() -> None:
        raise AssertionError("NVRTC was loaded")

    with monkeypatch.context() as without:
        without.setattr(compiler, "_nvrtc", fail)
        without.setattr(compiler, "include_directory", fail)
        assert compile_source(source, "sm_90") == first
    for name in names:
        (tmp_path / "site" / name).rename(tmp_path / "site" / name.replace("13.0.", "13.1."))
        INSTALLED.cache_clear()
        compile_source(source, "sm_90")
    assert len(compiled) == 3


def test_types(compiled: list[str], cache: Path, source: Path) -> None:
    """Other types are compiled anew where the source reads by type, whatever their order; a wrong name is refused."""
    for types in (None, ["Q4_K"], ["F32"]):
        compile_source(source, "sm_90", types)
    assert len(compiled) == 1
    source.write_text(SOURCE + "STRATA_TYPES\n")
    for types in (None, ["Q4_K", "F32"], ["F32", "Q4_K", "F32"], ["Q4_K"]):
        compile_source(source, "sm_90", types)
    assert len(compiled) == 4
    assert compiler.types_macro(["Q4_K", "F32"]) == ("STRATA_TYPES=X(F32) X(Q4_K)",)
    with pytest.raises(InvalidRequest, match="tensor type"):
        compile_source(source, "sm_90", ["Q4_K) X(F32"])


def test_compiled_for_types(nvrtc: None, cache: Path, source: Path) -> None:
    """The compiler sees exactly the types asked for."""
    source.write_text(
        "#define X(name) int has_##name;\nstruct Has { STRATA_TYPES };\n"
        'extern "C" __global__ void copy(Has* has) { has->has_F32 = has->has_Q4_K; }\n'
    )
    assert compile_source(source, "sm_90", ["Q4_K", "F32"]).kernels
    with pytest.raises(CompileError, match="has_F32"):
        compile_source(source, "sm_90", ["Q4_K"])


def test_include_of_an_include_counts(compiled: list[str], cache: Path, source: Path) -> None:
    """What an included file includes is part of the hash; files that include each other end."""
    (source.parent / "scale.cuh").write_text('#include "more.cuh"\n')
    for text in ("#define SCALE 1.0f", '#include "scale.cuh"'):
        (source.parent / "more.cuh").write_text(text)
        compile_source(source, "sm_90")
    assert len(compiled) == 2


@pytest.mark.parametrize("damage", ["empty cubin", "no log", "empty log"])
def test_damaged_cache_is_compiled_again(compiled: list[str], cache: Path, source: Path, damage: str) -> None:
    """A kept file that is missing, or empty after a crash of the host, is made again."""
    compile_source(source, "sm_90")
    what, suffix = damage.split()
    path = next(cache.glob(f"*.{suffix}"))
    path.unlink()
    if what == "empty":
        path.touch()
    assert compile_source(source, "sm_90").cubin == CUBIN
    assert len(compiled) == 2
    compile_source(source, "sm_90")
    assert len(compiled) == 2


def test_unwritable_cache_is_left_out(
    compiled: list[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache cannot be written, everything is compiled and nothing is said."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(source))  # a file: nothing can be below it, not even for root
    for _ in range(2):
        assert compile_source(source, "sm_90").cubin == CUBIN
    assert len(compiled) == 2


def test_failed_write_leaves_nothing(
    compiled: list[str], cache: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that cannot be renamed into, or is full, keeps no temporary files."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    assert compile_source(source, "sm_90").cubin == CUBIN
    assert list(cache.iterdir()) == []


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is below XDG_CACHE_HOME where that is an absolute path, else below the home directory."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert compiler.cache_directory() == Path("/elsewhere/strata/kernels")
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert compiler.cache_directory() == Path("/home/someone/.cache/strata/kernels")


def test_report() -> None:
    """Registers, spills, local and shared memory of each kernel are read from ptxas's report."""
    assert compiler.parse_report(LOG) == (
        KernelReport("copy", 8, 0, 0, 0, 0),
        KernelReport("tile", 255, 40, 52, 272, 49152),
    )
    assert compiler.parse_report("") == ()


@pytest.mark.parametrize("architecture", ["compute_90", "sm_", "90", "sm_90 --fmad=false"])
def test_only_machine_code(architecture: str, source: Path) -> None:
    """An architecture that would give PTX, or none, is refused."""
    with pytest.raises(InvalidRequest, match="give one like"):
        compile_source(source, architecture)


def test_headers_of_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the headers are those below CUDA_HOME, and without both the error says what to do."""
    monkeypatch.setattr(compiler, "HEADERS_PACKAGE", "no-such-package")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(Unavailable, match=r"strata-vmm\[cuda\]"):
        compiler.include_directory()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / compiler.HEADERS[0]).touch()
    assert compiler.include_directory() == tmp_path / "include"


@pytest.mark.timeout(1200)
def test_command_line(nvrtc: None, cache: Path) -> None:
    """The command compiles all kernels for the architectures given and reports on them; errors are one line.

    Without a model's types, they know every type: that too gives no warning.
    """
    command = [sys.executable, "-m", "strata_kernels.compiler", "--arch"]
    done = subprocess.run([*command, "sm_90", "--report"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"^dequantize for sm_90: \d+ kernels, \d+ bytes$", done.stdout, re.MULTILINE)
    assert re.search(r"^  dequantize_IQ3_S +\d+ +0 +0 +0 +0$", done.stdout, re.MULTILINE)
    kept = len(list(cache.iterdir()))
    for result in compile_all(kernel_sources(), ["sm_90"]):
        assert result.kernels and "warning" not in result.log
    assert len(list(cache.iterdir())) == kept == 2 * len(kernel_sources())
    refused = subprocess.run([*command, "sm90"], capture_output=True, text=True)
    assert refused.returncode == 1 and refused.stdout == ""
    assert refused.stderr == "strata_kernels.compiler: architecture 'sm90': give one like \"sm_90\"\n"
