"""The ledger's transitions, one by one, and what it refuses."""

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest

from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord, SlabState

SIZE = 4096
SESSION = SessionRecord(1000, 42, 7, 7, "alice", "/bin/client", 0.0)


@pytest.fixture
def ledger() -> Ledger:
    """Room for four slabs on `gpu`; a session with a K/V range 1, an arena range 2 of the same domain, 3 of another."""
    made = Ledger()
    made.add_device(DeviceRecord("gpu", "GPU", SIZE, 16 * SIZE, 4 * SIZE))
    made.add_device(DeviceRecord("host", "RAM", SIZE, 16 * SIZE, 4 * SIZE, is_host=True))
    made.add_session(SESSION)
    made.add_range(RangeRecord(1, RangeKind.KV, "gpu", "alice", SESSION.session_id, 3, 16, 48))
    made.add_range(RangeRecord(2, RangeKind.ARENA, "gpu", "alice", 500, 3))
    made.add_range(RangeRecord(3, RangeKind.ARENA, "gpu", "bob", 501, 3))
    made.add_range(RangeRecord(4, RangeKind.HOMES, "host", "alice", 500, 3))
    return made


def frozen(ledger: Ledger) -> Any:
    tables: list[dict[Any, Any]] = [ledger.slabs, ledger.ranges, ledger.devices, ledger.sessions]
    states = {(d, s): ledger.slabs_in(d, s) for d in ledger.devices for s in SlabState}
    return [{key: astuple(row) for key, row in table.items()} for table in tables], states


def refuses(ledger: Ledger, call: Callable[..., object], *args: object) -> None:
    before = frozen(ledger)
    with pytest.raises(ValueError):
        call(*args)
    assert frozen(ledger) == before
    ledger.check()


def in_state(ledger: Ledger, state: SlabState, range_id: int = 1) -> int:
    """A new slab that was brought into a state by way of a range."""
    slab_id = ledger.create("gpu", "alice", 1.0)
    if state is not SlabState.FREE:
        ledger.lease(slab_id, range_id, 0, 2.0)
    if state in (SlabState.REVOKING, SlabState.QUARANTINED):
        ledger.begin_revoke(slab_id, 3.0)
    if state is SlabState.QUARANTINED:
        ledger.quarantine(slab_id, SESSION.session_id, 4.0)
    return slab_id


TRANSITIONS: dict[str, tuple[set[SlabState], SlabState | None]] = {
    "lease": ({SlabState.FREE}, SlabState.LEASED),
    "destroy": ({SlabState.FREE}, None),
    "begin_revoke": ({SlabState.LEASED}, SlabState.REVOKING),
    "cancel_revoke": ({SlabState.REVOKING}, SlabState.LEASED),
    "finish_revoke": ({SlabState.REVOKING}, SlabState.FREE),
    "quarantine": ({SlabState.REVOKING, SlabState.FREE}, SlabState.QUARANTINED),
    "lift": ({SlabState.QUARANTINED}, SlabState.FREE),
}


@pytest.mark.parametrize("state", SlabState)
@pytest.mark.parametrize("name", TRANSITIONS)
def test_transitions(ledger: Ledger, name: str, state: SlabState) -> None:
    """Each transition leads from its own states to another, and is refused from all others without a change."""
    slab_id = in_state(ledger, state)
    args: dict[str, tuple[object, ...]] = {"lease": (1, 1, 9.0), "destroy": (), "quarantine": (1000, 9.0)}
    call, rest = getattr(ledger, name), args.get(name, (9.0,))
    begins, ends = TRANSITIONS[name]
    if state not in begins:
        refuses(ledger, call, slab_id, *rest)
        return
    call(slab_id, *rest)
    ledger.check()
    if ends is None:
        assert slab_id not in ledger.slabs
        return
    slab = ledger.slabs[slab_id]
    placed = ends in (SlabState.LEASED, SlabState.REVOKING)
    assert (slab.state, slab.since_s) == (ends, 9.0)
    assert (slab.range_id is not None) == placed == (slab_id in ledger.ranges[1].slabs.values())
    assert slab.holder == (1000 if ends is SlabState.QUARANTINED else None)
    assert ledger.slabs_in("gpu", ends) == {slab_id}


