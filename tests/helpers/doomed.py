"""A process in which the context of one GPU dies, under a driver alone or under a manager as well.

A kernel stores to an address where nothing is mapped: CUDA then ends the contexts of
all GPUs in this process (measured with driver 580, whatever is mapped for whom). A
broken card takes its own alone; the stand-in plays that, as `takes_all` says.
"""

import asyncio
import os
from typing import Any

from tests.helpers.cuda_kernels import Kernels
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.faulty_driver import FaultyDriver
from tests.helpers.in_process import Host
from tests.helpers.peer import SmallModel
from vmmd.driver import cuda_vmm
from vmmd.driver.base import Copy, FileSource, Slab, SlabSource
from vmmd.driver.cuda_calls import call, current
from vmmd.driver.cuda_mapper import CudaMapper
from vmmd.driver.cuda_vmm import CudaDriver
from vmmd.driver.host_memfd import HOST_UUID
from vmmd.errors import DriverError, Exhausted, NoDevice, VmmError
from vmmd.manager.verify import Verification
from vmmd.server import status

SLAB_BYTES = 2 << 20
GIB = 1 << 30


class Doomed:
    """The driver of that process."""

    def __init__(self, directory: str, fake: dict[str, Any] | None) -> None:
        self._fake = FakeCuda(**fake) if fake is not None else None
        if self._fake is not None:
            self._fake.install()
            cuda_vmm.FRESH_CHECK_BYTES = 1
        self.driver = CudaDriver(GIB, threads=2)
        self.uuids = [device.uuid for device in self.driver.devices() if not device.is_host]
        self._slabs: dict[str, Slab] = {}

    @property
    def takes_all(self) -> bool:
        """Whether the other GPUs' contexts die too."""
        return self._fake is None

    def kill_context(self, device: int) -> str:
        """Lets a kernel of a GPU fault; returns the name of the error that the kernel ended with."""
        if self._fake is not None:
            self._fake.dead.add(device)
            return "CUDA_ERROR_ILLEGAL_ADDRESS"
        mapper = CudaMapper(self.uuids[device])
        with current(mapper.cu, mapper.context):
            nothing = int(call(mapper.cu.cuMemAddressReserve, SLAB_BYTES, 0, 0, 0))
        try:
            Kernels(mapper).store(nothing, 1)
        except DriverError as error:
            return error.name
        return "no error"

    def use(self, device: int, path: str) -> None:
        """Fills a slab from a file, has it copied to host memory and reads that. Errors: `DriverError`."""
        uuid, fd = self.uuids[device], os.open(path, os.O_RDONLY)
        try:
            if uuid not in self._slabs:
                self._slabs[uuid] = self.driver.create(uuid, SLAB_BYTES)
            slab, home = self._slabs[uuid], self.driver.create(HOST_UUID, SLAB_BYTES)
            expected = os.pread(fd, 100_000, 3)
            self.driver.fill([Copy(slab, 512, len(expected), FileSource(fd, 3))])
            self.driver.fill([Copy(home, 0, len(expected), SlabSource(slab, 512))])
            assert self.driver.read(home, 0, len(expected)) == expected
            self.driver.destroy(home)
        finally:
            os.close(fd)

    def memory(self, device: int) -> int:
        """Free bytes of a GPU. Errors: `DriverError`."""
        return self.driver.memory(self.uuids[device]).free_bytes

    def failed(self) -> list[int]:
        """The GPUs that the driver has marked as failed."""
        return [self.uuids.index(uuid) for uuid in self.driver.failed_devices()]

    def close(self) -> list[str]:
        """Gives everything up, which a dead context must not keep it from; returns the GPUs that had failed."""
        self.driver.close()
        return self.driver.failed_devices()

    def run_manager(self, model: SmallModel) -> dict[str, Any]:
        """A manager over this driver loses the first GPU while it serves; what it and its sessions see."""
        return asyncio.run(self._run_manager(model))

    async def _run_manager(self, model: SmallModel) -> dict[str, Any]:
        host = Host.over(FaultyDriver(self.driver), SLAB_BYTES, 60)
        manager, first = host.manager, self.uuids[0]
        seen: dict[str, Any] = {}
        opened = await host.open(model, device=first)
        range_id = host.range(device=first)
        await manager.kv.grow(host.session, [(range_id, 32)])
        other = host.connect("user")
        other_range = host.range(other, self.uuids[-1])

        seen["kernel"] = self.kill_context(0)
        seen["noticed by"] = "a look at free memory"
        for _ in range(2):  # the first look finds it, the second acts on it
            manager.devices.measure()
        if not manager.ledger.devices[first].failed:
            seen["noticed by"] = "a copy"
            try:
                self.driver.read(opened.slabs[opened.ranges[0].slabs[0]], 0, 8)
            except DriverError:
                manager.devices.measure()
        seen["notices"] = list(host.notices)
        seen["states"] = {d.uuid: d.state for part in status.parts(manager) for d in part.devices}
        seen["growth"] = await _refusal(manager.kv.grow(host.session, [(range_id, 320)]), Exhausted)
        seen["opening"] = await _refusal(host.begin(model, host.connect("user"), first), NoDevice)
        seen["stale"] = opened.stale
        if len(self.uuids) > 1 and not self.takes_all:
            await manager.kv.grow(other, [(other_range, 64)])
            again = await host.open(model, host.connect("user"), self.uuids[1])
            verification = Verification(again)
            await verification.run()
            seen["on the other"] = verification.slots, verification.homes, verification.mismatched
        await host.close()
        manager.ledger.check()
        return seen


async def _refusal(doing: Any, kind: type[VmmError]) -> str:
    try:
        await doing
    except kind as error:
        return error.message
    return "it was not refused"
