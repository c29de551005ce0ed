"""Byte-level BPE from a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any


class Tokenizer:
    """Text to tokens and back.

    Attributes:
        n_tokens: how many ids there are.
        bos_id: the token that prompts begin with; None if this model's prompts begin without one.
        end_tokens: tokens that end a text.
    """

    n_tokens: int
    bos_id: int | None
    end_tokens: frozenset[int]

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def encode(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Tokens of a text."""
        raise NotImplementedError

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; none for control tokens."""
        raise NotImplementedError
