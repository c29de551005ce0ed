"""`vmmctl verify`."""

import json
import sys
from contextlib import suppress
from typing import Any

import click

from vmmd.ctl.admin import admin_stub, socket_option
from vmmd.errors import Unavailable


@click.command()
@click.argument("model")
@click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to show it."
)
@socket_option
def verify(model: str, output: str, socket_path: str | None) -> None:
    """Compares all that the daemon holds of MODEL, an id or a name, with its file, while it is used.

    Exit status 1: something differs.
    """
    from strata_api.v1 import admin_pb2

    summary = None
    with admin_stub(socket_path) as (stub, metadata):
        progress = _Progress()
        try:
            for event in stub.Verify(admin_pb2.VerifyRequest(model=model), metadata=metadata):
                if event.HasField("summary"):
                    summary = event.summary
                else:
                    progress.show(event.progress.compared_bytes, event.progress.total_bytes)
        finally:
            progress.clear()
    if summary is None:
        raise Unavailable("vmmd ended the verification without a result; ask again")
    found = as_dict(summary)
    if output == "json":
        click.echo(json.dumps(found, indent=1))
    else:
        from vmmd.ctl.printers import print_verification

        print_verification(found)
    if summary.mismatched:
        raise SystemExit(1)


def as_dict(summary: Any) -> dict[str, Any]:
    """The summary with the fields of `admin.proto`; None for what the weights do not have."""
    found = {field.name: getattr(summary, field.name) for field in summary.DESCRIPTOR.fields}
    found["mismatches"] = [
        {
            field.name: getattr(mismatch, field.name)
            if not field.has_presence or mismatch.HasField(field.name)
            else None
            for field in mismatch.DESCRIPTOR.fields
        }
        for mismatch in summary.mismatches
    ]
    return found


class _Progress:
    """A line on standard error that is rewritten; nothing where that is no terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._shown = False

    def show(self, compared_bytes: int, total_bytes: int) -> None:
        """Shows how far it is."""
        share = min(1.0, compared_bytes / total_bytes) if total_bytes else 0.0
        self._write(f"\rcomparing: {share:4.0%} of {total_bytes / (1 << 30):.2f} GiB")
        self._shown = True

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        if self._is_terminal:
            with suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()
