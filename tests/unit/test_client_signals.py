"""Signals are raised only where raising is harmless."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from strata_client.output import Signals, Stopped

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


@pytest.fixture
def signals() -> Iterator[Signals]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    installed = Signals()
    installed.install()
    yield installed
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_signal_is_raised_at_once(signals: Signals, number: signal.Signals) -> None:
    """Outside the edges of a step the first signal ends the program with 128 and its number."""
    with pytest.raises(Stopped) as stopped:
        signal.raise_signal(number)
    assert stopped.value.exit_code == 128 + number


def test_signal_at_the_edge_of_a_step_waits(signals: Signals) -> None:
    """While a step is entered or left nothing is raised: the session's lock would stay taken."""
    signals.hold()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(Stopped):
        signals.release()
    signals.hold()
    signals.release()  # raised once, not again


def test_second_signal_ends_the_process_at_once() -> None:
    """A second Ctrl-C does not wait for anything, but leaves no directory behind."""
    program = (
        "import signal\nfrom strata_client.output import Signals\ns = Signals()\ns.install()\n"
        "s.abandon = lambda: print('abandoned', flush=True)\ns.hold()\n"
        "signal.raise_signal(signal.SIGINT)\nsignal.raise_signal(signal.SIGINT)\nprint('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"abandoned\n", b"")


def test_ignored_signals_stay_ignored() -> None:
    """A program that was started with SIGINT ignored (nohup, a shell's &) leaves it so."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Signals().install()
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
        for number in NUMBERS[1:]:
            signal.signal(number, signal.SIG_DFL)
