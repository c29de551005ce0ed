"""Where the layers of a split model go: a run of them, a *stage*, for each of several devices.

The daemon knows nothing of it. Each stage is a model of its own there, with the weights,
the arena and the K/V of its layers on its device; only the residual crosses from one to
the next. What is decided here is how many layers each device gets.

`auto` counts what a token has to read in a stage's layers: their weights and its share of
their experts, at the speed of the device's memory, and from host memory those experts that
find no room beside the weights and the K/V of the whole context. Of all ways to part the
layers it takes the one whose slowest stage takes least, for that is what a prompt waits for
whose chunks are in all stages at once; then the one that takes least in sum, as a token
goes through all of them. So a smaller or slower card gets fewer layers, and has no say in
what the others do with theirs. The output matrix needs room, but no time here: a prompt
reads it once, and a token reads it wherever it is.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from strata_api.v1 import memory_pb2 as wire
from strata_api.v1 import pages

from strata_client.devices import choose_devices
from strata_client.models.qwen3moe import Qwen3Moe
from vmmd.errors import InvalidRequest
from vmmd.sizes import size_text

AUTO = "auto"
STAGES_MAX = pages.ATTACHMENTS_MAX
"""A session's models."""

HOST_BYTES_PER_S = 50e9
"""What a GPU reads from host memory."""

_SPEED_BYTES_PER_S = 1e12  # of all devices, where it is not known of each

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


class Sizes(NamedTuple):
    """What each layer takes in bytes, int64 `[n_layers]` each."""

    weights: I64  # the first has the embedding, the last the output matrix, too
    kv: I64  # of the whole context
    slots: I64  # of all experts
    read: I64  # by a token, of the layer's own weights
    experts_read: I64  # by a token, of the experts that it is routed to


class Plan(NamedTuple):
    """A run of layers on a device, and what it takes there.

    Attributes:
        device: where.
        number: of the device in the daemon's list.
        layers: of the whole model.
        need_bytes: with all experts and the K/V of the whole context.
        without_room: share of the experts that find none.
        token_s: that memory takes for a token in these layers; infinite where not even the weights fit.
    """

    device: wire.Device
    number: int
    layers: range
    need_bytes: int
    without_room: float
    token_s: float


class Split(NamedTuple):
    """What a user asks for.

    Attributes:
        counts: layers on the first devices, of which the next takes the rest; None for `auto`.
        devices: what the user calls the devices; none for all that the process sees.
    """

    counts: Sequence[int] | None
    devices: Sequence[str] = ()

    @classmethod
    def parse(cls, text: str, devices: Sequence[str]) -> "Split":
        """What `--layer-split` says. Errors: `ValueError`, with a line for the user."""
        if text == AUTO:
            return cls(None, devices)
        numbers = text.split(",")
        if not all(number.isascii() and number.isdigit() and 0 < int(number) < 1 << 31 for number in numbers):
            raise ValueError(f"{text!r} is neither {AUTO} nor numbers of layers such as 24 or 24,12")
        return cls([int(number) for number in numbers], devices)

    def plan(self, devices: Sequence[wire.Device], sizes: Sizes) -> list[Plan]:
        """The stages of a model, in the order of its layers.

        Args:
            devices: the daemon's list.
            sizes: what the layers take.

        Errors: `InvalidRequest` where the layers cannot be split so; `NoDevice`.
        """
        chosen = choose_devices(devices, self.devices)
        there = ", ".join(device.uuid for device in chosen)
        if len(chosen) < 2:
            raise InvalidRequest(f"--layer-split needs two devices or more, and there is {there}: leave it out")
        if self.counts is None:
            counts = _weighed(sizes, chosen[:STAGES_MAX])
        else:
            counts = self._counted(len(sizes.weights))
            if len(counts) > len(chosen) or (self.devices and len(counts) < len(chosen)):
                raise InvalidRequest(
                    f"--layer-split {','.join(map(str, self.counts))} is for {len(counts)} devices, and there are"
                    f" {len(chosen)}: {there}"
                )
        plans, first = [], 0
        numbers = {device.uuid: number for number, device in enumerate(devices)}
        for device, count in zip(chosen, counts, strict=False):
            if count:
                costs = _Costs.of(sizes, device, _speed_of(device, chosen))
                need, without_room, token_s = (cost[first, first + count].item() for cost in costs)
                layers = range(first, first + count)
                plans.append(Plan(device, numbers[device.uuid], layers, need, without_room, token_s))
                first += count
        return plans

    def _counted(self, n_layers: int) -> list[int]:
        """Layers on each device. Errors: `InvalidRequest`."""
        assert self.counts is not None
        rest = n_layers - sum(self.counts)
        counts = [*self.counts, rest] if rest else [*self.counts]
        if rest < 0 or not 2 <= len(counts) <= STAGES_MAX:
            raise InvalidRequest(
                f"--layer-split {','.join(map(str, self.counts))}: the model has {n_layers} layers, for 2 to"
                f" {STAGES_MAX} devices; the numbers are those of the first, and the next takes the rest"
            )
        return counts


