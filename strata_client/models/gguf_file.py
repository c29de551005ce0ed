"""Opens GGUF model files and walks their headers, trusting nothing in them.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. Files are
read with `pread` in blocks, never through a mapping, so that a file that shrinks meanwhile is an error and not
a signal. Every count, length and offset is compared with the file's size before it is used.
"""

import math
import os
import re
import stat
import struct
from typing import Any, NamedTuple

import numpy as np
from strata_kernels.tensor_type import TensorType, tensor_type

from strata_client.models.base import ModelError
from strata_client.text import escape_controls

BLOCK_BYTES = 1 << 20
HEADER_BYTES_MAX = 64 << 20
ARRAY_DEPTH_MAX = 4
DIMENSIONS_MAX = 4
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 16
SHARDS_MAX = 999  # that a file's name alone makes us open

_U64 = struct.Struct("<Q")
_KEY_BYTES_MIN = 8 + 4 + 1  # name length, type, value
_TENSOR_BYTES_MIN = 8 + 4 + 8 + 4 + 8  # name length, number of dimensions, one dimension, type, offset
_ARRAY_BYTES_MIN = 4 + 8  # type, count

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_ELEMENT_BYTES_MIN = {_STRING: 8, _ARRAY: _ARRAY_BYTES_MIN} | {code: kind.itemsize for code, kind in _NUMBERS.items()}

_SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class FilePart(NamedTuple):
    """One file of a model. `fd` is open read-only and belongs to the `ModelFile`."""

    path: str
    fd: int
    size_bytes: int


class TensorInfo(NamedTuple):
    """Where a tensor lies: `dims` fastest first, `offset_bytes` from the start of file number `file`."""

    name: str
    dims: tuple[int, ...]
    type: TensorType
    file: int
    offset_bytes: int
    size_bytes: int


class ArrayLength(NamedTuple):
    """An array of the metadata of which only the length was kept."""

    length: int


class ModelFile:
    """An opened model: one file, or the shards of one in their order.

    Attributes:
        files: the files; their descriptors stay open until `close`.
        metadata: values by key (of the first shard). Numbers are int, float or bool; arrays of numbers are
            numpy arrays, other arrays lists, and all of them an `ArrayLength` in a model that
            `strata_client.model_cache` knew. Bytes of a string that are not UTF-8 read as `\\xNN`.
        tensors: by name, in the order of the header.
    """

    def __init__(self) -> None:
        self.files: list[FilePart] = []
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def close(self) -> None:
        """Closes the descriptors. A second call does nothing."""
        while self.files:
            os.close(self.files.pop().fd)

    def __enter__(self) -> "ModelFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model_file(path: str) -> ModelFile:
    """Opens a model, with all its shards whichever of them is given, and checks its header.

    Raises:
        ModelError: it is not a whole and sound GGUF file.
    """
    model = ModelFile()
    try:
        count = _add_part(model, path).get("split.count", 1)
        if count != 1:
            model.close()
            _open_shards(model, path, count)
    except BaseException:
        model.close()
        raise
    return model


def open_parts(path: str) -> list[FilePart]:
    """Opens the file, or all shards that its name says it is one of, without reading anything.

    The caller closes the descriptors. It is for `open_model_file` to say whether these files are a model.

    Raises:
        ModelError: one cannot be opened.
    """
    named = _SHARD_NAME.fullmatch(path)
    paths = [path]
    if named is not None and 1 < int(named[3]) <= SHARDS_MAX:
        paths = [_shard_path(named, number) for number in range(int(named[3]))]
    parts: list[FilePart] = []
    try:
        for one in paths:
            parts.append(_open_part(one))
    except BaseException:
        for part in parts:
            os.close(part.fd)
        raise
    return parts


def _shard_path(named: re.Match[str], number: int) -> str:
    """The path of a shard, counted from 0, of the model that a shard's name belongs to."""
    return f"{named[1]}-{number + 1:05}-of-{named[3]}.gguf"


