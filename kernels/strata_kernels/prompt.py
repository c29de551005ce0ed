"""Shapes of the kernels of prompt processing: their structs as ctypes lays them out, and their grids.

Addresses are those of the device, as integers.
"""

import ctypes

TILE_TOKENS = 64
TILE_THREADS = 256
TILE_SHARED_BYTES = (2 * 64 + 8 * 16) * (128 + 8) * 2 + 64 * 4
BLOCK_ROWS = 128
SCALE_WIDTH = 64
"""``prompt_tile.cuh`` and ``prompt_matmul.cu``."""

ROW_THREADS = 256
"""``prompt_rows.cu``."""

ROUTER_THREADS = 128
ROUTER_TOKENS = 16
ROUTER_ROWS = 32
ROUTER_COLUMNS = 128
GROUP_THREADS = 256
"""``prompt_route.cu``."""

CARRY_THREADS = 256
"""``crossing.cu``; its ``combine_part`` has `ROW_THREADS`."""

_ROUTER_SPLITS_MAX = 8


class HalfRows(ctypes.Structure):
    """``prompt_tile.cuh``: rows of float16 values, and scales for them unless `scales` is 0."""

    _fields_ = (
        ("values", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("k", ctypes.c_int32),
        ("scale_width", ctypes.c_int32),
    )

    @classmethod
    def unscaled(cls, values: int, k: int) -> "HalfRows":
        """Rows of k values as they are."""
        return cls(values, 0, k, k)


class Groups(ctypes.Structure):
    """``prompt_groups.cuh``: the tokens of each expert, in device memory."""

    _fields_ = (("pairs", ctypes.c_uint64), ("first_tiles", ctypes.c_uint64), ("tiles", ctypes.c_uint64))

    @staticmethod
    def sizes_bytes(n: int, n_experts: int, top_k: int) -> tuple[int, int, int]:
        """Bytes of its three arrays for n tokens."""
        return 4 * n * top_k, 4 * (n_experts + 1), 16 * tiles_max(n, n_experts, top_k)


class Experts(ctypes.Structure):
    """``prompt_groups.cuh``: the experts that a launch computes, and where they lie."""

    _fields_ = (
        ("addresses", ctypes.c_uint64),
        ("staged", ctypes.c_uint64),
        ("stride", ctypes.c_int64),
        ("up", ctypes.c_int64),
        ("down", ctypes.c_int64),
        ("first", ctypes.c_int32),
        ("last", ctypes.c_int32),
    )

    @classmethod
    def in_place(cls, addresses: int, first: int, last: int) -> "Experts":
        """Those at places `first` to `last`, read by a table of addresses."""
        return cls(addresses, 0, 0, 0, 0, first, last)


def tiles_max(n: int, n_experts: int, top_k: int) -> int:
    """The most tiles that n tokens make with so many experts."""
    return min(n * top_k, n_experts + n * top_k // TILE_TOKENS)


def matmul_grid(n: int, *rows: int) -> tuple[int, int]:
    """Of ``matmul_prompt``, for n tokens and matrices of so many rows."""
    return sum(-(-count // BLOCK_ROWS) for count in rows), -(-n // TILE_TOKENS)


def gate_up_grid(n: int, n_experts: int, top_k: int, d_expert: int) -> tuple[int, int]:
    """Of ``gate_up_prompt``, for n tokens and so many of the experts."""
    return -(-d_expert // SCALE_WIDTH), tiles_max(n, n_experts, top_k)


def down_grid(n: int, n_experts: int, top_k: int, d_model: int) -> tuple[int, int]:
    """Of ``down_prompt``, for n tokens and so many of the experts."""
    return -(-d_model // BLOCK_ROWS), tiles_max(n, n_experts, top_k)


def router_splits(k: int) -> int:
    """Parts of the sums of ``router_prompt``, by k alone: so are the sums' bits."""
    return min(_ROUTER_SPLITS_MAX, -(-k // ROUTER_COLUMNS))


def router_grid(n: int, n_experts: int, k: int) -> tuple[int, int, int]:
    """Of ``router_prompt``."""
    return -(-n_experts // ROUTER_ROWS), -(-n // ROUTER_TOKENS), router_splits(k)
