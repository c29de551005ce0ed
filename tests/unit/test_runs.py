"""Copies out of many pieces: rows of neighbours, the same bytes."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from vmmd.driver.base import Copy, FileSource, Slab, SlabSource, check_copy
from vmmd.driver.runs import Pieces, from_files, from_slabs
from vmmd.errors import InvalidRequest

A, B = (Slab("device", 1 << 40, name) for name in "ab")
FD = 7

Triples = list[tuple[int, int, int]]
"""(source, target, length)"""


def pieces(triples: Triples, target_of: int = 0) -> Pieces:
    columns = np.array(triples, np.int64).reshape(-1, 3).T
    of = np.zeros(len(triples), np.int64)
    return Pieces(of, of + target_of, columns[1], of, columns[0], columns[2])


def rows_of(copies: list[Copy]) -> list[tuple[int, ...]]:
    """(source, target, length, rows, source pitch, pitch) of each."""
    return [(c.source.offset_bytes, c.offset_bytes, c.length_bytes, c.rows, c[6], c[5]) for c in copies]


@pytest.mark.parametrize(
    ("triples", "of_files", "expected"),
    [
        ([], True, []),
        ([(5, 7, 3)], True, [(5, 7, 3, 1, 0, 0)]),
        ([(0, 10, 3), (3, 13, 4), (7, 17, 1)], True, [(0, 10, 8, 1, 0, 0)]),
        ([(0, 1, 4), (4, 11, 4), (8, 21, 4)], True, [(0, 1, 4, 3, 4, 10)]),
        ([(8, 21, 4), (0, 1, 4), (4, 11, 4)], True, [(0, 1, 4, 3, 4, 10)]),
        ([(8, 21, 4), (0, 1, 4), (4, 11, 4)], False, [(8, 21, 4, 1, 0, 0), (0, 1, 4, 2, 4, 10)]),
        ([(0, 1, 4), (4, 11, 4), (8, 22, 4)], True, [(0, 1, 4, 2, 4, 10), (8, 22, 4, 1, 0, 0)]),
        ([(0, 1, 4), (4, 11, 3), (7, 21, 3)], True, [(0, 1, 4, 1, 0, 0), (4, 11, 3, 2, 3, 10)]),
        ([(0, 1, 4), (5, 11, 4)], True, [(0, 1, 4, 1, 0, 0), (5, 11, 4, 1, 0, 0)]),
        ([(0, 1, 4), (5, 11, 4)], False, [(0, 1, 4, 2, 5, 10)]),
        ([(0, 1, 4), (2, 11, 4)], False, [(0, 1, 4, 1, 0, 0), (2, 11, 4, 1, 0, 0)]),
        ([(0, 1, 4), (4, 3, 4)], True, [(0, 1, 4, 1, 0, 0), (4, 3, 4, 1, 0, 0)]),
        ([(0, 11, 4), (4, 1, 4)], True, [(0, 11, 4, 1, 0, 0), (4, 1, 4, 1, 0, 0)]),
    ],
)
def test_rows(triples: Triples, of_files: bool, expected: list[tuple[int, ...]]) -> None:
    """Neighbours at regular distances become rows; a gap, another length or an overlap ends them."""
    (copies,) = from_files([A], [FD], pieces(triples)) if of_files else from_slabs([A], [B], pieces(triples))
    assert rows_of(copies) == expected


def test_slabs_and_files_end_rows() -> None:
    """Pieces of another slab or file are rows of their own, and say whose."""
    of = np.array([1, 0, 0, 1, 0, 0], np.int64)
    at = np.array([10, 0, 10, 20, 20, 30], np.int64)
    files = np.array([0, 0, 0, 0, 1, 1], np.int64)
    source = np.array([8, 0, 4, 12, 0, 4], np.int64)
    assert from_files([A, B], [FD, 9], Pieces(0 * of, of, at, files, source, np.full(6, 4))) == [
        [
            Copy(A, 0, 4, FileSource(FD, 0), 2, 10, 4),
            Copy(A, 20, 4, FileSource(9, 0), 2, 10, 4),
            Copy(B, 10, 4, FileSource(FD, 8), 2, 10, 4),
        ]
    ]


def test_groups_stay_apart() -> None:
    """Neighbours of different groups are not joined, and each group has its own list, empty ones too."""
    group = np.array([0, 0, 0, 2, 2], np.int64)
    of, at = 0 * group, np.arange(5) * 10
    expected = [[(0, 0, 4, 3, 10, 10)], [], [(30, 30, 4, 2, 10, 10)]]
    made = from_slabs([A], [B], Pieces(group, of, at, of, at, of + 4), 3)
    assert [rows_of(copies) for copies in made] == expected
    source = np.array([8, 0, 4, 16, 12], np.int64)
    back = np.array([20, 0, 10, 40, 30], np.int64)
    made = from_files([A], [FD], Pieces(group, of, back, of, source, of + 4), 3)
    assert [rows_of(copies) for copies in made] == [[(0, 0, 4, 3, 4, 10)], [], [(12, 30, 4, 2, 4, 10)]]


@st.composite
def runs_of_pieces(draw: st.DrawFn) -> Triples:
    number = st.integers(0, 12)
    triples = []
    for source, target, length, gap, count in draw(st.lists(st.tuples(number, number, number, number, number))):
        step = length + 1 + draw(st.integers(0, 1))
        triples += [(source + i * step, target + i * (length + gap), length + 1) for i in range(count)]
    return triples


def written(copies: list[Copy]) -> dict[int, int]:
    """By byte of the target, the source's, once all rows are written one after the other."""
    found: dict[int, int] = {}
    for copy in copies:
        for row in map(copy.row, range(copy.rows)):
            at, source = row.offset_bytes, row.source.offset_bytes
            found |= {at + i: source + i for i in range(row.length_bytes)}
    return found


