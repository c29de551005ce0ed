"""Which layers go to which device, and what is said about it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strata_api.v1 import memory_pb2 as wire

from strata_client.devices import VISIBLE_SIMULATED
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.run_options import DEFAULT_MODEL
from strata_client.split import Plan, Sizes, Split, lines, sizes_of
from vmmd.errors import InvalidRequest, NoDevice

GIB = 1 << 30
TB = 10**12


def device(number: int, gib: float = 100, speed: float = 1.0) -> wire.Device:
    """A simulated device with memory of so many TB/s; 0 is not known."""
    return wire.Device(
        uuid=f"HOST-SIM-{number}", limit_bytes=int(gib * GIB), bandwidth_bytes_per_s=int(speed * TB), slab_bytes=1
    )


def sizes(n_layers: int, *, weights_gib: float = 0.1, slots_gib: float = 0.9, kv_gib: float = 0.0) -> Sizes:
    """Layers that are all alike, of whose experts a token reads a sixteenth."""
    weights, kv, slots = (np.full(n_layers, int(gib * GIB), np.int64) for gib in (weights_gib, kv_gib, slots_gib))
    return Sizes(weights, kv, slots, weights, slots // 16)


def counts(plans: list[Plan]) -> list[int]:
    """Layers of each, which follow each other."""
    at = 0
    for plan in plans:
        assert plan.layers.start == at
        at = plan.layers.stop
    return [len(plan.layers) for plan in plans]


def auto(devices: list[wire.Device], of: Sizes) -> list[Plan]:
    return Split(None).plan(devices, of)


def test_devices_alike_share_evenly() -> None:
    """Of two alike each gets half; the host's memory computes nothing."""
    devices = [device(0), device(1), wire.Device(uuid="HOST-RAM", is_host=True)]
    assert counts(auto(devices, sizes(48))) == [24, 24]
    assert counts(auto([device(0, speed=0), device(1, speed=0)], sizes(48))) == [24, 24]


def test_a_smaller_card_limits_only_its_own_share() -> None:
    """It gets the layers that it has room for, wherever it stands; the others share the rest as if it was not there."""
    assert counts(auto([device(0), device(1, gib=5), device(2)], sizes(47))) == [21, 5, 21]
    assert counts(auto([device(0, gib=5), device(1), device(2)], sizes(47))) == [5, 21, 21]
    assert counts(auto([device(0, gib=5), device(1), device(2)], sizes(47, kv_gib=1.5))) == [3, 22, 22]


def test_a_slower_card_gets_fewer_layers() -> None:
    """Each takes as long for its layers as the others, by the speed of its memory, if all speeds are known."""
    assert counts(auto([device(0, speed=3), device(1, speed=1)], sizes(48))) == [36, 12]
    assert counts(auto([device(0, speed=3), device(1, speed=0)], sizes(48))) == [24, 24]


def test_a_device_without_room_is_left_out() -> None:
    """One that cannot hold a layer's weights gets none; where no split fits, the daemon is to refuse an even one."""
    assert counts(auto([device(0), device(1, gib=0.05), device(2)], sizes(48))) == [24, 24]
    assert counts(auto([device(0, gib=1), device(1, gib=1)], sizes(48))) == [24, 24]


def test_experts_that_find_no_room() -> None:
    """Where all devices together are too small, what a token reads in host memory is counted, and said."""
    plans = auto([device(0, gib=30, speed=2), device(1, gib=6, speed=2)], sizes(48))
    assert [plan.without_room > 0 for plan in plans] == [True, True]
    assert plans[0].layers.stop > 30
    heads = list(lines(plans, Split(None)))
    assert heads[0] == f"strata: --layer-split auto takes {','.join(map(str, counts(plans)))}:"
    assert f"layers 0 to {plans[0].layers.stop - 1} on device 0, HOST-SIM-0: {len(plans[0].layers)}.00 GiB" in heads[1]
    assert "of 30.00 GiB there, so " in heads[1] and "% of its experts stay in host memory; " in heads[1]
    assert heads[1].endswith(" ms a token at 2.00 TB/s")


def test_lines_of_a_split_that_was_asked_for() -> None:
    """A line for each stage, without speeds where they are not known, and none about `auto`."""
    split = Split([10])
    (first, second) = lines(split.plan([device(0, speed=0), device(1)], sizes(48)), split)
    assert (
        first == "strata: layers 0 to 9 on device 0, HOST-SIM-0: 10.00 GiB with the whole context, of 100.00 GiB there"
    )
    assert second.startswith("strata: layers 10 to 47 on device 1, HOST-SIM-1: 38.00 GiB")


