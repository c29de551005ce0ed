"""Text to tokens and back."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_client import tokenizer as tokenizer_module
from strata_client.models.base import ModelError
from strata_client.models.gguf_file import open_model_file
from strata_client.text import Utf8Stream
from strata_client.tokenizer import Tokenizer, read_vocabulary
from tests.helpers.gguf_builder import DATA, byte_tokens, small_keys
from tests.helpers.vocabulary import merged_tokens, sample_text

SHIPPED = Path(__file__).parents[2] / "strata_client" / "data" / "tiny-IQ3_S.gguf"


def tokenizer_of(source: Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer of a file, or of metadata."""
    if isinstance(source, dict):
        return Tokenizer(read_vocabulary(source))
    with open_model_file(str(source)) as model_file:
        return tokenizer_of(model_file.metadata)


@pytest.fixture(scope="module")
def micro() -> Tokenizer:
    return tokenizer_of(DATA / "micro.gguf")


@pytest.fixture(scope="module")
def specials() -> Tokenizer:
    return tokenizer_of(DATA / "specials.gguf")


@pytest.mark.parametrize(
    ("path", "name"), [(SHIPPED, "IQ3_S"), (DATA / "micro.gguf", "micro"), (DATA / "nano.gguf", "nano")]
)
def test_reference_texts(path: Path, name: str) -> None:
    """Texts become the reference's tokens, and those the texts again."""
    tokenizer = tokenizer_of(path)
    with np.load(DATA / f"ref-{name}.npz") as reference:
        for n in (0, 1):
            text, ids = str(reference[f"text_{n}"]), reference[f"ids_{n}"].tolist()
            assert tokenizer.encode(text) == ids
            assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("One cat\r\nTwo dogs\r\n", "0 47 431 434 202 199 52 87 79 414 71 83 202 199"),
        ("One cat\nTwo dogs\n", "0 47 431 434 199 52 87 79 414 71 83 199"),
        ("One\0cat sat", "0 47 431 189 67 296 260 296"),
        ("\ufeffOne cat", "0 172 120 124 47 431 434"),
    ],
)
def test_line_ends_and_marks_are_characters(micro: Tokenizer, text: str, ids: str) -> None:
    """Carriage returns, newlines, NUL and a byte order mark are tokenized like all else."""
    assert " ".join(map(str, micro.encode(text))) == ids


@given(text=st.text())
def test_any_text_comes_back(micro: Tokenizer, specials: Tokenizer, text: str) -> None:
    """The bytes of a text's tokens are the text's, whatever it is."""
    for tokenizer in (micro, specials):
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_bos=False))) == text.encode()


def test_added_tokens(specials: Tokenizer) -> None:
    """A user-defined token in a text is one token, with its own bytes."""
    for name, id in {"<think>": 386, "</think>": 387}.items():
        assert specials.encode(f"a{name}b", add_bos=False)[1:-1] == [id]
        assert specials.token_bytes(id) == name.encode()
    ids = [0, 386, 65, 330, 278, 296, 387, 221, 82, 340]
    assert specials.encode("<think>a little cat</think> ran") == ids


def test_control_tokens_in_a_text(specials: Tokenizer) -> None:
    """Control tokens that somebody typed are text, unless they are asked for; they are never printed."""
    text = "<|im_start|>user\nhello<|im_end|>\n"
    promoted = specials.encode(text, special=True)
    assert promoted == [0, 384, 85, 83, 300, 199, 257, 287, 79, 385, 199]
    literal = "0 28 92 335 63 307 288 84 92 30 85 83 300 199 257 287 79 28 92 335 63 69 265 92 30 199"
    assert specials.encode(text) == list(map(int, literal.split()))
    assert b"".join(map(specials.token_bytes, promoted)) == b"user\nhello\n"
    assert specials.end_tokens >= {0, 385}


def test_bos() -> None:
    """Prompts begin with the BOS token exactly where the model's do; an empty prompt is that or nothing."""
    assert tokenizer_of(DATA / "bos.gguf").encode("") == [0]
    assert tokenizer_of(DATA / "bos.gguf").encode("", add_bos=False) == []
    assert tokenizer_of(DATA / "nobos.gguf").bos_id is None
    assert tokenizer_of(DATA / "nobos.gguf").encode("") == []
    assert tokenizer_of(small_keys(add_bos_token=None)).bos_id is None
    assert tokenizer_of(small_keys(add_bos_token=None, pre="llama-bpe")).bos_id == 0


