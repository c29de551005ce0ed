"""The `Memory` service."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from strata_api.v1 import memory_pb2, memory_pb2_grpc

from vmmd.core import geometry
from vmmd.errors import Exhausted, InvalidRequest, LeaseRevoked, VmmError
from vmmd.manager import Manager
from vmmd.manager.conversations import Opened
from vmmd.manager.model import Model
from vmmd.manager.session import Session
from vmmd.server import convert
from vmmd.server.rpc import Context, streaming, token_of, unary

PROGRESS_S = 0.1
PART_ENTRIES_MAX = 1000
"""Stacks or extents of one message: translating them holds everybody up."""

ENTRIES_PER_USER_MAX = 3 * geometry.EXPERTS_MAX + geometry.EXTENTS_MAX
"""Of all geometries that a user's sessions are sending: what the largest model has."""

NAME_CHARACTERS_MAX = 255


class Memory(memory_pb2_grpc.MemoryServicer):
    """Handlers: find the session, translate, call the manager, translate back."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._entries: Counter[int] = Counter()  # of geometries under way, by user id

    def _session(self, context: Context) -> Session:
        return self._manager.by_token(token_of(context))

    @unary
    async def ListDevices(
        self, request: memory_pb2.ListDevicesRequest, context: Context
    ) -> memory_pb2.ListDevicesReply:
        self._session(context)
        records = self._manager.ledger.devices
        devices = [convert.device(records[info.uuid], info) for info in self._manager.driver.devices()]
        return memory_pb2.ListDevicesReply(epoch=self._manager.epoch, devices=devices)

    @streaming
    async def OpenModel(
        self, requests: AsyncIterator[memory_pb2.OpenModelRequest], context: Context
    ) -> AsyncIterator[memory_pb2.OpenModelEvent]:
        session = self._session(context)
        model, shared, device_uuids = await self._open(session, requests)
        resident = {r.device for r in model.ranges} if shared else set()
        while not model.ready.done():
            await asyncio.wait([model.ready], timeout=PROGRESS_S)
            if model.total_bytes:
                progress = memory_pb2.Progress(filled_bytes=model.filled_bytes, total_bytes=model.total_bytes)
                yield memory_pb2.OpenModelEvent(progress=progress)
        model.ready.result()
        await self._manager.extend_model(session, model, device_uuids)
        if session.ended:
            raise LeaseRevoked("the session ended while it opened a model")
        ledger = self._manager.ledger
        batch_id, homes_batch_id = self._manager.grant_model(session, model)
        yield memory_pb2.OpenModelEvent(
            opened=memory_pb2.Opened(
                epoch=self._manager.epoch,
                model_id=model.model_id,
                attachment=session.attachment(model),
                weights=convert.range_(ledger, model.weights),
                arena=[convert.range_(ledger, r, granted=model.grants(session, r)) for r in model.ranges],
                homes=convert.range_(ledger, model.homes),
                batch_id=batch_id,
                homes_batch_id=homes_batch_id,
                shared=shared,
                filled_s=[0.0 if r.device in resident else model.filled_s.get(r.device, 0.0) for r in model.ranges],
            )
        )

    async def _open(
        self, session: Session, requests: AsyncIterator[memory_pb2.OpenModelRequest]
    ) -> tuple[Model, bool, Sequence[str]]:
        """Reads a geometry and finds or makes its model, which may still be filling.

        Returns it, whether it was there, and the devices that it was asked for on.
        """
        begin: memory_pb2.Begin | None = None
        stacks: list[geometry.Stack] = []
        weights: list[geometry.Extent] = []
        uid, count = session.record.uid, 0
        try:
            async for request in requests:
                part = request.WhichOneof("part")
                if (part == "begin") != (begin is None):
                    raise InvalidRequest("an OpenModel stream starts with one Begin, then come Stacks and Extents")
                entries = len(request.stacks.stacks) + len(request.weights.extents)
                if entries > PART_ENTRIES_MAX:
                    raise InvalidRequest(
                        f"geometry: {entries} entries in a part; {PART_ENTRIES_MAX} are possible, send more parts"
                    )
                count += entries
                self._entries[uid] += entries
                if self._entries[uid] > ENTRIES_PER_USER_MAX:
                    raise Exhausted(
                        f"user {uid} is opening models of more than {ENTRIES_PER_USER_MAX} stacks and extents in all;"
                        " open one after the other"
                    )
                if part == "begin":
                    begin = request.begin
                elif part == "stacks":
                    stacks += convert.stacks(request.stacks)
                elif part == "weights":
                    weights += convert.extents(request.weights)
            if begin is None:
                raise InvalidRequest("an OpenModel stream starts with a Begin; it was empty")
            if len(begin.name) > NAME_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"a model's name of {len(begin.name)} characters; at most {NAME_CHARACTERS_MAX} are possible"
                )
            shape = begin.n_layers, begin.n_experts, begin.top_k
            model, shared = await self._manager.open_model(
                session, begin.files_id, begin.name, begin.device_uuids, shape, stacks, weights, begin.wait_ms / 1000
            )
            return model, shared, begin.device_uuids
        finally:
            self._entries[uid] -= count

    @unary
    async def CloseModel(self, request: memory_pb2.CloseModelRequest, context: Context) -> memory_pb2.CloseModelReply:
        self._manager.close_model(self._session(context), request.model_id)
        return memory_pb2.CloseModelReply(epoch=self._manager.epoch)

    @unary
    async def CreateRange(
        self, request: memory_pb2.CreateRangeRequest, context: Context
    ) -> memory_pb2.CreateRangeReply:
        session = self._session(context)
        shape = request.device_uuid, request.model_id, request.cells_per_slab, request.cells_max
        if request.HasField("conversation"):
            asked = request.conversation
            opened = await self._manager.conversations.open(session, asked.name, asked.layout, *shape)
        else:
            opened = Opened(self._manager.kv.create(session, *shape, shrinkable=request.shrinkable), 0, "")
        return memory_pb2.CreateRangeReply(
            epoch=self._manager.epoch,
            range=convert.range_(self._manager.ledger, opened.record),
            batch_id=opened.batch_id,
            began_anew=opened.began_anew,
        )

    @unary
    async def GrowRanges(self, request: memory_pb2.GrowRangesRequest, context: Context) -> memory_pb2.GrowRangesReply:
        most = self._manager.options.ranges_per_session_max
        if len(request.growths) > most:
            raise InvalidRequest(
                f"{len(request.growths)} growths in one call; a session has {most} ranges (ranges_per_session_max)"
            )
        growths = [(g.range_id, g.cells) for g in request.growths]
        granted = await self._manager.kv.grow(self._session(context), growths, request.wait_ms / 1000)
        return memory_pb2.GrowRangesReply(
            epoch=self._manager.epoch,
            batch_id=granted.batch_id,
            ranges=[convert.grown(self._manager.ledger, r) for r in granted.ranges],
            free_slabs=granted.free_slabs,
            trades=granted.trades,
        )

    @unary
    async def ShrinkRange(
        self, request: memory_pb2.ShrinkRangeRequest, context: Context
    ) -> memory_pb2.ShrinkRangeReply:
        record = await self._manager.kv.shrink(self._session(context), request.range_id, request.cells)
        cells = convert.grown(self._manager.ledger, record).cells
        return memory_pb2.ShrinkRangeReply(epoch=self._manager.epoch, cells=cells)

    @unary
    async def CloseRange(self, request: memory_pb2.CloseRangeRequest, context: Context) -> memory_pb2.CloseRangeReply:
        await self._manager.kv.close(self._session(context), request.range_id)
        return memory_pb2.CloseRangeReply(epoch=self._manager.epoch)

    @unary
    async def ParkRange(self, request: memory_pb2.ParkRangeRequest, context: Context) -> memory_pb2.ParkRangeReply:
        cells = await self._manager.conversations.park(self._session(context), request.range_id)
        return memory_pb2.ParkRangeReply(epoch=self._manager.epoch, cells=cells)

    @streaming
    async def Watch(
        self, requests: AsyncIterator[memory_pb2.WatchRequest], context: Context
    ) -> AsyncIterator[memory_pb2.WatchEvent]:
        session = self._session(context)
        if session.watcher is not None:
            raise InvalidRequest("this session has a watch stream already")
        woken = asyncio.Event()
        session.watcher = woken.set
        reader = asyncio.create_task(self._read_answers(session, requests))
        wake: asyncio.Task[bool] | None = None
        try:
            while not session.ended and not reader.done():
                while session.events:
                    yield session.events.popleft()
                woken.clear()
                if not session.events and not session.ended:
                    wake = asyncio.create_task(woken.wait())
                    await asyncio.wait([wake, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if wake is not None:
                wake.cancel()
            session.watcher = None
            reader.cancel()

    async def _read_answers(self, session: Session, requests: AsyncIterator[memory_pb2.WatchRequest]) -> None:
        async for request in requests:
            try:
                self._manager.released(session, request.released_revocation_id)
            except VmmError:
                continue  # an answer to nothing harms nobody
