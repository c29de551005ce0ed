"""Geometry: what is accepted, and every way in which a client's can lie."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from vmmd.core import geometry
from vmmd.core.geometry import Extent, Geometry, Stack
from vmmd.errors import InvalidRequest

LAYERS, EXPERTS = 2, 3
STACKS = [
    Stack(layer, matrix, 0, EXPERTS, 0, 10_000 * (3 * layer + matrix), 1000, 700 + 100 * layer)
    for layer in range(LAYERS)
    for matrix in range(3)
]
WEIGHTS = [Extent(1, 0, 100), Extent(1, 100, 257)]
FILES = [60_000, 357]


def build(**changes: Any) -> Geometry:
    given = {
        "n_layers": LAYERS,
        "n_experts": EXPERTS,
        "top_k": 2,
        "stacks": STACKS,
        "weights": WEIGHTS,
        "file_bytes": FILES,
    }
    return geometry.build(**{**given, **changes})


def with_stack(**changes: Any) -> Geometry:
    """The last stack is another."""
    return build(stacks=[*STACKS[:-1], replace(STACKS[-1], **changes)])


def test_layout() -> None:
    """Every expert has the place, the sizes and the aligned slot that its stacks say."""
    made = build()
    assert (made.n, made.n_layers, made.n_experts, made.top_k) == (6, 2, 3, 2)
    assert made.offset_bytes[4].tolist() == [31_000, 41_000, 51_000]
    assert made.size_bytes[4].tolist() == [800] * 3
    assert made.file.tolist() == [[0, 0, 0]] * 6
    assert made.slot_bytes.tolist() == [3 * 768] * 3 + [3 * 1024] * 3
    assert made.experts_bytes == 9 * (768 + 1024)
    assert made.weights_bytes == 256 + 512


def test_experts_of_their_own() -> None:
    """Experts that a file keeps apart are stacks of one, whose stride means nothing."""
    stacks = [s for s in STACKS if s.layer == 0]
    apart = [
        Stack(1, m, e, 1, 1, 100 * e, stride, 50 + e)
        for m, stride in enumerate((0, -7, (1 << 64) - 1))
        for e in range(EXPERTS)
    ]
    made = build(stacks=iter([*stacks, *apart]))
    assert made.size_bytes[3:, 2].tolist() == [50, 51, 52]
    assert made.offset_bytes[3:, 2].tolist() == [0, 100, 200]


def test_to_the_last_byte() -> None:
    """A stack may end where its file ends, and not one byte further."""
    end = STACKS[-1].offset_bytes + 2 * 1000 + 800
    build(file_bytes=[end, 357])
    with pytest.raises(InvalidRequest, match=rf"bytes 50000 to {end} of a file of {end - 1}"):
        build(file_bytes=[end - 1, 357])
    with pytest.raises(InvalidRequest, match="extent 1 of the weights: bytes 100 to 357 of a file of 356"):
        build(file_bytes=[60_000, 356])


def test_digest() -> None:
    """Equal geometries have equal digests, whatever the order of their stacks; other ones have others."""
    digest = build().digest
    assert build(stacks=reversed(STACKS)).digest == digest
    others = [
        build(top_k=1),
        build(weights=WEIGHTS[:1]),
        build(weights=[WEIGHTS[0], Extent(1, 99, 257)]),
        with_stack(offset_bytes=49_999),
        with_stack(expert_bytes=799),
        with_stack(file=1, offset_bytes=0, stride_bytes=10, expert_bytes=10),
    ]
    assert len({digest, *(o.digest for o in others)}) == len(others) + 1


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"n_layers": 0}, "0 layers"),
        ({"n_layers": -1}, "-1 layers"),
        ({"n_experts": 0}, "of 0 experts"),
        ({"n_layers": -2, "n_experts": -3}, "-2 layers"),
        ({"n_layers": 1 << 40, "n_experts": 1 << 40}, "1 to 1048576 in all"),
        ({"n_layers": geometry.EXPERTS_MAX + 1, "n_experts": 1, "top_k": 1}, "1 to 1048576 in all"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_k": 4}, "top_k 4"),
        ({"stacks": []}, "layer 0 expert 0 has no gate"),
        ({"stacks": STACKS[:-1]}, "layer 1 expert 0 has no down"),
        ({"stacks": [*STACKS, STACKS[2]]}, "layer 0 matrix 2 experts 0..2: named twice"),
        ({"stacks": [*STACKS, replace(STACKS[2], first_expert=2, count=1)]}, "experts 2..2: named twice"),
        ({"weights": []}, "none were named"),
        ({"weights": [Extent(1, 0, 0)]}, "extent 0 of the weights has 0 bytes"),
        ({"weights": [Extent(1, 0, -5)]}, "has -5 bytes"),
        ({"weights": [Extent(2, 0, 1)]}, "file 2 of 2"),
        ({"weights": [Extent(-1, 0, 1)]}, "file -1 of 2"),
        ({"weights": [Extent(1, -1, 2)]}, "bytes -1 to 1"),
        ({"weights": [Extent(1, (1 << 64) - 1, 2)]}, "of a file of 357"),
        ({"weights": [Extent(1, 0, 1)] * (geometry.EXTENTS_MAX + 1)}, "at most 1048576"),
        ({"file_bytes": []}, "file 0 of 0"),
    ],
)
def test_lies(changes: dict[str, Any], why: str) -> None:
    """A geometry that lies is refused, and the refusal names the lie."""
    with pytest.raises(InvalidRequest, match=why):
        build(**changes)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"layer": 2}, "no such layer"),
        ({"layer": -1}, "no such layer"),
        ({"matrix": 3}, "no such layer, matrix"),
        ({"matrix": -1}, "no such layer, matrix"),
        ({"count": 0}, "or count"),
        ({"count": -1}, "or count"),
        ({"first_expert": -1}, "no such layer"),
        ({"first_expert": 1}, "a layer has 3 experts"),
        ({"count": (1 << 64) - 1}, "a layer has 3 experts"),
        ({"first_expert": (1 << 64) - 1, "count": 1}, "a layer has 3 experts"),
        ({"first_expert": 2, "count": 1}, "expert 0 has no down"),
        ({"expert_bytes": 0}, "0 bytes each"),
        ({"expert_bytes": -1}, "-1 bytes each"),
        ({"stride_bytes": 799}, "overlap"),
        ({"stride_bytes": 0}, "overlap"),
        ({"stride_bytes": -1000}, "overlap"),
        ({"stride_bytes": 1 << 63}, "of a file of 60000"),
        ({"stride_bytes": (1 << 64) // 2}, "of a file of 60000"),
        ({"offset_bytes": -1}, "bytes -1 to"),
        ({"offset_bytes": (1 << 64) - 2800}, "of a file of 60000"),
        ({"offset_bytes": 60_000}, "of a file of 60000"),
        ({"expert_bytes": 1 << 63, "stride_bytes": 1 << 63}, "are possible"),
        ({"file": 2}, "file 2 of 2"),
        ({"file": -1}, "file -1 of 2"),
    ],
)
def test_stacks_that_lie(changes: dict[str, Any], why: str) -> None:
    """A stack of no such place, outside its file, overlapping, empty or absurd is refused by name."""
    with pytest.raises(InvalidRequest, match=why):
        with_stack(**changes)


@pytest.mark.parametrize("expert_bytes", [1 << 62, (1 << 63) - 1, geometry.EXPERT_BYTES_MAX + 1])
def test_slots_fit_64_bits(expert_bytes: int) -> None:
    """Experts of a sparse file that is as large as files can be do not overflow a slot's size."""
    stacks = [Stack(0, m, 0, 1, 0, 0, 0, expert_bytes) for m in range(3)]
    with pytest.raises(InvalidRequest, match="are possible"):
        geometry.build(1, 1, 1, stacks, [Extent(0, 0, 1)], [(1 << 63) - 1])