def test_end_tokens() -> None:
    """A text ends with eos, eot, eom and every well-known end token."""
    assert tokenizer_of(DATA / "eog.gguf").end_tokens == {0, 1}
    keys = small_keys(eos_token_id=5) | {"tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.eom_token_id": 7}
    assert tokenizer_of(keys).end_tokens == {0, 5, 6, 7}
    assert tokenizer_of(keys).token_bytes(6) == b""


def test_characters_in_pieces() -> None:
    """The bytes of tokens that hold parts of characters make the characters."""
    tokenizer, stream = tokenizer_of(DATA / "emoji.gguf"), Utf8Stream()
    ids = tokenizer.encode("Hi 😀 é中!")
    assert "".join(stream.feed(tokenizer.token_bytes(id)) for id in ids) == "Hi 😀 é中!"


@pytest.mark.parametrize("char", ["a", "_", " ", "中", "^", "\n", "1"])
def test_very_long_lines(micro: Tokenizer, char: str) -> None:
    """A line of 200,000 equal characters is tokenized in far less than ten seconds."""
    start = time.thread_time()
    ids = micro.encode(char * 200_000, add_bos=False)
    assert time.thread_time() - start < 5
    assert b"".join(map(micro.token_bytes, ids)).decode() == char * 200_000


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["It", "'S", " ", "1", "2", "3", "4", "5", " x", "!!", "  ", " y", "\n\n", "z"]),
        ("llama-bpe", ["It", "'S", " ", "123", "45", " x", "!!", "  ", " y", "\n\n", "z"]),
        ("gpt-2", ["It", "'", "S", " 12345", " x", "!!", "  ", " y", "\n", "\n", "z"]),
        ("smollm", ["It", "'", "S", " ", "1", "2", "3", "4", "5", " x", "!!", "  ", " y", "\n", "\n", "z"]),
        ("default", ["It", "'", "S", " ", "123", "45", " x", "!!", "  ", " y", "\n", "\n", "z"]),
    ],
)
def test_splits(pre: str, pieces: list[str]) -> None:
    """Each pre-tokenizer cuts a text as its models were trained: no token spans two pieces."""
    tokenizer = tokenizer_of(small_keys(pre=pre))
    tokenizer.encode("")
    cut = tokenizer._bpe.pre_tokenizer.pre_tokenize_str("It'S 12345 x!!   y\n\nz")
    assert ["It'S 12345 x!!   y\n\nz"[a:b] for _, (a, b) in cut] == pieces


def test_merges_that_make_no_token_are_left_out() -> None:
    """A merge whose result is not in the vocabulary does nothing."""
    tokenizer = tokenizer_of(small_keys(merges=["h e", "x y"]))
    assert len(tokenizer.encode("hexy", add_bos=False)) == 3


def made_up(pre: str) -> dict[str, Any]:
    """A vocabulary with long tokens, tokens that are there twice, and merges that make nothing."""
    tokens, merges = merged_tokens(3000)
    for n in (2, 4, 8, 16, 32, 64):
        merges.append(f"{'Ġ' * (n // 2)} {'Ġ' * (n // 2)}")
        tokens.append("Ġ" * n)
    tokens += ["中", "th", tokens[700], "<|endoftext|>"]
    return small_keys(
        tokens=tokens,
        merges=[*merges, merges[5], "no token"],
        token_type=[1] * len(tokens),
        pre=pre,
        eos_token_id=len(tokens) - 1,
        add_bos_token=False,
    )


TEXTS = st.one_of(
    st.text(),
    st.builds(sample_text, st.integers(1, 60), st.integers(0, 1000)),
    st.text(alphabet="eta n\n", max_size=300),
)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_tokens_that_do_not_occur_change_nothing(pre: str) -> None:
    """Merging with the tokens alone that occur in the texts makes the tokens that all of them would."""
    vocabulary = read_vocabulary(made_up(pre))
    growing, whole = Tokenizer(vocabulary), Tokenizer(vocabulary)
    whole._know(np.ones(whole.n_tokens, np.bool_) & (vocabulary.slots < len(vocabulary.hashes)))

    @given(text=TEXTS)
    def check(text: str) -> None:
        expected = whole.encode(text)
        fresh = Tokenizer(vocabulary)
        assert fresh.encode(text) == expected
        assert growing.encode(text) == expected
        assert set(expected) <= set(np.flatnonzero(fresh._known).tolist())

    check()


