"""Arithmetic of the client's side: where bytes lie, which slab size, what a reader reads."""

import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from strata_api.v1 import memory_pb2 as wire
from strata_api.v1 import pages

from strata_client.cells import CellShape, KVRange, cells_per_slab, choose_slab_bytes
from strata_client.mapping import MappedRange, consecutive_runs
from strata_client.model_memory import ClientMemory, Shape, weight_offsets
from strata_client.models.base import WeightExtent
from strata_client.steps import Changes, Steps
from vmmd.errors import InvalidRequest, NoDevice, StaleGeneration, VmmError

MIB = 1 << 20
SIZES = (300, 256, 10)


class _Reservation:
    """Slabs of plain memory; remembers its calls."""

    def __init__(self, slab_bytes: int, slabs_max: int) -> None:
        self.slab_bytes, self.slabs_max = slab_bytes, slabs_max
        self.memory = np.zeros(slab_bytes * slabs_max, np.uint8)
        self.calls: list[tuple[str, int, int]] = []

    def map(self, first_index: int, fds: list[int], *, writable: bool) -> None:
        self.calls.append(("map", first_index, len(fds)))
        for fd in fds:
            os.close(fd)

    def unmap(self, index: int) -> None:
        self.calls.append(("unmap", index, 1))

    def is_mapped(self, index: int) -> bool:
        return True

    def view(self) -> np.ndarray:
        return self.memory

    def close(self) -> None:
        self.calls.append(("close", 0, 0))


class _Mapper:
    def reserve(self, slab_bytes: int, slabs_max: int) -> _Reservation:
        self.reservation = _Reservation(slab_bytes, slabs_max)
        return self.reservation


def _range(slab_bytes: int, slabs_max: int, mapped: tuple[int, ...] = ()) -> MappedRange:
    range_ = MappedRange(_Mapper(), wire.Range(range_id=1, slab_bytes=slab_bytes, slabs_max=slabs_max), writable=True)
    range_.mapped.update(mapped)
    return range_


def test_range_is_an_array_or_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of the host has bytes and no address, one of a GPU an address and no bytes; neither pretends."""
    range_ = _range(256, 2)
    assert len(range_.view) == 512
    with pytest.raises(NoDevice, match="for the host only"):
        _ = range_.address
    range_ = _range(256, 2)
    monkeypatch.setattr(_Reservation, "view", lambda self: 1 << 40)
    assert range_.address == 1 << 40
    with pytest.raises(NoDevice, match="for a GPU's kernels only"):
        _ = range_.view


def _table(n_layers: int, n_experts: int) -> np.ndarray:
    table = np.zeros(pages.residency_bytes(n_layers * n_experts) // 8, np.uint64)
    table[[pages.WORD_MAGIC, pages.WORD_LAYERS, pages.WORD_EXPERTS]] = pages.MAGIC, n_layers, n_experts
    return table


def _memory(
    table: np.ndarray, arena: MappedRange, homes: MappedRange, map_homes: Callable[[], None] = lambda: None
) -> ClientMemory:
    shape = Shape(2, 4, [WeightExtent("a", 0, 0, 3), WeightExtent("b", 0, 0, 5)], lambda layer, expert: SIZES)
    heat = np.zeros(pages.heat_bytes(8) // 8, np.uint64)
    weights = _range(4096, 1, (0,))
    weights.view[256:261] = 7
    return ClientMemory(shape, weights, [arena], homes, table, heat, map_homes)


def test_runs_of_slabs_are_mapped_in_one_call_each() -> None:
    """Slabs 3 4 5, 9, and 1 2 are three calls, and descriptors are closed."""
    mapper = _Mapper()
    range_ = MappedRange(mapper, wire.Range(slab_bytes=4096, slabs_max=10), writable=False)
    range_.map([3, 4, 5, 9, 1, 2], [os.open("/dev/null", os.O_RDONLY) for _ in range(6)])
    assert mapper.reservation.calls == [("map", 3, 3), ("map", 9, 1), ("map", 1, 2)]
    assert range_.mapped == {1, 2, 3, 4, 5, 9}


def test_a_slab_that_comes_again_replaces_the_one_before() -> None:
    """What the daemon sent last is what is mapped."""
    mapper = _Mapper()
    range_ = MappedRange(mapper, wire.Range(slab_bytes=4096, slabs_max=10), writable=False)
    for _ in range(2):
        range_.map([4], [os.open("/dev/null", os.O_RDONLY)])
    assert mapper.reservation.calls == [("map", 4, 1), ("unmap", 4, 1), ("map", 4, 1)]


def test_what_is_mapped_already_stays() -> None:
    """Beside steps only what was not there before is mapped; each descriptor is closed, the others' too."""
    mapper = _Mapper()
    range_ = MappedRange(mapper, wire.Range(slab_bytes=4096, slabs_max=10), writable=False)
    range_.map([4], [os.open("/dev/null", os.O_RDONLY)])
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    range_.map_missing([3, 4, 5], fds)
    assert mapper.reservation.calls == [("map", 4, 1), ("map", 3, 1), ("map", 5, 1)]
    assert range_.mapped == {3, 4, 5}
    for fd in fds:
        with pytest.raises(OSError):
            os.fstat(fd)


