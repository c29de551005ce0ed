"""One sequence of tokens in elastic K/V cells: what they hold, how many are filled, and how they grow."""

from collections.abc import Callable, Sequence

from strata_api.v1 import memory_pb2 as wire

from strata_client.cells import KVRange
from strata_client.session import Session
from strata_client.transcript import Transcript
from vmmd.errors import Exhausted, LeaseRevoked, Unavailable
from vmmd.sizes import size_text

CELLS_AHEAD = 256
"""Cells beyond the prompt that are asked for at its start."""

CELLS_LOW = 64
"""With fewer cells left, decoding asks for more."""

_RETRY_CELLS = 16

Say = Callable[[str], None]


class TokenSequence:
    """A sequence's cells. An engine evaluates its tokens; several may share one model. For one thread.

    Attributes:
        kvs: the cells' ranges, one for each stage of the model. They grow together, all or nothing.
        transcript: of which tokens the cells are.
        context: most cells the sequence may have.
        position: cells filled.
        kept: tokens of the prompt whose cells were there when it began.
        refusal: why the last growth was refused; empty if it was not.
    """

    def __init__(
        self,
        session: Session,
        kvs: Sequence[KVRange],
        context: int,
        transcript: Transcript,
        *,
        say: Say,
        say_verbose: Say,
    ) -> None:
        """Takes ranges, with or without memory."""
        self.kvs = kvs
        self.transcript = transcript
        self.context = context
        self.position = 0
        self.kept = 0
        self.refusal = ""
        self._session = session
        self._say = say
        self._say_verbose = say_verbose
        self._ask_again_at = 0

    @property
    def kv(self) -> KVRange:
        """The cells' range, of a model that is not split."""
        (kv,) = self.kvs
        return kv

    @property
    def mapped_cells(self) -> int:
        """Cells there is memory for in all ranges."""
        return min(kv.cells for kv in self.kvs)

    @property
    def cells(self) -> int:
        """Cells there is memory for, at most the context."""
        return min(self.mapped_cells, self.context)

    def restart(self) -> None:
        """Begins a new sequence in the same memory."""
        self.transcript.cut(0)
        self.position = self._ask_again_at = 0

    def keep(self, prompt: Sequence[int]) -> None:
        """Goes on after the cells that hold a prompt's beginning; its last token has to be evaluated in any case."""
        self.kept = self.position = self.transcript.common(prompt[:-1])
        self.transcript.cut(self.kept)
        self._ask_again_at = 0

    def check_cells(self, cells: int) -> None:
        """Errors: `LeaseRevoked` if there is no memory for so many cells, which there was."""
        if self.mapped_cells < cells:
            raise LeaseRevoked(f"the daemon took K/V back: {self.mapped_cells} cells are left")

    def prepare(self, prompt_tokens: int, *, wait: bool = True) -> None:
        """Makes room for a prompt and, if there is any, for what follows it. `wait`: as `Session.grow`.

        Errors: `Exhausted` or `Unavailable` if there is no room for the prompt.
        """
        wanted = min(self.context, prompt_tokens + CELLS_AHEAD)
        if self.grow(wanted) or self.mapped_cells >= prompt_tokens:
            return
        if not self.grow(prompt_tokens, wait=wait):
            raise Exhausted(f"no room for the K/V of a prompt of {prompt_tokens} tokens: {self.refusal}")

    def has_room(self, *, wait: bool = True) -> bool:
        """Whether one more token fits; asks for more memory well before none does.

        A refusal is in `refusal`; the sequence goes on with what it has. `wait`: as `Session.grow`, where none does.
        """
        mapped = self.mapped_cells
        left = mapped - self.position
        if left < CELLS_LOW and mapped < self.context and (left <= 0 or self.position >= self._ask_again_at):
            self._ask_again_at = self.position + _RETRY_CELLS
            a_slab = min(kv.cells_per_slab for kv in self.kvs)
            self.grow(min(self.context, mapped + max(a_slab, CELLS_LOW)), wait=wait and left <= 0)
        return self.position < self.cells

    def grow(self, cells: int, *, wait: bool = False) -> bool:
        """Grows to at least `cells` cells; whether there are so many now. `wait`: as `Session.grow`."""
        if self.mapped_cells >= cells:
            return True
        try:
            reply = self._session.grow(self.kvs, cells, wait=wait)
        except (Exhausted, Unavailable, LeaseRevoked) as error:
            self.refusal = error.message
            self._say_verbose(f"strata: K/V stays at {self.mapped_cells} cells: {error.message}")
            return False
        self.refusal = ""
        mapped, size_bytes = self.mapped_cells, sum(kv.size_bytes for kv in self.kvs)
        line = growth_line(mapped, size_bytes, reply.trades)
        if line:
            self._say(line)
        else:
            self._say_verbose(
                f"strata: K/V grown to {mapped} cells ({size_text(size_bytes)}) from {reply.free_slabs} free slabs"
            )
        return True


def growth_line(cells: int, size_bytes: int, trades: Sequence[wire.Trade]) -> str:
    """The log line of a growth to which experts' slots were given; empty if none were."""
    slots = sum(trade.slots for trade in trades)
    if not slots:
        return ""
    moved = sum(trade.experts_moved for trade in trades)
    occupied = sum(trade.slots_occupied for trade in trades)
    total = sum(trade.slots_total for trade in trades)
    return (
        f"strata: K/V grown to {cells} cells ({size_text(size_bytes)}); the expert cache gave {slots} slots for it, "
        f"{moved} hotter experts moved to colder ones' slots ({occupied} of {total} slots hold experts)"
    )
