"""The engine on a GPU that the host plays, with a real daemon: texts, logits, and steps beside trades."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import pages

from strata_client import attached as attaching
from strata_client.devices import Peer
from strata_client.engine import Engine, open_engine
from strata_client.gpu.address_table import AddressTable
from strata_client.gpu.prompt import LOGITS_TOKENS
from strata_client.mapping import U64
from strata_client.models.base import F32
from strata_client.sampler import SamplerOptions
from strata_client.split import Split
from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.kernel_bounds import relative_error
from tests.helpers.played_gpu import MICRO, attached_micro, play
from vmmd.errors import DriverError, VmmError

LOGITS_MEDIAN = 0.03
PROMPT = [5, 9, 44, 101, 3, 77, 12, 12, 200, 31, 8]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


@contextmanager
def opened(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gpu: bool,
    context: int = 256,
    conversation: str | None = None,
    peers: Sequence[str] = (),
    split: Split | None = None,
    path: Path = MICRO,
) -> Iterator[Engine]:
    """An engine for micro.gguf, the host's own or GPUs'."""
    with (
        attached_micro(
            daemon, monkeypatch, gpu=gpu, context=context, peer_devices=peers, split=split, path=path
        ) as attached,
        open_engine(attached, conversation) as engine,
    ):
        yield engine


def text(engine: Engine, prompt_tokens: Sequence[int], n: int, options: SamplerOptions) -> list[int]:
    """The tokens that follow a prompt, of which nothing is kept."""
    engine.sequence.restart()
    return go_on(engine, prompt_tokens, n, options)


def go_on(engine: Engine, prompt_tokens: Sequence[int], n: int, options: SamplerOptions) -> list[int]:
    """The tokens that follow a prompt, whose beginning may be there."""
    engine.sequence.prepare(len(prompt_tokens))
    engine.begin(prompt_tokens, options)
    tokens = [engine.next_token()]
    while len(tokens) < n:
        assert engine.sequence.has_room()
        tokens.append(engine.next_token())
    assert engine.sequence.transcript.common([*prompt_tokens, *tokens]) == len(prompt_tokens) + n - 1
    return tokens


def test_greedy_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as on the host, the first after a chunk of the prompt, and again when it begins anew."""
    with running_daemon() as daemon:
        with opened(daemon, monkeypatch, gpu=False) as host:
            wanted = text(host, PROMPT, 12, SamplerOptions(temperature=0))
        with opened(daemon, monkeypatch, gpu=True) as engine:
            for _ in range(2):
                assert text(engine, PROMPT, 12, SamplerOptions(temperature=0)) == wanted


def test_sampled_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed makes the same text each time, also of a prompt in several chunks; other seeds make others."""
    tokens = PROMPT * 4
    with running_daemon() as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        texts = [text(engine, tokens, 8, SamplerOptions(temperature=1.5, seed=seed)) for seed in (3, 3, 4)]
        assert texts[0] == texts[1] != texts[2]
        engine._stages[0].prompt.tokens_max = 16
        assert text(engine, tokens, 8, SamplerOptions(temperature=1.5, seed=3)) == texts[0]


@pytest.mark.parametrize("prompt", [True, False])
def test_logits(monkeypatch: pytest.MonkeyPatch, prompt: bool) -> None:
    """The logits of every token are the host's, but for rounding, in chunks and token by token."""
    tokens = [int(token) for token in np.random.default_rng().integers(0, 400, LOGITS_TOKENS + 6)]
    with running_daemon() as daemon:
        logits = []
        for gpu in (False, True):
            with opened(daemon, monkeypatch, gpu=gpu) as engine:
                engine.sequence.prepare(len(tokens))
                logits.append(
                    engine.step(tokens, prompt=prompt, all_logits=True)[:, : engine.attached.model.params.n_tokens]
                )
        assert np.median(np.abs(logits[1] - logits[0])) < LOGITS_MEDIAN


