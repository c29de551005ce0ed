"""The library for other engines, against real daemons."""

import asyncio
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import strata_client
from strata_client import Client, Range
from tests.helpers.daemon import Daemon, running_daemon, wait_until
from tests.helpers.peer import Admin, Remote

SLAB = 64 << 10
SLABS = 16
CONFIG = """
slab_bytes = "64KiB"
revoke_deadline_ms = {}
[host]
device_bytes = "1MiB"
ram_bytes = "1MiB"
"""
DEADLINE_S = 60.0
"""No test waits for it."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(CONFIG.format(int(DEADLINE_S * 1000))) as running:
        running.directory.chmod(0o750)
        yield running


@pytest.fixture(scope="module")
def admin(daemon: Daemon) -> Iterator[Admin]:
    with Admin(daemon.directory) as made:
        yield made


@pytest.fixture(autouse=True)
def nobody(admin: Admin) -> None:
    """Whatever a test before this one had is free."""
    wait_until(lambda: _is_free(admin), otherwise=lambda: str(admin.status()))


@pytest.fixture
def client(daemon: Daemon, admin: Admin) -> Iterator[Client]:
    with strata_client.connect(daemon.directory) as made:
        yield made
    wait_until(lambda: _is_free(admin), otherwise=lambda: str(admin.status()))


def _is_free(admin: Admin) -> bool:
    status = admin.status()
    return not status.sessions and status.devices[0].free_bytes == SLABS * SLAB


def _kv_slabs(admin: Admin) -> int:
    return admin.device().kv_bytes // SLAB


def _array(memory: Range, dtype: str = "uint8") -> Any:
    return np.asarray(memory.view(dtype=dtype))


def test_a_range_grows_and_shrinks_in_place(daemon: Daemon, admin: Admin, client: Client) -> None:
    """Sizes are whole slabs, what was written stays where it was, and the daemon knows who holds how much."""
    (device,) = client.devices()
    assert (device.slab_bytes, device.cap_bytes) == (SLAB, SLABS * SLAB)
    with client.range(SLAB + 1, max_bytes=5 * SLAB - 1) as memory:
        assert (memory.size_bytes, memory.max_bytes, memory.device) == (2 * SLAB, 5 * SLAB, device.uuid)
        address = memory.view().address
        _array(memory, "uint32")[:] = np.arange(2 * SLAB // 4)
        memory.grow(5 * SLAB)
        assert memory.view().address == address
        _array(memory)[2 * SLAB :] = 7
        assert np.array_equal(np.asarray(memory.view(2 * SLAB // 4, "uint32")), np.arange(2 * SLAB // 4))
        assert _kv_slabs(admin) == 5
        memory.grow(SLAB)
        assert memory.size_bytes == 5 * SLAB
        memory.shrink(2 * SLAB + 1)
        assert (memory.size_bytes, _kv_slabs(admin)) == (3 * SLAB, 3)
        assert np.asarray(memory.view(offset_bytes=2 * SLAB)).tolist() == [7] * SLAB
        memory.shrink()
        assert memory.view().shape == (0,)
    assert _kv_slabs(admin) == 0


def test_a_client_may_make_and_close_any_number_of_ranges(client: Client) -> None:
    """A closed range counts no more: the limit is on those that are open."""
    for _ in range(300):
        client.range(max_bytes=SLAB).close()
    with client.range(SLAB) as memory:
        assert memory.size_bytes == SLAB


@pytest.mark.parametrize(
    ("size_bytes", "max_bytes"), [(0, None), (-1, None), (-1, 10), (2, 1), (0, 1 << 70), (1 << 70, None), (0, -5)]
)
def test_sizes_that_cannot_be_are_refused(client: Client, size_bytes: int, max_bytes: int | None) -> None:
    """With the sizes in the message; nothing is left of it."""
    with pytest.raises(strata_client.InvalidRequest, match=str(max_bytes or size_bytes)):
        client.range(size_bytes, max_bytes=max_bytes)


def test_views_are_within_the_memory_that_is_there(client: Client) -> None:
    """Of any shape and type that fits, and of no other."""
    with client.range(SLAB, max_bytes=2 * SLAB) as memory:
        for shape, dtype in (((SLAB // 12, 3), "float32"), ((), "float64"), (SLAB, "bool"), ((0, 4), "int8")):
            assert np.asarray(memory.view(shape, dtype)).shape == (shape if isinstance(shape, tuple) else (shape,))
        assert memory.view(dtype="float64", offset_bytes=SLAB - 8).shape == (1,)
        for shape, dtype, offset in (
            (SLAB + 1, "uint8", 0),
            (1, "uint8", SLAB),
            (1, "uint8", -1),
            (1, "float32", 2),
            (-1, "uint8", 0),
            ((1 << 40, 1 << 40), "float64", 0),
            (1, "O", 0),
            (1, "V0", 0),
        ):
            with pytest.raises(strata_client.InvalidRequest):
                memory.view(shape, dtype, offset_bytes=offset)
        with pytest.raises(strata_client.InvalidRequest, match="cannot grow"):
            memory.grow(2 * SLAB + 1)
        for negative in (memory.grow, memory.shrink):
            with pytest.raises(strata_client.InvalidRequest):
                negative(-1)
        assert memory.size_bytes == SLAB


def test_nothing_can_be_done_with_what_is_closed(daemon: Daemon, admin: Admin) -> None:
    """Every use is refused with one line; closing again is none."""
    client = strata_client.connect(daemon.directory)
    memory = client.range(SLAB)
    memory.close()
    memory.close()
    for use in (memory.grow, memory.shrink):
        with pytest.raises(strata_client.InvalidRequest, match="this range is closed"):
            use(SLAB)
    with pytest.raises(strata_client.InvalidRequest, match="this range is closed"):
        memory.view()
    left_open = client.range(SLAB)
    client.close()
    client.close()
    assert left_open.closed
    for what in (client.devices, lambda: client.range(SLAB)):
        with pytest.raises(strata_client.InvalidRequest, match="this client is closed"):
            what()
    wait_until(lambda: not admin.status().sessions)


def test_views_hold_the_memory_that_they_show(admin: Admin, client: Client) -> None:
    """A range does not shrink below its views, and says so; without them it does."""
    memory = client.range(4 * SLAB)
    low, piece = memory.view(10), np.asarray(memory.view(SLAB, offset_bytes=2 * SLAB))[5:9]
    with pytest.raises(strata_client.InvalidRequest, match=rf"2 views of it are alive and reach to byte {3 * SLAB}"):
        memory.shrink(SLAB)
    assert memory.size_bytes == 4 * SLAB
    memory.shrink(3 * SLAB)
    del piece
    gc.collect()
    memory.shrink(SLAB)
    assert _kv_slabs(admin) == 1
    assert low.shape == (10,)


@pytest.mark.parametrize("convert", [np.asarray, np.from_dlpack], ids=["interface", "dlpack"])
def test_a_range_that_is_closed_keeps_its_memory_until_the_last_view_has_gone(
    daemon: Daemon, admin: Admin, convert: Any
) -> None:
    """No view dangles: range and session stay behind it, and go when it goes."""
    with strata_client.connect(daemon.directory) as client:
        memory = client.range(2 * SLAB)
        array = convert(memory.view())
        _array(memory)[:] = 9
        with pytest.warns(ResourceWarning, match="a range was closed while 1 views"):
            memory.close()
        with pytest.warns(ResourceWarning) as caught:
            other = client.range(SLAB)
            kept = convert(other.view())
            client.close()
    assert "a client was closed while 1 views" in str(caught[0].message)
    assert (array == 9).all()
    assert kept.shape == (SLAB,)
    assert (_kv_slabs(admin), len(admin.status().sessions)) == (3, 1)
    del kept
    gc.collect()
    wait_until(lambda: _kv_slabs(admin) == 2)
    assert (array == 9).all()
    del array
    gc.collect()
    wait_until(lambda: _is_free(admin), otherwise=lambda: str(admin.status()))


def test_a_growth_that_is_refused_changes_nothing(admin: Admin, client: Client) -> None:
    """The error says who holds what; a range that cannot even begin is none."""
    with client.range(SLAB, max_bytes=100 * SLAB) as memory:
        with pytest.raises(strata_client.Exhausted, match=rf"session \d+ \(pid {os.getpid()}\) holds 0.06 MiB"):
            memory.grow(17 * SLAB)
        assert memory.size_bytes == SLAB
        with pytest.raises(strata_client.Exhausted):
            client.range(16 * SLAB)
        memory.grow(16 * SLAB)
        assert _kv_slabs(admin) == 16


# Shrinking for others


def test_a_range_shrinks_when_others_need_the_memory(daemon: Daemon, client: Client) -> None:
    """Its callback is told what to keep and until when; then the other growth goes through."""
    told: list[tuple[Range, int, float]] = []

    def on_shrink(memory: Range, size_bytes: int, deadline_s: float) -> None:
        told.append((memory, size_bytes, deadline_s - time.monotonic()))

    lent = client.range(14 * SLAB, on_shrink=on_shrink)
    _array(lent)[:SLAB] = 5
    with strata_client.connect(daemon.directory) as other, other.range(6 * SLAB) as memory:
        assert memory.size_bytes == 6 * SLAB
        assert lent.size_bytes == 10 * SLAB
        assert [(kept[0], kept[1]) for kept in told] == [(lent, 10 * SLAB)]
        assert 0 < told[0][2] <= DEADLINE_S
        assert (_array(lent)[:SLAB] == 5).all()
    lent.grow(14 * SLAB)


@needs_root
def test_a_range_shrinks_for_another_user(daemon: Daemon, client: Client) -> None:
    """What leaves its domain is destroyed and created anew: the other user reads zeros."""
    lent = client.range(16 * SLAB, on_shrink=lambda memory, size_bytes, deadline_s: None)
    _array(lent)[:] = 5
    with Remote(daemon.directory, 1234) as stranger:
        stranger.ask("create")
        stranger.ask("grow", 3)
        assert stranger.ask("read_kv") == [0]
    assert lent.size_bytes == 13 * SLAB


def test_nobody_is_asked_in_vain(daemon: Daemon, client: Client) -> None:
    """Neither where all together have too little, nor ranges without a callback."""
    told: list[int] = []
    lent = client.range(8 * SLAB, on_shrink=lambda memory, size_bytes, deadline_s: told.append(size_bytes))
    kept = client.range(8 * SLAB)
    with strata_client.connect(daemon.directory) as other, pytest.raises(strata_client.Exhausted):
        other.range(9 * SLAB)
    assert told == []
    assert (lent.size_bytes, kept.size_bytes) == (8 * SLAB, 8 * SLAB)


def test_a_callback_may_keep_more_and_views_keep_theirs(daemon: Daemon, client: Client) -> None:
    """What is returned is what is kept; a view that is still alive keeps its memory whatever is returned."""
    lent = client.range(16 * SLAB, on_shrink=lambda memory, size_bytes, deadline_s: 15 * SLAB)
    with strata_client.connect(daemon.directory) as other:
        with pytest.raises(strata_client.Exhausted):
            other.range(2 * SLAB)
        assert lent.size_bytes == 15 * SLAB
        lent.close()
        viewed = client.range(16 * SLAB, on_shrink=lambda memory, size_bytes, deadline_s: 0)
        view = viewed.view(1, offset_bytes=9 * SLAB)
        with other.range(2 * SLAB):
            assert viewed.size_bytes == 10 * SLAB
        assert view.shape == (1,)


def test_a_callback_that_raises_gives_nothing(daemon: Daemon, client: Client) -> None:
    """The other is refused without waiting for the deadline, the trouble is told, and the next request asks again."""
    answers: list[Any] = [RuntimeError("not now"), SystemExit(3), None]

    def on_shrink(memory: Range, size_bytes: int, deadline_s: float) -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    lent = client.range(16 * SLAB, on_shrink=on_shrink)
    with strata_client.connect(daemon.directory) as other:
        for left in (2, 1):
            with pytest.raises(strata_client.Exhausted):
                other.range(SLAB)
            assert (lent.size_bytes, len(answers)) == (16 * SLAB, left)
        with other.range(SLAB):
            assert lent.size_bytes == 15 * SLAB
    assert ["on_shrink failed: RuntimeError: not now" in client.troubles[0], len(client.troubles)] == [True, 2]


def test_a_callback_that_is_late_is_asked_no_more(daemon: Daemon) -> None:
    """Whoever waited is refused at the deadline, the next one at once; a range that shrinks again is asked again."""
    with ExitStack() as stack:
        running = stack.enter_context(running_daemon(CONFIG.format(5000)))
        client = stack.enter_context(strata_client.connect(running.directory))
        other = stack.enter_context(strata_client.connect(running.directory))
        asked, go_on = threading.Semaphore(0), threading.Event()

        def on_shrink(memory: Range, size_bytes: int, deadline_s: float) -> None:
            asked.release()
            go_on.wait(60)

        lent = client.range(16 * SLAB, on_shrink=on_shrink)
        with pytest.raises(strata_client.Exhausted):
            other.range(SLAB)
        assert asked.acquire(timeout=30)
        with pytest.raises(strata_client.Exhausted):
            other.range(SLAB)
        assert not asked.acquire(blocking=False)
        go_on.set()
        wait_until(lambda: lent.size_bytes == 15 * SLAB)
        with other.range(2 * SLAB):
            assert lent.size_bytes == 14 * SLAB


def test_two_that_grow_at_the_other_s_cost_both_come_to_an_end(daemon: Daemon, admin: Admin) -> None:
    """Whoever gets what, neither waits for the other for ever, and what they have adds up."""
    with strata_client.connect(daemon.directory) as one, strata_client.connect(daemon.directory) as two:
        mine, yours = (
            c.range(8 * SLAB, max_bytes=12 * SLAB, on_shrink=lambda memory, size_bytes, deadline_s: None)
            for c in (one, two)
        )
        outcomes: list[str] = []

        def grow(memory: Range) -> None:
            try:
                memory.grow(12 * SLAB)
                outcomes.append("grown")
            except (strata_client.Exhausted, strata_client.LeaseRevoked) as error:
                outcomes.append(error.reason)

        threads = [threading.Thread(target=grow, args=(memory,)) for memory in (mine, yours)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 2
        assert (mine.size_bytes + yours.size_bytes) // SLAB == _kv_slabs(admin) <= SLABS
    wait_until(lambda: _is_free(admin), otherwise=lambda: str(admin.status()))


# Threads, processes, event loops, the daemon's end


def test_threads_may_share_a_client_and_a_range(admin: Admin, client: Client) -> None:
    """Eight threads that grow, shrink, look and close leave sizes and bytes as they must be."""
    shared = client.range(SLAB, max_bytes=4 * SLAB)
    _array(shared)[:] = 3
    wrong: list[BaseException] = []

    def hammer(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(15):
                with client.range(max_bytes=SLAB) as own:
                    try:
                        own.grow(SLAB)
                        _array(own)[:] = seed
                        assert (_array(own) == seed).all()
                    except strata_client.Exhausted:
                        pass
                try:
                    shared.grow(int(random.integers(1, 5)) * SLAB)
                    shared.shrink(SLAB)
                except (strata_client.LeaseRevoked, strata_client.InvalidRequest):
                    pass  # shrunk, or looked at, by another thread
                assert (np.asarray(shared.view(SLAB)) == 3).all()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    gc.collect()
    shared.shrink(SLAB)
    assert _kv_slabs(admin) == 1
    assert client.troubles == []
    wait_until(lambda: not admin.status().quarantines)


FORKS = """
import os, sys
import numpy as np
import strata_client

