"""Clients that do not do as they say, for `tests.helpers.peer.Remote`."""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

from strata_api.v1 import broker_pb2, memory_pb2

from strata_client import connection
from tests.helpers.peer import Client, Wire, memory_stub

_MREMAP_MAYMOVE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Liar(Client):
    """Honest until it is told to `lie`, or to cut one of its connections."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._kept: list[tuple[int, int]] = []  # addresses and sizes
        self._honest = self.session._remove

    def lie(self) -> None:
        """From now on it maps what is revoked a second time before it unmaps it and answers."""
        self.session._remove = self._keep  # type: ignore[method-assign]

    def _keep(self, removed: memory_pb2.SlabsRemoved) -> None:
        range_ = self.session._ranges[removed.range_id]
        for index in removed.slab_indexes:
            address = range_.view.ctypes.data + index * range_.slab_bytes
            again = _libc.mremap(address, 0, range_.slab_bytes, _MREMAP_MAYMOVE)  # of no bytes: another mapping
            assert again not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
            self._kept.append((again, range_.slab_bytes))
        self._honest(removed)

    def come_clean(self) -> int:
        """Unmaps what it kept, and lies no more; returns how many slabs that was."""
        self.session._remove = self._honest  # type: ignore[method-assign]
        for address, size_bytes in self._kept:
            assert _libc.munmap(address, size_bytes) == 0
        count = len(self._kept)
        self._kept.clear()
        return count

    def cut_stream(self) -> None:
        """Ends the watch stream alone."""
        self.session._events.cancel()
        self.session._watcher.join(30)
        assert not self.session._watcher.is_alive()

    def cut_broker(self) -> None:
        """Ends the session and keeps everything that is mapped."""
        self.session._broker.close()


class Hoarder:
    """Keeps the descriptors that it fetches, and forks children that inherit them and the connection."""

    def __init__(self, directory: str) -> None:
        self._wire = Wire(Path(directory))
        self._channel, self._memory = memory_stub(Path(directory))
        self._metadata: Any = ((connection.TOKEN_KEY, self._wire.token),)

    def grow(self, slabs: int) -> int:
        """Makes a range of so many slabs and fetches them; returns its id."""
        request = memory_pb2.CreateRangeRequest(cells_per_slab=16, cells_max=16 * slabs)
        range_id = self._memory.CreateRange(request, metadata=self._metadata).range.range_id
        growth = memory_pb2.GrowRangesRequest(growths=[memory_pb2.Growth(range_id=range_id, cells=16 * slabs)])
        batch_id = self._memory.GrowRanges(growth, metadata=self._metadata).batch_id
        reply = self._wire.ask(broker_pb2.BrokerRequest(fetch=broker_pb2.Fetch(batch_id=batch_id)))
        assert len(reply.descriptors.entries) == slabs
        assert self._wire.ask(broker_pb2.BrokerRequest(ack=broker_pb2.Ack(batch_id=batch_id))).HasField("done")
        return int(range_id)

    def shrink(self, range_id: int) -> None:
        """Says that a range's slabs are given back."""
        self._memory.ShrinkRange(memory_pb2.ShrinkRangeRequest(range_id=range_id), metadata=self._metadata)

    def fork(self) -> int:
        """A child that keeps all of it; returns its pid."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        return pid

    def let_go(self) -> None:
        """Closes this process's descriptors of slabs."""
        for fd in self._wire.fds[1:]:
            os.close(fd)
        del self._wire.fds[1:]
