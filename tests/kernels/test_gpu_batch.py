"""Batches on a GPU that the host plays, with a real daemon: texts beside those of single runs, memory, steps."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from strata_client.batch import Batch, Result, load_batch, open_batch_engine
from strata_client.connection import Asked
from strata_client.engine import open_engine
from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.batch import GpuBatch
from strata_client.sampler import SamplerOptions
from strata_client.sequence import TokenSequence
from tests.helpers.daemon import Daemon, running_daemon
from tests.helpers.played_gpu import attached_micro, play
from vmmd.errors import InvalidRequest, LeaseRevoked

PROMPTS = [
    [5, 9, 44, 101, 3, 77, 12, 12, 200, 31, 8],
    [7],
    list(range(20, 60)),
    [101, 3, 77],
    [200, 31, 8, 5, 9],
]
GREEDY = SamplerOptions(temperature=0)
SLAB_BYTES = 65536
CELLS_PER_SLAB = 64


class Ends:
    """A tokenizer with one end token, or none."""

    def __init__(self, token: int = -1) -> None:
        self.end_tokens = frozenset([token])

    def token_bytes(self, token: int) -> bytes:
        return b"%d " % token


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(f"slab_bytes = {SLAB_BYTES}\n") as running:
        yield running


def alone(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, n: int) -> list[list[int]]:
    """Each prompt's likeliest tokens, in a run of its own."""
    texts = []
    with attached_micro(daemon, monkeypatch, gpu=True) as attached, open_engine(attached) as engine:
        for prompt in PROMPTS:
            engine.sequence.restart()
            engine.sequence.prepare(len(prompt))
            engine.begin(prompt, GREEDY)
            texts.append([engine.next_token()])
            while len(texts[-1]) < n:
                assert engine.sequence.has_room()
                texts[-1].append(engine.next_token())
    return texts


def batch(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    options: SamplerOptions = GREEDY,
    tokens: int = 8,
    end: int = -1,
    **how: Any,
) -> list[list[int]]:
    """Each prompt's tokens, so many at once; all memory is given back, and no step is left."""
    results: list[Result] = []
    with (
        attached_micro(daemon, monkeypatch, gpu=True, load=load_batch, **how) as attached,
        open_batch_engine(attached, rows) as engine,
    ):
        assert isinstance(engine, GpuBatch)
        engine._prompt.tokens_max = 16
        Batch(
            engine, Ends(end), options=options, stop_strings=(), max_tokens=tokens, rows_max=rows,
            on_result=results.append,
        ).run(prompts)  # fmt: skip
        engine._device.synchronize()
        assert attached.opened.steps.idle
        assert daemon.status()["devices"][0]["kv_bytes"] == 0
    results.sort(key=lambda result: result.index)
    assert [result.index for result in results] == list(range(len(prompts)))
    return [list(result.tokens) for result in results]


def test_greedy_texts(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts are those of single runs: where prompts wait for a place, where all run, and where texts end early."""
    wanted = alone(daemon, monkeypatch, 8)
    for rows in (2, 5):
        assert batch(daemon, monkeypatch, rows) == wanted
    end = wanted[0][3]
    cut = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in wanted]
    assert batch(daemon, monkeypatch, 3, end=end) == cut


def test_a_peer_without_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners compute for one sequence at a time; a batch says so."""
    with (
        running_daemon('peer_access = "never"\n[host]\ndevices = 2\n') as daemon,
        pytest.raises(InvalidRequest, match=r"HOST-SIM-0 has no path to HOST-SIM-1, .* leave out --batch"),
    ):
        batch(daemon, monkeypatch, 2, peer_devices=["1"])


def test_a_seed_makes_the_same_text_in_any_company(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence gets depends neither on those beside it nor on when it begins, only on prompt and seed."""
    options = SamplerOptions(temperature=1.5, seed=3)
    texts = batch(daemon, monkeypatch, 4, options=options)
    backwards = batch(daemon, monkeypatch, 2, prompts=PROMPTS[::-1], options=options)
    assert backwards == texts[::-1]
    others = batch(daemon, monkeypatch, 5, options=SamplerOptions(temperature=1.5, seed=4))
    assert others != texts


def test_rows_that_wait_for_memory(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that has left for want of cells goes on where it was once there are some; prompts wait for them, too."""
    prompts = [[(7 * i + row) % 400 for i in range(CELLS_PER_SLAB - 4)] for row in range(3)]
    wanted = batch(daemon, monkeypatch, 3, prompts=prompts, tokens=14)
    joined: list[int] = []
    join = GpuBatch.join
    monkeypatch.setattr(GpuBatch, "join", lambda engine, row: (joined.append(row.index), join(engine, row)))
    cap = Asked(cap_bytes=3 * SLAB_BYTES)
    assert batch(daemon, monkeypatch, 3, prompts=prompts, tokens=14, asked=cap) == wanted
    assert sorted(joined) == [0, 1, 1, 2]


def test_checked_steps(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """With STRATA_DEBUG the table on the device is compared before each step; the texts are the same."""
    checked = []
    check = AddressTable.check
    monkeypatch.setattr(AddressTable, "check", lambda table, words: (checked.append(0), check(table, words)))
    monkeypatch.setenv("STRATA_DEBUG", "1")
    debugged = batch(daemon, monkeypatch, 3, tokens=3)
    assert len(checked) > 5
    monkeypatch.delenv("STRATA_DEBUG")
    assert batch(daemon, monkeypatch, 3, tokens=3) == debugged


def test_a_step_that_fails_is_retired(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step cannot be launched after it was published the session still becomes idle, and gives all back."""

    def revoked(sequence: TokenSequence, cells: int) -> None:
        if cells > len(PROMPTS[0]) + 2:
            raise LeaseRevoked("test")

    monkeypatch.setattr(TokenSequence, "check_cells", revoked)
    with (
        attached_micro(daemon, monkeypatch, gpu=True, load=load_batch) as attached,
        open_batch_engine(attached, 2) as engine,
    ):
        run = Batch(
            engine, Ends(), options=GREEDY, stop_strings=(), max_tokens=9, rows_max=2, on_result=lambda result: None
        )
        with pytest.raises(LeaseRevoked, match="test"):
            run.run(PROMPTS[:2])
        engine._device.synchronize()
        assert attached.opened.steps.idle
    assert daemon.status()["devices"][0]["kv_bytes"] == 0
