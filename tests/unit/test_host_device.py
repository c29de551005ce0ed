"""The GPUs that the host plays for tests: several devices, what orders their streams, and graphs across them."""

from functools import partial

import numpy as np
import pytest

from tests.helpers.host_device import HostDevice


def devices(seed: int) -> tuple[HostDevice, HostDevice]:
    """Two devices of one process."""
    first = HostDevice(np.random.default_rng(seed))
    return first, HostDevice(np.random.default_rng(seed), first)


def test_streams_of_two_devices_run_in_any_order_unless_an_event_orders_them() -> None:
    """Without an event either comes first in some runs; with one the second waits in all."""
    orders: dict[bool, set[tuple[int, ...]]] = {False: set(), True: set()}
    for seed in range(64):
        first, second = devices(seed)
        done: list[int] = []
        event, is_ordered = first.event(), bool(seed % 2)
        first.make_current()
        first.cu.enqueue(first.stream, partial(done.append, 1))
        first.cu.cuEventRecord(event, first.stream)
        if is_ordered:
            first.cu.cuStreamWaitEvent(second.stream, event, 0)
        second.make_current()
        second.cu.enqueue(second.stream, partial(done.append, 2))
        first.synchronize()
        second.synchronize()
        orders[is_ordered].add(tuple(done))
    assert orders == {False: {(1, 2), (2, 1)}, True: {(1, 2)}}


def test_memory_crosses_in_stream_order() -> None:
    """A copy between devices runs when its turn comes, and its bytes are counted."""
    first, second = devices(1)
    source, target = np.arange(4, dtype=np.uint32), np.zeros(4, np.uint32)
    first.cu.cuMemcpyPeerAsync(
        target.ctypes.data, second.context, source.ctypes.data, first.context, source.nbytes, first.stream
    )
    assert not target.any()
    first.synchronize()
    assert np.array_equal(target, source)
    assert first.cu.crossed_bytes == source.nbytes


def test_what_is_enqueued_is_the_current_device_s() -> None:
    """A kernel on another device's stream, and an event recorded there, are errors, as with CUDA."""
    first, second = devices(2)
    with pytest.raises(AssertionError, match="another device is current"):
        second.cu.enqueue(first.stream, lambda: None)
    with pytest.raises(AssertionError, match="another device's stream"):
        second.cu.cuEventRecord(first.event(), second.stream)


def test_a_graph_across_devices() -> None:
    """A stream that waits for a captured event is captured; a launch keeps the order of both, and ends after both."""
    for seed in range(16):
        first, second = devices(seed)
        cu = first.cu
        done: list[str] = []
        fork, join = first.event(), second.event()
        first.make_current()
        cu.cuStreamBeginCapture(first.stream, 1)
        cu.enqueue(first.stream, partial(done.append, "fork"))
        cu.cuEventRecord(fork, first.stream)
        cu.cuStreamWaitEvent(second.stream, fork, 0)
        second.make_current()
        cu.enqueue(second.stream, partial(done.append, "beside"))
        cu.cuEventRecord(join, second.stream)
        first.make_current()
        cu.cuStreamWaitEvent(first.stream, join, 0)
        cu.enqueue(first.stream, partial(done.append, "joined"))
        graph = cu.cuGraphInstantiate(cu.cuStreamEndCapture(first.stream)[1], 0)[1]
        second.make_current()
        cu.enqueue(second.stream, partial(done.append, "second's own"))
        second.synchronize()
        assert done == ["second's own"]
        first.make_current()
        for _ in range(2):
            cu.cuGraphLaunch(graph, first.stream)
        first.synchronize()
        assert done[1:] == 2 * ["fork", "beside", "joined"]
