"""The GPUs that the host plays for tests: several devices, what orders their streams, and graphs across them."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from strata_kernels.structs import Piece

from tests.helpers.host_device import HostBuffer, HostDevice


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
        first.make_current()
        event, is_ordered = first.event(), bool(seed % 2)
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
    cu = first.cu
    with pytest.raises(AssertionError, match="another device is current"):
        cu.enqueue(first.stream, lambda: None)
    with pytest.raises(AssertionError, match="loaded on another device"):
        cu.enqueue(second.stream, lambda: None, loaded_on=first.context)
    buffer = HostBuffer(256, cu)
    first.make_current()
    with pytest.raises(AssertionError, match="another device's stream"):
        cu.cuEventRecord(first.event(), second.stream)
    for address in (ctypes.c_uint64(buffer.address), Piece(0, buffer.address + 16, 1)):
        with pytest.raises(AssertionError, match="memory of device 1 is given to device 0"):
            cu.enqueue(first.stream, lambda: None, [address])
    with ThreadPoolExecutor(1) as other, pytest.raises(AssertionError, match="no device is current in this thread"):
        other.submit(cu.cuStreamSynchronize, first.stream).result()


def test_a_pinned_array_is_read_when_its_turn_comes() -> None:
    """As with CUDA; another one is read at once."""
    device, _ = devices(3)
    device.make_current()
    targets, pinned, pageable = np.zeros(2, np.int32), device.pinned(1, np.int32), np.zeros(1, np.int32)
    for at, array in enumerate((pinned, pageable)):
        array[0] = 1
        device.upload(targets.ctypes.data + 4 * at, array)
        array[0] = 2
    device.synchronize()
    assert targets.tolist() == [2, 1]


def test_what_a_capture_does_not_allow() -> None:
    """Unjoined work of another stream gives no graph; waiting, allocating and crossing its edge are errors."""
    first, second = devices(4)
    cu, graphs = first.cu, list[tuple[int, object]]()
    join = second.event()
    first.make_current()
    fork, before = first.event(), first.event()
    cu.cuEventRecord(before, first.stream)
    for is_joined in (False, True):
        first.make_current()
        cu.cuStreamBeginCapture(first.stream, 1)
        cu.cuEventRecord(fork, first.stream)
        cu.cuStreamWaitEvent(second.stream, fork, 0)
        second.make_current()
        cu.enqueue(second.stream, lambda: None)
        cu.cuEventRecord(join, second.stream)
        first.make_current()
        if is_joined:
            cu.cuStreamWaitEvent(first.stream, join, 0)
        with pytest.raises(AssertionError, match="not captured"):
            cu.cuStreamWaitEvent(first.stream, before, 0)
        with pytest.raises(AssertionError, match="cannot be waited for"):
            first.synchronize()
        with pytest.raises(AssertionError, match="cannot be waited for"):
            cu.cuEventSynchronize(join)
        with pytest.raises(AssertionError, match="allocates memory"):
            first.pinned(1, np.int32)
        with pytest.raises(AssertionError, match="cannot be captured"):
            cu.cuMemcpyPeerAsync(0, second.context, 0, first.context, 4, second.stream)
        if is_joined:
            with pytest.raises(AssertionError, match="programmatic launch behind an event"):
                cu.enqueue(first.stream, lambda: None, programmatic=True)
        graphs.append(cu.cuStreamEndCapture(first.stream))
    assert [code for code, _ in graphs] == [904, 0]
    with pytest.raises(AssertionError, match="a capture that has ended"):
        cu.cuStreamWaitEvent(first.stream, join, 0)


def test_a_graph_across_devices() -> None:
    """A stream that waits for a captured event is captured; a launch keeps the order of both, and ends after both."""
    for seed in range(16):
        first, second = devices(seed)
        cu = first.cu
        done: list[str] = []
        join = second.event()
        first.make_current()
        fork = first.event()
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
