"""One conversation: whose it is, what its cells are good for, and where it is in its life."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from vmmd.core.ledger import RangeRecord
from vmmd.manager.files import FileIdentity
from vmmd.manager.session import Session
from vmmd.manager.shared import U64, TokenPage

NO_TOKENS = np.zeros(0, np.uint64)


class Key(NamedTuple):
    """Whose conversation, and which."""

    domain: str
    uid: int
    name: str


class Cells(NamedTuple):
    """What a session asks for: cells are of use only where all of it is equal."""

    model: tuple[tuple[FileIdentity, ...], str]  # its files and geometry: another model object may have them
    device: str
    cells_per_slab: int
    layout: str


@dataclass(eq=False)
class Conversation:
    """One of them. `page` is there from its opening until it has settled, `tokens` are while it is parked."""

    key: Key
    cells: Cells
    model_name: str
    record: RangeRecord  # on the device, or on the host while it is spilled
    session: Session | None
    page: TokenPage | None
    tokens: U64 = field(default_factory=lambda: NO_TOKENS)  # of the complete cells
    task: "asyncio.Task[None] | None" = None  # settles or moves it

    @property
    def complete(self) -> int:
        """How many cells hold what they should; by the client's word while there is a page."""
        return len(self.tokens) if self.page is None else min(self.page.complete, self._cells_with_memory)

    @property
    def state(self) -> str:
        """One word for a person."""
        if self.session is not None:
            return "in use"
        if self.task is not None:
            return "settling" if self.page is not None else "moving"
        return "parked" if self.record.device == self.cells.device else "spilled"

    @property
    def parked_s(self) -> float:
        """When it was parked, by the clock of `Conversations`; it is."""
        assert self.record.parked_s is not None
        return self.record.parked_s

    def difference(self, asked: Cells) -> str:
        """Why its cells are of no use to who asks; empty if they are."""
        there = self.cells
        if there.model != asked.model:
            return f"what was left is of model {self.model_name!r}, or of a file that has changed since"
        if there.device != asked.device:
            return f"what was left is of device {there.device}"
        if there != asked:
            return f"what was left has other cells: {there.layout}"
        return ""

    @property
    def _cells_with_memory(self) -> int:
        """From the first on without a gap."""
        return self.record.hole() * self.record.cells_per_slab
