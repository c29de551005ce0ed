"""The library for other engines: ranges of leased memory, whatever they are used for.

    with strata_client.connect() as client, client.range(64 << 20) as memory:
        array = numpy.asarray(memory.view((1024, 1024), "float32"))

It is the public face of `strata_client.session`, which `strata-client` itself stands on.
``docs/library.md`` says what happens when, and has an example.

Everything here may be called from any thread. A process that was forked off must
connect anew: leased memory is not inherited, and the daemon knows processes.
"""

import asyncio
import inspect
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Awaitable, Callable
from math import prod
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from strata_client import connection
from strata_client.callbacks import Callbacks, result_of
from strata_client.devices import choose_device
from strata_client.mapping import MappedRange
from strata_client.session import Session
from strata_client.view import View
from vmmd.errors import InvalidRequest, PermissionDenied, VmmError

OnGrowth = Callable[["Range", int], Awaitable[None] | None]
"""Called with a range that has grown and the bytes that it had before."""

OnShrink = Callable[["Range", int, float], Awaitable[int | None] | int | None]
"""Called when others need memory: a range, the bytes that it should keep, and until when (`time.monotonic`).

Once it returns, the range shrinks to that size, or to the one that it returns.
"""

PRIVATE_SLAB_BYTES = 1 << 20

_SLABS_MAX = (1 << 32) - 1  # the wire's
_CALLBACK_TIMEOUT_S = 60.0


class Device(NamedTuple):
    """A device of the daemon. Ranges grow by slabs; `cap_bytes` is what all clients together may have."""

    uuid: str
    name: str
    slab_bytes: int
    cap_bytes: int


def connect(socket: str | os.PathLike[str] | None = None, *, private: bool = False) -> "Client":
    """Begins a session with the daemon.

    Args:
        socket: its runtime directory, or the vmmd.sock in it; None for the usual places.
        private: where no daemon answers, start one for as long as the client is open. It has the host's memory only.

    Errors: `strata_client.NoDaemon`, `PermissionDenied`, `Draining`, `Unavailable`.
    """
    directories = connection.runtime_directories(None if socket is None else os.fspath(socket))
    try:
        return Client(Session.connect(directories))
    except connection.NoDaemon:
        if not private:
            raise
        return Client(Session.private(PRIVATE_SLAB_BYTES))


async def connect_async(socket: str | os.PathLike[str] | None = None, *, private: bool = False) -> "Client":
    """The same without blocking the event loop."""
    return await asyncio.to_thread(connect, socket, private=private)


