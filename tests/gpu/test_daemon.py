"""A vmmd with the CUDA driver, and clients that map what it lends: on GPUs, and on a stand-in where there is none."""

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cuda_peer import GIB, MIB, LargeModel, Machine
from tests.helpers.daemon import wait_until
from tests.helpers.doomed import Doomed
from tests.helpers.peer import CELL, Admin, Remote, SmallModel, public_model
from vmmd.driver.cuda_calls import CONTEXT_IS_DEAD
from vmmd.driver.host_memfd import HOST_UUID
from vmmd.errors import DriverError, Exhausted, NoDevice
from vmmd.manager.upkeep import TICK_S

OTHER_UID = 12345
CONFIG = """
give_back_delay_s = {give_back_delay_s}
revoke_deadline_ms = 3000
host_cap_bytes = {host_cap_bytes}
peer_access = "{peer_access}"
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture(scope="module", params=["fake-cuda", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Real GPUs, or the stand-in."""
    if request.param == "cuda":
        yield Machine.real()
        return
    directory = tmp_path_factory.mktemp("others")
    for parent in (directory, *directory.parents[:2]):
        parent.chmod(0o755)
    yield Machine.stand_in(directory)


@pytest.fixture(scope="module")
def model(machine: Machine) -> Iterator[LargeModel]:
    """About 2 GiB on a GPU."""
    n_layers, n_experts = (3, 32) if machine.fake else (8, 96)
    with machine.model(n_layers, n_experts) as made:
        yield made


def config(**changes: Any) -> str:
    """Lines of the configuration; what is not a key of `CONFIG` is added as it stands."""
    values = {"give_back_delay_s": 0.2, "host_cap_bytes": 4 * GIB, "peer_access": "auto"}
    more = changes.pop("more", "")
    return CONFIG.format(**{**values, **changes}) + more


def cap(machine: Machine, slabs: int) -> str:
    """The line that lets the daemon have so many slabs of each GPU."""
    return f"cap_bytes = {slabs * machine.slab_bytes}\n"


def all_slabs(machine: Machine, model: LargeModel) -> int:
    """Slabs of a model whose experts are all in slots."""
    return model.slabs(machine.slab_bytes) + model.weights_slabs(machine.slab_bytes)


def wait_until_resident(admin: Admin, n: int, timeout_s: float = 30) -> None:
    """Waits until so many experts of the only model are in slots."""

    def resident() -> int:
        models = admin.status().models
        return models[0].resident if models else 0

    wait_until(lambda: resident() == n, timeout_s, lambda: f"{resident()} of {n} experts are in slots")


def wait_until_given_back(admin: Admin, device: int = 0) -> None:
    """Waits until no session has K/V on a device."""
    wait_until(
        lambda: not admin.device(device).kv_bytes and not admin.device(device).revoking_bytes,
        10,
        lambda: f"K/V is not given back: {admin.device(device)}",
    )


def test_conversations(machine: Machine, model: LargeModel) -> None:
    """A killed client's complete cells are the next one's byte for byte, also after they were on the host."""
    more = f'{cap(machine, all_slabs(machine, model) + 4)}[conversations]\nspill_bytes = "1GiB"\n'
    per_slab = machine.slab_bytes // CELL.size_bytes
    with machine.daemon(config(more=more)) as daemon, machine.client(daemon) as two, Admin(daemon.directory) as admin:
        with machine.client(daemon) as one:
            one.ask("open", model)
            one.ask("converse", "x", 4 * per_slab)
            one.ask("grow", 4)
            one.ask("write_kv", 0x5A)
            one.ask("claim", 2 * per_slab + 1)
            one.kill()
        two.ask("open", model)
        for _ in range(2):
            assert two.ask("converse", "x", 4 * per_slab) == 2 * per_slab + 1
            assert two.ask("read_kv", at=0) == [0x5A]
            assert admin.device().kv_bytes == 3 * machine.slab_bytes
            two.ask("leave")
            two.ask("create")
            assert two.ask("grow", 2) == 0
            two.ask("write_kv", 0xA5)
            assert admin.device().kv_bytes == 2 * machine.slab_bytes
            assert [device.kv_bytes for device in admin.status().devices if device.is_host] == [3 * machine.slab_bytes]
            two.ask("shrink", 0)
            two.ask("forget_kv")


