"""A session: one process's leases with one daemon.

A thread serves the daemon's Watch stream at all times, also while this process
waits for its own growth. The daemon's going is remembered: what is mapped stays
usable, only growing fails from then on.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strata_api.v1 import memory_pb2 as wire
from strata_api.v1 import pages

from strata_client import connection, timings
from strata_client.cells import CELLS_MULTIPLE, CellShape, KVRange, cells_per_slab
from strata_client.devices import is_gpu
from strata_client.mapping import U64, Fetched, MappedRange, map_page
from strata_client.model_memory import ClientMemory, Shape
from strata_client.models.base import ExpertStack
from strata_client.startup import Later
from strata_client.steps import Changes, Steps
from vmmd.driver import membarrier
from vmmd.driver.base import Mapper
from vmmd.driver.host_memfd import HostMapper
from vmmd.errors import LeaseRevoked, Unavailable, VmmError

if TYPE_CHECKING:
    import grpc

    from strata_client.private_daemon import PrivateDaemon

PART_ENTRIES_MAX = 1000
"""Entries of the geometry in one message: a fraction of gRPC's 4 MB."""

HOMES_AT_ONCE = 16
"""Slabs of homes that are mapped in one call of the driver: a launch may have to wait for it."""

_GIVE_BACK_TIMEOUT_S = 2
_PARK_TIMEOUT_S = 5
_BETWEEN_STEPS_S = 0.0005


@dataclass(frozen=True)
class OpenedModel:
    """A model as this session holds it.

    Attributes:
        homes: maps the experts' homes; `memory` does so itself when it looks for one in vain.
        shared: it was resident already.
        filled_s: by part of the arena, how long it took to fill it; 0 where it was resident already.
    """

    model_id: int
    memory: ClientMemory
    steps: Steps
    homes: Later[None]
    shared: bool
    filled_s: tuple[float, ...]


@dataclass(frozen=True)
class OpenedConversation:
    """A conversation as this session holds it.

    Attributes:
        kv: its cells, with the memory that they have.
        tokens: its token page.
        began_anew: why what was left under its name could not be used; empty if nothing was.
    """

    kv: KVRange
    tokens: U64
    began_anew: str


