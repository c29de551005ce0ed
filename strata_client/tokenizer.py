"""Byte-level BPE from a GGUF file's metadata.

The vocabulary spells bytes as printable characters (GPT-2's table); a pre-tokenizer, which the file names,
splits the text before pairs are merged.

Pairs are merged by the `tokenizers` package, which takes most of a second to be told a vocabulary of 150,000
tokens, without letting other threads run. It is told of those alone that may come up: merging makes only tokens
whose bytes occur in the text, and for a prompt those are a few thousand. They are found through hashes of all
short stretches of the text; a hash that two tokens share adds one too many, which changes nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from strata_client.models.base import ModelError
from strata_client.text import escape_controls

_P = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

STRETCH_BYTES_MAX = 32
"""Longer tokens are not looked for in a text but taken as there; real vocabularies have a few hundred."""

SEARCHED_BYTES_MAX = 256 << 10
"""In a longer text every token is taken as there: looking would take longer than that."""

_FACTOR = 0x9E3779B97F4A7C15  # of the hashes: any odd number without a pattern
_FILTER_BITS = 20

Bools = npt.NDArray[np.bool_]

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


_SPELLINGS = _byte_spellings()
_BYTES = {char: byte for byte, char in _SPELLINGS.items()}
# Characters that spell no byte must not become one: they become what Latin-1 lacks.
_TRANSLATION = dict.fromkeys(range(256), 0x1FF) | {ord(char): byte for char, byte in _BYTES.items()}


@dataclass(frozen=True)
class Vocabulary:
    """All that a tokenizer knows, in a form that is quick to keep and to load: see `strata_client.model_cache`.

    Attributes:
        pre: name of the pre-tokenizer.
        bos_id: the token that prompts begin with, or None.
        end_ids: tokens that end a text.
        control: names of control tokens, by id.
        user: names of user-defined tokens, by id.
        data: the bytes that the other tokens stand for, uint8, one token after the other.
        ends: where each ends, int64 `[n_tokens]`.
        hashes: of the bytes of tokens that merging can make, ascending, each once, uint64 `[n_hashes]`.
        slots: index of a token's hash, int32 `[n_tokens]`; `n_hashes` for a token that merging cannot make.
        merges: tokens that are merged and what they become, best first, int32 `[n_merges, 3]`.
    """

    pre: str
    bos_id: int | None
    end_ids: tuple[int, ...]
    control: Mapping[int, str]
    user: Mapping[int, str]
    data: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    hashes: npt.NDArray[np.uint64]
    slots: npt.NDArray[np.int32]
    merges: npt.NDArray[np.int32]


class Tokenizer:
    """Text to tokens and back. For one thread.

    Attributes:
        n_tokens: how many ids there are.
        bos_id: the token that prompts begin with; None if this model's prompts begin without one.
        end_tokens: tokens that end a text.
    """

    n_tokens: int
    bos_id: int | None
    end_tokens: frozenset[int]

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Takes what `read_vocabulary` found in a file."""
        self.n_tokens = len(vocabulary.ends)
        self.bos_id = vocabulary.bos_id
        self.end_tokens = frozenset(vocabulary.end_ids)
        self._vocabulary = vocabulary
        self._bytes = vocabulary.data.data
        self._user_ids = {name: id for id, name in vocabulary.user.items()}
        self._added_ids = self._user_ids | {name: id for id, name in vocabulary.control.items()}
        self._known: Bools = np.zeros(self.n_tokens, np.bool_)  # to `_bpe`
        self._bpe: Any = None

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
        return self.encode_all([text], special=special, add_bos=add_bos)[0]

    def encode_all(self, texts: Sequence[str], *, special: bool = False, add_bos: bool = True) -> list[list[int]]:
        """Tokens of each of some texts, as `encode`: the vocabulary is searched once for all of them."""
        try:
            data = [text.encode("utf-8") for text in texts]
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode at character {error.start}") from None
        self._know(tokens_within(self._vocabulary, b"\n".join(data)))
        start = [] if self.bos_id is None or not add_bos else [self.bos_id]
        added = self._added_ids if special else self._user_ids
        return [start + list(chain.from_iterable(self._pieces(text, added))) for text in texts]

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for; none for control tokens."""
        if id in self._vocabulary.control:
            return b""
        name = self._vocabulary.user.get(id)
        return self._merged_bytes(id) if name is None else name.encode("utf-8")

    def _merged_bytes(self, id: int) -> bytes:
        ends = self._vocabulary.ends
        return bytes(self._bytes[int(ends[id - 1]) if id else 0 : int(ends[id])])

    def _pieces(self, text: str, added: Mapping[str, int]) -> Iterator[list[int]]:
        """Tokens of what lies between added tokens, and those."""
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if longest_first else [text]
        for n, piece in enumerate(pieces):
            if n % 2:
                yield [added[piece]]
            elif piece:
                yield self._bpe.encode(piece, add_special_tokens=False).ids

    def _know(self, wanted: Bools) -> None:
        """Makes `_bpe` know at least some tokens."""
        if self._bpe is not None and not (wanted & ~self._known).any():
            return
        self._known |= wanted
        names = {
            id: "".join(map(_SPELLINGS.__getitem__, self._merged_bytes(id)))
            for id in np.flatnonzero(self._known).tolist()
        }
        merges = self._vocabulary.merges
        merges = merges[self._known[merges].all(axis=1)]
        pairs = [(names[first], names[second]) for first, second, _ in merges.tolist()]
        self._bpe = _build_bpe({name: id for id, name in names.items()}, pairs, _SPLITS[self._vocabulary.pre])


def tokens_within(vocabulary: Vocabulary, data: bytes) -> Bools:
    """Which tokens merging may make of a text: all whose bytes occur in it, those of one byte, and a few more.

    Returns:
        bool `[n_tokens]`.
    """
    n_hashes = len(vocabulary.hashes)
    marks = np.zeros(n_hashes + 1, np.bool_)
    if len(data) > SEARCHED_BYTES_MAX:
        marks[:n_hashes] = True
        return marks[vocabulary.slots]
    lengths = np.diff(vocabulary.ends, prepend=0)
    found = (vocabulary.slots < n_hashes) & ((lengths == 1) | (lengths > STRETCH_BYTES_MAX))
    maybe = np.zeros(1 << _FILTER_BITS, np.bool_)
    maybe[_filter_index(vocabulary.hashes)] = True
    text = np.frombuffer(data, np.uint8).astype(np.uint64)
    stretches = np.zeros(len(text) + 1, np.uint64)
    for n_bytes in range(1, min(STRETCH_BYTES_MAX, len(text)) + 1):
        stretches = _longer(stretches[:-1], text[n_bytes - 1 :])
        hits = stretches[maybe[_filter_index(stretches)]]
        at = np.searchsorted(vocabulary.hashes, hits)
        at[at == n_hashes] = 0
        marks[at[vocabulary.hashes[at] == hits]] = True
    return np.asarray(found | marks[vocabulary.slots])


def _longer(hashes: npt.NDArray[np.uint64], next_bytes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hashes of what some hashes are of, with a byte more."""
    return (hashes + next_bytes + np.uint64(1)) * np.uint64(_FACTOR)


