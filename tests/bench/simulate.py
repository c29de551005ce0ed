"""Replays traces of routing and growth against policies: `python -m tests.bench.simulate`.

One device whose slabs hold a model's experts and the K/V of its conversations, with the
daemon's own ledger, arena, heat and arbiter. For each conversation a K/V range grows by cells
and is given back when it ends; its slabs come from the arena and go back after
`give_back_tokens`. Between steps the hottest missing experts take the slots of the
coldest, `exchanges` at most in `interval_tokens`, as placement does in the daemon.
Everything but how the policy learns from tokens, and what it makes of that, is the same
for all.

Printed for each trace and policy: the hit rate (the share of routings that found their
expert in a slot), the bytes that moved, and how often a growth was refused, which is
asked for again in every interval.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import click
import numpy as np
import numpy.typing as npt

from tests.bench.traces import Trace, made_up, recorded
from vmmd.core import arbiter, geometry
from vmmd.core.arbiter import Request
from vmmd.core.heat import Counts
from vmmd.core.ledger import DeviceRecord, Ledger, RangeKind, RangeRecord, SessionRecord
from vmmd.core.policy import SHIPPED, Estimate, Policy, Shipped
from vmmd.core.residency import EMPTY, NOWHERE, Arena, Part, Slot
from vmmd.core.victims import ArenaTrade, Holder
from vmmd.errors import Exhausted

F64 = npt.NDArray[np.float64]

DEVICE, DOMAIN = "gpu0", "user"
MATRIX_BYTES = 1024
SLOTS_A_SLAB = 4
SLAB_BYTES = SLOTS_A_SLAB * 3 * MATRIX_BYTES


class Learner:
    """What simple estimates share: they do not tell sessions or kinds of tokens apart."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._seen: dict[int, Counts] = {}

    def join(self, session_id: int, start: Counts) -> None:
        self._seen[session_id] = start

    def count(self, now: Mapping[int, Counts]) -> bool:
        for session_id, page in now.items():
            before, self._seen[session_id] = self._seen[session_id], page
            routed = (page.decode - before.decode + page.prompt - before.prompt).astype(np.float64)
            self.learn(routed, page.tokens - before.tokens + page.prompt_tokens - before.prompt_tokens)
        return True

    def leave(self, session_id: int) -> None:
        del self._seen[session_id]

    def learn(self, counts: F64, tokens: int) -> None:
        raise NotImplementedError

    def value(self) -> F64:
        raise NotImplementedError

    def recall(self, learned: F64) -> None:
        raise NotImplementedError

    def learned(self) -> F64:
        return self.value()


class Frequency(Learner):
    """How often each expert was routed to, ever."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._counts = np.zeros(n, np.float64)
        self._tokens = 0

    def learn(self, counts: F64, tokens: int) -> None:
        self._counts += counts
        self._tokens += tokens

    def value(self) -> F64:
        return self._counts / max(1, self._tokens)


class LastUse(Learner):
    """How long ago each expert was routed to last; of those of one token, whichever comes first."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self._last = np.zeros(n, np.float64)
        self._tokens = 0

    def learn(self, counts: F64, tokens: int) -> None:
        self._tokens += tokens
        self._last[counts > 0] = self._tokens

    def value(self) -> F64:
        return self._last / max(1, self._tokens)


@dataclass(frozen=True)
class Simple(Shipped):
    """The shipped policy with another way to learn.

    Attributes:
        learns: makes an estimate for so many experts.
    """

    learns: Callable[[int], Estimate] = Frequency

    def estimate(self, n: int, routed_per_token: int) -> Estimate:
        return self.learns(n)


LRU = Simple(name="LRU", learns=LastUse)
FREQUENCY = Simple(name="frequency", learns=Frequency)
POLICIES: tuple[Policy, ...] = (LRU, FREQUENCY, SHIPPED)


@dataclass(frozen=True)
class Setting:
    """What is simulated.

    Attributes:
        slots: of the arena at first, as a share of the experts.
        exchanges: experts that may come in an interval beside those of trades; None: no limit.
        interval_tokens: between exchanges.
        cells_per_slab: of K/V.
        give_back_tokens: before freed slabs go back to the arena.
    """

    slots: float = 0.5
    exchanges: int | None = 8
    interval_tokens: int = 16
    cells_per_slab: int = 64
    give_back_tokens: int = 64


class Result(NamedTuple):
    """What came of it."""

    hit_rate: float
    moved_a_token: float  # experts that were copied, for each token
    refusals: int


