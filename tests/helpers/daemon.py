"""A real daemon on a temporary runtime directory, and the commands that talk to it."""

import array
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata_client.connection import NoDaemon, dial

READY_TIMEOUT_S = 60
VMMD = ("-m", "vmmd.main")
PIPE_BYTES = 4096
"""What a started client can write before somebody reads: a pipe's least."""
LONG = ("--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--seed", "3", "--max-tokens", "2000")
"""For a text of which no end is to be seen: it is longer than what a started client's pipe holds."""


class Daemon:
    """A running `vmmd`; its directory is short, because socket paths must be.

    Args:
        config: lines of its configuration, after the driver's.
        driver: which one.
        program: how Python is told to run it.
        environment: what is added to this process's own.
        state_dir: where it keeps what it learns; its own unless given.
    """

    def __init__(
        self,
        config: str = "",
        *,
        driver: str = "host",
        program: Sequence[str] = VMMD,
        environment: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        self.log = self.directory / "log"
        self.state_dir = state_dir or self.directory / "state"
        self._clients: list[subprocess.Popen[bytes]] = []
        own = f'driver = "{driver}"\nstate_dir = "{self.state_dir}"\n'
        (self.directory / "vmmd.toml").write_text(own + config)
        argv = [sys.executable, *program, "--runtime-dir", os.fspath(self.directory)]
        argv += ["--config", os.fspath(self.directory / "vmmd.toml")]
        with self.log.open("wb") as log:
            env = {**os.environ, **(environment or {})}
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            wait_until(self._is_ready, READY_TIMEOUT_S, lambda: f"vmmd is not ready: {self.log.read_text()}")
        except BaseException:
            self.stop()
            raise

    def status(self) -> dict[str, Any]:
        """The snapshot that `vmmctl status --output json` prints."""
        done = vmmctl("status", "--output", "json", "--socket", os.fspath(self.directory))
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def generate(self, *args: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Runs `strata-client generate` against this daemon to its end."""
        return client("generate", *args, "--socket", os.fspath(self.directory), **options)

    def start_generate(self, *args: str) -> subprocess.Popen[bytes]:
        """Starts `strata-client generate` against this daemon; returns once it has written text, the first byte read.

        With more than `PIPE_BYTES` of output it cannot end before somebody reads on.
        """
        process = start_client("generate", *args, "--socket", os.fspath(self.directory))
        self._clients.append(process)
        assert process.stdout is not None
        first = process.stdout.read(1)
        assert first, process.communicate()[1]
        return process

    def kill(self) -> None:
        """Ends the daemon as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ends clients and daemon, whatever state they are in, and removes the directory."""
        for process in self._clients:
            if process.poll() is None:
                process.kill()
            process.communicate()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, f"vmmd ended: {self.log.read_text()}"
        try:
            _, sock = dial([self.directory])
        except NoDaemon:
            return False
        sock.close()
        return (self.directory / "vmmd.sock").exists()


@contextmanager
def running_daemon(config: str = "") -> Iterator[Daemon]:
    """A daemon with this configuration, host driver, ended at the end."""
    daemon = Daemon(config)
    try:
        yield daemon
    finally:
        daemon.stop()


def client(*args: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs `strata-client` to its end."""
    return _run("strata_client.main", args, timeout, options)


def start_client(*args: str, **options: Any) -> subprocess.Popen[bytes]:
    """Starts `strata-client`; both its outputs are pipes that hold `PIPE_BYTES`, and are read without a buffer."""
    argv = [sys.executable, "-m", "strata_client.main", *args]
    out, err = subprocess.PIPE, subprocess.PIPE
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, bufsize=0, pipesize=PIPE_BYTES, **options
    )


def unread_bytes(process: subprocess.Popen[bytes]) -> int:
    """How much of a process's output nobody has read yet."""
    assert process.stdout is not None
    count = array.array("i", [0])
    fcntl.ioctl(process.stdout, termios.FIONREAD, count)
    return count[0]


def vmmctl(*args: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs `vmmctl` to its end."""
    return _run("vmmd.ctl.main", args, timeout, options)


def _run(
    module: str, args: Sequence[str], timeout: float, options: dict[str, Any]
) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-m", module, *args]
    options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("stdout", subprocess.PIPE)
    return subprocess.run(argv, stderr=subprocess.PIPE, timeout=timeout, check=False, **options)


def wait_until(
    true: Callable[[], bool], timeout_s: float = 30, otherwise: Callable[[], str] = lambda: "timed out"
) -> None:
    """Waits until `true()` holds; fails with `otherwise()` after `timeout_s`, by default long for a noisy machine."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.02)
