"""Too much of anything from one user is refused with the limit's name, and others are served meanwhile."""

import os
import queue
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from strata_api.v1 import memory_pb2 as wire
from strata_api.v1 import memory_pb2_grpc

from strata_client import connection
from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.peer import Admin, Client, Remote, SmallModel, client, descriptors_of, public_model
from vmmd.errors import Exhausted, InvalidRequest, NotFound, VmmError

CALLS_MAX = 24
CONFIG = f"""
slab_bytes = "64KiB"
[host]
device_bytes = "4MiB"
ram_bytes = "4MiB"
[limits]
sessions_per_user_max = 6
ranges_per_session_max = 5
ranges_per_user_max = 12
calls_per_user_max = {CALLS_MAX}
files_max = 20
"""
OTHER_UID = 4242

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    with running_daemon(CONFIG) as running:
        running.directory.chmod(0o750)
        yield running


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """A daemon that nobody uses, before and after."""
    with Admin(shared.directory) as admin:
        wait_until(lambda: not admin.status().sessions)
        yield shared
        wait_until(lambda: not admin.status().sessions)
    assert "Traceback" not in shared.log.read_text()


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Remote]:
    """A client of another user, where there can be one, that behaves."""
    with Remote(daemon.directory, OTHER_UID if os.geteuid() == 0 else 0) as peer:
        peer.ask("create")
        yield peer


def _is_served(peer: Remote) -> None:
    peer.ask("grow", 2)
    peer.ask("write_kv", 7)
    assert peer.ask("read_kv") == [7]
    peer.ask("shrink", 0)


@needs_root
def test_sessions_of_a_user_are_limited(daemon: Daemon, other: Remote) -> None:
    """A user's session beyond the limit is refused by its name; another user's begins, and one's again later."""
    with ExitStack() as stack:
        mine = [stack.enter_context(client(daemon.directory)) for _ in range(6)]
        for _ in range(30):
            with pytest.raises(Exhausted, match=r"user 0 has 6 sessions.*sessions_per_user_max"):
                Client(os.fspath(daemon.directory))
        with Remote(daemon.directory, OTHER_UID) as newcomer:
            newcomer.ask("create")
        _is_served(other)
        mine[0].close()
        with Admin(daemon.directory) as admin:
            wait_until(lambda: len(admin.status().sessions) == 6)
        stack.enter_context(client(daemon.directory))


@needs_root
def test_ranges_of_a_session_and_of_a_user_are_limited(daemon: Daemon, other: Remote) -> None:
    """A range beyond either limit is refused by its name; one that was closed makes room."""
    with ExitStack() as stack:
        one, two, three = (stack.enter_context(client(daemon.directory)) for _ in range(3))
        for peer in (one, two):
            for _ in range(5):
                peer.create()
            with pytest.raises(Exhausted, match=r"this session has 5 ranges.*ranges_per_session_max"):
                peer.create()
        for _ in range(2):
            three.create()
        with pytest.raises(Exhausted, match=r"user 0 has 12 ranges.*ranges_per_user_max"):
            three.create()
        other.ask("create")
        _is_served(other)
        one.call("CloseRange", wire.CloseRangeRequest(range_id=one.kv[0].range.range_id))
        three.create()


class _Held:
    """A call that never ends by itself: its request does not come, or not all of it."""

    def __init__(self, channel: grpc.Channel, method: str, token: str, *parts: bytes) -> None:
        self._parts: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for part in parts:
            self._parts.put(part)
        self.call: Any = channel.stream_stream(method, None, None)(
            iter(self._parts.get, None), metadata=((connection.TOKEN_KEY, token),) if token else ()
        )

    def refusal(self, timeout_s: float = 30) -> VmmError | None:
        """What it ended with; None where it goes on after so long."""
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.call.add_done_callback(lambda _: done.put(None))
        try:
            done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return connection.rebuild(self.call)

    def end(self) -> None:
        self.call.cancel()
        self._parts.put(None)


@needs_root
@pytest.mark.parametrize("method", ["OpenModel", "GrowRanges"])
def test_calls_in_flight_of_a_user_are_limited(daemon: Daemon, other: Remote, method: str) -> None:
    """Calls that never send all of their request count for their user, whose next call is refused; others' are not."""
    with client(daemon.directory) as one, closing(connection.open_channel(daemon.directory)) as channel:

        def begin() -> _Held:
            return _Held(channel, f"/strata_api.v1.Memory/{method}", one.token())

        held = [begin() for _ in range(CALLS_MAX - 1)]  # and the watch stream

        def none_is_left() -> bool:
            # The call that asks counts as well: one of `held` that came meanwhile was refused, and begins again.
            held[:] = [begin() if call.call.done() else call for call in held]
            return _refused(one)

        wait_until(none_is_left)
        held.append(begin())
        refusal = held[-1].refusal()
        assert isinstance(refusal, Exhausted)
        assert f"user 0 has {CALLS_MAX} calls in flight" in refusal.message
        assert "calls_per_user_max" in refusal.message
        for _ in range(5):
            _is_served(other)
        for call in held:
            call.end()
        wait_until(lambda: not _refused(one))