def test_every_byte_of_a_model(machine: Machine, model: LargeModel) -> None:
    """Every byte of weights, slots and homes that a client maps is the file's, for the first and the second client."""
    with machine.daemon(config()) as daemon, machine.client(daemon) as one, machine.client(daemon) as two:
        assert not one.ask("open", model)
        assert two.ask("open", model)
        one.ask("wait_for_homes")
        for peer in (one, two):
            assert peer.ask("weights_are_right")
            assert peer.ask("devices_of_experts") == [model.n]
            assert peer.ask("wrong_experts") == 0
            assert peer.ask("wrong_homes") == 0
            assert peer.ask("troubles") == []


def test_experts_are_right_where_only_some_have_slots(machine: Machine, model: LargeModel) -> None:
    """Where the device's cap holds half of the experts, the others are read from their homes."""
    slabs = model.weights_slabs(machine.slab_bytes) + model.slabs(machine.slab_bytes) // 2
    with machine.daemon(config(more=cap(machine, slabs))) as daemon, machine.client(daemon) as one:
        one.ask("open", model)
        assert 0 < one.ask("devices_of_experts")[0] < model.n
        assert one.ask("wrong_experts") == 0


def test_growth_trades_with_slots(machine: Machine, model: LargeModel) -> None:
    """K/V grows by slots of the coldest experts, hotter ones move first, and all come back when it is given back."""
    with (
        machine.daemon(config(more=cap(machine, all_slabs(machine, model)))) as daemon,
        machine.client(daemon) as one,
        machine.client(daemon) as two,
        Admin(daemon.directory) as admin,
    ):
        one.ask("open", model)
        two.ask("open", model)
        one.ask("wait_for_homes")
        for turn in range(3):
            one.ask("route", turn, 1000, redraw=True)
            time.sleep(2 * TICK_S)  # that is when it is counted
            one.ask("create")
            _, traded, moved = one.ask("time_growth", 3, at=turn)
            assert traded == 3 and moved > 0
            for peer in (one, two):
                assert peer.ask("wrong_experts") == 0
                assert peer.ask("devices_of_experts")[0] < model.n
            one.ask("write_kv", 0x5A, at=turn)
            assert one.ask("read_kv", at=turn) == [0x5A]
            assert two.ask("wrong_experts") == 0
            one.ask("shrink", 0, at=turn)
            wait_until_resident(admin, model.n)
            for peer in (one, two):
                assert peer.ask("wrong_experts") == 0
                assert peer.ask("troubles") == []


def test_reading_while_slots_are_traded(machine: Machine, model: LargeModel) -> None:
    """No reader ever sees a foreign byte while another client grows and shrinks as fast as it can."""
    lines = config(give_back_delay_s=0, more=cap(machine, all_slabs(machine, model)))
    with (
        machine.daemon(lines) as daemon,
        machine.client(daemon) as one,
        machine.client(daemon) as reader,
    ):
        one.ask("open", model)
        reader.ask("open", model)
        one.ask("wait_for_homes")
        one.ask("create")
        reader.tell("count_reads", 4.0)
        end, growths = time.monotonic() + 3.5, 0
        while time.monotonic() < end:
            one.ask("route", growths, 100, redraw=True)
            one.ask("time_growth", 3)
            one.ask("write_kv", 0xEE)
            one.ask("shrink", 0)
            growths += 1
        reads, on_device, wrong = reader.answer()
        assert wrong == []
        assert growths > 3 and reads > 100 and on_device > 0
        for peer in (one, reader):
            assert peer.ask("wrong_experts") == 0


