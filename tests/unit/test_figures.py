"""What the daemon counts: tokens and routings from clients' pages, growths, trades."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from strata_api.v1 import admin_pb2, pages

from tests.helpers.in_process import Host, run
from tests.helpers.peer import MATRIX_BYTES, SmallModel, public_model
from vmmd.errors import Exhausted
from vmmd.manager.session import Session
from vmmd.server import status


@pytest.fixture(scope="module")
def model() -> Iterator[SmallModel]:
    with public_model() as made:
        yield made


def _route(session: Session, model_id: int, tokens: int, experts: dict[int, int], *, prompt: bool = False) -> None:
    """Writes to a heat page as a client does."""
    words = session.heat[model_id].page.words
    words[pages.WORD_PROMPT if prompt else pages.WORD_DECODED] += tokens
    start = pages.HEADER_WORDS + (session.heat[model_id].n if prompt else 0)
    for expert, count in experts.items():
        words[start + expert] += count


def _status(host: Host) -> admin_pb2.StatusPart:
    whole = admin_pb2.StatusPart()
    for part in status.parts(host.manager):
        whole.MergeFrom(part)
    return admin_pb2.StatusPart.FromString(whole.SerializeToString())


def _tiers(found: Any) -> dict[str, tuple[int, int, int]]:
    return {tier.tier: (tier.decode_routings, tier.prompt_routings, tier.read_bytes) for tier in found.tiers}


def test_routings_count_for_the_tier_where_the_expert_is(model: SmallModel) -> None:
    """A model on two devices: the weights' device is at hand, the other a peer, the rest is read at home."""

    async def scenario() -> None:
        host = Host(6, 60, n_devices=2)
        try:
            opened = await host.begin(model, host.session, "SIM-1", ["SIM-0"])
            await asyncio.wait([opened.background])
            part = opened.arena.place[:, 0]
            here, there, home = (int(np.flatnonzero(part == p)[0]) for p in (0, 1, -1))
            _route(host.session, opened.model_id, 3, {here: 3, there: 1, home: 2})
            _route(host.session, opened.model_id, 8, {home: 5}, prompt=True)
            found = _status(host).models[0]
            size = 3 * MATRIX_BYTES
            assert _tiers(found) == {"device": (3, 0, 3 * size), "peer": (1, 0, size), "host": (2, 5, 2 * size)}
            assert (found.decoded_tokens, found.prompt_tokens) == (3, 8)
            assert found.decoded_tokens_per_s > 0
            assert [round(tier.share, 3) for tier in found.tiers] == [0.5, 0.167, 0.333]
            assert found.filled_bytes > 0
            session = _status(host).sessions[0]
            assert (session.decoded_tokens, session.prompt_tokens) == (3, 8)
        finally:
            await host.close()

    run(scenario)


def test_a_model_keeps_what_sessions_counted_that_have_left(model: SmallModel) -> None:
    """What a client counted just before it left is in the model's figures; sessions add up there."""

    async def scenario() -> None:
        host = Host(40, 60)
        try:
            opened = await host.open(model)
            second = host.connect("user")
            await host.open(model, second)
            _route(host.session, opened.model_id, 2, {0: 2})
            _route(second, opened.model_id, 5, {1: 4})
            host.manager.disconnect(second, "the test says so")
            found = _status(host)
            assert found.models[0].decoded_tokens == 7
            assert _tiers(found.models[0])["device"][0] == 6
            assert [s.decoded_tokens for s in found.sessions] == [2]
        finally:
            await host.close()

    run(scenario)


def test_a_client_that_lies_spoils_no_snapshot(model: SmallModel) -> None:
    """Counts beyond all sense are clamped, again and again, and the snapshot still fits the wire."""

    async def scenario() -> None:
        host = Host(40, 60)
        try:
            opened = await host.open(model)
            words = host.session.heat[opened.model_id].page.words
            for value in ((1 << 64) - 1, 0, 1 << 63, (1 << 64) - 1):
                for at in range(len(words)):
                    words[at] = value
                found = _status(host).models[0]
            assert 0 < found.decoded_tokens < 1 << 32
            assert 0 < _tiers(found)["device"][2] < 1 << 62
        finally:
            await host.close()

    run(scenario)


def test_growths_and_trades_are_counted(model: SmallModel) -> None:
    """Granted and refused growths count for the session and the daemon, trades for the device; waiting ones show."""

    async def scenario() -> None:
        host = Host(12, 60)
        try:
            await host.open(model)
            range_id = host.range()
            free = len(host.manager.ledger.free_slabs("SIM-0", "user")) + host.manager.ledger.room_slabs("SIM-0")
            growing = asyncio.create_task(host.manager.kv.grow(host.session, [(range_id, 16 * (free + 2))]))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert _status(host).daemon.growths.waiting == 1
            await growing
            with pytest.raises(Exhausted):
                await host.manager.kv.grow(host.session, [(range_id, 16 * 100)])
            found = _status(host)
            for growths in (found.daemon.growths, found.sessions[0].growths):
                assert (growths.granted, growths.refused, growths.waiting) == (1, 1, 0)
                assert (growths.slabs, growths.traded_slabs) == (free + 2, 2)
                assert growths.seconds > 0
            device = found.devices[0]
            assert (device.trades, device.trades_last_min, device.traded_slabs) == (1, 1, 2)
        finally:
            await host.close()

    run(scenario)
