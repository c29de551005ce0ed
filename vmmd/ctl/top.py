"""`vmmctl top`."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from vmmd.ctl.admin import CALL_TIMEOUT_S, admin_stub, socket_option
from vmmd.ctl.status import as_dict

_LINES_BESIDE_SESSIONS = 12
"""Of a frame: the headline, titles, blanks; devices and models come on top."""


@click.command()
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between frames."
)
@click.option(
    "--iterations", type=click.IntRange(min=0), default=0, help="Frames to show.  [default: until q or Ctrl-C]"
)
@socket_option
def top(interval: float, iterations: int, socket_path: str | None) -> None:
    """Shows devices, arenas and sessions live: hit rates, traffic, tokens a second, growths, trades.

    Where standard output is no terminal, frames follow one another as text.
    """
    from rich.live import Live
    from strata_api.v1 import admin_pb2

    from vmmd.ctl.printers import make_console, top_frame

    console = make_console()

    def show(snapshot: dict[str, Any], live: Live | None) -> None:
        taken = _LINES_BESIDE_SESSIONS + len(snapshot["devices"]) + len(snapshot["models"])
        rows_max = max(1, console.height - taken) if live is not None else None
        frame = top_frame(snapshot, console.width, rows_max)
        if live is None:
            console.print(frame)
            sys.stdout.flush()
        else:
            live.update(frame, refresh=True)

    with admin_stub(socket_path) as (stub, metadata):

        def frames(live: Live | None, waits: Callable[[float], bool]) -> None:
            shown = 0
            while True:
                parts = stub.Status(admin_pb2.StatusRequest(), metadata=metadata, timeout=CALL_TIMEOUT_S)
                show(as_dict(parts), live)
                shown += 1
                if shown == iterations or not waits(interval):
                    return
                if live is None:
                    console.print()

        if not console.is_terminal:
            frames(None, _sleep)
        else:
            with _keys() as waits, Live(console=console, screen=True, auto_refresh=False) as live:
                frames(live, waits)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Keys come one by one: a function that waits, and returns False once q is pressed."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def waits(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([fd], [], [], left)[0] and os.read(fd, 1) in (b"q", b""):
                return False
        return True

    try:
        tty.setcbreak(fd)
        yield waits
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