@pytest.mark.parametrize("peer_access", ["auto", "never"])
def test_second_gpu_lends_its_own_memory(machine: Machine, model: LargeModel, peer_access: str) -> None:
    """Arena, weights and K/V of the second GPU lie there although the first is current, and trade there."""
    if len(machine.uuids) < 2:
        pytest.skip("this host has one GPU; the test needs two")
    lines = config(peer_access=peer_access, more=cap(machine, all_slabs(machine, model)))
    with machine.daemon(lines) as daemon, machine.client(daemon) as one, Admin(daemon.directory) as admin:
        one.ask("make_current", 0)
        one.ask("open", model, [machine.uuids[1]])
        one.ask("create", device=1)
        one.ask("wait_for_homes")
        one.ask("route", 1, 1000)
        _, traded, _ = one.ask("time_growth", 3)
        assert traded == 3
        first, second = admin.status().devices[:2]
        assert first.kv_bytes + first.experts_bytes + first.weights_bytes == 0
        assert second.kv_bytes == 3 * machine.slab_bytes
        assert one.ask("wrong_experts") == 0 and one.ask("weights_are_right")
        one.ask("write_kv", 0x77)
        assert one.ask("read_kv") == [0x77]
        one.ask("shrink", 0)
        wait_until_resident(admin, model.n)
        assert one.ask("wrong_experts") == 0


@pytest.mark.parametrize("peer_access", ["auto", "never"])
def test_arena_over_two_gpus(machine: Machine, model: LargeModel, peer_access: str) -> None:
    """An arena with a part on each GPU shows every expert's bytes, and each part trades with its own GPU's K/V."""
    if len(machine.uuids) < 2:
        pytest.skip("this host has one GPU; the test needs two")
    slabs = model.weights_slabs(machine.slab_bytes) + model.slabs(machine.slab_bytes) // 2 + 1
    lines = config(peer_access=peer_access, more=cap(machine, slabs))
    with machine.daemon(lines) as daemon, machine.client(daemon) as one, Admin(daemon.directory) as admin:
        one.ask("open", model, machine.uuids[:2])
        one.ask("wait_for_homes")
        assert min(one.ask("devices_of_experts")) > 0
        assert one.ask("wrong_experts") == 0
        for device in (0, 1):
            one.ask("create", device=device)
            free = admin.device(device).free_bytes // machine.slab_bytes
            _, traded, _ = one.ask("time_growth", free + 2, at=device)
            assert traded == 2
            assert admin.device(device).kv_bytes == (free + 2) * machine.slab_bytes
            assert one.ask("wrong_experts") == 0


def test_clients_that_see_one_gpu_each(machine: Machine, model: LargeModel) -> None:
    """Whatever CUDA_VISIBLE_DEVICES lets a client see, and in which order, it gets; for the rest it is told why not."""
    if len(machine.uuids) < 2:
        pytest.skip("this host has one GPU; the test needs two")
    first, second = machine.uuids[:2]
    slabs = model.weights_slabs(machine.slab_bytes) + model.slabs(machine.slab_bytes) // 2 + 1
    with (
        machine.daemon(config(more=cap(machine, slabs))) as daemon,
        machine.client(daemon, visible=[0]) as one,
        machine.client(daemon, visible=[1]) as other,
        machine.client(daemon, visible=[1, 0]) as both,
    ):
        for client, mine, foreign, number in ((one, first, second, "1"), (other, second, first, "0")):
            assert client.ask("choose", None) == [mine]
            seen = f"does not see {foreign}; of the daemon's devices it sees [01]: {mine}"
            for options in ((number,), (foreign,), (None, [number])):
                with pytest.raises(NoDevice, match=seen):
                    client.ask("choose", *options)
        assert both.ask("choose", None, ["1"]) == [first, second]
        assert both.ask("choose", "1", [first]) == [second, first]
        one.ask("open", model, [first])
        one.ask("wait_for_homes")
        assert both.ask("open", model, [first, second]), "the model of the first, with a part on the second GPU"
        on_first, on_second = both.ask("devices_of_experts")
        assert on_first > 0 and on_second > 0
        assert both.ask("wrong_experts") == 0
        assert one.ask("wrong_experts") == 0, "what is on the other GPU it reads from the homes"


