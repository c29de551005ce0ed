"""Views as other frameworks see them: numpy's protocol, CUDA's, and DLPack."""

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from strata_client import view as view_module
from strata_client.view import View
from vmmd.errors import NoDevice, PermissionDenied


def _view(array: np.ndarray, ordinal: int | None = None) -> View:
    return View(array.ctypes.data, array.shape, array.dtype, ordinal, lambda: None)


def _sources() -> list[np.ndarray]:
    return [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(5, dtype=np.uint8),
        np.arange(6, dtype=np.int16).reshape(6, 1),
        np.arange(3, dtype=np.complex64),
        np.array(7.5),
        np.empty((0, 4), np.int64),
    ]


@pytest.mark.parametrize("source", _sources(), ids=lambda s: f"{s.dtype}{list(s.shape)}")
def test_numpy_sees_the_same_memory(source: np.ndarray) -> None:
    """An array made of a view, by either protocol, has its shape and type and writes where it does."""
    for array in (np.asarray(_view(source)), np.from_dlpack(_view(source))):
        assert (array.shape, array.dtype) == (source.shape, source.dtype)
        assert np.array_equal(array, source)
        if source.size:
            assert array.ctypes.data == source.ctypes.data
        assert array.flags.c_contiguous
    if source.size:
        np.asarray(_view(source)).flat[0] = 1
        assert source.flat[0] == 1


@pytest.mark.parametrize("convert", [np.asarray, np.from_dlpack], ids=["interface", "dlpack"])
def test_arrays_keep_their_view(convert: Any) -> None:
    """A view lives as long as an array that was made of it, or a slice of that; DLPack keeps no more than that."""
    source = np.arange(100, dtype=np.uint8)
    view = _view(source)
    died: list[bool] = []
    weakref.finalize(view, died.append, True)
    piece = convert(view)[10:20].reshape(2, 5)
    del view
    gc.collect()
    assert not died
    assert piece[0, 0] == 10
    del piece
    gc.collect()
    assert died == [True]
    assert view_module._exported == {}


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 1)])
def test_a_capsule_that_nobody_takes_is_dropped(max_version: tuple[int, int] | None) -> None:
    """Of the version that the consumer knows; nothing of it is left."""
    capsule = _view(np.zeros(3)).__dlpack__(max_version=max_version, stream=2, dl_device=(1, 0), copy=False)
    named = "dltensor_versioned" if max_version and max_version[0] else "dltensor"
    assert f'"{named}"' in repr(capsule)
    assert len(view_module._exported) == 1
    del capsule
    gc.collect()
    assert view_module._exported == {}


def test_dlpack_says_where_a_gpu_s_memory_is() -> None:
    """Device, address, type, shape and strides are in the capsule, in the layout of dlpack.h."""
    view = View(1 << 40, (2, 3, 4), np.dtype("float16"), 3, lambda: None)
    assert view.__dlpack_device__() == (2, 3)
    capsule = view.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    raw = pointer(capsule, b"dltensor")
    fields = np.frombuffer(ctypes.string_at(raw, 64), np.uint8)
    assert fields[:8].view(np.uint64)[0] == 1 << 40
    assert fields[8:20].view(np.int32).tolist() == [2, 3, 3]
    assert (fields[20], fields[21], fields[22:24].view(np.uint16)[0]) == (2, 16, 1)
    for at, expected in ((24, [2, 3, 4]), (32, [12, 4, 1])):
        found = ctypes.string_at(int(fields[at : at + 8].view(np.uint64)[0]), 24)
        assert np.frombuffer(found, np.int64).tolist() == expected
    assert fields[40:48].view(np.uint64)[0] == 0


def test_a_view_offers_the_protocols_of_its_device_only() -> None:
    """Where numpy cannot reach it says so, and does not make an array of one object."""
    on_gpu = View(1 << 40, (4,), np.dtype("float32"), 0, lambda: None)
    assert on_gpu.__cuda_array_interface__ == {
        "shape": (4,),
        "typestr": "<f4",
        "data": (1 << 40, False),
        "strides": None,
        "version": 3,
        "stream": None,
    }
    assert not hasattr(on_gpu, "__array_interface__")
    with pytest.raises(NoDevice, match="GPU's memory"):
        np.asarray(on_gpu)
    on_host = _view(np.zeros(4))
    assert not hasattr(on_host, "__cuda_array_interface__")
    assert on_host.__array__("float32").dtype == np.float32
    assert on_host.nbytes == 32


def test_what_dlpack_cannot_do_is_a_buffer_error() -> None:
    """Copies, other devices, and types that it has no name for."""
    view = _view(np.zeros(4))
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            view.__dlpack__(**options)
    for dtype in ("datetime64[s]", ">i4", "S3"):
        with pytest.raises(BufferError, match="DLPack has no"):
            _view(np.zeros(4, dtype)).__dlpack__()
    assert view_module._exported == {}


def test_a_process_that_may_not_touch_the_memory_gets_no_array() -> None:
    """The check comes before every protocol."""

    def refuse() -> None:
        raise PermissionDenied("another process")

    view = View(1 << 40, (4,), np.dtype("uint8"), None, refuse)
    for convert in (np.asarray, np.from_dlpack):
        with pytest.raises(PermissionDenied):
            convert(view)
