"""Sessions and identity: who may have what, and what nobody honest would send."""

import asyncio
import os
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from strata_api.v1 import admin_pb2, admin_pb2_grpc, broker_pb2, memory_pb2, pages
from strata_api.v1 import memory_pb2 as wire

from strata_client import connection
from strata_client.connection import Grant
from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.peer import (
    HELLO,
    Admin,
    Client,
    Remote,
    SmallModel,
    Wire,
    client,
    descriptors_of,
    links_of,
    memory_stub,
    public_model,
    wait_for_descriptors,
)
from vmmd.broker import Broker
from vmmd.core.ledger import DeviceRecord
from vmmd.driver.host_memfd import HOST_UUID, HostDriver
from vmmd.errors import InvalidRequest, NotFound, PermissionDenied
from vmmd.manager import Manager
from vmmd.manager import session as session_module
from vmmd.manager.manager import Options

CONFIG = 'slab_bytes = "64KiB"\ngive_back_delay_s = 0.1\n[host]\ndevice_bytes = "4MiB"\nram_bytes = "4MiB"\n'
SLAB_BYTES = 64 << 10

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


_FIND_TESTS = f"import sys; sys.path.append({os.fspath(Path(__file__).parents[2])!r})\n"
"""For programs of their own: the installed package comes first."""


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


@pytest.fixture(scope="module")
def shared(model: SmallModel) -> Iterator[Daemon]:
    """A daemon that holds the model already for each user who opens it below."""
    with running_daemon(CONFIG) as running:
        running.directory.chmod(0o750)
        for uid in (0, 4242) if os.geteuid() == 0 else (0,):
            with Remote(running.directory, uid) as first:
                first.ask("open", model)
        yield running


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """A daemon that is well afterwards: it serves a newcomer and has no descriptor more."""
    pid = shared.process.pid
    with Admin(shared.directory) as admin:
        wait_until(lambda: not admin.status().sessions)
    before = descriptors_of(pid)
    yield shared
    with client(shared.directory) as one:
        one.create()
        one.grow(1)
    wait_for_descriptors(pid, before)


def _refusal(reply: broker_pb2.BrokerReply) -> tuple[str, str]:
    assert reply.WhichOneof("kind") == "refused", reply
    return reply.refused.reason, reply.refused.message


def _fetch(batch_id: int, first: int = 0, count_max: int = 250) -> broker_pb2.BrokerRequest:
    return broker_pb2.BrokerRequest(fetch=broker_pb2.Fetch(batch_id=batch_id, first=first, count_max=count_max))


def _files(files_id: int = 1) -> broker_pb2.BrokerRequest:
    return broker_pb2.BrokerRequest(files=broker_pb2.Files(files_id=files_id))


def _granted(one: Client, slabs: int) -> int:
    """A growth whose batch nobody has fetched; returns its id."""
    kv = one.kv[-1]
    growth = memory_pb2.Growth(range_id=kv.range.range_id, cells=slabs * kv.cells_per_slab)
    return int(one.call("GrowRanges", wire.GrowRangesRequest(growths=[growth])).batch_id)


def test_tokens_that_are_nobodys_are_refused_and_not_logged(daemon: Daemon) -> None:
    """A missing, wrong, old or administrator's token is refused on every Memory call, and no log has it."""
    with client(daemon.directory) as ended:
        old = ended.token()
    with Admin(daemon.directory) as looks:
        wait_until(lambda: not looks.status().sessions)
    _, sock = connection.dial([daemon.directory])
    admin = connection.Broker(sock, admin=True)
    channel, memory = memory_stub(daemon.directory)
    tokens = ["", "f" * 64, "not hex", old, admin.token]
    calls = [
        lambda m: memory.ListDevices(wire.ListDevicesRequest(), metadata=m),
        lambda m: memory.CreateRange(wire.CreateRangeRequest(cells_per_slab=16, cells_max=16), metadata=m),
        lambda m: memory.GrowRanges(wire.GrowRangesRequest(), metadata=m),
        lambda m: memory.ShrinkRange(wire.ShrinkRangeRequest(), metadata=m),
        lambda m: memory.CloseRange(wire.CloseRangeRequest(), metadata=m),
        lambda m: memory.ParkRange(wire.ParkRangeRequest(), metadata=m),
        lambda m: memory.CloseModel(wire.CloseModelRequest(), metadata=m),
        lambda m: list(memory.OpenModel(iter([]), metadata=m)),
        lambda m: list(memory.Watch(iter([]), metadata=m)),
    ]
    for token in tokens:
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                call(((connection.TOKEN_KEY, token),))
            assert isinstance(connection.rebuild(refused.value), PermissionDenied)
    channel.close()
    admin.close()
    refusals = len(tokens) * len(calls)  # each is logged a moment after its answer
    wait_until(lambda: daemon.log.read_text().count('"code": "permission_denied"') >= refusals)
    log = daemon.log.read_text()
    assert not [token for token in (old, admin.token, "f" * 64) if token in log]


