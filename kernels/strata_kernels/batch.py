"""Shapes of the kernels that evaluate one token of each of several sequences: grids, and shared memory."""

from collections.abc import Sequence
from typing import NamedTuple

ROWS_MAX = 64
"""Sequences of a step: an expert's rows are one `GroupTile`."""

STRIP_ROWS = 16
THREADS = 256
DENSE_ROWS = 16
"""``batch_tile.cuh`` and ``batch_matmul.cu``; `DENSE_ROWS` sequences are multiplied at once."""

ROUTE_EXPERTS = 8
ROW_THREADS = 256
"""``batch_rows.cu``; `ROUTE_EXPERTS` are scored by a block of ``route_rows``."""

_STATIC_BYTES = 12 * 1024  # what the kernels have beside it, generously
_BLOCKS = 2  # over experts, on a multiprocessor
_RESERVED_BYTES = 1024  # of each block
_STAGES_MAX = 4
_SPLITS_MIN = 8


class ExpertShape(NamedTuple):
    """A launch of ``gate_up_rows`` or ``down_rows``: blocks at most, and shared memory in stages."""

    blocks: int
    stages: int
    stage_bytes: int

    @property
    def shared_bytes(self) -> int:
        """0: ``batch_matmul_in_place.cu`` has the kernel."""
        return self.stages * self.stage_bytes


def staged_bytes(row_bytes: Sequence[int], shared_bytes_max: int) -> int:
    """Dynamic shared memory of a block that takes a strip of each of some matrices, with rows of so many bytes.

    0 where they do not fit: ``batch_matmul_in_place.cu`` has kernels that read rows where they lie, at a lower rate.
    """
    wanted = sum(_room_bytes(STRIP_ROWS * size) for size in row_bytes)
    return wanted if wanted <= shared_bytes_max - _STATIC_BYTES else 0


def expert_shape(multiprocessors: int, shared_bytes_max: int, row_bytes: Sequence[int]) -> ExpertShape:
    """For strips of matrices with rows of so many bytes: as many blocks as the GPU runs at once, which share them.

    Each has strips on their way while it multiplies others, where shared memory allows.
    """
    staged = staged_bytes(row_bytes, shared_bytes_max)
    if not staged:
        return ExpertShape(multiprocessors * _BLOCKS, 1, 0)
    whole = shared_bytes_max + _RESERVED_BYTES
    stages = (whole // _BLOCKS - _RESERVED_BYTES - _STATIC_BYTES) // staged
    stages = max(1, min(stages, _STAGES_MAX))
    beside = whole // (stages * staged + _STATIC_BYTES + _RESERVED_BYTES)
    return ExpertShape(multiprocessors * max(1, min(beside, _BLOCKS)), stages, staged)


def attend_splits(multiprocessors: int, n_kv_heads: int, rows_max: int) -> int:
    """Blocks that share a K/V head of a row, at most.

    By the number of rows that there may be, and not by how many there are: so are the bits. Most of them find no cells
    and end, but they have to be launched; and a long sequence must not wait for few blocks among short ones.
    """
    return max(_SPLITS_MIN, multiprocessors // (n_kv_heads * rows_max))


def route_grid(n: int, n_experts: int) -> tuple[int, int]:
    """Of ``route_rows``."""
    return -(-n_experts // ROUTE_EXPERTS), n


def route_shared_bytes(k: int, row_bytes: int, shared_bytes_max: int) -> int:
    """Of ``route_rows``, for rows of k values, of the router so many bytes: with room for these where it fits."""
    wanted = 4 * k + _room_bytes(ROUTE_EXPERTS * row_bytes)
    return wanted if wanted <= shared_bytes_max - _STATIC_BYTES else 4 * k


def matmul_blocks(*rows: int) -> int:
    """Of ``matmul_rows``, for matrices of so many rows."""
    return sum(-(-count // STRIP_ROWS) for count in rows)


def _room_bytes(size: int) -> int:
    """For bytes that begin anywhere: `room_of` of ``rows.cuh``."""
    return (size + 30) // 16 * 16
