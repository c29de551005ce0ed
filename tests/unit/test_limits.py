"""Descriptors, mappings and memory, compared with the configuration."""

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from vmmd.limits import HostLimits, warnings

MIB, GIB = 1 << 20, 1 << 30
ROOMY = HostLimits(descriptors_max=1 << 20, mappings_max=1 << 20, available_bytes=64 * GIB, cgroup_bytes_max=None)


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_enough() -> None:
    """Nothing is said where everything fits."""
    assert warnings(ROOMY, {"GPU": 80 * GIB, "HOST-RAM": 64 * GIB}, 64 * MIB, 64 * GIB) == []


def test_descriptors() -> None:
    """Too few descriptors: limit, number of slabs, and both ways out are said."""
    (line,) = warnings(replace(ROOMY, descriptors_max=1024), {"A": GIB, "B": GIB}, MIB)
    assert "2048 slabs of 1048576 bytes" in line
    assert "may open 1024" in line
    assert "LimitNOFILE= or `ulimit -n` to 2560" in line
    assert f"slab_bytes to {4 * MIB}" in line
    assert warnings(replace(ROOMY, descriptors_max=2560), {"A": GIB, "B": GIB}, MIB) == []
    assert warnings(replace(ROOMY, descriptors_max=1024), {"A": GIB, "B": GIB}, 4 * MIB) == []


def test_mappings() -> None:
    """Too few mappings: vm.max_map_count, and what to set."""
    (line,) = warnings(replace(ROOMY, mappings_max=65530), {"HOST-RAM": 64 * GIB}, MIB)
    assert "vm.max_map_count is 65530" in line
    assert "`sysctl vm.max_map_count=67584`" in line
    assert f"slab_bytes to {2 * MIB}" in line


def test_cgroup() -> None:
    """Host memory beyond the cgroup's limit is named before the kernel kills for it."""
    limits = replace(ROOMY, cgroup_bytes_max=4 * GIB)
    (line,) = warnings(limits, {"HOST-RAM": 8 * GIB}, 64 * MIB, 8 * GIB)
    assert f"{8 * GIB} bytes are more than this cgroup's limit of {4 * GIB}" in line
    assert warnings(limits, {"GPU": 8 * GIB, "HOST-RAM": GIB}, 64 * MIB, GIB) == []


def test_tiny_limits() -> None:
    """Limits below what is kept spare still give an answer."""
    assert len(warnings(HostLimits(10, 10, 0, 10), {"A": GIB}, MIB, GIB)) == 3


def test_read_this_host() -> None:
    """This host's limits are read."""
    limits = HostLimits.read()
    assert limits.descriptors_max == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert limits.available_bytes > 0
    assert limits.mappings_max is None or limits.mappings_max > 0


@pytest.mark.parametrize(
    ("own", "above", "expected"),
    [("2147483648", "max", 2 * GIB), ("max", "1073741824", GIB), ("max", "max", None), (None, None, None)],
)
def test_read_cgroup(tmp_path: Path, own: str | None, above: str | None, expected: int | None) -> None:
    """The least memory.max of our cgroup and those above it holds, also for what can be had."""
    write(tmp_path, "proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   8388608 kB\n")
    write(tmp_path, "proc/sys/vm/max_map_count", "65530\n")
    write(tmp_path, "proc/self/cgroup", "4:memory:/old\n0::/system.slice/vmmd.service\n")
    if own and above:
        write(tmp_path, "sys/fs/cgroup/system.slice/vmmd.service/memory.max", own + "\n")
        write(tmp_path, "sys/fs/cgroup/system.slice/memory.max", above + "\n")
    limits = HostLimits.read(tmp_path)
    assert limits.cgroup_bytes_max == expected
    assert limits.available_bytes == min(8 * GIB, expected or 8 * GIB)
    assert limits.mappings_max == 65530


@pytest.mark.parametrize(
    ("own", "top", "expected"),
    [
        (2 * GIB, 9223372036854771712, 2 * GIB),
        (None, GIB, GIB),
        (2 * GIB, GIB, GIB),
        (9223372036854771712,) * 2 + (None,),
    ],
)
def test_read_cgroup_version_1(tmp_path: Path, own: int | None, top: int, expected: int | None) -> None:
    """The least limit_in_bytes holds; in a container, whose own path is not there, that of the top."""
    write(tmp_path, "proc/meminfo", "MemAvailable:   8388608 kB\n")
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/a:b\n0::/\n\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{top}\n")
    if own:
        write(tmp_path, "sys/fs/cgroup/memory/docker/a:b/memory.limit_in_bytes", f"{own}\n")
    limits = HostLimits.read(tmp_path)
    assert (limits.cgroup_bytes_max, limits.available_bytes) == (expected, min(8 * GIB, expected or 8 * GIB))


def test_read_nothing(tmp_path: Path) -> None:
    """A host that tells nothing has no limits that we know of."""
    limits = HostLimits.read(tmp_path)
    assert (limits.mappings_max, limits.cgroup_bytes_max, limits.available_bytes) == (None, None, 0)


def test_raise_descriptor_limit() -> None:
    """The soft limit becomes the hard one."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300)); "
        "from vmmd.limits import raise_descriptor_limit as r; print(r(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["300", "300", "300"]
