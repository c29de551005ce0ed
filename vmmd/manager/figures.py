"""Figures: what moves in the daemon, counted. `vmmctl status` and `top`, and metrics, all show these.

Tokens and routings come from the pages that clients write anyway, looked at once a
second and before anybody is shown something; no client makes a call for them. A
routing counts for the tier in which the expert is at that look.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from strata_api.v1 import memory_pb2

from vmmd.core import meters
from vmmd.core.meters import Meter

if TYPE_CHECKING:
    from vmmd.manager.manager import Manager
    from vmmd.manager.model import Model
    from vmmd.manager.session import Session

LOOK_S = 1.0
"""Between looks at clients' pages."""

MINUTE_S = 60.0


def _meter() -> Meter:
    return Meter(time.monotonic())


@dataclass
class Tokens:
    """Evaluated tokens of a session or a model."""

    decoded: Meter = field(default_factory=_meter)
    prompt: Meter = field(default_factory=_meter)

    def mark(self, now_s: float) -> None:
        """As `Meter.mark`."""
        self.decoded.mark(now_s)
        self.prompt.mark(now_s)


@dataclass
class TierTraffic:
    """Routings to a model's experts in one tier, and what decoding read there."""

    decode_routings: Meter = field(default_factory=_meter)
    prompt_routings: Meter = field(default_factory=_meter)
    read_bytes: Meter = field(default_factory=_meter)


@dataclass
class ModelFigures:
    """Of one model since it was opened. `tiers` is in the order of `meters.TIERS`."""

    tokens: Tokens = field(default_factory=Tokens)
    filled_bytes: Meter = field(default_factory=_meter)
    tiers: list[TierTraffic] = field(default_factory=lambda: [TierTraffic() for _ in meters.TIERS])


@dataclass
class Growths:
    """Growths of one session, or of all there ever were."""

    granted: int = 0
    refused: int = 0
    seconds: float = 0.0
    waiting: int = 0
    slabs: int = 0
    traded_slabs: int = 0


@dataclass
class SessionFigures:
    """Of one session."""

    tokens: Tokens = field(default_factory=Tokens)
    growths: Growths = field(default_factory=Growths)


@dataclass
class DeviceFigures:
    """Of one device: slabs that arenas gave, and got back later on."""

    trades: Meter = field(default_factory=lambda: Meter(time.monotonic(), MINUTE_S))
    traded_slabs: int = 0
    returned_slabs: int = 0


class Figures:
    """The manager's figures. Those of a model or session are with it, in its `figures`."""

    def __init__(self, manager: "Manager") -> None:
        self._manager = manager
        self._looked_s = time.monotonic()
        self.growths = Growths()
        self.devices = {uuid: DeviceFigures() for uuid in manager.ledger.devices}

    def tick(self) -> None:
        """Looks if it is time to."""
        if time.monotonic() >= self._looked_s + LOOK_S:
            self.look()

    def look(self) -> None:
        """Takes over what clients have counted."""
        now_s = time.monotonic()
        for model in self._manager.models.values():
            self.look_at(model)
            figures = model.figures
            figures.filled_bytes.add(model.filled_bytes - figures.filled_bytes.total)
            figures.filled_bytes.mark(now_s)
            figures.tokens.mark(now_s)
            for tier in figures.tiers:
                tier.decode_routings.mark(now_s)
                tier.read_bytes.mark(now_s)
        for session in self._manager.sessions.values():
            session.figures.tokens.mark(now_s)
        for device in self.devices.values():
            device.trades.mark(now_s)
        self._looked_s = now_s

    def look_at(self, model: "Model") -> None:
        """Takes over what one model's clients have counted; also before one of them leaves."""
        elapsed_s = time.monotonic() - self._looked_s
        arena = model.arena
        computing = next(i for i, r in enumerate(model.ranges) if r.device == model.weights.device)
        tier = meters.tier_of(arena.place[:, 0], computing)
        expert_bytes = arena.geometry.size_bytes.sum(axis=1)
        for session in model.sessions:
            page = session.heat[model.model_id]
            before, page.seen = page.seen, meters.believed(page.seen, page.counts(), elapsed_s)
            is_first = session.first_attached is model  # the others evaluate the same tokens: stages of a split model
            for tokens in (session.figures.tokens, model.figures.tokens) if is_first else (model.figures.tokens,):
                tokens.decoded.add(page.seen.tokens - before.tokens)
                tokens.prompt.add(page.seen.prompt_tokens - before.prompt_tokens)
            decoded, in_prompts = page.seen.decode - before.decode, page.seen.prompt - before.prompt
            read_bytes = decoded * expert_bytes.astype(np.float64)
            sums = (meters.by_tier(tier, amounts) for amounts in (decoded, in_prompts, read_bytes))
            for traffic, decodes, prompts, n_bytes in zip(model.figures.tiers, *sums, strict=True):
                traffic.decode_routings.add(decodes)
                traffic.prompt_routings.add(prompts)
                traffic.read_bytes.add(n_bytes)

    # Trades and growths

    def traded(self, trades: Sequence[memory_pb2.Trade]) -> None:
        """Arenas gave slabs."""
        for trade in trades:
            self.devices[trade.device_uuid].trades.add(1)
            self.devices[trade.device_uuid].traded_slabs += trade.slabs

    def returned(self, device: str, slabs: int) -> None:
        """An arena got slabs again."""
        self.devices[device].returned_slabs += slabs

    def growth_began(self, session: "Session") -> float:
        """A session waits for a growth; returns the moment, for `growth_ended`."""
        for growths in (self.growths, session.figures.growths):
            growths.waiting += 1
        return time.monotonic()

    def growth_ended(self, session: "Session", began_s: float, slabs: int | None, traded_slabs: int = 0) -> None:
        """It got so many slabs; None: it was refused, or its client has gone."""
        for growths in (self.growths, session.figures.growths):
            growths.waiting -= 1
            growths.seconds += time.monotonic() - began_s
            growths.granted += slabs is not None
            growths.refused += slabs is None
            growths.slabs += slabs or 0
            growths.traded_slabs += traded_slabs
