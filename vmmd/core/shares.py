"""Shares: what users and sessions are guaranteed of a device, and what they may hold at most.

What counts is what cannot be called back: the K/V of a user's sessions, and the weights
and the floor of each model, which are charged to the user of the session that has had
it open longest. Slots above an arena's floor are lent, as are models that nobody has
open and parked conversations: they are given up when somebody grows within a guarantee. A
session that goes on with a conversation is charged for it from then on. So a guarantee costs
nothing while it is not used, and still holds before its user's first allocation, as

    sum over users of max(guarantee, fixed + sum over sessions of max(guarantee, held)) <= slabs of the device

is true after every growth that is allowed. The left side is what is *promised*. A growth
within a guarantee does not change it; one beyond a guarantee that would make it too
large is refused, even where there is memory that nobody uses at the moment. Where a
device shrinks (other programs, a lower cap), guarantees may promise too much for a while.

Sums are slabs of one device; guarantees are rounded up and caps down to whole ones.
Host memory has no shares.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vmmd.core.ledger import Ledger, RangeKind, SessionRecord, Share, SlabState
from vmmd.errors import InvalidRequest

NO_USER = -1
"""Whom memory is charged to that is nobody's: quarantined, its holder unknown."""


@dataclass
class Account:
    """What one user has on a device, in slabs."""

    guarantee: int = 0
    cap: int | None = None
    fixed: int = 0
    held: dict[int, int] = field(default_factory=dict)  # K/V by session
    guarantees: dict[int, int] = field(default_factory=dict)  # by session

    @property
    def used(self) -> int:
        """What cannot be called back."""
        return self.fixed + sum(self.held.values())

    @property
    def promised(self) -> int:
        """What must be left to it: what it uses and is guaranteed."""
        promised = self.used
        if self.guarantees:
            promised += sum(max(0, guarantee - self.held.get(s, 0)) for s, guarantee in self.guarantees.items())
        return max(self.guarantee, promised)


Accounts = dict[int, Account]
"""By user id."""


