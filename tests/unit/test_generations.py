"""The generation protocol, explored: every interleaving of daemon and readers over memory with store buffers.

Memory is x86-TSO: a store waits in its processor's buffer, in order, until it drains;
loads see the processor's own waiting stores first; a membarrier drains all buffers.
A reader's launch of GPU work goes through its buffer like a store; the GPU reads the
slot and retires the step on its own. What the daemon decides, it decides with the
real `is_behind`, one load at a time.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from strata_api.v1 import pages

from vmmd.core import generations

A, B, C = 0, 1, 2  # experts; A is in the slot first, B and C come after it
GARBAGE = -1
HOME, SLOT = 0, 1  # an entry: where to read
GENERATION, ENTRY, LINES = 0, 1, 4  # addresses: the table, then each reader's line of the session page
WORDS = 2 + pages.RING_WORDS  # of a line here: launched, retired, ring
LAUNCH, READ = "launch", "read"


class Rules(NamedTuple):
    """A protocol to explore."""

    readers: int
    steps: int  # each reader makes
    moves: tuple[int, ...]  # experts that the slot is given to, one after the other
    in_flight_max: int = 2
    gpu: bool = True  # steps are read and retired by a GPU; else by the reader itself
    barrier: bool = True
    publish_first: bool = True
    wait: bool = True
    wanted: tuple[int, ...] = ()  # experts that steps want; any if none are named
    may_stop: bool = False
    may_die: bool = False


class Reader(NamedTuple):
    """A reader's processor and its GPU."""

    at: str = "begin"
    step: int = 0  # steps begun
    generation: int = 0  # loaded for the present step
    buffer: tuple[tuple[int | str, int], ...] = ()  # stores (address, value) and launches, oldest first
    expert: int = 0  # wanted by the present step
    entry: int = HOME  # loaded for it
    running: tuple[tuple[int, int], ...] = ()  # (expert, entry) of launched steps that have not retired
    retired: int = 0
    gpu_read: bool = False  # the oldest running step has read its slot
    stopped: bool = False
    dead: bool = False


class State(NamedTuple):
    """The whole machine. The daemon's place is (move, phase); `loads` is what `is_behind` has seen so far."""

    memory: tuple[int, ...]
    slot: int
    move: int
    phase: str
    buffer: tuple[tuple[int, int], ...]
    looking_at: int
    loads: tuple[int, ...]
    readers: tuple[Reader, ...]


class Violation(Exception):
    """A step read another expert's bytes."""


class _NextLoad(Exception):
    """`is_behind` wants a word that it has not loaded yet."""


class _Line(Sequence[int]):
    """A line whose words are given one by one, as they are loaded."""

    def __init__(self, loads: tuple[int, ...]) -> None:
        self._loads = iter(loads)

    def __len__(self) -> int:
        return pages.LINE_WORDS

    def __getitem__(self, word: int) -> int:  # type: ignore[override]
        for value in self._loads:
            return value
        raise _NextLoad(word)


def line_address(reader: int, word: int) -> int:
    """Where a word of a reader's line is in memory."""
    inside = {pages.WORD_LAUNCHED: 0, pages.WORD_RETIRED: 1}.get(word, word - pages.WORD_RING + 2)
    return LINES + reader * WORDS + inside


def ring_address(reader: int, step: int) -> int:
    """Where a step's generation goes."""
    return line_address(reader, pages.WORD_RING + step % pages.RING_WORDS)


def store(memory: tuple[int, ...], address: int, value: int) -> tuple[int, ...]:
    """Memory after a store."""
    return (*memory[:address], value, *memory[address + 1 :])


def load(reader: Reader, memory: tuple[int, ...], address: int) -> int:
    """What a reader's load finds: its own latest waiting store, or memory."""
    return next((value for at, value in reversed(reader.buffer) if at == address), memory[address])


def start(rules: Rules) -> State:
    """A in the slot, everybody idle, generation 1."""
    memory = [0] * (LINES + rules.readers * WORDS)
    memory[GENERATION], memory[ENTRY + A] = 1, SLOT
    return State(tuple(memory), A, 0, "unpublish", (), 0, (), (Reader(),) * rules.readers)


