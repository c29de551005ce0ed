"""Which share each user of this host has, from the configuration's `[[share]]` entries."""

import grp
import os
import pwd
from collections.abc import Sequence

from vmmd.config import ShareConfig, uid_of
from vmmd.core.ledger import Share
from vmmd.errors import InvalidRequest


class UserShares:
    """A user has the first entry that names it, else the first that names one of its groups, else the others'.

    Errors: `InvalidRequest` (no such user or group).
    """

    def __init__(self, entries: Sequence[ShareConfig]) -> None:
        self._by_uid: dict[int, ShareConfig] = {}
        self._by_gid: dict[int, ShareConfig] = {}
        self._others = next((e for e in entries if not e.users and not e.groups), ShareConfig())
        for entry in entries:
            for user in entry.users:
                self._by_uid.setdefault(uid_of(user, "share.users"), entry)
            for group in entry.groups:
                self._by_gid.setdefault(_gid_of(group), entry)

    def of(self, uid: int, gid: int) -> tuple[Share, Share]:
        """The share of a user, whose primary group is given, and that of each of its sessions."""
        entry = self._by_uid.get(uid)
        if entry is None and self._by_gid:
            groups = _groups_of(uid, gid)
            entry = next((e for g, e in self._by_gid.items() if g in groups), None)
        entry = entry or self._others
        return (
            Share(entry.guarantee_bytes, entry.cap_bytes, entry.priority),
            Share(entry.session_guarantee_bytes, entry.session_cap_bytes, entry.priority),
        )

    def known(self) -> dict[int, Share]:
        """The shares of users that are guaranteed something before they come, by user id."""
        gids = dict.fromkeys(self._by_uid, -1)  # their entry names them, whatever their groups
        gids |= {uid: gid for group in self._by_gid for uid, gid in _members(group) if uid not in self._by_uid}
        shares = {uid: self.of(uid, gid)[0] for uid, gid in gids.items()}
        return {uid: share for uid, share in shares.items() if share.guarantee_bytes}


def _gid_of(group: str | int) -> int:
    if isinstance(group, int):
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidRequest(f"share.groups: there is no group {group!r} on this host") from None


def _groups_of(uid: int, gid: int) -> set[int]:
    try:
        return {gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)}
    except KeyError:  # a user id without a name
        return {gid}


def _members(group: int) -> set[tuple[int, int]]:
    """User id and primary group of each user that is known to be in a group."""
    try:
        names = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        names = set()
    return {(e.pw_uid, e.pw_gid) for e in pwd.getpwall() if e.pw_gid == group or e.pw_name in names}
