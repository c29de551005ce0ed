"""A session: one client process and everything that is granted to it."""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strata_api.v1 import broker_pb2, memory_pb2, pages

from vmmd.core.ledger import SessionRecord
from vmmd.errors import Exhausted, InvalidRequest, NotFound
from vmmd.manager.figures import SessionFigures
from vmmd.manager.shared import HeatPage, SharedPage

EVENTS_MAX = 10_000
"""Unread watch events: a client that lets more pile up is cut off, as it would miss what is taken from it."""

BATCHES_MAX = 4096
"""Unacknowledged batches."""

Kind = broker_pb2.BatchEntry.Kind


class Attached(Protocol):
    """What a session needs of a model."""

    model_id: int


@dataclass(frozen=True)
class BatchItem:
    """One descriptor of a batch: a slab at an index of a range, or a shared page."""

    kind: broker_pb2.BatchEntry.Kind
    id: int
    slab_index: int = 0
    slab_id: int = 0
    page: SharedPage | None = None
    writable: bool = False


@dataclass
class Session:
    """State of one session. Its memory is in the ledger, not here."""

    record: SessionRecord
    token: str
    pidfd: int
    page: SharedPage
    attached: list[Attached | None] = field(default_factory=lambda: [None] * pages.ATTACHMENTS_MAX)
    heat: dict[int, HeatPage] = field(default_factory=dict)  # by model
    batches: dict[int, list[BatchItem]] = field(default_factory=dict)
    files: dict[int, list[int]] = field(default_factory=dict)  # descriptors, owned here
    events: deque[memory_pb2.WatchEvent] = field(default_factory=deque)
    watcher: Callable[[], None] | None = None  # wakes whoever streams the events
    revocations: set[int] = field(default_factory=set)  # not yet answered
    hang_up: Callable[[str], None] = lambda why: None  # ends the session from this side, connection and all
    figures: SessionFigures = field(default_factory=SessionFigures)
    opening: int = 0
    ended: bool = False

    @property
    def session_id(self) -> int:
        """Its id in the ledger."""
        return self.record.session_id

    def line(self, attachment: int) -> Sequence[int]:
        """The words of an attached model in the session page; the client writes them."""
        start = attachment * pages.LINE_WORDS
        return self.page.words[start : start + pages.LINE_WORDS]

    def attachment(self, model: Attached) -> int:
        """The line of a model that is attached. Errors: `NotFound`."""
        for i, other in enumerate(self.attached):
            if other is model:
                return i
        raise NotFound(f"model {model.model_id} is not open in this session")

    @property
    def first_attached(self) -> Attached | None:
        """The model that has been open longest in this session, as a rule; None without any."""
        return next((model for model in self.attached if model is not None), None)

    def attach(self, model: Attached) -> int:
        """Gives a model a line of the session page. Errors: `Exhausted`."""
        for i, other in enumerate(self.attached):
            if other is None:
                self.attached[i] = model
                line = self.line(i)
                for word in range(pages.WORD_RING):
                    line[word] = 0  # type: ignore[index]
                return i
        raise Exhausted(f"a session can have {pages.ATTACHMENTS_MAX} models open; close one first")

    def tell_ended(self) -> None:
        """Says in the session page that nobody waits for the steps of its models any more."""
        for i, model in enumerate(self.attached):
            if model is not None:
                self.line(i)[pages.WORD_ENDED] = 1  # type: ignore[index]

    def add_batch(self, batch_id: int, items: list[BatchItem]) -> int:
        """Keeps a grant until it is acknowledged. Errors: `Exhausted`."""
        self.check_batches()
        self.batches[batch_id] = items
        return batch_id

    def check_batches(self) -> None:
        """Errors: `Exhausted` where no batch more can be kept."""
        if len(self.batches) >= BATCHES_MAX:
            raise Exhausted(
                f"{BATCHES_MAX} batches wait for this session's acknowledgement; fetch and acknowledge them"
            )

    def withdraw(self, range_id: int) -> None:
        """What was granted of a range and not fetched yet cannot be any more."""
        for items in self.batches.values():
            items[:] = [item for item in items if item.id != range_id]

    def add_files(self, files_id: int, fds: list[int], files_max: int) -> None:
        """Takes over descriptors that the client lends. Errors: `InvalidRequest`; they stay the caller's then."""
        held = sum(map(len, self.files.values()))
        if held + len(fds) > files_max:
            raise InvalidRequest(f"{held + len(fds)} files lent at once; at most {files_max} are possible (files_max)")
        self.files.setdefault(files_id, []).extend(fds)

    def take_files(self, files_id: int) -> list[int]:
        """The descriptors of a lent list, which the caller owns now. Errors: `NotFound`."""
        try:
            return self.files.pop(files_id)
        except KeyError:
            raise NotFound(f"no files were lent under id {files_id}; send them to the broker first") from None

    def send(self, event: memory_pb2.WatchEvent) -> None:
        """Queues an event of the watch stream; cuts off a client that leaves too many unread, a moment later."""
        if self.ended:
            return
        if len(self.events) >= EVENTS_MAX:
            why = f"{EVENTS_MAX} events of its watch stream were left unread"
            asyncio.get_running_loop().call_soon(self.hang_up, why)
            return
        self.events.append(event)
        if self.watcher is not None:
            self.watcher()

    def state(self) -> str:
        """One word for a person."""
        if self.opening:
            return "opening"
        models = [i for i, model in enumerate(self.attached) if model is not None]
        if not models:
            return "connected"
        lines = [self.line(i) for i in models]
        running = any(line[pages.WORD_LAUNCHED] > line[pages.WORD_RETIRED] for line in lines)
        return "running" if running else "idle"

    def close(self) -> None:
        """Closes descriptors and pages. Leases are the manager's to take back."""
        self.ended = True
        for fds in self.files.values():
            for fd in fds:
                os.close(fd)
        self.files.clear()
        self.batches.clear()
        self.events.clear()
        for page in self.heat.values():
            page.page.close()
        self.heat.clear()
        self.page.close()
        os.close(self.pidfd)
        if self.watcher is not None:
            self.watcher()
