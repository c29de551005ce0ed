"""Rows of the token embedding."""

import numpy as np
import numpy.typing as npt

from strata_kernels.reference.dequantize import dequantize


def embedding(tokens: npt.NDArray[np.int32], table: npt.NDArray[np.uint8], kind: int) -> npt.NDArray[np.float32]:
    """Decodes only the rows that are wanted.

    Args:
        tokens: int32 `[n]`, each below `n_vocab`.
        table: raw blocks, uint8 `[n_vocab, row_bytes]`.
        kind: type of the blocks.

    Returns:
        float32 `[n, d_model]`.
    """
    return dequantize(table[tokens], kind)