def test_the_same_bits_wherever_experts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits do not depend on what is on the device, neither of prompts nor while decoding."""
    slabs = "slab_bytes = 65536\n"
    with running_daemon(slabs) as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        resident = logits_while_decoding(engine)
        assert not engine._stages[0].steps.table.in_host.any()
        device = daemon.status()["devices"][0]
    cap_bytes = device["kv_bytes"] + device["weights_bytes"] + device["experts_bytes"] // 2
    with running_daemon(f"{slabs}cap_bytes = {cap_bytes}\n") as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        assert np.array_equal(logits_while_decoding(engine), resident)
        assert engine._stages[0].steps.table.in_host.any()
        assert not engine._stages[0].steps.table.in_host.all()


def test_the_same_bits_with_experts_on_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits do not depend on what is on a peer, whose slots kernels read where they are, of prompts and decoding."""
    slabs = "slab_bytes = 65536\n"
    with running_daemon(slabs) as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        resident = logits_while_decoding(engine)
        device = daemon.status()["devices"][0]
    cap_bytes = device["weights_bytes"] + device["experts_bytes"] // 2
    lines = f"{slabs}cap_bytes = {cap_bytes}\nplacement_bytes_per_s = 0\n[host]\ndevices = 2\n"
    lines += f'[[device]]\nuuid = "HOST-SIM-1"\ncap_bytes = {device["experts_bytes"] // 4}\n'
    with running_daemon(lines) as daemon, opened(daemon, monkeypatch, gpu=True, peers=["1"]) as engine:
        assert np.array_equal(logits_while_decoding(engine), resident)
        memory = engine.attached.opened.memory
        assert [len(memory.experts_on(part)) for part in (0, 1)] == [2, 2], "a half, less what K/V took; and a quarter"
        assert engine._stages[0].steps.table.in_host.sum() == 4


def owners_config(status: dict[str, Any], n_owners: int, kv_bytes: int = 0) -> str:
    """Lines of the configuration: half of the experts fit the first device, a quarter each that it has no path to."""
    device = status["devices"][0]
    cap_bytes = device["weights_bytes"] + kv_bytes + device["experts_bytes"] // 2
    lines = f'slab_bytes = 65536\ncap_bytes = {cap_bytes}\npeer_access = "never"\n[host]\ndevices = {n_owners + 1}\n'
    for i in range(n_owners):
        lines += f'[[device]]\nuuid = "HOST-SIM-{i + 1}"\ncap_bytes = {device["experts_bytes"] // 4}\n'
    return lines


@pytest.mark.parametrize("n_owners", [1, 2])
def test_experts_that_owners_compute(monkeypatch: pytest.MonkeyPatch, n_owners: int) -> None:
    """Without a path peers compute what they hold: logits of prompts and decoding are those of one device, but for the
    order of sums; each routing is counted once, and no table but its owner's has an expert's addresses."""
    short = PROMPT[:5]
    with running_daemon("slab_bytes = 65536\n") as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        resident = np.concatenate([logits_while_decoding(engine), engine.step(short, prompt=True, all_logits=True)])
        lines = "placement_bytes_per_s = 0\n" + owners_config(daemon.status(), n_owners)
    peers = [str(i) for i in range(n_owners, 0, -1)]
    with running_daemon(lines) as daemon, opened(daemon, monkeypatch, gpu=True, peers=peers) as engine:
        logits = np.concatenate([logits_while_decoding(engine), engine.step(short, prompt=True, all_logits=True)])
        assert relative_error(logits, resident) < 1e-5
        memory, table = engine.attached.opened.memory, engine._stages[0].steps.table
        assert [len(memory.experts_on(part)) for part in range(n_owners + 1)] == [2] * (n_owners + 1)
        counts = [int(np.sum(table.computed_by == owner)) for owner in range(n_owners + 1)]
        assert counts == [8 - 2 * n_owners, *[2] * n_owners]
        routed = memory.heat[pages.HEADER_WORDS :][: 2 * table.in_host.size].reshape(2, -1).sum(axis=1)
        params = engine.attached.model.params
        tokens = (len(PROMPT), 3 * len(PROMPT) + len(short))
        assert routed.tolist() == [n * params.n_layers * params.top_k for n in tokens]


