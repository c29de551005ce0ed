"""Probes of the host: kernel, limits, container, and the runtime directory. No GPU is touched.

Files of the kernel are read below a root that tests replace; system calls are made
in this process and leave nothing behind.
"""

import array
import mmap
import os
import platform
import resource
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from strata_api.v1.paths import BROKER_SOCKET, default_runtime_dir, socket_path_problem

from strata_client import connection
from vmmd import limits, runtime_dir
from vmmd.config import GIB, HOST_SHARE, MIB, Config
from vmmd.ctl.findings import Finding, Probe
from vmmd.ctl.printers import size
from vmmd.driver import membarrier
from vmmd.driver.host_memfd import HOST_UUID, HostDriver
from vmmd.errors import Unavailable, VmmError

_SO_PEERPIDFD = 77  # <asm-generic/socket.h>, since Linux 6.5
_UNLIMITED = 1 << 62
_GPU_BYTES_MAX = 256 * GIB  # a guess from above: these probes ask no GPU
_DEFAULT_MPS_DIRECTORY = "/tmp/nvidia-mps"


def probes(directory: Path | None, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> dict[str, Probe]:
    """All of them by name, in the order in which they are shown.

    Args:
        directory: the runtime directory that ``--runtime-dir`` names, or None.
        root: what ``/proc``, ``/sys``, ``/dev`` and ``/run`` lie in.
        environ: the environment.
    """
    return {
        "system": system,
        "wsl": partial(wsl, root),
        "container": partial(container, root, environ),
        "user": partial(user, root),
        "host memory": partial(host_memory, root),
        "cgroup memory.max": partial(cgroup, root),
        "numa nodes": partial(numa, root),
        "descriptors": partial(descriptors, root),
        "vm.max_map_count": partial(mappings, root),
        "memlock": partial(memlock, root),
        "memfd": memfd,
        "write leases": partial(leases, root),
        "membarrier": membarriers,
        "pidfd_open": pidfd,
        "SO_PEERPIDFD": peer_pidfd,
        "SCM_RIGHTS": passing,
        "seccomp": partial(seccomp, root),
        "yama": partial(yama, root),
        "gpu device nodes": partial(device_nodes, root),
        "CUDA_VISIBLE_DEVICES": partial(visible_devices, root, environ),
        "mps": partial(mps, root, environ),
        "runtime directory": partial(runtime_directory, directory, environ),
        "daemon": partial(daemon, directory),
    }


# The system


def system() -> Finding:
    """Kernel and Python."""
    what_is = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() == "Linux":
        return Finding("system", "ok", what_is)
    return Finding("system", "fail", what_is, "run vmmd on Linux")


def wsl(root: Path) -> Finding:
    """Windows' Linux, where large exportable allocations fail."""
    if "microsoft" not in _read(root / "proc/sys/kernel/osrelease").lower() and not (root / "dev/dxg").exists():
        return Finding("wsl", "absent", "not WSL")
    return Finding(
        "wsl",
        "warn",
        "this is WSL2: exportable allocations of 4 GiB and more fail there",
        "keep slab_bytes far below 4 GiB (the default is), and see that the Windows driver is recent",
    )


def container(root: Path, environ: Mapping[str, str]) -> Finding:
    """Which container this is, as far as it shows."""
    which = _container(root, environ)
    if which is None:
        return Finding("container", "absent", "no container seen")
    return Finding(
        "container",
        "ok",
        f"in a container ({which}): GPUs' numbers, limits and users may differ from the host's",
        "name GPUs by UUID; share the runtime directory and the network namespace with clients in other containers",
    )


def _container(root: Path, environ: Mapping[str, str]) -> str | None:
    if "gvisor" in _read(root / "proc/version").lower():
        return "gVisor"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if named := _read(root / "run/systemd/container") or environ.get("container", ""):
        return named
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    first = _read(root / "proc/1/cgroup")
    return next((name for name in ("kubepods", "docker", "containerd", "libpod", "lxc") if name in first), None)


def user(root: Path) -> Finding:
    """The overflow user id stands for many people, so the broker refuses it."""
    uid, overflow = os.geteuid(), _integer(root / "proc/sys/kernel/overflowuid")
    if uid != (65534 if overflow is None else overflow):
        return Finding("user", "ok", f"user id {uid}")
    return Finding(
        "user",
        "fail",
        f"user id {uid} is the kernel's overflow id, which stands for users of another namespace: vmmd refuses it",
        "run as a user that this user namespace maps",
    )


# Memory and limits


def host_memory(root: Path) -> Finding:
    """What can be had now."""
    available_bytes = limits.HostLimits.read(root).available_bytes
    if not available_bytes:
        return Finding("host memory", "absent", "unknown: /proc/meminfo cannot be read")
    if available_bytes < 64 * MIB:
        return Finding(
            "host memory", "fail", f"{size(available_bytes)} can be had", "end other programs, or raise MemoryMax="
        )
    return Finding("host memory", "ok", f"{size(available_bytes)} can be had")


def cgroup(root: Path) -> Finding:
    """The cgroup's limit, which kills before the host runs short."""
    name = "cgroup memory.max"
    most_bytes = limits.HostLimits.read(root).cgroup_bytes_max
    if most_bytes is None:
        return Finding(name, "ok", "no limit")
    return Finding(
        name, "ok", size(most_bytes), "keep what vmmd may take of the host's memory (host_cap_bytes) below it"
    )


def numa(root: Path) -> Finding:
    """Memory nodes: which one a page lies on is settled by the process that fills it."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return Finding("numa nodes", "ok", "one memory node")
    return Finding(
        "numa nodes",
        "ok",
        f"{len(nodes)} memory nodes: host slabs lie on the node of the GPU that they serve (CUDA driver), or where "
        "the daemon's threads run (host driver)",
        "with the host driver, start the daemon with `numactl --interleave=all vmmd` or NUMAPolicy=interleave",
    )


def descriptors(root: Path) -> Finding:
    """One descriptor a slab, in the daemon and, while it imports, in the client."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what_is = f"soft limit {_limit(soft)}, hard limit {_limit(hard)}; vmmd and clients raise the soft one themselves"
    most = _UNLIMITED if hard == resource.RLIM_INFINITY else hard
    if most <= limits.DESCRIPTORS_SPARE:
        return Finding(
            "descriptors",
            "fail",
            f"{what_is}; {limits.DESCRIPTORS_SPARE} are needed before the first slab",
            "raise LimitNOFILE= or `ulimit -Hn`",
        )
    host = replace(_without_limits(root), descriptors_max=most)
    return _against_default_caps("descriptors", what_is, host, root)


def mappings(root: Path) -> Finding:
    """One mapping a slab in every client."""
    most = limits.HostLimits.read(root).mappings_max
    if most is None:
        return Finding("vm.max_map_count", "absent", "unknown: it cannot be read here")
    host = replace(_without_limits(root), mappings_max=most)
    return _against_default_caps("vm.max_map_count", f"{most} mappings a process", host, root)


def _without_limits(root: Path) -> limits.HostLimits:
    host = limits.HostLimits.read(root)
    return replace(host, descriptors_max=_UNLIMITED, mappings_max=None, cgroup_bytes_max=None)


def _against_default_caps(name: str, what_is: str, host: limits.HostLimits, root: Path) -> Finding:
    """Compares with the slabs that vmmd would make without a configuration."""
    gpus = [sign for sign in gpu_signs(root) if sign[-1].isdigit()]
    if gpus:
        driver, which = "cuda", f"GPUs of up to {size(_GPU_BYTES_MAX)} and all host memory that can be had"
        caps_bytes = {"host": host.available_bytes} | dict.fromkeys(gpus, _GPU_BYTES_MAX)
    else:
        driver, which = "host", "the host driver's default caps"
        caps_bytes = {"simulated devices and host tier": int(2 * HOST_SHARE * host.available_bytes)}
    found = limits.warnings(host, caps_bytes, Config().slab_bytes_for(driver))
    if not found:
        return Finding(name, "ok", what_is)
    problem, _, advice = found[0].partition(": set ")
    return Finding(name, "warn", f"{what_is}. For {which}: {problem}", f"set {advice}")


def memlock(root: Path) -> Finding:
    """Pinned memory; only a GPU's driver pins any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "no limit on locked memory")
    what_is = f"{size(soft)} may be locked (hard limit {_limit(hard, in_bytes=True)})"
    if not gpu_signs(root):
        return Finding("memlock", "ok", f"{what_is}; without a GPU nothing is")
    return Finding(
        "memlock",
        "ok",
        f"{what_is}; NVIDIA's driver usually pins memory without counting it here",
        "should pinning host memory fail, set LimitMEMLOCK=infinity or `ulimit -l unlimited`",
    )


# System calls


def memfd() -> Finding:
    """Sealed memfds, which slabs of the host driver, tables and pages are."""
    driver = HostDriver([], mmap.PAGESIZE)
    try:
        slab = driver.create(HOST_UUID, mmap.PAGESIZE)
        os.close(driver.export(slab, writable=False))
    except VmmError as error:
        return Finding(
            "memfd",
            "fail",
            error.message,
            "allow memfd_create, fcntl(F_ADD_SEALS) and re-opening through /proc/self/fd in this sandbox",
        )
    finally:
        driver.close()
    return Finding("memfd", "ok", "memfds can be sealed, and re-opened read-only")


def leases(root: Path) -> Finding:
    """Write leases tell whether anybody else still holds a memfd."""
    setting = _read(root / "proc/sys/fs/leases-enable")
    driver = HostDriver([], mmap.PAGESIZE)
    try:
        slab = driver.create(HOST_UUID, mmap.PAGESIZE)
        alone = driver.held_elsewhere(slab)
        fd = driver.export(slab, writable=False)
        shared = driver.held_elsewhere(slab)
        os.close(fd)
    finally:
        driver.close()
    if (alone, shared) == (False, True):
        return Finding("write leases", "ok", "the kernel tells who still holds a slab in host memory")
    if setting == "0":
        return Finding(
            "write leases",
            "warn",
            "fs.leases-enable is 0: vmmd must take clients' word for having let go of a slab in host memory",
            "set `sysctl fs.leases-enable=1`",
        )
    return Finding(
        "write leases",
        "warn",
        f"a lease on a memfd does not work here (held by nobody: {alone}, by somebody: {shared})",
        "allow fcntl(F_SETLEASE) in this sandbox; until then vmmd takes clients' word for having let go",
    )


def membarriers() -> Finding:
    """Clients register, the daemon issues."""
    if membarrier.register() and membarrier.issue():
        return Finding("membarrier", "ok", "global expedited barriers work")
    return Finding(
        "membarrier",
        "fail",
        "no global expedited barrier: an eviction could overlook a client that has just begun a step",
        "use Linux 4.16 or newer on x86_64 or aarch64, and allow membarrier in this sandbox",
    )


def pidfd() -> Finding:
    """By which the daemon notices that a client dies."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "pidfd_open", "fail", f"refused: {error.strerror}", "use Linux 5.3 or newer, and allow it in this sandbox"
        )
    return Finding("pidfd_open", "ok", "works")