@given(runs_of_pieces())
def test_copies_between_slabs_leave_the_same_bytes(triples: Triples) -> None:
    """Written one after the other, in their order, the rows leave what the pieces leave."""
    (copies,) = from_slabs([A], [B], pieces(triples))
    assert written(copies) == written([Copy(A, at, n, SlabSource(B, source)) for source, at, n in triples])
    for copy in copies:
        check_copy(copy)


@given(runs_of_pieces())
def test_copies_from_files_leave_the_same_bytes(triples: Triples) -> None:
    """Where no target is named twice, the order of files leaves the same; rows lie back to back in the file."""
    apart = [(source, i << 20, n) for i, (source, _, n) in enumerate(triples)]
    for some in (apart, [(source, (i * 20 if n < 20 else i << 20), n) for i, (source, _, n) in enumerate(apart)]):
        (copies,) = from_files([A], [FD], pieces(some))
        assert written(copies) == written([Copy(A, at, n, FileSource(FD, source)) for source, at, n in some])
        for copy in copies:
            check_copy(copy)
            assert copy.rows == 1 or copy.source_pitch_bytes == copy.length_bytes


@pytest.mark.parametrize(("rows", "pitch", "source_pitch"), [(0, 8, 8), (2, 7, 8), (2, 8, 7), (-1, 8, 8)])
def test_rows_that_overlap_are_refused(rows: int, pitch: int, source_pitch: int) -> None:
    """A copy has a row at least, and its rows lie apart."""
    with pytest.raises(InvalidRequest, match="rows of 8 bytes"):
        check_copy(Copy(A, 0, 8, FileSource(FD, 0), rows, pitch, source_pitch))


@pytest.mark.parametrize("at", [0, 1])
def test_the_last_row_stays_inside(at: int) -> None:
    """Rows that end beyond the target's or the source's end are refused."""
    small = Slab("device", 40, "small")
    for copy in (
        Copy(small, at, 8, SlabSource(A, 0), 5, 8, 8),
        Copy(A, 0, 8, SlabSource(small, at), 5, 8, 8),
        Copy(small, at, 4, FileSource(FD, 0), 4, 12, 4),
    ):
        if at:
            with pytest.raises(InvalidRequest, match="outside a slab of 40 bytes"):
                check_copy(copy)
        else:
            check_copy(copy)