@pytest.mark.gpu
def test_kernel_reads_the_other_gpus_slots() -> None:
    """A kernel of one GPU reads an expert in a slot of the other in place, where they have a path."""
    machine = Machine.pair()
    with machine.model(2, 32) as model, machine.daemon(config()) as daemon, machine.client(daemon) as one:
        one.ask("make_current", 0)
        one.ask("open", model, [machine.uuids[1]])
        assert one.ask("load_from_expert", 0) == 1 << 28


@pytest.mark.parametrize("when", ["open", "growth", "step"])
def test_killed_client(machine: Machine, model: LargeModel, when: str) -> None:
    """After SIGKILL at any moment the client's slabs are free, the arena is whole and the next client is served."""
    lines = config(more=cap(machine, all_slabs(machine, model)))
    with machine.daemon(lines) as daemon, Admin(daemon.directory) as admin:
        for delay_s in (0.002, 0.05, 0.3) if when == "open" else (0.0, 0.003, 0.01):
            peer = machine.client(daemon)
            peer.ask("create")
            if when == "open":
                peer.tell("open", model)
            else:
                peer.ask("open", model)
                peer.ask("wait_for_homes")
                peer.ask("route", 1, 100)
            if when == "growth":
                peer.tell("time_growth", 3)
            elif when == "step":
                peer.ask("time_growth", 3)
                peer.ask("begin_step")
            time.sleep(delay_s)
            peer.kill()
            wait_until(lambda: not admin.status().sessions, 10)
            wait_until_given_back(admin)
        with machine.client(daemon) as after:
            after.ask("open", model)
            after.ask("wait_for_homes")
            wait_until_resident(admin, model.n)
            assert after.ask("wrong_experts") == 0
            after.ask("create")
            assert after.ask("time_growth", 3)[1] == 3
            assert after.ask("wrong_experts") == 0
        assert daemon.process.poll() is None


@needs_root
def test_no_byte_goes_from_user_to_user(machine: Machine, model: LargeModel) -> None:
    """A slab that another user's K/V had reads as zeros, whether it was free or that user's client died."""
    with machine.daemon(config(more=cap(machine, 8))) as daemon, Admin(daemon.directory) as admin:
        daemon.directory.chmod(0o750)
        for way in ("give back", "die"):
            with machine.client(daemon) as owner:
                owner.ask("create")
                owner.ask("time_growth", 8)
                owner.ask("write_kv", 0xA5)
                assert owner.ask("read_kv") == [0xA5]
                if way == "give back":
                    owner.ask("shrink", 0)
            wait_until_given_back(admin)
            with machine.client(daemon, OTHER_UID) as stranger:
                stranger.ask("create")
                stranger.ask("time_growth", 8)
                assert stranger.ask("read_kv") == [0]
                stranger.ask("write_kv", 0x5A)
            wait_until_given_back(admin)


@needs_root
def test_arena_gives_slabs_to_another_user(machine: Machine, model: LargeModel) -> None:
    """A user's arena gives slabs to another's K/V, which reads zeros there; the arena's reader sees nothing of it."""
    lines = config(more=cap(machine, all_slabs(machine, model)))
    with (
        machine.daemon(lines) as daemon,
        machine.client(daemon) as owner,
        Admin(daemon.directory) as admin,
    ):
        daemon.directory.chmod(0o750)
        owner.ask("open", model)
        owner.ask("wait_for_homes")
        with machine.client(daemon, OTHER_UID) as stranger:
            stranger.ask("create")
            assert stranger.ask("time_growth", 3)[1] == 3
            assert stranger.ask("read_kv") == [0]
            stranger.ask("write_kv", 0x5A)
            assert owner.ask("wrong_experts") == 0
        wait_until_resident(admin, model.n)
        assert owner.ask("wrong_experts") == 0
        assert admin.device().quarantined_bytes == 0


