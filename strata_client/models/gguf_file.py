"""Walks the header of GGUF model files."""

from typing import Any, NamedTuple

from gguf import GGMLQuantizationType


class FilePart(NamedTuple):
    """One file of a model. `fd` is open read-only and belongs to the `ModelFile`."""

    path: str
    fd: int
    size_bytes: int


class TensorInfo(NamedTuple):
    """Where a tensor lies: `dims` fastest first, `offset_bytes` from the start of file `file`."""

    name: str
    dims: tuple[int, ...]
    type: GGMLQuantizationType
    file: int
    offset_bytes: int
    size_bytes: int


class ModelFile:
    """An opened model: one file, or the shards of one."""

    files: list[FilePart]
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def close(self) -> None:
        """Closes the descriptors."""
        raise NotImplementedError

    def __enter__(self) -> "ModelFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_model_file(path: str) -> ModelFile:
    """Opens a model and checks its header."""
    raise NotImplementedError
