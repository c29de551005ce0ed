"""`strata-client --layer-split` against real daemons that simulate several devices."""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from strata_client.devices import VISIBLE_SIMULATED
from tests.helpers.daemon import PIPE_BYTES, client, running_daemon, unread_bytes, wait_until
from tests.protocol.test_generate import BABBLE, GROWTH, PROMPT
from tests.protocol.test_peer import config

# The tiny model has 6 layers, of 1.6 MiB each with their K/V; its embedding and output take 0.4 MiB.
ROOMY = (64, 64, 64)
STAGE = re.compile(
    r"strata: layers (\d) to (\d) on device (\d), (HOST-SIM-\d): \d+\.\d\d [GM]iB with the whole context, of "
    r"(\d+\.\d\d [GM]iB) there(?:, so \d+% of its experts stay in host memory)?"
)


def _lines(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    return done.stderr.decode().splitlines()


def _stages(done: subprocess.CompletedProcess[bytes]) -> list[tuple[int, int, int]]:
    """First layer, last layer and device of each stage."""
    assert done.returncode == 0, done.stderr
    found = [STAGE.fullmatch(line) for line in _lines(done) if " on device " in line]
    assert all(found)
    return [(int(m[1]), int(m[2]), int(m[3])) for m in found if m]


@pytest.mark.parametrize("access", ["auto", "never"])
def test_text_and_logits_are_the_same(tmp_path: Path, access: str) -> None:
    """Token for token and bit for bit as on one device, wherever layers are split, with paths and without.

    Also beyond 160 cells, which a slab of all layers holds, and one of fewer layers more.
    """
    arguments = (PROMPT, "--json", *BABBLE, "--max-tokens", "60")
    text = tmp_path / "text"
    text.write_text(PROMPT * 12)
    texts, logits = [], []
    with running_daemon(config(ROOMY, access)) as running:
        for options in ((), ("--layer-split", "1"), ("--layer-split", "5"), ("--layer-split", "2,1"),
                        ("--layer-split", "auto"), ("--layer-split", "2,2,2", "--device", "2", "--device", "0",
                         "--device", "1")):  # fmt: skip
            done = running.generate(*arguments, *options)
            assert done.returncode == 0, done.stderr
            rows = [json.loads(line) for line in done.stdout.splitlines()]
            texts.append([row["token"] for row in rows if row.get("token") is not None])
            out = tmp_path / "logits.npy"
            measured = client(
                "perplexity", os.fspath(text), "--save-logits", os.fspath(out), *options,
                "--socket", os.fspath(running.directory),
            )  # fmt: skip
            assert measured.returncode == 0, measured.stderr
            logits.append(np.load(out))
    assert len(texts[0]) == 60
    assert all(found == texts[0] for found in texts)
    assert all(np.array_equal(found, logits[0]) for found in logits)


def test_where_the_layers_are() -> None:
    """Each device holds its own layers' weights and experts; the lines say what is where; a second client shares."""
    arguments = (PROMPT, "--max-tokens", "1", "--layer-split", "2,3", "--verbose")
    with running_daemon(config(ROOMY)) as running:
        done = running.generate(*arguments)
        assert _stages(done) == [(0, 1, 0), (2, 4, 1), (5, 5, 2)]
        assert sum("arena filled" in line for line in _lines(done)) == 3
        models = {m["name"].partition(", ")[2]: m for m in running.status()["models"]}
        assert {name: m["experts"] for name, m in models.items()} == {
            "layers 0 to 1": 32, "layers 2 to 4": 48, "layers 5 to 5": 16,
        }  # fmt: skip
        done = running.generate(*arguments)
        assert sum("arena shared" in line for line in _lines(done)) == 3
        assert len(running.status()["models"]) == 3


def test_auto_and_a_small_card() -> None:
    """`auto` says what it takes and why; a card that is small, or keeps a reserve, gets fewer layers."""
    arguments = (PROMPT, "--max-tokens", "1", "--layer-split", "auto", "--context", "256")
    with running_daemon(config(ROOMY)) as running:
        done = running.generate(*arguments)
        assert _lines(done)[0] == "strata: --layer-split auto takes 2,2,2:"
        assert _stages(done) == [(0, 1, 0), (2, 3, 1), (4, 5, 2)]
    with running_daemon(config((64, 3, 64))) as running:
        done = running.generate(*arguments)
        assert _stages(done) == [(0, 1, 0), (2, 2, 1), (3, 5, 2)]
        assert STAGE.fullmatch(_lines(done)[2])[5] == "3.00 MiB"  # type: ignore[index]
    reserved = config(()) + '[[device]]\nuuid = "HOST-SIM-1"\nreserve_bytes = "61MiB"\n'
    with running_daemon(reserved) as running:
        assert _stages(running.generate(*arguments)) == [(0, 1, 0), (2, 2, 1), (3, 5, 2)]


def test_all_grow_together() -> None:
    """K/V of all devices grows in one line, out of the expert slots of each, and the text is the same."""
    arguments = (PROMPT, *BABBLE, "--max-tokens", "280", "--context", "512", "--json")
    tokens = []
    for caps, split in ((ROOMY, ()), ((5, 6, 64), ("--layer-split", "3"))):
        with running_daemon(config(caps)) as running:
            done = running.generate(*arguments, *split)
            assert done.returncode == 0, done.stderr
            tokens.append([json.loads(line).get("token") for line in done.stdout.splitlines()])
            growths = [line for line in _lines(done) if "expert cache gave" in line]
            assert all(GROWTH.fullmatch(line) for line in growths)
            devices = {d["uuid"]: d for d in running.status()["devices"]}
            traded = [devices[f"HOST-SIM-{i}"]["traded_slabs"] for i in range(3)]
            if split:
                assert growths and traded[0] > 0 and traded[1] > 0 and traded[2] == 0
    assert tokens[0] == tokens[1]


def test_growth_is_all_or_nothing() -> None:
    """Where one device has no more, nothing is taken on the other either, and the text ends there with the reason."""
    with running_daemon(config((64, 4, 64))) as running:
        done = running.generate(
            PROMPT, *BABBLE, "--max-tokens", "1500", "--layer-split", "3", "--device", "0", "--device", "1"
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in _lines(done) if "the text ends here" in line]
        assert "HOST-SIM-1" in line
        devices = {d["uuid"]: d for d in running.status()["devices"]}
        assert devices["HOST-SIM-0"]["traded_slabs"] == 0


def test_a_device_that_is_too_small() -> None:
    """Where a stage's weights find no room the model is refused, with what that device has, and nothing stays open."""
    with running_daemon(config((64, 1, 64))) as running:
        done = running.generate(PROMPT, "--layer-split", "3")
        assert done.returncode == 1
        assert re.search(r"model .*layers 3 to 5' needs .* asked for on HOST-SIM-1", _lines(done)[-1])
        wait_until(lambda: running.status()["sessions"] == [])
        assert running.generate(PROMPT, "--layer-split", "3", "--device", "0", "--device", "2").returncode == 0


def test_two_clients_with_different_splits() -> None:
    """Each has its own stages, at the same time, and both give the same text."""
    arguments = (PROMPT, "--temperature", "0", "--max-tokens", "40")
    with running_daemon(config(ROOMY)) as running:
        wanted = running.generate(*arguments).stdout
        both = [
            running.start_generate(*arguments, "--layer-split", split, "--device", a, "--device", b)
            for split, a, b in (("2", "0", "1"), ("4", "1", "0"))
        ]
        for process in both:
            rest = process.communicate(timeout=60)[0]
            assert rest == wanted[1:]
        names = {m["name"].partition(", ")[2] for m in running.status()["models"]}
        assert names == {"", "layers 0 to 1", "layers 2 to 5", "layers 0 to 3", "layers 4 to 5"}


def test_tokens_are_counted_once() -> None:
    """A session's tokens are those that it evaluated, however many stages each went through."""
    arguments = (PROMPT, "--json", *BABBLE, "--max-tokens", "150", "--layer-split", "2,2")
    with running_daemon(config(ROOMY)) as running:
        process = running.start_generate(*arguments)
        wait_until(lambda: unread_bytes(process) > PIPE_BYTES - 200, 60)  # it cannot end before somebody reads
        (session,) = running.status()["sessions"]
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert 50 < session["decoded_tokens"] <= 150
    assert session["prompt_tokens"] == json.loads(out.splitlines()[-1])["statistics"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--layer-split", "auto", "--peer-device", "1"), 2, "--layer-split and --peer-device do not go together yet"),
        (("--layer-split", "3", "--conversation", "x"), 2, "--layer-split and --conversation do not go together yet"),
        (("--device", "0", "--device", "1"), 2, "several devices were given with --device: add --layer-split"),
        (("--layer-split", "half"), 2, "'half' is neither auto nor numbers of layers such as 24 or 24,12"),
        (("--layer-split", "6"), 1, "--layer-split 6: the model has 6 layers, for 2 to 8 devices; the numbers are"),
        (("--layer-split", "1,1,1,1"), 1, "--layer-split 1,1,1,1 is for 5 devices, and there are 3: HOST-SIM-0"),
        (("--layer-split", "2", "--device", "1"), 1, "needs two devices or more, and there is HOST-SIM-1: leave it"),
    ],
)
def test_refusals(options: tuple[str, ...], code: int, message: str) -> None:
    """What does not go together, or cannot be, is one line, and nothing is opened."""
    with running_daemon(config(ROOMY)) as running:
        done = running.generate(PROMPT, *options)
        assert done.returncode == code
        assert message in " ".join(_lines(done)[-1].split())
        assert running.status()["models"] == []


def test_devices_that_a_process_sees() -> None:
    """Layers go to the devices that the process sees; with one of them there is nothing to split over."""
    with running_daemon(config(ROOMY)) as running:
        env = {**os.environ, VISIBLE_SIMULATED: "2,1"}
        done = running.generate(PROMPT, "--max-tokens", "1", "--layer-split", "4", env=env)
        assert _stages(done) == [(0, 3, 1), (4, 5, 2)]
        done = running.generate(PROMPT, "--layer-split", "4", env={**env, VISIBLE_SIMULATED: "1"})
        assert done.returncode == 1
        assert "needs two devices or more, and there is HOST-SIM-1" in _lines(done)[-1]
