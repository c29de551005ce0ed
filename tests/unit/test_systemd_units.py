"""The systemd units: valid wherever they are installed, hardened, and roomy enough."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian package: systemd)"
)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A prefix as an installer lays it out: units and a program."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    shared = table["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    for source, target in shared.items():
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, tmp_path / target)
    program = tmp_path / "bin" / "vmmd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, env={"PATH": "/usr/bin:/bin"}
    )


def settings(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    return found


def test_units_are_installed(prefix: Path) -> None:
    """The wheel puts every file of the folder where systemd looks for it below a prefix."""
    installed = sorted(str(p.relative_to(prefix)) for p in (prefix / "lib").rglob("*") if p.is_file())
    assert installed == [
        "lib/systemd/system/vmmd.service",
        "lib/systemd/system/vmmd.socket",
        "lib/sysusers.d/strata.conf",
    ]
    assert len(list(UNITS.iterdir())) == len(installed)


@needs_systemd_analyze
def test_verify_is_silent(prefix: Path) -> None:
    """systemd has nothing to say about the installed units."""
    units = [str(prefix / "lib/systemd/system" / name) for name in ("vmmd.service", "vmmd.socket")]
    result = analyze("verify", *units)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_systemd_analyze
def test_program_is_found_beside_the_unit(prefix: Path) -> None:
    """Without the program in the same prefix, systemd names the path that it looked at."""
    (prefix / "bin/vmmd").unlink()
    result = analyze("verify", str(prefix / "lib/systemd/system/vmmd.service"))
    assert result.returncode != 0
    assert f"{prefix}/lib/systemd/system/../../../bin/vmmd is not executable" in result.stderr


@needs_systemd_analyze
def test_program_is_found_through_a_link(prefix: Path) -> None:
    """A unit that is linked into systemd's own directory still finds the program in its prefix."""
    linked = prefix / "etc" / "vmmd.service"
    linked.parent.mkdir()
    linked.symlink_to(prefix / "lib/systemd/system/vmmd.service")
    (prefix / "bin/vmmd").unlink()
    result = analyze("verify", str(linked))
    assert f"{prefix}/lib/systemd/system/../../../bin/vmmd is not executable" in result.stderr


@needs_systemd_analyze
def test_exposure(prefix: Path) -> None:
    """systemd rates the service's exposure 2.0 or better, without a user namespace."""
    result = analyze("security", "--offline=true", "--no-pager", str(prefix / "lib/systemd/system/vmmd.service"))
    match = re.search(r"Overall exposure level for vmmd.service: ([\d.]+)", result.stdout)
    assert match, result.stderr
    assert float(match[1]) <= 2.0
    assert "PrivateUsers" not in settings("vmmd.service")


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_sysusers(prefix: Path) -> None:
    """The user's description is understood and makes the service's user."""
    root = prefix / "root"
    (root / "etc").mkdir(parents=True)
    shutil.copy("/etc/group", root / "etc/group")
    result = subprocess.run(
        ["systemd-sysusers", f"--root={root}", "--dry-run", str(UNITS / "strata.sysusers")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "strata" in result.stdout + result.stderr
    assert settings("vmmd.service")["User"] == settings("vmmd.service")["Group"] == ["strata"]


def test_service_settings() -> None:
    """Readiness, watchdog, a runtime directory that stays, room for slabs, and the GPU's nodes."""
    service = settings("vmmd.service")
    assert service["Type"] == ["notify"]
    assert int(service["WatchdogSec"][0]) > 0
    assert service["RuntimeDirectory"] == ["strata"]
    assert service["RuntimeDirectoryMode"] == ["0750"]
    assert service["RuntimeDirectoryPreserve"] == ["yes"]
    assert int(service["LimitNOFILE"][0]) >= 524288
    assert service["LimitMEMLOCK"] == ["infinity"]
    assert service["Restart"] == ["on-failure"]
    assert "PrivateDevices" not in service
    assert "char-nvidia rw" in service["DeviceAllow"] and "char-nvidia-uvm rw" in service["DeviceAllow"]


def test_claims_are_visible() -> None:
    """The service shares the host's network namespace: claims of GPUs are abstract sockets there."""
    service = settings("vmmd.service")
    assert "PrivateNetwork" not in service
    assert service["RestrictAddressFamilies"] == ["AF_UNIX"]


def test_socket_settings() -> None:
    """systemd passes handles.sock, for the same users as the daemon makes it for, and never vmmd.sock."""
    unit = settings("vmmd.socket")
    assert unit["ListenSequentialPacket"] == ["/run/strata/handles.sock"]
    assert (unit["SocketUser"], unit["SocketGroup"], unit["SocketMode"]) == (["strata"], ["strata"], ["0660"])
    assert not any("vmmd.sock" in value for values in unit.values() for value in values)