def successors(rules: Rules, state: State) -> Iterator[State]:
    """Every state that one atomic action of somebody leads to. Errors: `Violation`."""
    yield from daemon(rules, state)
    for n, reader in enumerate(state.readers):
        for memory, after in acting(rules, state, n, reader):
            readers = (*state.readers[:n], after, *state.readers[n + 1 :])
            yield state._replace(memory=memory, readers=readers)


def daemon(rules: Rules, state: State) -> Iterator[State]:
    """Unpublish, bump, barrier, wait, overwrite, publish, bump; then the next move."""
    if state.buffer:
        (address, value), *rest = state.buffer
        yield state._replace(memory=store(state.memory, address, value), buffer=tuple(rest))
    if state.move == len(rules.moves):
        return
    occupant = (A, *rules.moves)[state.move]
    generation = state.move + 2
    if state.phase == "unpublish":
        stores = ((ENTRY + occupant, HOME), (GENERATION, generation))
        yield state._replace(phase="barrier", buffer=state.buffer + stores)
    elif state.phase == "barrier":
        yield (drained(state) if rules.barrier else state)._replace(phase="wait" if rules.wait else "overwrite")
    elif state.phase == "wait":
        yield waiting(state, generation)
    elif state.phase == "overwrite":
        yield state._replace(phase="publish", slot=GARBAGE)
    else:
        new = rules.moves[state.move]
        buffer = (*state.buffer, (ENTRY + new, SLOT))
        yield state._replace(move=state.move + 1, phase="unpublish", slot=new, buffer=buffer)


def drained(state: State) -> State:
    """All buffers drain: the daemon's and the readers'."""
    memory = state.memory
    for address, value in state.buffer:
        memory = store(memory, address, value)
    readers = []
    for n, reader in enumerate(state.readers):
        while reader.buffer and not reader.dead:
            memory, reader = drain_one(memory, n, reader)
        readers.append(reader)
    return state._replace(memory=memory, buffer=(), readers=tuple(readers))


def drain_one(memory: tuple[int, ...], n: int, reader: Reader) -> tuple[tuple[int, ...], Reader]:
    """The oldest store of a reader's buffer reaches memory, or the oldest launch its GPU."""
    (address, value), *rest = reader.buffer
    reader = reader._replace(buffer=tuple(rest))
    if isinstance(address, str):
        return memory, reader._replace(running=(*reader.running, divmod(value, 2)))
    return store(memory, address, value), reader


def waiting(state: State, generation: int) -> State:
    """One load of the real `is_behind` of one reader, or its answer."""
    n = state.looking_at
    if n == len(state.readers):
        return state._replace(phase="overwrite", looking_at=0)
    if state.readers[n].dead:
        return state._replace(looking_at=n + 1, loads=())
    try:
        behind = generations.is_behind(_Line(state.loads), generation)
    except _NextLoad as wanted:
        value = state.memory[line_address(n, wanted.args[0])]
        return state._replace(loads=(*state.loads, value))
    return state._replace(looking_at=n if behind else n + 1, loads=())


def acting(rules: Rules, state: State, n: int, reader: Reader) -> Iterator[tuple[tuple[int, ...], Reader]]:
    """What a reader, its buffer or its GPU can do next: (memory, reader) after it."""
    memory = state.memory
    if reader.dead:
        return
    if reader.buffer:
        yield drain_one(memory, n, reader)
    if reader.running:
        (expert, entry), *rest = reader.running
        if not reader.gpu_read:
            look(state, expert, entry)
            yield memory, reader._replace(gpu_read=True)
        else:
            retired = store(memory, line_address(n, pages.WORD_RETIRED), reader.retired + 1)
            yield retired, reader._replace(running=tuple(rest), retired=reader.retired + 1, gpu_read=False)
    if rules.may_die:
        yield memory, Reader(dead=True)
    if reader.stopped:
        return
    if rules.may_stop:
        yield memory, reader._replace(stopped=True)
    for after in host(rules, state, n, reader):
        yield memory, after


