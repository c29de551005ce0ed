"""The CUDA dequantization, compiled for the host: the same source, on one thread."""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from strata_kernels import reference
from strata_kernels.compiler import SOURCES
from strata_kernels.cuda import iq_grids

from tests.helpers.tensor_blocks import KINDS, expected, random_blocks

HOST = Path(__file__).parents[1] / "helpers" / "cuda_host"
N_BLOCKS = 4096  # a multiple of the page's bytes, so that blocks of any size fill whole pages

# A misaligned load, an index out of bounds or an undefined shift ends the program.
CHECKS = ("-fsanitize=alignment,bounds,shift", "-fsanitize-undefined-trap-on-error")


def contraction_flags() -> list[str]:
    """How to have products and sums contracted. Skips where the processor cannot."""
    if platform.machine() == "x86_64":
        if " fma " not in Path("/proc/cpuinfo").read_text():
            pytest.skip("this processor has no fused multiply-add")
        return ["-ffp-contract=fast", "-mfma"]
    return ["-ffp-contract=fast"]


@pytest.fixture(scope="module", params=["separate", "contracted"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels as a program, with each product rounded, and with products and sums contracted."""
    if shutil.which("g++") is None:
        pytest.skip("the host compiler g++ is not installed")
    contraction = contraction_flags() if request.param == "contracted" else ["-ffp-contract=off"]
    path = tmp_path_factory.mktemp("cuda") / "dequantize"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]
    command = ["g++", "-std=c++17", "-O2", "-fno-strict-aliasing", "-rdynamic", *warnings, *CHECKS, *contraction]
    command += [f"-I{HOST}", f"-I{SOURCES}", str(HOST / "dequantize_main.cpp"), "-o", str(path), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantize_is_exact(program: Path, kind: GGMLQuantizationType) -> None:
    """Each type's values are those of the gguf package, bit for bit, from aligned loads inside the blocks."""
    blocks = random_blocks(kind, N_BLOCKS)
    wanted = expected(blocks, kind)
    command = [str(program), f"dequantize_{kind.name}", str(blocks.size), str(wanted.size)]
    done = subprocess.run(command, input=blocks.tobytes(), capture_output=True)
    assert done.returncode == 0
    assert np.array_equal(np.frombuffer(done.stdout, np.uint32), wanted)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_reference_agrees(kind: GGMLQuantizationType) -> None:
    """The numpy function that the kernels name gives the same bits."""
    blocks = random_blocks(kind, 256, seed=1)
    with np.errstate(all="ignore"):
        ours = reference.dequantize(blocks, kind).reshape(-1).view(np.uint32)
    assert np.array_equal(ours, expected(blocks, kind))


def test_random_blocks_cover_all_bytes() -> None:
    """The blocks of these tests have all 256 values in every byte that is not part of a float16 number."""
    blocks = random_blocks(GGMLQuantizationType.MXFP4, 256)
    assert all(len(np.unique(column)) == 256 for column in blocks.T)


def test_grids_are_fresh() -> None:
    """The committed grids are what the script makes of the gguf package's tables."""
    assert iq_grids.HEADER.read_text() == iq_grids.render()
