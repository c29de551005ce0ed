"""The runtime directory, its lock and sockets, and claims of devices."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from strata_api.v1 import paths

from vmmd.errors import InvalidRequest, NoDevice, PermissionDenied, PreconditionFailed, VmmError
from vmmd.runtime_dir import (
    DeviceClaim,
    Lock,
    RuntimeDir,
    bind_broker,
    open_socket_to_group,
    prepare,
    remove_socket,
)


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose sockets' paths fit."""
    return tmp_path_factory.mktemp("r")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def child(code: str) -> subprocess.Popen[str]:
    """Another process that runs `code`, has printed a line, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint('ready', flush=True)\nimport signal\nsignal.pause()"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"RUNTIME_DIRECTORY": "/run/a:/run/b", "XDG_RUNTIME_DIR": "/x"}, 7, "/run/a"),
        ({"XDG_RUNTIME_DIR": "/x"}, 7, "/x/strata"),
        ({"XDG_RUNTIME_DIR": "/x"}, 0, "/x/strata"),
        ({"XDG_RUNTIME_DIR": "relative"}, 7, "/tmp/strata-7"),
        ({"XDG_RUNTIME_DIR": "", "RUNTIME_DIRECTORY": ""}, 7, "/tmp/strata-7"),
        ({}, 0, "/run/strata"),
    ],
)
def test_default_runtime_dir(environ: dict[str, str], uid: int, expected: str) -> None:
    """systemd's directory comes first, then the user's, then one by user id."""
    assert paths.default_runtime_dir(environ, uid) == Path(expected)


def test_client_runtime_dirs(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look in their own directory, then in the host's, and never in one that somebody else made."""
    host = short / "host"
    monkeypatch.setattr(paths, "HOST_RUNTIME_DIR", host)
    environ = {"XDG_RUNTIME_DIR": str(short)}
    assert paths.client_runtime_dirs(environ) == []
    (short / "strata").mkdir()
    host.mkdir()
    assert paths.client_runtime_dirs(environ) == [short / "strata", host]
    if os.geteuid() == 0:
        os.chown(short / "strata", 65534, 65534)
        assert paths.client_runtime_dirs(environ) == [host]


def test_prepare_makes_the_directory(short: Path) -> None:
    """A missing directory is made with mode 0750, its private one with 0700, whatever the umask; again is fine."""
    before = os.umask(0o077)
    try:
        directory = prepare(short / "strata")
    finally:
        os.umask(before)
    assert directory == prepare(None, {"XDG_RUNTIME_DIR": str(short)})
    assert (mode(directory.path), mode(directory.private)) == (0o750, 0o700)
    assert (directory.grpc_socket.name, directory.broker_socket.name) == ("vmmd.sock", "handles.sock")


def check_refused(directory: Path, error: type[VmmError], says: str) -> None:
    with pytest.raises(error) as caught:
        prepare(directory)
    assert says in caught.value.message
    assert str(directory) in caught.value.message
    assert caught.value.message.isprintable()


def test_missing_parent(short: Path) -> None:
    """A directory whose parent is missing is named, and nothing is made."""
    check_refused(short / "none/there", InvalidRequest, "none does not exist")
    assert not (short / "none").exists()


def test_too_long(short: Path) -> None:
    """A socket path of 108 bytes is refused with path and limit; one of 107 works."""
    longest = 107 - len("/handles.sock")
    fits = short / ("d" * (longest - len(str(short)) - 1))
    directory = prepare(fits)
    bind_broker(directory).close()
    check_refused(fits.with_name(fits.name + "d"), InvalidRequest, "108 bytes, at most 107")
    assert paths.socket_path_problem(Path("é" * 54)) is not None


@pytest.mark.parametrize("wrong", [0o770, 0o757, 0o777])
def test_writable_by_others(short: Path, wrong: int) -> None:
    """A directory that its group or all may write is refused."""
    path = short / "strata"
    path.mkdir()
    path.chmod(wrong)
    check_refused(path, PermissionDenied, f"mode 0{wrong:o}")


