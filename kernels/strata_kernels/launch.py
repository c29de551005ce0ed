"""Loads the CUDA kernels and launches them.

Everything here works in the calling thread's current context, and nothing waits for the
GPU but `DeviceBuffer`. What a launch needs is put together once (`Kernels.prepare`);
calling the result is one call of the driver.
"""

import ctypes
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata_kernels.compiler import compile_source
from vmmd.driver.cuda_calls import bindings, call
from vmmd.errors import InvalidRequest, NotFound

Dimensions = int | tuple[int, ...]
"""Blocks of a grid or threads of a block: one number, or x, y, z."""

SHARED_BYTES_MAX = 227 * 1024

_SCALARS: dict[str, Any] = {
    "i4": ctypes.c_int32,
    "u4": ctypes.c_uint32,
    "i8": ctypes.c_int64,
    "u8": ctypes.c_uint64,
    "f4": ctypes.c_float,
    "f8": ctypes.c_double,
}
"""By numpy's kind and size."""


def as_value(arg: Any) -> Any:
    """A kernel's argument as a ctypes object.

    Args:
        arg: a ctypes value or structure; a numpy scalar; an int (int32) or a float (float32); a numpy array (of
            host memory: the address of its first value). Addresses of the device are ``ctypes.c_uint64`` or
            ``ctypes.c_void_p``.

    Errors: `InvalidRequest`.
    """
    if isinstance(arg, ctypes.Structure | ctypes._SimpleCData):
        return arg
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    if isinstance(arg, np.generic) and arg.dtype.str[1:] in _SCALARS:
        return _SCALARS[arg.dtype.str[1:]](arg.item())
    if isinstance(arg, int) and -(1 << 31) <= arg < 1 << 31:
        return ctypes.c_int32(arg)
    if isinstance(arg, float):
        return ctypes.c_float(arg)
    raise InvalidRequest(f"argument {arg!r} of a kernel: give a ctypes value, so that its size is known")


def dimensions(given: Dimensions) -> tuple[int, int, int]:
    """x, y and z; those not given are 1."""
    numbers = (given,) if isinstance(given, int) else given
    x, y, z = (*numbers, 1, 1, 1)[:3]
    return x, y, z


class Launch:
    """A kernel with its arguments, ready to be launched; call it as often as wanted, from one thread at a time.

    The arguments are read at each call: change `args` in between and the next launch has the new values.
    """

    def __init__(self, cu: Any, config: Any, function: Any, args: list[Any]) -> None:
        self.args = args
        self._launch = cu.cuLaunchKernelEx
        self._config = config
        self._function = function
        self._pointers = (ctypes.c_void_p * max(1, len(args)))(*map(ctypes.addressof, args))
        self._address = ctypes.addressof(self._pointers)

    def resize(self, grid: Dimensions) -> None:
        """Another grid from the next call on."""
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = dimensions(grid)

    def __call__(self) -> None:
        """Errors: `DriverError`."""
        call(self._launch, self._config, self._function, self._address, 0)


