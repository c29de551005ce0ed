"""Views: bytes of a range, shown to other frameworks without a copy.

An array that a framework makes of a view keeps the view alive, and a view keeps its
range's memory mapped. On the host a view has ``__array_interface__``, on a GPU
``__cuda_array_interface__``, and on both ``__dlpack__``:

- numpy, CuPy and Numba take the view itself: ``numpy.asarray(view)``, ``cupy.asarray(view)``;
- PyTorch and JAX take it through DLPack: ``torch.from_dlpack(view)``.
"""

import ctypes
import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from vmmd.errors import NoDevice

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # by numpy's kind; dlpack.h
_CPU, _CUDA = 1, 2
_VERSION = (1, 0)


class View:
    """An array in a range, in C order: no copy. What it holds is whatever was written there last.

    Attributes:
        address: where it begins, for the processor or for the GPU.
        shape: of the array.
        dtype: numpy's.
        ordinal: the GPU's number in this process; None on the host.
    """

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], ordinal: int | None, check: Callable[[], None]
    ) -> None:
        """`Range.view` makes one. `check` raises where this process may not touch the memory."""
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.ordinal = ordinal
        self._check = check

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """On the host: numpy's own protocol."""
        if self.ordinal is not None:
            raise AttributeError("this view is in a GPU's memory: it has __cuda_array_interface__")
        return self._interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """On a GPU: what CuPy, Numba and PyTorch read. No stream need be waited for: nothing of ours runs on it."""
        if self.ordinal is None:
            raise AttributeError("this view is in the host's memory: it has __array_interface__")
        return {**self._interface(), "stream": None}

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """For numpy, which asks for it where there is no `__array_interface__`. Errors: `NoDevice` on a GPU."""
        if self.ordinal is not None:
            raise NoDevice("this view is in a GPU's memory, which numpy cannot reach: copy it with the GPU's framework")
        return np.asarray(self).astype(dtype or self.dtype, copy=bool(copy))

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device: the processor, or a GPU of this process."""
        return (_CPU, 0) if self.ordinal is None else (_CUDA, self.ordinal)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A DLPack capsule, of version 1 where the consumer knows it.

        Errors: `BufferError` for a copy or another device.
        """
        self._check()
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("a view of leased memory is neither copied nor moved: do that with what is made of it")
        return _capsule(self, versioned=max_version is not None and max_version[0] >= _VERSION[0])

    def _interface(self) -> dict[str, Any]:
        self._check()
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


# DLPack (dlpack.h): what its consumer owns is kept in `_exported` until it calls the deleter


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_exported: dict[int, tuple[Any, ...]] = {}
"""By the address of a managed tensor: it, its shape, and the view that it shows."""

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _drop_capsule(capsule: int) -> None:
    """A capsule that nobody consumed takes its tensor along; a consumer renames it."""
    for name in (_NAME, _NAME_VERSIONED):
        if _is_valid(capsule, name):
            _exported.pop(_pointer(capsule, name), None)


_deleter = _Deleter(_delete)
_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_drop_capsule)

_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _capsule(view: View, *, versioned: bool) -> Any:
    code = _CODES.get(view.dtype.kind)
    if code is None or not view.dtype.isnative:
        raise BufferError(f"DLPack has no {view.dtype}")
    shape = (ctypes.c_int64 * len(view.shape))(*view.shape)
    steps = [*itertools.accumulate(reversed(view.shape[1:]), lambda a, b: a * b, initial=1)][::-1] if view.shape else []
    strides = (ctypes.c_int64 * len(steps))(*steps)
    kind, number = view.__dlpack_device__()
    tensor = _Tensor(view.address, kind, number, len(view.shape), code, view.dtype.itemsize * 8, 1, shape, strides, 0)
    managed = _ManagedVersioned(*_VERSION, None, _deleter, 0, tensor) if versioned else _Managed(tensor, None, _deleter)
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, strides, view
    return _new_capsule(address, _NAME_VERSIONED if versioned else _NAME, ctypes.cast(_destructor, ctypes.c_void_p))
