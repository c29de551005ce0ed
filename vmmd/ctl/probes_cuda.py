"""Probes of CUDA and of each GPU, in a child process that may hang or crash.

`findings` probes here and now; run as a program, this module writes each finding
as a line of JSON, after a line that names the probe. `Child` runs that program,
and gives up on a probe that does not come back.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from vmmd.config import GIB, MIB
from vmmd.ctl.findings import Finding, Probe, State, look
from vmmd.ctl.printers import size
from vmmd.ctl.probes_host import gpu_signs, hides_gpus
from vmmd.driver import cuda_calls
from vmmd.driver.cuda_calls import Gpu, call
from vmmd.driver.cuda_vmm import CudaDriver
from vmmd.driver.host_memfd import HOST_UUID
from vmmd.errors import DriverError, Exhausted, NoDevice
from vmmd.runtime_dir import device_owner

PROBE_TIMEOUT_S = 30.0
"""How long one probe may take; without NVIDIA's persistence daemon a GPU takes seconds to wake."""

END_TIMEOUT_S = 10.0
"""How long the child may take to end after its last word: the driver frees what GPUs have."""

_SLAB_BYTES = 64 * MIB
_LARGE_BYTES = 4 * GIB
_LARGE_SPARE_BYTES = GIB  # left free for others while the large allocation is tried
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

_INIT_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "see CUDA_VISIBLE_DEVICES and the device nodes; `nvidia-smi -L` lists what the host has",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start nvidia-fabricmanager, which NVSwitch systems need",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel module differ: reboot, or reload the module",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "remove CUDA's forward-compatibility libcuda from the search path",
    "CUDA_ERROR_OPERATING_SYSTEM": "see the device nodes, and what the container or systemd unit forbids",
    "CUDA_ERROR_UNKNOWN": "see /dev/nvidia-uvm (`nvidia-modprobe -u -c 0` makes it) and the kernel's log",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "see `mps`, or set CUDA_MPS_PIPE_DIRECTORY to an empty directory",
}


# In the child


