"""The packaged model with a second GPU as a peer, with a path to it and without."""

from collections.abc import Iterator, Sequence
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
from strata_client.sampler import SamplerOptions
from tests.helpers.cuda_peer import GIB, MIB, Machine
from tests.helpers.daemon import Daemon
from tests.helpers.kernel_bounds import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]  # the first compiles kernels

# Of slabs of 2 MiB the weights take one, K/V of 640 cells one, and the experts four.
CAPS = (3, 2)
TOKENS = [int(token) for token in np.random.default_rng(1).integers(100, 2000, 96)]
ERROR = 1e-3
"""Of logits whose sums are taken in another order, in norm; activations are rounded to 16 bits in between."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    """Two GPUs, with small slabs."""
    return replace(Machine.pair(), slab_bytes=2 * MIB)


@contextmanager
def opened(daemon: Daemon, machine: Machine, peers: Sequence[str]) -> Iterator[Engine]:
    """An engine on the first GPU."""
    with (
        open_model_file(DEFAULT_MODEL) as model_file,
        attach(
            Qwen3Moe(model_file), model_file, [daemon.directory], context=512, device=machine.uuids[0], kv_type=None,
            say=print, say_verbose=print, signals=Signals(), progress=lambda filled, total: None, peer_devices=peers,
        ) as attached,
        open_engine(attached) as engine,
    ):  # fmt: skip
        yield engine


def logits_and_text(engine: Engine) -> tuple[F32, F32, list[int]]:
    """Logits of a prompt's chunks and of single tokens, and greedy tokens after a prompt."""
    engine.sequence.prepare(len(TOKENS))
    prompt, one = (engine.step(TOKENS[48 * i :][:48], prompt=not i, all_logits=True) for i in range(2))
    engine.sequence.restart()
    engine.begin(TOKENS[:40], SamplerOptions(temperature=0))
    return prompt, one, [engine.next_token() for _ in range(48)]


@pytest.mark.parametrize("peer_access", ["auto", "never"])
def test_logits_and_text_with_a_peer(machine: Machine, peer_access: str) -> None:
    """With a path the same bits as alone; without one those of another order of sums, and the same greedy text."""
    common = f"host_cap_bytes = {4 * GIB}\nplacement_bytes_per_s = 0\n"
    with machine.daemon(common) as daemon, opened(daemon, machine, []) as engine:
        wanted = logits_and_text(engine)
    lines = f'{common}peer_access = "{peer_access}"\n'
    for uuid, slabs in zip(machine.uuids, CAPS, strict=False):
        lines += f'[[device]]\nuuid = "{uuid}"\ncap_bytes = {slabs * machine.slab_bytes}\n'
    with machine.daemon(lines) as daemon, opened(daemon, machine, [machine.uuids[1]]) as engine:
        found = logits_and_text(engine)
        memory = engine.attached.opened.memory
        on = [len(memory.experts_on(part)) for part in (0, 1)]
        is_owner = engine.attached.peers[0].is_owner
    print(
        "experts", on, "owner", is_owner, "errors", [relative_error(f, w) for f, w in zip(found, wanted, strict=True)]
    )
    assert min(on) > 0
    if is_owner:
        assert all(relative_error(f, w) < ERROR for f, w in zip(found[:2], wanted[:2], strict=True))
    else:
        assert peer_access == "auto" and all(np.array_equal(f, w) for f, w in zip(found[:2], wanted[:2], strict=True))
    assert found[2] == wanted[2]
