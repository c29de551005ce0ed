"""What kernels take by value or find in device memory, as ctypes lays it out: the structs of ``cuda/*.cuh``.

Addresses are those of the device, as integers.
"""

import ctypes

from vmmd.errors import InvalidRequest

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


class Heat(ctypes.Structure):
    """``heat.cuh``: where a layer's experts are counted."""

    _fields_ = (("counts", ctypes.c_uint64), ("shared", ctypes.c_uint64))


class Sums(ctypes.Structure):
    """``mixture.cuh``: what other devices have summed up; n float32 vectors, `stride` values apart."""

    _fields_ = (("values", ctypes.c_uint64), ("stride", ctypes.c_int64), ("n", ctypes.c_int32))


class Piece(ctypes.Structure):
    """``crossing.cu``: what ``carry`` copies, `n` times 16 bytes, aligned to 16."""

    _fields_ = (("source", ctypes.c_uint64), ("target", ctypes.c_uint64), ("n", ctypes.c_int64))

    @classmethod
    def of(cls, source: int, target: int, size_bytes: int) -> "Piece":
        """So many bytes, rounded up to 16."""
        return cls(source, target, -(-size_bytes // 16))


class Step(ctypes.Structure):
    """``step.cuh``: in device memory, one a sequence."""

    _fields_ = (("number", ctypes.c_uint64), ("position", ctypes.c_int32), ("token", ctypes.c_int32))


class SampleOptions(ctypes.Structure):
    """``sample.cu``: how to choose a token, in device memory. `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    The draw's number is the step's position less `first_position`: that of the last token of the prompt, so that the
    first token drawn has number 0.
    """

    _fields_ = (
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("repeat_penalty", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("top_k", ctypes.c_int32),
        ("first_position", ctypes.c_int32),
    )


class SampleRows(ctypes.Structure):
    """``sample.cu``: how far the next row is where several sequences choose at once; a row of blocks each.

    Logits in values, seen in words, the workspace in bytes, the ring in words: from one step's to the next's.
    """

    _fields_ = (
        ("logits", ctypes.c_int32),
        ("seen", ctypes.c_int32),
        ("workspace", ctypes.c_int32),
        ("ring", ctypes.c_int32),
    )


ONE_ROW = SampleRows(0, 0, 0, 1)

SAMPLE_THREADS = 512
SAMPLE_BLOCK_TOKENS = 5120
SAMPLE_BLOCKS_MAX = 64


def sample_blocks(n_tokens: int) -> int:
    """The grid of ``sample.cu``'s kernel. Errors: `InvalidRequest` for more tokens than it takes."""
    blocks = -(-n_tokens // SAMPLE_BLOCK_TOKENS)
    if blocks > SAMPLE_BLOCKS_MAX:
        raise InvalidRequest(f"a vocabulary of {n_tokens}; {SAMPLE_BLOCKS_MAX * SAMPLE_BLOCK_TOKENS} are the most")
    return blocks


def sample_workspace_bytes(n_tokens: int, blocks: int | None = None) -> int:
    """The workspace that it takes, on another grid than `sample_blocks` too: zeros before the first launch."""
    n = sample_blocks(n_tokens) if blocks is None else blocks
    return 16 + n * (40 + 64 * 8 + SAMPLE_BLOCK_TOKENS // 32 * 8)
