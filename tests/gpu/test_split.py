"""The packaged model split over two GPUs, with a path between them and without."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from strata_client.attached import attach
from strata_client.engine import Engine, open_engine
from strata_client.models.base import F32
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.output import Signals
from strata_client.run_options import DEFAULT_MODEL
from strata_client.split import Split
from tests.gpu.test_generate import text
from tests.helpers.cuda_peer import GIB, MIB, Machine
from tests.helpers.daemon import Daemon

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]  # the first compiles kernels

TOKENS = [int(token) for token in np.random.default_rng(1).integers(100, 2000, 96)]


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Two GPUs, with small slabs."""
    return replace(Machine.pair(), slab_bytes=2 * MIB)


@contextmanager
def opened(daemon: Daemon, machine: Machine, split: Split | None) -> Iterator[tuple[Engine, list[str]]]:
    """An engine on the first GPU, or split, and what it says."""
    lines: list[str] = []
    with (
        open_model_file(DEFAULT_MODEL) as model_file,
        attach(
            Qwen3Moe(model_file), model_file, [daemon.directory], context=512, device=machine.uuids[0], kv_type=None,
            say=lines.append, say_verbose=print, signals=Signals(), progress=lambda filled, total: None, split=split,
        ) as attached,
        open_engine(attached) as engine,
    ):  # fmt: skip
        yield engine, lines
    print(*lines, sep="\n")


def logits(engine: Engine) -> F32:
    """Of a prompt's chunks and of single tokens after it."""
    engine.sequence.prepare(len(TOKENS))
    return np.concatenate([engine.step(TOKENS[48 * i :][:48], prompt=not i, all_logits=True) for i in range(2)])


@pytest.mark.parametrize("peer_access", ["auto", "never"])
@pytest.mark.parametrize("counts", [[3], [1], None])
def test_the_same_bits_as_on_one_gpu(machine: Machine, peer_access: str, counts: list[int] | None) -> None:
    """Logits and text are those of one GPU, also while K/V of both grows out of the slots of each."""
    common = f'host_cap_bytes = {4 * GIB}\npeer_access = "{peer_access}"\n'
    with machine.daemon(common) as daemon, opened(daemon, machine, None) as (engine, _):
        wanted = logits(engine), text(engine)
    for uuid in machine.uuids:
        common += f'[[device]]\nuuid = "{uuid}"\ncap_bytes = {3 * machine.slab_bytes}\n'
    with machine.daemon(common) as daemon:
        with opened(daemon, machine, Split(counts, machine.uuids[1::-1])) as (engine, lines):
            assert len(engine.attached.stages) == 2
            assert np.array_equal(logits(engine), wanted[0])
            assert text(engine) == wanted[1]
        assert counts != [3] or any("the expert cache gave" in line for line in lines)