def _open_shards(model: ModelFile, path: str, count: Any) -> None:
    """Opens all shards of the model that `path` belongs to."""
    named = _SHARD_NAME.fullmatch(path)
    if named is None or type(count) is not int or int(named[3]) != count:
        shown = escape_controls(str(count), "")[:80]
        raise ModelError(
            f"{path}: split.count says {shown} shards; name them NAME-00001-of-{shown:0>5}.gguf and so on, as they were"
        )
    model.metadata, model.tensors = {}, {}
    for number in range(count):
        shard = _shard_path(named, number)
        if not os.path.exists(shard):
            raise ModelError(f"{shard}: this shard of the model is missing; download all {count} into one folder")
        split = _add_part(model, shard)
        if split.get("split.no") != number or split.get("split.count") != count:
            raise ModelError(f"{shard}: split.no or split.count does not fit the file's name; download the shard again")
    expected = model.metadata.get("split.tensors.count", len(model.tensors))
    if expected != len(model.tensors):
        raise ModelError(
            f"{path}: the shards hold {len(model.tensors)} tensors, split.tensors.count says {expected};"
            " download all shards of the same model"
        )


def _open_part(path: str) -> FilePart:
    """Opens one file for reading."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would block here
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path}: not a regular file; give the model file itself")
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return FilePart(path, fd, status.st_size)


def _add_part(model: ModelFile, path: str) -> dict[str, Any]:
    """Opens one file, adds it to the model and returns its metadata."""
    part = _open_part(path)
    model.files.append(part)
    metadata, tensors = _read_header(_Header(part), len(model.files) - 1)
    for tensor in tensors:
        if tensor.name in model.tensors:
            raise ModelError(f"{path}: tensor {_shown(tensor.name)} is there twice; download the file again")
        model.tensors[tensor.name] = tensor
    if len(model.files) == 1:
        model.metadata = metadata
    return metadata


class _Header:
    """Reads a header from front to back, in blocks, never past the file's end."""

    def __init__(self, part: FilePart) -> None:
        self.path = part.path
        self.size_bytes = part.size_bytes
        self._fd = part.fd
        self._limit = min(part.size_bytes, HEADER_BYTES_MAX)
        self._buffer = b""
        self._at = 0  # in the buffer
        self._read_bytes = 0  # of the file, up to the buffer's end

    @property
    def position(self) -> int:
        """Offset in the file of what comes next."""
        return self._read_bytes - len(self._buffer) + self._at

    @property
    def left_bytes(self) -> int:
        """How much more the header may hold."""
        return self._limit - self.position

    def past_end(self, what: str) -> ModelError:
        """The error for something that does not fit into the file."""
        if self.size_bytes > HEADER_BYTES_MAX:
            return ModelError(f"{self.path}: {what} is too large for a header ({HEADER_BYTES_MAX} bytes at most)")
        return ModelError(
            f"{self.path}: {what} goes past the end of the file ({self.left_bytes} bytes are left at byte"
            f" {self.position}): the file is truncated or corrupt; download it again"
        )

    def _need(self, n_bytes: int, what: str) -> None:
        """Makes the next `n_bytes` lie in the buffer."""
        if n_bytes > self.left_bytes:
            raise self.past_end(what)
        pieces, have = [self._buffer[self._at :]], len(self._buffer) - self._at
        while have < n_bytes:
            want = min(max(n_bytes - have, BLOCK_BYTES), self._limit - self._read_bytes)
            piece = os.pread(self._fd, want, self._read_bytes)
            if not piece:
                raise ModelError(f"{self.path}: the file became shorter while it was read; try again")
            pieces.append(piece)
            have += len(piece)
            self._read_bytes += len(piece)
        self._buffer, self._at = b"".join(pieces), 0

    def take(self, n_bytes: int, what: str) -> bytes:
        """The next `n_bytes`."""
        if self._at + n_bytes > len(self._buffer):
            self._need(n_bytes, what)
        self._at += n_bytes
        return self._buffer[self._at - n_bytes : self._at]

    def peek(self, n_bytes: int) -> bytes:
        """Up to `n_bytes` that come next, not taken."""
        self._need(min(n_bytes, self.left_bytes), "the header")
        return self._buffer[self._at : self._at + n_bytes]

    def u32(self, what: str) -> int:
        """An unsigned number of 4 bytes."""
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        """An unsigned number of 8 bytes."""
        return int.from_bytes(self.take(8, what), "little")

    def strings(self, count: int, what: str) -> list[str]:
        """The next `count` strings. One tight loop: vocabularies have hundreds of thousands."""
        found = []
        buffer, at = self._buffer, self._at
        for _ in range(count):
            if at + 8 > len(buffer):
                self._at = at
                self._need(8, what)
                buffer, at = self._buffer, 0
            end = at + 8 + _U64.unpack_from(buffer, at)[0]
            if end > len(buffer):
                self._at = at
                self._need(end - at, f"{what}: a string of {end - at - 8} bytes")
                buffer, at, end = self._buffer, 0, end - at
            found.append(buffer[at + 8 : end].decode("utf-8", "backslashreplace"))
            at = end
        self._at = at
        return found


