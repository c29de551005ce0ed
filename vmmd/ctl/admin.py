"""The connection to a daemon's Admin service."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from strata_client import connection

CALL_TIMEOUT_S = 10

socket_option = click.option("--socket", "socket_path", help="Runtime directory of the daemon, or its vmmd.sock.")


@contextmanager
def admin_stub(socket_path: str | None) -> Iterator[tuple[Any, tuple[tuple[str, str], ...]]]:
    """The Admin stub, and the metadata that its calls carry; closed at the end.

    Errors of calls within are raised as `VmmError`. Without a daemon
    `strata_client.connection.NoDaemon` is raised before gRPC is imported.
    """
    directory, sock = connection.dial(connection.runtime_directories(socket_path))
    broker = connection.Broker(sock, admin=True)
    try:
        channel = connection.open_channel(directory)
        from strata_api.v1.admin_pb2_grpc import AdminStub

        try:
            with connection.rebuilt_errors():
                yield AdminStub(channel), ((connection.TOKEN_KEY, broker.token),)  # type: ignore[no-untyped-call]
        finally:
            channel.close()
    finally:
        broker.close()
