"""The two connections to a daemon: the broker's socket, and gRPC.

The broker connection is the session: it is made first, it gives the token that
every gRPC call carries, and descriptors come over it. gRPC is imported only
when a channel is asked for, so that "no daemon there" is known within
milliseconds.
"""

import array
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from strata_api.v1 import broker_pb2 as wire
from strata_api.v1.pages import PROTOCOL_VERSION
from strata_api.v1.paths import BROKER_SOCKET, GRPC_SOCKET, client_runtime_dirs, default_runtime_dir

from vmmd.errors import BY_REASON, Exhausted, InvalidRequest, PermissionDenied, StaleGeneration, Unavailable, VmmError

if TYPE_CHECKING:
    import grpc

DESCRIPTORS_MAX = 250
"""Descriptors a packet may carry (the kernel's own limit is 253)."""

TOKEN_KEY = "strata-token"
_DOMAIN = "strata"
_PACKET_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 5
_REPLY_TIMEOUT_S = 60
_DESCRIPTORS_SPARE = 8  # left for whatever else this process opens meanwhile


class NoDaemon(Unavailable):
    """Nothing answers in the runtime directory."""

    reason = "no_daemon"


class Grant(NamedTuple):
    """A piece of a batch: its entries and their descriptors, which the receiver closes."""

    entries: Sequence[wire.BatchEntry]
    fds: Sequence[int]


def runtime_directories(given: str | None) -> list[Path]:
    """Where to look for a daemon, in order: what `--socket` names, or the usual places.

    `given` is a runtime directory, or the path of a vmmd.sock in one.
    """
    if given is None:
        return client_runtime_dirs() or [default_runtime_dir()]
    path = Path(os.path.abspath(given))
    return [path.parent if path.name == GRPC_SOCKET else path]


def dial(directories: Sequence[Path]) -> tuple[Path, socket.socket]:
    """Connects to the broker in the first directory where one answers; the caller owns the socket.

    Errors: `NoDaemon` (no socket, nobody behind it, or a path that no socket can
    have), `Unavailable` (it does not accept in 5 s).
    """
    reasons = []
    for directory in directories:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            _set_timeouts(sock, _CONNECT_TIMEOUT_S)
            sock.connect(os.fspath(directory / BROKER_SOCKET))
        except BlockingIOError as error:
            sock.close()
            raise Unavailable(f"the daemon at {directory} accepts no connection in {_CONNECT_TIMEOUT_S} s") from error
        except OSError as error:
            sock.close()
            reasons.append(f"no daemon at {directory}: {error.strerror or error}")
        except BaseException:
            sock.close()
            raise
        else:
            return directory, sock
    raise NoDaemon("; ".join(reasons))


