"""`vmmctl status`."""

import json
from typing import Any

import click

from vmmd.ctl.admin import CALL_TIMEOUT_S, admin_stub, socket_option


@click.command()
@click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to show it."
)
@socket_option
def status(output: str, socket_path: str | None) -> None:
    """Shows who holds what: devices, models and sessions, all at one moment."""
    from strata_api.v1 import admin_pb2

    parts: list[admin_pb2.StatusPart] = []
    with admin_stub(socket_path) as (stub, metadata):
        parts.extend(stub.Status(admin_pb2.StatusRequest(), metadata=metadata, timeout=CALL_TIMEOUT_S))
    snapshot = as_dict(parts)
    if output == "json":
        click.echo(json.dumps(snapshot, indent=1))
        return
    from vmmd.ctl.printers import print_status

    print_status(snapshot)


def as_dict(parts: Any) -> dict[str, Any]:
    """One snapshot of its parts, with the fields of `admin.proto`; numbers stay numbers."""
    snapshot: dict[str, Any] = {"daemon": {}, "devices": [], "models": [], "sessions": [], "quarantines": []}
    for part in parts:
        if part.HasField("daemon"):
            snapshot["daemon"] = fields_of(part.daemon)
        for name in ("devices", "models", "sessions", "quarantines"):
            snapshot[name] += [fields_of(message) for message in getattr(part, name)]
    return snapshot


def fields_of(message: Any) -> dict[str, Any]:
    """A message's fields by name, all of them: messages as objects, repeated ones as lists."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool):
        return value
    return fields_of(value) if hasattr(value, "DESCRIPTOR") else [_plain(item) for item in value]
