"""The manager's front: sessions, models, descriptors. The server and the broker call it.

Checking and taking are one step: a plan's slabs change their state in the ledger
before anything is awaited, so two growers never count on the same slab.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from strata_api.v1 import memory_pb2, pages

from vmmd.core import arbiter, decisions, explain, geometry, shares
from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord, Share, UserRecord
from vmmd.core.policy import SHIPPED, Policy
from vmmd.core.residency import Arena, Part
from vmmd.core.victims import Holder
from vmmd.driver.base import Driver
from vmmd.errors import Draining, Exhausted, LeaseRevoked, NotFound, PermissionDenied, PreconditionFailed, VmmError
from vmmd.manager import opening
from vmmd.manager.conversations import Conversations
from vmmd.manager.devices import Devices
from vmmd.manager.figures import Figures
from vmmd.manager.files import FileIdentity, identify
from vmmd.manager.kv import KvRanges
from vmmd.manager.model import Model
from vmmd.manager.physical import PhysicalSlabs
from vmmd.manager.placement import Placement
from vmmd.manager.profiles import Profiles, key_of
from vmmd.manager.recalls import Recalls
from vmmd.manager.releases import Releases
from vmmd.manager.session import BatchItem, Kind, Session
from vmmd.manager.shared import HeatPage, ResidencyTable, SharedPage
from vmmd.manager.slabs import Placed, Slabs
from vmmd.manager.upkeep import Upkeep
from vmmd.manager.waiting import Waiting
from vmmd.sizes import size_text

log = structlog.get_logger("vmmd.manager")


@dataclass(frozen=True)
class Options:
    """What the manager takes from the configuration (``vmmd/example.toml`` says what each means)."""

    floor_slots: int = 0
    give_back_delay_s: float = 5.0
    quiesce_deadline_s: float = 2.0
    revoke_deadline_s: float = 5.0
    heat_half_life_tokens: float = 128.0
    placement_bytes_per_s: int = 8 << 30
    state_dir: Path | None = None
    sessions_per_user_max: int = 64
    waiting_per_user_max: int = 64
    ranges_per_session_max: int = 256
    ranges_per_user_max: int = 1024
    calls_per_user_max: int = 256
    files_max: int = 1024
    conversations_per_user_max: int = 64
    conversation_expiry_s: float = 21_600.0
    conversation_spill_bytes: int = 0


ModelKey = tuple[str, tuple[FileIdentity, ...], str, str]
"""Domain, files, digest of the geometry, computing device."""


class Manager:
    """Owns the ledger, the driver and every session's state.

    Args:
        driver: makes memory.
        devices: what there is of it.
        options: see there.
        users: who is guaranteed something, from the start, by user id.
        shares_of: shares of a user, by user and group id, and of each of its sessions.
    """

    def __init__(
        self,
        driver: Driver,
        devices: Sequence[DeviceRecord],
        options: Options,
        users: Mapping[int, UserRecord] | None = None,
        shares_of: Callable[[int, int], tuple[Share, Share]] = lambda uid, gid: (Share(), Share()),
    ) -> None:
        self.epoch = secrets.randbits(63) | 1
        self.started_s = time.monotonic()
        self.options = options
        self.policy: Policy = replace(
            SHIPPED, hold_s=options.give_back_delay_s, half_life_tokens=options.heat_half_life_tokens
        )
        self.driver = driver
        self.ledger = Ledger()
        for device in devices:
            self.ledger.add_device(replace(device))
        self.ledger.users.update(users or {})
        self._shares_of = shares_of
        self.host = next(d.uuid for d in devices if d.is_host)
        self.executor = ThreadPoolExecutor(8, "vmmd-io")
        self.sessions: dict[int, Session] = {}
        self.models: dict[int, Model] = {}
        self._by_key: dict[ModelKey, Model] = {}
        self._by_token: dict[str, Session] = {}
        self._openings: set[asyncio.Task[None]] = set()
        self.draining = False
        self.leaving = False
        """Nothing is rewritten any more: clients go on with what they have mapped."""
        self.when_drained: Callable[[], None] = lambda: None
        """Called when the last session of a draining daemon has gone."""
        self.decisions = decisions.Log()
        self.physical = PhysicalSlabs(driver)
        self.figures = Figures(self)
        self.recalls = Recalls(self)
        self.releases = Releases(self)
        self.slabs = Slabs(self)
        self.waiting = Waiting(self)
        self.kv = KvRanges(self)
        self.conversations = Conversations(self)
        self.devices = Devices(self)
        self.placement = Placement(self)
        self.profiles = Profiles(options.state_dir)
        self.upkeep = Upkeep(self)

    # Sessions

    def connect(
        self,
        pid: int,
        uid: int,
        gid: int,
        domain: str,
        executable: str,
        pidfd: int,
        asked: shares.Asked = shares.Asked(),  # noqa: B008  a tuple
    ) -> Session:
        """Begins a session of a client whose credentials the broker checked; owns `pidfd` then.

        `asked` is the share that the client wants, at most what its user's sessions may
        have. Errors: `Draining`, `Exhausted` (sessions_per_user_max, or no memory left
        to guarantee), `InvalidRequest` (more than it may have). The pidfd stays the
        caller's on an error.
        """
        if self.draining:
            raise Draining("this vmmd is draining and takes no new sessions; wait for its successor")
        if sum(s.record.uid == uid for s in self.sessions.values()) >= self.options.sessions_per_user_max:
            raise Exhausted(
                f"user {uid} has {self.options.sessions_per_user_max} sessions, which is the limit"
                " (sessions_per_user_max); end one first"
            )
        of_user, of_session = self._shares_of(uid, gid)
        share = shares.lessened(of_session, asked)
        self.ledger.users.setdefault(uid, UserRecord(domain, of_user))
        now = time.monotonic()
        record = SessionRecord(self.ledger.new_id(), pid, uid, gid, domain, executable, now, share)
        self.ledger.add_session(record)
        self._check_guarantee(record)
        page = SharedPage("session", pages.SESSION_PAGE_BYTES, read_only=False)
        session = Session(record, secrets.token_hex(32), pidfd, page)
        session.hang_up = partial(self.disconnect, session)
        self.sessions[session.session_id] = session
        self._by_token[session.token] = session
        log.info("session.connected", session=session.session_id, pid=pid, uid=uid, executable=executable)
        return session

    def _check_guarantee(self, record: SessionRecord) -> None:
        """Errors: `Exhausted` where a new session's guarantee is more than is left; the session is forgotten."""
        if not record.share.guarantee_bytes:
            return
        for device in self.ledger.devices.values():
            left = 0 if device.is_host else arbiter.unpromised(self.ledger, self.holders(), device.uuid)
            if left < 0:
                self.ledger.remove_session(record.session_id)
                raise Exhausted(
                    f"this session is to be guaranteed {size_text(record.share.guarantee_bytes)} of"
                    f" {device.uuid}, and {size_text(-left * device.slab_bytes)} of that are in use or"
                    " guaranteed to others; ask for a smaller guarantee, or end a session"
                )

    def find_session(self, token: str) -> Session | None:
        """The session of a token, None where it is no session's."""
        return self._by_token.get(token)

    def by_token(self, token: str) -> Session:
        """The session of a token. Errors: `PermissionDenied`."""
        session = self._by_token.get(token)
        if session is None:
            raise PermissionDenied("this token belongs to no session of this vmmd; connect to the broker again")
        return session

    def disconnect(self, session: Session, why: str) -> None:
        """Ends a session: leases back or parked, models detached, descriptors closed. Never fails."""
        if session.ended:
            return
        if not self.leaving:
            session.tell_ended()
        self.conversations.leave(session)
        for model in list(session.attached):
            if isinstance(model, Model):
                self.detach(session, model)
        del self._by_token[session.token]
        del self.sessions[session.session_id]
        self.ledger.end_session(session.session_id)
        session.close()
        ranges = [r for r in self.ledger.session_ranges(session.session_id) if r.range_id not in self.conversations]
        slab_ids = [i for r in ranges for i in r.slabs.values()]
        self.note_freed(ranges, f"the session ended: {why}")
        log.info("session.ended", session=session.session_id, pid=session.record.pid, why=why, slabs=len(slab_ids))
        self.releases.take_back(slab_ids, session.session_id)
        if self.draining and not self.sessions:
            self.when_drained()

    def note_freed(self, records: Sequence[RangeRecord], why: str) -> None:
        """Keeps for `vmmctl explain` that ranges give up all their slabs."""
        now = time.monotonic()
        self.decisions.add([decisions.freed(self.ledger, r, len(r.slabs), why, now) for r in records if r.slabs])

    def explain(self, some_id: int) -> list[explain.Fact]:
        """Why a range, a session or a model has what it has. Errors: `NotFound`."""
        delay_s = self.options.give_back_delay_s
        now_s = time.monotonic()
        explainer = explain.Explainer(self.ledger, self.holders(), self.decisions, self.policy, now_s, delay_s)
        return explainer.explain(some_id)

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

    def holders(self) -> list[Holder]:
        """The models as the arbiter sees them."""
        return [
            Holder(
                m.arena,
                m.idle_since_s,
                m.movable,
                max((s.record.share.priority for s in m.sessions), default=0),
                m.sessions[0].record.uid if m.sessions else None,
                m.floor_slabs,
                m.routed_s,
            )
            for m in self.models.values()
        ]

    async def open_model(
        self,
        session: Session,
        files_id: int,
        name: str,
        device_uuids: Sequence[str],
        shape: tuple[int, int, int],
        stacks: Sequence[geometry.Stack],
        weights: Sequence[geometry.Extent],
        wait_s: float = 0.0,
    ) -> tuple[Model, bool]:
        """Finds or makes a model and attaches the session; returns it and whether it was there already.

        `shape` is (n_layers, n_experts, top_k). The model may still be filling, or
        waiting for memory for up to `wait_s`: wait for `model.ready`, then for
        `extend_model`. Errors: `InvalidRequest` (a geometry that lies, an expert larger than
        a slab), `NotFound`, `Exhausted`, `StaleGeneration`.
        """
        fds = session.take_files(files_id)
        session.opening += 1
        try:
            devices = self.devices.choose(device_uuids)
            loop = asyncio.get_running_loop()
            identities = [await loop.run_in_executor(self.executor, identify, fd) for fd in fds]
            sizes = [i.size_bytes for i in identities]
            checked = await loop.run_in_executor(self.executor, geometry.build, *shape, stacks, weights, sizes)
            for device in [*devices, self.host]:
                geometry.fit(checked, self.ledger.devices[device].slab_bytes)
            key = session.record.domain, tuple(identities), checked.digest, devices[0]
            model = self._by_key.get(key)
            shared = model is not None and not model.stale
            if model is None or model.stale:
                model = self._make(session.record.domain, name, devices, checked, fds, identities)
                fds = []
                self.models[model.model_id] = model
                self._by_key[key] = model
                self._begin(opening.run(self, model, session.record, wait_s))
            if session.ended:
                raise LeaseRevoked("the session ended while it opened a model")
            if model not in session.attached:
                session.attach(model)
                model.join(session, HeatPage(checked.n), [r.device for r in model.ranges if r.device in devices])
            model.idle_since_s = None
            return model, shared
        finally:
            session.opening -= 1
            for fd in fds:
                os.close(fd)

    def _begin(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)
        return task

    async def extend_model(self, session: Session, model: Model, device_uuids: Sequence[str]) -> None:
        """Gives a ready model parts on those of these devices that it has none on, and all of them to the session.

        Errors: `NoDevice` (one has failed meanwhile), `PreconditionFailed` where experts
        without a home are on a device that the session did not name, so that it could not
        read them.
        """
        devices = self.devices.choose(device_uuids)
        work = self._begin(opening.extend(self, model, devices))
        await asyncio.shield(work)  # a client that hangs up meanwhile leaves the part to the next
        mine = model.devices_of.get(session.session_id, [])
        mine += [device for device in devices if device not in mine]
        if session.ended or all(model.grants(session, record) for record in model.ranges):
            return
        if model.background is not None:
            await asyncio.wait([model.background])
        lost = model.out_of_reach(session) if not session.ended else ()
        if len(lost):
            self.detach(session, model)
            others = sorted({model.ranges[p].device for p in model.arena.place[lost, 0].tolist()})
            raise PreconditionFailed(
                f"{len(lost)} experts of model {model.name!r} have no home in host memory and lie on"
                f" {', '.join(others)}: name that device as a peer, too, or raise host_cap_bytes"
            )

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

        ranges = [opening.new_part(self.ledger, model_id, domain, checked, d) for d in devices]
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
            self.physical,
            self.options.quiesce_deadline_s,
            asyncio.get_running_loop().create_future(),
            self.policy.estimate(checked.n, checked.n_layers * checked.top_k),
            key_of(domain, identities, checked.digest),
        )

    def grant_model(self, session: Session, model: Model) -> tuple[int, int]:
        """The batch of what a session maps of a ready model, and that of the homes; returns their ids, 0 for none."""
        items = [
            BatchItem(Kind.KIND_RESIDENCY, model.model_id, page=model.table.page),
            BatchItem(Kind.KIND_HEAT, model.model_id, page=session.heat[model.model_id].page, writable=True),
        ]
        for record in (model.weights, *model.ranges):
            if model.grants(session, record):
                items += self._made(record)
        batch_id = session.add_batch(self.ledger.new_id(), items)
        homes = self._made(model.homes)
        return batch_id, session.add_batch(self.ledger.new_id(), homes) if homes else 0

    def _made(self, record: RangeRecord) -> list[BatchItem]:
        """The slabs of a range; those still being made are granted when they are there."""
        slabs = sorted(record.slabs.items())
        return [BatchItem(Kind.KIND_SLAB, record.range_id, i, s) for i, s in slabs if s in self.physical]

    def close_model(self, session: Session, model_id: int) -> None:
        """Detaches a session from a model; its K/V ranges stay. Errors: `NotFound`."""
        model = self.models.get(model_id)
        if model is None:
            raise NotFound(f"there is no model {model_id}")
        session.attachment(model)
        self.detach(session, model)

    def detach(self, session: Session, model: Model) -> None:
        """The session reads the model no more."""
        self.figures.look_at(model)
        session.attached[session.attachment(model)] = None
        model.leave(session)
        if not model.sessions:
            model.idle_since_s = time.monotonic()

    async def drop_model(self, model: Model) -> None:
        """Gives up an idle model whole."""
        self.forget_model(model)
        self.save_profile(model)
        await model.stop()
        model.close()
        self.discard_ranges(model)
        log.info("model.dropped", model=model.model_id, name=model.name)

    def save_profile(self, model: Model) -> None:
        """Keeps what was learned of a model, if anything was since the last time."""
        if model.learned_more:
            model.learned_more = False
            self.profiles.save(model.profile_key, model.heat.learned())

    def forget_model(self, model: Model) -> None:
        """Nobody can open it any more."""
        self.models.pop(model.model_id, None)
        for key in [k for k, m in self._by_key.items() if m is model]:
            del self._by_key[key]

    def discard_ranges(self, model: Model) -> None:
        """Takes back every slab of a model that no session has open, and its ranges."""
        records = [model.weights, model.homes, *model.ranges]
        self.note_freed(records, "the model was given up")
        self.releases.take_back([i for r in records for i in r.slabs.values()], 0)

    def grant_added(self, model: Model, record: RangeRecord, placed: Sequence[Placed]) -> list[tuple[Session, int]]:
        """Grants slabs that joined a shared range to the sessions that map it; returns their batches.

        A session that leaves thousands of batches unacknowledged is ended.
        """
        batches = []
        for session in model.sessions_with(record):
            items = [BatchItem(Kind.KIND_SLAB, record.range_id, p.index, p.slab_id) for p in placed]
            try:
                batch_id = session.add_batch(self.ledger.new_id(), items)
            except Exhausted as error:
                session.hang_up(error.message)
                continue
            added = memory_pb2.SlabsAdded(range_id=record.range_id, batch_id=batch_id)
            session.send(memory_pb2.WatchEvent(epoch=self.epoch, slabs_added=added))
            batches.append((session, batch_id))
        return batches

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
                    slab = self.physical[item.slab_id]
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
        await self.conversations.close()
        await self.placement.stop()
        for model in self.models.values():
            model.closed = True
            model.count_heat()
            self.save_profile(model)
        self.profiles.close()
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.physical.close()
        self.driver.close()