def test_readable_private(short: Path) -> None:
    """A private directory that others may read is refused."""
    prepare(short / "strata").private.chmod(0o750)
    check_refused(short / "strata", PermissionDenied, "private has mode 0750")


def test_not_a_directory(short: Path) -> None:
    """A file or a link in the way is refused."""
    (short / "file").touch()
    check_refused(short / "file", InvalidRequest, "is no directory")
    (short / "link").symlink_to(short)
    check_refused(short / "link", InvalidRequest, "is no directory")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_somebody_elses(short: Path) -> None:
    """A directory of another user is refused."""
    path = short / "theirs"
    path.mkdir(0o750)
    os.chown(path, 65534, 65534)
    check_refused(path, PermissionDenied, "belongs to user 65534")


def test_lock(short: Path) -> None:
    """A second daemon is told the first one's pid; a killed one leaves no lock."""
    directory = prepare(short / "strata")
    other = child(
        f"from pathlib import Path; from vmmd.runtime_dir import *; x = Lock(RuntimeDir(Path({str(directory.path)!r})))"
    )
    try:
        with pytest.raises(PreconditionFailed) as caught:
            Lock(directory)
        assert caught.value.message == f"another vmmd (pid {other.pid}) is running in {directory.path}"
    finally:
        end(other)
    lock = Lock(directory)
    assert (directory.private / "lock").read_text() == f"{os.getpid()}\n"
    lock.close()
    lock.close()
    Lock(directory).close()


def test_stale_socket(short: Path) -> None:
    """A dead daemon's socket makes room for the next one's, which the group may use."""
    directory = prepare(short / "strata")
    bind_broker(directory).close()
    assert directory.broker_socket.is_socket()
    with bind_broker(directory) as listener:
        assert mode(directory.broker_socket) == 0o660
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(directory.broker_socket))
        assert listener.type == socket.SOCK_SEQPACKET and not listener.get_inheritable()
    remove_socket(directory.broker_socket)
    remove_socket(directory.broker_socket)
    assert not directory.broker_socket.exists()


def make_file(path: Path) -> None:
    path.write_text("somebody's notes")


def make_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("make", [make_file, make_link, Path.mkdir])
def test_no_socket_in_the_way(short: Path, make: Callable[[Path], None]) -> None:
    """Whatever is no socket stays, and is named."""
    directory = prepare(short / "strata")
    make(directory.broker_socket)
    with pytest.raises(PreconditionFailed, match=r"handles.sock is in the way"):
        bind_broker(directory)
    assert directory.broker_socket.lstat()


def test_group_may_use_a_socket(short: Path) -> None:
    """The socket that gRPC binds gets the same mode."""
    path = RuntimeDir(short).grpc_socket
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        open_socket_to_group(path)
    assert mode(path) == 0o660


def test_device_claim() -> None:
    """A device has one daemon on the host: the next one is told uuid and pid, until the first has gone."""
    uuid = f"GPU-test-{os.getpid()}"
    other = child(f"from vmmd.runtime_dir import *; x = DeviceClaim({uuid!r})")
    try:
        DeviceClaim(f"{uuid}-2").close()
        for _ in range(3):
            with pytest.raises(NoDevice) as caught:
                DeviceClaim(uuid)
            assert caught.value.message == f"device {uuid} is managed by another vmmd (pid {other.pid})"
    finally:
        end(other)
    claim = DeviceClaim(uuid)
    claim.close()
    claim.close()
    DeviceClaim(uuid).close()


def test_device_claim_without_pid() -> None:
    """Where the owner's pid cannot be had, the uuid is still named."""
    uuid = f"GPU-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as squatter:
        squatter.bind(f"\0strata-vmmd-device-{uuid}")
        with pytest.raises(NoDevice, match=f"device {uuid} is managed by another vmmd$"):
            DeviceClaim(uuid)


def test_device_name_too_long() -> None:
    """A name that no socket can carry is refused."""
    with pytest.raises(InvalidRequest, match="too long"):
        DeviceClaim("x" * 100)
