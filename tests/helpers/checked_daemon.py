"""A daemon that checks its ledger, its arenas and its driver against each other, many times a second.

Run as a program in the place of ``vmmd.main``; what does not fit is a traceback in its log.
"""

from typing import Any

from vmmd.core.ledger import SlabState
from vmmd.main import main
from vmmd.manager.upkeep import Upkeep


def check(manager: Any) -> None:
    """Errors: `AssertionError` where an invariant is broken."""
    ledger, physical = manager.ledger, manager.physical
    ledger.check()
    for model in manager.models.values():
        if not model.closed:
            model.arena.check()
    creating = sum(physical.creating.values()) or manager.slabs._busy.total()  # a plan's slabs are made in a moment
    assert set(physical) <= set(ledger.slabs), "a slab that nobody knows"
    missing = set(ledger.slabs) - set(physical)
    assert not missing or creating, f"slabs that are not there: {missing}"
    assert all(ledger.slabs[i].state is not SlabState.FREE for i in missing)
    assert set(manager.sessions) <= set(ledger.sessions)
    for device in ledger.devices.values():
        used = ledger.slab_count(device.uuid) * device.slab_bytes
        assert used <= device.cap_bytes, f"{device.uuid}: {used} bytes of slabs, a cap of {device.cap_bytes}"


_tick = Upkeep._tick


async def _checked_tick(self: Upkeep) -> None:
    check(self._manager)
    await _tick(self)
    check(self._manager)


if __name__ == "__main__":
    Upkeep._tick = _checked_tick  # type: ignore[method-assign]
    main()
