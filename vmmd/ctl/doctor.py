"""`vmmctl doctor`."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from vmmd.ctl.findings import Finding


@click.command()
@click.option(
    "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="How to show it."
)
@click.option(
    "--runtime-dir", "directory", type=click.Path(path_type=Path), help="Directory of the sockets, as for vmmd."
)
def doctor(output: str, directory: Path | None) -> None:
    """Probes this host: what works, what does not, and what to do.

    Needs no daemon and no GPU, and changes nothing. Exit status 1: something that a
    daemon needs fails here.
    """
    found = list(examine(directory))
    if output == "json":
        click.echo(json.dumps({"findings": [finding._asdict() for finding in found]}, indent=1))
    else:
        print_findings(found)
    if any(finding.state == "fail" for finding in found):
        raise SystemExit(1)


def examine(directory: Path | None) -> "Iterator[Finding]":
    """All findings: of the host, then of CUDA, which is probed meanwhile."""
    from vmmd.ctl import probes_cuda, probes_host
    from vmmd.ctl.findings import look

    with probes_cuda.Child() as child:
        for name, probe in probes_host.probes(directory, environ=os.environ).items():
            yield from look(name, probe)
        yield from child.findings()


def print_findings(found: "Sequence[Finding]") -> None:
    """Prints findings as a table and a line that counts; colour only on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from strata_client.text import escape_controls

    def text(value: str, style: str = "") -> Text:
        return Text(escape_controls(value, keep=""), style=style)

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("state", "name"):
        table.add_column(column, no_wrap=True)
    table.add_column("what", overflow="fold")
    for finding in found:
        what = text(finding.what_is)
        if finding.what_to_do:
            what.append("\n")
            what.append_text(text(f"→ {finding.what_to_do}", "bold" if finding.state in ("fail", "warn") else "dim"))
        table.add_row(text(_SHOWN[finding.state], _STYLES[finding.state]), text(finding.name), what)
    console.print(table)
    console.print(_summary(found))


def _summary(found: "Sequence[Finding]") -> str:
    count = {state: sum(finding.state == state for finding in found) for state in ("fail", "warn")}
    if count["fail"]:
        return f"{count['fail']} of {len(found)} points fail, {count['warn']} want attention"
    return f"nothing that vmmd needs fails; {count['warn']} of {len(found)} points want attention"


_WIDTH_WITHOUT_TERMINAL = 160
_SHOWN = {"ok": "ok", "warn": "warn", "fail": "FAIL", "absent": "-"}
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "absent": "dim"}