def peer_pidfd() -> Finding:
    """Identifies a client without a race, also one of another pid namespace."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        try:
            os.close(struct.unpack("i", ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
        except OSError as error:
            return Finding(
                "SO_PEERPIDFD",
                "warn",
                f"refused: {error.strerror}; vmmd identifies clients with pidfd_open and a nonce, and refuses those "
                "of another pid namespace",
                "use Linux 6.5 or newer for clients in other containers",
            )
    return Finding("SO_PEERPIDFD", "ok", "works: clients of other pid namespaces are identified too")


def passing() -> Finding:
    """Descriptors with the sender's credentials over a socket of the broker's kind."""
    count = connection.DESCRIPTORS_MAX
    with ExitStack() as stack:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.enter_context(ours)
        stack.enter_context(theirs)
        fd = os.open("/dev/null", os.O_RDONLY)
        stack.callback(os.close, fd)
        try:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * count))])
            room = socket.CMSG_SPACE(4 * count) + socket.CMSG_SPACE(12)
            _, ancillary, _, _ = theirs.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
        except OSError as error:
            return Finding(
                "SCM_RIGHTS", "fail", f"passing {count} descriptors failed: {error.strerror}", _PASSING_ADVICE
            )
        received, pid = array.array("i"), 0
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                received.frombytes(data[: len(data) // 4 * 4])
            elif kind == socket.SCM_CREDENTIALS:
                pid = struct.unpack("iII", data[:12])[0]
        for one in received:
            stack.callback(os.close, one)
        if len(received) < count:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            what_is = f"{len(received)} of {count} descriptors arrived (limit of this process: {soft})"
            return Finding("SCM_RIGHTS", "fail", what_is, _PASSING_ADVICE)
        if pid != os.getpid():
            return Finding("SCM_RIGHTS", "fail", "a packet came without its sender's credentials", _PASSING_ADVICE)
    return Finding("SCM_RIGHTS", "ok", f"{count} descriptors and the sender's credentials arrive in one packet")


_PASSING_ADVICE = "raise `ulimit -n` to 1024 at least, or use a sandbox that has Unix sockets with SCM_RIGHTS"


def seccomp(root: Path) -> Finding:
    """Whether a filter may refuse what the other probes ask for."""
    mode = _status_field(root, "Seccomp")
    known = {"0": "off", "1": "strict", "2": "a filter is on"}
    if mode not in known:
        return Finding("seccomp", "absent", "unknown: /proc/self/status does not say")
    advice = "where another point says that a call is refused, allow that call in this filter" if mode == "2" else ""
    return Finding("seccomp", "ok", known[mode], advice)


def yama(root: Path) -> Finding:
    """Restricts ptrace and pidfd_getfd, which vmmd does without."""
    scope = _integer(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return Finding("yama", "absent", "no yama: ptrace is not restricted further")
    return Finding("yama", "ok", f"ptrace_scope is {scope}; vmmd needs no ptrace, descriptors are sent to it")


# GPUs, from outside CUDA


def gpu_signs(root: Path) -> list[str]:
    """What shows that this host has, or is meant to have, an NVIDIA GPU."""
    found = [f"/dev/{path.name}" for path in sorted((root / "dev").glob("nvidia[0-9]*"))]
    found += ["/dev/dxg"] if (root / "dev/dxg").exists() else []
    found += ["/proc/driver/nvidia"] if (root / "proc/driver/nvidia/version").exists() else []
    return found


def hides_gpus(environ: Mapping[str, str]) -> bool:
    """Whether this environment says that CUDA shall see no GPU at all."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and (not value.strip() or value.strip().startswith(("-", ",")))