class Kernels:
    """Kernels on the GPU of the current context.

    Args:
        sources: ``.cu`` files, compiled where that was not done before.
        types: tensor types that they must know; None for all.

    Errors: as `compile_source`; `NoDevice`, `DriverError`.
    """

    def __init__(self, sources: Sequence[Path], types: Sequence[str] | None = None) -> None:
        self._cu = cu = bindings()
        self.architecture = architecture(cu)
        self._functions: dict[str, _Function] = {}
        self._modules: list[Any] = []
        self._programmatic = _programmatic(cu)
        for source in sources:
            compiled = compile_source(source, self.architecture, types)
            module = call(cu.cuModuleLoadData, compiled.cubin)
            self._modules.append(module)
            for kernel in compiled.kernels:
                self._functions[kernel.name] = _Function(cu, call(cu.cuModuleGetFunction, module, kernel.name.encode()))

    def prepare(
        self,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int = 0,
        stream: int = 0,
        programmatic: bool = False,
    ) -> Launch:
        """Puts a launch together.

        Args:
            name: of the kernel.
            grid: blocks.
            block: threads of a block.
            args: what `as_value` takes; no arrays.
            shared_bytes: of dynamic shared memory, `SHARED_BYTES_MAX` at most.
            stream: where it is launched.
            programmatic: it may start while the kernel before it in the stream ends (see ``wait_for_previous``).

        Errors: `NotFound`, `InvalidRequest`, `DriverError`.
        """
        if name not in self._functions:
            raise NotFound(f"no kernel {name}; there are {', '.join(sorted(self._functions))}")
        cu, function = self._cu, self._functions[name]
        if any(isinstance(arg, np.ndarray) for arg in args):
            raise InvalidRequest(f"{name}: a numpy array is no device memory; give the address of a DeviceBuffer")
        values = [as_value(arg) for arg in args]
        sizes = [ctypes.sizeof(value) for value in values]
        if sizes != function.parameters:
            raise InvalidRequest(f"{name} takes arguments of {function.parameters} bytes; these have {sizes}")
        function.need_shared(shared_bytes)
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = dimensions(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = dimensions(block)
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        if programmatic:
            config.attrs = [self._programmatic]
            config.numAttrs = 1
        return Launch(cu, config, function.handle, values)

    def launch(
        self,
        name: str,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_bytes: int = 0,
        stream: int = 0,
        programmatic: bool = False,
    ) -> None:
        """`prepare` and launch once."""
        self.prepare(name, grid, block, args, shared_bytes, stream, programmatic)()

    def close(self) -> None:
        """Unloads the kernels; none may run."""
        while self._modules:
            call(self._cu.cuModuleUnload, self._modules.pop())
        self._functions.clear()


class DeviceBuffer:
    """Memory of the current context's GPU, aligned to 256 bytes. Allocated at set-up, never while steps run."""

    def __init__(self, size_bytes: int) -> None:
        self._cu = bindings()
        self.size_bytes = size_bytes
        self.address = int(call(self._cu.cuMemAlloc, max(1, size_bytes)))

    def upload(self, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Copies an array here, and waits. Errors: `InvalidRequest` where it does not fit."""
        call(self._cu.cuMemcpyHtoD, self._place(array, offset), array.ctypes.data, array.nbytes)
        call(self._cu.cuStreamSynchronize, 0)  # the copy of pageable memory returns before its bytes arrive

    def download(self, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Fills an array from here, after all launches of this context's stream 0."""
        call(self._cu.cuMemcpyDtoH, array.ctypes.data, self._place(array, offset), array.nbytes)

    def fill(self, byte: int) -> None:
        """Sets every byte, and waits: streams that are not ordered behind stream 0 may write there next."""
        call(self._cu.cuMemsetD8, self.address, byte, self.size_bytes)
        call(self._cu.cuStreamSynchronize, 0)  # setting device memory returns before it is done

    def close(self) -> None:
        """Frees the memory; again is fine."""
        address, self.address = self.address, 0
        if address:
            call(self._cu.cuMemFree, address)

    def _place(self, array: npt.NDArray[Any], offset: int) -> int:
        if not array.flags.c_contiguous or not 0 <= offset <= self.size_bytes - array.nbytes:
            raise InvalidRequest(
                f"{array.nbytes} bytes at {offset} of a buffer of {self.size_bytes}: give a contiguous array that fits"
            )
        return self.address + offset


def architecture(cu: Any) -> str:
    """That of the current context's GPU, like "sm_90"."""
    device = call(cu.cuCtxGetDevice)
    attribute = cu.CUdevice_attribute
    major, minor = (
        call(cu.cuDeviceGetAttribute, code, device)
        for code in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return f"sm_{major}{minor}"


def _programmatic(cu: Any) -> Any:
    """The attribute of a launch that may start while the one before it ends; configurations copy it."""
    attribute = cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = cu.CUlaunchAttributeValue()
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute


class _Function:
    """A kernel, the sizes of its parameters, and how much dynamic shared memory it may have."""

    def __init__(self, cu: Any, handle: Any) -> None:
        self.handle = handle
        self._cu = cu
        self.parameters: list[int] = []
        while True:
            code, _, size = cu.cuFuncGetParamInfo(handle, len(self.parameters))
            if code:  # past the last
                break
            self.parameters.append(size)
        self._limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._shared_bytes_max: int = call(cu.cuFuncGetAttribute, self._limit, handle)
        # Kernels run beside each other only on multiprocessors that are divided as all of them need.
        carveout = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        call(cu.cuFuncSetAttribute, handle, carveout, 100)

    def need_shared(self, size_bytes: int) -> None:
        if size_bytes > self._shared_bytes_max:
            call(self._cu.cuFuncSetAttribute, self.handle, self._limit, size_bytes)
            self._shared_bytes_max = operator.index(size_bytes)
