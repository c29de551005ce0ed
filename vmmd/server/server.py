"""The gRPC server on vmmd.sock: Memory, Admin, health and reflection."""

from collections.abc import Collection, Mapping
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from strata_api.v1 import admin_pb2, admin_pb2_grpc, memory_pb2, memory_pb2_grpc

from vmmd.errors import Unavailable
from vmmd.manager import Manager
from vmmd.server.admin import Admin
from vmmd.server.memory import Memory

MESSAGE_BYTES_MAX = 4 << 20


class Server:
    """Binds `path` itself: gRPC in Python cannot adopt a socket."""

    def __init__(self, manager: Manager, path: Path, admins: Mapping[str, int], admin_uids: Collection[int]) -> None:
        self._path = path
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4096)
        self._health = health.aio.HealthServicer()
        memory_pb2_grpc.add_MemoryServicer_to_server(Memory(manager), self._server)  # type: ignore[no-untyped-call]
        admin_pb2_grpc.add_AdminServicer_to_server(Admin(manager, admins, admin_uids), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names = [
            memory_pb2.DESCRIPTOR.services_by_name["Memory"].full_name,
            admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
        ]
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)

    async def start(self) -> None:
        """Listens and serves. Errors: `Unavailable` where the socket cannot be bound."""
        try:
            bound = self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self._path}: {error}") from None
        if not bound:
            raise Unavailable(f"cannot listen on {self._path}")
        await self._server.start()
        for name in ["", *self._names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Ends calls that are not done within the grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