def test_holders_are_named(ledger: Ledger) -> None:
    """Who holds a quarantined slab may turn out to be another process; once it is lifted nobody does."""
    slab_id = in_state(ledger, SlabState.LEASED)
    refuses(ledger, ledger.name_holder, slab_id, 5)
    ledger.begin_revoke(slab_id, 1.0)
    ledger.quarantine(slab_id, 1000, 2.0, 4)
    ledger.name_holder(slab_id, 5)
    assert (ledger.slabs[slab_id].holder, ledger.slabs[slab_id].holder_pid) == (1000, 5)
    ledger.lift(slab_id, 3.0)
    assert ledger.slabs[slab_id].holder_pid == 0


def test_lease_refusals(ledger: Ledger) -> None:
    """A slab goes to an empty index within a range of its device and domain, and nowhere else."""
    first, second = (ledger.create("gpu", "alice", 0.0) for _ in range(2))
    refuses(ledger, ledger.lease, first, 3, 0, 1.0)  # another domain
    refuses(ledger, ledger.lease, first, 4, 0, 1.0)  # another device
    refuses(ledger, ledger.lease, first, 1, 3, 1.0)
    refuses(ledger, ledger.lease, first, 1, -1, 1.0)
    ledger.lease(first, 1, 2, 1.0)
    refuses(ledger, ledger.lease, second, 1, 2, 1.0)
    refuses(ledger, ledger.lease, first, 2, 0, 1.0)  # it has a place


def test_creating(ledger: Ledger) -> None:
    """Slabs are created under the cap and no further, and an id is used once."""
    made = {ledger.create("gpu", "alice", 0.0) for _ in range(4)}
    assert len(made) == 4
    refuses(ledger, ledger.create, "gpu", "alice", 0.0)
    gone = made.pop()
    ledger.destroy(gone)
    assert ledger.create("gpu", "bob", 0.0) not in made | {gone}


def test_room(ledger: Ledger) -> None:
    """Room is what the cap, other programs, the reserve and a failure leave; a balance can be negative."""
    device = ledger.devices["gpu"]
    assert ledger.room_slabs("gpu") == ledger.balance_slabs("gpu") == 4
    device.cap_bytes = 4 * SIZE - 1
    assert ledger.room_slabs("gpu") == 3
    device.unmanaged_bytes, device.reserve_bytes = 13 * SIZE, SIZE
    assert ledger.room_slabs("gpu") == 2
    ledger.create("gpu", "alice", 0.0)
    ledger.create("gpu", "alice", 0.0)
    device.unmanaged_bytes += 1
    assert (ledger.room_slabs("gpu"), ledger.balance_slabs("gpu")) == (0, -1)
    device.unmanaged_bytes = 1 << 62
    assert ledger.room_slabs("gpu") == 0
    device.unmanaged_bytes, device.failed = 0, True
    assert ledger.room_slabs("gpu") == 0
    refuses(ledger, ledger.create, "gpu", "alice", 0.0)


def test_free_slabs(ledger: Ledger) -> None:
    """Free slabs are those of the domain, the longest free first."""
    late = ledger.create("gpu", "alice", 5.0)
    early = ledger.create("gpu", "alice", 2.0)
    other = ledger.create("gpu", "bob", 1.0)
    again = ledger.create("gpu", "alice", 2.0)
    assert ledger.free_slabs("gpu", "alice") == [early, again, late]
    assert ledger.free_slabs("gpu", "bob") == [other]
    assert ledger.free_slabs("host", "alice") == []


def test_traded_moment(ledger: Ledger) -> None:
    """A slab remembers when it last left an arena, not when it left a K/V range."""
    slab_id = in_state(ledger, SlabState.REVOKING, range_id=2)
    ledger.finish_revoke(slab_id, 8.0)
    assert ledger.slabs[slab_id].traded_s == 8.0
    ledger.lease(slab_id, 1, 0, 9.0)
    ledger.begin_revoke(slab_id, 10.0)
    ledger.finish_revoke(slab_id, 11.0)
    assert ledger.slabs[slab_id].traded_s == 8.0


def test_devices(ledger: Ledger) -> None:
    """A device is registered once."""
    refuses(ledger, ledger.add_device, DeviceRecord("gpu", "again", SIZE, SIZE, SIZE))


@pytest.mark.parametrize("pid, domain", [(0, "alice"), (-1, "alice"), (5, "")])
def test_no_session_without_credentials(ledger: Ledger, pid: int, domain: str) -> None:
    """A session has a process and a domain."""
    refuses(ledger, ledger.add_session, SessionRecord(1001, pid, 7, 7, domain, "x", 0.0))


def test_sessions(ledger: Ledger) -> None:
    """A session is known once, and forgotten after its ranges."""
    refuses(ledger, ledger.add_session, SESSION)
    assert [r.range_id for r in ledger.session_ranges(1000)] == [1]
    refuses(ledger, ledger.remove_session, 1000)
    ledger.remove_range(1)
    ledger.remove_session(1000)
    assert not ledger.sessions


