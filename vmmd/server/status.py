"""The snapshot behind `vmmctl status`, `vmmctl top` and the metrics: taken in one go, so that its sums add up."""

import os
import pwd
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from strata_api.v1 import admin_pb2, pages

from vmmd.core import meters
from vmmd.core.ledger import DeviceRecord, RangeKind, SlabState
from vmmd.manager import Manager
from vmmd.manager.conversation import Conversation
from vmmd.manager.figures import Growths
from vmmd.manager.model import Model
from vmmd.manager.session import Session

SESSIONS_A_PART = 100
CONVERSATIONS_A_PART = 100
_VERSION = metadata.version("strata-vmm")  # looking it up takes a millisecond


def parts(manager: Manager) -> Iterator[admin_pb2.StatusPart]:
    """The snapshot in parts of at most 100 sessions."""
    manager.devices.measure()
    manager.figures.look()
    now = time.monotonic()
    quarantines = _quarantines(manager, now)
    held = Counter[int]()
    for quarantine in quarantines:
        held[quarantine.session_id] += quarantine.bytes
    sessions = [_session(manager, s, now, held[s.session_id]) for s in manager.sessions.values()]
    yield admin_pb2.StatusPart(
        daemon=admin_pb2.DaemonStatus(
            epoch=manager.epoch,
            pid=os.getpid(),
            version=_VERSION,
            driver=manager.driver.name,
            uptime_s=now - manager.started_s,
            draining=manager.draining,
            growths=_growths(manager.figures.growths),
        ),
        devices=[_device(manager, d, now) for d in manager.ledger.devices.values()],
        models=[_model(manager, m, now) for m in manager.models.values()],
        sessions=sessions[:SESSIONS_A_PART],
        quarantines=quarantines,
    )
    for i in range(SESSIONS_A_PART, len(sessions), SESSIONS_A_PART):
        yield admin_pb2.StatusPart(sessions=sessions[i : i + SESSIONS_A_PART])


def conversations(manager: Manager, uid: int | None) -> Iterator[admin_pb2.ConversationsPart]:
    """A user's conversations or everybody's, the longest parked first, in parts of at most 100."""
    now = manager.conversations.clock()
    rows = [_conversation(manager, c, now) for c in manager.conversations.of(uid)]
    rows.sort(key=lambda row: (-row.parked_s, row.uid, row.name))
    for i in range(0, len(rows), CONVERSATIONS_A_PART):
        yield admin_pb2.ConversationsPart(conversations=rows[i : i + CONVERSATIONS_A_PART])


def _conversation(manager: Manager, conversation: Conversation, now: float) -> admin_pb2.ConversationStatus:
    key, session, since_s = conversation.key, conversation.session, conversation.record.parked_s
    expiry_s = manager.options.conversation_expiry_s
    return admin_pb2.ConversationStatus(
        name=key.name,
        uid=key.uid,
        user=_user(key.uid),
        model=conversation.model_name,
        device_uuid=conversation.cells.device,
        state=conversation.state,
        cells=conversation.complete,
        bytes=manager.ledger.held_bytes([conversation.record]),
        pid=session.record.pid if session is not None else 0,
        parked_s=now - since_s if since_s is not None else 0.0,
        expires_in_s=max(0.0, since_s + expiry_s - now) if since_s is not None else 0.0,
    )


def _device(manager: Manager, record: DeviceRecord, now: float) -> admin_pb2.DeviceStatus:
    sums = manager.ledger.bytes_by_kind(record.uuid)
    free_slabs = sums[SlabState.FREE]
    figures = manager.figures.devices[record.uuid]
    return admin_pb2.DeviceStatus(
        uuid=record.uuid,
        name=record.name,
        is_host=record.is_host,
        slab_bytes=record.slab_bytes,
        total_bytes=record.total_bytes,
        cap_bytes=record.cap_bytes,
        free_bytes=free_slabs + manager.ledger.room_slabs(record.uuid) * record.slab_bytes,
        kv_bytes=sums[RangeKind.KV],
        experts_bytes=sums[RangeKind.ARENA] + sums[RangeKind.HOMES],
        weights_bytes=sums[RangeKind.WEIGHTS],
        revoking_bytes=sums[SlabState.REVOKING],
        quarantined_bytes=sums[SlabState.QUARANTINED],
        unmanaged_bytes=record.unmanaged_bytes,
        free_slab_bytes=free_slabs,
        state="failed" if record.failed else "ok",
        numa_node=_numa_node(manager, record.uuid),
        trades=figures.trades.total,
        traded_slabs=figures.traded_slabs,
        returned_slabs=figures.returned_slabs,
        trades_last_min=figures.trades.recent,
    )


