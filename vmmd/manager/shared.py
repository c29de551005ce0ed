"""Shared pages, the daemon's side: sealed memfds (layout: ``strata_api.v1.pages``)."""

import fcntl
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt
from strata_api.v1 import pages

from vmmd.core.heat import Counts

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# <linux/fcntl.h>; the fcntl module lacks FUTURE_WRITE before Python 3.13
_F_SEAL_FUTURE_WRITE = 0x10


class SharedPage:
    """A memfd that the daemon maps and clients are given descriptors of.

    Sealed against shrinking, growing and further seals, so that no client can make
    the daemon fault. `read_only` adds the seal against future writes: only the
    mapping made here, before the seal, can write.
    """

    def __init__(self, name: str, size_bytes: int, *, read_only: bool) -> None:
        self.read_only = read_only
        self.fd = os.memfd_create(f"strata-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            self._map = mmap.mmap(self.fd, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | (_F_SEAL_FUTURE_WRITE if read_only else 0))
        except BaseException:
            os.close(self.fd)
            raise
        self.words: memoryview = memoryview(self._map).cast("Q")
        """Single items are read and written by one 8-byte instruction."""

    def export(self) -> int:
        """A new descriptor for one client; the caller closes it."""
        return os.dup(self.fd)

    def load(self, at: I64) -> U64:
        """The words at indexes ``[k]``."""
        return np.frombuffer(self._map, np.uint64)[at]

    def store(self, at: I64, words: U64) -> None:
        """Writes words at indexes ``[k]``, each by one 8-byte instruction: numpy scatters aligned items so."""
        np.frombuffer(self._map, np.uint64)[at] = words

    def close(self) -> None:
        """Unmaps and closes; clients keep their mappings."""
        self.words.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1  # its number may soon be another file's, which nobody shall be given instead


class ResidencyTable:
    """The residency table of one model: written by the daemon alone."""

    def __init__(self, epoch: int, n_layers: int, n_experts: int) -> None:
        self.n = n_layers * n_experts
        self.page = SharedPage("residency", pages.residency_bytes(self.n), read_only=True)
        words = self.page.words
        words[pages.WORD_EPOCH] = epoch
        words[pages.WORD_GENERATION] = 1
        words[pages.WORD_LAYERS] = n_layers
        words[pages.WORD_EXPERTS] = n_experts
        words[pages.WORD_MAGIC] = pages.MAGIC

    @property
    def generation(self) -> int:
        """The present generation."""
        return self.page.words[pages.WORD_GENERATION]

    def entry(self, expert: int) -> int:
        """The word of an expert's entry."""
        return self.page.words[pages.HEADER_WORDS + expert]

    def home(self, expert: int) -> int:
        """The word of an expert's home, 0 if it has none."""
        return self.page.words[pages.HEADER_WORDS + self.n + expert]

    def set_entries(self, experts: I64, tier: int, device: I64, slab: I64, slot: I64) -> None:
        """Rewrites where experts ``[k]`` are to be read."""
        self.page.store(pages.HEADER_WORDS + experts, _pack(tier, device, slab, slot))

    def set_homes(self, experts: I64, tier: int, device: I64, slab: I64, slot: I64) -> None:
        """Publishes the homes of experts ``[k]``; they never change."""
        self.page.store(pages.HEADER_WORDS + self.n + experts, _pack(tier, device, slab, slot))

    def send_home(self, experts: I64) -> None:
        """Rewrites the entries of experts ``[k]`` to their homes."""
        self.page.store(pages.HEADER_WORDS + experts, self.page.load(pages.HEADER_WORDS + self.n + experts))

    def bump(self) -> int:
        """Begins the next generation and returns it."""
        self.page.words[pages.WORD_GENERATION] += 1
        return self.generation

    def mark_stale(self) -> None:
        """Says in the table that the file behind the model has changed."""
        self.page.words[pages.WORD_STALE] = 1


def _pack(tier: int, *columns: I64) -> U64:
    """`pages.pack` for arrays."""
    unsigned: Any = [column.astype(np.uint64) for column in columns]
    words: U64 = pages.pack(tier, *unsigned)  # type: ignore[assignment]
    return words


class TokenPage:
    """Which tokens the cells of a conversation hold: written by the client alone, once it was made."""

    def __init__(self, cells_max: int, tokens: U64) -> None:
        """All cells that `tokens` ``[n]`` are of are complete."""
        self.page = SharedPage("tokens", pages.tokens_bytes(cells_max), read_only=False)
        np.asarray(self.page.words)[pages.HEADER_WORDS :][: len(tokens)] = tokens
        self.page.words[pages.WORD_COMPLETE] = len(tokens)

    @property
    def complete(self) -> int:
        """How many cells are complete, by the client's word."""
        return self.page.words[pages.WORD_COMPLETE]

    def lower(self, cells: int) -> None:
        """No more than so many cells are complete."""
        self.page.words[pages.WORD_COMPLETE] = min(self.complete, cells)

    def tokens(self, count: int) -> U64:
        """A copy of the tokens of the first `count` cells."""
        return np.array(self.page.words[pages.HEADER_WORDS : pages.HEADER_WORDS + count], np.uint64)


class HeatPage:
    """One session's routing counts of one model: written by the client alone."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.page = SharedPage("heat", pages.heat_bytes(n), read_only=False)
        self.seen = self.counts()  # what the figures have taken over

    def counts(self) -> Counts:
        """A copy of what the page says now."""
        words = np.array(self.page.words, np.uint64)
        start = pages.HEADER_WORDS
        # tokens beyond 2^62 make no sense; clamped so that they fit Python and numpy alike
        tokens, prompt = (min(int(words[i]), 1 << 62) for i in (pages.WORD_DECODED, pages.WORD_PROMPT))
        return Counts(tokens, prompt, words[start : start + self.n], words[start + self.n : start + 2 * self.n])
