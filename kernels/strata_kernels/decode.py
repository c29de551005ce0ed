"""Shapes of the decode kernels: blocks, and the shared memory to which rows are copied."""

from collections.abc import Sequence

ROWS = 16
"""Of a block: a group of an activation."""

THREADS = 256
ROUTE_THREADS = 128
"""``decode.cu``."""

_STATIC_BYTES = 4096
"""What the kernels have beside it, generously."""


def staged_bytes(row_bytes: Sequence[int], shared_bytes_max: int, rows: int = ROWS, beside_bytes: int = 0) -> int:
    """Dynamic shared memory for `rows` rows of each of some matrices.

    Args:
        row_bytes: of a row of each.
        shared_bytes_max: what a block may have.
        rows: of a matrix in a block; a warp has two, of ``route`` a block one.
        beside_bytes: what else is copied.

    Returns:
        Bytes, or 0 where they do not fit: ``decode_in_place.cu`` has kernels that read rows where they lie, at a lower
        rate.
    """
    pair = min(rows, 2)
    wanted = beside_bytes + rows // pair * sum(_room_bytes(pair * size) for size in row_bytes)
    return wanted if wanted <= shared_bytes_max - _STATIC_BYTES else 0


def activation_bytes(n: int) -> int:
    """What ``gate_up`` copies of an activation of n values, beside its rows."""
    return 2 * _room_bytes(n) + 2 * _room_bytes(n // 16 * 4)


def gate_up_rows(
    d_expert: int, top_k: int, multiprocessors: int, shared_bytes_max: int, row_bytes: Sequence[int], beside_bytes: int
) -> int:
    """Rows of a block of ``gate_up``: a divisor of d_expert of which the busiest multiprocessor has fewest.

    Of those alike the largest, so that the blocks are few; `ROWS` where none fits, as `staged_bytes` says.
    """
    choices = [
        rows
        for rows in (64, 48, 32, 16)
        if d_expert % rows == 0 and staged_bytes(row_bytes, shared_bytes_max, rows, beside_bytes)
    ]
    return min(choices, key=lambda rows: -(-(d_expert // rows * top_k) // multiprocessors) * rows, default=ROWS)


def _room_bytes(size: int) -> int:
    """For bytes that begin anywhere: `room_of` of ``rows.cuh``."""
    return (size + 30) // 16 * 16
