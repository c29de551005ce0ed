"""A manager in this process, over drivers that fail or simulate."""

import asyncio
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers.daemon import wait_until
from tests.helpers.faulty_driver import FaultyDriver
from tests.helpers.peer import WEIGHTS_BYTES, SmallModel
from vmmd.core import geometry
from vmmd.core.ledger import DeviceRecord, SlabState
from vmmd.core.shares import Asked
from vmmd.driver.host_memfd import HOST_UUID, HostDriver
from vmmd.manager import Manager
from vmmd.manager.manager import Options
from vmmd.manager.session import Session

SLAB_BYTES = 64 << 10


class Host:
    """A manager over a faulty driver, and one session of this process."""

    def __init__(
        self,
        device_slabs: int = 20,
        homes_slabs: int = 20,
        n_devices: int = 1,
        wrap: Callable[[HostDriver], FaultyDriver] = FaultyDriver,
        state_dir: Path | None = None,
    ) -> None:
        devices = [(f"SIM-{i}", "simulated", device_slabs * SLAB_BYTES) for i in range(n_devices)]
        self.inner = HostDriver(devices, homes_slabs * SLAB_BYTES)
        self._compose(wrap(self.inner), SLAB_BYTES, 1 << 62, state_dir)

    @classmethod
    def over(cls, driver: FaultyDriver, slab_bytes: int, slabs: int) -> "Host":
        """The same over another driver, of each of whose devices it takes so many slabs at most."""
        made = cls.__new__(cls)
        made._compose(driver, slab_bytes, slabs * slab_bytes)
        return made

    def _compose(self, driver: FaultyDriver, slab_bytes: int, cap_bytes: int, state_dir: Path | None = None) -> None:
        self.driver = driver
        records = [
            DeviceRecord(
                d.uuid, d.name, slab_bytes, d.total_bytes, min(d.total_bytes, cap_bytes), is_host=d.uuid == HOST_UUID
            )
            for d in self.driver.devices()
        ]
        options = Options(floor_slots=10, quiesce_deadline_s=0.2, revoke_deadline_s=0.3, state_dir=state_dir)
        self.manager = Manager(self.driver, records, options)
        self.session = self.connect("user")
        self._files = 0
        self.notices: list[str] = []

    def connect(self, domain: str, asked: Asked | None = None, uid: int = 0) -> Session:
        pidfd = os.pidfd_open(os.getpid())
        session = self.manager.connect(os.getpid(), uid, 0, domain, "test", pidfd, asked or Asked())
        session.watcher = functools.partial(self._take_note, session)
        return session

    def _take_note(self, session: Session) -> None:
        """What a client does with the events of its watch stream."""
        while session.events:
            event = session.events.popleft()
            if event.HasField("slabs_added"):
                self.manager.acknowledge(session, event.slabs_added.batch_id)
            elif event.HasField("slabs_removed"):
                self.manager.released(session, event.slabs_removed.revocation_id)
            elif event.HasField("notice"):
                self.notices.append(event.notice.message)

    def limit_waiting(self, count: int) -> None:
        self.manager.options = dataclasses.replace(self.manager.options, waiting_per_user_max=count)

    async def open(
        self, model: SmallModel, session: Session | None = None, device: str = "", more_devices: Sequence[str] = ()
    ) -> Any:
        """Opens a model and waits until its homes are filled, too."""
        opened = await self.begin(model, session, device, more_devices)
        if opened.background is not None:
            await asyncio.wait([opened.background])
        return opened

    async def begin(
        self,
        model: SmallModel,
        session: Session | None = None,
        device: str = "",
        more_devices: Sequence[str] = (),
        wait_s: float = 0.0,
    ) -> Any:
        """Opens a model and waits until steps can start."""
        session = session or self.session
        self._files += 1
        session.add_files(self._files, [os.open(model.path, os.O_RDONLY)], 100)
        stacks = [geometry.Stack(*dataclasses.astuple(stack)) for stack in model.stacks]
        weights = [geometry.Extent(0, 0, WEIGHTS_BYTES)]
        shape = model.n_layers, model.n_experts, model.top_k
        devices = [*([device] if device else []), *more_devices]
        opened, _ = await self.manager.open_model(session, self._files, "m", devices, shape, stacks, weights, wait_s)
        await asyncio.shield(opened.ready)
        await self.manager.extend_model(session, opened, devices)
        return opened

    def range(self, session: Session | None = None, device: str = "") -> int:
        return self.manager.kv.create(session or self.session, device, 0, 16, 16 * 1000).range_id

    def fetch(self, batch_id: int, session: Session | None = None) -> int:
        found, _, _ = self.manager.descriptors(session or self.session, batch_id, 0, 250)
        for _, fd in found:
            os.close(fd)
        return len(found)

    def state(self) -> tuple[dict[str, int], int, int]:
        """What must not change by a failure: the ledger's sums, physical slabs, descriptors."""
        ledger = self.manager.ledger
        ledger.check()
        for model in self.manager.models.values():
            model.arena.check()
        assert set(self.manager.physical) == set(ledger.slabs)
        assert len(self.driver.live) == len(ledger.slabs)
        sums = {f"{d} {k}": v for d in ledger.devices for k, v in ledger.bytes_by_kind(d).items() if k != "free"}
        free = sum(len(ledger.slabs_in(d, SlabState.FREE)) for d in ledger.devices)
        return sums, len(ledger.slabs) - free, our_descriptors() - len(ledger.slabs)

    async def close(self) -> None:
        for session in list(self.manager.sessions.values()):
            self.manager.disconnect(session, "the test ends")
        for model in list(self.manager.models.values()):
            await self.manager.drop_model(model)
        await self.manager.close()


async def until(condition: Callable[[], object]) -> None:
    """Waits until it holds. Errors: `TimeoutError`, after a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def our_descriptors() -> int:
    """Descriptors of slabs, shared pages, model files and pidfds in this process."""
    gc.collect()  # pages that clients of other tests had mapped here
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:strata" in link or link.endswith("/model") or "pidfd" in link for link in links)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    before = our_descriptors()
    asyncio.run(scenario())
    # threads may be at something still, also those of clients that tests before this one had
    wait_until(
        lambda: our_descriptors() <= before, otherwise=lambda: f"{our_descriptors()} descriptors, {before} before"
    )