client = strata_client.connect(sys.argv[1])
memory = client.range(65536, max_bytes=131072)
view = memory.view()
np.asarray(view)[:] = 4
child = os.fork()
if child == 0:
    wrong = []
    for use in (client.devices, lambda: client.range(1), lambda: memory.grow(131072), lambda: memory.shrink(0),
                memory.view, lambda: np.asarray(view), lambda: np.from_dlpack(view)):
        try:
            use()
            wrong.append("allowed")
        except strata_client.PermissionDenied as error:
            if f"process {os.getpid()} was forked off" not in error.message:
                wrong.append(error.message)
    with memory:
        pass
    client.close()
    os._exit(1 if wrong else 0)
_, status = os.waitpid(child, 0)
memory.grow(131072)
print(os.waitstatus_to_exitcode(status), memory.size_bytes, set(np.asarray(view).tolist()), flush=True)
del view
memory.close()
client.close()
"""


def test_a_forked_child_gets_nothing_and_takes_nothing(daemon: Daemon) -> None:
    """Every use in it is refused; closing there, and its end, leave the parent's memory as it was."""
    argv = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKS, os.fspath(daemon.directory)]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert done.stdout.decode() == "0 131072 {4}\n", done.stderr.decode()


def test_coroutines_are_not_kept_waiting(daemon: Daemon) -> None:
    """All that blocks has a form that does not, and coroutine callbacks run on the loop of whoever made the range."""

    async def scenario() -> None:
        loops: list[tuple[str, asyncio.AbstractEventLoop]] = []

        async def on_growth(memory: Range, before_bytes: int) -> None:
            loops.append((f"{before_bytes // SLAB} to {memory.size_bytes // SLAB}", asyncio.get_running_loop()))

        async def on_shrink(memory: Range, size_bytes: int, deadline_s: float) -> int:
            await asyncio.sleep(0.01)
            loops.append((f"keep {size_bytes // SLAB}", asyncio.get_running_loop()))
            return size_bytes

        async def told(count: int) -> None:
            """Callbacks come when the thread of the client's own gets to them."""
            while len(loops) < count:
                await asyncio.sleep(0.01)

        async with await strata_client.connect_async(daemon.directory) as client:
            async with await client.range_async(
                2 * SLAB, max_bytes=16 * SLAB, on_growth=on_growth, on_shrink=on_shrink
            ) as lent:
                await told(1)
                await lent.grow_async(16 * SLAB)
                await told(2)
                async with await client.range_async(SLAB) as memory:
                    assert memory.size_bytes == SLAB
                    assert lent.size_bytes == 15 * SLAB
                await lent.shrink_async()
            assert {loop for _, loop in loops} == {asyncio.get_running_loop()}
            assert [what for what, _ in loops] == ["0 to 2", "2 to 16", "keep 15"]
            assert client.troubles == []

    asyncio.run(scenario())


