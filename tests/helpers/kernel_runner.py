"""One way to run a kernel in a test, on the host and on a GPU."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from strata_kernels.compiler import SOURCES
from strata_kernels.launch import DeviceBuffer, Dimensions, Kernels

from tests.helpers.cuda_host import POISON, GuardedMemory, HostKernels
from vmmd.driver.cuda_calls import bindings, call

Array = npt.NDArray[Any]

_MARGIN = 1024  # bytes of poison around each buffer on a GPU


class _Memory(Protocol):
    """A copy of an array where kernels find it, among bytes that must stay as they are."""

    address: int

    def upload(self, array: Array) -> None: ...

    def download(self, array: Array) -> None: ...

    def close(self) -> None: ...


class KernelRunner:
    """Runs kernels over copies of numpy arrays.

    Before a run, every array that the arguments name, and every one whose `address` was asked for, is copied to
    where the kernel finds it; after the run, it is filled from there, unless it is read-only. An array that lies
    within one whose address was asked for is that part of it. What a kernel writes around an array is an error.
    Arrays are contiguous; addresses are aligned to 16 bytes.
    """

    on_gpu: bool

    def __init__(self) -> None:
        self._kept: list[tuple[Array, _Memory]] = []

    def address(self, array: Array) -> int:
        """Where kernels find an array for the rest of the test: for structs and tables of addresses."""
        found = self._find(array)
        if found is None:
            assert array.flags.c_contiguous
            self._kept.append((array, self._allocate(array.nbytes)))
            found = self._kept[-1][1].address
        return found

    def upload(self) -> None:
        """Copies every array whose address was asked for to where kernels find it, as `run` does."""
        for array, memory in self._kept:
            memory.upload(array)

    def download(self) -> None:
        """Fills them from there, after the launches of stream 0."""
        for array, memory in self._kept:
            memory.download(array)

    def run(
        self,
        source: str | Path,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int = 0,
        types: Sequence[str] | None = None,
    ) -> None:
        """Runs a kernel and waits for its end.

        Args:
            source: a ``.cu`` file of the product by name, or any by path.
            name: of the kernel.
            grid: blocks.
            block: threads of a block.
            args: what `strata_kernels.launch.as_value` takes, arrays included.
            shared_bytes: of dynamic shared memory.
            types: tensor types that the kernels must know; None for all.
        """
        arrays = list(self._kept)
        values: list[Any] = []
        for arg in args:
            if not isinstance(arg, np.ndarray):
                values.append(arg)
                continue
            place = self._find(arg)
            if place is None:
                assert arg.flags.c_contiguous
                same = [memory for array, memory in arrays if array is arg]
                if not same:
                    same = [self._allocate(arg.nbytes)]
                    arrays.append((arg, same[0]))
                place = same[0].address
            values.append(ctypes.c_uint64(place))
        try:
            for array, memory in arrays:
                memory.upload(array)
            path = SOURCES / source if isinstance(source, str) else source
            self._launch(path, name, grid, block, values, shared_bytes, types)
            for array, memory in arrays:
                memory.download(array)
        finally:
            for _, memory in arrays[len(self._kept) :]:
                memory.close()

    def close(self) -> None:
        """Frees everything."""
        for _, memory in self._kept:
            memory.close()
        self._kept.clear()

    def _find(self, array: Array) -> int | None:
        at = array.ctypes.data
        for kept, memory in self._kept:
            offset = at - kept.ctypes.data
            if array is kept or (offset >= 0 and offset + array.nbytes <= kept.nbytes and array.nbytes > 0):
                return memory.address + offset
        return None

    def _allocate(self, size_bytes: int) -> _Memory:
        raise NotImplementedError

    def _launch(
        self,
        source: Path,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int,
        types: Sequence[str] | None,
    ) -> None:
        raise NotImplementedError


class HostRunner(KernelRunner):
    """On the host; see `tests.helpers.cuda_host`."""

    on_gpu = False

    def __init__(self, contracted: bool = False) -> None:
        super().__init__()
        self._contracted = contracted

    def _allocate(self, size_bytes: int) -> _Memory:
        return _HostMemory(size_bytes)

    def _launch(
        self,
        source: Path,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int,
        types: Sequence[str] | None,
    ) -> None:
        HostKernels.compile(source, types, self._contracted).launch(name, grid, block, args, shared_bytes)


class GpuRunner(KernelRunner):
    """On the first GPU."""

    on_gpu = True

    def __init__(self) -> None:
        super().__init__()
        self._cu = cu = bindings()
        self._device = call(cu.cuDeviceGet, 0)
        self._context = call(cu.cuDevicePrimaryCtxRetain, self._device)
        call(cu.cuCtxPushCurrent, self._context)
        self._loaded: dict[tuple[Path, tuple[str, ...] | None], Kernels] = {}

    def kernels(self, source: str | Path, types: Sequence[str] | None = None) -> Kernels:
        """The kernels of a source, for tests and benches that launch by themselves; the context is current."""
        path = SOURCES / source if isinstance(source, str) else source
        key = (path, None if types is None else tuple(sorted(types)))
        if key not in self._loaded:
            self._loaded[key] = Kernels([path], types)
        return self._loaded[key]

    def forget(self) -> None:
        """Frees what one test asked for; the kernels stay loaded."""
        super().close()

    def close(self) -> None:
        """Frees everything."""
        super().close()
        for kernels in self._loaded.values():
            kernels.close()
        call(self._cu.cuCtxPopCurrent)
        call(self._cu.cuDevicePrimaryCtxRelease, self._device)

    def _allocate(self, size_bytes: int) -> _Memory:
        return _GpuMemory(size_bytes)

    def _launch(
        self,
        source: Path,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int,
        types: Sequence[str] | None,
    ) -> None:
        self.kernels(source, types).launch(name, grid, block, args, shared_bytes)
        call(self._cu.cuCtxSynchronize)


class _HostMemory:
    def __init__(self, size_bytes: int) -> None:
        self._memory = GuardedMemory(size_bytes)
        self.address = self._memory.address

    def upload(self, array: Array) -> None:
        self._memory.array[:] = array.reshape(-1).view(np.uint8)

    def download(self, array: Array) -> None:
        self._memory.check()
        if array.flags.writeable:
            array.reshape(-1).view(np.uint8)[:] = self._memory.array

    def close(self) -> None:
        self._memory.close()


class _GpuMemory:
    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._buffer = DeviceBuffer(size_bytes + 2 * _MARGIN)
        self._buffer.fill(POISON)
        self.address = self._buffer.address + _MARGIN

    def upload(self, array: Array) -> None:
        if array.nbytes:
            self._buffer.upload(array, _MARGIN)

    def download(self, array: Array) -> None:
        for what, offset in (("before", 0), ("behind", _MARGIN + self._size_bytes)):
            margin = np.empty(_MARGIN, np.uint8)
            self._buffer.download(margin, offset)
            assert np.all(margin == POISON), f"written just {what} a buffer of {self._size_bytes} bytes"
        if array.nbytes and array.flags.writeable:
            self._buffer.download(array, _MARGIN)

    def close(self) -> None:
        self._buffer.close()