def main() -> None:
    """Writes findings to standard output; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for item in findings():
            line = {"begin": item} if isinstance(item, str) else item._asdict()
            out.write(json.dumps(line) + "\n")
            out.flush()


def findings(root: Path = Path("/")) -> Iterator[str | Finding]:
    """All findings, and before those of a probe its name. Leaves nothing behind."""
    yield "cuda bindings"
    yield from look("cuda bindings", partial(bindings, root))
    yield "cuda driver"
    cu: Any = None
    for finding in look("cuda driver", partial(driver, root)):
        yield finding
        if finding.state in ("ok", "warn"):
            with suppress(NoDevice):
                cu = cuda_calls.bindings()
    if cu is None:
        return
    gpus: list[Gpu] = []
    yield "gpus"
    yield from look("gpus", partial(list_gpus, cu, gpus))
    for gpu in gpus:
        for name, probe in _probes_of(cu, gpu, gpus, root).items():
            yield f"{_short(gpu)} {name}"
            yield from look(f"{_short(gpu)} {name}", probe)
    if gpus:
        yield "vmmd's cuda driver"
        yield from look("vmmd's cuda driver", partial(daemon_driver, gpus))


def _probes_of(cu: Any, gpu: Gpu, gpus: Sequence[Gpu], root: Path) -> dict[str, Probe]:
    return {
        "memory": partial(memory, cu, gpu),
        "owner": partial(owner, gpu),
        "mig": partial(mig, gpu, root),
        "handle types": partial(handle_types, cu, gpu),
        "granularity": partial(granularity, cu, gpu),
        "peers": partial(peers, gpu, gpus),
        "slab": partial(slab, cu, gpu),
        "fresh slabs": partial(fresh, cu, gpu),
        "4 GiB allocation": partial(large, cu, gpu, root),
        "host slabs": partial(host_slabs, cu, gpu),
    }


# CUDA as a whole


def bindings(root: Path) -> Finding:
    """The Python package."""
    try:
        version = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return Finding(
            "cuda bindings",
            _state_without(root),
            "the Python package cuda-bindings is not installed",
            "to use a GPU, `pip install 'strata-vmm[cuda]'`" + _else_host(root),
        )
    return Finding("cuda bindings", "ok", f"cuda-bindings {version}")


def driver(root: Path) -> Finding:
    """libcuda, started; and the versions of it and of the kernel module."""
    name = "cuda driver"
    try:
        cu = cuda_calls.bindings()
    except NoDevice as error:
        code = getattr(error.__cause__, "name", "")
        advice = _INIT_ADVICE.get(code if isinstance(code, str) else "", "install NVIDIA's driver to use a GPU")
        return Finding(name, _state_without(root), f"missing: {error.message}", advice + _else_host(root))
    version = call(cu.cuDriverGetVersion)
    what_is = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if module := _module_version(root):
        what_is += f", kernel module {module}"
    with suppress(metadata.PackageNotFoundError):
        needed = int(metadata.version("cuda-bindings").split(".")[0])
        if version // 1000 < needed:
            return Finding(
                name,
                "warn",
                f"{what_is}: older than cuda-bindings {needed}, which may call what this driver lacks",
                f"install a driver for CUDA {needed}",
            )
    return Finding(name, "ok", what_is)


def _module_version(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    match = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return match[0] if match else ""


def _state_without(root: Path) -> State:
    """What is a failure where there is a GPU that is meant to be used is no fault elsewhere."""
    return "fail" if gpu_signs(root) and not hides_gpus(os.environ) else "absent"


def _else_host(root: Path) -> str:
    return "" if gpu_signs(root) else "; without one, vmmd simulates devices in the host's memory"


def list_gpus(cu: Any, found: list[Gpu]) -> Iterator[Finding]:
    """Fills `found` with the GPUs that vmmd can use, and says what each of the others lacks."""
    gpus, missing = cuda_calls.find_gpus(cu)
    found += gpus
    for lack in missing:
        yield Finding(
            "gpus",
            "warn" if gpus else "fail",
            f"missing: {lack}",
            "vmmd leaves this GPU alone; it needs Pascal or newer, a vGPU profile with unified memory, and Linux",
        )
    if gpus:
        yield Finding("gpus", "ok", f"{len(gpus)} with virtual memory management and export as POSIX descriptors")
    elif not missing:
        yield Finding("gpus", "absent", "CUDA lists none", "see CUDA_VISIBLE_DEVICES")


def daemon_driver(gpus: Sequence[Gpu]) -> Finding:
    """Starts the driver as the daemon would, and makes one slab of each device."""
    name = "vmmd's cuda driver"
    try:
        with ExitStack() as stack:
            cuda = CudaDriver(2 * _SLAB_BYTES, threads=1, chunk_bytes=MIB)
            stack.callback(cuda.close)
            for info in cuda.devices():
                cuda.destroy(cuda.create(info.uuid, _page_multiple(info.page_bytes)))
    except (DriverError, Exhausted) as error:
        if isinstance(error, Exhausted) or error.name == _OUT_OF_MEMORY:
            return Finding(name, "warn", f"it cannot start now: {error.message}", "end other programs on the GPUs")
        return Finding(name, "fail", error.message, "report it, with the output of `vmmctl doctor --output json`")
    return Finding(name, "ok", f"starts, and makes slabs on {len(gpus)} GPUs and {HOST_UUID}")


# One GPU


def memory(cu: Any, gpu: Gpu) -> Finding:
    """Who it is, and what is free."""
    with _context(cu, gpu):
        free_bytes, total_bytes = call(cu.cuMemGetInfo)
    what_is = f"{gpu.uuid}, {gpu.name}: {size(free_bytes)} of {size(total_bytes)} free"
    if free_bytes < 2 * _SLAB_BYTES:
        return Finding(_name(gpu, "memory"), "warn", what_is, "end other programs on it; `nvidia-smi` lists them")
    return Finding(_name(gpu, "memory"), "ok", what_is)


def owner(gpu: Gpu) -> Finding:
    """Whether a daemon manages it already."""
    pid = device_owner(gpu.uuid)
    if pid is None:
        return Finding(_name(gpu, "owner"), "ok", "no vmmd manages it")
    return Finding(_name(gpu, "owner"), "ok", f"managed by vmmd (pid {pid}); another one cannot have it")


def mig(gpu: Gpu, root: Path) -> Finding:
    """Slices of a GPU."""
    if " MIG " in f"{gpu.name} ":
        return Finding(
            _name(gpu, "mig"),
            "warn",
            "this is a slice (MIG): a process sees only one of them, and no peers",
            "run a vmmd for each slice, with CUDA_VISIBLE_DEVICES=MIG-... and a runtime directory of its own",
        )
    return Finding(_name(gpu, "mig"), "absent", "a whole GPU")


def handle_types(cu: Any, gpu: Gpu) -> Finding:
    """What its memory can be exported as."""
    attribute = cu.CUdevice_attribute
    kinds = {
        "POSIX descriptors": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        "fabric handles": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
    }
    known = {kind: code for kind, name in kinds.items() if (code := getattr(attribute, name, None)) is not None}
    device = call(cu.cuDeviceGet, gpu.ordinal)
    found = [kind for kind, code in known.items() if call(cu.cuDeviceGetAttribute, code, device)]
    return Finding(_name(gpu, "handle types"), "ok", f"exports as {' and '.join(found)}")


def granularity(cu: Any, gpu: Gpu) -> Finding:
    """The page: slab_bytes must be a multiple of it."""
    page_bytes = gpu.page_bytes
    if _SLAB_BYTES % page_bytes == 0:
        return Finding(_name(gpu, "granularity"), "ok", f"pages of {size(page_bytes)}")
    return Finding(
        _name(gpu, "granularity"),
        "warn",
        f"pages of {size(page_bytes)}, of which the default slab of {size(_SLAB_BYTES)} is no multiple",
        f"set slab_bytes to a multiple of {page_bytes}",
    )


def peers(gpu: Gpu, gpus: Sequence[Gpu]) -> Finding:
    """Which other GPUs reach its memory."""
    others = [other for other in gpus if other is not gpu]
    if not others:
        return Finding(_name(gpu, "peers"), "absent", "no other GPU is seen")
    reach = [other for other in others if other.ordinal in gpu.reached_by]
    if len(reach) == len(others):
        return Finding(_name(gpu, "peers"), "ok", f"reached by all {len(others)} other GPUs")
    without = ", ".join(_short(other) for other in others if other not in reach)
    return Finding(
        _name(gpu, "peers"),
        "ok",
        f"no path from {without}: experts in its memory are computed on it for them",
        "a path would be faster; `nvidia-smi topo -p2p r` says why there is none",
    )


def slab(cu: Any, gpu: Gpu) -> Finding:
    """One slab's life: created, exported, imported and mapped."""
    size_bytes = _page_multiple(gpu.page_bytes)
    name = _name(gpu, "slab")
    with _context(cu, gpu):
        free_bytes, _ = call(cu.cuMemGetInfo)
        try:
            with _slab(cu, gpu, size_bytes, imported=True):
                return Finding(name, "ok", f"{size(size_bytes)} created, exported, imported and mapped")
        except DriverError as error:
            if error.name == _OUT_OF_MEMORY and free_bytes < 2 * size_bytes:
                what_is = f"no room for {size(size_bytes)}: {size(free_bytes)} are free"
                return Finding(name, "warn", what_is, "end other programs on this GPU")
            what_is = f"{error.message} for {size(size_bytes)}, with {size(free_bytes)} free"
            advice = "in a container, allow the calls of NVIDIA's driver; on vGPU or WSL2, update the host's driver"
            return Finding(name, "fail", what_is, advice)


