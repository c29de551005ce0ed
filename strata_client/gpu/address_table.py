"""Where kernels read each expert's matrices: the residency table as addresses, a table for each device that computes.

Kept between steps from what has changed: the daemon's entries, and the slabs that
this process has mapped. A step's table is filled after the step was published, so
the generation protocol keeps what it points to as it is until the step is retired.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from strata_api.v1 import pages

from strata_client.mapping import U64, MappedRange
from strata_client.model_memory import ClientMemory
from vmmd.errors import VmmError

I64 = npt.NDArray[np.int64]

MATRICES = ("gate", "up", "down")

_SLOT_BITS, _SLAB_BITS, _DEVICE_BITS = np.uint64(22), np.uint64(32), np.uint64(8)


class AddressTable:
    """Addresses of all experts' matrices. For the thread that publishes steps.

    Attributes:
        words: uint64 `[n_layers, n_experts, 3]`: gate, up and down, as the computing device's kernels read them; 0
            where an owner computes the expert.
        of_owners: the same for each of `ClientMemory.owners`; 0 where another device computes it.
        computed_by: int8 `[n_layers, n_experts]`: 0 the computing device, else 1 + the number of the owner.
        in_host: bool `[n_layers, n_experts]`: the expert is read from host slabs.
    """

    def __init__(self, memory: ClientMemory, expert_bytes: I64) -> None:
        """Takes the mapped model and its experts' sizes, int64 `[n_layers, n_experts, 3]`."""
        shape = expert_bytes.shape[:2]
        self.words: U64 = np.zeros((*shape, 3), np.uint64)
        self.of_owners: list[U64] = [np.zeros_like(self.words) for _ in memory.owners]
        self.computed_by = np.zeros(shape, np.int8)
        self.in_host = np.zeros(shape, np.bool_)
        self._memory = memory
        self._entries: U64 = np.zeros(shape[0] * shape[1], np.uint64)
        self._changes = -1
        ends = -(-expert_bytes // pages.ALIGN_BYTES) * pages.ALIGN_BYTES
        ends = np.cumsum(ends.reshape(-1, 3), axis=1)
        self._slot_bytes = ends[:, 2].astype(np.uint64)
        self._offsets = np.concatenate([np.zeros((len(ends), 1), np.int64), ends[:, :2]], axis=1).astype(np.uint64)

    def refresh(self) -> bool:
        """Takes over what has changed; whether anything has. Within a published step only.

        Errors: `VmmError` if an expert is in no slab that this process has mapped, or can map.
        """
        memory = self._memory
        entries = memory.entries.copy()
        changes = memory.homes.changes + sum(range_.changes for range_ in memory.arena)
        if changes != self._changes:  # rare: something was mapped or unmapped, and any place may be meant
            where = np.arange(len(entries))
        else:
            where = np.flatnonzero(entries != self._entries)
        if len(where) == 0:
            return False
        bases = self._find(entries[where], where)
        missing = bases == 0
        homes = self._find(memory.home_entries[where[missing]], where[missing])
        if np.any(homes == 0):
            words = memory.home_entries[where[missing]]
            memory.await_homes(lambda: bool(np.all((words == 0) | (self._find(words, where[missing]) != 0))))
            homes = self._find(memory.home_entries[where[missing]], where[missing])
        if np.any(homes == 0):
            layer, expert = divmod(int(where[missing][np.argmin(homes)]), self.words.shape[1])
            raise VmmError(f"expert {expert} of layer {layer} is in no slab that this process has mapped")
        bases[missing] = homes
        tiers, devices, _, _ = _unpack(entries[where])
        in_host = missing | (tiers == pages.TIER_HOST)
        computed_by = np.zeros(len(where), np.int8)
        for owner, part in enumerate(memory.owners, 1):
            computed_by[~in_host & (devices == part)] = owner
        addresses = bases[:, None] + self._offsets[where]
        for computing, words in enumerate((self.words, *self.of_owners)):
            words.reshape(-1, 3)[where] = np.where(computed_by[:, None] == computing, addresses, np.uint64(0))
        self.computed_by.reshape(-1)[where] = computed_by
        self.in_host.reshape(-1)[where] = in_host
        self._entries, self._changes = entries, changes
        return True

    def check(self, tables: Sequence[U64]) -> None:
        """Compares what was read back from the devices, like `words` and each of `of_owners`, with the residency table.

        With the entries of the last `refresh`, that is, one by one, by the way that the host reads experts: for
        debugging, as it takes some 10 us an expert. Nothing but the order of its words relies on `refresh`.

        Errors: `VmmError`, with layer, expert and matrix of the first wrong pointer.
        """
        memory = self._memory
        read = [table.reshape(-1, 3).tolist() for table in tables]
        for at, entry in enumerate(self._entries.tolist()):
            layer, expert = divmod(at, self.words.shape[1])
            place = memory.find(entry, layer, expert) or memory.home(layer, expert)
            if place is None:
                raise VmmError(f"expert {expert} of layer {layer} is in no slab that this process has mapped")
            base, end = place.range_.address, place.range_.slab_bytes * (place.slab + 1)
            owned = [memory.arena[part] for part in memory.owners]
            computed_by = owned.index(place.range_) + 1 if place.range_ in owned else 0
            for computing, table in enumerate(read):
                for matrix, offset, size, address in zip(
                    MATRICES, place.offsets_bytes, place.sizes_bytes, table[at], strict=True
                ):
                    expected = base + offset if computing == computed_by else 0
                    if address != expected or offset + size > end:
                        who = f"owner {computing}" if computing else "the device"
                        raise VmmError(
                            f"the address table is wrong: layer {layer}, expert {expert}, {matrix}: {who} has"
                            f" {address:#x}, entry {entry:#x} means {expected:#x}, {size} bytes of slab {place.slab} of"
                            f" range {place.range_.range_id}; please report it"
                        )

    def _find(self, words: U64, where: npt.NDArray[np.intp]) -> U64:
        """Where the slots begin that entries name; 0 for what is not mapped here."""
        tiers, devices, slabs, slots = _unpack(words)
        bases: U64 = np.zeros(len(words), np.uint64)
        ranges: Sequence[tuple[int, int, MappedRange]] = [
            (pages.TIER_HOST, 0, self._memory.homes),
            *((pages.TIER_DEVICE, i, range_) for i, range_ in enumerate(self._memory.arena)),
        ]
        for tier, device, range_ in ranges:
            if not range_.mapped:
                continue
            mapped = np.zeros(range_.slabs_max + 1, np.bool_)
            mapped[list(range_.mapped)] = True
            chosen = (tiers == tier) & (devices == device) if tier == pages.TIER_DEVICE else tiers == tier
            chosen &= mapped[np.minimum(slabs, range_.slabs_max)]
            begin = slabs[chosen].astype(np.uint64) * np.uint64(range_.slab_bytes) + np.uint64(range_.address)
            bases[chosen] = begin + slots[chosen] * self._slot_bytes[where[chosen]]
        return bases


def _unpack(words: U64) -> tuple[U64, U64, I64, U64]:
    """Tier, device, slab and slot of entries."""
    tiers = words >> (_DEVICE_BITS + _SLAB_BITS + _SLOT_BITS)
    devices = words >> (_SLAB_BITS + _SLOT_BITS) & np.uint64((1 << int(_DEVICE_BITS)) - 1)
    slabs = (words >> _SLOT_BITS & np.uint64((1 << int(_SLAB_BITS)) - 1)).astype(np.int64)
    return tiers, devices, slabs, words & np.uint64((1 << int(_SLOT_BITS)) - 1)
