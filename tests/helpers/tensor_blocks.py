"""Random blocks of every tensor type that the CUDA kernels read."""

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

SCALE_OFFSETS = {
    "F32": (),
    "F16": (0,),
    "BF16": (),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "IQ2_S": (0,),
    "IQ2_XS": (0,),
    "IQ2_XXS": (0,),
    "MXFP4": (),
}
"""Where each type's blocks have float16 numbers."""

KINDS = [GGMLQuantizationType[name] for name in SCALE_OFFSETS]

_HALVES = np.arange(1 << 16, dtype=np.uint16)
_FINITE = _HALVES[np.isfinite(_HALVES.view(np.float16))]
_EXTREME = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x7BFF, 0xFBFF], np.uint16)


def random_blocks(kind: GGMLQuantizationType, n: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Valid blocks: every byte takes all 256 values, float16 numbers are any finite ones, the extreme ones included.

    Args:
        n: blocks, 256 at least; of F32, F16 and BF16 eight values count as one.

    Returns:
        uint8 `[n, block_bytes]`.
    """
    rng = np.random.default_rng(seed)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    block_bytes *= 8 if block_values == 1 else 1
    blocks = rng.integers(0, 256, (n, block_bytes), np.uint8)
    blocks[:256] = np.arange(256, dtype=np.uint8)[:, None] + blocks[0]
    offsets = range(0, block_bytes, 2) if kind == GGMLQuantizationType.F16 else SCALE_OFFSETS[kind.name]
    for offset in offsets:
        halves = rng.choice(_FINITE, n)
        halves[-len(_EXTREME) :] = rng.permutation(_EXTREME)
        blocks[:, offset : offset + 2] = halves[:, None].view(np.uint8)
    return blocks


def expected(blocks: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> npt.NDArray[np.uint32]:
    """What `gguf` decodes the blocks to: the bits of the float32 values, uint32 `[n_values]`."""
    with np.errstate(all="ignore"):  # MXFP4's largest scale overflows
        return np.ascontiguousarray(gguf.dequantize(blocks, kind)).reshape(-1).view(np.uint32)
