"""Clients for tests of the daemon: a small model whose bytes say whose they are, and processes that do as told.

`Client` works in any process. `Remote` runs one in a process of its own, forked
from a server that has imported everything, so that a hundred of them are cheap.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import struct
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.random  # preloaded for children of other users, as are the next two
from google.rpc import error_details_pb2  # noqa: F401
from grpc_status import rpc_status  # noqa: F401
from strata_api.v1 import admin_pb2, admin_pb2_grpc, broker_pb2, memory_pb2, memory_pb2_grpc, pages

from strata_client import connection
from strata_client.cells import CellShape, KVRange
from strata_client.model_memory import Shape
from strata_client.models.base import ExpertStack, WeightExtent
from strata_client.session import OpenedModel, Session
from strata_client.transcript import Transcript
from tests.helpers.daemon import wait_until
from vmmd.errors import BY_REASON, VmmError

CELL = CellShape(1, 1, 8)
"""64 bytes, K and V."""

MATRIX_BYTES = 4096
WEIGHTS_BYTES = 4096
SLOT_BYTES = 3 * MATRIX_BYTES

_PR_SET_DUMPABLE = 4


class SmallModel(NamedTuple):
    """A file whose every 8 bytes say to which matrix of which expert they belong."""

    path: Path
    n_layers: int
    n_experts: int
    top_k: int = 2

    @property
    def n(self) -> int:
        """Experts of all layers."""
        return self.n_layers * self.n_experts

    @property
    def stacks(self) -> list[ExpertStack]:
        """Where the experts lie: one stack a layer and matrix, after the weights."""
        size = self.n_experts * MATRIX_BYTES
        return [
            ExpertStack(
                layer,
                matrix,
                0,
                self.n_experts,
                0,
                WEIGHTS_BYTES + (3 * layer + matrix) * size,
                MATRIX_BYTES,
                MATRIX_BYTES,
            )
            for layer in range(self.n_layers)
            for matrix in range(3)
        ]

    @property
    def shape(self) -> Shape:
        """What a client needs to find bytes."""
        sizes = (MATRIX_BYTES, MATRIX_BYTES, MATRIX_BYTES)
        return Shape(self.n_layers, self.n_experts, [WeightExtent("w", 0, 0, WEIGHTS_BYTES)], lambda layer, e: sizes)

    def begin(self, devices: Sequence[str] = ()) -> memory_pb2.Begin:
        """The head of OpenModel's stream."""
        return memory_pb2.Begin(
            name=self.path.name,
            device_uuids=devices,
            n_layers=self.n_layers,
            n_experts=self.n_experts,
            top_k=self.top_k,
        )


def word(layer: int, expert: int, matrix: int) -> int:
    """The 8 bytes that a matrix of an expert is made of."""
    return (layer + 1) << 40 | (expert + 1) << 8 | (matrix + 1)