def _refused(one: Client) -> bool:
    try:
        one.session.devices()
    except Exhausted:
        return True
    return False


@needs_root
def test_calls_without_a_token_share_a_limit(daemon: Daemon, other: Remote) -> None:
    """Streams that anybody may open are limited together, and take nothing from those who have a session."""
    request = health_pb2.HealthCheckRequest().SerializeToString()
    with closing(connection.open_channel(daemon.directory)) as channel, client(daemon.directory) as one:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        held = [_Held(channel, "/grpc.health.v1.Health/Watch", "", request) for _ in range(CALLS_MAX)]
        for call in held:
            next(call.call)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert isinstance(connection.rebuild(refused.value), Exhausted)
        one.create()
        one.grow(1)
        _is_served(other)
        for call in held:
            call.end()
        wait_until(lambda: _is_healthy(stub))


def _is_healthy(stub: Any) -> bool:
    try:
        return bool(stub.Check(health_pb2.HealthCheckRequest(), timeout=30).status)
    except grpc.RpcError:
        return False


@needs_root
def test_connections_are_limited_and_those_there_are_go_on(daemon: Daemon, other: Remote) -> None:
    """Thousands of connections to the gRPC socket are not all kept, cost no client anything and leave nothing."""
    pid = daemon.process.pid
    before = descriptors_of(pid)
    with ExitStack() as stack:
        for _ in range(4500):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))  # blocks where the backlog is full
            sock.connect(os.fspath(daemon.directory / "vmmd.sock"))
        assert descriptors_of(pid) - before <= 4200
        _is_served(other)
    wait_until(lambda: descriptors_of(pid) - before < 100, otherwise=lambda: str(descriptors_of(pid)))
    _is_served(other)


# What is too long


def test_requests_that_are_too_long_are_refused(daemon: Daemon, other: Remote) -> None:
    """A message beyond the limit, a part with too many entries, too many growths, devices or characters."""
    with public_model() as model, client(daemon.directory) as one:
        one.create()
        growth = wire.Growth(range_id=one.kv[0].range.range_id, cells=1)
        with pytest.raises(InvalidRequest, match="6 growths in one call"):
            one.call("GrowRanges", wire.GrowRangesRequest(growths=[growth] * 6))
        with pytest.raises(VmmError, match=r"larger than max|[Mm]essage"):
            one.call("GrowRanges", wire.GrowRangesRequest(growths=[growth] * 100_000))
        with pytest.raises(NotFound, match="there is no device"):
            one.call("CreateRange", wire.CreateRangeRequest(device_uuid="x" * 200_000, cells_per_slab=16, cells_max=16))
        with model.path.open("rb") as file:
            one.session._broker.send_files(1, [file.fileno()])
        for begin in (_begin(model, name="n" * 256), _begin(model, device_uuids=["HOST-SIM-0"] * 5000)):
            with pytest.raises(InvalidRequest):
                _open(one, wire.OpenModelRequest(begin=begin))
        stack = wire.Stack(layer=1, count=1)
        with pytest.raises(InvalidRequest, match="1001 entries in a part"):
            _open(
                one,
                wire.OpenModelRequest(begin=_begin(model)),
                wire.OpenModelRequest(stacks=wire.Stacks(stacks=[stack] * 1001)),
            )
        one.grow(1)
    _is_served(other)


def _begin(model: SmallModel, **fields: Any) -> wire.Begin:
    begin = model.begin()
    begin.MergeFrom(wire.Begin(files_id=1, **fields))
    return begin


def _open(one: Client, *parts: wire.OpenModelRequest) -> None:
    one.session._open_stream(iter(parts), lambda done, total: None)


# What is no call


def test_bytes_that_are_no_message_are_named(daemon: Daemon) -> None:
    """A payload of another kind, none at all and two where one is due end the call, with what was wrong."""
    with client(daemon.directory) as one, closing(connection.open_channel(daemon.directory)) as channel:
        metadata = ((connection.TOKEN_KEY, one.token()),)
        for method in ("ListDevices", "GrowRanges", "OpenModel", "CloseRange"):
            call = channel.stream_stream(f"/strata_api.v1.Memory/{method}", None, None)
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([b"\xff\xff\xff"]), metadata=metadata, timeout=30))
            error = connection.rebuild(refused.value)
            assert isinstance(error, InvalidRequest)
            assert method in error.message and "another version" in error.message
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([]), metadata=metadata, timeout=30))
            assert isinstance(connection.rebuild(refused.value), InvalidRequest)
        stub: Any = memory_pb2_grpc.MemoryStub(channel)
        assert stub.ListDevices(wire.ListDevicesRequest(), metadata=metadata).devices
