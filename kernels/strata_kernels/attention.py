"""What a launch of the attention kernels needs: ``cuda/attend.cuh`` says what the numbers are."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from strata_kernels.structs import Activation, KvCells
from vmmd.errors import InvalidRequest

HEAD_DIMS = (64, 128)
GROUP_MAX = 16
"""Query heads of a K/V head."""

STORE_THREADS = 256
PROMPT_ROWS = 64

SHARED_BYTES_ANYWHERE = 99 * 1024
"""Of a block, on every GPU from sm_80 on."""

SHARED_BYTES_DEEP = 148 * 1024
"""Two stages of the widest usual tiles; where that leaves room for the kernels beside it."""

_STAGES_MAX = 4
_BESIDE_BYTES = 64 * 1024
_TILE = 16


class AttendArguments(ctypes.Structure):
    """The one argument of ``attend_TYPE_DIM_HEADS``."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("q_norm", ctypes.c_uint64),
        ("k_norm", ctypes.c_uint64),
        ("rope", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("cells", KvCells),
        ("out", Activation),
        ("workspace", ctypes.c_uint64),
        ("layer", ctypes.c_int32),
        ("n_heads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class AttendRowsArguments(ctypes.Structure):
    """The one argument of ``attend_rows_TYPE_DIM_HEADS``; `stride` in values, `workspace_stride` in bytes."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("q_norm", ctypes.c_uint64),
        ("k_norm", ctypes.c_uint64),
        ("rope", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("cells", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("workspace", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        ("workspace_stride", ctypes.c_int64),
        ("layer", ctypes.c_int32),
        ("n_heads", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class StoreArguments(ctypes.Structure):
    """The one argument of ``store_kv_f32`` and ``store_kv_f16``; `stride` in values."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("q_norm", ctypes.c_uint64),
        ("k_norm", ctypes.c_uint64),
        ("table", ctypes.c_uint64),
        ("q_out", ctypes.c_uint64),
        ("cells", KvCells),
        ("stride", ctypes.c_int64),
        ("layer", ctypes.c_int32),
        ("n_heads", ctypes.c_int32),
        ("position", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


def store_kv_grid(n: int, n_heads: int, n_kv_heads: int) -> int:
    """Blocks of ``store_kv``, of `STORE_THREADS`."""
    return -(-n * (n_heads + 2 * n_kv_heads) * 32 // STORE_THREADS)


class PromptArguments(ctypes.Structure):
    """The one argument of ``attend_prompt_TYPE_DIM``."""

    _fields_ = (
        ("q", ctypes.c_uint64),
        ("out", ctypes.c_uint64),
        ("cells", KvCells),
        ("layer", ctypes.c_int32),
        ("n_heads", ctypes.c_int32),
        ("position", ctypes.c_int32),
        ("n", ctypes.c_int32),
    )


class AttendShape(NamedTuple):
    """A launch of ``attend``: the kernel's name, threads of a block and bytes of shared memory."""

    name: str
    threads: int
    shared_bytes: int


def shared_bytes_max(of_a_block: int) -> int:
    """What a block of ``attend`` should have where it may have so much."""
    return SHARED_BYTES_DEEP if of_a_block >= SHARED_BYTES_DEEP + _BESIDE_BYTES else SHARED_BYTES_ANYWHERE


def attend_shape(
    kv_type: str,
    head_dim: int,
    group: int,
    shared_bytes_max: int = SHARED_BYTES_ANYWHERE,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> AttendShape:
    """The kernel for cells of a type ("f16", "bf16", "q8_0"), `group` query heads to a K/V head.

    Args:
        kv_type: of the cells.
        head_dim: values of a head.
        group: query heads to a K/V head.
        shared_bytes_max: of a block; the kernel has one to four stages of tiles in flight, as many as fit.
        head_dims: for which there are kernels.

    Errors: `InvalidRequest` for a shape that no kernel takes.
    """
    if head_dim not in head_dims or not 1 <= group <= GROUP_MAX:
        raise InvalidRequest(
            f"heads of {head_dim} values in groups of {group}: attention on a GPU takes heads of "
            f"{' or '.join(map(str, head_dims))} in groups of {GROUP_MAX} at most"
        )
    heads = 8 if group <= 8 else 16
    value_bytes = 1 if kv_type == "q8_0" else 2
    warps = 8 if head_dim <= 128 else 4
    row_bytes = head_dim * value_bytes + 16
    stage_bytes = warps * 2 * _TILE * row_bytes
    q_bytes = heads // 8 * 16 * (head_dim * 2 + 16)
    scales_bytes = (head_dim // 32 * 2 + 15) // 16 * 16
    wide_bytes = 2 * head_dim * 4 if kv_type == "q8_0" else 0
    rest_bytes = q_bytes + 2 * (row_bytes + scales_bytes) + max(warps * heads * 8, wide_bytes)
    stages = min((shared_bytes_max - rest_bytes) // stage_bytes, _STAGES_MAX)
    return AttendShape(f"attend_{kv_type}_{head_dim}_{heads}", 32 * warps, stages * stage_bytes + rest_bytes)


def attend_splits(multiprocessors: int, n_kv_heads: int) -> int:
    """Blocks that share a K/V head: together about one for each multiprocessor."""
    return max(1, multiprocessors // n_kv_heads)


def workspace_bytes(n_heads: int, n_kv_heads: int, head_dim: int, n_splits: int) -> int:
    """The workspace of ``attend``: zero before the first launch, aligned to 16 bytes."""
    return (n_kv_heads * 4 + 15) // 16 * 16 + n_heads * n_splits * (head_dim * 4 + 8)


def attend_prompt_shape(kv_type: str, head_dim: int, head_dims: Sequence[int] = HEAD_DIMS) -> AttendShape:
    """As `attend_shape`, for ``attend_prompt``. Errors: `InvalidRequest`."""
    if head_dim not in head_dims:
        raise InvalidRequest(
            f"heads of {head_dim} values: attention on a GPU takes heads of {' or '.join(map(str, head_dims))}"
        )
    cells = 64 if head_dim <= 128 else 32
    row_bytes = 2 * head_dim + 16
    shared_bytes = 2 * cells * (row_bytes + head_dim) if kv_type == "q8_0" else 4 * cells * row_bytes
    q_bytes = 0 if head_dim <= 128 else PROMPT_ROWS * row_bytes
    return AttendShape(f"attend_prompt_{kv_type}_{head_dim}", 2 * PROMPT_ROWS, shared_bytes + q_bytes)


def attend_prompt_grid(n: int, n_heads: int, n_kv_heads: int) -> tuple[int, int]:
    """Blocks of ``attend_prompt`` for n tokens."""
    return n_kv_heads, -(-n * (n_heads // n_kv_heads) // PROMPT_ROWS)
