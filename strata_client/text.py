"""Text between people, files, tokens and terminals: prompts, pieces, stop strings and escapes."""

import codecs
import re
from collections.abc import Sequence
from pathlib import Path

# C0, DEL and C1 drive terminals (U+009B alone opens a control sequence); the bidirectional
# controls and the two separators make a line look like another one.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class Utf8Stream:
    """Turns the bytes of tokens into text, whole characters only.

    A character that comes in pieces is given out with its last piece. Bytes that no later
    byte can make valid become U+FFFD at once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Text that `data` completes; may be empty."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Ends the stream: U+FFFD if it broke off within a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text before the first occurrence of any of some strings.

    Text that could be the beginning of a stop string is held back until that is settled.

    Attributes:
        stopped: a stop string was met; nothing is given out any more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes the stop strings.

        Raises:
            ValueError: one of them is empty.
        """
        if "" in stops:
            raise ValueError("--stop: the stop string is empty; give at least one character")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that may be given out now that `text` has come."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Ends the text: gives out what was held back, as no stop string came of it."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def escape_controls(text: str, keep: str = "\n\t") -> str:
    r"""Text that a terminal only shows: control characters written as `\x1b` or `\u202e`.

    Escaped are C0, DEL, C1, bidirectional controls, line separators and lone surrogates,
    unless they are in `keep`.
    """

    def escape(match: re.Match[str]) -> str:
        char = match[0]
        if char in keep:
            return char
        return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"

    return _CONTROLS.sub(escape, text)


def read_prompt_file(path: str) -> str:
    """The characters of a UTF-8 file, nothing added or taken.

    Line ends, a trailing newline, NUL and a byte order mark stay as they are.

    Raises:
        ValueError: the file is not UTF-8; the message has the place of the first wrong byte, counted from 0.
        OSError: it cannot be read.
    """
    return _decoded(Path(path).read_bytes(), path)


def read_prompts_file(path: str) -> list[tuple[str, str]]:
    """The lines of a UTF-8 file, each with a name such as ``FILE, line 3``.

    Lines end with LF or CR LF, the last perhaps with neither; nothing else is taken from them.

    Raises:
        ValueError: the file is empty, or a line is not UTF-8; the message has its number.
        OSError: it cannot be read.
    """
    lines = Path(path).read_bytes().split(b"\n")
    if not lines[-1]:
        del lines[-1]
    if not lines:
        raise ValueError(f"{path}: the file is empty; write a prompt on each line")
    names = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
    return [(name, _decoded(line.removesuffix(b"\r"), name)) for name, line in zip(names, lines, strict=True)]


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}; convert the file to UTF-8"
        ) from None