def device_nodes(root: Path) -> Finding:
    """The nodes that CUDA opens: control, unified memory, and one a GPU."""
    name = "gpu device nodes"
    if (root / "dev/dxg").exists():
        return _openable(name, [root / "dev/dxg"])
    nodes = sorted((root / "dev").glob("nvidia*"))
    gpus = [node for node in nodes if node.name.removeprefix("nvidia").isdigit()]
    loaded = (root / "proc/driver/nvidia/version").exists()
    if not gpus and not loaded:
        return Finding(name, "absent", "no NVIDIA GPU: neither /dev/nvidia* nor the kernel module is there")
    missing = [node for node in ("nvidiactl", "nvidia-uvm") if not (root / "dev" / node).exists()]
    if not gpus or missing:
        lacking = ", ".join(f"/dev/{node}" for node in ([] if gpus else ["nvidia0"]) + missing)
        return Finding(
            name,
            "fail",
            f"{'the kernel module is loaded' if loaded else 'a GPU is there'}, but not {lacking}",
            "in a container, start it with its GPUs (docker: `--gpus all`; podman: `--device nvidia.com/gpu=all`); "
            "on a host, run `nvidia-modprobe -u -c 0`",
        )
    return _openable(name, [*gpus, root / "dev/nvidiactl", root / "dev/nvidia-uvm"])


