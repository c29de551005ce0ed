"""A model of Qwen3-30B-A3B's shape with random weights, opened on real GPUs, and how figures of it are reported."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strata_client.attached import Attached, attach
from strata_client.engine import open_engine
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from tests.bench import report
from tests.bench.report import Row
from vmmd.driver import cuda_calls


@contextmanager
def random_model(directory: Path, *options: str) -> Iterator[Path]:
    """A file of `make_random_gguf` with these options, that is removed again."""
    path = directory / "model.gguf"
    subprocess.run([sys.executable, "-m", "tests.bench.make_random_gguf", str(path), *options], check=True)
    yield path
    path.unlink()


@contextmanager
def attached_model(
    directory: Path,
    path: Path,
    context: int,
    say: Callable[[str], None] = lambda line: None,
    *,
    device: str | None = None,
    **options: Any,
) -> Iterator[Attached]:
    """A model, with the daemon that has this runtime directory; `options` as `attach` takes them."""
    with (
        open_model_file(str(path)) as model_file,
        attach(
            Qwen3Moe(model_file), model_file, [directory], context=context, device=device, kv_type=None, say=say,
            say_verbose=lambda line: None, signals=Signals(), progress=lambda filled, total: None, **options,
        ) as attached,
    ):  # fmt: skip
        yield attached


@contextmanager
def attached_engine(*arguments: Any, **options: Any) -> Iterator[Any]:
    """An engine of it; takes what `attached_model` takes."""
    with attached_model(*arguments, **options) as attached, open_engine(attached) as engine:
        yield engine


def write(name: str, rows: Sequence[Row]) -> None:
    """Reports figures of the first GPU."""
    gpus, _ = cuda_calls.find_gpus(cuda_calls.bindings())
    report.write(name, gpus[0].name, report.gpu_driver(), rows)
