"""Tensor types without the `gguf` package, which takes a tenth of a second to import."""

from functools import cache
from typing import Final

F32: Final = 0
F16: Final = 1


class TensorType(int):
    """A tensor type: GGUF's number, equal to `gguf.GGMLQuantizationType`'s.

    Attributes:
        name: like "Q4_K".
        block_values: values of a block.
        block_bytes: its bytes.
        is_decoded: the `gguf` package can make float32 of it.
    """

    name: str
    block_values: int
    block_bytes: int
    is_decoded: bool

    def __new__(cls, number: int, name: str, block_values: int, block_bytes: int, is_decoded: bool) -> "TensorType":
        """Takes what is known of a type. `tensor_type` knows it by the number."""
        made = super().__new__(cls, number)
        made.name, made.is_decoded = name, is_decoded
        made.block_values, made.block_bytes = block_values, block_bytes
        return made

    def __repr__(self) -> str:
        return self.name


@cache
def tensor_type(number: int) -> TensorType:
    """The type of a number, as the `gguf` package knows it; imports that.

    Raises:
        ValueError: it knows none.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType(number)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    is_decoded = number in (F32, F16) or hasattr(quants, kind.name)
    return TensorType(number, kind.name, block_values, block_bytes, is_decoded)
