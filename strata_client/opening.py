"""Everything that a command of `strata-client` needs before its first step: model, tokens, memory, engine."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from strata_client import timings
from strata_client.prompts import ClientError
from strata_client.run_options import RunOptions

if TYPE_CHECKING:
    from strata_client.attached import Attached
    from strata_client.tokenizer import Tokenizer

_Engine = TypeVar("_Engine")

_CONTEXT_MULTIPLE = 256


@contextmanager
def opened(
    run: RunOptions,
    texts: Sequence[tuple[str, str]],
    room: int | None,
    open_engine: Callable[["Attached"], AbstractContextManager[_Engine]],
    *,
    sequences: int = 1,
    load: Callable[..., Any] | None = None,
) -> Iterator[tuple[_Engine, "Tokenizer", list[list[int]]]]:
    """Opens all of it, checked in the order of what is cheapest to refuse.

    Args:
        run: the command's options.
        texts: the prompts, or the text to measure, each with a name that errors begin with.
        room: tokens that shall follow a prompt; None allows a text longer than the context.
        open_engine: opens what evaluates them.
        sequences: most of them at once.
        load: loads a GPU's kernels; see `attach`.
    """
    from strata_client.output import Signals, say

    signals = Signals()
    signals.install()
    with timings.stage("imports"):
        from strata_client.attached import attach, load_decoder
        from strata_client.connection import Asked, runtime_directories
        from strata_client.model_cache import models_directory, open_model
        from strata_client.models.qwen3moe import Qwen3Moe
        from strata_client.tokenizer import Tokenizer

    with ExitStack() as stack:
        model_file, vocabulary = open_model(run.model, models_directory())
        stack.enter_context(model_file)
        with timings.stage("check model"):
            model = Qwen3Moe(model_file)
        with timings.stage("tokenizer"):
            tokenizer = Tokenizer(vocabulary)
            prompts = tokenizer.encode_all([text for _, text in texts], special=run.special)
        names = [f"{name}: " if name else "" for name, _ in texts]
        for name, tokens in zip(names, prompts, strict=True):
            if not tokens:
                raise ClientError(
                    f"{name}the prompt is empty and the model has no BOS token to start from: give some text"
                )
        lengths = [len(tokens) for tokens in prompts]
        longest = lengths.index(max(lengths))
        context = choose_context(run.context, model.params.context_length, lengths[longest], room, names[longest])

        def say_verbose(line: str) -> None:
            if run.verbose:
                say(line)

        with _progress() as progress:
            attached = stack.enter_context(
                attach(
                    model,
                    model_file,
                    runtime_directories(run.socket_path),
                    context=context,
                    sequences=sequences,
                    device=run.devices[0] if run.devices else None,
                    split=run.split(),
                    peer_devices=run.peer_devices,
                    kv_type=run.kv_type,
                    asked=Asked(run.wait_s, run.kv_guarantee, run.kv_cap, run.priority),
                    say=say,
                    say_verbose=say_verbose,
                    signals=signals,
                    progress=progress,
                    load=load or load_decoder,
                )
            )
        engine = stack.enter_context(open_engine(attached))
        gc.freeze()  # of what the start made nothing becomes garbage
        gc.enable()
        yield engine, tokenizer, prompts


def choose_context(asked: int | None, model_context: int, n_tokens: int, room: int | None, name: str = "") -> int:
    """The context to run with.

    Args:
        asked: `--context`, or None for what prompt and text need, in multiples of 256.
        model_context: the model's own.
        n_tokens: tokens of the prompt.
        room: tokens that shall follow it; None allows a text longer than the context.
        name: what an error about the prompt begins with.

    Errors: `UsageError` (`--context` out of range), `ClientError` (a prompt that does not fit).
    """
    if asked is not None and not 1 <= asked <= model_context:
        raise click.UsageError(f"--context is {asked}; it must be 1 to {model_context}, the model's own context")
    if asked is None:
        need = n_tokens + (room or 0)
        asked = min(model_context, -(-need // _CONTEXT_MULTIPLE) * _CONTEXT_MULTIPLE)
    if room is not None and n_tokens > asked:
        raise ClientError(
            f"{name}the prompt has {n_tokens} tokens and the context is {asked}: shorten it or raise --context"
        )
    return asked


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error while a model is filled; else nothing."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda filled_bytes, total_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("filling"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("filling", total=None, visible=False)
        yield lambda filled, total: bar.update(task, completed=filled, total=total, visible=filled < total)
