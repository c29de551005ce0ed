"""Shares, waiting and explanations between real processes."""

import json
import os
import threading
from pathlib import Path

import pytest
from strata_api.v1 import memory_pb2

from strata_client import connection
from strata_client.session import Session
from tests.helpers.daemon import client as run_client
from tests.helpers.daemon import running_daemon, vmmctl
from tests.helpers.peer import Client, SmallModel, client, public_model
from vmmd.errors import Exhausted, InvalidRequest

SLAB = 64 << 10
CONFIG = 'slab_bytes = "64KiB"\nfloor_slots = 4\n[host]\ndevice_bytes = {}\nram_bytes = "4MiB"\n'
SHARE = '[[share]]\nusers = [{}]\nguarantee_bytes = "256KiB"\nsession_cap_bytes = "512KiB"\npriority = 3\n'


def config(slabs: int, share: str = "") -> str:
    return CONFIG.format(slabs * SLAB) + share


def hello(directory: Path, asked: connection.Asked) -> Session:
    return Session.connect([directory], asked)


def test_a_client_may_ask_for_less_and_not_for_more() -> None:
    """A session has the share that its client asks for, and none beyond its user's."""
    with running_daemon(config(20, SHARE.format(os.getuid()))) as daemon:
        for asked, names in (
            (connection.Asked(cap_bytes=1 << 20), "session_cap_bytes"),
            (connection.Asked(guarantee_bytes=1), "session_guarantee_bytes"),
            (connection.Asked(priority=4), "priority 4"),
        ):
            with pytest.raises(InvalidRequest, match=names):
                hello(daemon.directory, asked)
        session = hello(daemon.directory, connection.Asked(cap_bytes=2 * SLAB, priority=-3))
        one = Client.over(session)
        one.create()
        one.grow(2)
        with pytest.raises(Exhausted, match="may hold 2 slabs of HOST-SIM-0"):
            one.grow(3)
        session.close()
        with client(daemon.directory) as other:
            other.create()
            other.grow(8)
            with pytest.raises(Exhausted, match="may hold 8 slabs"):
                other.grow(9)


def test_a_growth_waits_for_another_process() -> None:
    """A growth that is given time gets what another process gives back meanwhile, else its deadline's refusal."""
    with running_daemon(config(4)) as daemon, client(daemon.directory) as holder, client(daemon.directory) as one:
        holder.create()
        holder.grow(4)
        range_id, cells = one.create(), one.kv[0].cells_per_slab
        growth = memory_pb2.Growth(range_id=range_id, cells=2 * cells)
        with pytest.raises(Exhausted, match=r"waited 0\.1 s"):
            one.call("GrowRanges", memory_pb2.GrowRangesRequest(growths=[growth], wait_ms=100))
        timer = threading.Timer(0.3, holder.shrink, [1])
        timer.start()
        reply = one.call("GrowRanges", memory_pb2.GrowRangesRequest(growths=[growth], wait_ms=20_000))
        timer.join()
        assert reply.ranges[0].size_bytes == 2 * SLAB


def test_a_run_may_wait() -> None:
    """`strata-client generate --wait` begins when another client has given its memory back."""
    with running_daemon('slab_bytes = "1MiB"\ncap_bytes = "10MiB"\n') as daemon, client(daemon.directory) as holder:
        holder.create()
        holder.grow(9)
        refused = daemon.generate("Once", "--max-tokens", "2")
        assert refused.returncode == 1 and b"asked for on HOST-SIM-0" in refused.stderr
        timer = threading.Timer(1.0, holder.shrink, [0])
        timer.start()
        done = daemon.generate("Once", "--max-tokens", "2", "--wait", "60")
        timer.join()
        assert done.returncode == 0, done.stderr
        asked_too_much = daemon.generate("Once", "--kv-guarantee", "1MiB")
        assert asked_too_much.returncode == 1
        assert asked_too_much.stderr.count(b"\n") == 1 and b"session_guarantee_bytes" in asked_too_much.stderr


@pytest.fixture(scope="module")
def model() -> SmallModel:
    """A small model's file."""
    with public_model() as made:
        yield made


def test_trades_and_explanations(model: SmallModel) -> None:
    """`vmmctl trades` and `explain` tell of a trade and of a refusal with their reasons."""
    with running_daemon(config(14)) as daemon, client(daemon.directory) as one:
        socket = ("--socket", os.fspath(daemon.directory))
        one.open(model)
        range_id = one.create()
        one.grow(2)
        with pytest.raises(Exhausted):
            one.grow(40)
        done = vmmctl("trades", "--output", "json", *socket)
        assert done.returncode == 0, done.stderr
        decisions = json.loads(done.stdout)["decisions"]
        assert [d["age_s"] for d in decisions] == sorted((d["age_s"] for d in decisions), reverse=True)
        trades = [d for d in decisions if d["kind"] == "trade"]
        assert sum(d["slabs"] for d in trades) == 2
        assert all(d["to_range_id"] == range_id and "of the heat leave" in d["reason"] for d in trades)
        assert decisions[-1]["kind"] == "refusal" and decisions[-1]["slabs"] == 38
        newest = json.loads(vmmctl("trades", "--last", "1", "--output", "json", *socket).stdout)["decisions"]
        assert [d["kind"] for d in newest] == ["refusal"]
        assert b"\x1b" not in (table := vmmctl("trades", *socket).stdout)
        assert f"[range {range_id}]".encode() in table

        ids = (range_id, one.session_id(), one.opened[0].model_id)
        for some_id in ids:
            done = vmmctl("explain", str(some_id), "--output", "json", *socket)
            assert done.returncode == 0, done.stderr
            facts = json.loads(done.stdout)["facts"]
            topics = {fact["topic"] for fact in facts}
            assert {"range", "holds", "decided"} <= topics
            assert ("gives next" in topics) == (some_id == ids[2])
            assert ("refused" in topics) == (some_id != ids[2])
        assert b"holds" in vmmctl("explain", str(range_id), *socket).stdout
        unknown = vmmctl("explain", "987654", *socket)
        assert unknown.returncode == 1 and unknown.stderr.startswith(b"vmmctl: 987654 is no range, session or model")


def test_guarantees_beyond_the_device_are_refused(tmp_path: Path) -> None:
    """A daemon that is to guarantee more than a device has does not start, and says so in one line."""
    text = config(3, SHARE.format(os.getuid()))
    with pytest.raises(AssertionError, match="users are guaranteed"), running_daemon(text):
        pass


def test_options_that_make_no_sense_are_one_line() -> None:
    """Sizes and times that are none are refused before anything is opened."""
    for option in (("--kv-cap", "3x"), ("--kv-guarantee", "9" * 25), ("--wait", "-1"), ("--priority", "11")):
        done = run_client("generate", "x", *option)
        assert done.returncode == 2, done.stderr
        assert option[0].encode() in done.stderr and done.stderr.count(b"\n") == 1