def host(rules: Rules, state: State, n: int, reader: Reader) -> Iterator[Reader]:
    """The reader's program: load the generation, publish it, load an entry, launch."""
    order = ["begin", "ring", "launched", "entry", "launch"]
    if not rules.publish_first:
        order = ["begin", "entry", "ring", "launched", "launch"]
    if not rules.gpu:
        order += [READ]
    following = dict(zip(order, [*order[1:], "begin"], strict=True))
    then = reader._replace(at=following[reader.at])
    if reader.at == "begin":
        retired = load(reader, state.memory, line_address(n, pages.WORD_RETIRED))
        if reader.step < rules.steps and reader.step - retired < rules.in_flight_max:
            generation = load(reader, state.memory, GENERATION)
            yield then._replace(step=reader.step + 1, generation=generation, entry=HOME)
    elif reader.at == "ring":
        yield then._replace(buffer=(*reader.buffer, (ring_address(n, reader.step), reader.generation)), generation=0)
    elif reader.at == "launched":
        launched = line_address(n, pages.WORD_LAUNCHED)
        yield then._replace(buffer=(*reader.buffer, (launched, reader.step)))
    elif reader.at == "entry":
        for expert in rules.wanted or {A, *rules.moves}:
            entry = load(reader, state.memory, ENTRY + expert)
            yield then._replace(expert=expert, entry=entry)
    elif reader.at == LAUNCH and rules.gpu:
        yield then._replace(buffer=(*reader.buffer, (LAUNCH, 2 * reader.expert + reader.entry)), expert=0, entry=HOME)
    elif reader.at == LAUNCH:
        look(state, reader.expert, reader.entry)
        yield then._replace(expert=0, entry=HOME)
    else:
        retired = line_address(n, pages.WORD_RETIRED)
        yield then._replace(buffer=(*reader.buffer, (retired, reader.step)))


def look(state: State, expert: int, entry: int) -> None:
    """Reads an expert's bytes where its entry said. Errors: `Violation`."""
    if entry == SLOT and state.slot != expert:
        raise Violation(f"a step read {state.slot} for expert {expert}")


def explore(rules: Rules) -> dict[State, list[State]]:
    """Visits every reachable state once; returns what each leads to. Errors: `Violation`."""
    first = start(rules)
    found: dict[State, list[State]] = {}
    todo = [first]
    while todo:
        state = todo.pop()
        if state not in found:
            found[state] = list(successors(rules, state))
            todo += found[state]
    return found