class Client:
    """A session with a daemon, and its ranges. Ends with `close`, or as a context manager."""

    def __init__(self, session: Session) -> None:
        """Takes over a session; `connect` makes one."""
        self._session = session
        self._pid = os.getpid()
        self._lock = threading.Lock()  # of the ranges, never held while the daemon is waited for
        self._ranges: dict[int, Range] = {}
        self._closed = False
        self._over = threading.Event()
        self._callbacks = Callbacks(session.troubles)
        session.on_shrink_request = self._on_shrink_request

    @property
    def directory(self) -> Path:
        """The daemon's runtime directory: other processes may connect there."""
        return self._session.directory

    @property
    def is_private(self) -> bool:
        """Whether the daemon was started for this client."""
        return self._session.is_private

    @property
    def gone(self) -> str:
        """Why the daemon gives nothing more; empty while it serves. What is mapped stays usable."""
        return self._session.gone

    @property
    def troubles(self) -> list[str]:
        """What went wrong in the background, a line each: callbacks that raised, for instance."""
        return list(self._session.troubles)

    def devices(self) -> list[Device]:
        """The devices that ranges can be on. Errors: any `VmmError`."""
        self._check()
        return [Device(d.uuid, d.name, d.slab_bytes, d.cap_bytes) for d in self._session.devices() if not d.is_host]

    def range(
        self,
        size_bytes: int = 0,
        *,
        max_bytes: int | None = None,
        device: str | None = None,
        on_growth: OnGrowth | None = None,
        on_shrink: OnShrink | None = None,
    ) -> "Range":
        """Leases a range of contiguous addresses.

        Args:
            size_bytes: memory that it has from the beginning.
            max_bytes: what it may grow to; None: what it begins with. Addresses cost nothing.
            device: a UUID, the beginning of one, or an index of the daemon's list; None for the first.
            on_growth: called after each growth.
            on_shrink: with it, the daemon may ask for memory back before it refuses others. See `OnShrink`.

        Callbacks run one after the other in a thread of the client's own; coroutine functions on the event loop
        that runs where this is called, until the deadline.

        Errors: `InvalidRequest` (sizes that cannot be), `NoDevice`, `Exhausted` (who holds what is in it), any other
        `VmmError`.
        """
        return self._make(size_bytes, max_bytes, device, on_growth, on_shrink, _running_loop())

    async def range_async(
        self,
        size_bytes: int = 0,
        *,
        max_bytes: int | None = None,
        device: str | None = None,
        on_growth: OnGrowth | None = None,
        on_shrink: OnShrink | None = None,
    ) -> "Range":
        """The same without blocking the event loop."""
        args = (size_bytes, max_bytes, device, on_growth, on_shrink, _running_loop())
        return await asyncio.to_thread(self._make, *args)

    def close(self) -> None:
        """Closes every range and ends the session; a private daemon leaves.

        Where views are alive, it ends when the last of them has gone. A second call does nothing.
        """
        if os.getpid() != self._pid:
            return  # the parent's session goes on
        with self._lock:
            self._closed = True
            ranges = list(self._ranges.values())
        views = sum(range_._close() for range_ in ranges)
        self._end_if_over()
        if views:
            _warn(f"a client was closed while {views} views of its ranges are alive: it ends when they have gone")

    async def close_async(self) -> None:
        """The same without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close_async()

    def _make(
        self,
        size_bytes: int,
        max_bytes: int | None,
        device: str | None,
        on_growth: OnGrowth | None,
        on_shrink: OnShrink | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> "Range":
        self._check()
        most_bytes = size_bytes if max_bytes is None else max_bytes
        if not 0 <= size_bytes <= most_bytes or most_bytes == 0:
            raise InvalidRequest(
                f"a range of {size_bytes} bytes that may grow to {most_bytes}: the first must be 0 or more, the second"
                " 1 or more and not less than the first"
            )
        if loop is None and any(map(inspect.iscoroutinefunction, (on_growth, on_shrink))):
            raise InvalidRequest(
                "a coroutine function as a callback needs a running event loop where range() is called"
            )
        chosen = choose_device([d for d in self._session.devices() if not d.is_host], device)
        slabs_max = -(-most_bytes // chosen.slab_bytes)
        if slabs_max > _SLABS_MAX:
            raise InvalidRequest(
                f"a range of {most_bytes} bytes: at most {_SLABS_MAX} slabs of {chosen.slab_bytes} bytes are possible"
            )
        mapped = self._session.create_range(chosen, slabs_max, shrinkable=on_shrink is not None)
        range_ = Range(self, mapped, on_growth, on_shrink, loop)
        with self._lock:
            self._ranges[mapped.range_id] = range_
        try:
            self._check()  # closed meanwhile?
            if size_bytes:
                range_.grow(size_bytes)
        except BaseException:
            range_.close()
            raise
        return range_

    def _check(self) -> None:
        """Errors: `PermissionDenied` in a forked child, `InvalidRequest` after `close`."""
        self._check_process()
        if self._closed:
            raise InvalidRequest("this client is closed: connect() again")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PermissionDenied(
                f"this memory is leased to process {self._pid}, and process {os.getpid()} was forked off it:"
                " connect() in the process that uses the memory"
            )

    def _on_shrink_request(self, range_id: int, slabs: int, seconds: float) -> None:
        """In the watch thread."""
        with self._lock:
            range_ = self._ranges.get(range_id)
        if range_ is not None:
            deadline_s = time.monotonic() + seconds
            self._callbacks.put(lambda: range_._answer(slabs, deadline_s))

    def _range_gone(self, range_id: int) -> None:
        with self._lock:
            del self._ranges[range_id]
        self._end_if_over()

    def _end_if_over(self) -> None:
        with self._lock:
            is_over = self._closed and not self._ranges and not self._over.is_set()
            if is_over:
                self._over.set()
        if is_over:
            self._session.close()
            self._callbacks.stop()


class Range:
    """Contiguous addresses, the first `size_bytes` of which have memory. Made by `Client.range`.

    Attributes:
        device: UUID of the device that the memory is on.
        slab_bytes: what sizes are multiples of.
        max_bytes: what it may grow to.
    """

    def __init__(
        self,
        client: Client,
        mapped: MappedRange,
        on_growth: OnGrowth | None,
        on_shrink: OnShrink | None,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.device = mapped.device_uuid
        self.slab_bytes = mapped.slab_bytes
        self.max_bytes = mapped.slabs_max * mapped.slab_bytes
        self._client = client
        self._mapped = mapped
        self._on_growth = on_growth
        self._on_shrink = on_shrink
        self._loop = loop
        self._growing = threading.Lock()  # one growth at a time; taken before the range's own lock
        self._closed = False
        self._given_back = False
        self._numbers = itertools.count()
        self._views: dict[int, int] = {}  # by number: where a view ends, in bytes of the range

    @property
    def size_bytes(self) -> int:
        """Memory that it has now, from its beginning on."""
        return self._mapped.slabs * self.slab_bytes

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def grow(self, size_bytes: int) -> None:
        """Grows to at least `size_bytes`, all or nothing. New memory holds unspecified bytes.

        Waits for memory that is on its way back, and for what other clients are asked for.

        Errors: `InvalidRequest` (more than `max_bytes`), `Exhausted` (who holds what is in it), `Unavailable` (the
        daemon is gone), `LeaseRevoked` (closed or shrunk meanwhile by another thread).
        """
        self._check()
        if not 0 <= size_bytes <= self.max_bytes:
            raise InvalidRequest(f"this range cannot grow to {size_bytes} bytes: it was made for {self.max_bytes}")
        slabs = -(-size_bytes // self.slab_bytes)
        with self._growing:
            before = self.size_bytes
            if slabs * self.slab_bytes <= before:
                return
            self._client._session.grow_range(self._mapped, slabs)
        if self._on_growth is not None:
            on_growth = self._on_growth
            self._client._callbacks.put(
                lambda: result_of(lambda: on_growth(self, before), self._loop, _CALLBACK_TIMEOUT_S)
            )

    def shrink(self, size_bytes: int = 0) -> None:
        """Gives back what is beyond `size_bytes`, rounded up to whole slabs.

        On a GPU it waits first for every kernel that this process has launched there.

        Errors: `InvalidRequest` where a view reaches further; nothing has changed then.
        """
        self._check()
        if size_bytes < 0:
            raise InvalidRequest(f"a range cannot shrink to {size_bytes} bytes")
        slabs = -(-size_bytes // self.slab_bytes)
        with self._mapped.lock:
            end_bytes, count = self._viewed()
            if end_bytes > slabs * self.slab_bytes:
                raise InvalidRequest(
                    f"this range cannot shrink to {size_bytes} bytes: {count} views of it are alive and reach to byte"
                    f" {end_bytes}; drop them and every array made of them first"
                )
            if slabs < self._mapped.slabs:
                self._mapped.synchronize()
                self._client._session.shrink_range(self._mapped, slabs)

    def view(
        self, shape: int | tuple[int, ...] | None = None, dtype: npt.DTypeLike = "uint8", *, offset_bytes: int = 0
    ) -> View:
        """Its bytes as an array without a copy, for numpy and other frameworks: see `strata_client.view`.

        The range keeps the memory under a view for as long as the view, or an array made of it, is alive.

        Args:
            shape: None for as many items as there are from the offset on.
            dtype: numpy's; of others, such as bfloat16, take bytes and let the framework read them so.
            offset_bytes: where it begins, a multiple of the dtype's size.

        Errors: `InvalidRequest` where that is not within the memory that the range has.
        """
        kind = np.dtype(dtype)
        if kind.hasobject or not kind.itemsize:
            raise InvalidRequest(f"memory of a range cannot hold items of {kind}")
        with self._mapped.lock:
            self._check()
            size_bytes = self.size_bytes
            if shape is None:
                sizes: tuple[int, ...] = (max(0, size_bytes - offset_bytes) // kind.itemsize,)
            else:
                sizes = (shape,) if isinstance(shape, int) else tuple(shape)
            end_bytes = offset_bytes + prod(sizes) * kind.itemsize
            if offset_bytes < 0 or offset_bytes % kind.itemsize or min(sizes, default=1) < 0 or end_bytes > size_bytes:
                raise InvalidRequest(
                    f"a view of {sizes} items of {kind} at byte {offset_bytes} is not within this range, which has"
                    f" {size_bytes} bytes; an offset is a multiple of the item's size"
                )
            ordinal = self._mapped.ordinal
            start = self._mapped.view.ctypes.data if ordinal is None else self._mapped.address
            view = View(start + offset_bytes, sizes, kind, ordinal, self._client._check_process)
            number = next(self._numbers)
            self._views[number] = end_bytes
            weakref.finalize(view, self._view_gone, number).atexit = False
        return view

    def close(self) -> None:
        """Gives everything back. A second call does nothing.

        Where views of it are alive, nothing more can be done with it, but its memory stays until the last of them
        has gone; a `ResourceWarning` says so.
        """
        views = self._close()
        if views:
            _warn(f"a range was closed while {views} views of it are alive: its memory goes back when they have gone")

    async def grow_async(self, size_bytes: int) -> None:
        """As `grow`, without blocking the event loop. Cancelled, it goes on in the background."""
        await asyncio.to_thread(self.grow, size_bytes)

    async def shrink_async(self, size_bytes: int = 0) -> None:
        """As `shrink`, without blocking the event loop."""
        await asyncio.to_thread(self.shrink, size_bytes)

    async def close_async(self) -> None:
        """As `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> "Range":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> "Range":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close_async()

    def _check(self) -> None:
        self._client._check_process()
        if self._closed:
            raise InvalidRequest("this range is closed: make another one")

    def _viewed(self) -> tuple[int, int]:
        """Where the furthest view ends, and how many there are."""
        ends = list(self._views.values())  # at once: views go at any moment
        return max(ends, default=0), len(ends)

    # Closing

    def _close(self) -> int:
        """Returns how many views keep the memory."""
        if os.getpid() != self._client._pid:
            return 0
        with self._mapped.lock:
            was_closed, self._closed = self._closed, True
            views = len(self._views)
        if not views:
            self._give_back()
        return 0 if was_closed else views

    def _view_gone(self, number: int) -> None:
        """Called wherever the garbage collector runs: takes no lock."""
        self._views.pop(number, None)
        if self._closed and not self._views:
            self._client._callbacks.put(self._give_back)

    def _give_back(self) -> None:
        with self._mapped.lock:
            if self._given_back:
                return
            self._given_back = True
            try:
                self._mapped.synchronize()
                self._client._session.close_range(self._mapped)
            except VmmError as error:
                self._client._callbacks.note("a range could not be given back", error)
        self._client._range_gone(self._mapped.range_id)

    # In the callbacks' thread

    def _answer(self, slabs: int, deadline_s: float) -> None:
        """Asks the callback what can be given back, and gives it; gives nothing where that is too late or fails."""
        size_bytes = self.size_bytes
        keep_bytes = self.max_bytes
        on_shrink, seconds = self._on_shrink, deadline_s - time.monotonic()
        wanted_bytes = max(0, size_bytes - slabs * self.slab_bytes)
        if on_shrink is not None and seconds > 0 and not self._closed:
            try:
                kept = result_of(lambda: on_shrink(self, wanted_bytes, deadline_s), self._loop, seconds)
                keep_bytes = wanted_bytes if kept is None else max(0, kept)
            except BaseException as error:
                self._client._callbacks.note("a range was not shrunk for others: its on_shrink failed", error)
        with self._mapped.lock:
            if self._given_back:
                return
            if self.size_bytes != size_bytes:  # grown or shrunk meanwhile: the callback meant another size
                keep_bytes = self.max_bytes
            keep_bytes = min(max(keep_bytes, self._viewed()[0]), self.max_bytes)
            self._mapped.synchronize()
            self._client._session.shrink_range(self._mapped, -(-keep_bytes // self.slab_bytes))


def _warn(message: str) -> None:
    warnings.warn(message, ResourceWarning, 3)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
