"""One GPU of this process: context, stream, and host memory that kernels reach."""

import ctypes
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from vmmd.driver import cuda_calls
from vmmd.driver.cuda_calls import call
from vmmd.errors import DriverError, NotFound

Array = npt.NDArray[Any]

_registered: Counter[int] = Counter()
"""Of this process's devices together, by address: a page is registered once, for all of them."""


def bytes_at(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """This process's memory at an address, which outlives the array."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


class Device:
    """A GPU that a model runs on.

    Its primary context is current in the thread that makes this, from then on; others make it current first.

    Attributes:
        cu: ``cuda.bindings.driver``.
        context: its primary context.
        stream: where steps run.
        multiprocessors: how many the GPU has.
        shared_bytes_max: shared memory that a block may have.
    """

    def __init__(self, uuid: str) -> None:
        """Errors: `NoDevice`, `NotFound` (this process does not see that GPU), `DriverError`."""
        self.cu = cu = cuda_calls.bindings()
        gpus, _ = cuda_calls.find_gpus(cu)
        ordinal = next((gpu.ordinal for gpu in gpus if gpu.uuid == uuid), None)
        if ordinal is None:
            raise NotFound(f"this process sees no GPU {uuid!r} (CUDA_VISIBLE_DEVICES?)")
        self.context = call(cu.cuDevicePrimaryCtxRetain, ordinal)
        self.make_current()
        self.stream = int(call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._registered: list[int] = []
        attribute = cu.CUdevice_attribute
        self.multiprocessors, self.shared_bytes_max = (
            int(call(cu.cuDeviceGetAttribute, which, ordinal))
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )
        )

    def make_current(self) -> None:
        """Makes the GPU's primary context the calling thread's current one, from now on."""
        call(self.cu.cuCtxSetCurrent, self.context)

    def reach(self, other: "Device") -> None:
        """Lets copies to another GPU go there directly from this one, the current; there must be a path to it.

        Errors: `DriverError`.
        """
        try:
            call(self.cu.cuCtxEnablePeerAccess, other.context, 0)
        except DriverError as error:
            if error.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":
                raise

    def close(self) -> None:
        """Waits for all that was launched; kernels reach the registered pages no more. Errors: `DriverError`."""
        self.synchronize()
        while self._registered:
            address = self._registered.pop()
            _registered[address] -= 1
            if not _registered[address]:
                call(self.cu.cuMemHostUnregister, address)

    def synchronize(self) -> None:
        """Waits for all that was launched. Errors: `DriverError`, also of an earlier launch."""
        call(self.cu.cuStreamSynchronize, self.stream)

    def event(self) -> Any:
        """An event whose waiting leaves the processor to others."""
        flags = self.cu.CUevent_flags
        return call(self.cu.cuEventCreate, flags.CU_EVENT_BLOCKING_SYNC | flags.CU_EVENT_DISABLE_TIMING)

    def pinned(self, shape: int | tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array in host memory that copies need not stage and kernels can write; lives as long as the process.

        Kernels find it at the address that the processor does.
        """
        size_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        flags = self.cu.CU_MEMHOSTALLOC_PORTABLE | self.cu.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(call(self.cu.cuMemHostAlloc, size_bytes, flags))
        array = bytes_at(address, size_bytes).view(dtype).reshape(shape)
        array[...] = 0
        return array

    def register(self, page: Array) -> int:
        """Lets kernels reach a shared page that this process has mapped; its address for them."""
        flags = self.cu.CU_MEMHOSTREGISTER_PORTABLE | self.cu.CU_MEMHOSTREGISTER_DEVICEMAP
        if not _registered[page.ctypes.data]:
            call(self.cu.cuMemHostRegister, page.ctypes.data, page.nbytes, flags)
        _registered[page.ctypes.data] += 1
        self._registered.append(page.ctypes.data)
        return int(call(self.cu.cuMemHostGetDevicePointer, page.ctypes.data, 0))

    def upload(self, address: int, array: Array) -> None:
        """Copies an array to the device, in order with the steps; a pinned one may only change once that is done."""
        call(self.cu.cuMemcpyHtoDAsync, address, array.ctypes.data, array.nbytes, self.stream)

    def download(self, array: Array, address: int) -> None:
        """Fills an array from the device, after all that was launched."""
        call(self.cu.cuMemcpyDtoHAsync, array.ctypes.data, address, array.nbytes, self.stream)
        self.synchronize()