def accounts(
    ledger: Ledger,
    device: str,
    fixed: Iterable[tuple[int, int]],
    asked: Mapping[int, int] | None = None,
    adopted: Mapping[int, int] | None = None,
) -> Accounts:
    """Every user's account on a device.

    Args:
        ledger: who has what, and the users' shares.
        device: where.
        fixed: (user id, slabs) of models.
        asked: slabs more by range, as if they were granted.
        adopted: sessions by parked range, as if they had taken it over.
    """
    size = ledger.devices[device].slab_bytes
    found: Accounts = {}
    for uid, user in ledger.users.items():
        share = user.share
        if share.guarantee_bytes or share.cap_bytes is not None:
            found[uid] = Account(-(-share.guarantee_bytes // size), _floor(share.cap_bytes, size))
    with_ranges = set()  # sessions
    for record in ledger.ranges.values():
        if record.kind is RangeKind.KV:
            owner = record.owner if record.parked_s is None else adopted.get(record.range_id) if adopted else None
            if owner is None:  # parked: it can be called back
                continue
            with_ranges.add(owner)
            if record.device == device:
                session = ledger.sessions[owner]
                account = found.get(session.uid) or found.setdefault(session.uid, Account())
                slabs = len(record.slabs) + (asked.get(record.range_id, 0) if asked else 0)
                account.held[owner] = account.held.get(owner, 0) + slabs
                if session.share.guarantee_bytes:
                    account.guarantees[owner] = _guarantee(session, size)
    for session in ledger.sessions.values():  # before its first range, a session is guaranteed memory on every device
        if session.share.guarantee_bytes and session.session_id not in with_ranges:
            account = found.setdefault(session.uid, Account())
            account.guarantees[session.session_id] = _guarantee(session, size)
    for slab in (ledger.slabs[i] for i in ledger.slabs_in(device, SlabState.QUARANTINED)):
        holder = ledger.sessions.get(slab.holder or 0)
        found.setdefault(NO_USER if holder is None else holder.uid, Account()).fixed += 1
    for uid, slabs in fixed:
        found.setdefault(uid, Account()).fixed += slabs
    return found


def promised(found: Accounts) -> int:
    """Of all users."""
    return sum(account.promised for account in found.values())


def promised_to(ledger: Ledger, found: Accounts) -> Counter[str]:
    """By domain."""
    sums = Counter[str]()
    for uid, account in found.items():
        if uid in ledger.users:
            sums[ledger.users[uid].domain] += account.promised
    return sums


def slabs_of(ledger: Ledger, device: str) -> int:
    """How many slabs a device can have, under its cap and beside other programs."""
    return ledger.slab_count(device) + ledger.balance_slabs(device)


def fits(ledger: Ledger, device: str, after: Accounts) -> bool:
    """Whether every cap is kept, and no more is promised than there is."""
    under_caps = all(account.cap is None or account.used <= account.cap for account in after.values())
    return under_caps and promised(after) <= slabs_of(ledger, device)


def refusal(ledger: Ledger, device: str, before: Accounts, after: Accounts) -> str:
    """Why a growth to what does not fit is not allowed, what would change it included; empty if it is."""
    for uid, account in after.items():
        used = before[uid].used if uid in before else 0
        if account.cap is not None and account.used > account.cap and account.used > used:
            return (
                f"user {uid} may hold {account.cap} slabs there (cap_bytes of its share), uses {used} and would use"
                f" {account.used}; end one of its sessions, or raise the cap"
            )
    room = slabs_of(ledger, device)
    total = promised(after)
    if total <= room or total <= promised(before):
        return ""
    unused = [f"{a.promised - a.used} to user {uid}" for uid, a in sorted(after.items()) if a.promised > a.used]
    if not unused:
        return ""  # nothing but use: there is no memory, whatever is guaranteed
    return (
        f"of {room} slabs {promised(before)} are in use or guaranteed: {', '.join(unused[:6])} and not used yet;"
        " wait until somebody gives memory back, or lower a guarantee"
    )


def over_cap(ledger: Ledger, session: SessionRecord, asked: Mapping[int, int]) -> str:
    """Why a session's cap does not allow so many slabs more, by range; empty if it does."""
    cap_bytes = session.share.cap_bytes
    if cap_bytes is None:
        return ""
    for device in {ledger.ranges[range_id].device for range_id in asked}:
        size = ledger.devices[device].slab_bytes
        ranges = [r for r in ledger.session_ranges(session.session_id) if r.device == device and r.parked_s is None]
        held = sum(len(r.slabs) for r in ranges)
        wanted = held + sum(slabs for range_id, slabs in asked.items() if ledger.ranges[range_id].device == device)
        if wanted > cap_bytes // size:
            return (
                f"session {session.session_id} may hold {cap_bytes // size} slabs of {device} (its cap), has {held}"
                f" and would have {wanted}; ask for less, or raise the cap"
            )
    return ""


class Asked(NamedTuple):
    """What a client asks for instead of what it may have; None: all of it."""

    guarantee_bytes: int | None = None
    cap_bytes: int | None = None
    priority: int | None = None


def lessened(allowed: Share, asked: Asked) -> Share:
    """A session's share as its client wants it. Errors: `InvalidRequest` where that is more than it may have."""
    guarantee_bytes, cap_bytes, priority = allowed.guarantee_bytes, allowed.cap_bytes, allowed.priority
    if asked.guarantee_bytes is not None:
        if asked.guarantee_bytes > guarantee_bytes:
            raise InvalidRequest(
                f"a guarantee of {asked.guarantee_bytes} bytes was asked for, and this user's sessions may have"
                f" {guarantee_bytes} (session_guarantee_bytes); ask for no more"
            )
        guarantee_bytes = asked.guarantee_bytes
    if asked.cap_bytes is not None:
        if cap_bytes is not None and asked.cap_bytes > cap_bytes:
            raise InvalidRequest(
                f"a cap of {asked.cap_bytes} bytes was asked for, and this user's sessions may hold {cap_bytes}"
                " (session_cap_bytes); ask for no more"
            )
        cap_bytes = asked.cap_bytes
    if asked.priority is not None:
        if asked.priority > priority:
            raise InvalidRequest(
                f"priority {asked.priority} was asked for, and this user's sessions may have {priority}; ask for no"
                " more"
            )
        priority = asked.priority
    if cap_bytes is not None and guarantee_bytes > cap_bytes:
        raise InvalidRequest(f"a guarantee of {guarantee_bytes} bytes is more than the cap of {cap_bytes} bytes")
    return Share(guarantee_bytes, cap_bytes, priority)


def _guarantee(session: SessionRecord, slab_bytes: int) -> int:
    return -(-session.share.guarantee_bytes // slab_bytes)


def _floor(cap_bytes: int | None, slab_bytes: int) -> int | None:
    return None if cap_bytes is None else cap_bytes // slab_bytes
