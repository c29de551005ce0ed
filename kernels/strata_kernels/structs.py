"""What kernels take by value or find in device memory, as ctypes lays it out: the structs of ``cuda/*.cuh``.

Addresses are those of the device, as integers.
"""

import ctypes

KV_F16, KV_BF16, KV_Q8_0 = 0, 1, 2
"""`KvCells.type`."""

RING_WORDS = 16


class KvCells(ctypes.Structure):
    """``kv.cuh``: where the K/V cells of a sequence lie."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("slab_bytes", ctypes.c_int64),
        ("cells_per_slab", ctypes.c_int32),
        ("n_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class Matrix(ctypes.Structure):
    """``types.cuh``: a matrix as it lies in its file; `type` is GGUF's number."""

    _fields_ = (("blocks", ctypes.c_uint64), ("type", ctypes.c_int32), ("rows", ctypes.c_int32))


class Activation(ctypes.Structure):
    """``activation.cuh``: the input vector of decode's products."""

    _fields_ = (
        ("values", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("low", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("squares", ctypes.c_uint64),
    )

    @staticmethod
    def size_bytes(n: int) -> int:
        """Bytes that an activation of n values takes in one piece; n is a multiple of 16."""
        return 4 * n + n + n + 3 * (n // 16 * 4)

    @classmethod
    def at(cls, address: int, n: int) -> "Activation":
        """The activation of n values at an address that is aligned to 16 bytes."""
        scales = address + 6 * n
        return cls(address, address + 4 * n, address + 5 * n, scales, scales + n // 4, scales + n // 2)


class Step(ctypes.Structure):
    """``step.cuh``: in device memory, one a sequence."""

    _fields_ = (("number", ctypes.c_uint64), ("position", ctypes.c_int32), ("token", ctypes.c_int32))