@pytest.mark.parametrize("indexes", [[], [0], [0, 1], [1, 0], [5, 6, 9, 10, 11, 2]])
def test_runs_cover_every_index_once(indexes: list[int]) -> None:
    """Runs laid end to end are the list, and within a run each index follows the one before."""
    runs = [indexes[start:stop] for start, stop in consecutive_runs(indexes)]
    assert [index for run in runs for index in run] == indexes
    assert all(run == list(range(run[0], run[0] + len(run))) for run in runs)


def test_weights_lie_at_multiples_of_256() -> None:
    """Each extent begins at the next multiple of 256 bytes after the one before."""
    extents = [WeightExtent(str(i), 0, 0, n) for i, n in enumerate((1, 256, 257, 5))]
    assert weight_offsets(extents) == [0, 256, 512, 1024]


def test_weight_is_read_at_its_offset() -> None:
    """A tensor's bytes are those at its place in the weights range."""
    memory = _memory(_table(2, 4), _range(4096, 4), _range(4096, 4))
    assert memory.weight("b").tolist() == [7] * 5


def test_expert_is_read_from_its_slot() -> None:
    """Gate, up and down lie in the slot that the entry names, 256-byte aligned."""
    table, arena = _table(2, 4), _range(4096, 4, (2,))
    word = pages.pack(pages.TIER_DEVICE, 0, 2, 1)
    table[pages.HEADER_WORDS + 5] = word
    slot = 2 * 4096 + pages.slot_layout(*SIZES)[3]
    arena.view[slot : slot + 300], arena.view[slot + 512 : slot + 768], arena.view[slot + 768 : slot + 778] = 1, 2, 3
    found = _memory(table, arena, _range(4096, 4)).expert(1, 1)
    assert found.entry == word
    assert [(len(m), set(m.tolist())) for m in found[1:]] == [(300, {1}), (256, {2}), (10, {3})]


def test_expert_is_read_from_its_home_until_its_slab_is_mapped() -> None:
    """A reader without the entry's slab reads the home, and the slot once it is mapped."""
    table, arena, homes = _table(2, 4), _range(4096, 4), _range(4096, 4, (0,))
    slot, home = pages.pack(pages.TIER_DEVICE, 0, 2, 0), pages.pack(pages.TIER_HOST, 0, 0, 0)
    table[pages.HEADER_WORDS], table[pages.HEADER_WORDS + 8] = slot, home
    memory = _memory(table, arena, homes)
    assert memory.expert(0, 0).entry == home
    arena.mapped.add(2)
    assert memory.expert(0, 0).entry == slot
    arena.mapped.remove(2)
    assert memory.expert(0, 0).entry == home


def test_homes_are_mapped_when_one_is_looked_for() -> None:
    """Homes may be unmapped as long as every expert's slot is mapped; the first that has none waits for them."""
    table, arena, homes = _table(2, 4), _range(4096, 4, (2,)), _range(4096, 4)
    asked: list[None] = []

    def map_homes() -> None:
        asked.append(None)
        homes.mapped.add(0)

    memory = _memory(table, arena, homes, map_homes)
    table[pages.HEADER_WORDS] = pages.pack(pages.TIER_DEVICE, 0, 2, 0)
    memory.expert(0, 0)
    assert not asked
    home = pages.pack(pages.TIER_HOST, 0, 0, 0)
    table[pages.HEADER_WORDS] = table[pages.HEADER_WORDS + 8] = home  # evicted
    assert memory.expert(0, 0).entry == home
    assert len(asked) == 1


def test_expert_without_a_place_is_an_error() -> None:
    """An empty entry with an empty home is reported, not read."""
    with pytest.raises(VmmError, match="expert 3 of layer 1"):
        _memory(_table(2, 4), _range(4096, 4), _range(4096, 4)).expert(1, 3)


def test_table_of_another_shape_is_refused() -> None:
    """A residency table with other counts is not read."""
    with pytest.raises(StaleGeneration):
        _memory(_table(4, 2), _range(4096, 4), _range(4096, 4))