def test_an_owner_beside_a_peer_that_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer is one or the other by itself, whatever their order in the arena and in what a user names."""
    with running_daemon("slab_bytes = 65536\n") as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        resident = logits_while_decoding(engine)
        lines = "placement_bytes_per_s = 0\n" + owners_config(daemon.status(), 2)
    choose = attaching.choose_peers
    for owner in (1, 2):

        def chosen(*args: Any, owner: int = owner) -> list[Peer]:
            return [peer._replace(is_owner=peer.number == owner) for peer in choose(*args)]

        monkeypatch.setattr(attaching, "choose_peers", chosen)
        with running_daemon(lines) as daemon, opened(daemon, monkeypatch, gpu=True, peers=["2", "1"]) as engine:
            assert relative_error(logits_while_decoding(engine), resident) < 1e-5
            memory, table = engine.attached.opened.memory, engine._stages[0].steps.table
            assert [memory.arena[part].device_uuid for part in memory.owners] == [f"HOST-SIM-{owner}"]
            assert (int(table.computed_by.sum()), int(table.in_host.sum())) == (2, 2)


def test_owners_beside_trades(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts move between devices and K/V grows while owners compute; every device's table is compared each step."""
    greedy, n = SamplerOptions(temperature=0), 40
    with (
        running_daemon("slab_bytes = 65536\n") as daemon,
        opened(daemon, monkeypatch, gpu=True, context=1024) as engine,
    ):
        wanted = text(engine, PROMPT, n, greedy)
        engine._synchronize()  # nothing runs by itself there
        assert engine.sequence.grow(1024)
        status = daemon.status()
    monkeypatch.setenv("STRATA_DEBUG", "1")
    owned: list[set[tuple[int, ...]]] = []
    check = AddressTable.check

    def counting(table: AddressTable, tables: Sequence[U64]) -> None:
        owned.append(set(map(tuple, np.argwhere(table.computed_by).tolist())))
        check(table, tables)

    monkeypatch.setattr(AddressTable, "check", counting)
    kv_bytes = status["devices"][0]["kv_bytes"]
    with (
        running_daemon("give_back_delay_s = 0.2\n" + owners_config(status, 1, kv_bytes)) as daemon,
        opened(daemon, monkeypatch, gpu=True, context=1024, peers=["1"]) as engine,
    ):
        assert text(engine, PROMPT, n, greedy) == wanted
        engine._synchronize()
        assert engine.sequence.kv.cells < 1024 and engine.sequence.grow(1024), engine.sequence.refusal
        assert text(engine, PROMPT, n, greedy) == wanted
        assert daemon.status()["devices"][0]["traded_slabs"] > 0
        assert owned[-1] and len(set(map(frozenset, owned))) > 1, "nothing moved to the owner"


