"""Opening model files: sound ones, broken ones, shards."""

import fcntl
import os
import re
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_client.models.base import ModelError
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.tokenizer import read_vocabulary
from tests.helpers.gguf_builder import (
    ARRAY,
    BOOL,
    DATA,
    STRING,
    U32,
    RawValue,
    Tensor,
    build,
    contents,
    small_keys,
    small_tensors,
    string,
)

F32 = int(GGMLQuantizationType.F32)
SHIPPED = Path(__file__).parents[2] / "strata_client" / "data" / "tiny-IQ3_S.gguf"


def floats(name: str, n: int = 8, **more: Any) -> Tensor:
    return Tensor(name, more.pop("dims", (n,)), F32, bytes(4 * n), **more)


def write(tmp_path: Path, data: bytes, name: str = "model.gguf") -> str:
    path = tmp_path / name
    path.write_bytes(data)
    return str(path)


def refuse(path: str, says: str) -> str:
    """Opening fails with one line that says `says`, and leaves no descriptor open."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ModelError, match=says) as caught:
        open_model_file(path)
    assert os.listdir("/proc/self/fd") == before
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < len(path) + 400
    return message


@pytest.mark.parametrize("path", [SHIPPED, *sorted(DATA.glob("*.gguf"))], ids=lambda path: path.name)
def test_same_as_the_reference_reader(path: Path) -> None:
    """On sound files we see what the gguf package's reader sees."""
    theirs = gguf.GGUFReader(path)
    with open_model_file(str(path)) as ours:
        assert [(t.name, t.dims, t.type, t.offset_bytes, t.size_bytes) for t in ours.tensors.values()] == [
            (t.name, tuple(t.shape.tolist()), t.tensor_type, t.data_offset, t.n_bytes) for t in theirs.tensors
        ]
        fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
        mine = {key: item.tolist() if isinstance(item, np.ndarray) else item for key, item in ours.metadata.items()}
        assert mine == fields


def test_every_kind_of_value(tmp_path: Path) -> None:
    """Numbers of all widths, truth values, strings and arrays read as what they are."""
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    keys: dict[str, Any] = {f"n{kind}": RawValue(kind, struct.pack("<" + code, 7)) for kind, code in numbers.items()}
    nested = struct.pack("<IQ", ARRAY, 2) + (struct.pack("<IQ", 3, 2) + struct.pack("<2h", -1, 2)) * 2
    keys |= {"yes": True, "text": "é中", "list": ["a", "", "b\n"], "ints": [1, -2], "nested": RawValue(ARRAY, nested)}
    keys["truths"] = RawValue(ARRAY, struct.pack("<IQ2B", BOOL, 2, 0, 1))
    keys["bytes"] = RawValue(STRING, string(b"a\xffb"))
    with open_model_file(write(tmp_path, build(keys))) as model_file:
        found = model_file.metadata
    assert [found[f"n{kind}"] for kind in numbers] == [7] * 10
    assert type(found["n6"]) is type(found["n12"]) is float and type(found["n4"]) is int
    assert found["yes"] is True and found["text"] == "é中" and found["list"] == ["a", "", "b\n"]
    assert found["ints"].tolist() == [1, -2] and found["truths"].tolist() == [False, True]
    assert [row.tolist() for row in found["nested"]] == [[-1, 2], [-1, 2]]
    assert found["bytes"] == "a\\xffb"


def test_descriptors(tmp_path: Path) -> None:
    """A file is open read-only and close-on-exec until it is closed, and closing twice is harmless."""
    model_file = open_model_file(write(tmp_path, build({}, [floats("a")])))
    (part,) = model_file.files
    assert fcntl.fcntl(part.fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_NONBLOCK) == os.O_RDONLY
    assert fcntl.fcntl(part.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert part.size_bytes == os.fstat(part.fd).st_size
    model_file.close()
    model_file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(part.fd)


@pytest.mark.parametrize("version", [2, 3])
def test_versions_that_are_read(tmp_path: Path, version: int) -> None:
    """Versions 2 and 3 are the same to us."""
    with open_model_file(write(tmp_path, build({"a": 1}, [floats("t")], version=version))) as model_file:
        assert model_file.metadata == {"a": 1}


@pytest.mark.parametrize("version", [0, 1, 4, 65535])
def test_other_versions(tmp_path: Path, version: int) -> None:
    """Another version is refused with its number."""
    refuse(write(tmp_path, build({}, version=version)), f"GGUF version {version} is not supported")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty, not a GGUF file; download the file itself"),
        (b"<!DOCTYPE html><html>", "not a GGUF file but a web page; download the file itself"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF file but a pointer .*; download the file itself"),
        (b"GG", "not a GGUF file"),
        (b"GGML" + bytes(99), "not a GGUF file"),
        (b"GGUF\x00\x00\x00\x03" + bytes(99), "big-endian"),
        (b"GGUF\x03\x00\x00\x00", "truncated"),
    ],
)
def test_what_is_not_a_model_file(tmp_path: Path, data: bytes, says: str) -> None:
    """Empty files, web pages, large-file pointers and other formats are named as what they are."""
    refuse(write(tmp_path, data), says)


