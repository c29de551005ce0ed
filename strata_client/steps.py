"""Steps of one attached model, published to the daemon, and what changes between them.

For the thread that runs the model, and for the session's watch thread while no step runs: `Steps.lock` keeps the two
apart. What the daemon takes back is therefore unmapped between steps only.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from strata_api.v1 import pages

from strata_client.mapping import U64
from vmmd.errors import LeaseRevoked, VmmError


class Steps:
    """Publishes the steps of one attached model: see `strata_api.v1.pages`.

    The host computes synchronously, one step at a time, within `step`. A GPU has
    several steps in flight: `publish` begins one, and the GPU itself retires it.

    Attributes:
        lock: the session's, held while a step is published or runs on the host; what is mapped changes only under
            it, and only while the model is idle.
        drain: waits until no step is in flight; whoever publishes for a GPU puts it here.
        line: the model's words of the session page, uint64 `[32]`.
    """

    def __init__(self, line: U64, table: U64, lock: threading.Lock, changes: "Changes") -> None:
        """Takes the model's line of the session page, its residency table, and what changes between steps."""
        self.lock = lock
        self.drain: Callable[[], None] = lambda: None
        self.line = line
        self._table = table
        self._changes = changes

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step on the host: residency entries may be read within it, and only there.

        Errors: `LeaseRevoked` where the daemon went on without this session meanwhile.
        """
        with self.lock:
            number = self._publish()
            try:
                yield
            finally:
                self.line[pages.WORD_RETIRED] = number
            self._check_ended()

    def publish(self) -> int:
        """Publishes a step that a GPU will retire, and returns its number.

        Residency entries may be read for it from here on. Errors: what `drain` raises; `LeaseRevoked` where the daemon
        goes on without this session.
        """
        with self.lock:
            return self._publish()

    @property
    def idle(self) -> bool:
        """Whether no step runs."""
        return bool(self.line[pages.WORD_LAUNCHED] == self.line[pages.WORD_RETIRED])

    def count(self, tokens: int, cells: int) -> None:
        """Shows `tokens` more evaluated tokens, and `cells` cells in use."""
        self.line[pages.WORD_TOKENS] += np.uint64(tokens)
        self.line[pages.WORD_CELLS] = cells

    def _check_ended(self) -> None:
        if self.line[pages.WORD_ENDED]:
            raise LeaseRevoked(
                "the daemon has ended this session and goes on without it: what it read may be wrong; start again"
            )

    def _publish(self) -> int:
        self._check_ended()
        if self._changes.waiting:
            self.drain()
            self._changes.carry_out()
        number = int(self.line[pages.WORD_LAUNCHED]) + 1
        self.line[pages.WORD_RING + number % pages.RING_WORDS] = self._table[pages.WORD_GENERATION]
        self.line[pages.WORD_LAUNCHED] = number
        return number


class Changes:
    """Changes of mapped memory that wait for a moment between steps, in their order."""

    def __init__(self, on_trouble: Callable[[str], None]) -> None:
        """`on_trouble` takes a line for each that fails."""
        self._waiting: deque[Callable[[], None]] = deque()
        self._on_trouble = on_trouble

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def add(self, change: Callable[[], None]) -> None:
        """Takes one. Any thread."""
        self._waiting.append(change)

    def carry_out(self) -> None:
        """Carries all out. Session's lock held, and no step in flight."""
        while self._waiting:
            try:
                self._waiting.popleft()()
            except (VmmError, OSError) as error:
                self._on_trouble(f"a change of mapped memory failed: {error}")
