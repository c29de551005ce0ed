"""The options of the command line that `generate` and `perplexity` share.

Imports click alone, as `strata_client.main`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from strata_client.split import Split

DEFAULT_MODEL = str(Path(__file__).parent / "data" / "tiny-IQ3_S.gguf")
KV_TYPES = ("f32", "f16", "bf16", "q8_0")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(rf"(\d{{1,20}}) ?({'|'.join(_UNITS)})?")

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _size(value: str) -> int:
    """Bytes of a number that may have a unit. Errors: `BadParameter`."""
    match = _SIZE.fullmatch(value)
    if match is None or (size_bytes := int(match[1]) << 10 * _UNITS.index(match[2] or "B")) >= 1 << 63:
        raise click.BadParameter(f"{value!r} is no number of bytes below 2^63, nor one with a unit such as 512MiB")
    return size_bytes


def _with_options(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


run_options = _with_options(
    click.option(
        "--model",
        default=DEFAULT_MODEL,
        show_default="the packaged story model",
        help="GGUF file, or any shard of one.",
    ),
    click.option("--context", type=int, help="Most tokens of prompt and text together; at most the model's own."),
    click.option("--special", is_flag=True, help="Read control tokens such as <|im_start|> in the text as tokens."),
    click.option("--socket", "socket_path", help="Runtime directory of the daemon, or its vmmd.sock."),
    click.option(
        "--device",
        "devices",
        multiple=True,
        help="UUID, its beginning, or index in the daemon's list; several with --layer-split.  [default: the first]",
    ),
    click.option(
        "--layer-split",
        metavar="auto|K[,K...]",
        help="Split the layers over the devices, by default all that are seen: so many on the first, the rest on the"
        " last.",
    ),
    click.option(
        "--peer-device",
        "peer_devices",
        multiple=True,
        help="A device, named alike, for experts that the first has no room for; may be given several times.",
    ),
    click.option(
        "--kv-type",
        type=click.Choice(KV_TYPES),
        help="Of K/V cells: f32 only, and always, on the host.  [default: f16 on a GPU]",
    ),
    click.option(
        "--wait",
        "wait_s",
        type=click.FloatRange(0, 4_000_000),
        default=0.0,
        metavar="SECONDS",
        help="Longest that a request may wait for memory that others hold.  [default: not at all]",
    ),
    click.option(
        "--priority", type=click.IntRange(-10, 10), help="Before whom to be served, at most your own.  [default: that]"
    ),
    click.option(
        "--kv-guarantee",
        type=_size,
        metavar="SIZE",
        help="K/V to be kept for this run, such as 512MiB, at most your own.  [default: that]",
    ),
    click.option(
        "--kv-cap",
        type=_size,
        metavar="SIZE",
        help="Most K/V that this run shall hold, such as 512MiB, at most your own.  [default: that]",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON object a line: tokens, then statistics."),
    click.option("--verbose", is_flag=True, help="Say on standard error where memory comes from."),
    click.option("--stats", is_flag=True, help="Say on standard error, or in --json's statistics, where time went."),
)


@dataclass(frozen=True)
class RunOptions:
    """What `generate` and `perplexity` share."""

    model: str
    context: int | None
    special: bool
    socket_path: str | None
    devices: tuple[str, ...]
    layer_split: str | None
    peer_devices: tuple[str, ...]
    kv_type: str | None
    wait_s: float
    priority: int | None
    kv_guarantee: int | None
    kv_cap: int | None
    as_json: bool
    verbose: bool
    stats: bool

    @classmethod
    def taken_from(cls, options: dict[str, Any]) -> "RunOptions":
        """Takes its fields out of a command's options. Errors: `UsageError`."""
        run = cls(**{name: options.pop(name) for name in cls.__dataclass_fields__})
        if run.layer_split is None and len(run.devices) > 1:
            raise click.UsageError("several devices were given with --device: add --layer-split, or give one")
        if run.layer_split is not None and run.peer_devices:
            raise click.UsageError("--layer-split and --peer-device do not go together yet: give one of them")
        run.split()
        return run

    def split(self) -> "Split | None":
        """How the layers are to be split, if at all. Errors: `BadParameter`."""
        if self.layer_split is None:
            return None
        from strata_client.split import Split

        try:
            return Split.parse(self.layer_split, self.devices)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--layer-split") from error
