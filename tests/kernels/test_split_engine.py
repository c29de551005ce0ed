"""A model that is split over GPUs that the host plays, with a real daemon: texts, logits, and what runs beside what."""

from pathlib import Path

import numpy as np
import pytest
from strata_api.v1 import pages

from strata_client.gpu.engine import CHUNKS_AHEAD
from strata_client.run_options import DEFAULT_MODEL
from strata_client.sampler import SamplerOptions
from strata_client.split import Split
from tests.helpers.daemon import running_daemon
from tests.helpers.played_gpu import play
from tests.kernels.test_gpu_engine import LOGITS_MEDIAN, PROMPT, logits_while_decoding, opened, text
from vmmd.errors import LeaseRevoked


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)


DEVICES = "slab_bytes = 65536\n[host]\ndevices = 3\n"
N_LAYERS = 2  # of micro.gguf
GREEDY = SamplerOptions(temperature=0)


def test_the_same_bits_as_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of prompts and of decoding are those of one GPU to the bit, with a path and without; near the host's."""
    for access in ("auto", "never"):
        with running_daemon(f'peer_access = "{access}"\n{DEVICES}') as daemon:
            found = []
            for split, gpu in ((None, True), (Split([1]), True), (Split([1], ["2", "0"]), True), (Split([1]), False)):
                with opened(daemon, monkeypatch, gpu=gpu, split=split) as engine:
                    found.append(logits_while_decoding(engine))
                    assert len(engine.attached.stages) == (1 if split is None else 2)
        solo, split, other, host = (logits[:, : engine.attached.model.params.n_tokens] for logits in found)
        assert np.array_equal(split, solo)
        assert np.array_equal(other, solo)
        assert np.median(np.abs(host - solo)) < LOGITS_MEDIAN


def test_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as on one GPU, greedy and drawn, of prompts in one chunk and in several, and begun anew."""
    drawn, tokens = SamplerOptions(temperature=1.5, seed=3, repeat_penalty=1.2), PROMPT * 4
    with running_daemon(DEVICES) as daemon:
        texts = []
        for split in (None, Split(None)):
            with opened(daemon, monkeypatch, gpu=True, context=512, split=split) as engine:
                for stage in engine._stages:
                    stage.prompt.tokens_max = 16
                texts.append(
                    [text(engine, prompt, 10, how) for prompt in (PROMPT, tokens) for how in (GREEDY, drawn, drawn)]
                )
        assert texts[0] == texts[1]
        assert texts[0][1] == texts[0][2] != texts[0][0]


def test_chunks_are_in_both_stages_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage goes on while the second has not begun, as far as there are places for what it hands on."""
    with running_daemon(DEVICES) as daemon, opened(daemon, monkeypatch, gpu=True, split=Split([1])) as engine:
        wanted = text(engine, PROMPT[:8] * 3, 4, GREEDY)
        first, last = engine._stages
        first.prompt.tokens_max = 8
        engine.sequence.restart()
        engine._place(0)
        number = last.steps.number
        gate = first.device.cu.gate(last.device.stream)
        engine.begin(PROMPT[:8] * 3, GREEDY)
        with pytest.raises(AssertionError, match="streams wait for each other"):
            first.device.synchronize()
        assert engine.attached.stages[0].opened.steps.line[pages.WORD_RETIRED] == number + CHUNKS_AHEAD
        assert engine.attached.stages[1].opened.steps.line[pages.WORD_RETIRED] == number, (
            "as long as the gate is closed"
        )
        gate()
        tokens = [engine.next_token()]
        while len(tokens) < 4:
            tokens.append(engine.next_token())
        assert tokens == wanted


@pytest.mark.parametrize("has_room", [True, False])
def test_growth_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    """K/V of both grows in one go out of experts' slots; where one device has too little for it, none gives any."""
    split, slab_bytes = Split([1]), 65536
    with running_daemon(DEVICES) as daemon, opened(daemon, monkeypatch, gpu=True, context=512, split=split) as engine:
        wanted = text(engine, PROMPT, 20, GREEDY)
        devices = daemon.status()["devices"][:2]
    # K/V takes three slabs of each, and an arena gives one of its two
    room = 2 * slab_bytes, (2 if has_room else 1) * slab_bytes
    lines = "".join(
        f'[[device]]\nuuid = "HOST-SIM-{i}"\ncap_bytes = {d["weights_bytes"] + d["experts_bytes"] + room[i]}\n'
        for i, d in enumerate(devices)
    )
    with (
        running_daemon(f"{DEVICES}{lines}") as daemon,
        opened(daemon, monkeypatch, gpu=True, context=512, split=split) as engine,
    ):
        assert text(engine, PROMPT, 20, GREEDY) == wanted
        assert [len(kv.range.mapped) for kv in engine.sequence.kvs] == ([3, 3] if has_room else [1, 1])
        experts = [d["experts_bytes"] // slab_bytes for d in daemon.status()["devices"][:2]]
        assert experts == ([1, 1] if has_room else [2, 2])
        engine._synchronize()
        assert engine.sequence.grow(257) == has_room
        assert ("HOST-SIM-1" in engine.sequence.refusal) != has_room


def test_three_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in the middle neither embeds nor chooses; the packaged model's text is that of one GPU."""
    config = "[host]\ndevices = 3\n"
    texts = []
    with running_daemon(config) as daemon:
        for split in (None, Split([1, 3])):
            with opened(daemon, monkeypatch, gpu=True, path=Path(DEFAULT_MODEL), split=split) as engine:
                for stage in engine._stages:
                    stage.prompt.tokens_max = 4
                texts.append(text(engine, PROMPT, 4, GREEDY))
    assert texts[0] == texts[1]


def test_steps_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that has no cells, or that only the first stage could begin, leaves both idle; the text begins anew."""
    with running_daemon(DEVICES) as daemon, opened(daemon, monkeypatch, gpu=True, split=Split([1])) as engine:
        wanted = text(engine, PROMPT, 6, GREEDY)
        for target, name in ((engine.sequence, "check_cells"), (engine._stages[1], "enqueue_chunk")):
            with monkeypatch.context() as broken:
                broken.setattr(target, name, _revoked)
                for _ in range(2):
                    with pytest.raises(LeaseRevoked, match="taken back"):
                        text(engine, PROMPT, 6, GREEDY)
            engine._synchronize()
            assert all(stage.opened.steps.idle for stage in engine.attached.stages)
            assert text(engine, PROMPT, 6, GREEDY) == wanted


def _revoked(*args: object) -> None:
    raise LeaseRevoked("taken back")
