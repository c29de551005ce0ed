"""`vmmctl conversations` and `vmmctl drop`."""

import json
import pwd

import click

from vmmd.ctl.admin import CALL_TIMEOUT_S, admin_stub, socket_option
from vmmd.ctl.status import fields_of

output_option = click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to show it."
)


@click.command()
@output_option
@socket_option
def conversations(output: str, socket_path: str | None) -> None:
    """Lists your conversations, the longest parked first; an administrator sees everybody's."""
    from strata_api.v1 import admin_pb2

    with admin_stub(socket_path) as (stub, metadata):
        parts = list(stub.Conversations(admin_pb2.ConversationsRequest(), metadata=metadata, timeout=CALL_TIMEOUT_S))
    rows = [fields_of(conversation) for part in parts for conversation in part.conversations]
    if output == "json":
        click.echo(json.dumps({"conversations": rows}, indent=1))
        return
    from vmmd.ctl.printers import print_conversations

    print_conversations(rows)


@click.command()
@click.argument("name")
@click.option("--user", help="Name or id of the user whose conversation it is; for administrators.  [default: you]")
@output_option
@socket_option
def drop(name: str, user: str | None, output: str, socket_path: str | None) -> None:
    """Drops the conversation NAME that no client uses, and frees its memory."""
    from strata_api.v1 import admin_pb2

    request = admin_pb2.DropConversationRequest(name=name, uid=None if user is None else _uid(user))
    with admin_stub(socket_path) as (stub, metadata):
        reply = stub.DropConversation(request, metadata=metadata, timeout=CALL_TIMEOUT_S)
    if output == "json":
        click.echo(json.dumps({"name": name, **fields_of(reply)}, indent=1))
        return
    from vmmd.ctl.printers import size

    click.echo(f"dropped {name}: {reply.cells} cells, {size(reply.bytes)}")


def _uid(user: str) -> int:
    """The id of a user by name or id. Errors: `BadParameter`."""
    if user.isascii() and user.isdigit() and int(user) < 2**32 - 1:
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise click.BadParameter(f"there is no user {user!r} on this host", param_hint="--user") from None