@given(st.data())
def test_no_split_has_a_faster_slowest_stage(data: st.DataObject) -> None:
    """`auto` is never slower than any other way to part the layers."""
    n = data.draw(st.integers(1, 6))
    byte_counts = st.lists(st.integers(1, 4 * GIB), min_size=n, max_size=n).map(np.int64)
    weights, kv, slots = data.draw(byte_counts), data.draw(byte_counts), data.draw(byte_counts)
    of = Sizes(weights, kv, slots, weights, slots // 16)
    devices = [
        device(i, gib=data.draw(st.floats(0.1, 40)), speed=data.draw(st.floats(0.1, 5)))
        for i in range(data.draw(st.integers(2, 3)))
    ]
    slowest = max(plan.token_s for plan in auto(devices, of))
    for others in product(range(n + 1), repeat=len(devices)):
        if sum(others) == n:
            first, times = 0, []
            for each, count in zip(devices, others, strict=True):
                if count:
                    part = Sizes(*(size[first : first + count] for size in of))
                    pair = [each, device(9)]
                    times.append(Split([count]).plan(pair, _with_one_more(part))[0].token_s)
                    first += count
            assert slowest <= max(times) * (1 + 1e-9)


def _with_one_more(of: Sizes) -> Sizes:
    return Sizes(*(np.append(size, 1) for size in of))


@pytest.mark.parametrize(
    ("asked", "found"), [([24], [24, 24]), ([10, 30], [10, 30, 8]), ([12, 12, 24], [12, 12, 24]), ([47], [47, 1])]
)
def test_numbers_of_layers(asked: list[int], found: list[int]) -> None:
    """The next device takes the rest; those that are not needed are left alone, unless they were named."""
    devices = [device(i) for i in range(4)]
    plans = Split(asked).plan(devices, sizes(48))
    assert counts(plans) == found
    assert [plan.number for plan in plans] == list(range(len(found)))
    named = [str(i) for i in reversed(range(len(found)))]
    assert [plan.number for plan in Split(asked, named).plan(devices, sizes(48))] == [int(name) for name in named]


@pytest.mark.parametrize(
    ("split", "error", "message"),
    [
        (Split([48]), InvalidRequest, "--layer-split 48: the model has 48 layers, for 2 to 8 devices; the numbers "),
        (Split([40, 9]), InvalidRequest, "--layer-split 40,9: the model has 48 layers"),
        (Split([5] * 8), InvalidRequest, "for 2 to 8 devices"),
        (Split([16, 16]), InvalidRequest, "--layer-split 16,16 is for 3 devices, and there are 2: HOST-SIM-0, HOST"),
        (Split([24], ["0"]), InvalidRequest, "needs two devices or more, and there is HOST-SIM-0: leave it out"),
        (Split([24], ["0", "0"]), InvalidRequest, "--device 0: HOST-SIM-0 was named before"),
        (Split(None, ["0", "7"]), NoDevice, "--device 7 is not a device of the daemon"),
        (Split(None, ["0", "2"]), NoDevice, "--device 2: HOST-RAM computes nothing"),
    ],
)
def test_splits_that_cannot_be(split: Split, error: type[Exception], message: str) -> None:
    """Each is refused in a line that says what was asked for and what there is."""
    devices = [device(0), device(1), wire.Device(uuid="HOST-RAM", is_host=True)]
    with pytest.raises(error, match=message):
        split.plan(devices, sizes(48))


def test_named_devices_must_all_get_layers() -> None:
    """Numbers for fewer devices than were named are refused."""
    with pytest.raises(InvalidRequest, match="--layer-split 24 is for 2 devices, and there are 3"):
        Split([24], ["0", "1", "2"]).plan([device(i) for i in range(3)], sizes(48))


def test_devices_that_are_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without names only those are taken that the process sees."""
    devices = [device(i) for i in range(3)]
    monkeypatch.setenv(VISIBLE_SIMULATED, "2,0")
    assert [plan.number for plan in auto(devices, sizes(48))] == [0, 2]
    with pytest.raises(NoDevice, match="--device 1: this process does not see HOST-SIM-1"):
        Split(None, ["0", "1"]).plan(devices, sizes(48))


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1,,2", "AUTO", "1, 2", "²"])
def test_nonsense(text: str) -> None:
    """What is neither `auto` nor numbers is refused."""
    with pytest.raises(ValueError, match="is neither auto nor numbers of layers"):
        Split.parse(text, ())


def test_sizes_of_the_shipped_model() -> None:
    """All of a model's bytes are some layer's; what a token reads is of the layers alone, and of few experts."""
    with open_model_file(DEFAULT_MODEL) as model_file:
        model = Qwen3Moe(model_file)
        of = sizes_of(model, 6144, 100)
        extents = {extent.name: extent.length_bytes for extent in model.weight_extents()}
        experts = int(model.expert_sizes().sum())
    assert of.weights.sum() == sum(extents.values()) + model.tied_output * extents["token_embd.weight"]
    assert of.weights[0] > of.weights[1] < of.weights[-1]
    assert of.read.sum() == sum(length for name, length in extents.items() if name.startswith("blk."))
    assert of.kv.tolist() == [102400] * 6
    assert experts <= of.slots.sum() < 1.1 * experts
    assert of.experts_read.sum() == experts * model.params.top_k // model.params.n_experts