def fresh(cu: Any, gpu: Gpu) -> Finding:
    """Whether a new slab shows what was in an old one."""
    size_bytes = _page_multiple(gpu.page_bytes)
    name = _name(gpu, "fresh slabs")
    with _context(cu, gpu), ExitStack() as stack:
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(cu.cuStreamDestroy, stream)
        found = np.ones(size_bytes // 8, np.uint64)
        try:
            with _slab(cu, gpu, size_bytes) as address:
                call(cu.cuMemsetD8Async, address, 0xA5, size_bytes, stream)
                call(cu.cuStreamSynchronize, stream)
            with _slab(cu, gpu, size_bytes) as address:
                call(cu.cuMemcpyDtoH, found.ctypes.data, address, size_bytes)
        except DriverError as error:
            if error.name != _OUT_OF_MEMORY:
                raise
            return Finding(name, "absent", "not tried: no room", "vmmd clears new slabs itself then")
    if not found.any():
        return Finding(name, "ok", f"{size(size_bytes)} dirtied, released and created again: all zeros")
    return Finding(name, "warn", "new slabs show old bytes", "nothing: vmmd clears each one, which takes time")


def large(cu: Any, gpu: Gpu, root: Path) -> Finding:
    """4 GiB in one exportable allocation, which WSL2 refuses."""
    name = _name(gpu, "4 GiB allocation")
    if pid := device_owner(gpu.uuid):
        return Finding(name, "absent", f"not tried: vmmd (pid {pid}) manages this GPU", "stop it to try")
    with _context(cu, gpu):
        free_bytes, _ = call(cu.cuMemGetInfo)
        if free_bytes < _LARGE_BYTES + _LARGE_SPARE_BYTES:
            return Finding(name, "absent", f"not tried: only {size(free_bytes)} are free")
        try:
            with _slab(cu, gpu, _LARGE_BYTES, mapped=False):
                return Finding(name, "ok", f"{size(_LARGE_BYTES)} created and exported at once")
        except DriverError as error:
            where = "known of WSL2" if (root / "dev/dxg").exists() else "as under WSL2"
            return Finding(
                name,
                "warn",
                f"{error.message} with {size(free_bytes)} free: a limit of one exportable allocation ({where}), "
                "not a lack of memory",
                "keep slab_bytes far below 4 GiB; the default is, and nothing else is affected",
            )


def host_slabs(cu: Any, gpu: Gpu) -> Finding:
    """Host memory that this GPU reads and other processes import."""
    size_bytes = _page_multiple(gpu.page_bytes)
    name = _name(gpu, "host slabs")
    with _context(cu, gpu):
        try:
            with _slab(cu, gpu, size_bytes, imported=True, on_host=True):
                return Finding(
                    name, "ok", f"exportable host memory on node {gpu.numa_node}, mapped by the GPU and the host"
                )
        except DriverError as error:
            return Finding(
                name,
                "warn",
                f"{error.message} for {size(size_bytes)} of host memory on node {gpu.numa_node}: vmmd uses sealed "
                "memfds instead, which each process registers with CUDA",
                "in a container, allow mbind and set_mempolicy (docker: `--cap-add SYS_NICE`); else nothing",
            )


# Calls


@contextmanager
def _context(cu: Any, gpu: Gpu) -> Iterator[None]:
    """The GPU's primary context, current and given up at the end."""
    device = call(cu.cuDeviceGet, gpu.ordinal)
    context = call(cu.cuDevicePrimaryCtxRetain, device)
    try:
        with cuda_calls.current(cu, context):
            yield
    finally:
        cu.cuDevicePrimaryCtxRelease(device)


@contextmanager
def _slab(
    cu: Any, gpu: Gpu, size_bytes: int, *, imported: bool = False, on_host: bool = False, mapped: bool = True
) -> Iterator[int]:
    """An exported allocation's address (0 unless `mapped`); `imported` maps it through its descriptor."""
    kind = cuda_calls.descriptor_type(cu)
    prop = cuda_calls.host_memory(cu, gpu.numa_node) if on_host else cuda_calls.device_memory(cu, gpu.ordinal)
    with ExitStack() as undo:
        handle = call(cu.cuMemCreate, size_bytes, prop, 0)
        undo.callback(cu.cuMemRelease, handle)
        fd = int(call(cu.cuMemExportToShareableHandle, handle, kind, 0))
        undo.callback(os.close, fd)
        if imported:
            handle = call(cu.cuMemImportFromShareableHandle, fd, kind)
            undo.callback(cu.cuMemRelease, handle)
        if not mapped:
            yield 0
            return
        address = int(call(cu.cuMemAddressReserve, size_bytes, 0, 0, 0))
        undo.callback(cu.cuMemAddressFree, address, size_bytes)
        call(cu.cuMemMap, address, size_bytes, 0, handle, 0)
        undo.callback(cu.cuMemUnmap, address, size_bytes)
        who = cuda_calls.access(cu, [gpu.ordinal], gpu.numa_node if on_host else None)
        call(cu.cuMemSetAccess, address, size_bytes, who, len(who))
        yield address


def _page_multiple(page_bytes: int) -> int:
    return -(-_SLAB_BYTES // page_bytes) * page_bytes


def _short(gpu: Gpu) -> str:
    return gpu.uuid[: len("GPU-") + 8]


def _name(gpu: Gpu, probe: str) -> str:
    return f"{_short(gpu)} {probe}"


# In the parent


class Child:
    """The probing child, started at once so that it works while the host is probed; ended with the block."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        # -P: a directory named vmmd where the user happens to stand is not ours.
        command = command or [sys.executable, "-P", "-m", "vmmd.ctl.probes_cuda"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self._end(0)

    def findings(self, timeout_s: float = PROBE_TIMEOUT_S) -> Iterator[Finding]:
        """What the child reports; a probe that hangs or crashes becomes the last finding."""
        probe, is_hanging = "cuda", False
        for line in self._lines(timeout_s):
            if line is None:
                is_hanging = True
                break
            try:
                value = json.loads(line)
                if "begin" in value:
                    probe = str(value["begin"])
                    continue
                yield Finding(**value)
            except (ValueError, TypeError):
                yield Finding(probe, "warn", f"the probing process wrote what is no finding: {line[:200]!r}")
        code = self._end(0 if is_hanging else END_TIMEOUT_S)
        if is_hanging:
            what_is = f"this probe did not come back in {timeout_s:g} s"
            if code is None:
                what_is += "; its process cannot even be killed, so the driver hangs in the kernel"
            yield Finding(probe, "fail", what_is, "see the kernel's log (Xid); `nvidia-smi` may hang as well: reboot")
        elif code:
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            yield Finding(
                probe, "fail", f"the probing process {how} in this probe", "see the kernel's log, and update the driver"
            )

    def _lines(self, timeout_s: float) -> Iterator[bytes | None]:
        """Lines as they come; None, and no more, once none has come for the whole time."""
        assert self._process.stdout is not None
        fd, data = self._process.stdout.fileno(), b""
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select([fd], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                yield None
                return
            piece = os.read(fd, 65536)
            if not piece:
                return
            *lines, data = (data + piece).split(b"\n")
            if lines:
                deadline = time.monotonic() + timeout_s
            yield from lines

    def _end(self, grace_s: float) -> int | None:
        """Its exit status; killed where it stays. None: not even that ends it."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(grace_s)
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(2)
        return None


if __name__ == "__main__":
    main()
