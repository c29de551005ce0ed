"""`strata-client`: the command line.

Only click is imported here at first; what a command needs comes when it runs, so
that help and refusals are quick.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from strata_client import timings
from strata_client.opening import opened
from strata_client.prompts import ClientError, prompt_text, prompt_texts
from strata_client.run_options import DEFAULT_MODEL, RunOptions, run_options

if TYPE_CHECKING:
    from strata_client.attached import Attached
    from strata_client.engine import Engine
    from strata_client.output import Output
    from strata_client.sampler import SamplerOptions
    from strata_client.tokenizer import Tokenizer

PROGRAM = "strata-client"
ROWS_MAX, ROWS_DEFAULT = 64, 16


def _conversation_name(context: click.Context, parameter: click.Parameter, name: str | None) -> str | None:
    """Errors: `BadParameter` where a conversation cannot have this name."""
    if name is None:
        return None
    from strata_api.v1.names import conversation_problem

    problem = conversation_problem(name)
    if problem is not None:
        raise click.BadParameter(problem)
    return name


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="strata-vmm", prog_name=PROGRAM)
def cli() -> None:
    """Runs a mixture-of-experts model on memory that vmmd leases.

    Without a daemon a private one is started for as long as the command runs.
    """


@cli.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("-f", "--file", "prompt_file", help="Read the prompt from this UTF-8 file.")
@click.option("--prompts", "prompts_file", metavar="FILE", help="Continue each line of this UTF-8 file.")
@click.option(
    "--batch",
    type=click.IntRange(1, ROWS_MAX),
    metavar="N",
    help=f"Most prompts to continue at once.  [default: {ROWS_DEFAULT} with several prompts]",
)
@run_options
@click.option("--max-tokens", type=click.IntRange(min=0), default=256, show_default=True, help="Most tokens of text.")
@click.option("--temperature", type=float, default=0.8, show_default=True, help="0 always takes the likeliest token.")
@click.option("--top-k", type=int, default=40, show_default=True, help="Choose among the k likeliest; 0 is off.")
@click.option("--top-p", type=float, default=0.95, show_default=True, help="Choose among those that reach p; 1 is off.")
@click.option("--min-p", type=float, default=0.05, show_default=True, help="Least share of the likeliest; 0 is off.")
@click.option("--repeat-penalty", type=float, default=1.0, show_default=True, help="Against seen tokens; 1 is off.")
@click.option("--seed", type=int, help="Of the random choice.  [default: a fresh one]")
@click.option(
    "--conversation",
    metavar="NAME",
    callback=_conversation_name,
    help="Leave the K/V cells with the daemon under this name, and go on from those left before as far as the prompt"
    " begins alike.",
)
@click.option("--stop", "stop_strings", multiple=True, help="End the text before this; may be given several times.")
def generate(prompts: tuple[str, ...], prompt_file: str | None, **options: Any) -> None:
    """Continues PROMPT (or a file, or standard input); or several, some of them at once."""
    run = RunOptions.taken_from(options)
    with timings.stage("imports"):
        from strata_client.startup import begin_cuda

        begin_cuda()  # before anything that is slow to import
        from strata_client.output import Output
        from strata_client.sampler import SamplerOptions
        from strata_client.text import StopStrings

    stop_strings, max_tokens = options.pop("stop_strings"), options.pop("max_tokens")
    conversation, prompts_file, rows = (options.pop(name) for name in ("conversation", "prompts_file", "batch"))
    try:
        stops = StopStrings(stop_strings)
        sampling = SamplerOptions(**options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if conversation is not None and run.layer_split is not None:
        raise click.UsageError("--layer-split and --conversation do not go together yet: give one of them")
    output = Output()
    if len(prompts) > 1 or prompts_file is not None or rows is not None:
        if run.layer_split is not None:
            raise click.UsageError("--layer-split and several prompts do not go together yet: give one prompt")
        if conversation is not None:
            raise click.UsageError("--conversation is of one prompt: leave it out, or --batch and the other prompts")
        texts = prompt_texts(prompts, prompt_file, prompts_file)
        _generate_batch(run, texts, sampling, stop_strings, max_tokens, min(rows or ROWS_DEFAULT, len(texts)), output)
        return
    text = prompt_text(prompts[0] if prompts else None, prompt_file)
    with opened(run, [("", text)], max_tokens, _one_sequence(conversation)) as (engine, tokenizer, tokens):
        _generate(run, engine, tokenizer, tokens[0], sampling, stops, max_tokens, output)


def _generate(
    run: RunOptions,
    engine: "Engine",
    tokenizer: "Tokenizer",
    tokens: list[int],
    sampling: "SamplerOptions",
    stops: Any,
    max_tokens: int,
    output: "Output",
) -> None:
    from strata_client.generate import generate as continue_prompt
    from strata_client.output import Stopped, say, seconds_since_start

    start_up_s = seconds_since_start()

    def emit(token: int | None, piece: str) -> None:
        if run.as_json:
            output.object(token=token, text=piece)
        else:
            output.text(piece)

    try:
        done = continue_prompt(engine, tokenizer, tokens, sampling, stops, max_tokens, emit)
    except Stopped:
        output.end()
        raise
    if run.as_json:
        output.object(
            statistics={
                "prompt_tokens": done.prompt_tokens,
                "kept_tokens": done.kept_tokens,
                "tokens": done.tokens,
                "reason": done.reason,
                "prompt_s": round(done.prompt_s, 4),
                "decode_s": round(done.decode_s, 4),
                "tokens_per_s": round(done.tokens_per_s, 2),
                "start_up_s": round(start_up_s, 3),
                **_stages(run, engine.attached),
            }
        )
    else:
        output.end()
    if done.detail:
        say(f"strata: the text ends here: {done.detail}")
    kept = f", {done.kept_tokens} of them kept," if done.kept_tokens else ""
    say(
        f"strata: {done.tokens} tokens in {done.decode_s:.2f} s ({done.tokens_per_s:.1f} tok/s); "
        f"prompt of {done.prompt_tokens} tokens{kept} in {done.prompt_s:.2f} s; start-up {start_up_s:.2f} s"
    )
    _say_stages(run, engine.attached)


def _generate_batch(
    run: RunOptions,
    texts: list[tuple[str, str]],
    sampling: "SamplerOptions",
    stop_strings: tuple[str, ...],
    max_tokens: int,
    rows: int,
    output: "Output",
) -> None:
    """Continues prompts, each with a name for errors, so many at once; prints their texts in order."""
    from strata_client.batch import Batch, load_batch, open_batch_engine
    from strata_client.output import say, seconds_since_start
    from strata_client.results import Results

    results = Results(output, as_json=run.as_json)
    with opened(
        run, texts, max_tokens, lambda attached: open_batch_engine(attached, rows), sequences=rows, load=load_batch
    ) as (engine, tokenizer, prompts):
        start_up_s = seconds_since_start()
        batch = Batch(
            engine,
            tokenizer,
            options=sampling,
            stop_strings=stop_strings,
            max_tokens=max_tokens,
            rows_max=rows,
            on_result=results.add,
        )
        try:
            batch.run(prompts)
        finally:
            results.flush()
        took_s = seconds_since_start() - start_up_s
        summary = results.summary(took_s)
        if run.as_json:
            start = {"start_up_s": round(start_up_s, 3)}
            output.object(statistics={**summary, **start, **_stages(run, engine.attached)})
        say(
            f"strata: {results.tokens} tokens of {results.printed} texts, {rows} at once, in {took_s:.2f} s "
            f"({summary['tokens_per_s']:.1f} tok/s); prompts of {results.prompt_tokens} tokens among it; "
            f"start-up {start_up_s:.2f} s"
        )
        _say_stages(run, engine.attached)
    if results.refused:
        raise ClientError(
            f"{results.refused} of {results.printed} prompts have no text; a line above says why for each"
        )


@cli.command()
@click.argument("file")
@run_options
@click.option("--save-logits", help="Write float32 [tokens, vocabulary] in numpy's format to this file.")
def perplexity(file: str, save_logits: str | None, **options: Any) -> None:
    """Measures how well the model predicts the UTF-8 text of FILE.

    A text longer than the context is read in windows that share nothing.
    """
    run = RunOptions.taken_from(options)
    with timings.stage("imports"):
        from strata_client.startup import begin_cuda

        begin_cuda()  # before anything that is slow to import
        from strata_client.output import Output, say, seconds_since_start
        from strata_client.perplexity import perplexity as measure
        from strata_client.perplexity import replacing

    text = prompt_text(None, file)
    output = Output()
    target = Path(save_logits) if save_logits is not None else None
    with opened(run, [("", text)], None, _one_sequence()) as (engine, _, tokens):
        start_up_s = seconds_since_start()
        try:
            with replacing(target) as logits_file:
                done = measure(engine, tokens[0], logits_file)
        except OSError as error:
            raise ClientError(f"cannot write {save_logits}: {(error.strerror or str(error)).lower()}") from error
        if run.as_json:
            nll, value = (done.mean_nll, done.perplexity) if done.predicted else (None, None)
            output.object(
                statistics={
                    "tokens": done.tokens,
                    "mean_nll": nll,
                    "perplexity": value,
                    **_stages(run, engine.attached),
                }
            )
        elif done.predicted:
            output.text(f"tokens {done.tokens}  mean NLL {done.mean_nll:.6f}  perplexity {done.perplexity:.4f}\n")
        else:
            output.text(f"tokens {done.tokens}  nothing to predict\n")
        seconds = seconds_since_start() - start_up_s
        say(f"strata: {done.tokens} tokens in {seconds:.2f} s; start-up {start_up_s:.2f} s")
        _say_stages(run, engine.attached)


@cli.command()
@click.argument("model", default=DEFAULT_MODEL)
def inspect(model: str) -> None:
    """Shows what a GGUF file holds."""
    from strata_client.inspect_model import inspect_lines
    from strata_client.models.gguf_file import open_model_file
    from strata_client.output import Output

    output = Output()
    with open_model_file(model) as model_file:
        for line in inspect_lines(model_file):
            output.text(line + "\n")


def _stages(run: RunOptions, attached: "Attached") -> dict[str, Any]:
    """What `--stats` adds to the statistics; zero is the start of this process."""
    from strata_client.output import seconds_since_start

    if not run.stats:
        return {}
    peers = [
        {
            "device": peer.device.uuid,
            "read": "by itself" if peer.is_owner else "in place",
            "experts": attached.experts_on(peer),
        }
        for peer in attached.peers
    ]
    return {"stages": timings.as_objects(timings.stages(), time.monotonic() - seconds_since_start()), "peers": peers}


def _say_stages(run: RunOptions, attached: "Attached") -> None:
    from strata_client.output import say, seconds_since_start

    if run.stats and not run.as_json:
        for line in timings.as_lines(timings.stages(), time.monotonic() - seconds_since_start()):
            say(line)
        for peer in attached.peers:
            how = "computes by itself" if peer.is_owner else "is read in place"
            say(f"strata: {peer.device.uuid} {how} and holds {attached.experts_on(peer)} experts")


def _one_sequence(conversation: str | None = None) -> Callable[["Attached"], AbstractContextManager["Engine"]]:
    """What opens the engine of one sequence."""

    def open_one(attached: "Attached") -> AbstractContextManager["Engine"]:
        from strata_client.engine import open_engine

        return open_engine(attached, conversation)

    return open_one


def main() -> NoReturn:
    """Runs the command line; every error is one line on standard error."""
    gc.disable()  # looking for garbage among all that imports make takes a tenth of the start
    from strata_client.output import keep_standard_descriptors, say, seconds_since_start

    keep_standard_descriptors()
    timings.add("interpreter", time.monotonic() - seconds_since_start(), time.monotonic())
    # BLAS threads that wait for each other lose more than they win on a shared host.
    cpus = len(os.sched_getaffinity(0))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(min(8, max(1, cpus // 2))))
    code = _exit_code(say)
    sys.exit(code)


def _exit_code(say: Callable[[str], None]) -> int:
    from strata_client.output import OutputError, Stopped

    try:
        cli.main(prog_name=PROGRAM, standalone_mode=False)
        return 0
    except Stopped as stopped:
        return stopped.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        say(f"{PROGRAM}: {_one_line(error.format_message())}")
        return error.exit_code
    except (ClientError, OutputError) as error:
        say(f"{PROGRAM}: {_one_line(str(error))}")
    except Exception as error:
        if os.environ.get("STRATA_DEBUG"):
            raise
        say(f"{PROGRAM}: {_explain(error)}")
    return 1


def _explain(error: Exception) -> str:
    """One line about any error; the name of its class for one that nobody foresaw."""
    from strata_client.models.base import ModelError
    from vmmd.errors import VmmError

    text = _one_line(str(error))
    if isinstance(error, ModelError | VmmError):
        return text
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else text
    if isinstance(error, MemoryError):
        return "out of memory"
    return f"internal error, please report it: {type(error).__name__}: {text}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