def sizes_of(model: Qwen3Moe, cell_bytes: int, context: int) -> Sizes:
    """What the layers of a whole model take, with K/V cells of `cell_bytes` over all layers."""
    n, params = model.params.n_layers, model.params
    weights: I64 = np.zeros(n, np.int64)
    read: I64 = np.zeros(n, np.int64)
    for extent in model.weight_extents():
        kind, number, *_ = extent.name.split(".")
        is_embedding = kind == "token_embd"
        at = int(number) if kind == "blk" else 0 if is_embedding else n - 1
        weights[at] += extent.length_bytes
        if is_embedding and model.tied_output and n > 1:
            weights[n - 1] += extent.length_bytes
        if kind == "blk":
            read[at] += extent.length_bytes
    experts = model.expert_sizes()
    slots = (-(-experts // pages.ALIGN_BYTES) * pages.ALIGN_BYTES).sum(axis=(1, 2))
    experts_read = experts.sum(axis=(1, 2)) * params.top_k // params.n_experts
    kv = np.full(n, cell_bytes // n * context, np.int64)
    return Sizes(weights, kv, slots, read, experts_read)


def lines(plans: Sequence[Plan], split: Split) -> Iterator[str]:
    """What was chosen, and why: a line for each stage, and one before for `auto`."""
    if split.counts is None:
        yield f"strata: --layer-split auto takes {','.join(str(len(plan.layers)) for plan in plans)}:"
    is_known = _are_known([plan.device for plan in plans])
    for plan in plans:
        device = plan.device
        without = f", so {plan.without_room:.0%} of its experts stay in host memory" if plan.without_room else ""
        speed = f"; {plan.token_s * 1e3:.2f} ms a token at {device.bandwidth_bytes_per_s / 1e12:.2f} TB/s"
        yield (
            f"strata: layers {plan.layers.start} to {plan.layers.stop - 1} on device {plan.number}, {device.uuid}:"
            f" {size_text(plan.need_bytes)} with the whole context, of {size_text(device.limit_bytes)} there"
            f"{without}{speed if is_known else ''}"
        )


def _are_known(devices: Sequence[wire.Device]) -> bool:
    return all(device.bandwidth_bytes_per_s for device in devices)


def _speed_of(device: wire.Device, devices: Sequence[wire.Device]) -> float:
    """Bytes a second of a device's memory; the same for all where it is not known of each."""
    return float(device.bandwidth_bytes_per_s) if _are_known(devices) else _SPEED_BYTES_PER_S


class _Costs(NamedTuple):
    """What runs of layers take on a device, by their first layer and the one after their last, `[n + 1, n + 1]` each.

    A token takes no time in an empty run, and forever in one whose weights do not fit, or that ends before it begins.
    """

    need_bytes: I64
    without_room: F64
    token_s: F64

    @classmethod
    def of(cls, sizes: Sizes, device: wire.Device, speed: float) -> "_Costs":
        sums = [np.concatenate([[0], np.cumsum(size)]) for size in sizes]
        weights, kv, slots, read, experts_read = (total[None, :] - total[:, None] for total in sums)
        need = weights + kv + slots
        without_room = np.clip((need - device.limit_bytes) / np.maximum(slots, 1), 0, 1)
        token_s = (read + experts_read * (1 - without_room)) / speed + experts_read * without_room / HOST_BYTES_PER_S
        n_layers = np.arange(len(need))[None, :] - np.arange(len(need))[:, None]
        is_possible = (n_layers == 0) | ((n_layers > 0) & (weights <= device.limit_bytes))
        return cls(need, without_room, np.where(is_possible, token_s, np.inf))


def _weighed(sizes: Sizes, devices: Sequence[wire.Device]) -> list[int]:
    """Layers on each device, of which some may get none, as the module's text says."""
    costs = [_Costs.of(sizes, device, _speed_of(device, devices)).token_s for device in devices]
    slowest, _ = _best(costs, np.maximum)
    if slowest == np.inf:  # the daemon says what is missing where
        n = len(sizes.weights)
        return [n // len(devices) + (i < n % len(devices)) for i in range(len(devices))]
    return _best([np.where(cost <= slowest, cost, np.inf) for cost in costs], np.add)[1]


def _best(costs: Sequence[F64], combine: np.ufunc) -> tuple[float, list[int]]:
    """The least that all layers take, if two runs take what `combine` says together; and how many each device gets."""
    reached = np.full(len(costs[0]), np.inf)  # by layers that are placed
    reached[0] = 0
    firsts = []
    for cost in costs:
        ways = combine(reached[:, None], cost)
        firsts.append(ways.argmin(axis=0))
        reached = ways.min(axis=0)
    stop, counts = len(reached) - 1, []
    for first in reversed(firsts):
        counts.append(int(stop - first[stop]))
        stop = int(first[stop])
    return float(reached[-1]), counts[::-1]
