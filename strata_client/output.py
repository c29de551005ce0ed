"""What the program says, and how it is told to stop: standard output, standard error, signals."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from strata_client.text import escape_controls


class OutputError(Exception):
    """Standard output cannot be written; the message is one line."""


class Stopped(BaseException):
    """A signal ends the program with `exit_code`, or what stands for one: nobody reads standard output any more."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


_line_is_open = False  # text without an end of line was written to a terminal


class Output:
    """Standard output: UTF-8 whatever the locale, each piece at once.

    On a terminal control characters are escaped.
    """

    def __init__(self) -> None:
        """Errors: `OutputError` if there is no standard output."""
        if sys.stdout is None:
            raise OutputError("standard output is closed: there is nowhere to write to")
        self._is_terminal = sys.stdout.isatty()

    def text(self, text: str) -> None:
        """Writes a piece of text.

        Errors: `Stopped` (the reader has gone), `OutputError` (a full disk).
        """
        global _line_is_open
        if text:
            _line_is_open = self._is_terminal and not text.endswith("\n")
            self._write((escape_controls(text) if self._is_terminal else text).encode("utf-8", "replace"))

    def object(self, **values: Any) -> None:
        """Writes a JSON object on a line of its own. Errors: as `text`."""
        self._write((json.dumps(values, ensure_ascii=False) + "\n").encode())

    def end(self) -> None:
        """Ends a line that is open on a terminal."""
        if _line_is_open:
            self.text("\n")

    @staticmethod
    def _write(data: bytes) -> None:
        try:
            while data:
                data = data[os.write(1, data) :]
        except BrokenPipeError:  # what SIGPIPE would do, had Python not turned it off
            raise Stopped(128 + signal.SIGPIPE) from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise OutputError(f"cannot write to standard output: {reason}") from error


def say(text: str) -> None:
    """One line on standard error, control characters escaped; nobody listening is no error.

    On the terminal that text is written to, it does not begin within a line of that.
    """
    global _line_is_open
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            if _line_is_open and _is_one_terminal():
                sys.stderr.write("\n")
                _line_is_open = False
            sys.stderr.write(escape_controls(text, keep="") + "\n")
            sys.stderr.flush()


def _is_one_terminal() -> bool:
    """Whether standard output and standard error are the same terminal. Errors: `OSError`."""
    return os.isatty(1) and os.isatty(2) and os.fstat(1).st_rdev == os.fstat(2).st_rdev


def keep_standard_descriptors() -> None:
    """Opens /dev/null in the place of closed standard descriptors, so that nothing else lands there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(fd, True)


def seconds_since_start() -> float:
    """How long ago this process began, interpreter start included."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


class Signals:
    """Ctrl-C, termination and Ctrl-Z, for the main thread.

    The first SIGINT, SIGTERM or SIGHUP raises `Stopped`, which also breaks off a
    step; the second ends the process at once. SIGTSTP stops it when the step is
    done, so that no reader stays behind.

    A step is entered and left with `hold` and `release` around it: raising there
    could leave the session's lock taken.

    Attributes:
        abandon: called before a sudden exit.
        is_idle: whether no step runs.
    """

    def __init__(self) -> None:
        self.abandon: Callable[[], None] = lambda: None
        self.is_idle: Callable[[], bool] = lambda: True
        self._stop_asked = False
        self._ending = 0
        self._raised = False
        self._holding = False

    def install(self) -> None:
        """Takes over the signals that are not ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_end)
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._on_stop)

    def hold(self) -> None:
        """Nothing is raised from here on."""
        self._holding = True

    def release(self) -> None:
        """Raises what came meanwhile, and from here on at once.

        Errors: `Stopped`.
        """
        self._holding = False
        if self._ending and not self._raised:
            self._raise()

    def between_steps(self) -> None:
        """Stops the process if that was asked for during a step."""
        if self._stop_asked:
            self._stop_asked = False
            signal.raise_signal(signal.SIGSTOP)

    def _on_end(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            self.abandon()
            os._exit(128 + number)
        self._ending = number
        if not self._holding:
            self._raise()

    def _raise(self) -> NoReturn:
        self._raised = True
        raise Stopped(128 + self._ending)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_asked = True
        if self.is_idle():
            self.between_steps()