def raise_descriptor_limit() -> None:
    """Raises this process's soft limit on open descriptors to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Asked(NamedTuple):
    """What a client asks for its session; None: what its user's sessions may have.

    Attributes:
        wait_s: how long requests for memory that others hold may wait.
        guarantee_bytes: K/V on each device that is kept for the session.
        cap_bytes: K/V on each device that it holds at most.
        priority: before whom its requests are served.
    """

    wait_s: float = 0.0
    guarantee_bytes: int | None = None
    cap_bytes: int | None = None
    priority: int | None = None


class Broker:
    """A session's connection to the broker. For any thread: one request at a time.

    Attributes:
        epoch: the daemon's; every reply is compared with it.
        session_id: this session's number in the daemon.
        token: what gRPC calls carry.
        page_fd: the session page's descriptor, which the receiver closes.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        admin: bool = False,
        asked: Asked = Asked(),  # noqa: B008  a tuple
    ) -> None:
        """Says Hello on a connected socket, which belongs to the broker from here on.

        Errors: `PermissionDenied`, `Draining`, `InvalidRequest` (protocol version, or more
        was asked for than may be had), `Exhausted`, `Unavailable` (no answer).
        """
        self._sock = sock
        self._lock = threading.Lock()
        self.page_fd = -1
        try:
            _set_timeouts(sock, _CONNECT_TIMEOUT_S)
            welcome = self._hello(wire.ROLE_ADMIN if admin else wire.ROLE_CLIENT, asked)
            _set_timeouts(sock, _REPLY_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.epoch = welcome.epoch
        self.session_id = welcome.session_id
        self.token = welcome.token

    def check_epoch(self, epoch: int) -> None:
        """Errors: `StaleGeneration` if another daemon answered than we said Hello to."""
        if epoch != self.epoch:
            raise StaleGeneration("the daemon was restarted under this session: start the program again")

    def send_files(self, files_id: int, fds: Sequence[int]) -> None:
        """Lends descriptors of model files; they stay the caller's."""
        for at in range(0, len(fds), DESCRIPTORS_MAX):
            request = wire.BrokerRequest(files=wire.Files(files_id=files_id))
            rights = array.array("i", fds[at : at + DESCRIPTORS_MAX]).tobytes()
            self._ask(request, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], "done")

    def fetch(self, batch_id: int, take: Callable[[Grant], None], at_once: int = DESCRIPTORS_MAX) -> None:
        """Hands a batch to `take` piece by piece, then acknowledges it.

        Each piece has as many descriptors as a packet carries and the limit on
        descriptors leaves, `at_once` at most; `take` closes them before it returns.
        Other threads' requests go on meanwhile: `take` may wait for what they do.

        Errors: `Exhausted` (the descriptor limit leaves no room), `NotFound`.
        """
        first, total = 0, 1
        while first < total:
            room = min(at_once, _descriptors_left() - _DESCRIPTORS_SPARE)
            if room < 1:
                raise _descriptor_error()
            request = wire.BrokerRequest(fetch=wire.Fetch(batch_id=batch_id, first=first, count_max=room))
            reply, fds = self._ask(request, [], "descriptors")
            grant = reply.descriptors
            total = grant.total
            if len(fds) != len(grant.entries) or (grant.next <= first < total):
                _close_all(fds)
                raise Unavailable(f"the broker sent {len(fds)} descriptors for {len(grant.entries)} entries")
            first = grant.next
            if fds:
                take(Grant(grant.entries, fds))
        self._ask(wire.BrokerRequest(ack=wire.Ack(batch_id=batch_id)), [], "done")

    def close(self) -> None:
        """Ends the session: the daemon takes back everything it holds."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        self._sock.close()
        if self.page_fd >= 0:
            os.close(self.page_fd)
            self.page_fd = -1

    def _hello(self, role: wire.Role, asked: Asked) -> wire.Welcome:
        hello = wire.Hello(
            protocol_version=PROTOCOL_VERSION,
            role=role,
            guarantee_bytes=asked.guarantee_bytes,
            cap_bytes=asked.cap_bytes,
            priority=asked.priority,
        )
        reply, fds = self._ask(wire.BrokerRequest(hello=hello), [], "welcome", "challenge")
        if reply.WhichOneof("kind") == "challenge":
            _close_all(fds)
            hello.nonce = reply.challenge.nonce
            reply, fds = self._ask(wire.BrokerRequest(hello=hello), [], "welcome")
        if fds:
            self.page_fd = fds[0]
            _close_all(fds[1:])
        return reply.welcome

    def _ask(
        self, request: wire.BrokerRequest, ancillary: Sequence[tuple[int, int, bytes]], *expected: str
    ) -> tuple[wire.BrokerReply, list[int]]:
        # Credentials are sent, not left to the kernel to add: it adds none to a packet
        # that is under way before the daemon has asked for them.
        credentials = struct.pack("iII", os.getpid(), os.getuid(), os.getgid())
        ancillary = [*ancillary, (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)]
        try:
            with self._lock:
                self._sock.sendmsg([request.SerializeToString()], ancillary)
                data, fds, truncated = self._receive()
        except BlockingIOError as error:
            raise Unavailable("the daemon does not answer on its broker socket") from error
        except OSError as error:
            raise Unavailable(f"the daemon's broker is gone: {error.strerror or error}") from error
        try:
            if truncated & socket.MSG_CTRUNC:
                raise _descriptor_error()
            if not data:
                raise Unavailable("the daemon closed the broker connection")
            reply = wire.BrokerReply.FromString(data)
            kind = reply.WhichOneof("kind")
            if kind == "refused":
                raise BY_REASON.get(reply.refused.reason, VmmError)(reply.refused.message)
            if kind not in expected:
                raise Unavailable(f"the broker answered {kind} where {' or '.join(expected)} was due")
        except BaseException:
            _close_all(fds)
            raise
        return reply, fds

    def _receive(self) -> tuple[bytes, list[int], int]:
        size = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)
        data, ancillary, flags, _ = self._sock.recvmsg(_PACKET_BYTES, size, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return data, fds.tolist(), flags


def open_channel(directory: Path) -> "grpc.Channel":
    """A gRPC channel to the daemon in `directory`, past all proxies; the caller closes it."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import grpc

    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"unix:{quote(os.fspath(directory / GRPC_SOCKET))}", options=options)


@contextmanager
def rebuilt_errors() -> Iterator[None]:
    """Raises what a gRPC call failed with as the `VmmError` that the daemon raised."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        raise rebuild(error) from error


def rebuild(error: Any) -> VmmError:
    """The daemon's error behind a failed call, by its reason code, never by its text."""
    import grpc
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status

    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == _DOMAIN:
            return BY_REASON.get(info.reason, VmmError).rebuild(error.details(), dict(info.metadata))
    text = " ".join(str(error.details()).split())
    classes: dict[Any, type[VmmError]] = {
        grpc.StatusCode.UNAVAILABLE: Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
        grpc.StatusCode.CANCELLED: Unavailable,
        grpc.StatusCode.UNAUTHENTICATED: PermissionDenied,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
        grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    }
    cls = classes.get(error.code(), VmmError)
    return cls(f"the daemon is gone: {text}" if cls is Unavailable else f"the daemon failed: {text}")


def _set_timeouts(sock: socket.socket, seconds: int) -> None:
    # Not settimeout(): a non-blocking connect fails when the backlog is full.
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))


def _descriptors_left() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DESCRIPTORS_MAX + _DESCRIPTORS_SPARE
    return soft - len(os.listdir("/proc/self/fd"))


def _descriptor_error() -> Exhausted:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Exhausted(
        f"no descriptors left to receive memory with: this process may open {soft} (hard limit {hard}); "
        "raise it with `ulimit -n`"
    )


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with suppress(OSError):
            os.close(fd)
