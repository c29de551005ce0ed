"""A real client process for the driver tests: maps slabs that it is sent, and does as it is told.

Run as ``python slab_client.py DRIVER FD``: FD is one end of a SOCK_SEQPACKET pair;
each packet is a JSON request, with descriptors for "map", and each is answered
with a JSON reply. With STRATA_FAKE_CUDA in the environment, CUDA is a stand-in.
"""

import ctypes
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vmmd.driver.base import Driver, Slab
from vmmd.driver.host_memfd import HostMapper


class SlabClient:
    """The test's side: starts the process and talks to it; ends it on exit."""

    def __init__(self, driver: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, driver, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )
        self.ask("hello")

    def reserve(self, device_uuid: str, slab_bytes: int, slabs_max: int, **values: Any) -> None:
        """Makes the client's one range; `options` are its mapper's, `contexts` GPUs that kernels run on."""
        values = {"options": {}, **values}
        refusal = self.ask("reserve", device=device_uuid, slab_bytes=slab_bytes, slabs_max=slabs_max, **values)
        assert refusal is None, refusal

    def map(self, driver: Driver, first_index: int, slabs: Sequence[Slab], *, writable: bool = False) -> Any:
        """Exports slabs to the client, which maps them; no descriptor stays here."""
        fds: list[int] = []
        try:
            for slab in slabs:
                fds.append(driver.export(slab, writable=writable))
            return self.ask("map", fds, index=first_index, writable=writable)
        finally:
            for fd in fds:
                os.close(fd)

    def ask(self, verb: str, fds: Sequence[int] = (), **values: Any) -> Any:
        """One request; returns what the client answers. The caller keeps its descriptors."""
        socket.send_fds(self._socket, [json.dumps({"verb": verb, **values}).encode()], list(fds))
        return json.loads(self._socket.recv(1 << 16))

    def send_only(self, fds: Sequence[int]) -> None:
        """Puts descriptors in flight to a client that does not look."""
        socket.send_fds(self._socket, [b'{"verb": "hello"}'], list(fds))

    def stop(self) -> None:
        """SIGSTOP: what is sent stays in flight."""
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "SlabClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        self._socket.close()


def _make_mapper(driver: str, device: str, options: Mapping[str, Any]) -> Any:
    if driver == "host":
        return HostMapper()
    if os.environ.get("STRATA_FAKE_CUDA"):
        importlib.import_module("fake_cuda").FakeCuda().install()
    from vmmd.driver.cuda_mapper import CudaMapper

    return CudaMapper(device, **options)


def _copy(mapper: Any, view: Any, offset: int, data: bytearray, *, to_range: bool) -> None:
    """Between a range and `data`, on the processor or by CUDA's synchronous copies."""
    if not isinstance(mapper, HostMapper):
        from vmmd.driver import cuda_calls

        cu = mapper.cu
        mine = ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))
        with cuda_calls.current(cu, mapper.context):
            if to_range:
                cuda_calls.call(cu.cuMemcpyHtoD, view + offset, mine, len(data))
            else:
                cuda_calls.call(cu.cuMemcpyDtoH, mine, view + offset, len(data))
    elif to_range:
        view[offset : offset + len(data)] = list(data)
    else:
        data[:] = bytes(view[offset : offset + len(data)])


def _serve(driver: str, connection: socket.socket) -> None:
    mapper: Any = None
    reservation: Any = None
    others: list[Any] = []
    kernels: Any = None
    while True:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 250)
        if not data:
            return
        request = json.loads(data)
        reply: Any = None
        try:
            match request["verb"]:
                case "reserve":
                    others = [_make_mapper(driver, uuid, {}) for uuid in request.get("contexts", ())]
                    mapper = _make_mapper(driver, request["device"], request["options"])
                    reservation = mapper.reserve(request["slab_bytes"], request["slabs_max"])
                case "map":
                    reservation.map(request["index"], fds, writable=request["writable"])
                case "hold":
                    reply = len(fds)  # and keep them open
                case "read":
                    buffer = bytearray(request["length"])
                    _copy(mapper, reservation.view(), request["offset"], buffer, to_range=False)
                    reply = buffer.hex()
                case "write":
                    buffer = bytearray.fromhex(request["data"])
                    _copy(mapper, reservation.view(), request["offset"], buffer, to_range=True)
                case "unmap":
                    reservation.unmap(request["index"])
                case "kernel":
                    if kernels is None:
                        module = importlib.import_module("cuda_kernels")
                        kernels = module.Kernels(others[0] if others else mapper)
                    address = reservation.view() + request["offset"]
                    reply = getattr(kernels, request["name"])(address, *request["args"])
                case "fork":
                    reply = os.fork()
                    if reply == 0:
                        connection.close()
                        signal.pause()
                case "descriptors":
                    reply = len(list(Path("/proc/self/fd").iterdir()))
                case "mapped":
                    reply = Path("/proc/self/maps").read_text().count("strata-slab")
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        connection.send(json.dumps(reply).encode())


if __name__ == "__main__":
    sys.path.append(os.fspath(Path(__file__).parent))
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
