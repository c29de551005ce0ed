"""The rules of a batch: who begins, who waits for memory, and who ends."""

from collections.abc import Sequence

import pytest

from strata_client.batch import Batch, Result, Row
from strata_client.generate import CONTEXT, END, MAX_TOKENS, NO_ROOM, STOP
from strata_client.sampler import SamplerOptions
from vmmd.errors import Exhausted

CHUNK = 4


class Spelled:
    """A tokenizer whose token n is the character n, and 0 the end."""

    end_tokens = frozenset([0])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class Cells:
    """A sequence that takes its cells, four at a time, from what the machine has."""

    kept = 0

    def __init__(self, machine: "Machine") -> None:
        self.context = machine.context
        self.position = 0
        self.cells = 0
        self.refusal = ""
        self._machine = machine

    def prepare(self, prompt_tokens: int, *, wait: bool) -> None:
        if not self._grow(prompt_tokens, wait):
            raise Exhausted(f"no room for {prompt_tokens}")

    def has_room(self, *, wait: bool = True) -> bool:
        return self.position < self.context and self._grow(self.position + 1, wait)

    def _grow(self, cells: int, wait: bool) -> bool:
        more = -(-max(0, cells - self.cells) // 4) * 4
        if more > self._machine.free:
            self.refusal = "waited in vain" if wait else "not now"
            return False
        self._machine.free -= more
        self.cells += more
        return True


class Machine:
    """An engine and what it is attached to; notes who takes part in each step.

    A prompt's text is its own characters, again and again, in capitals, until an end token after `lengths`.
    """

    def __init__(self, free: int = 1000, context: int = 1000, lengths: Sequence[int] = ()) -> None:
        self.attached = self
        self.context = context
        self.free = free
        self.log: list[object] = []
        self._lengths = lengths
        self._rows: list[Row] = []
        self._open: list[Cells] = []

    def open_sequence(self) -> Cells:
        self._open.append(Cells(self))
        return self._open[-1]

    def close_sequence(self, sequence: Cells) -> None:
        self._open.remove(sequence)
        self.free += sequence.cells

    def settle(self) -> None:
        pass

    def prefill(self, row: Row) -> bool:
        self.log.append(f"chunk of {row.index}")
        row.sequence.position = min(len(row.prompt), row.sequence.position + CHUNK)
        return row.sequence.position == len(row.prompt)

    def join(self, row: Row) -> None:
        self._rows.append(row)

    def leave(self, row: Row) -> None:
        self._rows.remove(row)

    def step(self) -> list[tuple[Row, int]]:
        self.log.append([row.index for row in self._rows])
        for row in self._rows:
            assert row.sequence.position < row.sequence.cells or not row.tokens
            row.sequence.position += bool(row.tokens)
        return [(row, self._next(row)) for row in self._rows]

    def _next(self, row: Row) -> int:
        if row.index < len(self._lengths) and len(row.tokens) == self._lengths[row.index]:
            return 0
        return ord(chr(row.prompt[len(row.tokens) % len(row.prompt)]).upper())

    def run(
        self, *prompts: str, rows: int, max_tokens: int = 6, stops: Sequence[str] = (), seed: int | None = 3
    ) -> list[Result]:
        """The results in the order in which they come."""
        results: list[Result] = []
        batch = Batch(
            self, Spelled(), options=SamplerOptions(seed=seed), stop_strings=stops, max_tokens=max_tokens,
            rows_max=rows, on_result=results.append,
        )  # fmt: skip
        before = self.free
        batch.run([prompt.encode() for prompt in prompts])
        assert self.free == before and not self._open and not self._rows
        return results


def texts(results: Sequence[Result]) -> dict[int, tuple[str, str]]:
    return {result.index: (result.text, result.generation.reason) for result in results}


def test_prompts_begin_one_after_the_other_and_in_the_place_of_those_that_end() -> None:
    """One chunk between two steps; a sequence that ends makes room for the next prompt."""
    machine = Machine(lengths=[2, 9, 1])
    results = machine.run("ab", "cdefgh", "i", rows=2, max_tokens=5)
    assert texts(results) == {0: ("AB", END), 1: ("CDEFG", MAX_TOKENS), 2: ("I", END)}
    assert machine.log == [
        "chunk of 0", [0], "chunk of 1", [0], "chunk of 1", [0, 1], "chunk of 2", [1, 2], [1, 2], [1], [1],
    ]  # fmt: skip


def test_ends() -> None:
    """Each text ends for its own reason; what was held back for a stop string comes out where none came of it."""
    machine = Machine(context=12, lengths=[1])
    results = texts(machine.run("a", "bcd", "efghijk", rows=3, max_tokens=8, stops=("CDB", "KEX")))
    assert results == {0: ("A", END), 1: ("B", STOP), 2: ("EFGHIJ", CONTEXT)}
    assert texts(Machine().run("ab", "c", rows=2, max_tokens=0)) == {0: ("", MAX_TOKENS), 1: ("", MAX_TOKENS)}


def test_a_prompt_without_room_waits_for_a_sequence_to_end() -> None:
    """The others go on meanwhile; it is asked for again only when one has ended; then it begins."""
    machine = Machine(free=12, lengths=[6, 2, 1])
    results = machine.run("ab", "cdef", "ghijkl", rows=3)
    assert texts(results) == {0: ("ABABAB", MAX_TOKENS), 1: ("CD", END), 2: ("G", END)}
    assert next(result.index for result in results) == 1


def test_a_sequence_without_room_waits_and_goes_on() -> None:
    """A sequence that runs out of cells stands still until another gives some back; its text is whole."""
    machine = Machine(free=12, lengths=[6, 5])
    results = machine.run("ab", "cd", rows=2, max_tokens=9)
    assert texts(results) == {0: ("ABABAB", END), 1: ("CDCDC", END)}
    assert machine.log[-6:] == [[0], [0], [0], [1], [1], [1]]


def test_a_stalemate_ends_what_began_last() -> None:
    """Where all wait for memory the one that began last ends with what it has, and the others go on."""
    machine = Machine(free=12)
    results = machine.run("ab", "cd", "ef", rows=3, max_tokens=9)
    assert texts(results) == {0: ("ABABABABA", MAX_TOKENS), 1: ("CDC", NO_ROOM), 2: ("EFE", NO_ROOM)}


def test_alone_without_room() -> None:
    """A sequence that is alone ends as in a run of its own; a prompt that never fits has no text, and the next has."""
    machine = Machine(free=8, lengths=[20, 20, 1])
    results = machine.run("ab", "cdefghijkl", "m", rows=1, max_tokens=20)
    assert texts(results) == {0: ("ABABABA", NO_ROOM), 1: ("", NO_ROOM), 2: ("M", END)}
    assert [(result.began, result.generation.detail) for result in results] == [
        (True, "waited in vain"), (False, "no room for 10"), (True, ""),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [5, None])
def test_seeds(seed: int | None) -> None:
    """A seed is every sequence's; without one each has a fresh one."""
    seeds: set[int | None] = set()

    class Noting(Machine):
        def join(self, row: Row) -> None:
            seeds.add(row.options.seed)
            super().join(row)

    Noting().run("a", "b", "c", rows=2, seed=seed)
    assert seeds == {5} if seed else len(seeds) == 3 and None not in seeds
