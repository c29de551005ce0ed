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
from vmmd.server.calls import Calls
from vmmd.server.memory import Memory

MESSAGE_BYTES_MAX = 4 << 20
REQUEST_BYTES_MAX = 256 << 10
"""Decoding holds everybody up, so what is long comes in parts."""

CONNECTIONS_MAX = 4096
STREAMS_PER_CONNECTION_MAX = 256
HANDSHAKE_TIMEOUT_MS = 30_000
IDLE_TIMEOUT_MS = 60_000
"""Of a connection without a call; whoever watches has one."""


class Server:
    """Binds `path` itself: gRPC in Python cannot adopt a socket."""

    def __init__(self, manager: Manager, path: Path, admins: Mapping[str, int], admin_uids: Collection[int]) -> None:
        self._path = path
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
            ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION_MAX),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
            ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_MS),
        ]

        def user_of(token: str) -> int | None:
            session = manager.find_session(token)
            return admins.get(token) if session is None else session.record.uid

        calls = Calls(user_of, manager.options.calls_per_user_max)
        self._server = grpc.aio.server(interceptors=[calls], options=options)
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
