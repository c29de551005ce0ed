"""Byte-level BPE from a GGUF file's metadata.

The vocabulary spells bytes as printable characters (GPT-2's table); a pre-tokenizer, which the file names,
splits the text before pairs are merged.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from strata_client.models.base import ModelError
from strata_client.text import escape_controls

_P = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

# Names that end a text in well-known models, whatever else the file calls its end.
_END_NAMES = frozenset(
    [
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "<|eot|>",
        "<end_of_turn>",
        "<|end_of_turn|>",
        "<EOT>",
        "<|return|>",
        "<|call|>",
        "<｜end▁of▁sentence｜>",
    ]
)


class _Split(NamedTuple):
    """How text is cut before merging.

    Attributes:
        patterns: each cuts the pieces that the ones before it left; matches and what is between them are pieces.
        whole: a piece that is a token is taken as it is, without merging.
        add_bos: what holds if the file does not say whether prompts begin with a BOS token.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_SPLITS = {
    "qwen2": _Split((_QWEN2,)),
    "deepseek-r1-qwen": _Split((_QWEN2,)),
    "llama-bpe": _Split((_LLAMA3,), whole=True, add_bos=True),
    "llama3": _Split((_LLAMA3,), whole=True, add_bos=True),
    "gpt-2": _Split((_GPT2,)),
    "smollm": _Split((r"\p{N}", _GPT2)),
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def _byte_spellings() -> dict[int, str]:
    """GPT-2's table: printable bytes are themselves, the others the characters from U+0100 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_BYTES = {char: byte for byte, char in _byte_spellings().items()}


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
        """Builds the tokenizer of a file.

        Args:
            metadata: `ModelFile.metadata`.

        Raises:
            ModelError: a `tokenizer.ggml.*` key is missing, unknown or does not fit the others.
        """
        _known(metadata, "model", {"gpt2": None})
        split = _known(metadata, "pre", _SPLITS)
        self._tokens = _strings(metadata, "tokens")
        merges = _strings(metadata, "merges")
        types = metadata.get(_P + "token_type", [_NORMAL] * len(self._tokens))
        if not isinstance(types, list | np.ndarray) or len(types) != len(self._tokens):
            raise ModelError(f"{_P}token_type does not have one number for each of the {len(self._tokens)} tokens")

        self.n_tokens = len(self._tokens)
        self.end_tokens = frozenset(
            [i for i, token in enumerate(self._tokens) if token in _END_NAMES]
            + [i for name in ("eos", "eot", "eom") if (i := self._id(metadata, name)) is not None]
        )
        self._control = self.end_tokens | {i for i, kind in enumerate(types) if kind == _CONTROL}
        self._user = {i for i, kind in enumerate(types) if kind == _USER_DEFINED} - self._control
        self.bos_id = None
        if metadata.get(_P + "add_bos_token", split.add_bos):
            self.bos_id = self._id(metadata, "bos")
            if self.bos_id is None:
                raise ModelError(f"the model's prompts begin with a BOS token, but {_P}bos_token_id is missing")

        added = self._control | self._user
        # Bytes stay, also where one of them ends a text.
        vocabulary = {token: i for i, token in enumerate(self._tokens) if i not in added or len(token) == 1}
        self._bpe = _build_bpe(vocabulary, merges, split)
        self._user_ids = {self._tokens[i]: i for i in self._user}
        self._added_ids = self._user_ids | {self._tokens[i]: i for i in self._control}

    def _id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        """The token of a `*_token_id` key."""
        key = f"{_P}{name}_token_id"
        value = metadata.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < self.n_tokens):
            raise ModelError(f"{key} is {_shown(value)}, but there are {self.n_tokens} tokens; convert the model again")
        return value

    def encode(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Tokens of a text.

        A user-defined token in the text is that token.

        Args:
            text: any characters, as they are; no normalization.
            special: control tokens in the text are those tokens; else they are text like any other.
            add_bos: begin with the BOS token if this model's prompts do.

        Raises:
            ValueError: the text cannot be written in UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode at character {error.start}") from None
        start = [] if self.bos_id is None or not add_bos else [self.bos_id]
        return start + list(chain.from_iterable(self._pieces(text, self._added_ids if special else self._user_ids)))

    def _pieces(self, text: str, added: Mapping[str, int]) -> Iterator[list[int]]:
        """Tokens of what lies between added tokens, and those."""
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
        for n, piece in enumerate(pieces):
            if n % 2:
                yield [added[piece]]
            elif piece:
                yield self._bpe.encode(piece, add_special_tokens=False).ids

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; none for control tokens."""
        if id in self._control:
            return b""
        token = self._tokens[id]
        if id in self._user:
            return token.encode("utf-8")
        return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode("utf-8") for char in token)


def _build_bpe(vocabulary: dict[str, int], merges: list[str], split: _Split) -> Any:
    """The `tokenizers` package's BPE; imported here, as it is slow to load."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import BPE

    pairs: list[tuple[str, str]] = []
    for merge in merges:
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise ModelError(f"{_P}merges: {_shown(merge)!r} is not two tokens with a space between them")
        if first + second in vocabulary and first in vocabulary and second in vocabulary:  # the others make no token
            pairs.append((first, second))
    lacking = [byte for byte, char in _byte_spellings().items() if char not in vocabulary]
    if lacking:
        raise ModelError(f"{_P}tokens has no token for the byte 0x{lacking[0]:02x}; convert the model again")
    pipeline = Pipeline(BPE(vocabulary, pairs, ignore_merges=split.whole))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return pipeline


def _known(metadata: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> Any:
    """What a key's value, a name, stands for."""
    value = metadata.get(_P + name)
    if value is None:
        raise ModelError(f"the model lacks the key {_P}{name}; convert it again from its original")
    if not isinstance(value, str) or value not in known:
        raise ModelError(f"{_P}{name} is {_shown(value)}, which is not known here; known are {', '.join(known)}")
    return known[value]


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings that must be there."""
    value = metadata.get(_P + name)
    if value is None:
        raise ModelError(f"the model lacks the key {_P}{name}; convert it again from its original")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{_P}{name} is not a list of strings; convert the model again")
    return value


def _shown(value: object) -> str:
    """A value out of a file, fit for one line on a terminal."""
    return escape_controls(str(value), "")[:120]
