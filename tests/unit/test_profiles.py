"""Learned profiles: what is kept of a model, what is believed, and what it does for the next fill."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from tests.helpers.daemon import Daemon
from tests.helpers.in_process import Host, run
from tests.helpers.peer import Admin, SmallModel, client, public_model
from vmmd.core.residency import NOWHERE
from vmmd.manager import profiles
from vmmd.manager.files import FileIdentity
from vmmd.manager.profiles import Profiles, key_of, state_directory

KEY = key_of("user", [FileIdentity(1, 2, 3, 4, 5, "digest")], "geometry")
HEAT = np.linspace(0, 1, 100)
HOT = [3, 17, 40, 41, 42, 43, 50, 55, 60, 63]


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


def save(state_dir: Path, key: str = KEY, heat: np.ndarray = HEAT) -> Path:
    kept = Profiles(state_dir)
    kept.save(key, heat)
    kept.close()
    return state_dir / "profiles" / f"{key}.profile"


def load(state_dir: Path, key: str = KEY, n: int = 100) -> Any:
    return Profiles(state_dir).load(key, n)


def test_what_was_saved_is_there(tmp_path: Path) -> None:
    """A heat comes back as 32-bit floats, the last one saved, for us alone to read; nothing else is left."""
    save(tmp_path / "a" / "b", heat=HEAT / 2)
    path = save(tmp_path / "a" / "b")
    np.testing.assert_allclose(load(tmp_path / "a" / "b"), HEAT, atol=1e-7)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_nothing_was_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not there is no trouble, nor is having no place."""
    assert load(tmp_path) is None
    kept = Profiles(None)
    kept.save(KEY, HEAT)
    assert kept.load(KEY, 100) is None
    kept.close()
    assert "warning" not in capsys.readouterr().out


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"\0",
        flip(0),
        flip(20),
        flip(48),
        flip(57),
        flip(200),
        lambda data: os.urandom(len(data)),
    ],
    ids=["empty", "short", "long", "magic", "key", "experts", "checksum", "body", "noise"],
)
def test_damaged_files_are_ignored(
    tmp_path: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is not as it was written is not believed, with a warning, and the next save replaces it."""
    path = save(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert load(tmp_path) is None
    assert "profile.ignored" in capsys.readouterr().out
    save(tmp_path)
    assert load(tmp_path) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-3, 1.5])
def test_numbers_that_are_no_heat_are_ignored(tmp_path: Path, value: float) -> None:
    """A well-formed file of impossible numbers is not believed."""
    save(tmp_path, heat=np.where(np.arange(100) == 50, value, HEAT))
    assert load(tmp_path) is None


def test_files_of_others_are_ignored(tmp_path: Path) -> None:
    """Links, pipes, directories, files that others may write, and another model's renamed: none is believed."""
    path = save(tmp_path)
    other = key_of("user", [FileIdentity(1, 2, 3, 4, 5, "another")], "geometry")
    assert load(tmp_path, n=99) is None
    (path.parent / f"{other}.profile").write_bytes(path.read_bytes())
    (path.parent / f"{other}.profile").chmod(0o600)
    assert load(tmp_path, key=other) is None
    path.chmod(0o622)
    assert load(tmp_path) is None
    path.chmod(0o600)
    assert load(tmp_path) is not None
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    assert load(tmp_path) is None
    path.unlink()
    os.mkfifo(path, 0o600)
    assert load(tmp_path) is None
    path.unlink()
    path.mkdir()
    assert load(tmp_path) is None


def test_a_place_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saving where there is no directory to be had warns once and harms nothing."""
    (tmp_path / "profiles").write_text("in the way")
    kept = Profiles(tmp_path)
    for _ in range(3):
        kept.save(KEY, HEAT)
    kept.close()
    assert capsys.readouterr().out.count("profile.not_saved") == 1


def test_the_oldest_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All profiles together stay within the limit; what somebody else keeps there is left alone."""
    first = save(tmp_path)
    os.utime(first, ns=(0, 0))
    size_bytes = first.stat().st_size
    monkeypatch.setattr(profiles, "TOTAL_BYTES_MAX", 3 * size_bytes)
    (tmp_path / "profiles" / "note").write_bytes(bytes(10 * size_bytes))
    keys = [key_of("user", [], str(n)) for n in range(6)]
    for n, key in enumerate(keys):
        os.utime(save(tmp_path, key), ns=(n + 1, n + 1))
    left = sorted(path.stem for path in (tmp_path / "profiles").glob("*.profile"))
    assert left == sorted(keys[3:])
    assert (tmp_path / "profiles" / "note").exists()


def test_the_key_is_what_is_in_the_files() -> None:
    """A copy is the same model; other contents, another geometry or another domain are not."""
    copy = FileIdentity(9, 8, 3, 7, 6, "digest")
    assert key_of("user", [copy], "geometry") == KEY
    others = [
        key_of("other", [copy], "geometry"),
        key_of("user", [copy, copy], "geometry"),
        key_of("user", [copy._replace(size_bytes=4)], "geometry"),
        key_of("user", [copy._replace(digest="x")], "geometry"),
        key_of("user", [copy], "x"),
    ]
    assert len({KEY, *others}) == 6


@pytest.mark.parametrize(
    ("configured", "environ", "expected"),
    [
        ("off", {"STATE_DIRECTORY": "/var/lib/strata"}, None),
        ("/x", {"STATE_DIRECTORY": "/var/lib/strata"}, Path("/x")),
        ("auto", {"STATE_DIRECTORY": "/var/lib/strata:/other", "XDG_STATE_HOME": "/y"}, Path("/var/lib/strata")),
        ("auto", {"XDG_STATE_HOME": "/y"}, Path("/y/strata")),
        ("auto", {"XDG_STATE_HOME": "y"}, Path.home() / ".local/state/strata"),
    ],
)
def test_state_directory(configured: str, environ: dict[str, str], expected: Path | None) -> None:
    """The configuration goes before systemd's variable, and that before the user's."""
    assert state_directory(configured, environ) == expected


# What it is good for


def route(opened: Any, host: Host, experts: list[int], tokens: int) -> None:
    words = host.session.heat[opened.model_id].page.words
    for expert in experts:
        words[pages.HEADER_WORDS + expert] += tokens
    words[pages.WORD_DECODED] += tokens


def test_the_next_fill_begins_with_the_hottest(model: SmallModel, tmp_path: Path) -> None:
    """What one daemon learned, the next one fills first, from the file, before anybody has routed anything."""

    async def learn() -> None:
        host = Host(8, state_dir=tmp_path)
        opened = await host.open(model)
        assert np.flatnonzero(opened.arena.resident).tolist() == list(range(35))
        for _ in range(10):
            route(opened, host, HOT, 500)
            opened.count_heat()
        await host.close()

    async def use() -> None:
        host = Host(8, state_dir=tmp_path)
        try:
            opened = await host.open(model)
            assert opened.arena.resident[HOT].all() and int(opened.arena.resident.sum()) == 35
            assert opened.arena.heat_covered() > 0.99
            assert opened.arena.heat.sum() <= model.n_layers * model.top_k + 1e-6
            data = model.path.read_bytes()
            for expert in np.flatnonzero(opened.arena.resident).tolist():
                part, slab, slot = opened.arena.slot_of(expert)
                size = opened.arena.slot_bytes(expert)
                found = host.driver.read(opened.slabs[opened.ranges[part].slabs[slab]], slot * size, size)
                at = opened.arena.geometry.offset_bytes[expert].tolist()
                assert found == b"".join(data[offset : offset + size // 3] for offset in at)
        finally:
            await host.close()

    run(learn)
    run(use)


def test_the_coldest_have_homes_where_there_are_few(model: SmallModel, tmp_path: Path) -> None:
    """Where host memory is short, what was routed to most is pinned to the device, not what comes first."""

    async def scenario(learned: bool) -> None:
        host = Host(13, homes_slabs=4, state_dir=tmp_path)
        try:
            opened = await host.open(model)
            pinned = np.flatnonzero(opened.arena.home[:, 0] == NOWHERE)
            assert len(pinned) == 44
            assert opened.arena.resident[pinned].all()
            assert set(HOT) <= set(pinned.tolist()) or not learned
            for _ in range(10):
                route(opened, host, HOT, 500)
                opened.count_heat()
        finally:
            await host.close()

    run(lambda: scenario(False))
    run(lambda: scenario(True))


def test_two_daemons_one_after_the_other(model: SmallModel, tmp_path: Path) -> None:
    """A daemon that is told to leave keeps what it has learned, and its successor covers that heat from the start."""
    config = 'slab_bytes = "64KiB"\nfloor_slots = 10\n[host]\ndevice_bytes = "512KiB"\nram_bytes = "4MiB"\n'
    for covered in (False, True):
        daemon = Daemon(config, state_dir=tmp_path)
        try:
            with client(daemon.directory) as one, Admin(daemon.directory) as admin:
                one.open(model)
                assert (admin.status().models[0].heat_covered > 0.9) == covered
                one.heat(3, list(range(4, 14)), 3000)
                assert one.wrong_experts() == 0
            daemon.process.terminate()
            assert daemon.process.wait(10) == 0
            assert "Traceback" not in daemon.log.read_text()
        finally:
            daemon.stop()