def test_a_clients_token_opens_nothing_of_the_administrators(daemon: Daemon) -> None:
    """Calls of vmmctl refuse a client's token, and the daemon does not drain."""
    with client(daemon.directory) as one:
        channel = connection.open_channel(daemon.directory)
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        metadata = ((connection.TOKEN_KEY, one.token()),)
        for call in (
            lambda: list(stub.Status(admin_pb2.StatusRequest(), metadata=metadata)),
            lambda: stub.Drain(admin_pb2.DrainRequest(), metadata=metadata),
            lambda: list(stub.Conversations(admin_pb2.ConversationsRequest(), metadata=metadata)),
            lambda: stub.DropConversation(admin_pb2.DropConversationRequest(name="x"), metadata=metadata),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert isinstance(connection.rebuild(refused.value), PermissionDenied)
        channel.close()


def test_batches_ranges_and_models_of_others_are_not_found(daemon: Daemon, model: SmallModel) -> None:
    """Another session's batch, range or model, and a batch once acknowledged, are as good as not there."""
    with client(daemon.directory) as one, client(daemon.directory) as other:
        one.open(model)
        one.create()
        batch_id = _granted(one, 2)
        mine = one.kv[0].range.range_id
        with pytest.raises(NotFound):
            other.session._broker.fetch(batch_id, lambda grant: None)
        for method, request in (
            ("GrowRanges", wire.GrowRangesRequest(growths=[wire.Growth(range_id=mine, cells=9999)])),
            ("ShrinkRange", wire.ShrinkRangeRequest(range_id=mine)),
            ("CloseModel", wire.CloseModelRequest(model_id=one.opened[0].model_id)),
            ("CreateRange", wire.CreateRangeRequest(model_id=one.opened[0].model_id, cells_per_slab=16, cells_max=16)),
        ):
            with pytest.raises(NotFound):
                other.call(method, request)
        taken: list[int] = []
        one.session._broker.fetch(batch_id, lambda grant: taken.extend(grant.fds))
        assert len(taken) == 2
        for fd in taken:
            os.close(fd)
        with pytest.raises(NotFound):
            one.session._broker.fetch(batch_id, lambda grant: None)


def test_one_batch_is_fetched_while_another_is_taken(daemon: Daemon, model: SmallModel) -> None:
    """Whoever takes a batch may wait for another thread that fetches one, in pieces as small as it likes."""
    with client(daemon.directory) as one:
        one.open(model)
        one.create()
        first, second = _granted(one, 2), _granted(one, 7)
        broker = one.session._broker
        taken: list[int] = []

        def take(grant: Grant) -> None:
            for fd in grant.fds:
                os.close(fd)
            taken.append(len(grant.fds))

        def take_both(grant: Grant) -> None:
            take(grant)
            other = threading.Thread(target=broker.fetch, args=(second, take, 2))
            other.start()
            other.join(30)

        broker.fetch(first, take_both)
        assert taken == [2, 2, 2, 1]


def test_forked_child_gains_nothing_by_the_sockets(daemon: Daemon) -> None:
    """A child's packets on the inherited connection are refused, and the parent's session goes on."""
    code = """
import os, sys
from pathlib import Path
from strata_api.v1 import broker_pb2
from tests.helpers.peer import Wire
w = Wire(Path(sys.argv[1]))
request = broker_pb2.BrokerRequest(fetch=broker_pb2.Fetch(batch_id=1))
child = os.fork()
if child == 0:
    reply = w.ask(request)
    ok = reply.refused.reason == "permission_denied" and f"pid {os.getpid()}" in reply.refused.message
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert w.ask(request).refused.reason == "not_found"
"""
    done = subprocess.run([sys.executable, "-c", _FIND_TESTS + code, os.fspath(daemon.directory)])
    assert done.returncode == 0
    assert "a child process must connect by itself" in daemon.log.read_text()


def test_session_ends_with_its_process_though_a_child_keeps_the_socket(daemon: Daemon) -> None:
    """When the client's process has gone its session ends, whoever else holds the connection."""
    code = """
import os, sys, time
from pathlib import Path
from tests.helpers.peer import Wire
w = Wire(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(os.getpid(), flush=True)
os._exit(0)
"""
    argv = [sys.executable, "-c", _FIND_TESTS + code, os.fspath(daemon.directory)]
    with (
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent,
        Admin(daemon.directory) as admin,
    ):
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.wait()
        wait_until(lambda: pid not in [s.pid for s in admin.status().sessions])


def test_batch_can_be_asked_for_until_it_is_acknowledged(daemon: Daemon) -> None:
    """The same entries come as often as they are asked for, from any entry on, until the acknowledgement."""
    with client(daemon.directory) as one, Wire(daemon.directory) as raw:
        channel, memory = memory_stub(daemon.directory)
        metadata = ((connection.TOKEN_KEY, raw.token),)
        made = memory.CreateRange(wire.CreateRangeRequest(cells_per_slab=16, cells_max=1600), metadata=metadata)
        growth = wire.Growth(range_id=made.range.range_id, cells=160)
        batch_id = memory.GrowRanges(wire.GrowRangesRequest(growths=[growth]), metadata=metadata).batch_id
        for first, count in ((0, 250), (0, 3), (3, 3), (9, 250), (0, 250), (10, 1), (4_000_000_000, 1)):
            kept = len(raw.fds)
            found = raw.ask(_fetch(batch_id, first, count)).descriptors
            expected = list(range(10))[first:][:count]
            assert [e.slab_index for e in found.entries] == expected
            assert len(raw.fds) - kept == len(expected)
            assert found.total == 10
        assert raw.ask(broker_pb2.BrokerRequest(ack=broker_pb2.Ack(batch_id=batch_id))).HasField("done")
        assert _refusal(raw.ask(_fetch(batch_id)))[0] == "not_found"
        assert _refusal(raw.ask(broker_pb2.BrokerRequest(ack=broker_pb2.Ack(batch_id=batch_id))))[0] == "not_found"
        channel.close()
        one.create()


def test_receiver_at_its_descriptor_limit_loses_nothing(daemon: Daemon) -> None:
    """A client with hardly a descriptor left still gets every slab, and one with none gets them once it has."""
    with Remote(daemon.directory) as peer:
        peer.ask("create")
        held = peer.ask("descriptors")
        _, hard = resource.prlimit(peer.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (held + 12, hard))
        peer.ask("grow", 20)
        peer.ask("write_kv", 7)
        assert peer.ask("read_kv") == [7]
        wait_until(lambda: peer.ask("descriptors") <= held + 1)
    with Wire(daemon.directory) as raw:
        channel, memory = memory_stub(daemon.directory)
        metadata = ((connection.TOKEN_KEY, raw.token),)
        made = memory.CreateRange(wire.CreateRangeRequest(cells_per_slab=16, cells_max=160), metadata=metadata)
        growth = wire.Growth(range_id=made.range.range_id, cells=160)
        batch_id = memory.GrowRanges(wire.GrowRangesRequest(growths=[growth]), metadata=metadata).batch_id
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            raw.sock.send(_fetch(batch_id).SerializeToString())
            _, ancillary, flags, _ = raw.sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 250))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for _, _, rights in ancillary:
            raw.fds += struct.unpack(f"{len(rights) // 4}i", rights)
        assert flags & socket.MSG_CTRUNC
        assert len(raw.fds) < 10
        kept = len(raw.fds)
        assert len(raw.ask(_fetch(batch_id)).descriptors.entries) == 10
        assert len(raw.fds) - kept == 10
        channel.close()


