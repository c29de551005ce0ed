"""Several clients that decode the same model of Qwen3-30B-A3B's shape on one GPU, too small for its experts."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from strata_client.sampler import SamplerOptions
from tests.bench.large_model import attached_engine, random_model, write
from tests.bench.report import Row
from tests.helpers.cuda_peer import GIB, Machine
from tests.helpers.daemon import Daemon

pytestmark = [pytest.mark.bench, pytest.mark.gpu, pytest.mark.timeout(400)]

CAP_GIB = 16
CLIENTS = 4
TOKENS_PER_S, PEER_TOKENS_PER_S = 350, 87
"""In sum: wanted, and of four llama.cpp processes that split the same memory."""

WARMING = 512
SECONDS = 10.0
CONTEXT = 8192
WAIT_S = 240


@pytest.fixture(scope="module")
def machine() -> Machine:
    """The GPU."""
    return Machine.real()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """18.5 GB of random weights, some experts hotter than others."""
    with random_model(tmp_path_factory.mktemp("model"), "--mix", "q4_k_m", "--skew", "0.5") as path:
        yield path


def decode(directory: str, model: str, seed: int, together: Barrier, answer: Connection) -> None:
    """One client: begins with the others once all are warm, and answers with its tokens, the first to the last second.

    It holds its memory until the others have ended too.
    """
    with attached_engine(Path(directory), Path(model), CONTEXT) as engine:
        engine.sequence.prepare(8)
        engine.begin([(7919 * i + 104729 * seed) % 150000 for i in range(8)], SamplerOptions(temperature=1, seed=seed))
        for _ in range(WARMING):
            engine.next_token()
            assert engine.sequence.has_room(), engine.sequence.refusal
        together.wait(WAIT_S)
        tokens, until = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            engine.next_token()
            assert engine.sequence.has_room(), engine.sequence.refusal
            tokens += 1
        answer.send(tokens)
        together.wait(WAIT_S)  # the daemon's figures are read
        together.wait(WAIT_S)


def meet(together: Barrier, processes: Sequence[BaseProcess]) -> None:
    """Waits for all of them, unless one has ended."""
    until = time.perf_counter() + WAIT_S
    while together.n_waiting < len(processes):
        ended = [process.exitcode for process in processes if process.exitcode is not None]
        assert not ended, f"a client has ended with {ended}"
        assert time.perf_counter() < until, f"{together.n_waiting} of {len(processes)} clients came in {WAIT_S} s"
        time.sleep(0.01)
    together.wait(WAIT_S)


def tokens_of(daemon: Daemon, model: Path, clients: int) -> tuple[list[int], float]:
    """Tokens that each of so many clients decoded meanwhile, and GiB of the GPU that experts had at the end."""
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(clients + 1)
    answers: list[Connection] = []
    processes: list[BaseProcess] = []
    for seed in range(clients):
        answer, theirs = context.Pipe(duplex=False)
        arguments = (os.fspath(daemon.directory), os.fspath(model), seed, together, theirs)
        processes.append(context.Process(target=decode, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        answers.append(answer)
    meet(together, processes)
    tokens = [answer.recv() for answer in answers]
    meet(together, processes)
    experts_gib = daemon.status()["devices"][0]["experts_bytes"] / GIB
    meet(together, processes)
    for process in processes:
        process.join(WAIT_S)
    assert [process.exitcode for process in processes] == [0] * clients
    return tokens, experts_gib


def test_clients_of_one_model(machine: Machine, model_path: Path) -> None:
    """Tokens a second and memory of one client, then of four beside each other."""
    config = f"host_cap_bytes = {40 * GIB}\ngive_back_delay_s = 0.2\ncap_bytes = {CAP_GIB * GIB}\n"
    with machine.daemon(config) as daemon:
        alone, experts_alone_gib = tokens_of(daemon, model_path, 1)
        found, experts_gib = tokens_of(daemon, model_path, CLIENTS)
    name, rate = f"{CLIENTS} clients, {CAP_GIB} GiB", sum(found) / SECONDS
    write(
        "clients",
        [
            Row(f"{name}: tokens a second in sum", rate, "tok/s", "higher", TOKENS_PER_S, None, PEER_TOKENS_PER_S),
            Row(f"{name}: the slowest of them", min(found) / SECONDS, "tok/s", "higher"),
            Row(f"one client, {CAP_GIB} GiB", alone[0] / SECONDS, "tok/s", "higher"),
            Row(f"{name}: memory of experts, times one's", experts_gib / experts_alone_gib, "times", "lower", 1.0),
        ],
    )
