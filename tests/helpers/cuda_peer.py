"""Clients of a daemon with the CUDA driver: on real GPUs, or small ones on the stand-in.

`Machine` says which. Its clients map what they lease for kernels, and look at
bytes with CUDA's copies alone.
"""

import functools
import importlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from strata_api.v1 import memory_pb2, pages

from strata_client.connection import raise_descriptor_limit
from strata_client.devices import choose_device, choose_peers
from strata_client.mapping import MappedRange
from strata_client.model_memory import Place, Shape
from strata_client.models.base import ExpertStack, WeightExtent
from tests.helpers import fake_cuda
from tests.helpers.cuda_kernels import Kernels
from tests.helpers.daemon import VMMD, Daemon
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.peer import CELL, Client, Remote
from tests.helpers.require_gpu import require_gpu
from vmmd.driver import cuda_calls
from vmmd.driver.cuda_calls import call, current
from vmmd.driver.cuda_mapper import CudaMapper

with suppress(ImportError):  # before a child becomes a user who cannot read it
    importlib.import_module("cuda.bindings.driver")

U64 = npt.NDArray[np.uint64]

MIB, GIB = 1 << 20, 1 << 30


class LargeModel(NamedTuple):
    """A file whose every 8 bytes say to which matrix of which expert they belong, and where in it."""

    path: Path
    n_layers: int
    n_experts: int
    matrix_bytes: int
    weights_bytes: int
    top_k: int = 8

    @property
    def n(self) -> int:
        """Experts of all layers."""
        return self.n_layers * self.n_experts

    @property
    def slot_bytes(self) -> int:
        """Of one expert."""
        return 3 * self.matrix_bytes

    @property
    def stacks(self) -> list[ExpertStack]:
        """Where the experts lie: one stack a layer and matrix, after the weights."""
        size = self.matrix_bytes
        return [
            ExpertStack(
                layer,
                matrix,
                0,
                self.n_experts,
                0,
                self.weights_bytes + (3 * layer + matrix) * self.n_experts * size,
                size,
                size,
            )
            for layer in range(self.n_layers)
            for matrix in range(3)
        ]

    @property
    def shape(self) -> Shape:
        """What a client needs to find bytes."""
        sizes = (self.matrix_bytes,) * 3
        extents = [WeightExtent("w", 0, 0, self.weights_bytes)]
        return Shape(self.n_layers, self.n_experts, extents, lambda layer, expert: sizes)

    def begin(self, devices: Sequence[str] = ()) -> memory_pb2.Begin:
        """The head of OpenModel's stream."""
        return memory_pb2.Begin(
            name=self.path.name,
            device_uuids=devices,
            n_layers=self.n_layers,
            n_experts=self.n_experts,
            top_k=self.top_k,
        )

    def slabs(self, slab_bytes: int) -> int:
        """Slabs that an arena of all experts has."""
        return -(-self.n // (slab_bytes // self.slot_bytes))

    def weights_slabs(self, slab_bytes: int) -> int:
        """Slabs of the weights range."""
        return -(-self.weights_bytes // slab_bytes)


def first_word(layer: int, expert: int, matrix: int) -> int:
    """The first 8 bytes of an expert's matrix; each further word is one more."""
    return (layer + 1) << 48 | (expert + 1) << 32 | (matrix + 1) << 28


@contextmanager
def large_model(
    n_layers: int, n_experts: int, matrix_bytes: int, weights_bytes: int, *, durable: bool = False
) -> Iterator[LargeModel]:
    """Writes a model file that everybody can read; `durable` waits until nothing of it is left to write back."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        model = LargeModel(Path(directory, "model"), n_layers, n_experts, matrix_bytes, weights_bytes)
        words = np.arange(matrix_bytes // 8, dtype=np.uint64)
        with model.path.open("wb", buffering=0) as file:
            file.write(np.arange(weights_bytes // 8, dtype=np.uint64).tobytes())
            for layer in range(n_layers):
                for matrix in range(3):
                    for expert in range(n_experts):
                        file.write(memoryview(words + np.uint64(first_word(layer, expert, matrix))).cast("B"))
            if durable:
                os.fdatasync(file.fileno())
        model.path.chmod(0o644)
        yield model


@dataclass(frozen=True)
class Machine:
    """Where a test runs, and its sizes."""

    fake: dict[str, Any] | None
    slab_bytes: int
    matrix_bytes: int
    uuids: list[str] = field(default_factory=list)

    @classmethod
    def real(cls) -> "Machine":
        """This host's GPUs; slabs of 64 MiB and 22 experts each, as in Qwen3-30B-A3B at about 5 bits a weight.

        Where there is none it does what `require_gpu` does.
        """
        require_gpu()
        gpus, _ = cuda_calls.find_gpus(cuda_calls.bindings())
        return cls(None, 64 * MIB, 983_040, [gpu.uuid for gpu in gpus])

    @classmethod
    def pair(cls) -> "Machine":
        """The same where there are two at least; skips where there is one."""
        machine = cls.real()
        if len(machine.uuids) < 2:
            pytest.skip("this host has one GPU; two are needed")
        return machine

    @classmethod
    def stand_in(cls, others: Path, *, gpus: int = 2, total_bytes: int = 512 * MIB) -> "Machine":
        """Simulated GPUs; `others` is an empty directory of this machine's own."""
        others.chmod(0o777)
        salt = int.from_bytes(os.urandom(6), "little")
        fake = {"gpus": gpus, "total_bytes": total_bytes, "salt": salt, "others": os.fspath(others)}
        return cls(fake, 2 * MIB, 64 << 10, [fake_cuda.gpu_uuid(i, salt) for i in range(gpus)])

    @contextmanager
    def daemon(self, config: str) -> Iterator[Daemon]:
        """A vmmd with these lines of configuration, ended at the end."""
        lines = f"slab_bytes = {self.slab_bytes}\n{config}"
        if self.fake is None:
            daemon = Daemon(lines, driver="cuda", program=VMMD)
        else:
            environment = {"STRATA_FAKE_CUDA": json.dumps(self.fake)}
            daemon = Daemon(lines, driver="cuda", program=[fake_cuda.__file__], environment=environment)
        try:
            yield daemon
        finally:
            daemon.stop()

    def client(self, daemon: Daemon, uid: int = 0, visible: Sequence[int] | None = None) -> Remote:
        """A client of the daemon in a process of its own, which sees these GPUs alone and in this order."""
        fake, uuids = self.fake, None
        if visible is not None:
            fake, uuids = fake and {**fake, "visible": visible}, [self.uuids[i] for i in visible]
        return Remote(daemon.directory, uid, kind=functools.partial(CudaClient, fake=fake, visible=uuids))

    def other_program(self, device: int = 0) -> Remote:
        """A process that uses a GPU without the daemon."""
        return Remote(Path(), kind=functools.partial(OtherProgram, uuid=self.uuids[device], fake=self.fake))

    def model(self, n_layers: int, n_experts: int, *, durable: bool = False) -> Any:
        """A context: a model whose weights fill two slabs and a half."""
        return large_model(n_layers, n_experts, self.matrix_bytes, self.slab_bytes * 5 // 2, durable=durable)


class OtherProgram:
    """Allocates memory of a GPU as any program does."""

    def __init__(self, directory: str, uuid: str, fake: dict[str, Any] | None) -> None:
        if fake is not None:
            FakeCuda(**fake).install()
        self._mapper = CudaMapper(uuid)
        self._cu = self._mapper.cu
        self._held: list[int] = []

    def free_bytes(self) -> int:
        """What the device has free. The stand-in knows of this process and of what is no slab only."""
        with current(self._cu, self._mapper.context):
            return int(call(self._cu.cuMemGetInfo)[0])

    def allocate(self, size_bytes: int) -> None:
        """Takes memory."""
        with current(self._cu, self._mapper.context):
            self._held.append(int(call(self._cu.cuMemAlloc, size_bytes)))

    def free(self) -> None:
        """Gives all of it back."""
        with current(self._cu, self._mapper.context):
            while self._held:
                call(self._cu.cuMemFree, self._held.pop())


class CudaClient(Client):
    """A client that maps for kernels."""

    models: list[Any]

    def __init__(self, directory: str, fake: dict[str, Any] | None, visible: Sequence[str] | None = None) -> None:
        if fake is not None:
            FakeCuda(**fake).install()
        elif visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
        raise_descriptor_limit()
        super().__init__(directory)
        self._has_kernels = fake is None
        self._first_gpu = choose_device(self.session.devices(), None).uuid
        self._mappers: dict[str, CudaMapper] = {}
        self._kernels: Kernels | None = None
        self._words: dict[int, U64] = {}

    def choose(self, device: str | None, peer_devices: Sequence[str] = ()) -> list[str]:
        """What `strata-client` would take for these options: the computing device and its peers."""
        devices = self.session.devices()
        chosen = choose_device(devices, device)
        return [chosen.uuid, *(peer.device.uuid for peer in choose_peers(devices, chosen, peer_devices))]

    # Bytes

    def _mapper(self, range_: MappedRange) -> CudaMapper:
        """Of the GPU that owns a range, or of the first where the host does."""
        uuid = range_.device_uuid if range_.device_uuid.startswith("GPU-") else self._first_gpu
        if uuid not in self._mappers:
            self._mappers[uuid] = CudaMapper(uuid)
        return self._mappers[uuid]

    def make_current(self, device: int) -> None:
        """Makes a GPU current for this thread for good, as frameworks do."""
        mapper = CudaMapper(self.session.devices()[device].uuid)
        call(mapper.cu.cuCtxPushCurrent, mapper.context)

    def _read(self, range_: MappedRange, offset_bytes: int, into: npt.NDArray[Any]) -> None:
        mapper = self._mapper(range_)
        with current(mapper.cu, mapper.context):
            call(mapper.cu.cuMemcpyDtoH, into.ctypes.data, range_.address + offset_bytes, into.nbytes)

    def _is_right(self, place: Place, layer: int, expert: int) -> bool:
        size = place.sizes_bytes[0]
        if size not in self._words:
            self._words[size] = np.arange(size // 8, dtype=np.uint64)
        words, found = self._words[size], np.empty(size // 8, np.uint64)
        for matrix, offset in enumerate(place.offsets_bytes):
            self._read(place.range_, offset, found)
            if not np.array_equal(found, words + np.uint64(first_word(layer, expert, matrix))):
                return False
        return True

    def wrong_experts(self) -> int:
        """Reads every expert of the last model whole, within a step; how many have foreign bytes."""
        model, memory, wrong = self.models[-1], self.opened[-1].memory, 0
        with self.opened[-1].steps.step():
            for at in range(model.n):
                layer, expert = divmod(at, model.n_experts)
                wrong += not self._is_right(memory.place(layer, expert), layer, expert)
        return wrong

    def wrong_homes(self) -> int:
        """The same with their copies in host slabs; those without one are wrong."""
        model, memory, wrong = self.models[-1], self.opened[-1].memory, 0
        for at in range(model.n):
            layer, expert = divmod(at, model.n_experts)
            home = memory.home(layer, expert)
            wrong += home is None or not self._is_right(home, layer, expert)
        return wrong

    def weights_are_right(self) -> bool:
        """Whether every byte of the last model's weights is the file's."""
        found = np.empty(self.models[-1].weights_bytes // 8, np.uint64)
        self._read(self.opened[-1].memory._weights, 0, found)
        return np.array_equal(found, np.arange(len(found), dtype=np.uint64))

    def count_reads(self, seconds: float, seed: int = 0) -> tuple[int, int, list[str]]:
        """Reads random experts for a while, in steps: (reads, of a device slot, what was wrong)."""
        random, model, opened = np.random.default_rng(seed), self.models[-1], self.opened[-1]
        reads = on_device = 0
        wrong: list[str] = []
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(wrong) < 10:
            chosen = [divmod(int(at), model.n_experts) for at in random.integers(0, model.n, 8)]
            with opened.steps.step():
                for layer, expert in chosen:
                    place = opened.memory.place(layer, expert)
                    if not self._is_right(place, layer, expert):
                        wrong.append(f"layer {layer} expert {expert} at {pages.unpack(place.entry)}")
                    reads += 1
                    on_device += pages.unpack(place.entry).tier == pages.TIER_DEVICE
            opened.memory.count(1, prompt=False)
            opened.memory.routed(chosen[0][0], np.array([[chosen[0][1]]], np.int32), prompt=False)
        return reads, on_device, wrong

    def devices_of_experts(self) -> list[int]:
        """How many experts of the last model are in slots of each of its devices."""
        model, opened = self.models[-1], self.opened[-1]
        with opened.steps.step():
            entries = [pages.unpack(int(word)) for word in opened.memory.entries[: model.n]]
        devices = [entry.device for entry in entries if entry.tier == pages.TIER_DEVICE]
        return [devices.count(i) for i in range(len(opened.memory.arena))]

    # K/V

    def create(self, cells_max: int = 0, device: int = 0) -> int:
        """Makes a K/V range of up to 4,096 slabs; returns its id."""
        cells_max = cells_max or 4096 * (self.session.devices()[device].slab_bytes // CELL.size_bytes)
        return super().create(cells_max, device)

    def write_kv(self, value: int, at: int = 0) -> None:
        """Fills the mapped slabs of a range."""
        range_ = self.kv[at].range
        mapper, data = self._mapper(range_), np.full(range_.slab_bytes, value, np.uint8)
        with current(mapper.cu, mapper.context):
            for index in range_.mapped:
                to = range_.address + index * range_.slab_bytes
                call(mapper.cu.cuMemcpyHtoD, to, data.ctypes.data, data.nbytes)

    def read_kv(self, at: int = 0) -> list[int]:
        """The different bytes in the mapped slabs of a range."""
        range_, found = self.kv[at].range, np.zeros(256, np.bool_)
        data = np.empty(range_.slab_bytes, np.uint8)
        for index in range_.mapped:
            self._read(range_, index * range_.slab_bytes, data)
            found[data] = True
        return [int(value) for value in np.flatnonzero(found)]

    # Kernels

    def kernels(self, device: int = 0) -> Kernels:
        """Kernels on one of the daemon's GPUs; the first call decides which."""
        if self._kernels is None:
            self._kernels = Kernels(CudaMapper(self.session.devices()[device].uuid))
        return self._kernels

    def store_to_expert(self) -> None:
        """Stores to the first expert's slot, which this process maps read-only. Errors: `DriverError`, or the end."""
        place = self._first_place()
        address = place.range_.address + place.offsets_bytes[0]
        if self._has_kernels:
            self.kernels().store(address, 1)
        else:
            call(self._mapper(place.range_).cu.cuMemcpyHtoD, address, np.zeros(1, np.uint64).ctypes.data, 8)

    def load_from_expert(self, device: int) -> int:
        """The first word of the first expert's slot, as a kernel on any GPU sees it."""
        place = self._first_place()
        return self.kernels(device).load(place.range_.address + place.offsets_bytes[0])

    def _first_place(self) -> Place:
        with self.opened[-1].steps.step():
            return self.opened[-1].memory.place(0, 0)

    def read_rates(self, seconds: float, at: int = 0) -> list[tuple[float, float]]:
        """A kernel reads a K/V range again and again: (end in s of the monotonic clock, GB/s) of each launch."""
        range_ = self.kv[at].range
        return self.kernels().read_rates(range_.address, len(range_.mapped) * range_.slab_bytes, seconds)

    # What benches time

    def route(self, seed: int, tokens: int, *, redraw: bool = False) -> None:
        """Counts tokens whose experts are drawn by Zipf's law; `redraw` makes others popular than before."""
        model, memory = self.models[-1], self.opened[-1].memory
        popular = np.random.default_rng(seed if redraw else 0)
        random = np.random.default_rng(seed)
        share = 1 / np.arange(1, model.n_experts + 1)
        share /= share.sum()
        for layer in range(model.n_layers):
            drawn = random.multinomial(tokens * model.top_k, share[popular.permutation(model.n_experts)])
            memory._counts[0, layer] += np.minimum(drawn, tokens).astype(np.uint64)
        memory.count(tokens, prompt=False)

    def time_growth(self, slabs: int, at: int = 0) -> tuple[float, int, int]:
        """Grows a range: (seconds from the call until all is mapped, slabs that arenas gave, experts moved)."""
        kv = self.kv[at]
        began = time.perf_counter()
        reply = self.session.grow([kv], slabs * kv.cells_per_slab)
        took_s = time.perf_counter() - began
        return took_s, sum(t.slabs for t in reply.trades), sum(t.experts_moved for t in reply.trades)

    def time_open(self, model: LargeModel, devices: Sequence[str] = ()) -> dict[str, float]:
        """Opens a model and maps its homes: begin and end in s of the monotonic clock, seconds of mapping by range."""
        self._mappers.setdefault(self._first_gpu, CudaMapper(self._first_gpu))  # a client that computes has its context
        spent: dict[int, float] = {}
        plain = MappedRange._map

        def timed(range_: MappedRange, indexes: Sequence[int], fds: Sequence[int]) -> None:
            began = time.perf_counter()
            plain(range_, indexes, fds)
            spent[range_.range_id] = spent.get(range_.range_id, 0.0) + time.perf_counter() - began

        MappedRange._map = timed  # type: ignore[method-assign]
        try:
            began = time.monotonic()
            self.open(model, devices)
            self.opened[-1].homes.begin().result()
            ended = time.monotonic()
        finally:
            MappedRange._map = plain  # type: ignore[method-assign]
        memory = self.opened[-1].memory
        return {
            "began": began,
            "ended": ended,
            "homes": spent.get(memory.homes.range_id, 0.0),
            "arena": sum(spent.get(range_.range_id, 0.0) for range_ in memory.arena),
        }

    def time_give_back(self, slabs: int, timeout_s: float = 60, at: int = 0) -> dict[str, float]:
        """Shrinks a range and watches the residency table until every expert is in a slot.

        Returns when the call began, when the first expert came and when the last
        did, in s of the monotonic clock, and how many came between.
        """
        entries, n = self.opened[-1].memory.entries, self.models[-1].n
        shift = np.uint64(62)
        before = int(np.count_nonzero(entries >> shift == pages.TIER_DEVICE))
        began = time.monotonic()
        self.shrink(slabs, at=at)
        first, seen = 0.0, before
        while True:
            now = int(np.count_nonzero(entries >> shift == pages.TIER_DEVICE))
            if now > before and not first:
                first, seen = time.monotonic(), now
            if now == n:
                return {"began": began, "first": first, "last": time.monotonic(), "experts": n - seen}
            assert time.monotonic() < began + timeout_s, f"{now} of {n} experts are in slots"
            time.sleep(0.0002)

    def wait_for_homes(self, timeout_s: float = 60) -> float:
        """When the last expert's home was published, in s of the monotonic clock."""
        entries, until = self.opened[-1].memory.home_entries, time.monotonic() + timeout_s
        while not entries.all():
            assert time.monotonic() < until, f"{np.count_nonzero(entries)} of {len(entries)} homes are filled"
            time.sleep(0.001)
        return time.monotonic()
