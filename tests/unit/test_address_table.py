"""The address table: residency entries as addresses."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from strata_client.gpu.address_table import AddressTable
from strata_client.model_memory import ClientMemory, Shape
from vmmd.errors import VmmError

SLAB = 1 << 21


def _range(address: int, mapped: set[int], reader_uuid: str = "primary") -> Any:
    return SimpleNamespace(
        range_id=address >> 40, address=address, mapped=mapped, slabs_max=8, slab_bytes=SLAB, changes=len(mapped),
        reader_uuid=reader_uuid,
    )  # fmt: skip


def _table(
    n_layers: int, n_experts: int, sizes: tuple[int, int, int], peer_reader: str = "primary"
) -> tuple[Any, AddressTable]:
    n = n_layers * n_experts
    page, heat = (np.zeros(size // 8, np.uint64) for size in (pages.residency_bytes(n), pages.heat_bytes(n)))
    page[[pages.WORD_MAGIC, pages.WORD_LAYERS, pages.WORD_EXPERTS]] = pages.MAGIC, n_layers, n_experts
    arena: Any = [_range(1 << 40, {0, 1, 2}), _range(1 << 41, set(), peer_reader)]
    weights, homes = _range(0, set()), _range(1 << 42, {0, 1, 2, 3})
    shape = Shape(n_layers, n_experts, [], lambda layer, expert: sizes)
    memory = ClientMemory(shape, weights, arena, homes, page, heat, lambda: None)
    memory.entries[:] = [pages.pack(pages.TIER_DEVICE, 0, i % 3, i // 3) for i in range(n)]
    memory.home_entries[:] = [pages.pack(pages.TIER_HOST, 0, i % 4, i // 4) for i in range(n)]
    return memory, AddressTable(memory, np.tile(np.array(sizes, np.int64), (n_layers, n_experts, 1)))


def _expected(memory: Any, word: int, sizes: tuple[int, int, int]) -> list[int]:
    entry = pages.unpack(word)
    gate, up, down, slot = pages.slot_layout(*sizes)
    range_ = memory.homes if entry.tier == pages.TIER_HOST else memory.arena[entry.device]
    base = range_.address + entry.slab * SLAB + entry.slot * slot
    return [base + gate, base + up, base + down]


def test_entries_become_addresses() -> None:
    """Every matrix is found where slab, slot and the slot's layout put it; a second look finds nothing new."""
    sizes = (300, 256, 10)
    memory, table = _table(2, 6, sizes)
    assert table.refresh()
    words = table.words.reshape(-1, 3)
    for i, word in enumerate(memory.entries.tolist()):
        assert words[i].tolist() == _expected(memory, word, sizes)
    assert not table.in_host.any()
    assert not table.refresh()


def test_changed_entries_are_taken_over() -> None:
    """An evicted expert is read from its home and one that came back from its slot, the others stay."""
    sizes = (512, 512, 512)
    memory, table = _table(2, 6, sizes)
    table.refresh()
    before = table.words.copy()
    memory.entries[4] = memory.home_entries[4]
    assert table.refresh()
    changed = np.argwhere((table.words != before).any(axis=2))
    assert changed.tolist() == [[0, 4]]
    assert table.words[0, 4].tolist() == _expected(memory, int(memory.home_entries[4]), sizes)
    assert table.in_host[0, 4]
    memory.entries[4] = pages.pack(pages.TIER_DEVICE, 0, 2, 7)
    assert table.refresh()
    assert table.words[0, 4].tolist() == _expected(memory, int(memory.entries[4]), sizes)
    assert not table.in_host.any()


def test_a_slab_that_is_not_mapped_is_read_from_home() -> None:
    """Experts of an unmapped slab, or of a device that is not mapped at all, are read from their homes."""
    sizes = (512, 512, 512)
    memory, table = _table(1, 9, sizes)
    memory.arena[0].mapped.remove(1)
    memory.entries[2] = pages.pack(pages.TIER_DEVICE, 1, 0, 0)
    memory.entries[3] = pages.pack(pages.TIER_DEVICE, 2, 0, 0)  # a part that came later
    table.refresh()
    at_home = [bool(value) for value in table.in_host[0]]
    assert at_home == [i in (2, 3) or i % 3 == 1 for i in range(9)]
    memory.arena[0].mapped.add(1)
    memory.arena[0].changes += 1
    assert table.refresh()
    assert np.flatnonzero(table.in_host[0]).tolist() == [2, 3]


def test_a_peers_slots_are_read_where_they_are() -> None:
    """Experts on another device have addresses in its range, and count as on a GPU."""
    sizes = (512, 512, 512)
    memory, table = _table(1, 9, sizes)
    memory.arena[1].mapped.update({0, 5})
    memory.entries[[2, 7]] = pages.pack(pages.TIER_DEVICE, 1, 5, 3), pages.pack(pages.TIER_DEVICE, 1, 0, 1)
    table.refresh()
    for expert in (2, 7):
        assert table.words[0, expert].tolist() == _expected(memory, int(memory.entries[expert]), sizes)
    assert not table.in_host.any()
    assert [memory.experts_on(part) for part in range(3)] == [[0, 1, 3, 4, 5, 6, 8], [2, 7], []]


