"""Devices: which one a session gets, what other programs leave of it, and what happens when it dies."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
from strata_api.v1 import memory_pb2

from vmmd.core.ledger import DeviceRecord
from vmmd.errors import DriverError, InvalidRequest, NoDevice, NotFound

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager

log = structlog.get_logger("vmmd.manager")


class Devices:
    """The devices of the ledger, as the driver sees them."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager

    def choose(self, uuids: Sequence[str]) -> list[str]:
        computing = [d.uuid for d in self._manager.ledger.devices.values() if not d.is_host]
        failed = [uuid for uuid in computing if self._manager.ledger.devices[uuid].failed]
        if not uuids:
            uuids = [uuid for uuid in computing if uuid not in failed][:1] or computing[:1]
        if len(uuids) > len(computing):
            raise InvalidRequest(f"{len(uuids)} devices named; this vmmd owns {', '.join(computing)}")
        if any(uuid in failed for uuid in uuids):
            raise NoDevice(f"device {', '.join(failed)} has failed; use another one, or restart vmmd to recover it")
        for uuid in uuids:
            if uuid not in computing:
                raise NotFound(f"there is no device {uuid[:80]!r} here; this vmmd owns {', '.join(computing)}")
        if len(set(uuids)) != len(uuids):
            raise InvalidRequest(f"devices named twice: {', '.join(uuids)}")
        return list(uuids)

    def measure(self) -> None:
        """Takes note of what other programs have (used by the driver's word, less the slabs) and of dead devices."""
        for device in self._manager.ledger.devices.values():
            if device.uuid in self._manager.driver.failed_devices():
                self._fail(device)
            if device.failed or self._manager.physical.creating[device.uuid]:
                continue  # the driver counts slabs that are not known here yet
            try:
                memory = self._manager.driver.memory(device.uuid)
            except DriverError as error:
                log.warning("device.unreadable", device=device.uuid, why=error.message)
                continue
            slabs = self._manager.physical.bytes_on(device.uuid)
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
        for model in self._manager.models.values():
            if device.uuid in {r.device for r in (model.weights, model.homes, *model.ranges)}:
                model.mark_stale(why)
        users = {r.owner for r in self._manager.ledger.ranges.values() if r.device == device.uuid}
        for session in self._manager.sessions.values():
            if session.session_id in users or any(m is not None and m.model_id in users for m in session.attached):
                notice = memory_pb2.Notice(code=memory_pb2.Notice.CODE_DEVICE_FAILED, message=why)
                session.send(memory_pb2.WatchEvent(epoch=self._manager.epoch, notice=notice))
