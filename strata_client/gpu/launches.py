"""Launches that know how many rows they are for, and launches as a graph."""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from strata_kernels.launch import Dimensions, Kernels, Launch

from strata_client.gpu.device import Device
from vmmd.driver.cuda_calls import call


class SizedLaunches:
    """Prepares launches for any number of rows: all read the same `n`, and n makes their grids."""

    def __init__(self, device: Device, n: int) -> None:
        self.n = ctypes.c_int32(n)
        self._stream = device.stream
        self._sized: list[tuple[Launch, Callable[[int], Dimensions]]] = []

    def prepare(
        self,
        kernels: Kernels,
        name: str,
        grid: Callable[[int], Dimensions],
        block: int,
        *args: Any,
        shared_bytes: int = 0,
        programmatic: bool = True,
    ) -> Launch:
        """A launch with arguments as `strata_kernels.launch.as_value` takes them; its grid for n rows."""
        size = grid(self.n.value)
        launch = kernels.prepare(name, size, block, args, shared_bytes, self._stream, programmatic=programmatic)
        self._sized.append((launch, grid))
        return launch

    def resize(self, n: int) -> None:
        """For n rows from now on."""
        if n != self.n.value:
            self.n.value = n
            for launch, grid in self._sized:
                launch.resize(grid(n))


def capture(device: Device, launches: Iterable[Callable[[], None]]) -> Any:
    """Launches, as they are now, as one graph for `launch_graph`. Errors: `DriverError`."""
    cu, stream = device.cu, device.stream
    call(cu.cuStreamBeginCapture, stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        for launch in launches:
            launch()
    except BaseException:
        _, graph = cu.cuStreamEndCapture(stream)  # none where other streams' work was begun: what failed is the error
        if graph:
            cu.cuGraphDestroy(graph)
        raise
    graph = call(cu.cuStreamEndCapture, stream)
    executable = call(cu.cuGraphInstantiate, graph, 0)
    call(cu.cuGraphUpload, executable, stream)
    call(cu.cuGraphDestroy, graph)
    return executable


def launch_graph(device: Device, graph: Any) -> None:
    """Enqueues a graph. Errors: `DriverError`."""
    call(device.cu.cuGraphLaunch, graph, device.stream)