def _numa_node(manager: Manager, uuid: str) -> int:
    """The node of a device's slabs; -1 where there is none to tell, as on a host with one node."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    node = next(i.numa_node for i in manager.driver.devices() if i.uuid == uuid)
    return -1 if node is None or len(nodes) < 2 else node


def _model(manager: Manager, model: Model, now: float) -> admin_pb2.ModelStatus:
    arena, figures = model.arena, model.figures
    return admin_pb2.ModelStatus(
        model_id=model.model_id,
        name=model.name,
        uid=model.sessions[0].record.uid if model.sessions else 0,
        domain=arena.domain,
        experts=arena.geometry.n,
        resident=int(arena.resident.sum()),
        homes=int(arena.home_ready.sum()),
        slots=arena.slots,
        heat_covered=arena.heat_covered(),
        weights_bytes=manager.ledger.held_bytes([model.weights]),
        experts_bytes=manager.ledger.held_bytes(model.ranges),
        sessions=len(model.sessions),
        generation=model.table.generation,
        stale=model.stale,
        stuck_pids=model.stuck_pids,
        decoded_tokens=figures.tokens.decoded.total,
        prompt_tokens=figures.tokens.prompt.total,
        decoded_tokens_per_s=figures.tokens.decoded.per_second(now),
        prompt_tokens_per_s=figures.tokens.prompt.per_second(now),
        tiers=_tiers(model, now),
        filled_bytes=figures.filled_bytes.total,
        filled_bytes_per_s=figures.filled_bytes.per_second(now),
    )


def _tiers(model: Model, now: float) -> list[admin_pb2.TierTraffic]:
    rates = [tier.decode_routings.per_second(now) for tier in model.figures.tiers]
    return [
        admin_pb2.TierTraffic(
            tier=name,
            decode_routings=tier.decode_routings.total,
            prompt_routings=tier.prompt_routings.total,
            read_bytes=tier.read_bytes.total,
            read_bytes_per_s=tier.read_bytes.per_second(now),
            share=rate / sum(rates) if rate else 0.0,
        )
        for name, tier, rate in zip(meters.TIERS, model.figures.tiers, rates, strict=True)
    ]


def _growths(growths: Growths) -> admin_pb2.Growths:
    return admin_pb2.Growths(**asdict(growths))


def _quarantines(manager: Manager, now: float) -> list[admin_pb2.QuarantineStatus]:
    """Quarantined memory by device and holder."""
    ledger = manager.ledger
    found: dict[tuple[str, int, int], admin_pb2.QuarantineStatus] = {}
    for device in ledger.devices.values():
        for slab in (ledger.slabs[i] for i in ledger.slabs_in(device.uuid, SlabState.QUARANTINED)):
            holder = slab.holder or 0
            row = found.setdefault(
                (device.uuid, holder, slab.holder_pid),
                admin_pb2.QuarantineStatus(device_uuid=device.uuid, session_id=holder, pid=slab.holder_pid),
            )
            row.bytes += device.slab_bytes
            row.age_s = max(row.age_s, now - slab.since_s)
    return list(found.values())


def _session(manager: Manager, session: Session, now: float, quarantined: int) -> admin_pb2.SessionStatus:
    record = session.record
    ranges = manager.ledger.session_ranges(record.session_id)
    models = [m.model_id for m in session.attached if m is not None]
    tokens = session.figures.tokens
    return admin_pb2.SessionStatus(
        session_id=record.session_id,
        pid=record.pid,
        uid=record.uid,
        user=_user(record.uid),
        executable=record.executable,
        kv_cells=sum(len(r.slabs) * r.cells_per_slab for r in ranges),
        kv_bytes=manager.ledger.held_bytes(ranges),
        age_s=now - record.started_s,
        state=session.state(),
        quarantined_bytes=quarantined,
        model_ids=models,
        kv_cells_used=min(sum(session.line(i)[pages.WORD_CELLS] for i, m in enumerate(session.attached) if m), 1 << 62),
        decoded_tokens=tokens.decoded.total,
        prompt_tokens=tokens.prompt.total,
        decoded_tokens_per_s=tokens.decoded.per_second(now),
        prompt_tokens_per_s=tokens.prompt.per_second(now),
        growths=_growths(session.figures.growths),
    )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