@pytest.mark.parametrize("known", [False, True])
def test_memory_that_another_program_took(machine: Machine, model: LargeModel, known: bool) -> None:
    """A growth that runs out of memory half-way is undone, refused with who holds what, and possible later.

    The daemon looks at what others have four times a second: it does not know yet, or it does.
    """
    slab = machine.slab_bytes
    floor_slots = model.n - 2 * (slab // model.slot_bytes)  # two slabs at most
    more = f"floor_slots = {floor_slots}\n" + cap(machine, all_slabs(machine, model) + 3)
    with (
        machine.daemon(config(more=more)) as daemon,
        machine.client(daemon) as one,
        machine.other_program() as other,
        Admin(daemon.directory) as admin,
    ):
        one.ask("open", model)
        one.ask("wait_for_homes")
        one.ask("create")
        one.ask("time_growth", 1)
        before = admin.device()
        other.ask("allocate", free_bytes(machine, admin, other) - slab - slab // 2)
        time.sleep(0.6 if known else 0)
        with pytest.raises(Exhausted) as caught:
            one.ask("grow", 5)
        assert any(f"pid {one.pid}" in holder for holder in caught.value.holders), caught.value
        assert any("unmanaged" in holder for holder in caught.value.holders), caught.value
        wait_until_resident(admin, model.n)
        after = admin.device()
        assert (after.kv_bytes, after.experts_bytes) == (before.kv_bytes, before.experts_bytes)
        assert one.ask("wrong_experts") == 0
        other.ask("free")
        time.sleep(0.6)
        assert one.ask("time_growth", 5)[1] == 2
        assert admin.device().kv_bytes == 5 * slab
        assert one.ask("wrong_experts") == 0


def free_bytes(machine: Machine, admin: Admin, other: Remote) -> int:
    """What a device has free by its driver's word."""
    if machine.fake is None:
        return int(other.ask("free_bytes"))
    d = admin.device()  # the stand-in counts slabs in the daemon's process only
    slabs = d.kv_bytes + d.experts_bytes + d.weights_bytes + d.free_slab_bytes + d.revoking_bytes + d.quarantined_bytes
    return int(other.ask("free_bytes") - slabs)


def test_reserve_for_other_programs(machine: Machine, model: LargeModel) -> None:
    """An arena shrinks until `reserve_bytes` is free for others again, and is whole once there was room for 5 s."""
    slab = machine.slab_bytes
    reserve_bytes = 8 * slab
    device = f'[[device]]\nuuid = "{machine.uuids[0]}"\nreserve_bytes = {reserve_bytes}\n'
    with (
        machine.daemon(config(give_back_delay_s=5, more=device)) as daemon,
        machine.client(daemon) as one,
        machine.other_program() as other,
        Admin(daemon.directory) as admin,
    ):
        one.ask("open", model)
        one.ask("wait_for_homes")
        assert one.ask("devices_of_experts") == [model.n]
        other.ask("allocate", free_bytes(machine, admin, other) - 3 * slab)
        wait_until(
            lambda: free_bytes(machine, admin, other) >= reserve_bytes,
            20,
            lambda: f"{free_bytes(machine, admin, other) / MIB} MiB are free: {admin.device()}",
        )
        assert 0 < one.ask("devices_of_experts")[0] < model.n
        assert one.ask("wrong_experts") == 0
        experts_bytes = admin.device().experts_bytes
        assert experts_bytes >= all_slabs(machine, model) * slab - model.weights_slabs(slab) * slab - 7 * slab

        began = time.monotonic()
        other.ask("free")
        wait_until(lambda: admin.device().experts_bytes > experts_bytes)
        assert time.monotonic() - began > 4.5
        wait_until_resident(admin, model.n)
        assert one.ask("wrong_experts") == 0
        assert one.ask("troubles") == []


def test_writer_to_a_read_only_mapping_faults_alone(machine: Machine, model: LargeModel) -> None:
    """A store to an expert's slot ends or poisons that client; daemon, arena and other clients go on."""
    with machine.daemon(config()) as daemon, machine.client(daemon) as other:
        writer = machine.client(daemon)
        for peer in (writer, other):
            peer.ask("open", model)
        other.ask("wait_for_homes")
        if machine.fake is None:
            with pytest.raises(DriverError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
                writer.ask("store_to_expert")
        else:
            writer.tell("store_to_expert")
            writer.process.join(30)
            assert writer.process.exitcode == -signal.SIGSEGV
        writer.kill()
        assert other.ask("wrong_experts") == 0
        other.ask("create")
        other.ask("time_growth", 2)
        with machine.client(daemon) as after:
            assert after.ask("open", model)
            assert after.ask("wrong_experts") == 0
        assert daemon.process.poll() is None


def test_refused_opening_leaves_nothing(machine: Machine, model: LargeModel) -> None:
    """A model that fits neither device nor host is refused, and every slab that it had is free."""
    lines = config(
        host_cap_bytes=2 * machine.slab_bytes, more=cap(machine, model.weights_slabs(machine.slab_bytes) + 2)
    )
    with machine.daemon(lines) as daemon, machine.client(daemon) as one, Admin(daemon.directory) as admin:
        with pytest.raises(Exhausted, match="without a home"):
            one.ask("open", model)
        wait_until(lambda: not admin.device().experts_bytes + admin.device().weights_bytes, 10)
        one.ask("create")
        one.ask("time_growth", 2)


@pytest.fixture(scope="module")
def small() -> Iterator[SmallModel]:
    """A model that fills a slab or so."""
    with public_model() as made:
        yield made


def doomed(machine: Machine) -> Remote:
    """A process of its own with the daemon's driver, whose contexts can be killed."""
    return Remote(Path(), kind=functools.partial(Doomed, fake=machine.fake))


def test_dead_context_is_its_devices_alone(machine: Machine, small: SmallModel) -> None:
    """A GPU whose context died is failed, by name, whatever is asked of it; a new process has it back at once."""
    path = os.fspath(small.path)
    with doomed(machine) as process:
        process.ask("use", 0, path)
        assert process.ask("failed") == []
        assert process.ask("kill_context", 0) == "CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(DriverError, match=r"is dead.*restart vmmd") as caught:
            process.ask("use", 0, path)
        assert caught.value.name in CONTEXT_IS_DEAD and machine.uuids[0] in caught.value.message
        assert process.ask("failed") == [0]
        print(f"first noticed by {caught.value.call}: {caught.value.name}")
        with doomed(machine) as after:
            after.ask("use", 0, path)
            assert after.ask("failed") == []
        assert process.ask("close") == [machine.uuids[0]]


def test_other_gpu_outlives_a_dead_context(machine: Machine, small: SmallModel) -> None:
    """Where one GPU's context alone has died, the same process goes on with the other: slabs, fills and memory."""
    if machine.fake is None:
        pytest.skip("a kernel's fault ends the contexts of all GPUs; only the stand-in loses one alone")
    path = os.fspath(small.path)
    with doomed(machine) as process:
        for device in (0, 1):
            process.ask("use", device, path)
        assert process.ask("kill_context", 0) == "CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(DriverError, match=machine.uuids[0]):
            process.ask("use", 0, path)
        for _ in range(3):
            process.ask("use", 1, path)
            assert process.ask("memory", 1) > 0
        assert process.ask("failed") == [0]
        process.ask("close")


def test_sessions_are_told_of_a_dead_context(machine: Machine, small: SmallModel) -> None:
    """A daemon whose GPU died tells its sessions, refuses that GPU with the reason, and serves those that live."""
    with doomed(machine) as process:
        seen = process.ask("run_manager", small)
    print(seen)
    first, takes_all = machine.uuids[0], machine.fake is None
    assert seen["kernel"] == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert any(f"{first} has failed" in notice for notice in seen["notices"])
    dead = machine.uuids if takes_all else [first]
    assert seen["states"] == {uuid: "failed" if uuid in dead else "ok" for uuid in (*machine.uuids, HOST_UUID)}
    assert f"{first} has failed" in seen["growth"]
    assert f"{first} has failed" in seen["opening"]
    assert seen["stale"]
    if len(machine.uuids) > 1 and not takes_all:
        assert seen["on the other"] == (small.n, small.n, 0)
