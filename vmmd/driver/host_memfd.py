"""The host driver: slabs are sealed memfds, mapped over reserved addresses.

Same semantics as the CUDA driver, with real descriptors and real processes, and
no GPU: the embedded default where none is found, and what CI runs on. Its
devices are the host's RAM and any number of simulated computing devices.

Every export is an open file of its own. That is what makes `held_elsewhere`
exact: the kernel grants a write lease on the daemon's descriptor only while the
inode has no other open file, and an open file lives as long as any descriptor,
mapping, forked child's mapping or message in flight that refers to it. The file
that memfd_create itself returns is not counted, so it is replaced at once by a
re-opened one.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vmmd.driver.base import (
    Copy,
    DeviceInfo,
    DeviceMemory,
    FileSource,
    ShortRead,
    Slab,
    check_bounds,
    check_copy,
    check_room,
)
from vmmd.errors import DriverError, Exhausted, InvalidRequest, NotFound

HOST_UUID = "HOST-RAM"

_SLAB_NAME = "strata-slab"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; vm.memfd_noexec=2 refuses memfds without it
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_PROT_NONE = 0
_MAP_FAILED = ctypes.c_void_p(-1).value
_THREADS_FROM_BYTES = 4 << 20  # a smaller fill is over before threads have started

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,  # off_t on the 64-bit systems that vmmd runs on
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Memfd:
    """The daemon's own hold on a slab: one open descriptor, or -1 once destroyed."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd


