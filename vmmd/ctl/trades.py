"""`vmmctl trades` and `vmmctl explain`."""

import json
from typing import Any

import click

from vmmd.ctl.admin import CALL_TIMEOUT_S, admin_stub, socket_option

_output_option = click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to show it."
)


@click.command()
@click.option(
    "--last", type=click.IntRange(1, 1000), default=1000, show_default=True, help="How many, from the newest."
)
@_output_option
@socket_option
def trades(last: int, output: str, socket_path: str | None) -> None:
    """Lists the last decisions about memory with their reasons: trades, grants, refusals. The newest comes last."""
    from strata_api.v1 import admin_pb2

    found: list[dict[str, Any]] = []
    with admin_stub(socket_path) as (stub, metadata):
        for part in stub.Trades(admin_pb2.TradesRequest(count_max=last), metadata=metadata, timeout=CALL_TIMEOUT_S):
            found += [_fields(decision) for decision in part.decisions]
    found.reverse()
    if output == "json":
        click.echo(json.dumps({"decisions": found}, indent=1))
        return
    from vmmd.ctl.printers import print_decisions

    print_decisions(found)


@click.command()
@click.argument("some_id", metavar="ID", type=click.IntRange(1, (1 << 64) - 1))
@_output_option
@socket_option
def explain(some_id: int, output: str, socket_path: str | None) -> None:
    """Says why a range, a session or a model has what it has, what was refused and what would change it.

    `vmmctl status --output json` and `vmmctl trades` show ids.
    """
    from strata_api.v1 import admin_pb2

    with admin_stub(socket_path) as (stub, metadata):
        reply = stub.Explain(admin_pb2.ExplainRequest(id=some_id), metadata=metadata, timeout=CALL_TIMEOUT_S)
    facts = [_fields(fact) for fact in reply.facts]
    if output == "json":
        click.echo(json.dumps({"facts": facts}, indent=1))
        return
    from vmmd.ctl.printers import print_facts

    print_facts(facts)


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}