@dataclass
class Simulation:
    """One trace under one policy."""

    trace: Trace
    policy: Policy
    setting: Setting = field(default_factory=Setting)
    seed: int = 0

    def __post_init__(self) -> None:
        n = self.trace.n
        stacks = [geometry.Stack(0, m, 0, n, 0, 0, MATRIX_BYTES, MATRIX_BYTES) for m in range(3)]
        shape = geometry.build(1, n, 1, stacks, [geometry.Extent(0, 0, 1)], [1 << 40])
        slabs = max(2, round(n * self.setting.slots / SLOTS_A_SLAB))
        self.ledger = Ledger()
        self.ledger.add_device(DeviceRecord(DEVICE, DEVICE, SLAB_BYTES, 1 << 50, slabs * SLAB_BYTES))
        self.ledger.add_session(SessionRecord(1, 1, 0, 0, DOMAIN, "simulated", 0.0))
        self.ledger._next_id = 100
        self._range = RangeRecord(2, RangeKind.ARENA, DEVICE, DOMAIN, 3, slabs)
        self.ledger.add_range(self._range)
        top = self.trace.routed.shape[1] * self.trace.routed.shape[2]
        floor = min(top, slabs * SLOTS_A_SLAB // 2)
        self.arena = Arena(3, DOMAIN, shape, [Part(2, DEVICE, SLAB_BYTES)], floor)
        self.arena.home_ready[:] = True
        self._kv: dict[int, RangeRecord] = {}
        self._estimate = self.policy.estimate(n, top)
        self._tokens: dict[int, npt.NDArray[np.int64]] = {}  # by conversation: decoded, and of the prompt
        self._pages: dict[int, npt.NDArray[np.uint64]] = {}  # [2, n] how often they were routed to each expert
        self._moved = self._refusals = 0
        self._refused: set[int] = set()  # conversations, in this interval
        self._freed: list[int] = []  # tokens at which a slab came free
        self._give_back(slabs)
        order = np.random.default_rng(self.seed).permutation(n)  # cold: whichever experts came first
        self._fill(order)
        self._moved = 0

    def run(self) -> Result:
        """Replays the whole trace."""
        routed, setting = self.trace.flat(), self.setting
        ends = {
            int(c): int(np.flatnonzero(self.trace.conversation == c)[-1]) for c in np.unique(self.trace.conversation)
        }
        cells = Counter[int]()
        hits = 0
        for start in range(0, len(self.trace), setting.interval_tokens):
            stop = min(start + setting.interval_tokens, len(self.trace))
            for t in range(start, stop):
                conversation = int(self.trace.conversation[t])
                cells[conversation] += 1
                self._grow(conversation, cells[conversation], t)
                hits += int(self.arena.resident[routed[t]].sum())
                self._count(conversation, routed[t], is_prompt=bool(self.trace.prompt[t]))
                if t == ends[conversation]:
                    self._end(conversation, t)
            self.arena.heat = self._estimate.value()
            self._refused.clear()
            waiting = [at for at in self._freed if at + setting.give_back_tokens > stop]
            ready, self._freed = len(self._freed) - len(waiting), waiting
            self._give_back(min(ready, len(self.ledger.free_slabs(DEVICE, DOMAIN))))
            self._fill(np.argsort(-self.arena.heat, kind="stable"))
            self._exchange()
        return Result(hits / routed.size, self._moved / len(self.trace), self._refusals)

    def _count(self, conversation: int, experts: npt.NDArray[np.int64], *, is_prompt: bool) -> None:
        """A token of a conversation was routed: its page says so, and the estimate looks at it."""
        if conversation not in self._tokens:
            self._tokens[conversation] = np.zeros(2, np.int64)
            self._pages[conversation] = np.zeros((2, self.trace.n), np.uint64)
            self._estimate.join(conversation, self._page(conversation))
        self._tokens[conversation][int(is_prompt)] += 1
        self._pages[conversation][int(is_prompt), experts] += np.uint64(1)
        self._estimate.count({conversation: self._page(conversation)})

    def _page(self, conversation: int) -> Counts:
        decode, prompt = self._pages[conversation].copy()
        decoded, of_prompt = self._tokens[conversation].tolist()
        return Counts(decoded, of_prompt, decode, prompt)

    # K/V

    def _grow(self, conversation: int, cells: int, token: int) -> None:
        record = self._kv.get(conversation)
        if record is None:
            record = RangeRecord(self.ledger.new_id(), RangeKind.KV, DEVICE, DOMAIN, 1, 1 << 20, 16, 1 << 30)
            self.ledger.add_range(record)
            self._kv[conversation] = record
        missing = -(-cells // self.setting.cells_per_slab) - len(record.slabs)
        if missing <= 0 or conversation in self._refused:
            return
        holders = [Holder(self.arena, None, True)]
        self.arena.heat = self._estimate.value()
        now_s = float(token)
        try:
            plan = arbiter.plan(
                self.ledger, holders, [Request(record.range_id, missing)], now_s=now_s, policy=self.policy
            )
        except Exhausted:
            self._refusals += 1
            self._refused.add(conversation)
            return
        (device,) = plan.devices
        slab_ids = list(device.reuse) + [self.ledger.create(DEVICE, DOMAIN, now_s) for _ in range(device.create)]
        for trade in device.trades:
            self._carry_out(trade, now_s)
            slab_ids += trade.slab_ids
        for slab_id in slab_ids:
            self.ledger.lease(slab_id, record.range_id, record.hole(), now_s)

    def _carry_out(self, trade: ArenaTrade, now_s: float) -> None:
        arena = self.arena
        arena.reserve_all(arena.slots_that_are(EMPTY, 0, trade.indexes))
        for move in trade.moves:
            if move.displaced == EMPTY:
                arena.reserve(move.to)
            else:
                arena.vacate(move.displaced)
            arena.settle(move.expert, move.to)
        self._moved += len(trade.moves)
        for expert in trade.evicted:
            arena.vacate(expert)
        for index, slab_id in zip(trade.indexes, trade.slab_ids, strict=True):
            arena.remove_slab(0, index)
            self.ledger.begin_revoke(slab_id, now_s)
            self.ledger.finish_revoke(slab_id, now_s)

    def _end(self, conversation: int, token: int) -> None:
        self._estimate.leave(conversation)
        record = self._kv.pop(conversation)
        for slab_id in list(record.slabs.values()):
            self.ledger.begin_revoke(slab_id, float(token))
            self.ledger.finish_revoke(slab_id, float(token))
            self._freed.append(token)
        self.ledger.remove_range(record.range_id)

    # Placement

    def _give_back(self, slabs: int) -> None:
        """The arena takes free or new slabs."""
        for _ in range(slabs):
            free = self.ledger.free_slabs(DEVICE, DOMAIN)
            slab_id = free[0] if free else self.ledger.create(DEVICE, DOMAIN, 0.0)
            index = self._range.hole()
            self.ledger.lease(slab_id, self._range.range_id, index, 0.0)
            self.arena.add_slab(0, index, 3 * MATRIX_BYTES)

    def _fill(self, order: npt.NDArray[np.int64]) -> None:
        """Missing experts come to empty slots."""
        for slots in self.arena.empty_slots(0).values():
            experts = order[~self.arena.resident[order]][: len(slots)]
            self.arena.reserve_all(slots[: len(experts)])
            self.arena.settle_all(experts, slots[: len(experts)])
            self._moved += len(experts)

    def _exchange(self) -> None:
        """The hottest missing experts take the coldest one's slots."""
        heat, arena = self.arena.heat, self.arena
        missing, placed = np.flatnonzero(~arena.resident), np.flatnonzero(arena.place[:, 0] != NOWHERE)
        hottest = missing[np.argsort(-heat[missing], kind="stable")][: self.setting.exchanges]
        coldest = placed[np.argsort(heat[placed], kind="stable")]
        for comes, goes in zip(hottest.tolist(), coldest.tolist(), strict=False):
            if heat[comes] <= heat[goes]:
                break
            slot = arena.slot_of(goes)
            assert slot is not None
            arena.vacate(goes)
            arena.settle(comes, Slot(*slot))
            self._moved += 1


@click.command()
@click.option("--slots", default=0.5, show_default=True, help="Of the arena at first, as a share of the experts.")
@click.option("--exchanges", default=8, show_default=True, help="Experts that may come in 16 tokens; 0: no limit.")
@click.option("--expert-bytes", default=2_949_120, show_default=True, help="Of one, for what moves.")
@click.option("--seed", default=0, show_default=True, help="Of the made-up traces.")
def main(slots: float, exchanges: int, expert_bytes: int, seed: int) -> None:
    """Compares the policies on every trace, as a table in Markdown; MiB are moved a token."""
    setting = Setting(slots=slots, exchanges=exchanges or None)
    names = [policy.name for policy in POLICIES]
    cells = [*(f"{name}: hits" for name in names), *(f"{name}: MiB" for name in names), "refusals"]
    click.echo(f"| trace | {' | '.join(cells)} |")
    click.echo(f"| --- |{' ---: |' * len(cells)}")
    for trace in [*made_up(seed), *recorded()]:
        found = [Simulation(trace, policy, setting).run() for policy in POLICIES]
        best = max(result.hit_rate for result in found)
        rates = [f"**{r.hit_rate:.2%}**" if r.hit_rate == best else f"{r.hit_rate:.2%}" for r in found]
        moved = [f"{result.moved_a_token * expert_bytes / (1 << 20):.2f}" for result in found]
        refusals = "/".join(str(result.refusals) for result in found)
        click.echo(f"| {trace.name} | {' | '.join([*rates, *moved, refusals])} |")


if __name__ == "__main__":
    main()
