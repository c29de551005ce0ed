"""Keeps what a model file's header says, for the next program that opens the model.

Reading a header with 150,000 tokens and as many merges takes a second or two. What comes of it is a few MB of
numbers, kept in ``$XDG_CACHE_HOME/strata/models`` (``~/.cache/strata/models``), which are there in some
milliseconds.

An entry is of certain files as they were: device, inode, size and both times of each, to the nanosecond. It is
also of the modules that read them, as they were: a new version of those reads again. Anything else about an
entry that is not as it should be (its owner, mode, length, checksum) makes it as good as not there, and it is
written anew. Entries are written under another name and renamed, so that any number of programs may read and
write them at once.

An entry is the magic, a CRC-32 of what follows, the length of a header in JSON, that, and the arrays that it
lists, each aligned to 8 bytes.
"""

import contextlib
import json
import os
import stat
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from strata_kernels import cache, tensor_type
from strata_kernels.tensor_type import TensorType

from strata_client import timings, tokenizer
from strata_client.models import gguf_file
from strata_client.models.base import ModelError
from strata_client.models.gguf_file import ArrayLength, FilePart, ModelFile, TensorInfo, open_model_file, open_parts
from strata_client.tokenizer import Vocabulary, read_vocabulary

ENTRIES_MAX = 16
ENTRIES_BYTES_MAX = 256 << 20
SETTLED_S = 2
"""What was changed less than this before it was read is not kept: the files' times may not tell a further change."""

_MAGIC = b"strata model 1\n\0"
_HEAD = struct.Struct("<16sQ")
_LENGTH = struct.Struct("<Q")
_SUFFIX = ".model"
_ARRAYS = {"data": "<u1", "ends": "<i8", "hashes": "<u8", "slots": "<i4", "merges": "<i4"}
_READERS = (__file__, gguf_file.__file__, tokenizer.__file__, tensor_type.__file__)

Identity = list[list[int]]


def models_directory() -> Path | None:
    """Where entries are kept; None where no such place is known."""
    return cache.cache_directory("models")


def open_model(path: str, directory: Path | None) -> tuple[ModelFile, Vocabulary]:
    """Opens a model, with all its shards whichever of them is given, and its vocabulary.

    Args:
        path: the file.
        directory: where entries are kept; None neither looks for one nor keeps one.

    Raises:
        ModelError: as `open_model_file` and `read_vocabulary`.
    """
    with timings.stage("model from cache"):
        found = _load(path, directory) if directory is not None else None
    if found is not None:
        return found
    began_s = time.time()
    with timings.stage("read header"):
        model_file = open_model_file(path)
    try:
        with timings.stage("read vocabulary"):
            vocabulary = read_vocabulary(model_file.metadata)
        if directory is not None:
            with timings.stage("keep model"), contextlib.suppress(OSError):
                _keep(directory, model_file, vocabulary, began_s)
    except BaseException:
        model_file.close()
        raise
    return model_file, vocabulary


def _identity(parts: Sequence[FilePart]) -> Identity:
    """What tells a model's files, and those that read them, from all others."""
    states = [os.fstat(part.fd) for part in parts] + [os.stat(reader) for reader in _READERS]
    return [[state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns] for state in states]


def _entry(directory: Path, identity: Identity) -> Path:
    """The one file for a model's first file, so that a changed model replaces what was kept of it."""
    device, inode, *_ = identity[0]
    return directory / f"{device:x}-{inode:x}{_SUFFIX}"


def _load(path: str, directory: Path) -> tuple[ModelFile, Vocabulary] | None:
    """What was kept of a model; None unless that is there, whole, and of the files as they are."""
    try:
        parts = open_parts(path)
    except ModelError:
        return None  # whoever reads it finds out more
    try:
        identity = _identity(parts)
        header, body = _unpacked(_contents(_entry(directory, identity)))
        if header["identity"] == identity:
            model_file = _model_file(header, parts)
            vocabulary = _vocabulary(header, body)
            parts = []
            return model_file, vocabulary
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error):
        pass
    finally:
        for part in parts:
            os.close(part.fd)
    return None


def _contents(entry: Path) -> bytes:
    """The bytes of an entry that only this user could write, marked as used now. Errors: `OSError`, `ValueError`."""
    fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
            raise ValueError("others could have written it")
        if state.st_size > ENTRIES_BYTES_MAX:
            raise ValueError("no entry is so large")
        with contextlib.suppress(OSError):
            os.utime(fd)
        return file.read()


