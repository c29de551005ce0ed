"""Policy: what memory is worth to whom. `vmmd.core.arbiter` moves slabs from where they are worth least.

A policy is pure: it gets arenas, times and counts, and returns numbers. What a slab is
worth is in seconds that a token would take longer without it, times two to the power
of its users' priority:

- to an arena: the heat of the experts that would leave with it times the cost of
  reading them from where they would then be
- to an arena of a model that nobody uses at present: the same, times the chance of
  being wanted again
- to a parked conversation: less than to any arena, which serves every token. Its chance
  of being wanted again falls with time, so the longest parked gives first
- to a K/V range that asks: its need, which has no price. What a session has in use is
  never taken

docs/policy.md compares `SHIPPED` with simpler policies; `tests/bench/simulate.py`
replays traces against any that follows `Policy`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vmmd.core import heat
from vmmd.core.heat import Counts
from vmmd.core.residency import Arena

F64 = npt.NDArray[np.float64]

NEED = float("inf")
"""What a slab is worth to whom cannot do without."""


class Estimate(Protocol):
    """What a model's experts are going to be routed to, learned from what its sessions count."""

    def join(self, session_id: int, start: Counts) -> None:
        """A session's page begins with these counts."""

    def count(self, now: Mapping[int, Counts]) -> bool:
        """Takes over what the sessions' pages say now, by session; whether anything was routed."""

    def leave(self, session_id: int) -> None:
        """A session has gone; its last page was counted."""

    def value(self) -> F64:
        """The heat, float64 ``[n]``: expected routings a token; only its order counts within an arena."""

    def recall(self, learned: F64) -> None:
        """Begins with what `learned` returned another time."""

    def learned(self) -> F64:
        """What is worth keeping for the next time that the model is filled, float64 ``[n]``, 0 to 1."""


class Policy(Protocol):
    """What the arbiter asks."""

    @property
    def name(self) -> str:
        """For a person."""

    @property
    def hold_s(self) -> float:
        """Seconds in which two sides do not trade the same slab to and fro."""

    def estimate(self, n: int, routed_per_token: int) -> Estimate:
        """An estimate for `n` experts, of which a token is routed to so many at most, that has seen nothing."""

    def expert_worth(self, arena: Arena, idle_s: float, priority: int) -> F64:
        """What each expert ``[n]`` in a slot is worth; nobody has used the model for `idle_s`."""

    def pays(self, gain: float, loss: float) -> bool:
        """Whether a slab is worth so much more there than here that it should go."""


@dataclass(frozen=True)
class Shipped:
    """The policy that vmmd runs.

    Attributes:
        half_life_tokens: of the votes of sessions that are idle or have gone.
        hold_s: see `Policy`.
        margin: by how much, as a share, a slab must be worth more where it goes.
        wanted_again_s: idle seconds after which the chance of being wanted again has halved.
    """

    half_life_tokens: float = 128.0
    hold_s: float = 5.0
    margin: float = 0.5
    wanted_again_s: float = 600.0
    name: str = "shipped"

    def estimate(self, n: int, routed_per_token: int) -> Estimate:
        return heat.Heat(n, routed_per_token, self.half_life_tokens)

    def expert_worth(self, arena: Arena, idle_s: float, priority: int) -> F64:
        scale = self._chance(idle_s) * 2.0**priority
        return scale * heat.worth(arena.heat, arena.geometry.slot_bytes)

    def pays(self, gain: float, loss: float) -> bool:
        return gain > loss * (1.0 + self.margin)

    def _chance(self, idle_s: float) -> float:
        """Of being wanted again."""
        return float(0.5 ** (idle_s / self.wanted_again_s))


SHIPPED = Shipped()
