"""The manager's front: sessions, models, K/V ranges. The server and the broker call it.

Checking and taking are one step: a plan's slabs change their state in the ledger
before anything is awaited, so two growers never count on the same slab.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog
from strata_api.v1 import memory_pb2, pages

from vmmd.core import arbiter, geometry
from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord, SlabState
from vmmd.core.residency import Arena, Part
from vmmd.driver.base import Driver
from vmmd.errors import (
    Draining,
    DriverError,
    Exhausted,
    InvalidRequest,
    LeaseRevoked,
    NoDevice,
    NotFound,
    PermissionDenied,
    VmmError,
)
from vmmd.manager import opening
from vmmd.manager.files import FileIdentity, identify
from vmmd.manager.model import Model
from vmmd.manager.session import BatchItem, Kind, Session
from vmmd.manager.shared import HeatPage, ResidencyTable, SharedPage
from vmmd.manager.slabs import Placed, Slabs
from vmmd.manager.upkeep import Upkeep

log = structlog.get_logger("vmmd.manager")


@dataclass(frozen=True)
class Options:
    """What the manager takes from the configuration (``vmmd/example.toml`` says what each means)."""

    floor_slots: int = 0
    give_back_delay_s: float = 5.0
    quiesce_deadline_s: float = 2.0
    revoke_deadline_s: float = 5.0
    heat_decay: float = 0.7
    heat_interval_s: float = 1.0
    sessions_per_user_max: int = 64
    ranges_per_session_max: int = 256
    files_max: int = 1024


class Grown(NamedTuple):
    """A growth: its batch (0 if nothing was missing) and where the slabs came from."""

    batch_id: int
    ranges: list[RangeRecord]
    free_slabs: int
    trades: list[memory_pb2.Trade]


CELLS_MAX = 1 << 40
SLABS_MAX = (1 << 32) - 1
"""Of a range: the wire counts them with 32 bits."""

ModelKey = tuple[str, tuple[FileIdentity, ...], str, tuple[str, ...]]


class Manager:
    """Owns the ledger, the driver and every session's state."""

    def __init__(self, driver: Driver, devices: Sequence[DeviceRecord], options: Options) -> None:
        self.epoch = secrets.randbits(63) | 1
        self.started_s = time.monotonic()
        self.options = options
        self.driver = driver
        self.ledger = Ledger()
        for device in devices:
            self.ledger.add_device(replace(device))
        self.host = next(d.uuid for d in devices if d.is_host)
        self.executor = ThreadPoolExecutor(8, "vmmd-io")
        self.sessions: dict[int, Session] = {}
        self.models: dict[int, Model] = {}
        self._by_key: dict[ModelKey, Model] = {}
        self._by_token: dict[str, Session] = {}
        self._openings: set[asyncio.Task[None]] = set()
        self.draining = False
        self.when_drained: Callable[[], None] = lambda: None
        """Called when the last session of a draining daemon has gone."""
        self.slabs = Slabs(self)
        self.upkeep = Upkeep(self)

    # Sessions

    def connect(self, pid: int, uid: int, gid: int, domain: str, executable: str, pidfd: int) -> Session:
        """Begins a session of a client whose credentials the broker checked; owns `pidfd` then.

        Errors: `Draining`, `Exhausted` (sessions_per_user_max). The pidfd stays the
        caller's on an error.
        """
        if self.draining:
            raise Draining("this vmmd is draining and takes no new sessions; wait for its successor")
        if sum(s.record.uid == uid for s in self.sessions.values()) >= self.options.sessions_per_user_max:
            raise Exhausted(
                f"user {uid} has {self.options.sessions_per_user_max} sessions, which is the limit"
                " (sessions_per_user_max); end one first"
            )
        page = SharedPage("session", pages.SESSION_PAGE_BYTES, read_only=False)
        record = SessionRecord(self.ledger.new_id(), pid, uid, gid, domain, executable, time.monotonic())
        self.ledger.add_session(record)
        session = Session(record, secrets.token_hex(32), pidfd, page)
        self.sessions[session.session_id] = session
        self._by_token[session.token] = session
        log.info("session.connected", session=session.session_id, pid=pid, uid=uid, executable=executable)
        return session

    def by_token(self, token: str) -> Session:
        """The session of a token. Errors: `PermissionDenied`."""
        session = self._by_token.get(token)
        if session is None:
            raise PermissionDenied("this token belongs to no session of this vmmd; connect to the broker again")
        return session

    def disconnect(self, session: Session, why: str) -> None:
        """Ends a session: leases back, models detached, descriptors closed. Never fails."""
        if session.ended:
            return
        for model in list(session.attached):
            if isinstance(model, Model):
                self.detach(session, model)
        del self._by_token[session.token]
        del self.sessions[session.session_id]
        session.close()
        slab_ids = [i for r in self.ledger.session_ranges(session.session_id) for i in r.slabs.values()]
        log.info("session.ended", session=session.session_id, pid=session.record.pid, why=why, slabs=len(slab_ids))
        self.slabs.take_back(slab_ids, session.session_id)
        if self.draining and not self.sessions:
            self.when_drained()

    def drain(self) -> int:
        """Refuses new sessions from now on; returns how many there are."""
        self.draining = True
        self.notify(memory_pb2.Notice.CODE_DRAINING, "vmmd is draining: it leaves when its sessions have gone")
        if not self.sessions:
            self.when_drained()
        return len(self.sessions)

    def notify(self, code: memory_pb2.Notice.Code, message: str) -> None:
        """Tells every session something."""
        for session in self.sessions.values():
            notice = memory_pb2.Notice(code=code, message=message)
            session.send(memory_pb2.WatchEvent(epoch=self.epoch, notice=notice))

    # Models

    def holders(self) -> list[arbiter.Holder]:
        """The models as the arbiter sees them."""
        return [arbiter.Holder(m.arena, m.idle_since_s, m.movable) for m in self.models.values()]

    async def open_model(
        self,
        session: Session,
        files_id: int,
        name: str,
        device_uuids: Sequence[str],
        shape: tuple[int, int, int],
        stacks: Sequence[geometry.Stack],
        weights: Sequence[geometry.Extent],
    ) -> tuple[Model, bool]:
        """Finds or makes a model and attaches the session; returns it and whether it was there already.

        `shape` is (n_layers, n_experts, top_k). The model may still be filling: wait
        for `model.ready`. Errors: `InvalidRequest` (a geometry that lies, an expert
        larger than a slab), `NotFound`, `Exhausted`, `StaleGeneration`.
        """
        fds = session.take_files(files_id)
        session.opening += 1
        try:
            devices = self._devices(device_uuids)
            loop = asyncio.get_running_loop()
            identities = [await loop.run_in_executor(self.executor, identify, fd) for fd in fds]
            sizes = [i.size_bytes for i in identities]
            checked = await loop.run_in_executor(self.executor, geometry.build, *shape, stacks, weights, sizes)
            for device in [*devices, self.host]:
                geometry.fit(checked, self.ledger.devices[device].slab_bytes)
            key = session.record.domain, tuple(identities), checked.digest, tuple(devices)
            model = self._by_key.get(key)
            shared = model is not None and not model.stale
            if model is None or model.stale:
                model = self._make(session.record.domain, name, devices, checked, fds, identities)
                fds = []
                self.models[model.model_id] = model
                self._by_key[key] = model
                task = asyncio.create_task(opening.run(self, model))
                self._openings.add(task)
                task.add_done_callback(self._openings.discard)
            if session.ended:
                raise LeaseRevoked("the session ended while it opened a model")
            if model not in session.attached:
                session.attach(model)
                session.heat[model.model_id] = HeatPage(checked.n)
                model.sessions.append(session)
            model.idle_since_s = None
            return model, shared
        finally:
            session.opening -= 1
            for fd in fds:
                os.close(fd)

    def _devices(self, uuids: Sequence[str]) -> list[str]:
        computing = [d.uuid for d in self.ledger.devices.values() if not d.is_host]
        failed = [uuid for uuid in computing if self.ledger.devices[uuid].failed]
        if not uuids:
            uuids = [uuid for uuid in computing if uuid not in failed][:1] or computing[:1]
        if any(uuid in failed for uuid in uuids):
            raise NoDevice(f"device {', '.join(failed)} has failed; use another one, or restart vmmd to recover it")
        for uuid in uuids:
            if uuid not in computing:
                raise NotFound(f"there is no device {uuid!r} here; this vmmd owns {', '.join(computing)}")
        if len(set(uuids)) != len(uuids):
            raise InvalidRequest(f"devices named twice: {', '.join(uuids)}")
        return list(uuids)

    def _make(
        self,
        domain: str,
        name: str,
        devices: Sequence[str],
        checked: geometry.Geometry,
        fds: list[int],
        identities: list[FileIdentity],
    ) -> Model:
        """An empty model with its ranges in the ledger; takes over `fds`."""
        model_id = self.ledger.new_id()

        def new_range(kind: RangeKind, device: str, slabs_max: int) -> RangeRecord:
            record = RangeRecord(self.ledger.new_id(), kind, device, domain, model_id, slabs_max)
            self.ledger.add_range(record)
            return record

        def slabs_max(device: str) -> int:
            return opening.arena_slabs_max(checked, self.ledger.devices[device].slab_bytes)

        ranges = [new_range(RangeKind.ARENA, d, slabs_max(d)) for d in devices]
        parts = [Part(r.range_id, r.device, self.ledger.devices[r.device].slab_bytes) for r in ranges]
        floor = self.options.floor_slots or checked.n_layers * checked.top_k
        first = self.ledger.devices[devices[0]].slab_bytes
        return Model(
            model_id,
            name,
            Arena(model_id, domain, checked, parts, floor),
            new_range(RangeKind.WEIGHTS, devices[0], -(-checked.weights_bytes // first)),
            new_range(RangeKind.HOMES, self.host, slabs_max(self.host)),
            ranges,
            ResidencyTable(self.epoch, checked.n_layers, checked.n_experts),
            fds,
            identities,
            self.driver,
            self.executor,
            self.slabs.physical,
            self.options.quiesce_deadline_s,
            asyncio.get_running_loop().create_future(),
        )

    def grant_model(self, session: Session, model: Model) -> int:
        """The batch of everything a session maps of a ready model; returns its id."""
        items = [
            BatchItem(Kind.KIND_RESIDENCY, model.model_id, page=model.table.page),
            BatchItem(Kind.KIND_HEAT, model.model_id, page=session.heat[model.model_id].page, writable=True),
        ]
        for record in [model.weights, *model.ranges, model.homes]:
            slabs = sorted(record.slabs.items())  # those still being made are granted when they are there
            made = [(i, s) for i, s in slabs if s in self.slabs.physical]
            items += [BatchItem(Kind.KIND_SLAB, record.range_id, i, s) for i, s in made]
        return session.add_batch(self.ledger.new_id(), items)

    def close_model(self, session: Session, model_id: int) -> None:
        """Detaches a session from a model; its K/V ranges stay. Errors: `NotFound`."""
        model = self.models.get(model_id)
        if model is None:
            raise NotFound(f"there is no model {model_id}")
        session.attachment(model)
        self.detach(session, model)

    def detach(self, session: Session, model: Model) -> None:
        """The session reads the model no more."""
        self.upkeep.roll_heat(model)
        session.attached[session.attachment(model)] = None
        session.heat.pop(model.model_id).page.close()
        model.sessions.remove(session)
        if not model.sessions:
            model.idle_since_s = time.monotonic()

    async def drop_model(self, model: Model) -> None:
        """Gives up an idle model whole."""
        self.forget_model(model)
        await model.stop()
        model.close()
        self.discard_ranges(model)
        log.info("model.dropped", model=model.model_id, name=model.name)

    def forget_model(self, model: Model) -> None:
        """Nobody can open it any more."""
        self.models.pop(model.model_id, None)
        for key in [k for k, m in self._by_key.items() if m is model]:
            del self._by_key[key]

    def discard_ranges(self, model: Model) -> None:
        """Takes back every slab of a model that no session has open, and its ranges."""
        records = [model.weights, model.homes, *model.ranges]
        self.slabs.take_back([i for r in records for i in r.slabs.values()], 0)

    # K/V ranges

    def create_range(
        self, session: Session, device_uuid: str, model_id: int, cells_per_slab: int, cells_max: int
    ) -> RangeRecord:
        """An elastic K/V range without memory. Errors: `InvalidRequest`, `NotFound`, `Exhausted`."""
        device = self._devices([device_uuid] if device_uuid else [])[0]
        if model_id and not any(m is not None and m.model_id == model_id for m in session.attached):
            raise NotFound(f"model {model_id} is not open in this session")
        size = self.ledger.devices[device].slab_bytes
        fits = 1 <= cells_per_slab <= size and cells_per_slab % 16 == 0
        if not fits or not 1 <= cells_max <= min(CELLS_MAX, cells_per_slab * SLABS_MAX):
            raise InvalidRequest(
                f"a range of {cells_max} cells, {cells_per_slab} a slab of {size} bytes: a slab holds a positive"
                f" multiple of 16 cells, a range 1 to {CELLS_MAX} cells and at most {SLABS_MAX} slabs"
            )
        if len(self.ledger.session_ranges(session.session_id)) >= self.options.ranges_per_session_max:
            raise Exhausted(
                f"this session has {self.options.ranges_per_session_max} ranges, which is the limit"
                " (ranges_per_session_max); shrink one to 0 and end the session, or use fewer"
            )
        record = RangeRecord(
            self.ledger.new_id(),
            RangeKind.KV,
            device,
            session.record.domain,
            session.session_id,
            -(-cells_max // cells_per_slab),
            cells_per_slab,
            cells_max,
        )
        self.ledger.add_range(record)
        return record

    def _own_range(self, session: Session, range_id: int) -> RangeRecord:
        record = self.ledger.ranges.get(range_id)
        if record is None or record.kind is not RangeKind.KV or record.owner != session.session_id:
            raise NotFound(f"range {range_id} is not a K/V range of this session")
        return record

    def grant_added(self, model: Model, record: RangeRecord, placed: Sequence[Placed]) -> list[tuple[Session, int]]:
        """Grants slabs that joined a shared range to the model's sessions; returns their batches.

        A session that leaves thousands of batches unacknowledged is ended.
        """
        batches = []
        for session in list(model.sessions):
            items = [BatchItem(Kind.KIND_SLAB, record.range_id, p.index, p.slab_id) for p in placed]
            try:
                batch_id = session.add_batch(self.ledger.new_id(), items)
            except Exhausted as error:
                self.disconnect(session, error.message)
                continue
            added = memory_pb2.SlabsAdded(range_id=record.range_id, batch_id=batch_id)
            session.send(memory_pb2.WatchEvent(epoch=self.epoch, slabs_added=added))
            batches.append((session, batch_id))
        return batches

    async def grow(self, session: Session, growths: Sequence[tuple[int, int]]) -> "Grown":
        """Grows K/V ranges to at least so many cells each, all or nothing.

        A caller that is cancelled meanwhile (its client hung up) does not stop a
        trade half-way: the growth is completed and given back. Errors:
        `InvalidRequest`, `NotFound`, `Exhausted` (nothing changed), `LeaseRevoked`.
        """
        task = asyncio.create_task(self._grow(session, growths))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._undo_growth(session, done))
            raise

    def _undo_growth(self, session: Session, done: "asyncio.Task[Grown]") -> None:
        if not done.cancelled() and done.exception() is None:
            items = session.batches.pop(done.result().batch_id, [])
            kept = [i.slab_id for i in items if self.slabs.is_at(Placed(i.id, i.slab_index, i.slab_id))]
            self.slabs.take_back(kept, session.session_id)

    async def _grow(self, session: Session, growths: Sequence[tuple[int, int]]) -> "Grown":
        records = [self._own_range(session, range_id) for range_id, _ in growths]
        if len({r.range_id for r in records}) != len(records):
            raise InvalidRequest("a range is named twice in one growth")
        await self.slabs.settled(records)
        if session.ended:
            raise LeaseRevoked("the session ended before its range grew")
        session.check_batches()
        requests = []
        for record, (_, cells) in zip(records, growths, strict=True):
            if not 0 <= cells <= record.cells_max:
                raise InvalidRequest(
                    f"range {record.range_id} cannot grow to {cells} cells; it was made for {record.cells_max} at most"
                )
            wanted = -(-cells // record.cells_per_slab)
            if wanted > len(record.slabs):
                requests.append(arbiter.Request(record.range_id, wanted - len(record.slabs)))
        if not requests:
            return Grown(0, records, 0, [])
        for model in self.models.values():
            self.upkeep.refresh_heat(model)
        granted = await self.slabs.provide(requests)
        if session.ended:
            self.slabs.take_back([p.slab_id for p in granted.placed if self.slabs.is_at(p)], session.session_id)
            raise LeaseRevoked("the session ended while its range grew")
        items = [BatchItem(Kind.KIND_SLAB, p.range_id, p.index, p.slab_id, writable=True) for p in granted.placed]
        batch_id = session.add_batch(self.ledger.new_id(), items)
        log.info(
            "range.grown",
            session=session.session_id,
            slabs=len(items),
            free=granted.free_slabs,
            traded=sum(t.slabs for t in granted.trades),
            moved=sum(t.experts_moved for t in granted.trades),
        )
        return Grown(batch_id, records, granted.free_slabs, granted.trades)

    async def shrink(self, session: Session, range_id: int, cells: int) -> RangeRecord:
        """Takes back a K/V range's slabs from the end, keeping at least so many cells.

        The client has unmapped them; what it still holds past a deadline stays
        charged to it as quarantined. Errors: `InvalidRequest`, `NotFound`.
        """
        record = self._own_range(session, range_id)
        if cells < 0:
            raise InvalidRequest(f"a range cannot shrink to {cells} cells")
        keep = -(-cells // record.cells_per_slab)
        slab_ids = [s for i, s in sorted(record.slabs.items()) if i >= keep]
        slab_ids = [s for s in slab_ids if self.ledger.slabs[s].state is SlabState.LEASED]
        for items in session.batches.values():
            items[:] = [item for item in items if item.slab_id not in slab_ids]
        self.slabs.take_back(slab_ids, session.session_id)
        return record

    # Devices

    def measure(self) -> None:
        """Takes note of what other programs have (used by the driver's word, less the slabs) and of dead devices."""
        for device in self.ledger.devices.values():
            if device.uuid in self.driver.failed_devices():
                self._fail(device)
            if device.failed or self.slabs.physical.creating[device.uuid]:
                continue  # the driver counts slabs that are not known here yet
            try:
                memory = self.driver.memory(device.uuid)
            except DriverError as error:
                log.warning("device.unreadable", device=device.uuid, why=error.message)
                continue
            slabs = self.slabs.physical.bytes_on(device.uuid)
            device.unmanaged_bytes = max(0, memory.total_bytes - memory.free_bytes - slabs)

    def _fail(self, device: DeviceRecord) -> None:
        """A device died: nothing is granted on it any more, and those who use it are told."""
        if device.failed:
            return
        device.failed = True
        why = (
            f"device {device.uuid} has failed; what was on it is lost, other devices go on; restart vmmd to recover it"
        )
        log.error("device.failed", device=device.uuid)
        for model in self.models.values():
            if device.uuid in {r.device for r in (model.weights, model.homes, *model.ranges)}:
                model.mark_stale(why)
        users = {r.owner for r in self.ledger.ranges.values() if r.device == device.uuid}
        for session in self.sessions.values():
            if session.session_id in users or any(m is not None and m.model_id in users for m in session.attached):
                notice = memory_pb2.Notice(code=memory_pb2.Notice.CODE_DEVICE_FAILED, message=why)
                session.send(memory_pb2.WatchEvent(epoch=self.epoch, notice=notice))

    # Descriptors

    def descriptors(
        self, session: Session, batch_id: int, first: int, count: int
    ) -> tuple[list[tuple[BatchItem, int]], int, int]:
        """Descriptors of a batch from entry `first` on: (item, descriptor) pairs, the next entry, the total.

        The caller closes the descriptors. Slabs that left their range are left out.
        Errors: `NotFound` (no such batch of this session), `Exhausted` (descriptors).
        """
        items = session.batches.get(batch_id)
        if items is None:
            raise NotFound(f"batch {batch_id} is not one of this session, or was acknowledged")
        found: list[tuple[BatchItem, int]] = []
        chosen = items[first : first + count]
        try:
            for item in chosen:
                if item.page is not None:
                    found.append((item, item.page.export()))
                elif self.slabs.is_at(Placed(item.id, item.slab_index, item.slab_id)):
                    slab = self.slabs.physical[item.slab_id]
                    found.append((item, self.driver.export(slab, writable=item.writable)))
        except (OSError, VmmError):
            for _, fd in found:
                os.close(fd)
            raise
        return found, first + len(chosen), len(items)

    def acknowledge(self, session: Session, batch_id: int) -> None:
        """The client has imported a batch. Errors: `NotFound`."""
        if session.batches.pop(batch_id, None) is None:
            raise NotFound(f"batch {batch_id} is not one of this session, or was acknowledged already")

    def released(self, session: Session, revocation_id: int) -> None:
        """The client answers a revocation. Errors: `NotFound`."""
        if revocation_id not in session.revocations:
            raise NotFound(f"revocation {revocation_id} is not one of this session")
        session.revocations.discard(revocation_id)

    async def close(self) -> None:
        """Ends everything; clients keep what they have mapped."""
        await self.upkeep.stop()
        for model in self.models.values():
            model.closed = True
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.slabs.physical.close()
        self.driver.close()