def _openable(name: str, nodes: list[Path]) -> Finding:
    refused = [f"/dev/{node.name}" for node in nodes if not os.access(node, os.R_OK | os.W_OK)]
    if refused:
        return Finding(
            name,
            "fail",
            f"{', '.join(refused)} cannot be opened by user {os.geteuid()}",
            "give this user access to them (systemd: DeviceAllow=)",
        )
    return Finding(name, "ok", ", ".join(f"/dev/{node.name}" for node in nodes))


def visible_devices(root: Path, environ: Mapping[str, str]) -> Finding:
    """Which GPUs this environment lets CUDA see."""
    name = "CUDA_VISIBLE_DEVICES"
    value = environ.get(name)
    if value is None:
        return Finding(name, "ok", "not set: CUDA sees every GPU")
    if hides_gpus(environ):
        found = Finding(name, "warn", f"{value!r} hides every GPU", f"unset {name} to use GPUs")
        return found if gpu_signs(root) else found._replace(state="ok", what_to_do="")
    entries = [entry.strip() for entry in value.split(",")]
    if all(entry.startswith(("GPU-", "MIG-")) for entry in entries):
        return Finding(name, "ok", f"{len(entries)} by UUID: {value}")
    order = environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    return Finding(
        name,
        "warn",
        f"{value!r} names GPUs by number, in the order {order} of this environment; other processes may count "
        "differently, and CUDA ignores everything after the first number that does not exist",
        f"give vmmd and its clients UUIDs: {name}=GPU-... (`nvidia-smi -L` lists them)",
    )


