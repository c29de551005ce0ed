"""An engine that uses the library on a GPU, for `tests.helpers.peer.Remote`."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import strata_client
from tests.helpers.fake_cuda import FakeCuda
from vmmd.driver import cuda_calls
from vmmd.driver.cuda_mapper import CudaMapper


class LibraryEngine:
    """A client of the library with one range on the first GPU. With `fake`, CUDA is a stand-in."""

    def __init__(self, directory: str, fake: dict[str, Any] | None) -> None:
        self._fake = FakeCuda(**fake) if fake is not None else None
        if self._fake is not None:
            self._fake.install()
        self._client = strata_client.connect(directory)
        self._memory: strata_client.Range
        self._mapper: CudaMapper

    def lease(self, slabs: int, slabs_max: int) -> int:
        """Makes the range; returns the size of a slab."""
        slab_bytes = self._client.devices()[0].slab_bytes
        self._memory = self._client.range(slabs * slab_bytes, max_bytes=slabs_max * slab_bytes)
        self._mapper = CudaMapper(self._memory.device)
        return slab_bytes

    def grow(self, slabs: int) -> int:
        """Grows it; returns its size."""
        self._memory.grow(slabs * self._memory.slab_bytes)
        return self._memory.size_bytes

    def shrink(self, slabs: int) -> int:
        """Shrinks it; returns how often CUDA was waited for, as far as that is known."""
        self._memory.shrink(slabs * self._memory.slab_bytes)
        return self._fake.calls["cuCtxSynchronize"] if self._fake is not None else 1

    def write(self, value: int, offset_bytes: int, size_bytes: int) -> None:
        """Sets bytes through a view's CUDA interface."""
        view = self._memory.view(size_bytes, offset_bytes=offset_bytes)
        interface = view.__cuda_array_interface__
        assert (interface["shape"], interface["typestr"]) == ((size_bytes,), "|u1")
        data = np.full(size_bytes, value, np.uint8)
        self._copy(self._mapper.cu.cuMemcpyHtoD, interface["data"][0], data.ctypes.data, size_bytes)

    def read(self, offset_bytes: int, size_bytes: int) -> set[int]:
        """The different bytes of a piece."""
        data = np.empty(size_bytes, np.uint8)
        view = self._memory.view(size_bytes, offset_bytes=offset_bytes)
        self._copy(self._mapper.cu.cuMemcpyDtoH, data.ctypes.data, view.address, size_bytes)
        return set(data.tolist())

    def dlpack_device(self) -> tuple[int, int, int]:
        """A view's, and the number of the GPU."""
        return *self._memory.view().__dlpack_device__(), self._mapper.gpu.ordinal

    def numpy_says(self) -> str:
        """What numpy is told."""
        try:
            np.asarray(self._memory.view())
        except strata_client.NoDevice as error:
            return error.message
        return ""

    def write_with_frameworks(self, value: int) -> list[str]:
        """Sets the whole range through every framework that is installed; what was wrong with each, by name."""

        def torch(view: strata_client.View) -> Any:
            return importlib.import_module("torch").from_dlpack(view).fill_(value)

        def cupy(view: strata_client.View) -> Any:
            array = importlib.import_module("cupy").asarray(view)
            array.fill(value)
            return array

        ways: tuple[Callable[[strata_client.View], Any], ...] = (torch, cupy)
        found = []
        for way in ways:
            if self._fake is not None or importlib.util.find_spec(way.__name__) is None:
                continue
            array = way(self._memory.view())
            wrote = self.read(0, self._memory.size_bytes)  # on the legacy stream, after the framework's
            try:
                self._memory.shrink(0)
                kept = False
            except strata_client.InvalidRequest:
                kept = True
            del array
            found.append(f"{way.__name__}: wrote {wrote}, {'kept' if kept else 'lost'} its memory")
        return found

    def close(self) -> None:
        """Ends it."""
        self._client.close()

    def _copy(self, function: Any, *args: int) -> None:
        with cuda_calls.current(self._mapper.cu, self._mapper.context):
            cuda_calls.call(function, *args)