class HostDriver:
    """Daemon side of the host driver; see `vmmd.driver.base.Driver`.

    Args:
        devices: simulated computing devices as (uuid, name, total_bytes).
        host_total_bytes: what the host's RAM, the last device, offers.
        page_bytes: allocation granularity, a multiple of the system's page.
        threads_max: how many threads a large fill uses.
        peer_paths: whether the simulated devices read each other's slabs where they are.

    `memory` accounts slabs against these totals. `create`, `fill` and `read` may
    run in several threads at once.
    """

    name = "host"

    def __init__(
        self,
        devices: Sequence[tuple[str, str, int]],
        host_total_bytes: int,
        page_bytes: int = mmap.PAGESIZE,
        threads_max: int = 4,
        *,
        peer_paths: bool = True,
    ) -> None:
        if page_bytes <= 0 or page_bytes % mmap.PAGESIZE:
            raise InvalidRequest(f"page of {page_bytes} bytes: must be a multiple of the system's {mmap.PAGESIZE}")
        all_devices = [*devices, (HOST_UUID, "host memory", host_total_bytes)]
        simulated = frozenset(uuid for uuid, _, _ in devices) if peer_paths else frozenset()
        self._devices = {
            uuid: DeviceInfo(
                uuid,
                name,
                total_bytes,
                page_bytes,
                is_host=uuid == HOST_UUID,
                reached_by=simulated - {uuid} if uuid != HOST_UUID else frozenset(),
            )
            for uuid, name, total_bytes in all_devices
        }
        if len(self._devices) != len(all_devices):
            raise InvalidRequest(f"device uuids must differ: {', '.join(uuid for uuid, _, _ in all_devices)}")
        self._lock = threading.Lock()  # guards the two accounts and the set of slabs
        self._slab_bytes = dict.fromkeys(self._devices, 0)
        self._unmanaged_bytes = dict.fromkeys(self._devices, 0)
        self._live: set[_Memfd] = set()
        self._failed: set[str] = set()
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="fill")

    def devices(self) -> Sequence[DeviceInfo]:
        """All devices, the host's RAM last."""
        return list(self._devices.values())

    def memory(self, device_uuid: str) -> DeviceMemory:
        """Total and free bytes: total less slabs and simulated other programs."""
        total_bytes = self._device(device_uuid).total_bytes
        with self._lock:
            used_bytes = self._slab_bytes[device_uuid] + self._unmanaged_bytes[device_uuid]
        return DeviceMemory(total_bytes, max(0, total_bytes - used_bytes))

    def set_unmanaged_bytes(self, device_uuid: str, size_bytes: int) -> None:
        """Simulates other programs that use so much of a device (for tests)."""
        self._device(device_uuid)
        with self._lock:
            self._unmanaged_bytes[device_uuid] = size_bytes

    def failed_devices(self) -> Sequence[str]:
        """Devices that a test has failed."""
        return sorted(self._failed)

    def set_failed(self, device_uuid: str) -> None:
        """Simulates that a device's context died (for tests)."""
        self._device(device_uuid)
        self._failed.add(device_uuid)

    def create(self, device_uuid: str, size_bytes: int) -> Slab:
        """Allocates a slab of zeros; its memory is there when this returns."""
        device = self._device(device_uuid)
        if size_bytes <= 0 or size_bytes % device.page_bytes:
            raise InvalidRequest(f"slab of {size_bytes} bytes: must be a multiple of {device.page_bytes} bytes")
        with self._lock:
            used_bytes = self._slab_bytes[device_uuid] + self._unmanaged_bytes[device_uuid]
            free_bytes = max(0, device.total_bytes - used_bytes)
            if size_bytes > free_bytes:
                raise Exhausted(
                    f"device {device_uuid} has no room for a slab of {size_bytes} bytes: "
                    f"{free_bytes} of {device.total_bytes} bytes are free",
                    size_bytes,
                    free_bytes,
                )
            self._slab_bytes[device_uuid] += size_bytes
        try:
            handle = _Memfd(_create_memfd(size_bytes))
        except OSError as error:
            self._uncount(device_uuid, size_bytes)
            raise create_failed(error, size_bytes) from error
        except BaseException:
            self._uncount(device_uuid, size_bytes)
            raise
        with self._lock:
            self._live.add(handle)
        return Slab(device_uuid, size_bytes, handle)

    def export(self, slab: Slab, *, writable: bool) -> int:
        """A new close-on-exec descriptor with an open file of its own; the caller closes it.

        One that is not `writable` cannot be mapped for writing, nor re-opened for
        it by another user.
        """
        try:
            return _reopen(_fd(slab), os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise create_failed(error, slab.size_bytes) from error

    def held_elsewhere(self, slab: Slab) -> bool | None:
        """Whether any other descriptor, mapping or message in flight holds the slab; 6 µs.

        None where the kernel gives no leases (fs.leases-enable=0).
        """
        fd = _fd(slab)
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return True
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise _driver_error("fcntl(F_SETLEASE)", error) from error
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    def holders(self, slabs: Sequence[Slab]) -> list[int]:
        """By the descriptors and mappings of the processes that this one may look at."""
        inodes: dict[int, int] = {}
        for i, slab in enumerate(slabs):
            with suppress(InvalidRequest):  # destroyed meanwhile
                inodes[os.fstat(_fd(slab)).st_ino] = i
        found = [0] * len(slabs)
        for directory in Path("/proc").glob("[0-9]*"):
            if int(directory.name) != os.getpid():
                for inode in _memfds_of(directory) & inodes.keys():
                    found[inodes[inode]] = int(directory.name)
        return found

    def fill(self, copies: Sequence[Copy]) -> None:
        """Reads straight into temporary mappings, one per target slab and call.

        A large fill of several slabs uses a few threads: reading releases the GIL.
        """
        by_target: dict[_Memfd, list[Copy]] = {}
        for copy in copies:
            check_copy(copy)
            by_target.setdefault(copy.target.handle, []).append(copy)
        jobs = list(by_target.values())
        if len(jobs) < 2 or sum(copy.size_bytes for copy in copies) < _THREADS_FROM_BYTES:
            for job in jobs:
                _fill_slab(job)
            return
        futures = [self._threads.submit(_fill_slab, job) for job in jobs]
        first_error: BaseException | None = None
        for future in futures:  # all of them: no thread may still write once fill has returned
            if first_error is not None:
                future.cancel()
            if not future.cancelled():
                first_error = first_error or future.exception()
        if first_error is not None:
            raise first_error

    def read(self, slab: Slab, offset_bytes: int, length_bytes: int) -> bytes:
        """A copy of the slab's bytes."""
        check_bounds(slab, offset_bytes, length_bytes)
        data = bytearray(length_bytes)
        read_into(memoryview(data), _fd(slab), offset_bytes)
        return bytes(data)

    def destroy(self, slab: Slab) -> None:
        """Closes the daemon's descriptor; a second call does nothing."""
        handle: _Memfd = slab.handle
        with self._lock:
            if handle not in self._live:
                return
            self._live.remove(handle)
            self._slab_bytes[slab.device_uuid] -= slab.size_bytes
            fd, handle.fd = handle.fd, -1
        os.close(fd)

    def close(self) -> None:
        """Waits for fills, then gives up every slab."""
        self._threads.shutdown()
        with self._lock:
            live, self._live = self._live, set()
            self._slab_bytes = dict.fromkeys(self._devices, 0)
        for handle in live:
            fd, handle.fd = handle.fd, -1
            os.close(fd)

    def _device(self, uuid: str) -> DeviceInfo:
        device = self._devices.get(uuid)
        if device is None:
            raise NotFound(f"no device {uuid!r}; there are {', '.join(self._devices)}")
        return device

    def _uncount(self, device_uuid: str, size_bytes: int) -> None:
        with self._lock:
            self._slab_bytes[device_uuid] -= size_bytes


class HostMapper:
    """Client side of the host driver; see `vmmd.driver.base.Mapper`."""

    def reserve(self, slab_bytes: int, slabs_max: int) -> "HostReservation":
        """Reserves ``slabs_max * slab_bytes`` of addresses; no memory is used."""
        return HostReservation(slab_bytes, slabs_max)


class HostReservation:
    """A range's addresses in this process; for one thread at a time."""

    ordinal: int | None = None

    def __init__(self, slab_bytes: int, slabs_max: int) -> None:
        if slab_bytes <= 0 or slab_bytes % mmap.PAGESIZE or slabs_max <= 0:
            raise InvalidRequest(
                f"range of {slabs_max} slabs of {slab_bytes} bytes: at least one slab, of a multiple of {mmap.PAGESIZE}"
            )
        self.slab_bytes = slab_bytes
        self.slabs_max = slabs_max
        self._mapped: set[int] = set()
        self._base = _reserve(0, slab_bytes * slabs_max, 0)
        self._open = True

    def map(self, first_index: int, fds: Sequence[int], *, writable: bool) -> None:
        """Maps slabs at consecutive indexes, all or none; closes every descriptor in any case."""
        touched: list[int] = []
        try:
            self._check_room(first_index, len(fds))
            for fd in fds:
                self._check_slab(fd)
            prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            for index, fd in enumerate(fds, first_index):
                touched.append(index)
                address = self._address(index)
                _mmap(address, self.slab_bytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd)
                if _libc.madvise(address, self.slab_bytes, _MADV_DONTFORK):
                    raise _driver_error("madvise(MADV_DONTFORK)", _last_error())
            self._mapped.update(touched)
        except BaseException:
            for index in touched:
                with suppress(DriverError):
                    _reserve(self._address(index), self.slab_bytes, _MAP_FIXED)
            raise
        finally:
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)

    def unmap(self, index: int) -> None:
        """Gives the slab up; its addresses stay reserved."""
        if index not in self._mapped:
            raise InvalidRequest(f"slab {index} of this range is not mapped")
        _reserve(self._address(index), self.slab_bytes, _MAP_FIXED)
        self._mapped.remove(index)

    def is_mapped(self, index: int) -> bool:
        """Whether slab `index` is mapped."""
        return index in self._mapped

    def view(self) -> npt.NDArray[np.uint8]:
        """The whole range as ``[slabs_max * slab_bytes]`` uint8, valid until `close`.

        Reading where nothing is mapped, or writing where a slab is mapped
        read-only, ends the process with SIGSEGV.
        """
        if not self._open:
            raise InvalidRequest("this range is closed")
        size_bytes = self.slab_bytes * self.slabs_max
        return np.frombuffer(_window(self._base, size_bytes), dtype=np.uint8)

    def synchronize(self) -> None:
        """Nothing runs beside the processor."""

    def close(self) -> None:
        """Unmaps everything and gives the addresses back; a second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._mapped.clear()
        if _libc.munmap(self._base, self.slab_bytes * self.slabs_max):
            raise _driver_error("munmap", _last_error())

    def _address(self, index: int) -> int:
        return self._base + index * self.slab_bytes

    def _check_room(self, first_index: int, count: int) -> None:
        if not self._open:
            raise InvalidRequest("this range is closed")
        check_room(first_index, count, self.slabs_max, self._mapped)

    def _check_slab(self, fd: int) -> None:
        """Only a memfd of exactly this size that nobody can shrink: touching it never raises SIGBUS."""
        try:
            size_bytes = os.fstat(fd).st_size
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        except OSError as error:
            raise InvalidRequest(f"descriptor {fd} is no slab: {error.strerror}") from error
        if size_bytes != self.slab_bytes or not sealed:
            raise InvalidRequest(
                f"descriptor {fd} is no slab of {self.slab_bytes} bytes: it has {size_bytes} bytes"
                f"{'' if sealed else ' and may shrink'}"
            )


def _create_memfd(size_bytes: int) -> int:
    try:
        first = os.memfd_create(_SLAB_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        first = os.memfd_create(_SLAB_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(first, size_bytes)
        os.posix_fallocate(first, 0, size_bytes)
        os.fchmod(first, 0o600)
        fcntl.fcntl(first, fcntl.F_ADD_SEALS, _SEALS)
        fd = _reopen(first, os.O_RDWR)
    finally:
        os.close(first)
    # Should somebody open the slab during held_elsewhere, the kernel signals the
    # lease's holder: with SIGURG, which is ignored, instead of SIGIO, which kills.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    return fd


def _reopen(fd: int, flags: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def _fd(slab: Slab) -> int:
    fd: int = slab.handle.fd
    if fd < 0:
        raise InvalidRequest("this slab is destroyed")
    return fd


def _fill_slab(copies: Sequence[Copy]) -> None:
    """All copies of one target slab."""
    target = copies[0].target
    with _mapped(_fd(target), target.size_bytes) as window:
        for copy in copies:
            # A slab is a file too: reading it needs no second mapping and no GIL.
            source = copy.source
            fd = source.fd if isinstance(source, FileSource) else _fd(source.slab)
            at, source_at = copy.offset_bytes, source.offset_bytes
            for _ in range(copy.rows):
                with window[at : at + copy.length_bytes] as part:
                    read_into(part, fd, source_at)
                at, source_at = at + copy.pitch_bytes, source_at + copy.source_pitch_bytes


def read_into(buffer: memoryview, fd: int, offset_bytes: int) -> None:
    """Fills a buffer from a file, however short single reads are. Errors: `ShortRead`, `OSError`."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset_bytes + done)
        if count == 0:
            raise ShortRead(f"the file ends {len(buffer) - done} bytes before byte {offset_bytes + len(buffer)}")
        done += count