def _read_header(header: _Header, file: int) -> tuple[dict[str, Any], list[TensorInfo]]:
    """The metadata and the tensors of one file."""
    path = header.path
    _check_magic(header)
    n_tensors, n_keys = header.u64("the count of tensors"), header.u64("the count of keys")
    if n_keys > header.left_bytes // _KEY_BYTES_MIN:
        raise header.past_end(f"a count of {n_keys} keys")
    if n_tensors > header.left_bytes // _TENSOR_BYTES_MIN:
        raise header.past_end(f"a count of {n_tensors} tensors")

    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = header.strings(1, "a key's name")[0]
        if key in metadata:
            raise ModelError(f"{path}: key {_shown(key)} is there twice; download the file again")
        what = f"key {_shown(key)}"
        metadata[key] = _read_value(header, header.u32(what), what)

    alignment = metadata.get("general.alignment", ALIGNMENT_DEFAULT)
    if type(alignment) is not int or alignment not in {1 << n for n in range(3, 17)}:
        raise ModelError(
            f"{path}: general.alignment is {escape_controls(str(alignment), '')[:80]}; it must be a power of two"
            f" from 8 to {ALIGNMENT_MAX}"
        )
    relative = [_read_tensor(header, file, alignment) for _ in range(n_tensors)]
    start = -(-header.position // alignment) * alignment
    tensors = [tensor._replace(offset_bytes=start + tensor.offset_bytes) for tensor in relative]
    _check_places(path, header.size_bytes, tensors)
    return metadata, tensors


def _check_magic(header: _Header) -> None:
    """Magic bytes and version; says what else the file is."""
    path = header.path
    if header.size_bytes == 0:
        raise ModelError(f"{path}: the file is empty, not a GGUF file; download the file itself")
    start = header.peek(64)
    if start[:4] != b"GGUF":
        kind = ""
        if start.startswith(b"version https://git-lfs"):
            kind = " but a pointer to a large file"
        elif start.lstrip().startswith(b"<"):
            kind = " but a web page"
        raise ModelError(f"{path}: not a GGUF file{kind}; download the file itself")
    header.take(4, "the magic")
    version = header.u32("the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise ModelError(f"{path}: a big-endian GGUF file; convert the model for little-endian machines")
        raise ModelError(f"{path}: GGUF version {version} is not supported, 2 and 3 are; convert the model again")


def _read_value(header: _Header, kind: int, what: str, depth: int = 0) -> Any:
    """One value of the metadata."""
    if kind == _STRING:
        return header.strings(1, what)[0]
    if kind in _NUMBERS:
        number = np.frombuffer(header.take(_NUMBERS[kind].itemsize, what), _NUMBERS[kind])
        return (_booleans(number, header, what) if kind == _BOOL else number)[0].item()
    if kind != _ARRAY:
        raise ModelError(f"{header.path}: {what} has the unknown type {kind}: the file is corrupt; download it again")
    if depth == ARRAY_DEPTH_MAX:
        raise ModelError(f"{header.path}: {what} nests arrays more than {ARRAY_DEPTH_MAX} deep: the file is corrupt")
    element, count = header.u32(what), header.u64(what)
    if element not in _ELEMENT_BYTES_MIN:
        raise ModelError(f"{header.path}: {what} is an array of the unknown type {element}: the file is corrupt")
    if count > header.left_bytes // _ELEMENT_BYTES_MIN[element]:
        raise header.past_end(f"{what}: an array of length {count}")
    if element == _STRING:
        return header.strings(count, what)
    if element == _ARRAY:
        return [_read_value(header, _ARRAY, what, depth + 1) for _ in range(count)]
    numbers = np.frombuffer(header.take(count * _NUMBERS[element].itemsize, what), _NUMBERS[element])
    return _booleans(numbers, header, what) if element == _BOOL else numbers


def _booleans(numbers: Any, header: _Header, what: str) -> Any:
    """Bytes as truth values; only 0 and 1 are any."""
    if numbers.size and numbers.max() > 1:
        raise ModelError(f"{header.path}: {what} has a truth value of {numbers.max()}: the file is corrupt")
    return numbers.astype(bool)


def _read_tensor(header: _Header, file: int, alignment: int) -> TensorInfo:
    """One tensor's description; its offset is still relative to the start of the data."""
    path = header.path
    name = header.strings(1, "a tensor's name")[0]
    what = f"tensor {_shown(name)}"
    n_dims = header.u32(what)
    if not 1 <= n_dims <= DIMENSIONS_MAX:
        raise ModelError(f"{path}: {what} has a count of {n_dims} dimensions, 1 to {DIMENSIONS_MAX} are possible")
    dims: tuple[int, ...] = struct.unpack(f"<{n_dims}Q", header.take(8 * n_dims, what))
    code, offset = header.u32(what), header.u64(what)
    try:
        kind = tensor_type(code)
    except ValueError:
        raise ModelError(f"{path}: {what} has the unknown type {code}; use another quantization") from None
    block = kind.block_values
    size_bytes = math.prod(dims) // block * kind.block_bytes
    if 0 in dims or max(*dims, size_bytes, offset) >= 1 << 63:
        raise ModelError(f"{path}: {what} has dimensions {dims} at offset {offset}, out of bounds: the file is corrupt")
    if dims[0] % block:
        raise ModelError(f"{path}: {what} has rows of {dims[0]}, not a multiple of {kind.name}'s blocks of {block}")
    if offset % alignment:
        raise ModelError(f"{path}: {what} lies at offset {offset}, not a multiple of general.alignment {alignment}")
    return TensorInfo(name, dims, kind, file, offset, size_bytes)


def _check_places(path: str, file_bytes: int, tensors: list[TensorInfo]) -> None:
    """Refuses tensors outside the file and tensors that overlap."""
    ordered = sorted(tensors, key=lambda tensor: tensor.offset_bytes)
    missing = max((tensor.offset_bytes + tensor.size_bytes for tensor in ordered), default=0) - file_bytes
    previous_end, previous = 0, ""
    for tensor in ordered:
        end = tensor.offset_bytes + tensor.size_bytes
        if end > file_bytes:
            raise ModelError(
                f"{path}: truncated: {missing} bytes are missing, tensor {_shown(tensor.name)} is the first that lies"
                " outside; download the file again"
            )
        if tensor.offset_bytes < previous_end:
            raise ModelError(f"{path}: tensors {_shown(previous)} and {_shown(tensor.name)} overlap: it is corrupt")
        previous_end, previous = end, tensor.name


def _shown(name: str) -> str:
    """A name out of a file, fit for one line on a terminal."""
    return escape_controls(name, "")[:120]