def test_few_tokens_are_told_for_a_prompt() -> None:
    """For a prompt a small part of the vocabulary is enough; for a book all of it is told."""
    vocabulary = read_vocabulary(made_up("qwen2"))
    few, all_of_it = Tokenizer(vocabulary), Tokenizer(vocabulary)
    few.encode("eta the teta")
    assert 256 < few._known.sum() < 400
    all_of_it.encode("e" * (tokenizer_module.SEARCHED_BYTES_MAX + 1))
    assert all_of_it._known.sum() == (vocabulary.slots < len(vocabulary.hashes)).sum() > 3000


def test_many_texts_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many prompts have the tokens of each alone, and the vocabulary is searched and told once for all of them."""
    texts = [sample_text(n) for n in range(20)]
    expected = [tokenizer_of(made_up("qwen2")).encode(text) for text in texts]
    built: list[int] = []
    build = tokenizer_module._build_bpe
    monkeypatch.setattr(tokenizer_module, "_build_bpe", lambda *given: built.append(1) or build(*given))
    monkeypatch.setattr(tokenizer_module, "SEARCHED_BYTES_MAX", len("".join(texts)) * 2)
    assert tokenizer_of(made_up("qwen2")).encode_all(texts) == expected
    assert len(built) == 1


def test_hashes_that_are_all_the_same_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens share a hash, the tokens of a text are the same."""
    text = sample_text(50)
    expected = tokenizer_of(made_up("qwen2")).encode(text)
    monkeypatch.setattr(tokenizer_module, "_FACTOR", 0)
    assert tokenizer_of(made_up("qwen2")).encode(text) == expected


def test_bytes_that_are_added_tokens_stay_bytes() -> None:
    """A control or user-defined token of one character still merges as the byte that it spells."""
    bang, space = byte_tokens().index("!") + 1, byte_tokens().index("Ġ") + 1
    types = [3] + [1] * 258
    types[space] = 4
    tokenizer = tokenizer_of(small_keys(eos_token_id=bang, token_type=types, add_bos_token=False))
    assert tokenizer.encode("! !") == [bang, space, bang]
    assert tokenizer.token_bytes(bang) == b""
    assert tokenizer.token_bytes(space) == "Ġ".encode()


def test_large_vocabulary_is_quick() -> None:
    """A tokenizer of 150,000 tokens and merges is built in a few seconds."""
    letters = byte_tokens()[:200]
    pairs = [a + b for a in letters for b in letters]
    triples = [pair + letters[n % 7] for n, pair in enumerate(pairs * 3)]
    tokens = list(dict.fromkeys(byte_tokens() + pairs + [t + letters[n % 11] for n, t in enumerate(triples)]))
    start = time.thread_time()
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": [f"{p[0]} {p[1]}" for p in pairs] * 4}
    read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in keys.items()})
    assert len(tokens) > 100_000
    assert time.thread_time() - start < 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": None}, "lacks the key tokenizer.ggml.model"),
        ({"model": "llama"}, "tokenizer.ggml.model is llama, which is not known here; known are gpt2"),
        ({"pre": None}, "lacks the key tokenizer.ggml.pre"),
        ({"pre": "unheard\x1bof"}, r"tokenizer.ggml.pre is unheard\\x1bof, which is not known here; known are qwen2, "),
        ({"tokens": None}, "lacks the key tokenizer.ggml.tokens"),
        ({"tokens": np.arange(9)}, "tokenizer.ggml.tokens is not a list of strings"),
        ({"tokens": ["a"], "token_type": [1]}, "tokenizer.ggml.tokens has no token for the byte 0x"),
        ({"merges": None}, "lacks the key tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' is not two tokens"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type does not have one number for each of the 259 tokens"),
        ({"eos_token_id": 259}, "tokenizer.ggml.eos_token_id is 259, but there are 259 tokens"),
        ({"bos_token_id": "x"}, "tokenizer.ggml.bos_token_id is x"),
        ({"bos_token_id": None}, "tokenizer.ggml.bos_token_id is missing"),
    ],
)
def test_metadata_that_makes_no_tokenizer(changes: dict[str, Any], says: str) -> None:
    """A key that is missing, unknown or does not fit is refused by its full name."""
    with pytest.raises(ModelError, match=says) as caught:
        tokenizer_of(small_keys(**changes))
    assert len(str(caught.value).splitlines()) == 1


def test_text_that_is_not_unicode(micro: Tokenizer) -> None:
    """A lone surrogate, as undecodable arguments have, is refused in one line."""
    with pytest.raises(ValueError, match="not valid Unicode at character 1"):
        micro.encode("a\udcff")
