"""Who has which share: users before groups before the others, in the file's order."""

import grp
import pwd
from pathlib import Path

import pytest

from vmmd.config import Config, ShareConfig, load
from vmmd.core.ledger import DeviceRecord, Share, UserRecord
from vmmd.errors import InvalidRequest
from vmmd.main import check_guarantees
from vmmd.user_shares import UserShares

MIB = 1 << 20


@pytest.fixture(autouse=True)
def users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ann and ben are of group staff, ben's own; cy is of group guests and a member of staff.

    `tmp_path` comes first: pytest asks for this process's user when it makes the first.
    """
    people = {
        name: pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/sh"))
        for name, uid, gid in (("ann", 11, 50), ("ben", 12, 50), ("cy", 13, 60), ("dee", 14, 60))
    }
    groups = {
        name: grp.struct_group((name, "x", gid, members))
        for name, gid, members in (("staff", 50, ["cy"]), ("guests", 60, []))
    }

    def group(name: str) -> grp.struct_group:
        return groups[name]

    monkeypatch.setattr(pwd, "getpwnam", lambda name: people[name])
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: next(p for p in people.values() if p.pw_uid == uid))
    monkeypatch.setattr(pwd, "getpwall", lambda: list(people.values()))
    monkeypatch.setattr(grp, "getgrnam", group)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: next(g for g in groups.values() if g.gr_gid == gid))
    lists = {"ann": [50], "ben": [50], "cy": [60, 50], "dee": [60]}
    monkeypatch.setattr("os.getgrouplist", lambda name, gid: lists[name])


def config(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "vmmd.toml"
    path.write_text(text)
    return load(path)


SHARES = """
[[share]]
groups = ["staff"]
guarantee_bytes = "3MiB"
cap_bytes = "30MiB"
[[share]]
users = ["ann", 99]
guarantee_bytes = "1MiB"
session_guarantee_bytes = "512KiB"
priority = 2
[[share]]
session_cap_bytes = "4MiB"
"""


def test_users_come_before_groups(tmp_path: Path) -> None:
    """A user has the entry that names it, else its groups', else the others'."""
    shares = UserShares(config(tmp_path, SHARES).share)
    assert shares.of(11, 50) == (Share(MIB, None, 2), Share(MIB // 2, None, 2))
    assert shares.of(12, 50)[0] == shares.of(13, 60)[0] == Share(3 * MIB, 30 * MIB, 0)
    assert shares.of(14, 60) == (Share(), Share(0, 4 * MIB, 0))
    assert UserShares([]).of(14, 60) == (Share(), Share())


def test_guarantees_are_known_beforehand(tmp_path: Path) -> None:
    """Every user that is guaranteed something is known before it connects, members of groups included."""
    known = UserShares(config(tmp_path, SHARES).share).known()
    assert {uid: share.guarantee_bytes // MIB for uid, share in known.items()} == {11: 1, 99: 1, 12: 3, 13: 3}


def test_guarantees_must_fit(tmp_path: Path) -> None:
    """Guarantees that no device could hold together are refused with what there is."""
    shares = UserShares(config(tmp_path, SHARES).share)
    users = {uid: UserRecord("team", share) for uid, share in shares.known().items()}
    devices = [
        DeviceRecord("gpu0", "gpu0", MIB, 9 * MIB, 8 * MIB),
        DeviceRecord("ram", "ram", MIB, MIB, MIB, is_host=True),
    ]
    check_guarantees(devices, users)
    devices[0].reserve_bytes = 2 * MIB
    with pytest.raises(InvalidRequest, match=f"4 users are guaranteed {8 * MIB} bytes of gpu0, which has {7 * MIB}"):
        check_guarantees(devices, users)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[share]]\ngroups = ["nobody-has-this"]\n', "there is no group 'nobody-has-this'"),
        ('[[share]]\nguarantee_bytes = "1MiB"\n', "neither users nor groups"),
        ("[[share]]\nusers = [1]\nguarantee_bytes = 2\ncap_bytes = 1\n", "cap_bytes = 1 at most"),
        ("[[share]]\nusers = [1]\nsession_guarantee_bytes = 2\nsession_cap_bytes = 1\n", "session_cap_bytes = 1 at"),
        ("[[share]]\npriority = 11\n", "an integer from -10 to 10"),
        ("[[share]]\ngroups = [true]\n", "group names or group ids"),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    """What makes no sense is refused in one line."""
    with pytest.raises(InvalidRequest, match=says) as caught:
        UserShares(config(tmp_path, text).share)
    assert len(caught.value.message.splitlines()) == 1


def test_defaults() -> None:
    """Without entries nobody is guaranteed anything, or capped."""
    assert ShareConfig() == ShareConfig(users=(), groups=())
    assert UserShares(Config().share).known() == {}