def mps(root: Path, environ: Mapping[str, str]) -> Finding:
    """Whether CUDA programs here would share one context of the MPS server."""
    directory = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    pipes = directory or _DEFAULT_MPS_DIRECTORY
    pids = [
        path.parent.name
        for path in (root / "proc").glob("[0-9]*/comm")
        if _read(path).startswith("nvidia-cuda-mps")  # cut to 15 characters by the kernel
    ]
    has_pipe = (root / pipes.lstrip("/") / "control").exists()
    if not pids and not has_pipe:
        setting = f"; CUDA_MPS_PIPE_DIRECTORY is {directory}" if directory else ""
        return Finding("mps", "absent", f"no control daemon is running{setting}")
    who = f"a control daemon or server runs (pid {', '.join(pids)})" if pids else "a control pipe is there"
    if not has_pipe:
        return Finding("mps", "ok", f"{who}, but has no pipe in {pipes}: programs of this environment do not use it")
    return Finding(
        "mps",
        "warn",
        f"{who}, with its pipe in {pipes}: a fault in one MPS client ends the others on that GPU, vmmd included",
        "keep vmmd and its clients out of it by setting CUDA_MPS_PIPE_DIRECTORY to an empty directory for them",
    )


# The runtime directory


def runtime_directory(directory: Path | None, environ: Mapping[str, str]) -> Finding:
    """Whether a daemon could make its sockets there; nothing is made now."""
    name = "runtime directory"
    path = Path(os.path.abspath(directory or default_runtime_dir(environ)))
    choose = "choose another one with --runtime-dir"
    if problem := socket_path_problem(path / BROKER_SOCKET):
        return Finding(name, "fail", problem)
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            return Finding(name, "fail", f"{path.parent} does not exist, so {path.name} cannot be made there", choose)
        if not os.access(path.parent, os.W_OK | os.X_OK):
            return Finding(
                name, "fail", f"{path} does not exist, and user {os.geteuid()} cannot make it", f"make it, or {choose}"
            )
        return Finding(name, "ok", f"{path} does not exist yet; vmmd makes it")
    found = _directory_problem(path)
    if found is None:
        return Finding(name, "ok", f"{path} is this user's, and closed to others")
    if _answering(path) is not None:
        return Finding(name, "ok", f"{path} is another user's, whose daemon answers; no other can start there")
    return Finding(name, "fail", found)


def _directory_problem(path: Path) -> str | None:
    """What the daemon would say against a directory that exists."""
    try:
        runtime_dir.own_directory(path, 0o750, forbidden_mode=0o022)
        if (path / "private").exists():
            runtime_dir.own_directory(path / "private", 0o700, forbidden_mode=0o077)
    except VmmError as error:
        return error.message
    return None


def daemon(directory: Path | None) -> Iterator[Finding]:
    """Who answers where clients look."""
    places = connection.runtime_directories(None if directory is None else str(directory))
    for place in places:
        try:
            pid = _answering(place)
        except Unavailable as error:
            yield Finding("daemon", "fail", error.message, "end it with SIGKILL, and start it again")
            return
        if pid is not None:
            who = f" (pid {pid})" if pid > 1 else ", or systemd in its place," if pid == 1 else ""
            yield Finding("daemon", "ok", f"a daemon{who} answers at {place}")
            return
    left = [str(place / BROKER_SOCKET) for place in places if (place / BROKER_SOCKET).exists()]
    if left:
        what_is = f"nobody answers at {', '.join(left)}: a daemon that died left it, or it is not for this user"
        yield Finding("daemon", "absent", what_is, "start vmmd, or join the group that owns the socket")
        return
    yield Finding(
        "daemon",
        "absent",
        f"none at {', '.join(map(str, places))}",
        "start vmmd; without one, `strata-client generate` starts a private one",
    )


def _answering(directory: Path) -> int | None:
    """The pid of who listens in a directory (0: in another pid namespace), or None. Errors: `Unavailable`."""
    try:
        _, sock = connection.dial([directory])
    except connection.NoDaemon:
        return None
    with sock:
        pid: int = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid


# Small things


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _integer(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _status_field(root: Path, field: str) -> str:
    for line in _read(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return ""


def _limit(value: int, *, in_bytes: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "none"
    return size(value) if in_bytes else str(value)
