"""The broker's server: accepts, identifies, hands out descriptors, notices death.

Runs on the daemon's asyncio loop; nothing here blocks. A packet is answered before
the next one of that connection is read, so one message is outstanding a session,
and a client that does not read its answers waits for itself only.
"""

import array
import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog
from google.protobuf.message import DecodeError
from strata_api.v1 import broker_pb2, pages

from vmmd.broker import identity
from vmmd.core.shares import Asked
from vmmd.errors import InvalidRequest, PermissionDenied, VmmError
from vmmd.manager import Manager
from vmmd.manager.files import check_descriptor
from vmmd.manager.session import Session

log = structlog.get_logger("vmmd.broker")

PACKET_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 250
"""A message; the kernel's own limit is 253 (SCM_MAX_FD)."""

HELLO_DEADLINE_S = 5.0
ACCEPT_PAUSE_S = 0.1
REFUSED_LINGER_S = 1.0
CONNECTIONS_WITHOUT_HELLO_MAX = 256

_ANCILLARY_BYTES = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * 253) + socket.CMSG_SPACE(4)


@dataclass(eq=False)
class _Connection:
    """One accepted socket; `session` once it said Hello as a client."""

    sock: socket.socket
    peer: identity.Peer
    pidfd: int
    confirmed: bool  # the pidfd is the peer's for sure
    nonce: bytes = b""
    session: Session | None = None
    admin: str | None = None  # token
    timer: asyncio.TimerHandle | None = None
    answer: tuple[bytes, list[int]] | None = None  # could not be sent yet; descriptors owned here
    closed: bool = field(default=False)