def test_heat_counts_tokens_and_experts_apart_for_prompts() -> None:
    """Decode and prompt counts go to their own halves of the heat page."""
    memory = _memory(_table(2, 4), _range(4096, 4), _range(4096, 4))
    memory.count(1, prompt=False)
    memory.routed(1, np.array([[0, 3]], np.int32), prompt=False)
    memory.count(2, prompt=True)
    memory.routed(0, np.array([[1, 2], [1, 3]], np.int32), prompt=True)
    heat = memory.heat.tolist()
    assert heat[:2] == [1, 2]
    assert heat[8:16] == [0, 0, 0, 0, 1, 0, 0, 1]
    assert heat[16:] == [0, 2, 1, 1, 0, 0, 0, 0]


def test_a_step_publishes_its_generation_and_retires() -> None:
    """Within a step the ring holds the table's generation; after it, also after an error, the client is idle."""
    line, table = np.zeros(pages.LINE_WORDS, np.uint64), _table(1, 1)
    seen: list[int] = []
    changes = Changes(pytest.fail)
    steps = Steps(line, table, threading.Lock(), changes)
    for number in range(1, 20):
        changes.add(lambda: seen.append(int(line[pages.WORD_LAUNCHED])))
        table[pages.WORD_GENERATION] = 100 + number
        with pytest.raises(ZeroDivisionError), steps.step():
            assert not steps.idle
            assert steps.lock.locked()
            assert line[pages.WORD_LAUNCHED] == number
            assert line[pages.WORD_RING + number % 16] == 100 + number
            raise ZeroDivisionError
        assert steps.idle
    assert seen == list(range(19))


def test_changes_wait_until_a_gpu_s_steps_have_ended() -> None:
    """A published step's memory changes only after it is retired, and a trouble stops no later change."""
    line, table, troubles = np.zeros(pages.LINE_WORDS, np.uint64), _table(1, 1), list[str]()
    changes = Changes(troubles.append)
    steps = Steps(line, table, threading.Lock(), changes)
    order: list[str] = []

    def drain() -> None:
        order.append("drained")
        line[pages.WORD_RETIRED] = line[pages.WORD_LAUNCHED]

    def fail() -> None:
        raise VmmError("no")

    steps.drain = drain
    assert (steps.publish(), steps.publish()) == (1, 2)
    assert order == []
    changes.add(fail)
    changes.add(lambda: order.append("changed"))
    assert steps.publish() == 3
    assert order == ["drained", "changed"]
    assert troubles == ["a change of mapped memory failed: no"]
    assert not steps.idle


def test_kv_segments_cover_cells_in_order() -> None:
    """Cells written through the segments of every layer are found again in order, slab after slab."""
    cell = CellShape(2, 1, 4)
    range_ = _range(2048, 3, (0, 1))
    kv = KVRange(range_, cell)
    assert (cell.size_bytes, kv.cells_per_slab, kv.cells) == (64, 32, 64)
    for layer in range(2):
        at = 0
        for k, v in kv.segments(layer, 40):
            k[:, 0, 0] = np.arange(at, at + len(k)) + 100 * layer
            v[:, 0, 3] = 1000
            at += len(k)
        assert at == 40
    for layer in range(2):
        firsts = np.concatenate([k[:, 0, 0] for k, _ in kv.segments(layer, 40)])
        assert firsts.tolist() == [100 * layer + i for i in range(40)]
    assert [len(k) for k, _ in kv.segments(0, 32)] == [32]


def test_cells_behind_a_gap_do_not_count() -> None:
    """Only cells that are there from the first on without a gap are usable."""
    assert KVRange(_range(2048, 4, (0, 2, 3)), CellShape(2, 1, 4)).cells == 32


def test_slab_holds_a_multiple_of_16_cells() -> None:
    """The tiny model's cells of 6144 bytes: 160 to a MiB; too small a slab is refused with one that does."""
    assert cells_per_slab(MIB, 6144) == 160
    with pytest.raises(InvalidRequest, match=r"slab_bytes = 65536; .* 131072 or more"):
        cells_per_slab(65536, 6144)


@pytest.mark.parametrize(
    ("slots", "other_bytes", "cell_bytes", "mib"),
    [
        ([84480] * 96, 25 * MIB, 6144, 1),  # the tiny model
        ([3 * MIB + 1000] * 16, 0, 6144, 16),  # 4 and 8 MiB waste a quarter
        ([600 * 1024] * 16, 0, 6144, 2),  # 1 MiB would waste 41 %
        ([1000] * 10, 0, 100_000, 2),  # 16 cells need 1.6 MB
        ([3 * MIB] * 6144, 0, 98_304, 16),  # 36 GiB in at most 4096 slabs
        ([100 * MIB], 0, 1000, 128),  # larger than the largest usual slab
        ([], 0, 1000, 1),
    ],
)
def test_slab_size_fits_the_model(slots: list[int], other_bytes: int, cell_bytes: int, mib: int) -> None:
    """The smallest slab with little waste, room for 16 cells and not too many slabs is chosen."""
    assert choose_slab_bytes(slots, other_bytes, cell_bytes) == mib * MIB
