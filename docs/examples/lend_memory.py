"""Lends leased memory to another framework: a cache of arrays that gives way when somebody needs the memory.

Arrays are PyTorch's where it is installed, else CuPy's on a GPU, else numpy's. Run it against a daemon, or without
one, in which case it starts its own:

    python docs/examples/lend_memory.py [RUNTIME_DIRECTORY]
"""

import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import strata_client


def framework(on_gpu: bool) -> tuple[str, Callable[[strata_client.View], Any]]:
    """A framework that is installed here, by name, and what makes its arrays of views."""
    if find_spec("torch"):
        import torch

        if torch.cuda.is_available() or not on_gpu:
            return "PyTorch", torch.from_dlpack
    if on_gpu:
        import cupy

        return "CuPy", cupy.asarray
    return "numpy", np.asarray


class Cache:
    """Arrays of one size, as many as the daemon has memory for; the last ones go first."""

    def __init__(self, client: strata_client.Client, floats: int, most: int) -> None:
        self._floats = floats
        self._lock = threading.Lock()
        self._arrays: list[Any] = []
        # Addresses for all of them, and no memory yet. Whoever gives `on_shrink` may be asked for memory.
        self._memory = client.range(max_bytes=most * 4 * floats, on_shrink=self._give_way)
        self.name, self._as_array = framework(self._memory.device.startswith(("GPU-", "MIG-")))

    def __len__(self) -> int:
        return len(self._arrays)

    def add(self, value: float) -> bool:
        """Keeps an array full of a value; False where there is no memory for another."""
        try:
            # Not under the lock: while this waits, the daemon may ask others, or this cache, to give way.
            self._memory.grow((len(self._arrays) + 1) * 4 * self._floats)
            with self._lock:
                offset_bytes = len(self._arrays) * 4 * self._floats
                array = self._as_array(self._memory.view(self._floats, "float32", offset_bytes=offset_bytes))
                array[:] = value
                self._arrays.append(array)
        except (strata_client.Exhausted, strata_client.InvalidRequest):
            return False
        return True

    def sums(self) -> list[float]:
        """Of each array: what another framework computes in leased memory."""
        with self._lock:
            return [float(array.sum()) for array in self._arrays]

    def _give_way(self, memory: strata_client.Range, size_bytes: int, deadline_s: float) -> None:
        """Others need memory: forget the arrays beyond `size_bytes`. The range shrinks once this returns."""
        with self._lock:
            del self._arrays[size_bytes // (4 * self._floats) :]

    def close(self) -> None:
        """Gives all of it back."""
        with self._lock:
            self._arrays.clear()
        self._memory.close()


def main(directory: str | None) -> None:
    """Fills a cache, lets another client need half of the device, and looks at what is left."""
    with strata_client.connect(directory, private=True) as client:
        device = client.devices()[0]
        floats = 2 * device.slab_bytes // 4
        cache = Cache(client, floats, most=8)
        while cache.add(len(cache) + 1):
            pass
        print(f"{len(cache)} arrays of {cache.name} in leased memory, sums {cache.sums()}")
        with strata_client.connect(client.directory) as other:
            try:
                with other.range(device.cap_bytes // 2):
                    print(f"another client has half of the device; {len(cache)} arrays are left")
            except strata_client.Exhausted as error:
                print(f"another client was refused: {error}")
        cache.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