class Session:
    """Leases of one daemon; for one thread, beside the watch thread of its own.

    Attributes:
        directory: the daemon's runtime directory.
        is_private: the daemon was started by this session and ends with it.
        troubles: what went wrong in the background without hurting, a line each.
        on_shrink_request: called by the watch thread with a range's id, the slabs that others need of it, and the
            seconds in which `shrink_range` must answer. Only shrinkable ranges are asked for.
    """

    def __init__(
        self, directory: Path, broker: connection.Broker, private: "PrivateDaemon | None" = None, wait_s: float = 0.0
    ) -> None:
        """Takes over the broker connection, and the daemon if it is a private one; see `connection.Asked`."""
        self.directory = directory
        self.is_private = private is not None
        self.troubles: list[str] = []
        self.on_shrink_request: Callable[[int, int, float], None] = lambda range_id, slabs, seconds: None
        self._broker = broker
        self._wait_ms = int(wait_s * 1000)
        self._private = private
        self._lock = threading.Lock()  # of everything mapped: never held while the daemon is waited for
        self._order = threading.Lock()  # of the daemon's changes: taken before any other
        self._changes = Changes(self.troubles.append)
        self._steps: list[Steps] = []
        self._early: list[wire.WatchEvent] = []
        self._ranges: dict[int, MappedRange] = {}
        self._models: list[int] = []
        self._homes: list[Later[None]] = []
        self._home_ranges: set[int] = set()
        self._gone = ""
        self._metadata = ((connection.TOKEN_KEY, broker.token),)
        self._outgoing: queue.SimpleQueue[wire.WatchRequest | None] = queue.SimpleQueue()
        page_fd, broker.page_fd = broker.page_fd, -1
        self._page = map_page(page_fd, pages.SESSION_PAGE_BYTES, writable=True)
        self._channel: grpc.Channel = connection.open_channel(directory)
        from strata_api.v1.memory_pb2_grpc import MemoryStub

        self._stub: Any = MemoryStub(self._channel)  # type: ignore[no-untyped-call]
        self._events = self._stub.Watch(iter(self._outgoing.get, None), metadata=self._metadata)
        self._watcher = threading.Thread(target=self._watch, name="strata-watch", daemon=True)
        self._watcher.start()

    @classmethod
    def connect(
        cls,
        directories: Sequence[Path],
        asked: connection.Asked = connection.Asked(),  # noqa: B008  a tuple
    ) -> "Session":
        """A session with the daemon in the first of these runtime directories where one answers.

        Errors: `strata_client.connection.NoDaemon`, `PermissionDenied`, `Draining`, `Unavailable`,
        `InvalidRequest` (more was asked for than may be had), `Exhausted` (no memory left to guarantee).
        """
        directory, sock = connection.dial(directories)
        return cls(directory, connection.Broker(sock, asked=asked), wait_s=asked.wait_s)

    @classmethod
    def private(cls, slab_bytes_min: int) -> "Session":
        """A session with a `PrivateDaemon`. Errors: `Unavailable`, with the daemon's last words."""
        from strata_client.private_daemon import PrivateDaemon

        daemon = PrivateDaemon(slab_bytes_min)
        try:
            import grpc  # noqa: F401  while the daemon starts

            daemon.wait_ready()
            directory, sock = connection.dial([daemon.directory])
            return cls(directory, connection.Broker(sock), daemon)
        except BaseException:
            daemon.close()
            raise

    @property
    def gone(self) -> str:
        """Why nothing more can be had of the daemon; empty while it serves."""
        return self._gone

    def devices(self) -> Sequence[wire.Device]:
        """The daemon's devices, computing ones first."""
        reply = self._call("ListDevices", wire.ListDevicesRequest())
        return list(reply.devices)

    def open_model(
        self,
        begin: wire.Begin,
        fds: Sequence[int],
        stacks: Sequence[ExpertStack],
        shape: Shape,
        progress: Callable[[int, int], None] = lambda filled_bytes, total_bytes: None,
        owners: Collection[str] = (),
    ) -> OpenedModel:
        """Opens a model: blocks until every expert has a place, and maps all of it but the homes.

        Args:
            begin: the model's head; `files_id` and `wait_ms` are filled in here.
            fds: descriptors of its files, which stay the caller's.
            stacks: where its experts lie.
            shape: its weights and sizes.
            progress: called with bytes filled and bytes to fill.
            owners: UUIDs of devices whose slots the computing device has no path to; they alone read them.

        Errors: any `VmmError`.
        """
        begin.files_id = 1 + len(self._models)
        begin.wait_ms = self._wait_ms
        self._broker.send_files(begin.files_id, fds)
        with timings.stage("open"):
            opened = self._open_stream(_geometry(begin, stacks, shape), progress)
        self._broker.check_epoch(opened.epoch)
        self._models.append(opened.model_id)
        ranges = [opened.weights, opened.homes, *opened.arena]
        computing = opened.weights.device_uuid
        readers = [range_.device_uuid if range_.device_uuid in owners else computing for range_ in ranges]
        # all mappers before the first range: only a GPU whose context exists by then can read another's slabs
        mappers = [
            mapper_of(range_.device_uuid, reader, alone=range_.device_uuid in owners)
            if range_.slabs_max
            else HostMapper()
            for range_, reader in zip(ranges, readers, strict=True)
        ]
        weights, homes, *arena = (
            MappedRange(mapper, range_, writable=False, reader_uuid=reader)
            for mapper, range_, reader in zip(mappers, ranges, readers, strict=True)
        )
        n_experts = shape.n_layers * shape.n_experts
        batch = Fetched([weights, *arena], n_experts)
        with timings.stage("map"):
            self._broker.fetch(opened.batch_id, lambda grant: batch.take(grant.entries, grant.fds))
        self._home_ranges.add(homes.range_id)
        self._register(weights, homes, *arena)
        later = Later("homes", partial(self._map_homes, opened.homes_batch_id, homes))
        self._homes.append(later)
        if batch.table is None or batch.heat is None:
            raise VmmError("the daemon granted the model without its residency table or heat page")
        membarrier.register()
        line = self._page[opened.attachment * pages.LINE_WORDS :][: pages.LINE_WORDS]
        steps = Steps(line, batch.table, self._lock, self._changes)
        self._steps.append(steps)
        memory = ClientMemory(shape, weights, arena, homes, batch.table, batch.heat, lambda: later.begin().result())
        return OpenedModel(opened.model_id, memory, steps, later, opened.shared, tuple(opened.filled_s))

    def create_kv(self, model_id: int, device: wire.Device, cell: CellShape, cells_max: int) -> KVRange:
        """A K/V range for up to `cells_max` cells, without memory as yet.

        Errors: `InvalidRequest` if 16 cells do not fit a slab; any other `VmmError`.
        """
        return self._create_kv(model_id, device, cell, cells_max, None)[0]

    def open_conversation(
        self, name: str, model_id: int, device: wire.Device, cell: CellShape, cells_max: int
    ) -> OpenedConversation:
        """The user's conversation of this name, for up to `cells_max` cells, with the memory that it has.

        Errors: as `create_kv`; `PreconditionFailed` if another session uses it.
        """
        kv, reply = self._create_kv(model_id, device, cell, cells_max, wire.Conversation(name=name, layout=cell.layout))
        tokens = self._fetch(reply.batch_id, Fetched([kv.range], cells_max=cells_max)).tokens
        if tokens is None:
            raise VmmError("the daemon granted the conversation without its token page")
        complete = int(tokens[pages.WORD_COMPLETE])
        if kv.cells < complete:
            raise VmmError(f"the conversation has {complete} cells, and memory for {kv.cells} of them could be mapped")
        return OpenedConversation(kv, tokens, reply.began_anew)

    def _create_kv(
        self,
        model_id: int,
        device: wire.Device,
        cell: CellShape,
        cells_max: int,
        conversation: wire.Conversation | None,
    ) -> tuple[KVRange, wire.CreateRangeReply]:
        if self._gone:
            raise Unavailable(self._gone)
        cells = cells_per_slab(device.slab_bytes, cell.size_bytes)
        request = wire.CreateRangeRequest(
            device_uuid=device.uuid,
            model_id=model_id,
            cells_per_slab=cells,
            cells_max=cells_max,
            conversation=conversation,
        )
        reply: wire.CreateRangeReply = self._call("CreateRange", request)
        range_ = MappedRange(mapper_of(reply.range.device_uuid, device.uuid), reply.range, writable=True)
        self._register(range_)
        return KVRange(range_, cell), reply

    def grow(self, kvs: Sequence[KVRange], cells: int, *, wait: bool = False) -> wire.GrowRangesReply:
        """Grows a sequence's ranges, one a stage, to at least `cells` cells each and maps what came; all or nothing.

        Between steps only. `wait`: for memory that others hold, as long as the session's requests may.

        Errors: `Exhausted` (who holds what is in it), `Unavailable` (the daemon is gone).
        """
        if self._gone:
            raise Unavailable(f"{self._gone}, so K/V stays at {min(kv.cells for kv in kvs)} cells")
        ranges = [kv.range for kv in kvs]
        reply = self._ask_growth(ranges, cells, self._wait_ms if wait else 0)
        self._take(reply, ranges)
        for kv in kvs:
            if kv.cells < cells:
                raise VmmError(f"the daemon granted {cells} cells and sent memory for {kv.cells}")
        return reply

    def give_back(self, kv: KVRange) -> None:
        """Unmaps a range and gives it back for good. No step may use it."""
        with kv.range.lock:
            self.close_range(kv.range, _GIVE_BACK_TIMEOUT_S)

    def park(self, kv: KVRange) -> None:
        """Unmaps a conversation's slabs and leaves it with the daemon. Errors: any `VmmError`."""
        self._unmap_beyond(kv.range, 0)
        if self._gone:
            raise Unavailable(self._gone)
        self._call("ParkRange", wire.ParkRangeRequest(range_id=kv.range.range_id), timeout=_PARK_TIMEOUT_S)

    # Ranges of plain bytes: a slab counts as 16 cells. For any thread, also while the range grows in another.

    def create_range(self, device: wire.Device, slabs_max: int, *, shrinkable: bool) -> MappedRange:
        """A range for uses other than K/V, without memory as yet. Errors: any `VmmError`."""
        request = wire.CreateRangeRequest(
            device_uuid=device.uuid,
            cells_per_slab=CELLS_MULTIPLE,
            cells_max=CELLS_MULTIPLE * slabs_max,
            shrinkable=shrinkable,
        )
        reply = self._call("CreateRange", request)
        try:
            range_ = MappedRange(mapper_of(reply.range.device_uuid, device.uuid), reply.range, writable=True)
        except VmmError:
            self._call("CloseRange", wire.CloseRangeRequest(range_id=reply.range.range_id))
            raise
        self._register(range_)
        return range_

    def grow_range(self, range_: MappedRange, slabs: int) -> None:
        """Grows a range to at least `slabs` slabs and maps what came; all or nothing.

        Errors: `Exhausted` (who holds what is in it), `Unavailable` (the daemon is gone), `LeaseRevoked` (the range
        was closed or shrunk meanwhile).
        """
        if self._gone:
            raise Unavailable(f"{self._gone}, so no range grows any more")
        reply = self._ask_growth([range_], CELLS_MULTIPLE * slabs)
        try:
            self._take(reply, [range_])
        except VmmError:
            with suppress(VmmError), range_.lock:  # what came and could not be mapped
                self.shrink_range(range_, range_.slabs)
            raise
        if range_.slabs < slabs:
            raise LeaseRevoked(
                f"range {range_.range_id} has {range_.slabs} slabs, not {slabs}: it was shrunk meanwhile"
            )

    def shrink_range(self, range_: MappedRange, slabs: int) -> None:
        """Unmaps a range's slabs beyond the first `slabs` and gives them back. The range's lock held."""
        self._unmap_beyond(range_, slabs)
        if not self._gone:
            self._call("ShrinkRange", wire.ShrinkRangeRequest(range_id=range_.range_id, cells=CELLS_MULTIPLE * slabs))

    def close_range(self, range_: MappedRange, timeout_s: float | None = None) -> None:
        """Unmaps a range and gives it back for good. The range's lock held."""
        self._unmap_beyond(range_, 0)
        with self._order:
            self._ranges.pop(range_.range_id, None)
        range_.close()
        if not self._gone:
            self._call("CloseRange", wire.CloseRangeRequest(range_id=range_.range_id), timeout=timeout_s)

    def _unmap_beyond(self, range_: MappedRange, slabs: int) -> None:
        with self._lock:
            range_.unmap([index for index in sorted(range_.mapped) if index >= slabs])

    def _ask_growth(self, ranges: Sequence[MappedRange], cells: int, wait_ms: int = 0) -> wire.GrowRangesReply:
        growths = [wire.Growth(range_id=range_.range_id, cells=cells) for range_ in ranges]
        request = wire.GrowRangesRequest(growths=growths, wait_ms=wait_ms)
        reply: wire.GrowRangesReply = self._call("GrowRanges", request)
        return reply

    def _take(self, reply: wire.GrowRangesReply, ranges: Sequence[MappedRange]) -> None:
        """Maps what a growth brought."""
        if reply.batch_id:
            with ExitStack() as locks:
                for range_ in ranges:
                    locks.enter_context(range_.lock)
                self._fetch(reply.batch_id, Fetched(ranges))

    def close(self) -> None:
        """Gives everything back, unmaps it and ends the session; the private daemon leaves."""
        if not self._gone and not self.is_private:
            for model_id in self._models:
                with suppress(VmmError):
                    self._call("CloseModel", wire.CloseModelRequest(model_id=model_id), timeout=_GIVE_BACK_TIMEOUT_S)
        self._gone = self._gone or "the session is closed"
        self._outgoing.put(None)
        self._events.cancel()
        self._channel.close()
        self._broker.close()
        self._watcher.join(_GIVE_BACK_TIMEOUT_S)
        for homes in self._homes:
            homes.wait()
        for range_ in self._ranges.values():
            range_.close()
        self._ranges.clear()
        if self._private is not None:
            self._private.close()

    def abandon(self) -> None:
        """Leaves nothing behind on a sudden exit: closes nothing but removes the private directory."""
        if self._private is not None:
            self._private.remove_directory()

    def _call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        try:
            with connection.rebuilt_errors():
                reply = getattr(self._stub, method)(request, metadata=self._metadata, timeout=timeout)
        except ValueError as error:  # what gRPC raises where another thread has closed the channel
            if not self._gone:
                raise
            raise Unavailable(self._gone) from error
        self._broker.check_epoch(reply.epoch)
        return reply

    def _open_stream(self, parts: Iterator[wire.OpenModelRequest], progress: Callable[[int, int], None]) -> wire.Opened:
        with connection.rebuilt_errors():
            call = self._stub.OpenModel(parts, metadata=self._metadata)
            try:
                for event in call:
                    if event.WhichOneof("event") == "opened":
                        opened: wire.Opened = event.opened
                        return opened
                    progress(event.progress.filled_bytes, event.progress.total_bytes)
            finally:
                call.cancel()
        raise Unavailable("the daemon ended the opening of the model without a word")

    def _register(self, *ranges: MappedRange) -> None:
        """Knows ranges from here on; changes that came before that are carried out."""
        with self._order:
            self._ranges.update({range_.range_id: range_ for range_ in ranges})
            early, self._early = self._early, []
            for event in early:
                self._carry_out(event)

    def _watch(self) -> None:
        import grpc

        try:
            for event in self._events:
                self._on_event(event)
        except grpc.RpcError:
            pass
        finally:
            self._gone = self._gone or f"the daemon at {self.directory} has gone"

    def _on_event(self, event: wire.WatchEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "notice":
            if event.notice.code == wire.Notice.CODE_STOPPING:
                self._gone = f"the daemon at {self.directory} is stopping"
            elif event.notice.message:
                self.troubles.append(event.notice.message)
        elif kind == "shrink_request":
            request = event.shrink_request
            self.on_shrink_request(request.range_id, request.slabs, request.deadline_ms / 1000)
        elif kind is not None:
            with self._order:
                self._carry_out(event)

    def _carry_out(self, event: wire.WatchEvent) -> None:
        """Maps or unmaps what the daemon has changed. Order lock held."""
        if event.WhichOneof("event") == "slabs_removed":
            self._change(lambda: self._remove(event.slabs_removed))
        elif event.slabs_added.range_id in self._ranges:
            range_ = self._ranges[event.slabs_added.range_id]
            try:
                if range_.range_id in self._home_ranges:
                    self._map_homes(event.slabs_added.batch_id, range_)
                else:
                    self._fetch(event.slabs_added.batch_id, Fetched([range_]))
            except VmmError as error:  # what is not mapped is read from its home
                self.troubles.append(f"memory that was added could not be had: {error}")
        else:
            self._early.append(event)

    def _remove(self, removed: wire.SlabsRemoved) -> None:
        if removed.range_id in self._ranges:
            self._ranges[removed.range_id].unmap(removed.slab_indexes)
        if removed.revocation_id:
            self._outgoing.put(wire.WatchRequest(released_revocation_id=removed.revocation_id))

    def _fetch(self, batch_id: int, batch: Fetched) -> Fetched:
        self._broker.fetch(batch_id, lambda grant: self._change(lambda: batch.take(grant.entries, grant.fds)))
        return batch

    def _map_homes(self, batch_id: int, homes: MappedRange) -> None:
        """Maps homes, some at once, beside steps: one that has begun may wait for them."""

        def take(grant: connection.Grant) -> None:
            homes.map_missing([entry.slab_index for entry in grant.entries], grant.fds)

        with timings.stage("map homes"):
            if batch_id:
                self._broker.fetch(batch_id, take, HOMES_AT_ONCE)

    def _change(self, change: Callable[[], None]) -> None:
        """Changes what is mapped between two steps: now, or at the next step's beginning if that comes first."""
        self._changes.add(change)
        while self._changes.waiting:
            with self._lock:
                if all(steps.idle for steps in self._steps):
                    self._changes.carry_out()
                    return
            time.sleep(_BETWEEN_STEPS_S)  # a GPU's steps end by themselves


def mapper_of(device_uuid: str, reader_uuid: str, *, alone: bool = False) -> Mapper:
    """What maps slabs of a device for one that reads them: numpy arrays for the host, addresses for a GPU.

    Other GPUs of this process are let in, too, as far as they have a path; not those of a device that reads `alone`.

    Errors: `NoDevice`, `NotFound`, `DriverError` where this process cannot use the GPU.
    """
    if not is_gpu(reader_uuid):
        return HostMapper()
    from vmmd.driver.cuda_mapper import CudaMapper  # loads CUDA, which clients on the host do without

    if not is_gpu(device_uuid):
        return CudaMapper(reader_uuid, host=True)
    return CudaMapper(device_uuid, peer_access="never" if alone else "auto")


def _geometry(begin: wire.Begin, stacks: Sequence[ExpertStack], shape: Shape) -> Iterator[wire.OpenModelRequest]:
    """The parts of OpenModel's request, none with more than 1000 entries."""
    yield wire.OpenModelRequest(begin=begin)
    for at in range(0, len(stacks), PART_ENTRIES_MAX):
        part = [
            wire.Stack(
                layer=stack.layer,
                matrix=wire.Matrix.Name(stack.matrix),
                first_expert=stack.first_expert,
                count=stack.count,
                file=stack.file,
                offset_bytes=stack.offset_bytes,
                stride_bytes=stack.stride_bytes,
                expert_bytes=stack.expert_bytes,
            )
            for stack in stacks[at : at + PART_ENTRIES_MAX]
        ]
        yield wire.OpenModelRequest(stacks=wire.Stacks(stacks=part))
    for at in range(0, len(shape.weights), PART_ENTRIES_MAX):
        extents = [
            wire.Extent(file=extent.file, offset_bytes=extent.offset_bytes, length_bytes=extent.length_bytes)
            for extent in shape.weights[at : at + PART_ENTRIES_MAX]
        ]
        yield wire.OpenModelRequest(weights=wire.Extents(extents=extents))
