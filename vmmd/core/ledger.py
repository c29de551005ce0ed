"""The ledger: every slab, range and session, and the only transitions they make.

A slab's life::

    create ──> FREE ──lease──> LEASED ──begin_revoke──> REVOKING
                ^ ^              ^                        │ │ │
                │ │              └────cancel_revoke───────┘ │ │
                │ └───────────────finish_revoke─────────────┘ │
                │                                       quarantine (from FREE too)
                └──────────────────lift──────── QUARANTINED <─┘
    destroy: from FREE only

The ledger conserves: a slab is in exactly one state; LEASED and REVOKING ones are
in exactly one range at one index; a slab never changes its device or domain. A
method that would break this raises `ValueError` (our own bug) and changes
nothing. Sizes are bytes, times are seconds of the caller's clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum


class SlabState(StrEnum):
    """Where a slab is in its life."""

    FREE = "free"
    LEASED = "leased"
    REVOKING = "revoking"
    QUARANTINED = "quarantined"


class RangeKind(StrEnum):
    """What a range holds."""

    WEIGHTS = "weights"
    ARENA = "arena"
    HOMES = "homes"
    KV = "kv"


@dataclass
class SlabRecord:
    """One slab. `range_id` and `index` are set while leased or revoking."""

    slab_id: int
    device: str
    domain: str
    state: SlabState = SlabState.FREE
    range_id: int | None = None
    index: int | None = None
    holder: int | None = None  # session charged for it while quarantined
    holder_pid: int = 0  # of that session, which may have ended, or of whom it is seen at; 0: unknown
    since_s: float = 0.0  # of the present state
    traded_s: float | None = None  # when it last left an arena for another range
    left_range: int | None = None  # which range it left last
    came_from: int | None = None  # which range it was in before the present one, or before it was freed
    came_s: float = 0.0  # and when it came from there


@dataclass
class DeviceRecord:
    """One device and its limits."""

    uuid: str
    name: str
    slab_bytes: int
    total_bytes: int
    cap_bytes: int
    reserve_bytes: int = 0
    is_host: bool = False
    unmanaged_bytes: int = 0
    failed: bool = False

    @property
    def limit_bytes(self) -> int:
        """What slabs may have of it now: the cap, or what other programs leave beside the reserve."""
        return min(self.cap_bytes, self.total_bytes - self.unmanaged_bytes - self.reserve_bytes)


@dataclass
class RangeRecord:
    """One range: `slabs` maps an index to a slab id; holes are allowed."""

    range_id: int
    kind: RangeKind
    device: str
    domain: str
    owner: int  # model id, or session id of a K/V range
    slabs_max: int
    cells_per_slab: int = 0
    cells_max: int = 0
    slabs: dict[int, int] = field(default_factory=dict)
    filled_to: int = field(default=0, repr=False)  # no index below it is without a slab
    shrinkable: bool = False  # its client gives some back when it is asked to
    closed: bool = False  # forgotten once it is empty
    parked_s: float | None = None  # since when a conversation's range waits for its next session

    def hole(self) -> int:
        """The lowest index without a slab."""
        while self.filled_to in self.slabs:
            self.filled_to += 1
        return self.filled_to


@dataclass(frozen=True)
class Share:
    """What a user or a session is guaranteed of each device, may hold of it at most, and comes before whom."""

    guarantee_bytes: int = 0
    cap_bytes: int | None = None  # None: no cap
    priority: int = 0


@dataclass(frozen=True)
class UserRecord:
    """One user that has a session, or is guaranteed something."""

    domain: str
    share: Share


@dataclass(frozen=True)
class SessionRecord:
    """One client process, by kernel-checked credentials."""

    session_id: int
    pid: int
    uid: int
    gid: int
    domain: str
    executable: str
    started_s: float
    share: Share = Share()


class Ledger:
    """All of it. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self.devices: dict[str, DeviceRecord] = {}
        self.slabs: dict[int, SlabRecord] = {}
        self.ranges: dict[int, RangeRecord] = {}
        self.sessions: dict[int, SessionRecord] = {}
        self.users: dict[int, UserRecord] = {}
        self._by_device: dict[str, dict[SlabState, set[int]]] = {}
        self._next_id = 1

    def new_id(self) -> int:
        """An id that was never used: slabs, ranges, models and sessions share the sequence."""
        self._next_id += 1
        return self._next_id - 1

    # Devices

    def add_device(self, device: DeviceRecord) -> None:
        """Registers a device without slabs."""
        if device.uuid in self.devices:
            raise ValueError(f"device {device.uuid} is there already")
        self.devices[device.uuid] = device
        self._by_device[device.uuid] = {state: set() for state in SlabState}

    def slabs_in(self, device: str, state: SlabState) -> frozenset[int]:
        """Ids of a device's slabs in one state."""
        return frozenset(self._by_device[device][state])

    def slab_count(self, device: str) -> int:
        """How many slabs a device has, in any state."""
        return sum(map(len, self._by_device[device].values()))

    def room_slabs(self, device: str) -> int:
        """How many more slabs could be created under the cap and beside other programs."""
        return 0 if self.devices[device].failed else max(0, self.balance_slabs(device))

    def balance_slabs(self, device: str) -> int:
        """The same, negative where so many slabs are too many: the cap fell, or other programs took the room."""
        record = self.devices[device]
        used = self.slab_count(device) * record.slab_bytes
        return (record.limit_bytes - used) // record.slab_bytes

    def free_slabs(self, device: str, domain: str) -> list[int]:
        """Free slabs of a domain on a device, the longest free first."""
        free = (self.slabs[i] for i in self._by_device[device][SlabState.FREE])
        return [s.slab_id for s in sorted(free, key=lambda s: (s.since_s, s.slab_id)) if s.domain == domain]

    # Sessions and ranges

    @property
    def has_shares(self) -> bool:
        """Whether anybody is guaranteed something, or capped."""
        shares = [user.share for user in self.users.values()] + [s.share for s in self.sessions.values()]
        return any(share.guarantee_bytes or share.cap_bytes is not None for share in shares)

    def add_session(self, session: SessionRecord) -> None:
        """Registers a session whose credentials were checked."""
        if session.session_id in self.sessions or session.pid <= 0 or not session.domain:
            raise ValueError(f"session {session.session_id} is known or has no credentials")
        self.sessions[session.session_id] = session

    def end_session(self, session_id: int) -> None:
        """A session is guaranteed nothing any more; what it still holds stays charged to it."""
        self.sessions[session_id] = replace(self.sessions[session_id], share=Share())

    def remove_session(self, session_id: int) -> None:
        """Forgets a session that owns no range any more."""
        if any(r.kind is RangeKind.KV and r.owner == session_id for r in self.ranges.values()):
            raise ValueError(f"session {session_id} still owns ranges")
        del self.sessions[session_id]

    def session_ranges(self, session_id: int) -> list[RangeRecord]:
        """The K/V ranges of a session."""
        return [r for r in self.ranges.values() if r.kind is RangeKind.KV and r.owner == session_id]

    def add_range(self, record: RangeRecord) -> None:
        """Registers an empty range."""
        if record.range_id in self.ranges or record.device not in self.devices or record.slabs:
            raise ValueError(f"range {record.range_id} is known, not empty or on no device")
        if record.kind is RangeKind.KV and record.owner not in self.sessions:
            raise ValueError(f"range {record.range_id} has no session")
        self.ranges[record.range_id] = record

    def remove_range(self, range_id: int) -> None:
        """Forgets a range that holds nothing."""
        if self.ranges[range_id].slabs:
            raise ValueError(f"range {range_id} still holds slabs")
        del self.ranges[range_id]

    def park(self, range_id: int, now_s: float) -> None:
        """No session uses a K/V range any more; it stays charged to the one that did, and may be reclaimed."""
        record = self.ranges[range_id]
        if record.kind is not RangeKind.KV or record.parked_s is not None:
            raise ValueError(f"range {range_id} cannot be parked")
        record.parked_s = now_s

    def unpark(self, range_id: int) -> None:
        """A parked range is somebody's business again: it is not to be reclaimed."""
        if self.ranges[range_id].parked_s is None:
            raise ValueError(f"range {range_id} is not parked")
        self.ranges[range_id].parked_s = None

    def adopt(self, range_id: int, session_id: int) -> None:
        """A session of the same domain takes a parked range over."""
        record = self.ranges[range_id]
        if session_id not in self.sessions or self.sessions[session_id].domain != record.domain:
            raise ValueError(f"session {session_id} cannot have range {range_id}")
        self.unpark(range_id)
        record.owner = session_id

    def parked(self, device: str) -> list[RangeRecord]:
        """The parked ranges of a device, the longest parked first."""
        found = [r for r in self.ranges.values() if r.device == device and r.parked_s is not None]
        return sorted(found, key=lambda r: (r.parked_s or 0.0, r.range_id))

    # Slabs

    def create(self, device: str, domain: str, now_s: float) -> int:
        """Records a new FREE slab and returns its id."""
        if self.room_slabs(device) < 1:
            raise ValueError(f"no room for another slab on {device}")
        slab = SlabRecord(self.new_id(), device, domain, since_s=now_s)
        self.slabs[slab.slab_id] = slab
        self._by_device[device][SlabState.FREE].add(slab.slab_id)
        return slab.slab_id

    def destroy(self, slab_id: int) -> None:
        """Forgets a FREE slab."""
        slab = self._expect(slab_id, SlabState.FREE)
        self._by_device[slab.device][SlabState.FREE].discard(slab_id)
        del self.slabs[slab_id]

    def lease(self, slab_id: int, range_id: int, index: int, now_s: float) -> None:
        """FREE -> LEASED, at an empty index of a range of the same device and domain."""
        slab = self._expect(slab_id, SlabState.FREE)
        into = self.ranges[range_id]
        if (slab.device, slab.domain) != (into.device, into.domain):
            raise ValueError(f"slab {slab_id} of {slab.domain} on {slab.device} cannot go to range {range_id}")
        if index in into.slabs or not 0 <= index < into.slabs_max:
            raise ValueError(f"index {index} of range {range_id} is taken or outside")
        into.slabs[index] = slab_id
        slab.range_id, slab.index = range_id, index
        slab.came_from, slab.came_s = slab.left_range, now_s
        self._enter(slab, SlabState.LEASED, now_s)

    def begin_revoke(self, slab_id: int, now_s: float) -> None:
        """LEASED -> REVOKING: still in its range, no longer anybody's to plan with."""
        self._enter(self._expect(slab_id, SlabState.LEASED), SlabState.REVOKING, now_s)

    def cancel_revoke(self, slab_id: int, now_s: float) -> None:
        """REVOKING -> LEASED, nothing having happened."""
        self._enter(self._expect(slab_id, SlabState.REVOKING), SlabState.LEASED, now_s)

    def finish_revoke(self, slab_id: int, now_s: float) -> None:
        """REVOKING -> FREE: nobody reads it any more; it leaves its range."""
        slab = self._leave(self._expect(slab_id, SlabState.REVOKING), now_s)
        self._enter(slab, SlabState.FREE, now_s)

    def quarantine(self, slab_id: int, holder: int, now_s: float, pid: int = 0) -> None:
        """REVOKING or FREE -> QUARANTINED: somebody still holds it past the deadline."""
        slab = self.slabs[slab_id]
        if slab.state is not SlabState.FREE:
            self._leave(self._expect(slab_id, SlabState.REVOKING), now_s)
        slab.holder, slab.holder_pid = holder, pid
        self._enter(slab, SlabState.QUARANTINED, now_s)

    def lift(self, slab_id: int, now_s: float) -> None:
        """QUARANTINED -> FREE: its holder has let go."""
        slab = self._expect(slab_id, SlabState.QUARANTINED)
        slab.holder, slab.holder_pid = None, 0
        self._enter(slab, SlabState.FREE, now_s)

    def name_holder(self, slab_id: int, pid: int) -> None:
        """The process that really holds a QUARANTINED slab."""
        self._expect(slab_id, SlabState.QUARANTINED).holder_pid = pid

    def _expect(self, slab_id: int, state: SlabState) -> SlabRecord:
        slab = self.slabs[slab_id]
        if slab.state is not state:
            raise ValueError(f"slab {slab_id} is {slab.state}, not {state}")
        return slab

    def _enter(self, slab: SlabRecord, state: SlabState, now_s: float) -> None:
        self._by_device[slab.device][slab.state].discard(slab.slab_id)
        self._by_device[slab.device][state].add(slab.slab_id)
        slab.state, slab.since_s = state, now_s

    def _leave(self, slab: SlabRecord, now_s: float) -> SlabRecord:
        assert slab.range_id is not None and slab.index is not None
        record = self.ranges[slab.range_id]
        del record.slabs[slab.index]
        record.filled_to = min(record.filled_to, slab.index)
        if record.kind is RangeKind.ARENA:
            slab.traded_s = now_s
        slab.left_range = slab.range_id
        slab.range_id = slab.index = None
        return slab

    # Sums

    def bytes_by_kind(self, device: str) -> dict[str, int]:
        """Bytes of a device's slabs: by range kind while leased, else by state."""
        sums = dict.fromkeys([*RangeKind, SlabState.FREE, SlabState.REVOKING, SlabState.QUARANTINED], 0)
        size = self.devices[device].slab_bytes
        for state, ids in self._by_device[device].items():
            if state is SlabState.LEASED:
                for slab_id in ids:
                    range_id = self.slabs[slab_id].range_id
                    assert range_id is not None
                    sums[self.ranges[range_id].kind] += size
            else:
                sums[state] += size * len(ids)
        return {str(kind): value for kind, value in sums.items()}

    def held_bytes(self, ranges: Iterable[RangeRecord]) -> int:
        """Bytes of the slabs in some ranges."""
        return sum(len(r.slabs) * self.devices[r.device].slab_bytes for r in ranges)

    def check(self) -> None:
        """Raises `AssertionError` where an invariant is broken; for tests and debugging."""
        seen: dict[int, tuple[int, int]] = {}
        for record in self.ranges.values():
            for index, slab_id in record.slabs.items():
                assert 0 <= index < record.slabs_max, f"range {record.range_id} holds a slab outside"
                assert slab_id not in seen, f"slab {slab_id} is in two ranges"
                seen[slab_id] = (record.range_id, index)
        for slab in self.slabs.values():
            placed = slab.state in (SlabState.LEASED, SlabState.REVOKING)
            assert placed == (slab.slab_id in seen), f"slab {slab.slab_id} is {slab.state} but placed={not placed}"
            if placed:
                assert seen[slab.slab_id] == (slab.range_id, slab.index)
                into = self.ranges[seen[slab.slab_id][0]]
                assert (into.device, into.domain) == (slab.device, slab.domain), "a slab crossed devices or domains"
            else:
                assert slab.range_id is None and slab.index is None
            assert (slab.holder is not None) == (slab.state is SlabState.QUARANTINED)
        for uuid, states in self._by_device.items():
            ids = [i for group in states.values() for i in group]
            assert sorted(ids) == sorted(s.slab_id for s in self.slabs.values() if s.device == uuid)
            assert all(self.slabs[i].state is state for state, group in states.items() for i in group)
            assert sum(self.bytes_by_kind(uuid).values()) == len(ids) * self.devices[uuid].slab_bytes
        for record in self.ranges.values():
            assert all(index in record.slabs for index in range(record.filled_to)), "a hole is overlooked"
            assert record.kind is not RangeKind.KV or record.owner in self.sessions, "a K/V range without a session"
            assert record.parked_s is None or record.kind is RangeKind.KV, "a parked range that is no K/V range"