@pytest.mark.parametrize("version", [0, pages.PROTOCOL_VERSION + 1, 4_000_000_000])
def test_other_protocol_version_names_both(daemon: Daemon, version: int) -> None:
    """Hello with another version is refused, and the message has the client's and the daemon's."""
    with Wire(daemon.directory, hello=False) as raw:
        hello = broker_pb2.Hello(protocol_version=version, role=broker_pb2.ROLE_CLIENT)
        reason, message = _refusal(raw.ask(broker_pb2.BrokerRequest(hello=hello)))
        assert reason == "invalid_request"
        assert f"version {version} " in message
        assert f"version {pages.PROTOCOL_VERSION};" in message


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a", os.urandom(200), b"", b"\x0a\x02\x08"])
def test_bytes_that_are_no_request_are_refused(daemon: Daemon, data: bytes) -> None:
    """Random and truncated packets are refused or end the connection, before Hello and after it."""
    for hello in (False, True):
        with Wire(daemon.directory, hello=hello) as raw:
            reply = raw.ask_bytes(data)
            assert reply.WhichOneof("kind") in ("refused", None)


def test_packet_that_is_too_large_or_has_too_many_descriptors_is_refused(daemon: Daemon, model: SmallModel) -> None:
    """64 KiB and 250 descriptors are the most; descriptors that came with nonsense are closed."""
    fds = [os.open(model.path, os.O_RDONLY) for _ in range(253)]
    try:
        with Wire(daemon.directory) as raw:
            raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            assert _refusal(raw.ask_bytes(b"x" * 100_000))[0] == "invalid_request"
            assert _refusal(raw.ask_bytes(b"\xff\xff", fds))[0] == "invalid_request"
            assert _refusal(raw.ask(_fetch(1), fds[:5]))[0] == "invalid_request"
            assert _refusal(raw.ask(_files(), []))[0] == "invalid_request"
            for files_id in range(4):  # files_max is 1024
                assert raw.ask(_files(files_id), fds[:250]).HasField("done")
            assert "files_max" in _refusal(raw.ask(_files(9), fds[:250]))[1]
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("kind", ["pipe", "directory", "writable", "write-only", "path", "socket", "device"])
def test_what_is_no_readable_regular_file_cannot_be_lent(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    """Only regular files that were opened read-only are taken as model files."""
    (tmp_path / "file").write_bytes(b"x" * 4096)
    opens: dict[str, Callable[[], int]] = {
        "pipe": lambda: os.pipe2(os.O_CLOEXEC)[0],
        "directory": lambda: os.open(tmp_path, os.O_RDONLY),
        "writable": lambda: os.open(tmp_path / "file", os.O_RDWR),
        "write-only": lambda: os.open(tmp_path / "file", os.O_WRONLY),
        "path": lambda: os.open(tmp_path / "file", os.O_PATH),
        "socket": lambda: socket.socket(socket.AF_UNIX).detach(),
        "device": lambda: os.open("/dev/zero", os.O_RDONLY),
    }
    before = set(os.listdir("/proc/self/fd"))
    fd = opens[kind]()
    good = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with Wire(daemon.directory) as raw:
            reason, _ = _refusal(raw.ask(_files(), [good, fd]))
            assert reason == "invalid_request"
    finally:
        for left in set(os.listdir("/proc/self/fd")) - before:
            try:
                os.close(int(left))
            except OSError:
                pass


def test_files_that_were_never_lent_open_no_model(daemon: Daemon, model: SmallModel) -> None:
    """OpenModel with a list of files that was not lent, or was used already, is refused."""
    with client(daemon.directory) as one:
        begin = model.begin()
        begin.files_id = 77
        with pytest.raises(NotFound):
            one.session._open_stream(iter([wire.OpenModelRequest(begin=begin)]), lambda done, total: None)
        with pytest.raises(InvalidRequest):
            one.session._open_stream(iter([]), lambda done, total: None)
        with pytest.raises(InvalidRequest):
            one.session._open_stream(iter([wire.OpenModelRequest(stacks=wire.Stacks())]), lambda done, total: None)


def test_clients_that_do_not_read_or_speak_hold_nobody_up(daemon: Daemon) -> None:
    """While one reads no answer and others say nothing, calls are served; the silent are ended in some seconds."""
    deaf = Wire(daemon.directory)
    deaf.sock.setblocking(False)
    sent = 0
    while True:
        try:
            deaf.sock.send(_fetch(1).SerializeToString())
            sent += 1
        except BlockingIOError:
            break
    assert sent > 1
    with client(daemon.directory) as one, ExitStack() as stack:

        def is_served_meanwhile() -> bool:
            """False where all of this took so long that the silent were ended first."""
            silent = [stack.enter_context(Wire(daemon.directory, hello=False)) for _ in range(50)]
            one.create()
            one.grow(1, at=-1)
            are_there = not select.select([raw.sock for raw in silent], [], [], 0)[0]
            assert all(raw.is_closed() for raw in silent)
            return are_there

        wait_until(is_served_meanwhile, 120)
        one.grow(2)
    deaf.close()


def test_too_many_silent_connections_are_refused(daemon: Daemon) -> None:
    """Beyond 256 connections without Hello newcomers are told to come back, until those are ended."""

    def is_refused() -> bool:
        """False where it took so long that some of the 256 were ended first."""
        with ExitStack() as stack:
            for _ in range(256):
                stack.enter_context(Wire(daemon.directory, hello=False))
            late = stack.enter_context(Wire(daemon.directory, hello=False))
            reply = late.receive()  # an empty one when its own time is over
            return reply.WhichOneof("kind") is not None and _refusal(reply)[0] == "permission_denied"

    wait_until(is_refused, 120)
    wait_until(lambda: _accepts(daemon))


def _accepts(daemon: Daemon) -> bool:
    try:
        with client(daemon.directory):
            return True
    except PermissionDenied:
        return False


def test_daemon_without_descriptors_waits_for_some(daemon: Daemon) -> None:
    """At its own descriptor limit the daemon neither spins nor ends, and serves again when it has some."""
    pid = daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with Wire(daemon.directory, hello=False) as waiting:
            waiting.sock.send(broker_pb2.BrokerRequest(hello=HELLO).SerializeToString())
            wait_until(lambda: "broker.accept_failed" in daemon.log.read_text())
            began, before = time.monotonic(), daemon.log.read_text().count("broker.accept_failed")
            time.sleep(0.5)
            more = daemon.log.read_text().count("broker.accept_failed") - before
            assert more < 20 + 20 * (time.monotonic() - began)  # ten a second
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            assert waiting.receive().HasField("welcome")
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_second_hello_and_unknown_roles_are_refused(daemon: Daemon) -> None:
    """A connection is one session: Hello comes once, and as a client or an administrator."""
    with Wire(daemon.directory, hello=False) as raw:
        role = broker_pb2.BrokerRequest(hello=broker_pb2.Hello(protocol_version=pages.PROTOCOL_VERSION))
        assert _refusal(raw.ask(_fetch(1)))[0] == "permission_denied"
        assert _refusal(raw.ask(role))[0] == "invalid_request"
        assert raw.ask(broker_pb2.BrokerRequest(hello=HELLO)).HasField("welcome")
        assert _refusal(raw.ask(broker_pb2.BrokerRequest(hello=HELLO)))[0] == "invalid_request"
        assert len(raw.fds) == 1


@needs_root
def test_overflow_user_is_refused(daemon: Daemon) -> None:
    """A client that runs as the kernel's overflow user is refused with that reason."""
    with pytest.raises(PermissionDenied, match="overflow"):
        Remote(daemon.directory, uid=65534)


@needs_root
def test_another_user_is_another_domain(daemon: Daemon, model: SmallModel) -> None:
    """The same model opened by two users is two arenas, by one user one."""
    with (
        Remote(daemon.directory) as root,
        Remote(daemon.directory, uid=4242) as user,
        Remote(daemon.directory, uid=4242) as same,
        Admin(daemon.directory) as admin,
    ):
        root.ask("open", model)
        user.ask("open", model)
        assert same.ask("open", model) is True
        models = [m for m in admin.status().models if m.sessions]
        assert sorted((m.domain, m.sessions) for m in models) == [("user 0", 1), ("user 4242", 2)]
        assert root.ask("wrong_experts") == user.ask("wrong_experts") == 0


@needs_root
def test_users_who_are_no_administrators_may_look_and_not_drain(daemon: Daemon) -> None:
    """`vmmctl drain` of another user is refused, and the daemon goes on."""
    code = (
        "import os, sys; from pathlib import Path; from tests.helpers.peer import Admin, become; from strata_api.v1"
        " import admin_pb2; from strata_client import connection\n"
        "connection.open_channel(Path('/')).close(); import grpc_status.rpc_status\n"
        "become(4242); a = Admin(Path(sys.argv[1])); a.status()\n"
        "try:\n with connection.rebuilt_errors():\n  a._stub.Drain(admin_pb2.DrainRequest(),"
        " metadata=(('strata-token', a._broker.token),))\n"
        "except Exception as e: sys.exit(type(e).__name__)\n"
    )
    argv = [sys.executable, "-c", _FIND_TESTS + code, os.fspath(daemon.directory)]
    done = subprocess.run(argv, stderr=subprocess.PIPE)
    assert done.stderr.decode().strip().endswith("PermissionDenied")


def test_modes_of_what_the_daemon_makes(tmp_path: Path) -> None:
    """The runtime directory is 0750, its private part 0700 and the sockets 0660, whatever the umask.

    A private daemon takes the directory along when it leaves.
    """
    directory = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp")) / "run"
    argv = [
        sys.executable,
        "-m",
        "vmmd.main",
        "--runtime-dir",
        os.fspath(directory),
        "--slab-bytes",
        "65536",
        "--private",
    ]
    for umask in (0o000, 0o077):
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, umask=umask
        ) as daemon:
            assert daemon.stdout is not None and daemon.stdin is not None
            assert daemon.stdout.readline() == b"ready\n"
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (directory, *directory.iterdir())}
            daemon.stdin.close()
            assert daemon.wait(30) == 0
        assert modes == {"run": 0o750, "private": 0o700, "vmmd.sock": 0o660, "handles.sock": 0o660}
        assert not directory.exists()


