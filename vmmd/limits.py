"""What the host allows: descriptors, mappings and memory, compared with what is configured."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DESCRIPTORS_SPARE = 512
"""For sockets, shared pages, clients' files and pidfds, beside one descriptor a slab."""

MAPPINGS_SPARE = 2048
"""For libraries, stacks and heaps, beside one mapping a slab."""

_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes no limit as the largest multiple of a page in 63 bits."""


def raise_descriptor_limit() -> int:
    """Raises the soft limit on descriptors to the hard one; returns what holds now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


@dataclass(frozen=True)
class HostLimits:
    """Limits of this process and host. None: no such limit, or unknown."""

    descriptors_max: int
    mappings_max: int | None
    available_bytes: int
    cgroup_bytes_max: int | None

    @classmethod
    def read(cls, root: Path = Path("/")) -> "HostLimits":
        """What the kernel says now; `root` is another one in tests."""
        cgroup_bytes_max = _cgroup_bytes_max(root)
        available_bytes = _mem_available_bytes(root)
        if cgroup_bytes_max is not None:
            available_bytes = min(available_bytes, cgroup_bytes_max)
        mappings = _read(root / "proc/sys/vm/max_map_count")
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return cls(soft, int(mappings) if mappings.isdigit() else None, available_bytes, cgroup_bytes_max)


def warnings(
    limits: HostLimits, caps_bytes: Mapping[str, int], slab_bytes: int, host_memory_bytes: int = 0
) -> list[str]:
    """What will run short before the caps do; each line says what to set.

    Args:
        limits: of this process and host.
        caps_bytes: cap of every device by uuid, the host's RAM included.
        slab_bytes: size of one slab; each costs a descriptor in the daemon, and a
            mapping in every client that uses it.
        host_memory_bytes: how much of the caps is host memory.
    """
    found = []
    slabs = sum(cap_bytes // slab_bytes for cap_bytes in caps_bytes.values())
    caps = f"caps of {sum(caps_bytes.values())} bytes are {slabs} slabs of {slab_bytes} bytes"
    room = max(1, limits.descriptors_max - DESCRIPTORS_SPARE)
    if slabs > room:
        found.append(
            f"{caps}, each with a descriptor, but this process may open {limits.descriptors_max}: set "
            f"LimitNOFILE= or `ulimit -n` to {slabs + DESCRIPTORS_SPARE}, or slab_bytes to "
            f"{_fitting_bytes(slab_bytes, slabs, room)}"
        )
    if limits.mappings_max is not None:
        room = max(1, limits.mappings_max - MAPPINGS_SPARE)
        if slabs > room:
            found.append(
                f"{caps}, each a mapping in its clients, but vm.max_map_count is {limits.mappings_max}: set "
                f"`sysctl vm.max_map_count={slabs + MAPPINGS_SPARE}`, or slab_bytes to "
                f"{_fitting_bytes(slab_bytes, slabs, room)}"
            )
    if limits.cgroup_bytes_max is not None and host_memory_bytes > limits.cgroup_bytes_max:
        found.append(
            f"caps in host memory of {host_memory_bytes} bytes are more than this cgroup's limit of "
            f"{limits.cgroup_bytes_max} bytes: set MemoryMax= higher, or host_cap_bytes and host.device_bytes lower"
        )
    return found


def _fitting_bytes(slab_bytes: int, slabs: int, room: int) -> int:
    """The slab size, doubled as often as it takes to need no more than `room` slabs."""
    while slabs > room:
        slab_bytes, slabs = slab_bytes * 2, (slabs + 1) // 2
    return slab_bytes


def _mem_available_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def _cgroup_bytes_max(root: Path) -> int | None:
    """The least memory limit of our cgroup and those above it: ``memory.max``, or in version 1 its ``limit_in_bytes``.

    In a container the path may be the host's, which is not there: then the top is our own.
    """
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "", "")
        if number == "0":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        directory = top / path.strip("/")
        values = [_read(d / name) for d in (directory, *directory.parents) if d.is_relative_to(top)]
        limits += [int(value) for value in values if value.isdigit() and int(value) < _NO_LIMIT_BYTES]
    return min(limits, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
