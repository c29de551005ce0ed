"""The one place where wire messages meet the manager's types."""

from collections.abc import Iterable
from dataclasses import asdict

from strata_api.v1 import admin_pb2, memory_pb2

from vmmd.core.decisions import Decision
from vmmd.core.geometry import Extent, Stack
from vmmd.core.ledger import DeviceRecord, Ledger, RangeRecord
from vmmd.driver.base import DeviceInfo
from vmmd.manager.verify import Verification


def stacks(message: memory_pb2.Stacks) -> Iterable[Stack]:
    """Stacks of experts."""
    for s in message.stacks:
        yield Stack(s.layer, s.matrix, s.first_expert, s.count, s.file, s.offset_bytes, s.stride_bytes, s.expert_bytes)


def extents(message: memory_pb2.Extents) -> Iterable[Extent]:
    """Extents of weights."""
    for e in message.extents:
        yield Extent(e.file, e.offset_bytes, e.length_bytes)


def device(record: DeviceRecord, info: DeviceInfo) -> memory_pb2.Device:
    """A device as a client sees it."""
    return memory_pb2.Device(
        uuid=record.uuid,
        name=record.name,
        slab_bytes=record.slab_bytes,
        cap_bytes=record.cap_bytes,
        is_host=record.is_host,
        reached_by_uuids=sorted(info.reached_by),
        limit_bytes=0 if record.failed else max(0, record.limit_bytes),
        bandwidth_bytes_per_s=info.bandwidth_bytes_per_s,
    )


def range_(ledger: Ledger, record: RangeRecord, *, granted: bool = True) -> memory_pb2.Range:
    """A range to reserve addresses for; of none where it is not granted."""
    return memory_pb2.Range(
        range_id=record.range_id,
        device_uuid=record.device,
        slab_bytes=ledger.devices[record.device].slab_bytes,
        slabs_max=record.slabs_max if granted else 0,
    )


def grown(ledger: Ledger, record: RangeRecord) -> memory_pb2.GrownRange:
    """A K/V range after a growth."""
    return memory_pb2.GrownRange(
        range_id=record.range_id,
        cells=min(record.cells_max, len(record.slabs) * record.cells_per_slab),
        size_bytes=ledger.held_bytes([record]),
    )


def decision(record: Decision, now_s: float) -> admin_pb2.Decision:
    """A decision about memory."""
    return admin_pb2.Decision(
        kind=record.kind,
        age_s=now_s - record.at_s,
        device_uuid=record.device,
        from_range_id=record.from_id,
        to_range_id=record.to_id,
        giver=record.giver,
        taker=record.taker,
        slabs=record.slabs,
        experts_moved=record.moved,
        experts_evicted=record.evicted,
        times=record.times,
        reason=record.reason,
    )


def verified(verification: Verification) -> admin_pb2.VerifySummary:
    """What a verification has found."""
    return admin_pb2.VerifySummary(
        model_id=verification.model.model_id,
        name=verification.model.name,
        file_changed=verification.file_changed,
        slots=verification.slots,
        homes=verification.homes,
        weights_bytes=verification.weights_bytes,
        slots_skipped=verification.slots_skipped,
        compared_bytes=verification.compared_bytes,
        mismatched=verification.mismatched,
        mismatches=[admin_pb2.Mismatch(**asdict(m)) for m in verification.mismatches],
    )
