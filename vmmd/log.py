"""Logging: one event per line on standard error, JSON unless that is a terminal.

Events are named ``lease.granted`` and carry values as keys with units. Strings
may come from clients: every character that could steer a terminal is escaped, and
keys that carry secrets are blanked.
"""

import io
import logging
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any, TextIO, cast

import structlog

_SECRET_KEYS = frozenset({"token", "strata-token", "strata_token", "nonce", "prompt"})


def printable(text: str) -> str:
    """`text` with control characters, line ends and unpaired surrogates escaped; one line, safe to print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Sets up structlog, and sends what libraries log the same way.

    Args:
        level: "debug", "info", "warning" or "error".
        format: "json", "console", or "auto": console on a terminal.
        stream: standard error unless given. A stream that fails loses lines and harms nothing.
    """
    out = cast(TextIO, _Tolerant(stream or sys.stderr))
    console = format == "console" or (format == "auto" and out.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _clean,
    ]
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=False) if console else structlog.processors.JSONRenderer(default=repr)
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _clean, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


def _clean(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    return {
        printable(str(key)): "[secret]" if str(key).lower() in _SECRET_KEYS else _clean_value(value, key == "exception")
        for key, value in event.items()
    }


def _clean_value(value: Any, keep_lines: bool = False) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean_value(item) for item in value]
    if isinstance(value, dict):
        return _clean(None, "", value)
    text = value if isinstance(value, str) else repr(value)
    return "\n".join(map(printable, text.split("\n"))) if keep_lines else printable(text)


class _Tolerant(io.TextIOBase):
    """A stream whose reader may have gone: the daemon goes on without its log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False