def test_a_peer_without_a_path_has_a_table_of_its_own() -> None:
    """An expert there has its address in the peer's table and 0 in the computing device's, and the other way round."""
    sizes = (512, 512, 512)
    memory, table = _table(1, 9, sizes, peer_reader="peer")
    memory.arena[1].mapped.add(5)
    memory.entries[[2, 7]] = pages.pack(pages.TIER_DEVICE, 1, 5, 3), pages.pack(pages.TIER_DEVICE, 1, 0, 1)
    table.refresh()
    assert table.of_owners[0][0, 2].tolist() == _expected(memory, int(memory.entries[2]), sizes)
    assert np.flatnonzero(table.of_owners[0].any(axis=2)[0]).tolist() == [2]
    assert np.flatnonzero(~table.words.any(axis=2)[0]).tolist() == [2]
    assert table.computed_by.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0, 0]]
    assert np.flatnonzero(table.in_host[0]).tolist() == [7], "its slab is not mapped"
    table.check([table.words.copy(), table.of_owners[0].copy()])
    wrong = table.words.copy()
    wrong[0, 2] = table.of_owners[0][0, 2]
    with pytest.raises(VmmError, match="layer 0, expert 2, gate: the device has"):
        table.check([wrong, *table.of_owners])
    with pytest.raises(VmmError, match="layer 0, expert 2, gate: owner 1 has 0x0"):
        table.check([table.words, np.zeros_like(table.words)])
    memory.entries[2] = pages.pack(pages.TIER_DEVICE, 0, 0, 30)
    assert table.refresh()
    assert not table.of_owners[0].any() and not table.computed_by.any()
    assert table.words[0, 2].tolist() == _expected(memory, int(memory.entries[2]), sizes)


def test_homes_are_mapped_when_one_is_needed() -> None:
    """While no expert is read from its home, homes may be unmapped; then they are waited for."""
    sizes = (512, 512, 512)
    memory, table = _table(2, 6, sizes)
    memory.homes.mapped = set()
    memory.homes.changes = 0

    def map_homes() -> None:
        memory.homes.mapped.update(range(4))
        memory.homes.changes += 1

    table.refresh()
    assert not memory.homes.mapped
    memory.map_homes = map_homes
    memory.entries[4] = memory.home_entries[4]
    assert table.refresh()
    assert table.words[0, 4].tolist() == _expected(memory, int(memory.home_entries[4]), sizes)
    before = table.words.copy()
    table.refresh()  # looks at what has been mapped
    assert np.array_equal(table.words, before) and not table.refresh()


def test_an_expert_without_any_place_is_an_error() -> None:
    """An expert that is neither in a mapped slab nor at home is named."""
    memory, table = _table(2, 3, (512, 512, 512))
    memory.entries[4] = memory.home_entries[4] = 0
    with pytest.raises(VmmError, match="expert 1 of layer 1"):
        table.refresh()


def test_check_agrees_with_the_residency_table() -> None:
    """What `refresh` makes of slots, homes and slabs that are not mapped passes; later changes do not count."""
    memory, table = _table(2, 9, (300, 256, 10))
    memory.entries[5] = memory.home_entries[5]
    memory.arena[0].mapped.remove(1)
    table.refresh()
    table.check([table.words.copy()])
    memory.entries[4] = memory.home_entries[4]  # the next step's
    table.check([table.words.copy()])


@pytest.mark.parametrize("matrix", range(3))
@pytest.mark.parametrize("where", ["slot", "home"])
def test_check_names_a_wrong_pointer(matrix: int, where: str) -> None:
    """A pointer that is off, or one that was right for an earlier step, is named by layer, expert and matrix."""
    memory, table = _table(2, 9, (300, 256, 10))
    if where == "home":
        memory.entries[12] = memory.home_entries[12]
    table.refresh()
    words = table.words.copy()
    words[1, 3, matrix] += np.uint64(256)
    name = ("gate", "up", "down")[matrix]
    with pytest.raises(VmmError, match=f"layer 1, expert 3, {name}: the device has {int(words[1, 3, matrix]):#x}"):
        table.check([words])
    stale = table.words.copy()
    memory.entries[12] = pages.pack(pages.TIER_DEVICE, 0, 2, 7)
    table.refresh()
    with pytest.raises(VmmError, match="layer 1, expert 3, gate"):
        table.check([stale])


def test_check_finds_a_slot_beyond_its_slab() -> None:
    """An entry whose slot does not fit its slab is as wrong as a pointer, though the table follows it."""
    memory, table = _table(2, 9, (300, 256, 10))
    memory.entries[3] = pages.pack(pages.TIER_DEVICE, 0, 2, SLAB // 1024)
    table.refresh()
    with pytest.raises(VmmError, match="layer 0, expert 3, gate"):
        table.check([table.words])
