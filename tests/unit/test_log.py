"""The log: one safe line per event, whatever the strings in it."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from vmmd.log import configure, printable

NASTY = "a\x1b[31mb\x07c\x9bd\ne\u202ef\udc9bg"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    """structlog and logging as they were."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def json_lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def check_safe(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    for bad in (b"\x1b", b"\x07", b"\xc2\x9b", b"\xe2\x80\xae", b"\r"):
        assert bad not in data


def test_printable() -> None:
    """What could steer a terminal is escaped; what people write is not."""
    assert printable(NASTY) == r"a\x1b[31mb\x07c\x9bd\ne\u202ef\udc9bg"
    assert printable("Hi 😀 é中!") == "Hi 😀 é中!"


def test_json() -> None:
    """Each event is one JSON object with level, time and its values."""
    stream = io.StringIO()
    configure("info", "auto", stream)
    log = structlog.get_logger()
    log.debug("not.shown")
    log.info("lease.granted", slabs=3, user=NASTY, ids=[1, NASTY], nested={NASTY: NASTY}, ratio=0.5, what=None)
    (line,) = json_lines(stream)
    assert line.pop("timestamp").endswith("Z")
    clean = printable(NASTY)
    assert line == {
        "event": "lease.granted",
        "level": "info",
        "slabs": 3,
        "user": clean,
        "ids": [1, clean],
        "nested": {clean: clean},
        "ratio": 0.5,
        "what": None,
    }
    check_safe(stream.getvalue())


@pytest.mark.parametrize("format", ["auto", "console"])
def test_console(format: str) -> None:
    """On a terminal an event is a readable line, without colours and without control characters."""
    stream = Terminal()
    configure("info", format, stream)
    structlog.get_logger().info("session.opened", user=NASTY, pid=7)
    text = stream.getvalue()
    assert "session.opened" in text and "pid=7" in text and text.count("\n") == 1
    check_safe(text)


@pytest.mark.parametrize("format", ["json", "console"])
def test_exceptions(format: str) -> None:
    """A traceback is logged whole, and its message is as harmless as any string."""
    stream = Terminal()
    configure("info", format, stream)
    try:
        raise ValueError(NASTY)
    except ValueError:
        structlog.get_logger().exception("rpc.failed")
    text = stream.getvalue()
    assert "Traceback" in text and "rpc.failed" in text
    check_safe(text)


@pytest.mark.parametrize("format", ["json", "console"])
def test_secrets(format: str) -> None:
    """Tokens, nonces and prompts are never written, on any level of nesting."""
    stream = io.StringIO()
    configure("debug", format, stream)
    structlog.get_logger().info("x", token="hunter2", call={"strata-token": "hunter2", "Nonce": b"hunter2"})
    assert "hunter2" not in stream.getvalue()
    assert stream.getvalue().count("[secret]") == 3


@pytest.mark.parametrize("format", ["json", "console"])
def test_libraries(format: str) -> None:
    """What libraries log goes the same way, warnings and worse only."""
    stream = io.StringIO()
    configure("debug", format, stream)
    logging.getLogger("grpc").info("not shown")
    logging.getLogger("grpc").warning("odd %s", NASTY)
    text = stream.getvalue()
    assert text.count("\n") == 1 and "odd a" in text
    check_safe(text)


def test_reader_gone() -> None:
    """A log that nobody reads any more does not stop the daemon."""
    configure("info", "json", Gone())
    structlog.get_logger().info("x")
    logging.getLogger("grpc").warning("x")
