"""What takes long at the beginning and leaves Python to others meanwhile, begun before it is needed.

From its start to its first token a client imports modules, half a second that no second thread shortens, as
only one runs Python at a time. Making CUDA's context takes as long, all of it within the driver: the two go on
side by side. Whoever needs the context just asks the driver for it, and waits there if it is not ready yet.
"""

import ctypes
import threading
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Generic, TypeVar

from strata_client import timings

CUDA_LIBRARY = "libcuda.so.1"
CUDA_DEVICE = Path("/dev/nvidiactl")
CUDA_PACKAGE = "cuda"

Result = TypeVar("Result")


class Begun(Generic[Result]):
    """A function that runs in a thread of its own."""

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        """Starts it; `name` is the thread's, which the table of stages shows."""
        self._function = function
        self._result: Result
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def result(self) -> Result:
        """Waits for the function and gives what it gave, or raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self) -> None:
        """Waits for the function, whatever comes of it."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error


class Later(Generic[Result]):
    """A function that runs in a thread of its own from when that is first asked for. For one thread."""

    def __init__(self, name: str, function: Callable[[], Result]) -> None:
        """Takes what `Begun` does."""
        self._name = name
        self._function = function
        self._begun: Begun[Result] | None = None

    def begin(self) -> Begun[Result]:
        """Starts it, unless it was started."""
        if self._begun is None:
            self._begun = Begun(self._name, self._function)
        return self._begun

    def wait(self) -> None:
        """Waits until it does not run, whatever comes of it."""
        if self._begun is not None:
            self._begun.wait()


def begin_cuda() -> Begun[None] | None:
    """Makes the CUDA context in the background if it may be needed: there is a GPU, and what programs it.

    With several GPUs, which one is for the daemon to say: then only the driver is initialized. Nothing that
    goes wrong is an error here; whoever needs CUDA meets it again.
    """
    if not CUDA_DEVICE.exists() or PathFinder.find_spec(CUDA_PACKAGE) is None:
        return None
    return Begun("cuda", _make_context)


def _make_context() -> None:
    # Not through cuda.bindings: importing that is among what runs meanwhile.
    try:
        driver: Any = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        return
    with timings.stage("cuInit"):
        if driver.cuInit(0):
            return
    count, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGetCount(ctypes.byref(count)) or count.value != 1:
        return
    with timings.stage("context"):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)  # held until the process ends
