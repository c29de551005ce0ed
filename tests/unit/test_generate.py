"""The decode loop: what it asks of the engine, and how texts end."""

from collections.abc import Sequence

import pytest

from strata_client.generate import CONTEXT, END, MAX_TOKENS, NO_ROOM, STOP, Generation, generate
from strata_client.sampler import SamplerOptions
from strata_client.text import StopStrings
from strata_client.tokenizer import Tokenizer, read_vocabulary
from tests.helpers.gguf_builder import byte_tokens, small_keys

EOS = 0
OPTIONS = SamplerOptions(temperature=0)


class Script:
    """An engine and its sequence, that says what it was told to say, and notes what it is asked."""

    def __init__(self, text: Sequence[int], cells: int = 100, context: int = 100) -> None:
        self.sequence = self
        self.context = context
        self.refusal = "the memory is used up"
        self.kept = 0
        self.calls: list[object] = []
        self._text = list(text)
        self._cells = cells
        self._said = 0
        self._prompt = 0

    @property
    def position(self) -> int:
        return self._prompt + max(0, self._said - 1)

    def prepare(self, prompt_tokens: int) -> None:
        self.calls.append(("prepare", prompt_tokens))

    def begin(self, prompt: Sequence[int], options: SamplerOptions) -> None:
        self.calls.append(("begin", list(prompt), options))
        self._prompt = len(prompt)

    def has_room(self) -> bool:
        self.calls.append("has_room")
        return self.position < min(self._cells, self.context)

    def settle(self) -> None:
        self.calls.append("settle")

    def next_token(self) -> int:
        self.calls.append("next")
        self._said += 1
        return self._text[self._said - 1]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(read_vocabulary(small_keys()))


def spelled(text: str) -> list[int]:
    """Tokens of a text, a byte each."""
    names = byte_tokens()
    spellings = [names[byte - 33] if 33 <= byte < 127 else None for byte in text.encode()]
    return [1 + names.index(name) for name in spellings if name is not None]


def run(
    tokenizer: Tokenizer, engine: Script, *, max_tokens: int = 50, stops: Sequence[str] = ()
) -> tuple[Generation, str, list[int | None]]:
    pieces: list[tuple[int | None, str]] = []
    prompt = spelled("ab")
    done = generate(engine, tokenizer, prompt, OPTIONS, StopStrings(stops), max_tokens, lambda *p: pieces.append(p))
    return done, "".join(text for _, text in pieces), [token for token, _ in pieces]


def test_the_engine_is_asked_for_one_token_after_the_other(tokenizer: Tokenizer) -> None:
    """Room is made, the prompt begun, and room asked for before each token but the first, once that is out."""
    engine = Script([*spelled("xyz"), EOS])
    done, text, _ = run(tokenizer, engine)
    assert (done.prompt_tokens, done.tokens, done.reason, text) == (2, 3, END, "xyz")
    assert engine.calls == [
        ("prepare", 2),
        ("begin", spelled("ab"), OPTIONS),
        "next",
        "settle",
        *["has_room", "next"] * 3,
    ]


def test_no_token_is_asked_for_beyond_the_last(tokenizer: Tokenizer) -> None:
    """With --max-tokens reached nothing more is asked of the engine; with 0 only the prompt is evaluated."""
    engine = Script(spelled("xyz"))
    done, text, tokens = run(tokenizer, engine, max_tokens=2)
    assert (done.reason, text, tokens) == (MAX_TOKENS, "xy", spelled("xy"))
    assert engine.calls[2:] == ["next", "settle", "has_room", "next"]
    none = Script([])
    done, text, _ = run(tokenizer, none, max_tokens=0)
    assert (done.tokens, done.reason, text) == (0, MAX_TOKENS, "")
    assert [call[0] for call in none.calls if isinstance(call, tuple)] == ["prepare", "begin"]


def test_a_stop_string_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    """The text ends before a stop string, which may come in several tokens."""
    done, text, _ = run(tokenizer, Script(spelled("one;;two")), stops=[";;"])
    assert (done.reason, done.tokens, text) == (STOP, 5, "one")


@pytest.mark.parametrize(
    ("cells", "context", "reason", "detail"),
    [(5, 100, NO_ROOM, "the memory is used up"), (100, 5, CONTEXT, "the context of 5 cells is full")],
)
def test_text_ends_where_there_is_no_cell(
    tokenizer: Tokenizer, cells: int, context: int, reason: str, detail: str
) -> None:
    """The token that no cell is left for is said still; the reason is the context's end or the refusal."""
    done, text, _ = run(tokenizer, Script(spelled("abcdefgh"), cells, context))
    assert (done.reason, done.detail, done.tokens, text) == (reason, detail, 4, "abcd")


def test_a_character_that_the_model_broke_off_is_shown(tokenizer: Tokenizer) -> None:
    """Half a character before the end token is U+FFFD; one that a limit cut in two is left out."""
    half = 1 + byte_tokens().index("Ã")
    assert run(tokenizer, Script([half, EOS]))[1:] == ("\ufffd", [half, None])
    assert run(tokenizer, Script([half, EOS]), max_tokens=1)[1:] == ("", [half])