def _keep(directory: Path, model_file: ModelFile, vocabulary: Vocabulary, began_s: float) -> None:
    """Keeps a model whose reading began then, unless its files may have changed since. Errors: `OSError`."""
    identity = _identity(model_file.files)
    last_change_s = max(max(mtime_ns, ctime_ns) for *_, mtime_ns, ctime_ns in identity[: len(model_file.files)]) / 1e9
    is_decoded = all(tensor.type.is_decoded for tensor in model_file.tensors.values())  # else a newer gguf may do it
    if last_change_s > began_s - SETTLED_S or not is_decoded:
        return
    contents = _packed(model_file, vocabulary, identity)
    if len(contents) > ENTRIES_BYTES_MAX:
        return
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.write_at_once(_entry(directory, identity), contents)
    _remove_oldest(directory)


def _remove_oldest(directory: Path) -> None:
    """Keeps to the limits; what a killed writer left goes, too, when it is old."""
    files = []
    for file in directory.iterdir():
        with contextlib.suppress(OSError):
            state = file.stat(follow_symlinks=False)
            files.append((state.st_mtime_ns, state.st_size, file))
    total_bytes = 0
    for n, (_, size_bytes, file) in enumerate(sorted(files, reverse=True)):
        total_bytes += size_bytes
        if n >= ENTRIES_MAX or total_bytes > ENTRIES_BYTES_MAX:
            with contextlib.suppress(OSError):
                file.unlink()


def _packed(model_file: ModelFile, vocabulary: Vocabulary, identity: Identity) -> bytes:
    """An entry's bytes."""
    arrays: dict[str, Any] = {name: getattr(vocabulary, name).astype(kind) for name, kind in _ARRAYS.items()}
    types = {tensor.type for tensor in model_file.tensors.values()}
    header = json.dumps(
        {
            "identity": identity,
            "metadata": {
                key: [len(value)] if isinstance(value, list | np.ndarray) else value
                for key, value in model_file.metadata.items()
            },
            "types": [[int(t), t.name, t.block_values, t.block_bytes, t.is_decoded] for t in types],
            "tensors": [
                [t.name, t.dims, int(t.type), t.file, t.offset_bytes, t.size_bytes] for t in model_file.tensors.values()
            ],
            "vocabulary": {
                "pre": vocabulary.pre,
                "bos_id": vocabulary.bos_id,
                "end_ids": vocabulary.end_ids,
                "control": list(vocabulary.control.items()),
                "user": list(vocabulary.user.items()),
            },
            "arrays": {name: array.shape for name, array in arrays.items()},
        }
    ).encode()
    pieces = [_LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays.values())]
    body = b"".join(piece + bytes(-len(piece) % 8) for piece in pieces)
    return _HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def _unpacked(contents: bytes) -> tuple[dict[str, Any], memoryview]:
    """An entry's header, and the bytes of its arrays. Errors: `ValueError`, `struct.error`."""
    magic, checksum = _HEAD.unpack_from(contents)
    body = memoryview(contents)[_HEAD.size :]
    if magic != _MAGIC or zlib.crc32(body) != checksum:
        raise ValueError("not an entry, or a damaged one")
    (n_bytes,) = _LENGTH.unpack_from(body)
    rest = body[_LENGTH.size :]
    header: dict[str, Any] = json.loads(bytes(rest[:n_bytes]))
    return header, rest[n_bytes + -n_bytes % 8 :]


def _model_file(header: dict[str, Any], parts: list[FilePart]) -> ModelFile:
    """The model of an entry; it takes over the files."""
    model_file = ModelFile()
    types = {number: TensorType(number, *rest) for number, *rest in header["types"]}
    for name, dims, number, *place in header["tensors"]:
        model_file.tensors[name] = TensorInfo(name, tuple(dims), types[number], *place)
    model_file.metadata = {
        key: ArrayLength(*value) if isinstance(value, list) else value for key, value in header["metadata"].items()
    }
    model_file.files = parts
    return model_file


def _vocabulary(header: dict[str, Any], body: memoryview) -> Vocabulary:
    """The vocabulary of an entry; its arrays are views of the entry's bytes."""
    arrays, at = {}, 0
    for name, kind in _ARRAYS.items():
        shape = header["arrays"][name]
        size_bytes = np.dtype(kind).itemsize * int(np.prod(shape))
        arrays[name] = np.frombuffer(body[at : at + size_bytes], kind).reshape(shape)
        at += size_bytes + -size_bytes % 8
    kept = header["vocabulary"]
    return Vocabulary(
        pre=kept["pre"],
        bos_id=kept["bos_id"],
        end_ids=tuple(kept["end_ids"]),
        control=dict(kept["control"]),
        user=dict(kept["user"]),
        **arrays,
    )
