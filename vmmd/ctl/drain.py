"""`vmmctl drain`."""

import click

from vmmd.ctl.admin import CALL_TIMEOUT_S, admin_stub, socket_option


@click.command()
@socket_option
def drain(socket_path: str | None) -> None:
    """Refuses new sessions from now on; the daemon leaves when the present ones have ended."""
    from strata_api.v1 import admin_pb2

    with admin_stub(socket_path) as (stub, metadata):
        reply = stub.Drain(admin_pb2.DrainRequest(), metadata=metadata, timeout=CALL_TIMEOUT_S)
    click.echo(f"draining: waits for {reply.sessions} sessions" if reply.sessions else "draining: no session is left")