def test_what_is_not_a_regular_file(tmp_path: Path) -> None:
    """A pipe does not block, a folder and a missing file are refused."""
    os.mkfifo(tmp_path / "pipe")
    refuse(str(tmp_path / "pipe"), "not a regular file")
    refuse(str(tmp_path), "not a regular file|directory")
    refuse(str(tmp_path / "nothing"), "No such file")


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (build({}, n_tensors=HUGE), f"a count of {HUGE} tensors goes past the end of the file"),
        (build({}, n_keys=HUGE), f"a count of {HUGE} keys goes past"),
        (build({"a": RawValue(STRING, struct.pack("<Q", HUGE))}), f"key a: a string of {HUGE} bytes goes past"),
        (build({"a": RawValue(ARRAY, struct.pack("<IQ", U32, HUGE))}), f"key a: an array of length {HUGE} goes past"),
        (
            build({"a": RawValue(ARRAY, struct.pack("<IQ", STRING, HUGE))}),
            f"key a: an array of length {HUGE} goes past",
        ),
        (build({"a": RawValue(ARRAY, struct.pack("<IQ", ARRAY, 1) * 9999)}), "key a nests arrays more than 4 deep"),
        (build({"a": RawValue(99, b"")}), "key a has the unknown type 99"),
        (build({"a": RawValue(ARRAY, struct.pack("<IQ", 13, 0))}), "key a is an array of the unknown type 13"),
        (build({"a": RawValue(BOOL, b"\2")}), "key a has a truth value of 2"),
        (build([("a.b", 1), ("a.b", 1)]), r"key a\.b is there twice"),
        (build({"a\x1b[2J\n": RawValue(99, b"")}), r"key a\\x1b\[2J\\x0a has"),
        (build({}, [floats("t"), floats("t")]), "tensor t is there twice"),
        (build({}, [floats("t", dims=())]), "tensor t has a count of 0 dimensions"),
        (build({}, [floats("t", dims=(1,) * 5)]), "tensor t has a count of 5 dimensions"),
        (build({}, [floats("t", dims=(0,))]), "tensor t has dimensions .*out of bounds"),
        (build({}, [floats("t", dims=(HUGE, HUGE))]), "tensor t has dimensions .*out of bounds"),
        (build({}, [floats("t", offset=HUGE)]), "truncated"),
        (build({}, [floats("t", offset=(1 << 64) - 32)]), "tensor t has dimensions .*out of bounds"),
        (build({}, [floats("t", offset=8)]), "tensor t lies at offset 8, not a multiple of general.alignment 32"),
        (build({}, [Tensor("t", (8,), 99, bytes(32))]), "tensor t has the unknown type 99"),
        (build({}, [Tensor("t", (8,), 4, bytes(32))]), "tensor t has the unknown type 4"),
        (
            build({}, [Tensor("t", (48,), 8, bytes(68))]),
            "tensor t has rows of 48, not a multiple of Q8_0's blocks of 32",
        ),
        (build({}, [floats("a", 16), floats("b", offset=32)]), "tensors a and b overlap"),
    ],
)
def test_headers_that_cannot_be(tmp_path: Path, data: bytes, says: str) -> None:
    """Counts, lengths, types and places that do not fit the file are refused by name, at once."""
    start = time.thread_time()
    refuse(write(tmp_path, data), says)
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("alignment", [8, 64, 65536])
def test_alignments(tmp_path: Path, alignment: int) -> None:
    """Tensors are found under any alignment that can be."""
    data = build({"general.alignment": alignment}, [floats("a"), floats("b")], alignment=alignment)
    with open_model_file(write(tmp_path, data)) as model_file:
        a, b = model_file.tensors.values()
    assert a.offset_bytes == len(data) - 2 * max(alignment, 32)
    assert b.offset_bytes - a.offset_bytes == max(alignment, 32)


@pytest.mark.parametrize("alignment", [0, 3, 4, 33, 131072, 1 << 31, True, "32", [32]])
def test_alignments_that_cannot_be(tmp_path: Path, alignment: object) -> None:
    """Another alignment is refused by its key."""
    refuse(write(tmp_path, build({"general.alignment": alignment}, [floats("a")])), r"general\.alignment is ")


@pytest.mark.parametrize("missing", [1, 32, 33, 100])
def test_truncated(tmp_path: Path, missing: int) -> None:
    """A file that is cut off names the first tensor outside and the missing bytes, also for one byte."""
    data = build({}, [floats("first"), floats("second"), floats("third")])
    if missing > 96:
        refuse(write(tmp_path, data[:-missing]), "truncated")
    else:
        first = "third" if missing <= 32 else "second"
        refuse(
            write(tmp_path, data[:-missing]),
            f"truncated: {missing} bytes are missing, tensor {first} is the first that lies outside; download",
        )


def test_cut_anywhere(tmp_path: Path) -> None:
    """A file cut at any byte is refused as truncated, empty or not a model."""
    data = build(small_keys(block_count=1), [floats("t")])
    for keep in range(0, len(data), 37):
        refuse(write(tmp_path, data[:keep]), "truncated|empty|not a GGUF")


