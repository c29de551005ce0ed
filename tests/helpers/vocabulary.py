"""A byte-level BPE vocabulary of any size, made up but sound: of Qwen3's shape without being it."""

import random
from collections.abc import Sequence
from typing import Any

from tests.helpers.gguf_builder import byte_tokens

N_TOKENS, N_ROWS = 151_643, 151_936
"""Ordinary tokens of Qwen3's vocabulary, and rows of its embedding."""

TOKEN_CHARS_MAX = 16
_LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
_SPACE = "Ġ"


def merged_tokens(n_tokens: int, seed: int = 1) -> tuple[list[str], list[str]]:
    """Tokens and the merges that make those after the 256 bytes, in their order.

    Frequent letters, space-letter pairs and early tokens are merged most, so that lengths are about those of real
    vocabularies.
    """
    random_ = random.Random(seed)
    tokens, merges = byte_tokens(), []
    there = set(tokens)
    common = [letter for rank, letter in enumerate(_LETTERS) for _ in range(26 - rank)] + [_SPACE] * 60
    while len(tokens) < n_tokens:
        first = _one(random_, tokens, common)
        second = _one(random_, tokens, common)
        made = first + second
        if _SPACE not in second and len(made) <= TOKEN_CHARS_MAX and made not in there:
            there.add(made)
            tokens.append(made)
            merges.append(f"{first} {second}")
    return tokens, merges


def _one(random_: random.Random, tokens: Sequence[str], common: Sequence[str]) -> str:
    """A letter, or a token, rather an early one than a late one."""
    if random_.random() < 0.3:
        return random_.choice(common)
    return tokens[int(len(tokens) * random_.random() ** 4)]


def vocabulary_keys(n_tokens: int = N_TOKENS, n_rows: int = N_ROWS) -> dict[str, Any]:
    """The `tokenizer.ggml.*` keys of such a vocabulary, control tokens and unused ids behind it as Qwen3's has them."""
    tokens, merges = merged_tokens(n_tokens)
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|control_{n}|>" for n in range(23))]
    unused = [f"[PAD{n}]" for n in range(n_tokens + len(control), n_rows)]
    keys = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens + control + unused,
        "token_type": [1] * len(tokens) + [3] * len(control) + [5] * len(unused),
        "merges": merges,
        "eos_token_id": n_tokens + 2,
        "padding_token_id": n_tokens,
        "bos_token_id": n_tokens,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def sample_text(n_words: int, seed: int = 1) -> str:
    """Words that such a vocabulary has tokens for, and others, with digits and marks."""
    random_ = random.Random(seed)
    lengths = (1, 2, 3, 3, 4, 4, 5, 6, 7, 9)
    words = ["".join(random_.choices(_LETTERS, range(26, 0, -1), k=random_.choice(lengths))) for _ in range(n_words)]
    return " ".join(word + random_.choice(["", "", "", "", ",", ".", " 17", "\n", " é中"]) for word in words)