def _filter_index(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    return hashes >> np.uint64(64 - _FILTER_BITS)


def _hashes(data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """A hash of each token's bytes, or of its first `STRETCH_BYTES_MAX`; uint64 `[n_tokens]`."""
    starts = ends - np.diff(ends, prepend=0)
    hashes = np.zeros(len(ends), np.uint64)
    for at in range(STRETCH_BYTES_MAX):
        (left,) = np.nonzero(starts + at < ends)
        hashes[left] = _longer(hashes[left], data[starts[left] + at].astype(np.uint64))
    return hashes


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary of a file.

    Args:
        metadata: `ModelFile.metadata`.

    Raises:
        ModelError: a `tokenizer.ggml.*` key is missing, unknown or does not fit the others.
    """
    _known(metadata, "model", {"gpt2": None})
    split = _known(metadata, "pre", _SPLITS)
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    types = metadata.get(_P + "token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list | np.ndarray) or len(types) != len(tokens):
        raise ModelError(f"{_P}token_type does not have one number for each of the {len(tokens)} tokens")
    types = np.asarray(types).tolist()

    ends = {id for name in ("eos", "eot", "eom") if (id := _id(metadata, name, len(tokens))) is not None}
    ends |= {id for id, token in enumerate(tokens) if token in _END_NAMES}
    control = ends | {id for id, kind in enumerate(types) if kind == _CONTROL}
    user = {id for id, kind in enumerate(types) if kind == _USER_DEFINED} - control
    add_bos = metadata.get(_P + "add_bos_token", split.add_bos)
    bos_id = _id(metadata, "bos", len(tokens)) if add_bos else None
    if add_bos and bos_id is None:
        raise ModelError(f"the model's prompts begin with a BOS token, but {_P}bos_token_id is missing")

    spelled = [_spelled_bytes(token) for token in tokens]
    # Added tokens come of no merge; but bytes stay, also where one of them ends a text.
    is_made = [bool(known) for known in spelled]
    for id in control | user:
        is_made[id] &= len(tokens[id]) == 1
    made = {token: id for id, token in enumerate(tokens) if is_made[id]}
    lacking = [byte for byte, char in _SPELLINGS.items() if char not in made]
    if lacking:
        raise ModelError(f"{_P}tokens has no token for the byte 0x{lacking[0]:02x}; convert the model again")

    pieces = [_bytes_of(token) if known is None else known for token, known in zip(tokens, spelled, strict=True)]
    data = np.frombuffer(b"".join(pieces), np.uint8)
    data_ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
    hashes = _hashes(data, data_ends)
    distinct, slots = np.unique(hashes[is_made], return_inverse=True)
    all_slots = np.full(len(tokens), len(distinct), np.int32)
    all_slots[is_made] = slots
    return Vocabulary(
        pre=metadata[_P + "pre"],
        bos_id=bos_id,
        end_ids=tuple(sorted(ends)),
        control={id: tokens[id] for id in sorted(control)},
        user={id: tokens[id] for id in sorted(user)},
        data=data,
        ends=data_ends,
        hashes=distinct,
        slots=all_slots,
        merges=_merges(merges, made),
    )


def _merges(merges: list[str], made: Mapping[str, int]) -> npt.NDArray[np.int32]:
    """What is merged, and what it becomes. Merges that make no token do nothing and are left out."""
    pairs = [merge.split(" ") for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not all(pair):
            raise ModelError(f"{_P}merges: {_shown(merge)!r} is not two tokens with a space between them")
    columns = (
        (first for first, _ in pairs),
        (second for _, second in pairs),
        (first + second for first, second in pairs),
    )
    ids = [np.fromiter((made.get(name, -1) for name in names), np.int32, len(pairs)) for names in columns]
    found = np.stack(ids, axis=1)
    return found[(found >= 0).all(axis=1)]


def _spelled_bytes(token: str) -> bytes | None:
    """The bytes of a token that is spelled in printable characters only; None for another."""
    try:
        return token.translate(_TRANSLATION).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _bytes_of(token: str) -> bytes:
    """The bytes of any token: characters that spell no byte are themselves."""
    return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode("utf-8") for char in token)


def _build_bpe(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], split: _Split) -> Any:
    """The `tokenizers` package's BPE; imported here, as it is slow to load."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers import Tokenizer as Pipeline
    from tokenizers.models import BPE

    pipeline = Pipeline(BPE(dict(vocabulary), list(merges), ignore_merges=split.whole))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return pipeline


def _id(metadata: Mapping[str, Any], name: str, n_tokens: int) -> int | None:
    """The token of a `*_token_id` key."""
    key = f"{_P}{name}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < n_tokens):
        raise ModelError(f"{key} is {_shown(value)}, but there are {n_tokens} tokens; convert the model again")
    return value


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