class Broker:
    """Listens on a SOCK_SEQPACKET socket that the caller has bound (or systemd passed in)."""

    def __init__(
        self,
        manager: Manager,
        listener: socket.socket,
        domain_of: Callable[[int], str],
        *,
        use_peer_pidfd: bool = True,
    ) -> None:
        self._manager = manager
        self._listener = listener
        self._domain_of = domain_of
        self._use_peer_pidfd = use_peer_pidfd
        self._connections: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._refused: set[socket.socket] = set()
        self._paused: asyncio.TimerHandle | None = None
        self.admins: dict[str, int] = {}
        """User ids by the tokens of vmmctl's connections."""

    def start(self) -> None:
        """Begins accepting."""
        self._listener.setblocking(False)
        # Accepted sockets inherit it: a packet may come between accept and anything done then.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add_reader(self._listener, self._accept)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stops accepting and closes every connection."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            self._end(connection, "vmmd leaves")
        for sock in self._refused:
            sock.close()

    # Connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor left: the connection stays in the backlog, so do not spin
            log.warning("broker.accept_failed", why=error.strerror)
            self._loop.remove_reader(self._listener)
            self._paused = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return
        pidfd: int | None = None
        try:
            sock.setblocking(False)
            if sum(c.session is None and c.admin is None for c in self._connections) >= CONNECTIONS_WITHOUT_HELLO_MAX:
                raise PermissionDenied("too many connections that never said Hello; try again in a few seconds")
            peer = identity.peer_of(sock)
            pidfd = identity.peer_pidfd(sock) if self._use_peer_pidfd else None
            confirmed = pidfd is not None
            if pidfd is None:
                pidfd = identity.open_pidfd(peer.pid)
        except (VmmError, OSError) as error:
            self._refuse_unknown(sock, error)
            if pidfd is not None:
                os.close(pidfd)
            return
        connection = _Connection(sock, peer, pidfd, confirmed)
        connection.timer = self._loop.call_later(HELLO_DEADLINE_S, self._end, connection, "no Hello in time")
        self._connections.add(connection)
        self._loop.add_reader(sock, self._readable, connection)
        self._loop.add_reader(pidfd, self._end, connection, "the client's process ended")

    def _refuse_unknown(self, sock: socket.socket, error: Exception) -> None:
        message = error.message if isinstance(error, VmmError) else str(error)
        log.warning("broker.refused", why=message)
        reason = error.reason if isinstance(error, VmmError) else "internal"
        refused = broker_pb2.BrokerReply(refused=broker_pb2.Refused(reason=reason, message=message))
        try:
            sock.send(refused.SerializeToString())
        except OSError:
            pass
        if len(self._refused) >= CONNECTIONS_WITHOUT_HELLO_MAX:
            sock.close()
            return
        self._refused.add(sock)  # closed at once, it would break under the client's Hello, the reason unread
        self._loop.call_later(REFUSED_LINGER_S, self._close_refused, sock)

    def _close_refused(self, sock: socket.socket) -> None:
        self._refused.discard(sock)
        sock.close()

    def _end(self, connection: _Connection, why: str) -> None:
        """Ends a connection and its session, whose process may live on. Never fails."""
        if connection.closed:
            return
        connection.closed = True
        self._connections.discard(connection)
        if connection.timer is not None:
            connection.timer.cancel()
        self._loop.remove_reader(connection.pidfd)
        self._loop.remove_reader(connection.sock)
        self._loop.remove_writer(connection.sock)
        if connection.answer is not None:
            for fd in connection.answer[1]:
                os.close(fd)
        connection.sock.close()
        if connection.admin is not None:
            self.admins.pop(connection.admin, None)
        if connection.session is None:
            os.close(connection.pidfd)
        else:
            self._manager.disconnect(connection.session, why)

    # Packets

    def _readable(self, connection: _Connection) -> None:
        try:
            data, ancillary, flags, _ = connection.sock.recvmsg(
                PACKET_BYTES_MAX, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError as error:
            self._end(connection, f"the connection broke: {error.strerror}")
            return
        fds = _descriptors(ancillary)
        if not data:
            for fd in fds:
                os.close(fd)
            self._end(connection, "the client closed the connection")
            return
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise InvalidRequest(
                    f"a packet has at most {PACKET_BYTES_MAX} bytes and {DESCRIPTORS_MAX} descriptors, and vmmd must"
                    " have descriptors left (LimitNOFILE)"
                )
            self._check_sender(connection, identity.sender_of(ancillary))
            reply, out = self._handle(connection, data, fds)
            fds = []
        except VmmError as error:
            log.warning("broker.refused", pid=connection.peer.pid, uid=connection.peer.uid, why=error.message)
            reply, out = _refused(error), []
        except OSError as error:
            log.warning("broker.failed", pid=connection.peer.pid, why=str(error))
            reply, out = _refused(VmmError(f"vmmd could not do this: {error}")), []
        except Exception as error:  # our own bug: this client hears of it, the others are served
            log.exception("broker.bug", pid=connection.peer.pid)
            reply, out = _refused(VmmError(f"vmmd failed: {type(error).__name__}; its log says more")), []
        finally:
            for fd in fds:
                os.close(fd)
        self._answer(connection, reply.SerializeToString(), out)

    def _check_sender(self, connection: _Connection, sender: identity.Peer | None) -> None:
        """The packet must come from the process that connected, not from a child with its socket."""
        if sender is None or sender.pid != connection.peer.pid or sender.uid != connection.peer.uid:
            who = "nobody" if sender is None else f"pid {sender.pid}"
            raise PermissionDenied(
                f"this connection belongs to pid {connection.peer.pid} and the packet came from {who};"
                " a child process must connect by itself"
            )

    def _answer(self, connection: _Connection, data: bytes, fds: list[int]) -> None:
        """Sends, or waits until it can be sent without reading on; closes `fds` in any case."""
        connection.answer = data, fds
        self._loop.remove_reader(connection.sock)
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        assert connection.answer is not None
        data, fds = connection.answer
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            connection.sock.sendmsg([data], ancillary)
        except BlockingIOError:
            self._loop.add_writer(connection.sock, self._flush, connection)
            return
        except OSError as error:
            self._end(connection, f"the connection broke: {error.strerror}")
            return
        connection.answer = None
        for fd in fds:
            os.close(fd)
        self._loop.remove_writer(connection.sock)
        self._loop.add_reader(connection.sock, self._readable, connection)

    def _handle(self, connection: _Connection, data: bytes, fds: list[int]) -> tuple[broker_pb2.BrokerReply, list[int]]:
        """Answers one packet: the reply and its descriptors. Owns `fds` once it returns."""
        request = broker_pb2.BrokerRequest()
        try:
            request.ParseFromString(data)
        except DecodeError:
            raise InvalidRequest("this packet is no BrokerRequest; is the client of another version?") from None
        kind = request.WhichOneof("kind")
        if fds and kind != "files":
            raise InvalidRequest(f"{len(fds)} descriptors came with a packet that takes none")
        if kind == "hello":
            return self._hello(connection, request.hello)
        session = connection.session
        if session is None:
            raise PermissionDenied("say Hello first, as a client")
        done = broker_pb2.BrokerReply(done=broker_pb2.Done())
        if kind == "files":
            if not fds:
                raise InvalidRequest("no descriptors came with a packet that lends some")
            for fd in fds:
                check_descriptor(fd)
            session.add_files(request.files.files_id, list(fds), self._manager.options.files_max)
            return done, []
        if kind == "fetch":
            return self._fetch(session, request.fetch)
        if kind == "ack":
            self._manager.acknowledge(session, request.ack.batch_id)
            return done, []
        raise InvalidRequest("this packet asks for nothing that this vmmd knows; is the client of a newer version?")

    def _hello(self, connection: _Connection, hello: broker_pb2.Hello) -> tuple[broker_pb2.BrokerReply, list[int]]:
        if connection.session is not None or connection.admin is not None:
            raise InvalidRequest("this connection said Hello already")
        if hello.protocol_version != pages.PROTOCOL_VERSION:
            raise InvalidRequest(
                f"the client speaks protocol version {hello.protocol_version} and this vmmd version"
                f" {pages.PROTOCOL_VERSION}; install the same strata-vmm for both"
            )
        if not connection.confirmed:
            if not connection.nonce or hello.nonce != connection.nonce:
                connection.nonce = secrets.token_bytes(16)
                return broker_pb2.BrokerReply(challenge=broker_pb2.Challenge(nonce=connection.nonce)), []
            if not identity.is_alive(connection.pidfd):
                raise PermissionDenied("the process that connected has ended")
            connection.confirmed = True
        peer = connection.peer
        if hello.role == broker_pb2.ROLE_ADMIN:
            connection.admin = secrets.token_hex(32)
            self.admins[connection.admin] = peer.uid
            welcome = broker_pb2.Welcome(epoch=self._manager.epoch, token=connection.admin)
            fds: list[int] = []
        elif hello.role == broker_pb2.ROLE_CLIENT:
            session = self._manager.connect(
                peer.pid,
                peer.uid,
                peer.gid,
                self._domain_of(peer.uid),
                identity.executable_of(peer.pid),
                connection.pidfd,
                _asked(hello),
            )
            connection.session = session
            session.hang_up = partial(self._end, connection)
            welcome = broker_pb2.Welcome(epoch=self._manager.epoch, session_id=session.session_id, token=session.token)
            fds = [session.page.export()]
        else:
            raise InvalidRequest(f"there is no role {hello.role}")
        if connection.timer is not None:
            connection.timer.cancel()
        return broker_pb2.BrokerReply(welcome=welcome), fds

    def _fetch(self, session: Session, fetch: broker_pb2.Fetch) -> tuple[broker_pb2.BrokerReply, list[int]]:
        count = min(fetch.count_max or DESCRIPTORS_MAX, DESCRIPTORS_MAX)
        found, following, total = self._manager.descriptors(session, fetch.batch_id, fetch.first, count)
        entries = [
            broker_pb2.BatchEntry(kind=item.kind, id=item.id, slab_index=item.slab_index, writable=item.writable)
            for item, _ in found
        ]
        descriptors = broker_pb2.Descriptors(
            batch_id=fetch.batch_id, first=fetch.first, total=total, entries=entries, next=following
        )
        return broker_pb2.BrokerReply(descriptors=descriptors), [fd for _, fd in found]


def _asked(hello: broker_pb2.Hello) -> Asked:
    return Asked(
        hello.guarantee_bytes if hello.HasField("guarantee_bytes") else None,
        hello.cap_bytes if hello.HasField("cap_bytes") else None,
        hello.priority if hello.HasField("priority") else None,
    )


def _refused(error: VmmError) -> broker_pb2.BrokerReply:
    return broker_pb2.BrokerReply(refused=broker_pb2.Refused(reason=error.reason, message=error.message))


def _descriptors(ancillary: "list[tuple[int, int, bytes]]") -> list[int]:
    """Every descriptor that came with a packet; they are ours to close now."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
