"""Prompts, pieces of characters, stop strings and escapes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_client.text import StopStrings, Utf8Stream, escape_controls, read_prompt_file


@given(st.text(), st.data())
def test_pieces_of_characters_make_the_same_text(text: str, data: st.DataObject) -> None:
    """However the bytes of a text are cut, the pieces given out are whole characters and make the text."""
    raw = text.encode("utf-8")
    stream, out, at = Utf8Stream(), "", 0
    while at < len(raw):
        n = data.draw(st.integers(1, 3))
        piece = stream.feed(raw[at : at + n])
        assert "\ufffd" not in piece or "\ufffd" in text
        out, at = out + piece, at + n
    assert out + stream.flush() == text


def test_characters_come_with_their_last_byte() -> None:
    """A character is given out as soon as it is whole."""
    stream = Utf8Stream()
    assert [stream.feed(bytes([byte])) for byte in "é😀!".encode()] == ["", "é", "", "", "", "😀", "!"]


def test_invalid_bytes_are_replaced_at_once() -> None:
    """A byte that no later one can make valid becomes U+FFFD without waiting."""
    stream = Utf8Stream()
    assert stream.feed(b"a\xff") == "a\ufffd"
    assert stream.feed(b"\xe4") == ""
    assert stream.feed(b"b") == "\ufffdb"


def test_a_broken_tail_is_one_replacement() -> None:
    """A stream that ends within a character ends with U+FFFD, never with half a character."""
    stream = Utf8Stream()
    assert stream.feed("😀".encode()[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize(
    ("stops", "said"),
    [
        (["two three"], " one "),
        (["four"], " one two three "),
        (["o"], " "),
        (["zebra", "ree"], " one two th"),
        (["fourteen"], " one two three four"),
        ([], " one two three four"),
    ],
)
def test_stop_strings_across_pieces(stops: list[str], said: str) -> None:
    """Text ends before a stop string, also where it spans pieces or sits inside one."""
    stop = StopStrings(stops)
    pieces = [stop.feed(piece) for piece in (" one", " tw", "o th", "ree", " four")]
    assert "".join(pieces) + stop.flush() == said
    assert stop.stopped == (said != " one two three four")


@given(st.lists(st.text("ab", min_size=1), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_stop_strings_never_get_out(pieces: list[str], stops: list[str]) -> None:
    """What is given out holds no stop string and is the text before the first one that was completed."""
    stop, out, come = StopStrings(stops), "", ""
    for piece in pieces:
        come += piece
        out += stop.feed(piece)
        assert come.startswith(out)
        assert not any(s in out for s in stops)
        if stop.stopped:
            assert stop.feed("b") == stop.flush() == ""
            assert out == come[: min(at for s in stops if (at := come.find(s)) >= 0)]
            return
    assert out + stop.flush() == come
    assert not any(s in come for s in stops)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    """Only what could still become a stop string waits."""
    stop = StopStrings(["stop"])
    assert stop.feed("no st") == "no "
    assert stop.feed("range") == "strange"


def test_an_empty_stop_string_is_refused() -> None:
    """A stop string without a character names the flag."""
    with pytest.raises(ValueError, match="--stop"):
        StopStrings(["x", ""])


def test_controls_are_escaped() -> None:
    """Nothing that drives a terminal or turns text around passes; letters, newlines and tabs do."""
    assert escape_controls("a\x1b[2J\x07\x9b\x7f\r\u202eé😀\n\t") == "a\\x1b[2J\\x07\\x9b\\x7f\\x0d\\u202eé😀\n\t"
    assert escape_controls("a\nb\ud800", keep="") == "a\\x0ab\\ud800"


@given(st.text())
def test_escaped_text_has_no_controls(text: str) -> None:
    """No C0, DEL or C1 character is left, and text without them stays as it is."""
    escaped = escape_controls(text, keep="")
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in escaped)
    if text.isalnum():
        assert escaped == text


@pytest.mark.parametrize("data", [b"One\r\ntwo\r\n", b"\xef\xbb\xbfOne", b"a\0b", b"no newline", b"", "é中\n".encode()])
def test_prompt_files_are_read_as_they_are(tmp_path: Path, data: bytes) -> None:
    """Line ends, byte order mark, NUL and a missing newline stay."""
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    assert read_prompt_file(str(path)).encode() == data


def test_prompt_file_that_is_not_utf8(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are refused in one line with the file and the place."""
    path = tmp_path / "latin1.txt"
    path.write_bytes("A quiet café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin1\.txt: not UTF-8 text: byte 11 is 0xe9") as caught:
        read_prompt_file(str(path))
    assert "\n" not in str(caught.value)
