"""The library's callbacks: one thread that runs them in turn, and the event loops that coroutines run on."""

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vmmd.errors import Unavailable

T = TypeVar("T")

_LEAVE_TIMEOUT_S = 2.0

log = logging.getLogger("strata_client")


class Callbacks:
    """Runs jobs one after the other in a thread of its own. What they raise is logged and noted, never lost."""

    def __init__(self, troubles: list[str]) -> None:
        """`troubles` takes a line for everything that is raised."""
        self._troubles = troubles
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="strata-callbacks", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Runs a job when those before it are done. From anywhere, also while the garbage collector runs."""
        self._jobs.put(job)

    def note(self, what: str, error: BaseException) -> None:
        """Logs an error, and notes it for `Client.troubles`."""
        log.error("%s", what, exc_info=error)
        self._troubles.append(f"{what}: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Runs what was put before, and no more; waits for that a moment, unless a job calls it."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_TIMEOUT_S)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:
                self.note("a callback failed", error)


def result_of(callback: Callable[[], Awaitable[T] | T], loop: asyncio.AbstractEventLoop | None, seconds: float) -> T:
    """What a callback returns; a coroutine runs on `loop`, for so many seconds at most.

    Errors: what it raises; `TimeoutError`; `Unavailable` where the loop is closed.
    """
    result = callback()
    if not inspect.isawaitable(result):
        return result
    if loop is None or loop.is_closed():
        if inspect.iscoroutine(result):
            result.close()
        raise Unavailable("the event loop of a range's callbacks is closed")

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await result

    future = asyncio.run_coroutine_threadsafe(bounded(), loop)
    try:
        return future.result(seconds + _LEAVE_TIMEOUT_S)
    except TimeoutError:
        future.cancel()  # the loop itself stands still
        raise
