"""Small kernels for tests and benches of the CUDA driver, compiled on first use."""

import ctypes
import functools
import importlib
import statistics
import time
from typing import Any

from vmmd.driver.cuda_calls import call, current
from vmmd.driver.cuda_mapper import CudaMapper

_SOURCE = rb"""
extern "C" __global__ void store(unsigned* p, unsigned value) { *p = value; }

extern "C" __global__ void load(const unsigned* p, unsigned* out) { *out = *p; }

// Reads n words of 16 bytes, four in flight a thread.
extern "C" __global__ void read(const uint4* __restrict__ p, size_t n, unsigned* out) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
  unsigned s = 0;
  for (; i + 3 * step < n; i += 4 * step) {
    uint4 a = p[i], b = p[i + step], c = p[i + 2 * step], d = p[i + 3 * step];
    s += a.x ^ b.y ^ c.z ^ d.w;
  }
  if (s == 0x12345) *out = s;
}
"""


class Kernels:
    """The kernels on one GPU, with a word of device memory for results and a stream."""

    def __init__(self, mapper: CudaMapper) -> None:
        self._cu = cu = mapper.cu
        self._context = mapper.context
        attribute = cu.CUdevice_attribute
        major, minor = (
            call(cu.cuDeviceGetAttribute, code, mapper.gpu.ordinal)
            for code in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        with current(cu, self._context):
            module = call(cu.cuModuleLoadData, _compile(f"sm_{major}{minor}"))
            self._functions = {
                name: call(cu.cuModuleGetFunction, module, name.encode()) for name in ("store", "load", "read")
            }
            self._out = int(call(cu.cuMemAlloc, 4))
            self._stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def store(self, address: int, value: int) -> None:
        """Stores one 32-bit word. Errors: `DriverError` (a fault)."""
        self._run("store", 1, 1, (address, value), (ctypes.c_void_p, ctypes.c_uint))

    def load(self, address: int) -> int:
        """Loads one 32-bit word. Errors: `DriverError` (a fault)."""
        self._run("load", 1, 1, (address, self._out), (ctypes.c_void_p, ctypes.c_void_p))
        word = bytearray(4)
        with current(self._cu, self._context):
            buffer = ctypes.addressof((ctypes.c_char * 4).from_buffer(word))
            call(self._cu.cuMemcpyDtoH, buffer, self._out, 4)
        return int.from_bytes(word, "little")

    def read_gb_per_s(self, address: int, size_bytes: int, seconds: float) -> float:
        """Reads the same bytes again and again; the median rate."""
        return statistics.median(rate for _, rate in self.read_rates(address, size_bytes, seconds))

    def read_rates(self, address: int, size_bytes: int, seconds: float) -> list[tuple[float, float]]:
        """The same: each launch's end in s of the monotonic clock, and its rate in GB/s."""
        rates = []
        types = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            start = time.perf_counter()
            self._run("read", 132 * 8, 512, (address, size_bytes // 16, self._out), types)
            rates.append((time.monotonic(), size_bytes / (time.perf_counter() - start) / 1e9))
        return rates

    def _run(self, name: str, grid: int, block: int, args: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        cu = self._cu
        with current(cu, self._context):
            function = self._functions[name]
            call(cu.cuLaunchKernel, function, grid, 1, 1, block, 1, 1, 0, self._stream, (args, types), 0)
            call(cu.cuStreamSynchronize, self._stream)


@functools.cache
def _compile(architecture: str) -> bytes:
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    program = call(nvrtc.nvrtcCreateProgram, _SOURCE, b"kernels.cu", 0, [], [])
    call(nvrtc.nvrtcCompileProgram, program, 1, [f"--gpu-architecture={architecture}".encode()])
    cubin: bytes = b" " * call(nvrtc.nvrtcGetCUBINSize, program)
    call(nvrtc.nvrtcGetCUBIN, program, cubin)
    return cubin
