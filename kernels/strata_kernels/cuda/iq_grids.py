"""Writes ``iq_grids.cuh``, the grids of the IQ2 and IQ3 types, from the `gguf` package's tables.

Run ``python -m strata_kernels.cuda.iq_grids`` after a release of `gguf` changed a table.
"""

from pathlib import Path

import gguf.quants
import numpy as np

HEADER = Path(__file__).with_name("iq_grids.cuh")
TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
WORDS_A_LINE = 9

PREAMBLE = """\
// Grids of the IQ2 and IQ3 types: the magnitudes that an index in a block stands for.
//
// Layout: an entry is 4 (IQ3) or 8 (IQ2) magnitudes, a byte each, the first in the lowest byte of its first word.
// Source: the tables of the `gguf` package. Generated; edit iq_grids.py and run
// `python -m strata_kernels.cuda.iq_grids`.
//
// In global memory, not `__constant__`: the lanes of a warp read different entries, which constant memory
// would serve one after another.
#pragma once

#include "integers.cuh"

namespace strata {
"""


def render() -> str:
    """The header's text."""
    parts = [PREAMBLE]
    for name in TYPES:
        decoder = getattr(gguf.quants, name)
        decoder.init_grid()
        words = decoder.grid.astype(np.uint8).reshape(-1).view("<u4")
        parts.append(f"alignas(16) static __device__ const uint32_t {name}_GRID[{len(words)}] = {{")
        for start in range(0, len(words), WORDS_A_LINE):
            parts.append("    " + " ".join(f"0x{word:08x}," for word in words[start : start + WORDS_A_LINE]))
        parts.append("};\n")
    parts.append("}  // namespace strata\n")
    return "\n".join(parts)


if __name__ == "__main__":
    HEADER.write_text(render())
