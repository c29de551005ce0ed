"""Few copies out of many pieces: neighbours at regular distances become rows of one `Copy`.

A model's experts are many thousand pieces, and each Python call costs more than it
takes to move some of them. Laid out as arrays, thousands cost a millisecond.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vmmd.driver.base import Copy, FileSource, Slab, SlabSource

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


class Pieces(NamedTuple):
    """Pieces to copy, as int64 arrays ``[k]``. No length is 0."""

    group: I64  # those of a group are wanted together: number of it, ascending
    target_of: I64  # index in a list of slabs
    target: I64  # byte offset there
    source_of: I64  # index in a list of descriptors or slabs
    source: I64  # byte offset there
    length: I64


def from_files(targets: Sequence[Slab], fds: Sequence[int], pieces: Pieces, groups: int = 1) -> list[list[Copy]]:
    """Copies from files by group, in the order of their sources within each slab. Rows lie back to back in the file."""
    order = np.lexsort((pieces.source, pieces.source_of, pieces.target_of, pieces.group))
    found: list[list[Copy]] = [[] for _ in range(groups)]
    for group, t, at, s, source, length, rows, pitch, source_pitch in _merge(
        Pieces(*(column[order] for column in pieces)), back_to_back=True
    ):
        found[group].append(Copy(targets[t], at, length, FileSource(fds[s], source), rows, pitch, source_pitch))
    return found


def from_slabs(targets: Sequence[Slab], sources: Sequence[Slab], pieces: Pieces, groups: int = 1) -> list[list[Copy]]:
    """Copies from other slabs than the targets by group, in the order of the pieces."""
    found: list[list[Copy]] = [[] for _ in range(groups)]
    for group, t, at, s, source, length, rows, pitch, source_pitch in _merge(pieces, back_to_back=False):
        found[group].append(Copy(targets[t], at, length, SlabSource(sources[s], source), rows, pitch, source_pitch))
    return found


def _merge(pieces: Pieces, *, back_to_back: bool) -> list[list[int]]:
    """Rows of group, target index, offset, source index, offset, length, rows, pitch, source pitch.

    Pieces that go on where the one before ends, in both, become one longer piece; what
    then has equal lengths and distances becomes rows.
    """
    if not len(pieces.length):
        return []
    follows = _same(pieces.group) & _same(pieces.target_of) & _same(pieces.source_of)
    follows &= (_step(pieces.target) == pieces.length[:-1]) & (_step(pieces.source) == pieces.length[:-1])
    first = _first(follows)
    group, target_of, target, source_of, source, _ = (column[first] for column in pieces)
    length = np.add.reduceat(pieces.length, first)

    pitch, source_pitch = _step(target), _step(source)
    regular = _same(group) & _same(target_of) & _same(source_of) & _same(length) & (pitch >= length[:-1])
    regular &= source_pitch == length[:-1] if back_to_back else source_pitch >= length[:-1]
    # a run keeps the distances that it began with
    regular[1:] &= ~regular[:-1] | (_same(pitch) & _same(source_pitch))
    first = _first(regular)
    rows = _step(np.append(first, len(length)))
    single = rows == 1
    pitches = (np.where(single, 0, np.append(p, 0)[first]) for p in (pitch, source_pitch))
    places = (column[first] for column in (group, target_of, target, source_of, source, length))
    found: list[list[int]] = np.stack((*places, rows, *pitches), axis=1).tolist()
    return found


def _same(column: I64) -> Bool:
    """Whether each value is that of the one before, from the second on."""
    same: Bool = column[1:] == column[:-1]
    return same


def _step(column: I64) -> I64:
    """How far each value is from the one before, from the second on: `np.diff` in a tenth of the time."""
    step: I64 = column[1:] - column[:-1]
    return step


def _first(joined: Bool) -> I64:
    """Indexes of those that are not joined to the one before."""
    return np.flatnonzero(np.concatenate(([True], ~joined)))