def test_ranges(ledger: Ledger) -> None:
    """A range begins empty, on a device, with a session if it is one's K/V, and goes empty."""
    refuses(ledger, ledger.add_range, RangeRecord(1, RangeKind.ARENA, "gpu", "alice", 500, 3))
    refuses(ledger, ledger.add_range, RangeRecord(9, RangeKind.ARENA, "tpu", "alice", 500, 3))
    refuses(ledger, ledger.add_range, RangeRecord(9, RangeKind.ARENA, "gpu", "alice", 500, 3, slabs={0: 1}))
    refuses(ledger, ledger.add_range, RangeRecord(9, RangeKind.KV, "gpu", "alice", 77, 3))
    slab_id = in_state(ledger, SlabState.LEASED)
    refuses(ledger, ledger.remove_range, 1)
    ledger.begin_revoke(slab_id, 1.0)
    refuses(ledger, ledger.remove_range, 1)
    ledger.finish_revoke(slab_id, 1.0)
    ledger.remove_range(1)
    assert 1 not in ledger.ranges


@pytest.mark.parametrize("held, hole", [([], 0), ([0], 1), ([0, 1, 2], 3), ([1, 2], 0), ([0, 2], 1), ([0, 1, 3], 2)])
def test_hole(held: list[int], hole: int) -> None:
    """A hole is the lowest index without a slab."""
    assert RangeRecord(1, RangeKind.ARENA, "gpu", "a", 5, 8, slabs={i: 100 + i for i in held}).hole() == hole


def test_sums(ledger: Ledger) -> None:
    """Every slab is in one sum: its range's kind while leased, else its state."""
    in_state(ledger, SlabState.LEASED, range_id=2)
    in_state(ledger, SlabState.QUARANTINED)
    in_state(ledger, SlabState.REVOKING)
    ledger.create("gpu", "bob", 0.0)
    sums = ledger.bytes_by_kind("gpu")
    assert {k: v // SIZE for k, v in sums.items() if v} == {"arena": 1, "quarantined": 1, "revoking": 1, "free": 1}
    assert not any(ledger.bytes_by_kind("host").values())
    assert ledger.held_bytes([ledger.ranges[1], ledger.ranges[2]]) == 2 * SIZE
    assert ledger.slab_count("gpu") == 4


def test_check_finds_damage(ledger: Ledger) -> None:
    """The ledger's own check notices a slab in two ranges, one that crossed, and one that is nowhere."""
    slab_id = in_state(ledger, SlabState.LEASED)
    ledger.check()
    ledger.ranges[2].slabs[0] = slab_id
    with pytest.raises(AssertionError, match="two ranges"):
        ledger.check()
    del ledger.ranges[2].slabs[0]
    ledger.slabs[slab_id].domain = "bob"
    with pytest.raises(AssertionError, match="crossed"):
        ledger.check()
    ledger.slabs[slab_id].domain = "alice"
    del ledger.ranges[1].slabs[0]
    with pytest.raises(AssertionError, match="placed"):
        ledger.check()


def test_parked_ranges_wait_for_another_session(ledger: Ledger) -> None:
    """A parked range is charged to its session until one of the same domain adopts it; the longest parked is first."""
    ledger.add_session(SessionRecord(1001, 43, 7, 7, "alice", "/bin/client", 0.0))
    ledger.add_session(SessionRecord(1002, 44, 8, 8, "bob", "/bin/client", 0.0))
    ledger.add_range(RangeRecord(5, RangeKind.KV, "gpu", "alice", SESSION.session_id, 3, 16, 48))
    ledger.park(1, 9.0)
    ledger.park(5, 4.0)
    assert [r.range_id for r in ledger.parked("gpu")] == [5, 1]
    assert ledger.parked("host") == []
    refuses(ledger, ledger.remove_session, SESSION.session_id)
    refuses(ledger, ledger.park, 1, 10.0)
    refuses(ledger, ledger.park, 2, 10.0)
    refuses(ledger, ledger.adopt, 1, 1002)
    refuses(ledger, ledger.adopt, 1, 77)
    ledger.adopt(1, 1001)
    assert [r.range_id for r in ledger.session_ranges(1001)] == [1]
    refuses(ledger, ledger.adopt, 1, 1001)
    refuses(ledger, ledger.unpark, 1)
    ledger.unpark(5)
    assert ledger.parked("gpu") == []