@asynccontextmanager
async def _broker_here(directory: Path, *, use_peer_pidfd: bool = True) -> AsyncIterator[Manager]:
    """A broker in this process."""
    driver = HostDriver([("SIM", "simulated", 1 << 20)], 1 << 20)
    devices = [
        DeviceRecord(d.uuid, d.name, SLAB_BYTES, d.total_bytes, d.total_bytes, is_host=d.uuid == HOST_UUID)
        for d in driver.devices()
    ]
    manager = Manager(driver, devices, Options())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(directory / "handles.sock"))
    listener.listen()
    broker = Broker(manager, listener, lambda uid: f"user {uid}", use_peer_pidfd=use_peer_pidfd)
    broker.start()
    try:
        yield manager
    finally:
        broker.close()
        await manager.close()


def test_client_that_reads_no_events_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many unread events a session and its connection end, and others go on; one that reads stays."""
    monkeypatch.setattr(session_module, "EVENTS_MAX", 3)

    async def run() -> None:
        async with _broker_here(tmp_path) as manager:
            with Wire(tmp_path, hello=False) as deaf, Wire(tmp_path, hello=False) as other:
                for wire_ in (deaf, other):
                    reply = await asyncio.to_thread(wire_.ask, broker_pb2.BrokerRequest(hello=HELLO))
                    assert reply.welcome.token
                silent, reader = manager.sessions.values()
                reader.watcher = reader.events.clear
                for n in range(5):
                    assert len(manager.sessions) == 2
                    manager.notify(memory_pb2.Notice.CODE_DRAINING, str(n))
                    assert len(silent.events) == min(n + 1, 3)
                await asyncio.sleep(0.05)
                assert list(manager.sessions.values()) == [reader] and silent.ended
                assert await asyncio.to_thread(deaf.is_closed)
                again = Wire(tmp_path, hello=False)  # what the first one's descriptors were is free
                reply = await asyncio.to_thread(again.ask, broker_pb2.BrokerRequest(hello=HELLO))
                assert reply.welcome.token and len(manager.sessions) == 2
                again.close()
                manager.notify(memory_pb2.Notice.CODE_DRAINING, "")
                assert not reader.ended

    asyncio.run(run())
    assert not [link for link in links_of(os.getpid()) if "pidfd" in link]


def test_without_peer_pidfd_a_nonce_confirms_the_process(tmp_path: Path) -> None:
    """Where the kernel has no SO_PEERPIDFD, a session begins once the nonce comes back from the same process."""

    async def run() -> None:
        async with _broker_here(tmp_path, use_peer_pidfd=False) as manager:
            await asyncio.to_thread(_challenge, tmp_path)
            assert len(manager.sessions) == 0

    asyncio.run(run())
    assert not [link for link in links_of(os.getpid()) if "pidfd" in link]


def _challenge(directory: Path) -> None:
    with Wire(directory, hello=False) as raw:
        first = raw.ask(broker_pb2.BrokerRequest(hello=HELLO))
        assert len(first.challenge.nonce) == 16
        wrong = broker_pb2.Hello(protocol_version=HELLO.protocol_version, role=HELLO.role, nonce=b"x" * 16)
        second = raw.ask(broker_pb2.BrokerRequest(hello=wrong))
        assert second.challenge.nonce not in (b"", first.challenge.nonce)
        stale = broker_pb2.Hello(protocol_version=HELLO.protocol_version, role=HELLO.role, nonce=first.challenge.nonce)
        third = raw.ask(broker_pb2.BrokerRequest(hello=stale))
        right = broker_pb2.Hello(protocol_version=HELLO.protocol_version, role=HELLO.role, nonce=third.challenge.nonce)
        assert raw.ask(broker_pb2.BrokerRequest(hello=right)).welcome.token
    _, sock = connection.dial([directory])
    broker = connection.Broker(sock)
    assert broker.token
    broker.close()
    with Wire(directory, hello=False) as last:  # answered after the connections above were seen to close
        last.ask(broker_pb2.BrokerRequest(hello=HELLO))
