"""What `vmmctl doctor` finds on hosts and GPUs that do not exist, and on this one."""

import errno
import json
import os
import resource
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.helpers.fake_cuda import MIB, FakeCuda, gpu_uuid
from vmmd.ctl import doctor as command
from vmmd.ctl import probes_cuda, probes_host
from vmmd.ctl.findings import Finding, look
from vmmd.driver import cuda_vmm, membarrier
from vmmd.driver.host_memfd import HostDriver

GIB = 1 << 30
FIRST = gpu_uuid(0)
SHORT = FIRST[:12]


def write(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def on_host(root: Path, name: str, environ: dict[str, str] | None = None, directory: Path | None = None) -> Finding:
    """The one finding of a probe of the host."""
    (finding,) = look(name, probes_host.probes(directory, root, environ or {})[name])
    assert finding.name == name
    return finding


# Findings


def test_a_probe_that_raises_is_a_finding() -> None:
    """What a probe found before it failed is kept, and the failure follows under its name."""

    def probe() -> Iterator[Finding]:
        yield Finding("first", "ok", "fine")
        raise ValueError("odd")

    first, second = look("second", probe)
    assert first.state == "ok"
    assert (second.name, second.state) == ("second", "warn")
    assert "ValueError: odd" in second.what_is
    assert second.what_to_do


# The host


def test_this_host_can_run_a_daemon(tmp_path: Path) -> None:
    """Every probe of this host comes back without an exception of its own, and leaves no descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    found = [f for name, probe in probes_host.probes(tmp_path).items() for f in look(name, probe)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert {f.name for f in found} == set(probes_host.probes(None))
    assert not [f for f in found if "this probe itself failed" in f.what_is]
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_tells_nothing(tmp_path: Path) -> None:
    """Missing files of the kernel are `absent` or `ok`, never a failure or an exception."""
    for name in ("wsl", "host memory", "cgroup memory.max", "numa nodes", "vm.max_map_count", "seccomp", "yama", "mps"):
        finding = on_host(tmp_path, name)
        assert finding.state in ("absent", "ok"), finding
        assert "itself failed" not in finding.what_is


@pytest.mark.parametrize(
    ("path", "text"), [("proc/sys/kernel/osrelease", "5.15.167.4-microsoft-standard-WSL2\n"), ("dev/dxg", "")]
)
def test_wsl(tmp_path: Path, path: str, text: str) -> None:
    """WSL2 is known by its kernel or its device, and what fails there is said."""
    write(tmp_path, path, text)
    finding = on_host(tmp_path, "wsl")
    assert finding.state == "warn"
    assert "4 GiB" in finding.what_is
    assert "slab_bytes" in finding.what_to_do


@pytest.mark.parametrize(
    ("path", "text", "which"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
        ("proc/version", "Linux version 4.4.0 (gVisor)", "gVisor"),
        ("proc/1/cgroup", "0::/kubepods/pod1/c2\n", "kubepods"),
    ],
)
def test_container(tmp_path: Path, path: str, text: str, which: str) -> None:
    """The kind of container is named."""
    assert on_host(tmp_path, "container").state == "absent"
    write(tmp_path, path, text)
    assert f"({which})" in on_host(tmp_path, "container").what_is


def test_kubernetes_is_known_by_its_environment(tmp_path: Path) -> None:
    """A pod has its service's address in the environment."""
    assert "Kubernetes" in on_host(tmp_path, "container", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).what_is


def test_overflow_user(tmp_path: Path) -> None:
    """A user whom the broker would refuse is told so."""
    write(tmp_path, "proc/sys/kernel/overflowuid", f"{os.geteuid()}\n")
    assert on_host(tmp_path, "user").state == "fail"
    write(tmp_path, "proc/sys/kernel/overflowuid", f"{os.geteuid() + 1}\n")
    assert on_host(tmp_path, "user").state == "ok"


def test_cgroup_limits(tmp_path: Path) -> None:
    """The least limit of version 2 and of version 1 is shown, where there is one."""
    write(tmp_path, "proc/self/cgroup", "0::/a.slice/b\n")
    write(tmp_path, "sys/fs/cgroup/a.slice/b/memory.max", f"{2 * GIB}\n")
    finding = on_host(tmp_path, "cgroup memory.max")
    assert (finding.state, finding.what_is) == ("ok", "2 GiB")
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/pod\n")
    write(tmp_path, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes", f"{GIB}\n")
    finding = on_host(tmp_path, "cgroup memory.max")
    assert (finding.state, finding.what_is) == ("ok", "1 GiB")
    write(tmp_path, "sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "9223372036854771712\n")
    finding = on_host(tmp_path, "cgroup memory.max")
    assert (finding.state, finding.what_is) == ("ok", "no limit")


def test_numa_nodes(tmp_path: Path) -> None:
    """Several memory nodes: where pages lie, and how to spread them."""
    for node in range(2):
        write(tmp_path, f"sys/devices/system/node/node{node}/cpulist", "0\n")
    finding = on_host(tmp_path, "numa nodes")
    assert finding.what_is.startswith("2 memory nodes")
    assert "--interleave" in finding.what_to_do


@pytest.mark.parametrize(("hard", "state"), [(300, "fail"), (4096, "warn"), (1 << 20, "ok")])
def test_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int, state: str) -> None:
    """The hard limit counts: too low for any slab fails, too low for the default caps warns with what to set."""
    write(tmp_path, "proc/meminfo", f"MemAvailable: {64 << 20} kB\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, hard))
    finding = on_host(tmp_path, "descriptors")
    assert finding.state == state
    assert f"hard limit {hard}" in finding.what_is
    assert (finding.what_to_do == "") == (state == "ok")
    if state == "warn":
        assert "LimitNOFILE=" in finding.what_to_do
        assert "slab_bytes" in finding.what_to_do


def test_descriptors_with_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPUs, slabs are larger: a limit that is low for the host driver will do."""
    write(tmp_path, "proc/meminfo", f"MemAvailable: {256 << 20} kB\n")
    write(tmp_path, "dev/nvidia0")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 20000))
    assert on_host(tmp_path, "descriptors").state == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert "GPUs of up to 256 GiB" in on_host(tmp_path, "descriptors").what_is


def test_mappings(tmp_path: Path) -> None:
    """A count of mappings below the default caps' slabs says what to set."""
    write(tmp_path, "proc/meminfo", f"MemAvailable: {256 << 20} kB\n")
    write(tmp_path, "proc/sys/vm/max_map_count", "65530\n")
    finding = on_host(tmp_path, "vm.max_map_count")
    assert finding.state == "warn"
    assert finding.what_to_do.startswith("set `sysctl vm.max_map_count=")


def test_little_memory(tmp_path: Path) -> None:
    """A host without room for anything fails."""
    write(tmp_path, "proc/meminfo", "MemAvailable: 1024 kB\n")
    assert on_host(tmp_path, "host memory").state == "fail"


def test_memlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on locked memory has advice only where there is a GPU."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 8 * MIB))
    assert on_host(tmp_path, "memlock").what_to_do == ""
    write(tmp_path, "dev/nvidia0")
    assert "LimitMEMLOCK" in on_host(tmp_path, "memlock").what_to_do


def test_leases_that_are_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fs.leases-enable=0 is named with its cure; a sandbox without leases is told apart from it."""
    monkeypatch.setattr(HostDriver, "held_elsewhere", lambda self, slab: None)
    assert "allow fcntl" in on_host(tmp_path, "write leases").what_to_do
    write(tmp_path, "proc/sys/fs/leases-enable", "0\n")
    finding = on_host(tmp_path, "write leases")
    assert finding.state == "warn"
    assert "fs.leases-enable=1" in finding.what_to_do


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("name", "where", "function", "state"),
    [
        ("pidfd_open", os, "pidfd_open", "fail"),
        ("memfd", os, "memfd_create", "fail"),
        ("membarrier", membarrier, "issue", "fail"),
    ],
)
def test_calls_that_a_sandbox_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: Any, function: str, state: str
) -> None:
    """A refused system call that a daemon needs is a failure with advice."""
    monkeypatch.setattr(where, function, (lambda: False) if where is membarrier else _refuse)
    finding = on_host(tmp_path, name)
    assert finding.state == state
    assert finding.what_to_do


def test_sockets_that_cannot_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No SO_PEERPIDFD is a warning, for there is another way; no SCM_RIGHTS is a failure."""
    monkeypatch.setattr(probes_host, "_SO_PEERPIDFD", 9999)
    finding = on_host(tmp_path, "SO_PEERPIDFD")
    assert finding.state == "warn"
    assert "pid namespace" in finding.what_is
    monkeypatch.setattr(socket.socket, "sendmsg", _refuse)
    assert on_host(tmp_path, "SCM_RIGHTS").state == "fail"


@pytest.mark.parametrize(("mode", "shown"), [("0", "off"), ("2", "a filter is on")])
def test_seccomp_and_yama(tmp_path: Path, mode: str, shown: str) -> None:
    """Modes are given in words; neither is a failure by itself."""
    write(tmp_path, "proc/self/status", f"Name:\tx\nSeccomp:\t{mode}\nSeccomp_filters:\t1\n")
    write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", "1\n")
    assert on_host(tmp_path, "seccomp").what_is == shown
    finding = on_host(tmp_path, "yama")
    assert finding.state == "ok"
    assert "ptrace_scope is 1" in finding.what_is


def test_device_nodes(tmp_path: Path) -> None:
    """A loaded module without nodes, and nodes without unified memory, fail; all of them are fine."""
    assert on_host(tmp_path, "gpu device nodes").state == "absent"
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: 580\n")
    finding = on_host(tmp_path, "gpu device nodes")
    assert finding.state == "fail"
    assert "/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm" in finding.what_is
    assert "--gpus all" in finding.what_to_do
    for node in ("nvidia0", "nvidiactl"):
        write(tmp_path, f"dev/{node}")
    assert "but not /dev/nvidia-uvm" in on_host(tmp_path, "gpu device nodes").what_is
    write(tmp_path, "dev/nvidia-uvm")
    finding = on_host(tmp_path, "gpu device nodes")
    assert (finding.state, finding.what_is) == ("ok", "/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm")


def test_device_nodes_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without permission is named."""
    for node in ("nvidia0", "nvidiactl", "nvidia-uvm"):
        write(tmp_path, f"dev/{node}")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia0")
    finding = on_host(tmp_path, "gpu device nodes")
    assert finding.state == "fail"
    assert finding.what_is.startswith("/dev/nvidia0 cannot be opened")


@pytest.mark.parametrize(
    ("value", "has_gpu", "state"),
    [
        (None, True, "ok"),
        ("", True, "warn"),
        ("", False, "ok"),
        ("-1", True, "warn"),
        ("1,0", True, "warn"),
        ("GPU-6c1d,GPU-7d2e", True, "ok"),
        ("GPU-6c1d,1", True, "warn"),
    ],
)
def test_visible_devices(tmp_path: Path, value: str | None, has_gpu: bool, state: str) -> None:
    """UUIDs are fine; numbers mean different GPUs elsewhere; nothing at all hides GPUs that are there."""
    if has_gpu:
        write(tmp_path, "dev/nvidia0")
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert on_host(tmp_path, "CUDA_VISIBLE_DEVICES", environ).state == state


def test_mps(tmp_path: Path) -> None:
    """A control daemon counts only where this environment's pipe directory leads to it."""
    assert on_host(tmp_path, "mps").state == "absent"
    write(tmp_path, "proc/77/comm", "nvidia-cuda-mps\n")
    finding = on_host(tmp_path, "mps")
    assert finding.state == "ok"
    assert "pid 77" in finding.what_is
    write(tmp_path, "tmp/nvidia-mps/control")
    finding = on_host(tmp_path, "mps")
    assert finding.state == "warn"
    assert "CUDA_MPS_PIPE_DIRECTORY" in finding.what_to_do
    assert on_host(tmp_path, "mps", {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}).state == "ok"


def test_runtime_directory(tmp_path: Path) -> None:
    """What the daemon would refuse is a failure in the daemon's words; nothing is made."""
    name = "runtime directory"
    directory = tmp_path / "run"
    assert on_host(tmp_path, name, directory=directory).what_is == f"{directory} does not exist yet; vmmd makes it"
    assert not directory.exists()
    assert on_host(tmp_path, name, directory=tmp_path / "no" / "where").state == "fail"
    assert on_host(tmp_path, name, directory=tmp_path / ("x" * 108)).state == "fail"
    directory.mkdir(0o750)
    assert on_host(tmp_path, name, directory=directory).state == "ok"
    directory.chmod(0o777)
    finding = on_host(tmp_path, name, directory=directory)
    assert finding.state == "fail"
    assert "mode 0777" in finding.what_is
    write(tmp_path, "file")
    assert "no directory" in on_host(tmp_path, name, directory=tmp_path / "file").what_is
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_daemon(tmp_path: Path) -> None:
    """Nobody, a dead daemon's socket, and one that answers are told apart."""
    assert "none at" in on_host(tmp_path, "daemon", directory=tmp_path).what_is
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(tmp_path / "handles.sock"))
    listener.listen(1)
    finding = on_host(tmp_path, "daemon", directory=tmp_path)
    assert finding.what_is == f"a daemon (pid {os.getpid()}) answers at {tmp_path}"
    listener.close()
    finding = on_host(tmp_path, "daemon", directory=tmp_path)
    assert finding.state == "absent"
    assert "nobody answers" in finding.what_is


# CUDA


class DoctorCuda(FakeCuda):
    """The stand-in with what only doctor asks for; a device's attributes can be set by their name's end."""

    def __init__(self, *, version: int = 13000, largest_bytes: int = 1 << 40, **options: Any) -> None:
        self.version, self.largest_bytes = version, largest_bytes
        self.name = b"fake\0"
        super().__init__(**options)

    def cuDriverGetVersion(self) -> int:
        return self.version

    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return self.name

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> int:
        self._require(size <= self.largest_bytes, "CUDA_ERROR_OUT_OF_MEMORY")
        return super().cuMemCreate(size, prop, flags)


Install = Callable[..., DoctorCuda]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a stand-in in place; afterwards nothing of it is left, and no descriptor."""
    monkeypatch.setattr(cuda_vmm, "FRESH_CHECK_BYTES", 1)
    monkeypatch.setattr(probes_cuda, "_SLAB_BYTES", 4 * MIB)
    monkeypatch.setattr(metadata, "version", lambda _: "13.0.1")
    before = len(os.listdir("/proc/self/fd"))
    fakes: list[DoctorCuda] = []

    def make(**options: Any) -> DoctorCuda:
        fakes.append(DoctorCuda(**{"total_bytes": 8 * GIB} | options))
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fakes[-1].module)
        return fakes[-1]

    yield make
    for fake in fakes:
        assert not any(fake.live().values()), fake.live()
    assert len(os.listdir("/proc/self/fd")) == before


def cuda_findings(root: Path) -> dict[str, Finding]:
    return {f.name: f for f in probes_cuda.findings(root) if isinstance(f, Finding)}


def test_two_good_gpus(tmp_path: Path, install: Install) -> None:
    """Everything is fine, each GPU is shown by UUID, and all that was made is given back."""
    install()
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue\n")
    found = cuda_findings(tmp_path)
    assert [f for f in found.values() if f.state not in ("ok", "absent")] == []
    assert found["cuda driver"].what_is == "CUDA 13.0, kernel module 580.159.03"
    shown = "\n".join(f.what_is for f in probes_cuda.findings(tmp_path) if isinstance(f, Finding))
    assert gpu_uuid(0) in shown
    assert gpu_uuid(1) in shown
    assert "pages of 2 MiB" in found[f"{SHORT} granularity"].what_is
    assert "reached by all 1" in found[f"{SHORT} peers"].what_is
    assert "all zeros" in found[f"{SHORT} fresh slabs"].what_is
    assert found[f"{SHORT} 4 GiB allocation"].state == "ok"
    assert "node 0" in found[f"{SHORT} host slabs"].what_is
    assert found["vmmd's cuda driver"].state == "ok"


def test_every_probe_is_named_before_it_runs(tmp_path: Path, install: Install) -> None:
    """Whatever hangs can be named: a finding comes after the name of its probe."""
    install(gpus=1)
    probe = ""
    for item in probes_cuda.findings(tmp_path):
        if isinstance(item, str):
            probe = item
        else:
            assert item.name == probe


@pytest.mark.parametrize(("signs", "state"), [((), "absent"), (("dev/nvidia0",), "fail")])
def test_no_cuda(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch, signs: tuple[str, ...], state: str
) -> None:
    """Without CUDA all is well, unless the host shows a GPU that the environment does not hide."""
    for sign in signs:
        write(tmp_path, sign)
    install(gpus=0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = cuda_findings(tmp_path)
    assert list(found) == ["cuda bindings", "cuda driver"]
    assert found["cuda driver"].state == state
    assert "CUDA_VISIBLE_DEVICES" in found["cuda driver"].what_to_do
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cuda_findings(tmp_path)["cuda driver"].state == "absent"


def test_no_bindings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing package is named with how to install it."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    found = cuda_findings(tmp_path)
    assert found["cuda bindings"].state == "absent"
    assert "strata-vmm[cuda]" in found["cuda bindings"].what_to_do


def test_an_old_driver(tmp_path: Path, install: Install) -> None:
    """A driver older than the bindings is a warning, and the probes go on."""
    install(gpus=1, version=12080)
    found = cuda_findings(tmp_path)
    assert found["cuda driver"].state == "warn"
    assert found["cuda driver"].what_is.startswith("CUDA 12.8")
    assert f"{SHORT} slab" in found


def test_gpus_without_virtual_memory(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """No usable GPU is a failure that names what it lacks."""
    fake = install(gpus=1)
    monkeypatch.setattr(fake.module, "cuDeviceGetAttribute", lambda code, device: (0, 0))
    found = cuda_findings(tmp_path)
    assert found["gpus"].state == "fail"
    assert "virtual memory management" in found["gpus"].what_is
    assert FIRST in found["gpus"].what_is


@pytest.mark.parametrize("wsl", [False, True])
def test_large_allocations_that_fail(tmp_path: Path, install: Install, wsl: bool) -> None:
    """A refused 4 GiB says that memory is not what lacks, and that slabs are not affected."""
    if wsl:
        write(tmp_path, "dev/dxg")
    install(gpus=1, largest_bytes=2 * GIB)
    found = cuda_findings(tmp_path)
    finding = found[f"{SHORT} 4 GiB allocation"]
    assert finding.state == "warn"
    assert "not a lack of memory" in finding.what_is
    assert "8 GiB free" in finding.what_is
    assert ("known of WSL2" in finding.what_is) == wsl
    assert found[f"{SHORT} slab"].state == "ok"


def test_a_first_slab_that_fails(tmp_path: Path, install: Install) -> None:
    """Out of memory with memory free is a failure that gives both sizes."""
    install(gpus=1, largest_bytes=MIB)
    finding = cuda_findings(tmp_path)[f"{SHORT} slab"]
    assert finding.state == "fail"
    assert "CUDA_ERROR_OUT_OF_MEMORY for 4 MiB, with 8 GiB free" in finding.what_is


def test_a_full_card(tmp_path: Path, install: Install) -> None:
    """A card without room is a warning, and what needs room is not tried."""
    install(gpus=1, total_bytes=2 * MIB)
    found = cuda_findings(tmp_path)
    assert found[f"{SHORT} slab"].state == "warn"
    assert "not tried" in found[f"{SHORT} fresh slabs"].what_is
    assert "not tried" in found[f"{SHORT} 4 GiB allocation"].what_is
    assert "fail" not in {f.state for f in found.values()}


def test_old_bytes_and_refused_host_memory(tmp_path: Path, install: Install) -> None:
    """New slabs with old bytes, and host memory that cannot be exported, are warnings with what vmmd does."""
    install(gpus=1, dirty=True, host_memory=False)
    found = cuda_findings(tmp_path)
    assert found[f"{SHORT} fresh slabs"].state == "warn"
    assert found[f"{SHORT} host slabs"].state == "warn"
    assert "sealed memfds" in found[f"{SHORT} host slabs"].what_is
    assert found["vmmd's cuda driver"].state == "ok"


def test_no_peers_and_a_slice(tmp_path: Path, install: Install) -> None:
    """A missing path is named by UUID, and a MIG slice is known by its name."""
    fake = install(peers=False)
    fake.name = b"NVIDIA H200 MIG 1g.18gb\0"
    found = cuda_findings(tmp_path)
    assert f"no path from {gpu_uuid(1)[:12]}" in found[f"{SHORT} peers"].what_is
    assert found[f"{SHORT} mig"].state == "warn"


def test_a_gpu_that_a_daemon_manages(tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's pid is shown, and its GPU is not filled for a trial."""
    install(gpus=1)
    monkeypatch.setattr(probes_cuda, "device_owner", lambda uuid: 4711)
    found = cuda_findings(tmp_path)
    assert "pid 4711" in found[f"{SHORT} owner"].what_is
    assert found[f"{SHORT} 4 GiB allocation"].state == "absent"


def test_a_call_that_fails_anywhere(tmp_path: Path, install: Install) -> None:
    """Whichever driver call fails, probes end in findings, and nothing is left behind."""
    fake = install(gpus=1)
    cuda_findings(tmp_path)
    for function in sorted(name for name in fake.calls if not name.endswith(("Release", "Free", "Unmap", "Destroy"))):
        if function in ("cuMemFreeHost", "cuCtxPopCurrent", "cuMemHostUnregister"):
            continue
        fake = install(gpus=1)
        fake.fail_at(function, 1, "CUDA_ERROR_NOT_SUPPORTED")
        found = cuda_findings(tmp_path)
        assert [f for f in found.values() if f.state in ("fail", "warn", "absent")], function
        assert not any(fake.live().values()), function


# The child


def child(code: str, timeout_s: float = 60) -> list[Finding]:
    """What a child that has begun to write leaves."""
    with probes_cuda.Child([sys.executable, "-c", code]) as probing:
        assert select.select([probing._process.stdout], [], [], 60)[0]
        return list(probing.findings(timeout_s))


BEGIN = "import json, os, time; print(json.dumps({'begin': 'GPU-1 slab'}), flush=True); "


def test_a_driver_that_hangs() -> None:
    """A probe that does not come back is named, and its process ended."""
    (finding,) = child(BEGIN + "time.sleep(100)", timeout_s=1)
    assert (finding.name, finding.state) == ("GPU-1 slab", "fail")
    assert "did not come back in 1 s" in finding.what_is


def test_a_child_is_not_left_behind() -> None:
    """Leaving early, as with Ctrl-C, ends the probing process."""
    with probes_cuda.Child([sys.executable, "-c", "import time; time.sleep(100)"]) as probing:
        process = probing._process
    assert process.poll() is not None


def test_a_driver_that_crashes() -> None:
    """A signal that ends the probing process is named with the probe, after what was found before."""
    fine = "print(json.dumps({'name': 'a', 'state': 'ok', 'what_is': 'x', 'what_to_do': ''}), flush=True); "
    first, last = child(BEGIN + fine + "os.abort()")
    assert first == Finding("a", "ok", "x")
    assert (last.name, last.state) == ("GPU-1 slab", "fail")
    assert "SIGABRT" in last.what_is


def test_a_child_that_takes_long_to_end() -> None:
    """What a driver does after the last probe, as its process ends, is no failure of that probe."""
    assert child(BEGIN + "os.close(1); time.sleep(2.5); os._exit(0)") == []


def test_a_child_that_writes_nonsense() -> None:
    """Anything that is no finding is a warning, not an exception."""
    found = child(BEGIN + "print('nonsense'); print('[1]'); print('{\"name\": 1}')")
    assert [f.state for f in found] == ["warn"] * 3


# The command


def test_command_in_json() -> None:
    """The real command, with its real child, gives one object and an exit status that agrees with it."""
    result = subprocess.run(
        [sys.executable, "-m", "vmmd.ctl.main", "doctor", "--output", "json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == ""
    found = json.loads(result.stdout)["findings"]
    assert {"memfd", "cuda bindings"} <= {f["name"] for f in found}
    assert {"name", "state", "what_is", "what_to_do"} == set(found[0])
    assert result.returncode == int(any(f["state"] == "fail" for f in found))


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("absent", 0), ("warn", 0), ("fail", 1)])
def test_exit_status_and_table(monkeypatch: pytest.MonkeyPatch, state: Any, status: int) -> None:
    """Only a failure gives status 1; control characters are escaped, markup is text, a pipe has no colour."""
    found = [Finding("evil\x1b[31m", state, "name [bold]x\n\u202e", "do \x9b1m"), Finding("b", "ok", "fine")]
    monkeypatch.setattr(command, "examine", lambda directory: iter(found))
    result = CliRunner().invoke(command.doctor, [])
    assert result.exit_code == status
    assert "\x1b" not in result.output
    assert "\x9b" not in result.output
    assert r"evil\x1b[31m" in result.output
    assert r"name [bold]x\x0a\u202e" in result.output
    assert r"→ do \x9b1m" in result.output
    assert ("1 of 2 points fail" in result.output) == (state == "fail")
