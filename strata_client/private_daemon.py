"""A daemon of one's own, for as long as this process lives: the embedded default."""

import atexit
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from vmmd.errors import Unavailable

_READY_TIMEOUT_S = 30
_LEAVE_TIMEOUT_S = 2
_SERVICE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


class PrivateDaemon:
    """A `vmmd --private` process in a short directory of its own (mode 0700).

    It owns this host's GPUs where there are any that it can use, else simulated devices in the host's memory.
    It leaves when its standard input ends, thus also when this process is killed.
    It runs in a session of its own: a Ctrl-C at the terminal is not for it.
    """

    def __init__(self, slab_bytes_min: int) -> None:
        """Starts the process and returns at once, so that imports overlap its start.

        Its slabs have `slab_bytes_min`, or what its driver would have them be if that is more.
        """
        base = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
        self.directory = Path(tempfile.mkdtemp(prefix="strata-", dir=base))
        atexit.register(self.remove_directory)
        self._log = self.directory / "stderr"
        argv = [sys.executable, "-P", "-m", "vmmd.main", "--private"]
        argv += ["--runtime-dir", os.fspath(self.directory), "--slab-bytes-min", str(slab_bytes_min)]
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env={name: value for name, value in os.environ.items() if name not in _SERVICE_VARIABLES},
                )
        except BaseException:
            self.remove_directory()
            raise

    def wait_ready(self) -> None:
        """Waits until the daemon serves.

        Errors: `Unavailable`, with the daemon's last words, if it ends first or
        needs more than 30 s.
        """
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + _READY_TIMEOUT_S
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise Unavailable(f"the private daemon is not ready after {_READY_TIMEOUT_S} s{self._last_words()}")
        if stdout.readline().strip() != b"ready":
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEAVE_TIMEOUT_S)
            raise Unavailable(f"the private daemon did not start{self._last_words()}")

    def close(self) -> None:
        """Lets the daemon leave, kills it if it does not within 2 s, and removes the directory."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.remove_directory()

    def remove_directory(self) -> None:
        """Removes the runtime directory, whatever is left in it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        atexit.unregister(self.remove_directory)

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            if lines:
                return f": {lines[-1].removeprefix('vmmd: ')}"
        return ""