def test_largest() -> None:
    """The most and largest experts that are possible have a size that 64 bits hold."""
    n, size = geometry.EXPERTS_MAX, geometry.EXPERT_BYTES_MAX
    stacks = [Stack(0, m, 0, n, 0, 0, size, size) for m in range(3)]
    made = geometry.build(1, n, 1, stacks, [Extent(0, 0, 1)], [n * size])
    assert made.experts_bytes == 3 * n * size
    assert (made.slot_bytes == 3 * size).all()
    assert int(np.asarray(made.offset_bytes)[-1, 0]) == (n - 1) * size


def test_fit() -> None:
    """An expert larger than a slab is refused with the slab_bytes that would do."""
    made = build()
    geometry.fit(made, 3072)
    with pytest.raises(InvalidRequest, match=r"takes 3072 bytes and slab_bytes is 3071; .* set slab_bytes to 4096"):
        geometry.fit(made, 3071)


def test_slots_of_a_slab() -> None:
    """A slab of more slots than an entry can name is refused."""
    made = build()
    geometry.fit(made, 2304 * pages.SLOTS_PER_SLAB_MAX)
    with pytest.raises(InvalidRequest, match="more than 4194304 slots"):
        geometry.fit(made, 2304 * (pages.SLOTS_PER_SLAB_MAX + 1))


def test_matrices_are_laid_out_as_on_the_wire() -> None:
    """Offsets of many slots are those that `pages.slot_layout` gives one by one."""
    sizes = np.array([[1, 256, 257], [4096, 5, 511], [700, 800, 900]])
    assert geometry.matrix_offsets(sizes).tolist() == [list(pages.slot_layout(*row)[:3]) for row in sizes.tolist()]
