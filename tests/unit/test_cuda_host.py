"""The host's emulation of CUDA, which the kernels' tests rely on."""

import ctypes
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.cuda_host import GuardedMemory, HostKernelError, HostKernels, require_host_compiler, watching

SOURCE = Path(__file__).with_name("cuda_host_kernels.cu")


class Pair(ctypes.Structure):
    _fields_ = (("values", ctypes.c_uint64), ("n", ctypes.c_int32))


@pytest.fixture(scope="module")
def host() -> HostKernels:
    """The kernels beside this file."""
    require_host_compiler()
    return HostKernels.compile(SOURCE)


def floats(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def test_coordinates(host: HostKernels) -> None:
    """Grids and blocks have three dimensions, and every thread of them runs."""
    grid, block = (2, 3, 4), (5, 2, 3)
    out = np.zeros(24 * 30, np.uint32)
    host.launch("coordinates", grid, block, [out])
    z, y, x, k, j, i = np.indices(grid[::-1] + block[::-1])
    assert np.array_equal(out, (i | j << 4 | k << 8 | x << 12 | y << 16 | z << 20).ravel())


def test_arguments(host: HostKernels) -> None:
    """Structs go by value; other sizes or another number than the kernel's are refused."""
    values, out = floats(20), np.zeros(32, np.float32)
    pair = Pair(values.ctypes.data, 20)
    host.launch("arguments", 1, 32, [pair, ctypes.c_double(2), ctypes.c_int64(3), out])
    assert np.array_equal(out[:20], (values * np.float64(2) + 3).astype(np.float32)) and not out[20:].any()
    for wrong in ([pair, 2.0, ctypes.c_int64(3), out], [pair, ctypes.c_double(2), 3, out], [pair]):
        with pytest.raises(HostKernelError, match=r"arguments of \[16, 8, 8, 8\] bytes"):
            host.launch("arguments", 1, 32, wrong)
    with pytest.raises(HostKernelError, match="no kernel unknown"):
        host.launch("unknown", 1, 1, [])
    with pytest.raises(HostKernelError, match="1025 threads"):
        host.launch("coordinates", 1, 1025, [out])


def test_sum(host: HostKernels) -> None:
    """Shuffles, shared memory and a barrier add a block's values up; a missing barrier is seen."""
    values = np.arange(4 * 256, dtype=np.float32)
    out = np.zeros(4, np.float32)
    host.launch("sum", 4, 256, [values, out])
    assert np.array_equal(out, values.reshape(4, 256).sum(1))
    host.launch("sum_unsynchronized", 1, 256, [values, out])
    assert np.isnan(out[0])


def test_both_orders_of_threads(host: HostKernels) -> None:
    """A barrier that is missing only before the next write is seen as well."""
    values = floats(128)
    good, bad = values.copy(), values.copy()
    host.launch("rotate_three", 1, 128, [good], shared_bytes=512)
    assert np.array_equal(good, np.roll(values, -3))
    host.launch("rotate_without_second_barrier", 1, 128, [bad], shared_bytes=512)
    assert not np.array_equal(bad, good)


def test_warp_operations(host: HostKernels) -> None:
    """Shuffles with and without a width, votes, reductions and barriers with a predicate do what CUDA's do."""
    v = np.random.default_rng(1).integers(1, 1000, 32).astype(np.int32)
    out = np.zeros((32, 16), np.int32)
    host.launch("warp", 1, 32, [v, out])
    lane = np.arange(32)
    up, down = lane - 2, lane + 7
    wanted = [
        v[(lane + 5) % 32],
        v[lane // 8 * 8 + 3],
        v[np.where(up >= 0, up, lane)],
        v[np.where(lane % 16 >= 3, lane - 3, lane)],
        v[np.where(down < 32, down, lane)],
        v[np.where(lane % 4 < 3, lane + 1, lane)],
        v[lane ^ 21],
        np.full(32, np.uint32(sum(1 << int(i) for i in lane if v[i] % 3 == 0)).view(np.int32)),
        np.full(32, 1),
        np.full(32, v.sum()),
        np.full(32, v.max()),
        np.full(32, np.bitwise_xor.reduce(v)),
    ]
    for column, expected in enumerate(wanted):
        assert np.array_equal(out[:, column], expected), column
    matches = [sum(1 << int(j) for j in lane if v[j] % 4 == v[i] % 4) for i in lane]
    assert np.array_equal(out[:, 12].view(np.uint32), np.array(matches, np.uint32))
    assert np.array_equal(out[:, 13], v[lane ^ 1])
    assert np.array_equal(out[:, 14], np.full(32, np.count_nonzero(v % 2) + 100 + 1000))
    assert np.array_equal(out[:, 15], np.where(lane < 16, v[(15 - lane) % 16], v[16:].min()))


def test_atomics(host: HostKernels) -> None:
    """Atomics of every width add up over blocks."""
    words, number, wide = np.zeros(6, np.uint32), np.zeros(1, np.float32), np.zeros(1, np.uint64)
    host.launch("atomics", 3, 64, [words, number, wide])
    assert words.tolist() == [384, 63, 92, 1, 7, 0xFFFFFFFF]
    assert number[0] == 96 and wide[0] == 192 << 33


@pytest.mark.parametrize("name", ["multiply_f16", "multiply_bf16"])
def test_tensor_cores(host: HostKernels, name: str) -> None:
    """Fragments lie in the lanes as the PTX manual says, and sums are float32."""
    a, b, c = floats(256).reshape(16, 16), floats(128, 1).reshape(16, 8), floats(128, 2).reshape(16, 8)
    if name == "multiply_f16":
        left, right = a.astype(np.float16), b.astype(np.float16)
        a_bits, b_bits = left.view(np.uint16), np.ascontiguousarray(right.T).view(np.uint16)
    else:
        left, right = ((x.view(np.uint32) & 0xFFFF0000).view(np.float32) for x in (a, b))
        a_bits, b_bits = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (left, np.ascontiguousarray(right.T)))
    d = c.copy()
    host.launch(name, 1, 32, [a_bits, b_bits, d])
    assert np.allclose(d, left.astype(np.float64) @ right.astype(np.float64) + c, rtol=1e-6, atol=1e-6)


def test_matrices_from_shared_memory(host: HostKernels) -> None:
    """ldmatrix, plain and transposed, gives the tensor cores' fragments of row-major matrices."""
    a, b = floats(256).reshape(16, 16).astype(np.float16), floats(128, 1).reshape(16, 8).astype(np.float16)
    d = np.zeros((16, 8), np.float32)
    a_memory, b_memory = GuardedMemory(a.nbytes), GuardedMemory(b.nbytes)
    a_memory.array[:] = a.reshape(-1).view(np.uint8)
    b_memory.array[:] = b.reshape(-1).view(np.uint8)
    addresses = [ctypes.c_uint64(memory.address) for memory in (a_memory, b_memory)]
    host.launch("multiply_from_shared", 1, 32, [*addresses, d])
    assert np.allclose(d, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-6, atol=1e-6)


def test_copies_arrive_when_waited_for(host: HostKernels) -> None:
    """A group of copies is poison until it is waited for; what is not valid is zeros."""
    memory = GuardedMemory(32)  # the third word, which is not read, lies on the inaccessible page
    memory.array[:] = np.arange(32)
    data = memory.array.view(np.uint32)
    poison = np.uint32(0xFFFFFFFF)
    for pending, arrived in ((0, 3), (1, 2), (3, 0)):
        out = GuardedMemory(48)
        arguments = [ctypes.c_uint64(memory.address), ctypes.c_uint64(out.address)]
        host.launch(f"copies_pending_{pending}", 1, 1, arguments)
        words = out.array.view(np.uint32).reshape(3, 4)
        for i, wanted in enumerate((data[:4], data[4:], np.zeros(4, np.uint32))):
            assert np.array_equal(words[i], wanted if i < arrived else np.full(4, poison)), (pending, i)


def test_halves(host: HostKernels) -> None:
    """float16 and bfloat16 round to nearest even, once, at every size; infinities, subnormals and NaN included."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 4000, np.uint32)
    near = np.arange(1 << 16, dtype=np.uint16)[::37].view(np.float16).astype(np.float32)
    ties = (near.view(np.uint32) + np.uint32(0x1000)).view(np.float32)
    small = (rng.standard_normal(1000) * 2.0 ** rng.integers(-26, -10, 1000)).astype(np.float32)
    values = np.concatenate([bits.view(np.float32), near, ties, small, floats(1000)])
    out = np.zeros((values.size, 6), np.uint16)
    host.launch("halves", 1, 64, [values, out, values.size])
    with np.errstate(all="ignore"):
        half = values.astype(np.float16)
        other = half[::-1]
        wide, wide_other = half.astype(np.float64), other.astype(np.float64)
        wanted = (half, None, half + other, half * other, other - other, (wide * wide_other + wide).astype(np.float16))
        for column, expected in enumerate(wanted):
            if expected is None:
                continue
            got, nan = out[:, column].view(np.float16), np.isnan(expected)
            assert np.array_equal(np.isnan(got), nan), column
            assert np.array_equal(out[~nan, column], expected[~nan].view(np.uint16)), column
        word = values.view(np.uint32).astype(np.uint64)
        rounded = (word + 0x7FFF + (word >> 16 & 1)) >> 16
        nan = np.isnan(values)
        assert np.array_equal(out[~nan, 1], rounded[~nan]) and np.all(out[nan, 1] == 0x7FFF)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("divergent_barrier", r"threads 0 to 31 wait at __syncthreads \(.*kernels.cu:\d+\); threads 32 to 63 ended"),
        ("different_barriers", r"threads 0 to 31 wait at __syncthreads.*; threads 32 to 63 wait at __syncthreads"),
        ("divergent_shuffle", r"wait at __shfl_xor_sync of lanes 0xffffffff.*; threads 7 to 7 ended"),
    ],
)
def test_divergence_is_reported(host: HostKernels, name: str, message: str) -> None:
    """A barrier or a warp's operation that a thread does not reach ends the launch, and is told with its line."""
    with pytest.raises(HostKernelError, match=message):
        host.launch(name, 2, 64, [np.zeros(64, np.int32)])


def test_accesses_beyond_a_buffer(host: HostKernels) -> None:
    """Reading and writing past the end are reported with the thread, the place and the line; later launches run."""
    memory, out = GuardedMemory(40), np.zeros(64, np.uint32)
    address = ctypes.c_uint64(memory.address)
    with pytest.raises(HostKernelError, match=r"byte 48 of a buffer of 40; at cuda_host_kernels\.cu:\d+"):
        host.launch("copy_at", 1, 1, [address, out, 12, 0])
    with pytest.raises(HostKernelError, match=r"block \(0, 0, 0\), thread \(0, 0, 0\): memory that is not mapped"):
        host.launch("copy_at", 1, 1, [out, address, 0, 12])
    host.launch("copy_at", 1, 1, [out, address, 0, 9])
    memory.check()
    for place in (10, -1):
        host.launch("copy_at", 1, 1, [out, address, 0, place])
        with pytest.raises(HostKernelError, match=r"written just (before|behind) a buffer of 40 bytes"):
            memory.check()


def test_other_faults(host: HostKernels) -> None:
    """Misaligned loads, divisions by zero, endless loops and stacks that overflow are errors, not the end of Python."""
    memory = GuardedMemory(64)
    out = GuardedMemory(16)
    arguments = [ctypes.c_uint64(memory.address), ctypes.c_uint64(out.address)]
    with pytest.raises(HostKernelError, match=r"misaligned.*cuda_host_kernels\.cu:\d+"):
        host.launch("misaligned", 1, 1, arguments)
    with pytest.raises(HostKernelError, match="division by zero"):
        host.launch("divide", 1, 1, [np.array([1, 0], np.int32)])
    with pytest.raises(HostKernelError, match="takes too long"):
        host.launch("endless", 1, 1, [np.zeros(1, np.int32)], seconds=1)
    with pytest.raises(HostKernelError, match="memory that is not mapped"):
        host.launch("overflow_stack", 1, 1, [np.zeros(1, np.int32), 100_000])


def test_threads_that_wait_let_others_run(host: HostKernels) -> None:
    """A thread that sleeps until another has stored something goes on afterwards."""
    flag = np.zeros(2, np.int32)
    host.launch("wait_for_flag", 1, 96, [flag])
    assert flag.tolist() == [1, 1]


def test_shared_memory(host: HostKernels) -> None:
    """Each block finds poison in shared memory, and none may go past what the launch asked for."""
    out = np.zeros(8, np.uint32)
    host.launch("fresh_shared", 4, 1, [out], shared_bytes=16)
    assert np.array_equal(out.reshape(4, 2), [[0xFFFFFFFF, 0xFF]] * 4)
    host.launch("beyond_dynamic_shared", 1, 1, [15], shared_bytes=16)
    with pytest.raises(HostKernelError, match="memory that is not mapped"):
        host.launch("beyond_dynamic_shared", 1, 1, [16], shared_bytes=16)
    with pytest.raises(HostKernelError, match="232448 are the most"):
        host.launch("beyond_dynamic_shared", 1, 1, [0], shared_bytes=232449)


def test_compile_errors(host: HostKernels, tmp_path: Path) -> None:
    """A source that does not compile raises the compiler's messages."""
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void broken(int* x) { x[0] = unknown; }\n')
    with pytest.raises(HostKernelError, match="'unknown' was not declared"):
        HostKernels.compile(path)


@pytest.fixture(scope="module")
def watched() -> HostKernels:
    """The kernels beside this file, whose accesses are watched."""
    require_host_compiler()
    with watching():
        return HostKernels.compile(SOURCE)


def test_watched_barriers(watched: HostKernels) -> None:
    """Accesses to shared memory with no barrier between are errors, those of lanes and of copies included."""
    values, out = floats(64), np.zeros(64, np.float32)
    watched.launch("rotate_three", 1, 128, [floats(128)], shared_bytes=512)
    with pytest.raises(HostKernelError, match=r"dynamic shared memory, which thread \d+ (wrote|read), with nothing"):
        watched.launch("rotate_without_second_barrier", 1, 128, [floats(128)], shared_bytes=512)
    with pytest.raises(HostKernelError, match=r"writes byte \d+ of static .* read, .*; at .*cu:\d+.*; before at .*cu:"):
        watched.launch("sum_unsynchronized", 1, 256, [floats(256), out])
    watched.launch("sum", 1, 256, [floats(256), out])
    watched.launch("swaps", 1, 32, [values, out])
    assert np.array_equal(out[:32], values[:32].reshape(16, 2)[:, ::-1].ravel())
    with pytest.raises(HostKernelError, match=r"of static shared memory, which thread \d+ (wrote|read)"):
        watched.launch("swaps_without_barrier", 1, 32, [values, out])
    words, copied = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    memory, target = GuardedMemory(1024), GuardedMemory(1024)
    memory.array[:] = words.view(np.uint8)
    addresses = [ctypes.c_uint64(memory.address), ctypes.c_uint64(target.address)]
    watched.launch("copies_for_others", 1, 64, addresses, shared_bytes=1024)
    copied[:] = target.array.view(np.uint32)
    assert np.array_equal(copied, np.roll(words, -4))
    with pytest.raises(HostKernelError, match=r"touches .* while a copy by thread \d+ is on its way"):
        watched.launch("copies_without_waiting", 1, 64, addresses, shared_bytes=1024)
    with pytest.raises(HostKernelError, match=r"of static shared memory, which thread \d+ (wrote|read), with nothing"):
        watched.launch("copies_too_early", 1, 64, addresses)


def test_watched_blocks(watched: HostKernels) -> None:
    """What other blocks wrote may be read after an atomic alone."""
    values, parts, out, counter = floats(8), np.zeros(8, np.float32), np.zeros(1, np.float32), np.zeros(1, np.uint32)
    watched.launch("adds_blocks", 8, 32, [values, parts, out, counter])
    assert np.isclose(out[0], values.sum(dtype=np.float64), atol=1e-5)
    with pytest.raises(HostKernelError, match=r"reads global memory at .*, which block number 0 wrote"):
        watched.launch("adds_blocks_unordered", 8, 32, [values, parts, out, counter])


def test_watched_starts(watched: HostKernels) -> None:
    """What a kernel that starts early does before it waits must not concern what the kernel before it does."""
    a, b, c = (floats(32, seed) for seed in range(3))
    first = watched.launch("adds_one", 1, 32, [a, b])
    second = watched.launch("adds_one", 1, 32, [b, c], before=first)
    assert np.allclose(c, a + 2)
    watched.launch("adds_one_read_early", 1, 32, [a, b], before=second)
    watched.launch("adds_one_read_early", 1, 32, [c, b])  # all has ended before
    for name, source, message in (
        ("adds_one_read_early", c, "reads global memory at .*, which the kernel before wrote, before it waits"),
        ("adds_one_written_early", a, "writes global memory at .* before it waits"),
        ("adds_one_started_early", a, r"let_next_start \(.*cu:\d+\) before it waits"),
        ("waits_never", a, "no thread waits"),
    ):
        before = watched.launch("adds_one", 1, 32, [a, c])
        with pytest.raises(HostKernelError, match=message):
            watched.launch(name, 1, 32, [source, b], before=before)