def test_file_that_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that becomes shorter while it is read is an error, not a signal."""
    path = write(tmp_path, build({}, [floats("a")]))
    monkeypatch.setattr(os, "pread", lambda fd, n, at: b"")
    refuse(path, "became shorter")


def shards(tmp_path: Path) -> list[str]:
    with open_model_file(str(DATA / "micro.gguf")) as whole:
        keys, tensors = contents(whole)
    paths = []
    for n in range(3):
        split = {
            "split.no": RawValue(2, struct.pack("<H", n)),
            "split.count": RawValue(2, struct.pack("<H", 3)),
            "split.tensors.count": len(tensors),
        }
        data = build((keys if n == 0 else {}) | split, tensors[n * 10 : n * 10 + 10])
        paths.append(write(tmp_path, data, f"micro-{n + 1:05}-of-00003.gguf"))
    return paths


@pytest.mark.parametrize("given_shard", [0, 1, 2])
def test_shards_are_one_model(tmp_path: Path, given_shard: int) -> None:
    """Whichever shard is given, all are opened in order, and hold what the one file holds."""
    paths = shards(tmp_path)
    with open_model_file(paths[given_shard]) as model_file, open_model_file(str(DATA / "micro.gguf")) as whole:
        assert [part.path for part in model_file.files] == paths
        assert model_file.metadata["general.name"] == whole.metadata["general.name"]
        assert list(model_file.tensors) == list(whole.tensors)
        for name, tensor in model_file.tensors.items():
            original = whole.tensors[name]
            assert os.pread(model_file.files[tensor.file].fd, tensor.size_bytes, tensor.offset_bytes) == os.pread(
                whole.files[0].fd, original.size_bytes, original.offset_bytes
            )


@pytest.mark.parametrize("given_shard", [0, 1])
def test_missing_shard(tmp_path: Path, given_shard: int) -> None:
    """A missing shard is named."""
    paths = shards(tmp_path)
    os.unlink(paths[2])
    refuse(paths[given_shard], re.escape(paths[2]) + ": this shard of the model is missing")


def test_shards_that_do_not_fit(tmp_path: Path) -> None:
    """Shards under other names, swapped, or of another model are refused."""
    first, second, third = shards(tmp_path)
    swapped = Path(second).read_bytes()
    Path(second).write_bytes(Path(third).read_bytes())
    refuse(first, "micro-00002-of-00003.gguf: split.no or split.count does not fit")
    Path(second).write_bytes(
        Path(first).read_bytes().replace(b"split.no\x02\x00\x00\x00\x00", b"split.no\x02\x00\x00\x00\x01")
    )
    refuse(first, "is there twice")
    split = {"split.no": 1, "split.count": 3}
    Path(second).write_bytes(build(split))
    refuse(first, "the shards hold 17 tensors, split.tensors.count says 27")
    refuse(write(tmp_path, swapped, "renamed.gguf"), "split.count says 3 shards; name them NAME-00001-of-00003.gguf")


def test_large_headers_are_quick(tmp_path: Path) -> None:
    """A header of 150,000 tokens and as many merges, or of 36,096 tensors, is walked in a moment and little memory.

    A walk that looks back over what it has read would take minutes; this one takes 0.6 s of a slow processor.
    """
    words = [f"word{n}" for n in range(150_000)]
    vocabulary = build({"tokens": words, "types": [1] * 150_000, "merges": [f"{word} x" for word in words]})
    tensors = build({}, [floats(f"blk.{n // 384}.ffn_gate.{n % 384}.weight") for n in range(36_096)])
    for name, data in (("vocabulary", vocabulary), ("tensors", tensors)):
        path = write(tmp_path, data, name)
        start = time.thread_time()
        open_model_file(path).close()
        assert time.thread_time() - start < 15
    tracemalloc.start()
    with open_model_file(str(tmp_path / "vocabulary")) as model_file:
        assert model_file.metadata["tokens"] == words
    assert tracemalloc.get_traced_memory()[1] < 10 * len(vocabulary)
    tracemalloc.stop()


SMALL = build(small_keys(), small_tensors())
HEADER_BYTES = 6300


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(
            st.integers(0, HEADER_BYTES), st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 8, bytes(8)])
        ),
        max_size=4,
    ),
    st.none() | st.integers(0, HEADER_BYTES),
)
def test_damaged_headers(
    tmp_path_factory: pytest.TempPathFactory, patches: list[tuple[int, bytes]], keep: int | None
) -> None:
    """Whatever is overwritten or cut off, a file is either read or refused in one line, in bounded memory."""
    data = bytearray(SMALL)
    for at, piece in patches:
        data[at : at + len(piece)] = piece
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data[:keep])
    tracemalloc.start()
    try:
        with open_model_file(str(path)) as model_file:
            for tensor in model_file.tensors.values():
                assert 0 <= tensor.offset_bytes <= len(data) - tensor.size_bytes
            model = Qwen3Moe(model_file)
            model.stacks()
            read_vocabulary(model_file.metadata)
    except ModelError as error:
        assert len(str(error).splitlines()) == 1
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
