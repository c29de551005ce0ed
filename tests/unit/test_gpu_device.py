"""A GPU of a client, on a driver that only takes note of calls: what several GPUs of a process share."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata_client.gpu.device import Device
from vmmd.errors import DriverError


class Code(int):
    """A result of the driver with its name."""

    name = ""


class Driver:
    """Registers pages, and enables access between contexts once."""

    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2

    def __init__(self) -> None:
        self.registered: Counter[int] = Counter()
        self.reached: set[int] = set()
        self.access = ""

    def cuStreamSynchronize(self, stream: int) -> tuple[int]:
        return (0,)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[int]:
        self.registered[address] += 1
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        self.registered[address] -= 1
        return (0,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> tuple[int, int]:
        return 0, address

    def cuCtxEnablePeerAccess(self, context: int, flags: int) -> tuple[int]:
        code = Code(704 if context in self.reached else 0)
        code.name = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"
        if self.access:
            code = Code(1)
            code.name = self.access
        self.reached.add(context)
        return (code,)


def device(driver: Driver, context: int) -> Device:
    """A device without a context of its own."""
    made: Any = Device.__new__(Device)
    made.__dict__ |= vars(SimpleNamespace(cu=driver, context=context, stream=1, _registered=[]))
    return made  # type: ignore[no-any-return]


def test_a_page_is_registered_once_for_all_gpus() -> None:
    """The session page, which all stages of a split model share, stays registered until the last has closed."""
    driver, page = Driver(), np.zeros(512, np.uint64)
    first, second = (device(driver, context) for context in (1, 2))
    assert first.register(page) == second.register(page) == page.ctypes.data
    assert driver.registered[page.ctypes.data] == 1
    first.close()
    assert driver.registered[page.ctypes.data] == 1
    second.close()
    assert driver.registered[page.ctypes.data] == 0
    third = device(driver, 3)
    third.register(page)
    assert driver.registered[page.ctypes.data] == 1
    third.close()


def test_another_gpu_is_reached_once() -> None:
    """Asking again is fine; what else the driver says is an error."""
    driver = Driver()
    first, second = (device(driver, context) for context in (1, 2))
    first.reach(second)
    first.reach(second)
    assert driver.reached == {2}
    driver.access = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
    with pytest.raises(DriverError, match="PEER_ACCESS_UNSUPPORTED"):
        first.reach(second)