@pytest.mark.parametrize("where", ["_take_token", "_take_chunk"])
def test_an_owner_that_fails(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """An error of an owner is the step's; the step is retired behind what the owners do, and others may follow."""
    greedy = SamplerOptions(temperature=0)
    with running_daemon("slab_bytes = 65536\n") as daemon, opened(daemon, monkeypatch, gpu=True) as engine:
        wanted = text(engine, PROMPT, 8, greedy)
        lines = owners_config(daemon.status(), 2)
    with (
        running_daemon(lines) as daemon,
        opened(daemon, monkeypatch, gpu=True, peers=["1", "2"]) as engine,
    ):
        stage = engine._stages[0]

        def fail() -> None:
            raise DriverError("the owner is gone")

        steps = engine.attached.opened.steps
        with monkeypatch.context() as patch:
            patch.setattr(stage.steps.owners._owners[1], where, fail)
            with pytest.raises(DriverError, match="the owner is gone"):
                stage.decoder.capture() if where == "_take_token" else text(engine, PROMPT, 8, greedy)
        engine._synchronize()
        assert steps.idle
        assert text(engine, PROMPT, 8, greedy) == wanted


def test_homes_are_mapped_behind_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all experts on the device none waits for the homes; they are there a moment after the first token."""
    with running_daemon() as daemon, opened(daemon, monkeypatch, gpu=True) as first:
        n_experts = first._stages[0].steps.table.words[..., 0].size
        wait_until(lambda: daemon.status()["models"][0]["homes"] == n_experts, 10)
        tokens = text(first, PROMPT, 12, SamplerOptions(temperature=0))
        with opened(daemon, monkeypatch, gpu=True) as engine:
            assert text(engine, PROMPT, 12, SamplerOptions(temperature=0)) == tokens
            homes = engine.attached.opened.memory.homes
            assert not homes.mapped
            engine.settle()
            engine.attached.opened.homes.begin().result()
            first.settle()  # the daemon may have had them all before it answered, too
            first.attached.opened.homes.begin().result()
            wait_until(lambda: homes.mapped == first.attached.opened.memory.homes.mapped, 10)
            assert homes.mapped
            assert text(engine, PROMPT, 12, SamplerOptions(temperature=0)) == tokens


def test_checked_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With STRATA_DEBUG the table on the device is compared before each step, also after a trade; damage is named."""
    slabs, greedy = "slab_bytes = 65536\n", SamplerOptions(temperature=0)
    with running_daemon(slabs) as daemon, opened(daemon, monkeypatch, gpu=True, context=1024) as engine:
        tokens = text(engine, PROMPT, 8, greedy)
        engine._stages[0].device.synchronize()  # nothing runs by itself there
        assert engine.sequence.grow(1024)
        device = daemon.status()["devices"][0]
    monkeypatch.setenv("STRATA_DEBUG", "1")
    checked: list[int] = []
    check = AddressTable.check

    def counting(table: AddressTable, tables: Sequence[U64]) -> None:
        checked.append(int(table.in_host.sum()))
        check(table, tables)

    monkeypatch.setattr(AddressTable, "check", counting)
    cap_bytes = device["kv_bytes"] + device["weights_bytes"] + device["experts_bytes"] // 2
    with (
        running_daemon(f"{slabs}cap_bytes = {cap_bytes}\n") as daemon,
        opened(daemon, monkeypatch, gpu=True, context=1024) as engine,
    ):
        assert text(engine, PROMPT, 8, greedy) == tokens
        assert len(checked) >= 8
        in_host = checked[-1]
        engine._stages[0].device.synchronize()
        assert engine.sequence.kv.cells < 1024 and engine.sequence.grow(1024), engine.sequence.refusal
        assert text(engine, PROMPT, 8, greedy) == tokens
        assert checked[-1] > in_host
        monkeypatch.setattr(AddressTable, "refresh", lambda table: False)  # a new table would mend it
        on_device = np.ctypeslib.as_array(
            (ctypes.c_uint64 * engine._stages[0].steps.table.words.size).from_address(
                engine._stages[0].decoder.buffers["table"].value
            )
        ).reshape(engine._stages[0].steps.table.words.shape)
        on_device[1, 2, 1] += 256
        with pytest.raises(VmmError, match="layer 1, expert 2, up"):
            text(engine, PROMPT, 8, greedy)


def logits_while_decoding(engine: Engine) -> F32:
    """Of a prompt and of tokens after it."""
    engine.sequence.prepare(5 * len(PROMPT))
    logits = [engine.step(PROMPT * 3, prompt=True, all_logits=True), engine.step(PROMPT, prompt=False, all_logits=True)]
    return np.concatenate(logits)


@pytest.mark.parametrize("options", [SamplerOptions(temperature=0), SamplerOptions(temperature=1.5, seed=3)])
def test_a_conversation_goes_on(monkeypatch: pytest.MonkeyPatch, options: SamplerOptions) -> None:
    """Cells that were left are kept as far as the prompt is the same; the text is that of an engine that stays."""
    with running_daemon() as daemon:
        with opened(daemon, monkeypatch, gpu=True) as engine:
            said = text(engine, PROMPT, 9, options)
            prompts = [[*PROMPT, *said, 3, 4], [*PROMPT, *said[:4], 3, 4]]
            wanted = [(go_on(engine, prompt, 9, options), engine.sequence.kept) for prompt in prompts]
        assert [kept for _, kept in wanted] == [len(PROMPT) + 8, len(PROMPT) + 4]
        for prompt, expected in ((PROMPT, (said, 0)), *zip(prompts, wanted, strict=True)):
            with opened(daemon, monkeypatch, gpu=True, conversation="x") as engine:
                assert (go_on(engine, prompt, 9, options), engine.sequence.kept) == expected