@contextmanager
def _mapped(fd: int, size_bytes: int) -> Iterator[memoryview]:
    """A slab's bytes for the length of a fill; no mapping is kept at rest."""
    address = _mmap(0, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
    try:
        yield _window(address, size_bytes)
    finally:
        _libc.munmap(address, size_bytes)


def _window(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size_bytes).from_address(address)).cast("B")


def _reserve(address: int, size_bytes: int, flags: int) -> int:
    """Addresses without memory, in place of whatever was mapped there."""
    return _mmap(address, size_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | flags, -1)


def _mmap(address: int, size_bytes: int, prot: int, flags: int, fd: int) -> int:
    result: Any = _libc.mmap(address, size_bytes, prot, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        error = _last_error()
        detail = f" of {size_bytes} bytes"
        if error.errno == errno.ENOMEM:
            detail += (
                f": this process has {_count_lines('/proc/self/maps')} mappings and vm.max_map_count is "
                f"{_first_line('/proc/sys/vm/max_map_count')}; raise it with sysctl, or choose a larger slab_bytes"
            )
        raise _driver_error("mmap", error, detail)
    return int(result)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _driver_error(call: str, error: OSError, detail: str = "") -> DriverError:
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    return DriverError(f"{call} failed with {name}{detail}", call, code, name)


def create_failed(error: OSError, size_bytes: int) -> Exhausted | DriverError:
    """What went short: descriptors and memory are never mixed up."""
    if error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Exhausted(
            f"no descriptor left for a slab of {size_bytes} bytes: this process may open {soft} (hard limit {hard}); "
            "raise LimitNOFILE= or `ulimit -n`, or choose a larger slab_bytes",
            size_bytes,
        )
    if error.errno == errno.ENFILE:
        limit = _first_line("/proc/sys/fs/file-max")
        return Exhausted(
            f"no descriptor left for a slab of {size_bytes} bytes: the whole host may open {limit}; "
            "raise fs.file-max with sysctl, or choose a larger slab_bytes",
            size_bytes,
        )
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        available_bytes = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
        return Exhausted(
            f"the host has no memory for a slab of {size_bytes} bytes: {available_bytes} bytes are free; "
            "lower host_cap_bytes or cap_bytes, or end other programs",
            size_bytes,
            available_bytes,
        )
    return _driver_error("memfd_create", error)


def _memfds_of(directory: Path) -> set[int]:
    """Inodes of the slabs that a process of /proc has open or mapped; empty where it may not be looked at."""
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(directory / "fd"):
            with suppress(OSError):
                if os.readlink(entry.path).startswith(f"/memfd:{_SLAB_NAME}"):
                    inodes.add(os.stat(entry.path).st_ino)
        for line in (directory / "maps").read_text().splitlines():
            if f"/memfd:{_SLAB_NAME}" in line:
                inodes.add(int(line.split()[4]))
    return inodes


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _count_lines(path: str) -> int | str:
    try:
        return Path(path).read_bytes().count(b"\n")
    except OSError:
        return "an unknown number of"