def test_a_coroutine_needs_its_loop() -> None:
    """Without one it is refused; one that has been closed, or that stands still past the deadline, gives nothing."""
    with running_daemon(CONFIG.format(1000)) as running, strata_client.connect(running.directory) as client:
        _check_loops(client)


def _check_loops(client: Client) -> None:

    async def on_shrink(memory: Range, size_bytes: int, deadline_s: float) -> None:
        await asyncio.sleep(60)

    with pytest.raises(strata_client.InvalidRequest, match="needs a running event loop"):
        client.range(SLAB, on_shrink=on_shrink)

    async def make() -> Range:
        lent = await client.range_async(16 * SLAB, on_shrink=on_shrink)
        with pytest.raises(strata_client.Exhausted):
            await client.range_async(SLAB)
        while not client.troubles:  # its deadline is a moment after the daemon's, as it heard of it later
            await asyncio.sleep(0.01)
        return lent

    lent = asyncio.run(make())
    assert "TimeoutError" in client.troubles[0]
    lent.shrink(15 * SLAB)
    lent.grow(16 * SLAB)
    with pytest.raises(strata_client.Exhausted):
        client.range(SLAB)
    wait_until(lambda: len(client.troubles) > 1)  # the first answer may have come so late as to be the second's
    assert "event loop of a range's callbacks is closed" in client.troubles[1]
    assert lent.size_bytes == 16 * SLAB