def write_model(path: Path, n_layers: int = 4, n_experts: int = 16) -> SmallModel:
    """Writes a model file, readable by everybody."""
    model = SmallModel(path, n_layers, n_experts)
    words = np.empty((n_layers, 3, n_experts, MATRIX_BYTES // 8), np.uint64)
    for layer in range(n_layers):
        for matrix in range(3):
            for expert in range(n_experts):
                words[layer, matrix, expert] = word(layer, expert, matrix)
    path.write_bytes(b"W" * WEIGHTS_BYTES + words.tobytes())
    path.chmod(0o644)
    return model


@contextmanager
def public_model(n_layers: int = 4, n_experts: int = 16) -> Iterator[SmallModel]:
    """A model file that other users can reach, too."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        yield write_model(Path(directory, "model"), n_layers, n_experts)


class Client:
    """A client of a daemon, in whatever process this is made."""

    def __init__(self, directory: str) -> None:
        self._begin(Session.connect([Path(directory)]))

    @classmethod
    def over(cls, session: Session) -> "Client":
        """One of a session that there is."""
        made = cls.__new__(cls)
        made._begin(session)
        return made

    def _begin(self, session: Session) -> None:
        self.session = session
        self.kv: list[KVRange] = []
        self.opened: list[OpenedModel] = []
        self.models: list[SmallModel] = []
        self._step: AbstractContextManager[None] | None = None
        self._transcript: Transcript

    @property
    def stub(self) -> Any:
        """The Memory service, without translation of errors."""
        return self.session._stub

    def call(self, method: str, request: Any) -> Any:
        """One call, with this session's token. Errors: any `VmmError`."""
        return self.session._call(method, request, timeout=60)

    def pid(self) -> int:
        """Of the process that this client is in."""
        return os.getpid()

    def token(self) -> str:
        """This session's token."""
        return self.session._broker.token

    def session_id(self) -> int:
        """This session's number."""
        return self.session._broker.session_id

    def open(self, model: SmallModel, devices: Sequence[str] = ()) -> bool:
        """Opens a model; whether it was resident already."""
        fd = os.open(model.path, os.O_RDONLY)
        try:
            opened = self.session.open_model(model.begin(devices), [fd], model.stacks, model.shape)
        finally:
            os.close(fd)
        self.opened.append(opened)
        self.models.append(model)
        return opened.shared

    def create(self, cells_max: int = 1 << 20, device: int = 0) -> int:
        """Makes a K/V range; returns its id."""
        model_id = self.opened[-1].model_id if self.opened else 0
        self.kv.append(self.session.create_kv(model_id, self.session.devices()[device], CELL, cells_max))
        return self.kv[-1].range.range_id

    def converse(self, name: str, cells_max: int = 1 << 14) -> int:
        """Opens a conversation of the last model; returns how many complete cells it has."""
        device = self.session.devices()[0]
        opened = self.session.open_conversation(name, self.opened[-1].model_id, device, CELL, cells_max)
        self.kv.append(opened.kv)
        self._transcript = Transcript(opened.tokens)
        return self._transcript.complete

    def claim(self, cells: int) -> None:
        """Says of so many cells more of the conversation that they are complete."""
        self._transcript.add(range(cells))

    def leave(self) -> None:
        """Parks the range that was made last, a conversation's."""
        self.session.park(self.kv.pop())

    def forget_kv(self) -> None:
        """The next range is the first."""
        self.kv.clear()

    def grow(self, slabs: int, at: int = 0) -> int:
        """Grows a range to so many slabs and maps them; returns how many arenas gave."""
        kv = self.kv[at]
        reply = self.session.grow([kv], slabs * kv.cells_per_slab)
        return sum(trade.slabs for trade in reply.trades)

    def shrink(self, slabs: int, *, unmap: bool = True, at: int = 0) -> None:
        """Gives a range's slabs back from the end; without `unmap` a liar does."""
        kv = self.kv[at]
        if unmap:
            self.unmap(slabs, at)
        request = memory_pb2.ShrinkRangeRequest(range_id=kv.range.range_id, cells=slabs * kv.cells_per_slab)
        self.call("ShrinkRange", request)

    def unmap(self, slabs: int, at: int = 0) -> None:
        """Unmaps a range's slabs from the end."""
        with self.session._lock:
            self.kv[at].range.unmap([i for i in sorted(self.kv[at].range.mapped) if i >= slabs])

    def write_kv(self, value: int, at: int = 0) -> None:
        """Fills the mapped slabs of a range."""
        range_ = self.kv[at].range
        for index in range_.mapped:
            range_.view[index * range_.slab_bytes : (index + 1) * range_.slab_bytes] = value

    def read_kv(self, at: int = 0) -> list[int]:
        """The different bytes in the mapped slabs of a range."""
        range_ = self.kv[at].range
        found: set[int] = set()
        for index in range_.mapped:
            slab = range_.view[index * range_.slab_bytes : (index + 1) * range_.slab_bytes]
            found |= {int(b) for b in np.unique(slab)}
        return sorted(found)

    def begin_step(self) -> None:
        """Publishes a step of the last model."""
        self._step = self.opened[-1].steps.step()
        self._step.__enter__()

    def end_step(self) -> None:
        """Retires it."""
        assert self._step is not None
        self._step.__exit__(None, None, None)
        self._step = None

    def wrong_experts(self) -> int:
        """Reads every expert of the last model whole, within a step; how many have foreign bytes."""
        model, memory, wrong = self.models[-1], self.opened[-1].memory, 0
        with self.opened[-1].steps.step():
            for at in range(model.n):
                layer, expert = divmod(at, model.n_experts)
                wrong += not is_right(memory.expert(layer, expert), layer, expert)
        return wrong

    def count_reads(self, seconds: float, seed: int = 0) -> tuple[int, int, list[str]]:
        """Reads random experts for a while, in steps: (reads, of a device slot, what was wrong)."""
        return read_for(self.opened[-1], self.models[-1], seconds, seed)

    def time_calls(self, seconds: float, rate_hz: float, seed: int) -> list[float]:
        """Seconds that each of many calls took: one after the other, or `rate_hz` of them a second."""
        request = memory_pb2.ListDevicesRequest()
        metadata = ((connection.TOKEN_KEY, self.token()),)
        took: list[float] = []
        until = time.monotonic() + seconds
        due = time.monotonic() + (seed / 16 / rate_hz if rate_hz else 0)
        while time.monotonic() < until:
            if rate_hz:
                time.sleep(max(0.0, due - time.monotonic()))
                due += 1 / rate_hz
            began = time.perf_counter()
            self.stub.ListDevices(request, metadata=metadata)
            took.append(time.perf_counter() - began)
        return took[len(took) // 20 :]  # the first ones find everything cold

    def time_growths(self, times: int, slabs: int, pause_s: float) -> list[tuple[float, float, int]]:
        """Grows the last range again and again, mapping included: begin and end, `time.monotonic`, and slabs traded."""
        took = []
        for _ in range(times):
            began = time.monotonic()
            traded = self.grow(slabs)
            took.append((began, time.monotonic(), traded))
            self.shrink(0)
            time.sleep(pause_s)
        return took

    def time_steps(self, seconds: float, reads: int) -> list[tuple[float, float]]:
        """Runs steps that read so many experts each, one after the other: begin and end, `time.monotonic`."""
        took = []
        model, opened = self.models[-1], self.opened[-1]
        until = time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            with opened.steps.step():
                for at in range(reads):
                    layer, expert = divmod((len(took) * reads + at) % model.n, model.n_experts)
                    assert is_right(opened.memory.expert(layer, expert), layer, expert)
            took.append((began, time.monotonic()))
        return took

    def heat(self, layer: int, experts: Sequence[int], tokens: int = 1) -> None:
        """Counts tokens that were routed to these experts."""
        memory = self.opened[-1].memory
        memory.count(tokens, prompt=False)
        memory.routed(layer, np.array([list(experts)] * tokens, np.int32), prompt=False)

    def descriptors(self) -> int:
        """Open descriptors of this process."""
        return len(os.listdir("/proc/self/fd"))

    def gone(self) -> str:
        """Why the daemon is gone; empty while it is there."""
        return self.session.gone

    def troubles(self) -> list[str]:
        """What went wrong in the background."""
        return list(self.session.troubles)

    def close(self) -> None:
        """Ends the session."""
        self.session.close()


def is_right(raw: Any, layer: int, expert: int) -> bool:
    """Whether every byte of an expert's three matrices is that expert's own."""
    matrices = (raw.gate, raw.up, raw.down)
    return all(
        not np.any(bytes_.view(np.uint64) != word(layer, expert, matrix)) for matrix, bytes_ in enumerate(matrices)
    )


def read_for(opened: OpenedModel, model: SmallModel, seconds: float, seed: int) -> tuple[int, int, list[str]]:
    """Reads random experts through steps until the time is up; every byte of each is compared."""
    random = np.random.default_rng(seed)
    expected = np.array(
        [[[word(m, e, k) for k in range(3)] for e in range(model.n_experts)] for m in range(model.n_layers)]
    )
    reads = on_device = 0
    wrong: list[str] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until and len(wrong) < 10:
        layers = random.integers(0, model.n_layers, 64)
        experts = random.integers(0, model.n_experts, 64)
        with opened.steps.step():
            for layer, expert in zip(layers.tolist(), experts.tolist(), strict=True):
                raw = opened.memory.expert(layer, expert)
                own = expected[layer, expert]
                for matrix, bytes_ in enumerate(raw[1:]):
                    words = bytes_.view(np.uint64)
                    if words.min() != own[matrix] or words.max() != own[matrix]:
                        found = [hex(int(w)) for w in np.unique(words)[:3]]
                        wrong.append(f"layer {layer} expert {expert} at {pages.unpack(raw.entry)}: {found}")
                reads += 1
                on_device += pages.unpack(raw.entry).tier == pages.TIER_DEVICE
        opened.memory.count(1, prompt=False)
        opened.memory.routed(int(layers[0]), experts[:2].astype(np.int32)[None], prompt=False)
    return reads, on_device, wrong


# Processes

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.peer"])


class Remote:
    """A `Client` in a process of its own: `remote.ask("grow", 3)` calls `Client.grow(3)` there.

    `kind` makes another object there, given the daemon's directory.
    """

    def __init__(
        self, directory: Path, uid: int = 0, *, connect: bool = True, kind: Callable[[str], Any] = Client
    ) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        args = (theirs, os.fspath(directory), uid, connect, kind)
        self.process = _CONTEXT.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.answer()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, verb: str, *args: Any, **options: Any) -> Any:
        """Calls a method of the client there and returns what it returns. Errors: any `VmmError` of it."""
        self.tell(verb, *args, **options)
        return self.answer()

    def tell(self, verb: str, *args: Any, **options: Any) -> None:
        """Calls a method without waiting; `answer` waits."""
        self._pipe.send((verb, args, options))

    def has_answered(self) -> bool:
        """Whether the answer that is due is there."""
        return self._pipe.poll()

    def answer(self, timeout_s: float = 120) -> Any:
        """The answer that is due."""
        assert self._pipe.poll(timeout_s), f"client {self.pid} does not answer"
        kind, value = self._pipe.recv()
        if kind == "error":
            reason, message, fields = value
            raise BY_REASON[reason].rebuild(message, fields)
        assert kind == "ok", value
        return value

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _serve(pipe: Connection, directory: str, uid: int, connect: bool, kind: Callable[[str], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if uid:
        become(uid)
    client: Any = None
    try:
        client = kind(directory) if connect else None
        pipe.send(("ok", None))
    except VmmError as error:
        pipe.send(("error", (error.reason, error.message, error.fields())))
        return
    except BaseException:
        pipe.send(("bug", traceback.format_exc()))
        return
    while True:
        try:
            verb, args, options = pipe.recv()
        except EOFError:
            return
        try:
            if verb == "connect":
                client = kind(directory)
                pipe.send(("ok", None))
                continue
            pipe.send(("ok", getattr(client, verb)(*args, **options)))
        except VmmError as error:
            pipe.send(("error", (error.reason, error.message, error.fields())))
        except BaseException:
            pipe.send(("bug", traceback.format_exc()))


def become(uid: int) -> None:
    """Becomes another user that keeps the group root; stays readable in /proc as after an exec."""
    os.setgroups([])
    os.setuid(uid)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


# The broker's wire, byte by byte


class Wire:
    """A bare connection to the broker, for what no honest client sends."""

    def __init__(self, directory: Path, *, hello: bool = True, timeout_s: int = 30) -> None:
        _, self.sock = connection.dial([directory])
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", timeout_s, 0))
        self.fds: list[int] = []
        self.token = ""
        if hello:
            reply = self.ask(broker_pb2.BrokerRequest(hello=HELLO))
            self.token = reply.welcome.token
            assert self.token, reply

    def ask(self, request: broker_pb2.BrokerRequest, fds: Sequence[int] = ()) -> broker_pb2.BrokerReply:
        """Sends a request and returns the reply, whose descriptors are kept in `fds`."""
        return self.ask_bytes(request.SerializeToString(), fds)

    def ask_bytes(self, data: bytes, fds: Sequence[int] = ()) -> broker_pb2.BrokerReply:
        """The same with any bytes."""
        socket.send_fds(self.sock, [data], list(fds))
        return self.receive()

    def receive(self) -> broker_pb2.BrokerReply:
        """The next reply; an empty one where the broker closed the connection."""
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 253)
        self.fds += fds
        return broker_pb2.BrokerReply.FromString(data)

    def is_closed(self) -> bool:
        """Whether the broker has closed the connection; waits for the receive timeout at most."""
        try:
            return self.sock.recv(1 << 16) == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        """Closes it and every descriptor that came."""
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


HELLO = broker_pb2.Hello(protocol_version=pages.PROTOCOL_VERSION, role=broker_pb2.ROLE_CLIENT)


class Admin:
    """vmmctl's calls without its start: a status costs a millisecond."""

    def __init__(self, directory: Path) -> None:
        _, sock = connection.dial([directory])
        self._broker = connection.Broker(sock, admin=True)
        self._channel = connection.open_channel(directory)
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)

    def status(self) -> admin_pb2.StatusPart:
        """The snapshot in one piece."""
        whole = admin_pb2.StatusPart()
        metadata = ((connection.TOKEN_KEY, self._broker.token),)
        with connection.rebuilt_errors():
            for part in self._stub.Status(admin_pb2.StatusRequest(), metadata=metadata, timeout=60):
                whole.MergeFrom(part)
        return whole

    def device(self, at: int = 0) -> admin_pb2.DeviceStatus:
        """One device of it."""
        return self.status().devices[at]

    def close(self) -> None:
        """Ends both connections."""
        self._channel.close()
        self._broker.close()

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def client(directory: Path) -> Iterator[Client]:
    """A client in this process, closed at the end."""
    made = Client(os.fspath(directory))
    try:
        yield made
    finally:
        with suppress(VmmError):
            made.close()


def memory_stub(directory: Path) -> tuple[Any, Any]:
    """A channel, which the caller closes, and the Memory service without a token."""
    channel = connection.open_channel(directory)
    return channel, memory_pb2_grpc.MemoryStub(channel)


def descriptors_of(pid: int) -> int:
    """Open descriptors of a process, slabs aside: those are counted by the daemon's status."""
    return len(links_of(pid))


def slabs_of(pid: int) -> int:
    """Open descriptors of slabs of a process."""
    return sum("strata-slab" in link for link in _links(pid))


def memory_of(pid: int) -> int:
    """Bytes of a process's own memory in RAM: neither files nor slabs."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon:")).split()[1])


def threads_of(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def wait_for_descriptors(pid: int, count: int, timeout_s: float = 30) -> None:
    """Waits until a process has at most so many descriptors."""
    wait_until(
        lambda: descriptors_of(pid) <= count,
        timeout_s,
        lambda: f"{descriptors_of(pid)} descriptors where there were {count}: {links_of(pid)}",
    )


def links_of(pid: int) -> list[str]:
    """What the descriptors of a process refer to, slabs aside."""
    return sorted(link for link in _links(pid) if "strata-slab" not in link)


def _links(pid: int) -> list[str]:
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return links
