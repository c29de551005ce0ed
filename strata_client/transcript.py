"""Which tokens a sequence's K/V cells hold; of a conversation, in a page that outlives this process.

The page is true at every moment, also if this process is killed at that moment: tokens
are written before they count, and cells stop counting before they are overwritten.
"""

from collections.abc import Sequence

import numpy as np
from strata_api.v1 import pages

from strata_client.mapping import U64


class Transcript:
    """The tokens of the cells that are computed, from the first on."""

    def __init__(self, page: U64) -> None:
        """Takes a token page: see `strata_api.v1.pages`."""
        self._page = page
        self._tokens = page[pages.HEADER_WORDS :]

    @classmethod
    def private(cls, cells_max: int) -> "Transcript":
        """One that ends with this process, of cells that nobody has computed yet."""
        return cls(np.zeros(pages.tokens_bytes(cells_max) // pages.WORD_BYTES, np.uint64))

    @property
    def complete(self) -> int:
        """How many cells are computed."""
        return int(self._page[pages.WORD_COMPLETE])

    def common(self, tokens: Sequence[int]) -> int:
        """How many of the computed cells hold the beginning of `tokens`."""
        n = min(self.complete, len(tokens))
        differs = np.flatnonzero(self._tokens[:n] != np.asarray(tokens[:n], np.uint64))
        return int(differs[0]) if len(differs) else n

    def cut(self, cells: int) -> None:
        """Cells from this one on count no more; to be called before anything is written to them."""
        self._page[pages.WORD_COMPLETE] = min(self.complete, cells)

    def add(self, tokens: Sequence[int]) -> None:
        """The next cells have been computed, and hold these tokens."""
        begin = self.complete
        self._tokens[begin : begin + len(tokens)] = tokens
        self._page[pages.WORD_COMPLETE] = begin + len(tokens)
