"""Shared pages: the memory layout that vmmd and its clients agree on.

All are memfds created by the daemon and sealed against shrinking, growing and
further seals; the residency table also against future writes. Every word is a
native-endian, 8-byte aligned unsigned 64-bit integer that is read and written
by one machine instruction; nothing is locked.

Residency table (daemon writes, clients map it read-only)::

    word 0  magic          word 1  epoch         word 2  generation
    word 3  n_layers       word 4  n_experts     word 5  stale (0 or 1)
    word 8 ..              entries [n_layers * n_experts]: where to read now
    word 8 + n ..          homes   [n_layers * n_experts]: the copy in host slabs

An entry is 0 (no place yet) or packs ``tier | device | slab | slot``. A home
never changes once it is not 0. A reader that has not mapped an entry's slab
reads the home instead.

Session page (the client writes, the daemon reads, clamping what it finds): one
line of 32 words per attached model::

    word 0  launched: steps published     word 1  retired: steps finished
    word 2  tokens evaluated              word 3  K/V cells in use
    word 4  ended (0 or 1)
    word 8 + (step % 16)  the generation that step `step` reads under

Steps are numbered from 1. A step is published by writing its generation, then
``launched``; only then are entries read. It is retired by writing ``retired``
(on a GPU the last kernel of the step does, so a client that a debugger stopped
still becomes idle). ``launched == retired`` means idle. ``ended`` is the daemon's to
write: it goes on without this session, waits for its steps no more, and a step during
which that was written may have read anything.

Heat page (the client writes): how often each expert was routed to::

    word 0  tokens decoded   word 1  prompt tokens
    word 8 ..      decode counts [n_layers * n_experts]
    word 8 + n ..  prompt counts [n_layers * n_experts]

Token page of a conversation (the client writes): which tokens its K/V cells hold::

    word 0  complete: cells, from the first on, that hold what they should
    word 8 ..  the token of each cell [cells_max]

A client that computes cells writes their tokens, and `complete` once the cells are
computed. One that is about to overwrite cells lowers `complete` first. So the page is
true at every moment, also if the client is killed at that moment.
"""

from typing import NamedTuple

PROTOCOL_VERSION = 4
"""Of the whole wire: broker, gRPC and these pages."""

WORD_BYTES = 8
HEADER_WORDS = 8
MAGIC = 0x5354_5241_5441_0001

# Residency table header
WORD_MAGIC, WORD_EPOCH, WORD_GENERATION, WORD_LAYERS, WORD_EXPERTS, WORD_STALE = range(6)

# Session page
ATTACHMENTS_MAX = 8
LINE_WORDS = 32
STEPS_IN_FLIGHT_MAX = 15
RING_WORDS = 16
WORD_LAUNCHED, WORD_RETIRED, WORD_TOKENS, WORD_CELLS, WORD_ENDED = range(5)
WORD_RING = 8
SESSION_PAGE_BYTES = 4096

# Heat page header
WORD_DECODED, WORD_PROMPT = range(2)

# Token page header
WORD_COMPLETE = 0

# Tiers of an entry. `peer` is relative to the reader: a device entry whose
# device is not the computing one.
TIER_NONE, TIER_DEVICE, TIER_HOST = range(3)

_SLOT_BITS, _SLAB_BITS, _DEVICE_BITS = 22, 32, 8
SLOTS_PER_SLAB_MAX = 1 << _SLOT_BITS


class Entry(NamedTuple):
    """Where an expert is. `device` indexes the model's list of arena ranges."""

    tier: int
    device: int
    slab: int
    slot: int


def pack(tier: int, device: int, slab: int, slot: int) -> int:
    """The 64-bit word of an entry."""
    return (((tier << _DEVICE_BITS | device) << _SLAB_BITS) | slab) << _SLOT_BITS | slot


def unpack(word: int) -> Entry:
    """The entry of a 64-bit word; `TIER_NONE` for 0."""
    return Entry(
        word >> (_DEVICE_BITS + _SLAB_BITS + _SLOT_BITS),
        (word >> (_SLAB_BITS + _SLOT_BITS)) & ((1 << _DEVICE_BITS) - 1),
        (word >> _SLOT_BITS) & ((1 << _SLAB_BITS) - 1),
        word & ((1 << _SLOT_BITS) - 1),
    )


def residency_bytes(n: int) -> int:
    """Size of the residency table of `n` experts over all layers."""
    return (HEADER_WORDS + 2 * n) * WORD_BYTES


def heat_bytes(n: int) -> int:
    """Size of the heat page of `n` experts over all layers."""
    return (HEADER_WORDS + 2 * n) * WORD_BYTES


def tokens_bytes(cells_max: int) -> int:
    """Size of the token page of a conversation of up to `cells_max` cells."""
    return (HEADER_WORDS + cells_max) * WORD_BYTES


# Layout of slots and weights, the same on both sides.
ALIGN_BYTES = 256


def align(n_bytes: int) -> int:
    """The next multiple of 256 bytes."""
    return (n_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


def slot_layout(gate_bytes: int, up_bytes: int, down_bytes: int) -> tuple[int, int, int, int]:
    """Byte offsets of gate, up and down in an expert's slot, and the slot's size."""
    up = align(gate_bytes)
    down = up + align(up_bytes)
    return 0, up, down, down + align(down_bytes)