def stranded(rules: Rules, found: dict[State, list[State]]) -> list[State]:
    """States from which the daemon can never finish its moves."""
    before: dict[State, list[State]] = {state: [] for state in found}
    for state, following in found.items():
        for after in following:
            before[after].append(state)
    todo = [state for state in found if state.move == len(rules.moves)]
    can = set(todo)
    while todo:
        for state in before[todo.pop()]:
            if state not in can:
                can.add(state)
                todo.append(state)
    return [state for state in found if state not in can]


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that wraps within few steps, with as little to spare as the real one."""
    monkeypatch.setattr(pages, "RING_WORDS", 4)
    monkeypatch.setattr(pages, "STEPS_IN_FLIGHT_MAX", 3)
    monkeypatch.setattr(sys.modules[__name__], "WORDS", 2 + 4)


ONE = Rules(readers=1, steps=3, moves=(B, C))
TWO = Rules(readers=2, steps=1, moves=(B,))
SAFE = {
    "two moves of one slot, two steps in flight on a GPU": ONE,
    "the expert comes back to its slot": ONE._replace(steps=2, moves=(B, A)),
    "steps on the processor itself": ONE._replace(gpu=False),
    "two readers on GPUs": TWO,
    "two readers on processors": TWO._replace(gpu=False),
    "the ring wraps while the daemon looks": Rules(readers=1, steps=5, moves=(B,), in_flight_max=3, wanted=(A,)),
}


@pytest.mark.parametrize("rules", SAFE.values(), ids=SAFE)
def test_safe(rules: Rules) -> None:
    """No step ever reads a slot that was given to another expert, and the daemon never waits for ever."""
    assert not stranded(rules, explore(rules))


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "processor"])
def test_death(gpu: bool) -> None:
    """Readers that die at any moment hold nothing up and endanger nobody."""
    rules = TWO._replace(gpu=gpu, may_die=True, wanted=(A,))
    assert not stranded(rules, explore(rules))
    rules = ONE._replace(gpu=gpu, steps=2, may_die=True, moves=(B, A))
    assert not stranded(rules, explore(rules))


def test_stop() -> None:
    """A stopped reader holds the daemon up only with a step that it published and did not launch."""
    rules = ONE._replace(steps=2, may_stop=True)
    found = explore(rules)
    held_up = stranded(rules, found)
    assert held_up
    for state in held_up:
        (reader,) = state.readers
        assert reader.stopped and reader.at in ("launched", "entry", "launch")
    between = [s for s in found if s.readers[0].stopped and s.readers[0].at == "begin" and s.readers[0].running]
    assert between
    assert not set(between) & set(held_up)


def test_stopped_processor() -> None:
    """A reader without a GPU that is stopped within a step holds the daemon up, and nothing else does."""
    rules = ONE._replace(steps=2, gpu=False, may_stop=True)
    held_up = stranded(rules, explore(rules))
    assert held_up
    assert all(s.readers[0].stopped and s.readers[0].at != "begin" for s in held_up)


UNSAFE = {
    "no barrier": {"barrier": False},
    "entries read before publishing": {"publish_first": False},
    "no wait": {"wait": False},
}


@pytest.mark.parametrize("gpu", [True, False], ids=["gpu", "processor"])
@pytest.mark.parametrize("change", UNSAFE.values(), ids=UNSAFE)
def test_unsafe(change: dict[str, bool], gpu: bool) -> None:
    """The exploration finds the violation where a part of the protocol is left out."""
    with pytest.raises(Violation):
        explore(ONE._replace(gpu=gpu, **change))


def test_retired_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that does not check that no step retired meanwhile takes another step's ring word for the oldest's."""

    def careless(line: Sequence[int], generation: int) -> bool:
        retired, launched = line[pages.WORD_RETIRED], line[pages.WORD_LAUNCHED]
        oldest = pages.WORD_RING + (retired + 1) % pages.RING_WORDS
        return retired < launched and (launched - retired > pages.STEPS_IN_FLIGHT_MAX or line[oldest] < generation)

    monkeypatch.setattr(generations, "is_behind", careless)
    with pytest.raises(Violation):
        explore(SAFE["the ring wraps while the daemon looks"])


def line_of(launched: int, retired: int, ring: dict[int, int]) -> list[int]:
    line = [0] * pages.LINE_WORDS
    line[pages.WORD_LAUNCHED], line[pages.WORD_RETIRED] = launched, retired
    for step, generation in ring.items():
        line[pages.WORD_RING + step % pages.RING_WORDS] = generation
    return line


def test_is_behind() -> None:
    """Behind is a session whose oldest unretired step reads under an older generation, and nobody else."""
    assert not generations.is_behind(line_of(0, 0, {}), 5)
    assert not generations.is_behind(line_of(7, 7, {7: 1}), 5)
    assert generations.is_behind(line_of(7, 6, {7: 4}), 5)
    assert not generations.is_behind(line_of(7, 6, {7: 5}), 5)
    assert generations.is_behind(line_of(8, 6, {7: 4, 8: 6}), 5)
    assert not generations.is_behind(line_of(8, 6, {7: 5, 8: 6}), 5)


def test_hostile_lines() -> None:
    """A line that makes no sense is behind, or idle, and never an error."""
    huge = (1 << 64) - 1
    assert generations.is_behind(line_of(pages.STEPS_IN_FLIGHT_MAX + 1, 0, dict.fromkeys(range(4), huge)), 5)
    assert generations.is_behind(line_of(huge, 0, {}), 5)
    assert not generations.is_behind(line_of(0, huge, {}), 5)
    assert not generations.is_behind([huge] * pages.LINE_WORDS, 5)