def test_what_is_mapped_outlives_the_daemon() -> None:
    """A killed daemon takes no memory along: views stay, growths are refused, and the client can be closed."""
    with running_daemon(CONFIG.format(1000)) as running:
        client = strata_client.connect(running.directory)
        memory = client.range(SLAB, max_bytes=2 * SLAB)
        array = _array(memory)
        array[:] = 6
        running.kill()
        wait_until(lambda: client.gone != "")
        with pytest.raises(strata_client.Unavailable, match="has gone"):
            memory.grow(2 * SLAB)
        assert (array == 6).all()
        del array
        client.close()


def test_a_program_may_end_without_closing(daemon: Daemon, admin: Admin) -> None:
    """With views alive in every way; it ends at once and silently, and nothing of it is left."""
    code = (
        "import sys, numpy, strata_client; client = strata_client.connect(sys.argv[1]);"
        "memory = client.range(65536, on_shrink=print); view = memory.view();"
        "arrays = [numpy.asarray(view), numpy.from_dlpack(memory.view()), memory.view().__dlpack__()]"
    )
    argv = [sys.executable, "-X", "dev", "-c", code, os.fspath(daemon.directory)]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    wait_until(lambda: not _kv_slabs(admin))


def test_closing_a_client_ends_what_its_threads_wait_for(daemon: Daemon, admin: Admin) -> None:
    """A growth that waits for a lender comes back with an error, and nothing of it is left."""
    with strata_client.connect(daemon.directory) as lender:
        go_on = threading.Event()

        def on_shrink(memory: Range, size_bytes: int, deadline_s: float) -> None:
            go_on.wait(60)

        lent = lender.range(16 * SLAB, on_shrink=on_shrink)
        client = strata_client.connect(daemon.directory)
        memory = client.range(max_bytes=2 * SLAB)
        errors: list[strata_client.VmmError] = []

        def grow() -> None:
            try:
                memory.grow(2 * SLAB)
            except strata_client.VmmError as error:
                errors.append(error)

        thread = threading.Thread(target=grow)
        thread.start()
        wait_until(lambda: admin.status().daemon.growths.waiting == 1)
        client.close()
        thread.join(60)
        assert len(errors) == 1
        go_on.set()
        wait_until(lambda: len(admin.status().sessions) == 1 and not admin.status().daemon.growths.waiting)
        with pytest.raises(strata_client.Unavailable, match="session is closed"):
            client._session.devices()
        assert lent.size_bytes in (14 * SLAB, 16 * SLAB)


def test_without_a_daemon_a_private_one_serves_who_wants_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the error says where none was found."""
    with pytest.raises(strata_client.NoDaemon, match=re.escape(str(tmp_path))):
        strata_client.connect(tmp_path)
    with strata_client.connect(tmp_path, private=True) as client, client.range(1) as memory:
        assert client.is_private
        assert memory.size_bytes == client.devices()[0].slab_bytes


def test_importing_the_package_imports_no_library() -> None:
    """The command line starts without it; every public name is there once it is asked for."""
    code = (
        "import sys, strata_client; before = set(sys.modules);"
        "names = {n: getattr(strata_client, n) for n in strata_client.__all__};"
        "print('numpy' in before, 'grpc' in before, len(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout.decode() == f"False False {len(strata_client.__all__)}\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = strata_client.nothing  # type: ignore[attr-defined]
