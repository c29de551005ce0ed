"""Steps of several sequences through a model, on a GPU that the host plays, against the reference and each alone."""

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from strata_kernels.compiler import SOURCES as KERNELS
from strata_kernels.structs import RING_WORDS, Heat, KvCells, SampleOptions

from strata_client.gpu import batch_decoder, decoder
from strata_client.gpu.arguments import KV_TYPES
from strata_client.gpu.batch_decoder import BatchDecoder
from strata_client.models.base import F32, U8
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from tests.helpers.cuda_host import HostKernelError, require_host_compiler, watching
from tests.helpers.file_memory import ArrayCache, FileMemory
from tests.helpers.gguf_builder import DATA
from tests.helpers.host_device import HostBuffer, HostDevice, HostKernelSet
from tests.helpers.kernel_bounds import relative_error
from tests.helpers.placed_model import PlacedModel, array_at
from vmmd.errors import InvalidRequest

MICRO = DATA / "micro.gguf"
NANO = DATA / "nano.gguf"
CELLS_PER_SLAB = 32
CELLS = 96
GREEDY = SampleOptions(0, 1, 0, 1, 1, 0, 0)
ERRORS = {"f16": 3e-3, "bf16": 1e-2, "q8_0": 2e-2}
TRIES_MAX = 4


@pytest.fixture(autouse=True)
def host_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory in the place of a GPU's."""
    require_host_compiler()
    monkeypatch.setattr(decoder, "DeviceBuffer", HostBuffer)


class Run:
    """A model on a GPU that the host plays, with cells for some sequences."""

    def __init__(
        self, rng: np.random.Generator, rows_max: int, *, path: Path = MICRO, kv_type: str = "f16", n_cells: int = 8,
        all_types: bool = True,
    ) -> None:  # fmt: skip
        model_file = open_model_file(str(path))
        self.model = Qwen3Moe(model_file)
        params = self.model.params
        self.memory = FileMemory(model_file, self.model)
        self.placed = PlacedModel(self.model, self.memory)
        self.device = HostDevice(rng)
        names = ("batch_matmul", "batch_rows", "prompt_rows", "sample", "decode", f"attend_rows_{kv_type}")
        types = None if all_types else self.model.type_names()
        kernels = HostKernelSet(self.device, [KERNELS / f"{name}.cu" for name in names], types)
        slab_bytes = CELLS_PER_SLAB * params.n_layers * 2 * params.n_kv_heads * params.head_dim * 2 + 4096
        self._slabs = [HostBuffer(slab_bytes * (CELLS // CELLS_PER_SLAB)) for _ in range(n_cells)]
        self.cells = [
            KvCells(slabs.address, slab_bytes, CELLS_PER_SLAB, params.n_kv_heads, params.head_dim, KV_TYPES[kv_type])
            for slabs in self._slabs
        ]
        self._table = HostBuffer(self.placed.words.nbytes)
        ctypes.memmove(self._table.address, self.placed.words.ctypes.data, self.placed.words.nbytes)
        self._heat = [HostBuffer(8 * self.placed.in_host.size) for _ in range(2)]
        for buffer in self._heat:
            buffer.fill(0)
        self._retired = HostBuffer(8)
        self.decoder = BatchDecoder(
            cast(Any, self.device), cast(Any, kernels), self.model, cast(Any, self.placed), kv_type, rows_max,
            self._table.address, self._retired.address, Heat(*(buffer.address for buffer in self._heat)),
            in_place=lambda: cast(Any, HostKernelSet(self.device, [KERNELS / "batch_matmul_in_place.cu"])),
        )  # fmt: skip
        self.number = 7

    def begin(self, row: int, sequence: int, token: int, options: SampleOptions = GREEDY) -> None:
        """Puts a sequence of one token into a row."""
        self.decoder.set_row(row, self.cells[sequence], 0, token, options, self.seen([token]))

    def seen(self, tokens: Sequence[int]) -> U8:
        """The bits of a text's tokens."""
        bits = np.zeros(-(-self.model.params.n_vocab // 32) * 32, np.uint8)
        bits[list(tokens)] = 1
        return np.packbits(bits, bitorder="little")

    def step(self, n: int) -> tuple[list[int], F32]:
        """The tokens that n rows choose, and their logits."""
        self.number += 1
        self.decoder.launch(n, self.number)
        self.device.synchronize()
        assert array_at(self._retired.address, 1, np.uint64)[0] == self.number
        logits = array_at(self.decoder.buffers["logits"].value, (n, self.model.params.n_vocab), np.float32)
        return [int(token) for token in self.decoder.ring[self.number % RING_WORDS, :n]], logits

    @property
    def heat(self) -> npt.NDArray[np.uint64]:
        """The shared counts, uint64 `[n_layers, n_experts]`."""
        return array_at(self._heat[1].address, self.placed.in_host.shape, np.uint64)

    def close(self) -> None:
        """Looks at the guards of the memory."""
        self.decoder.close()


@pytest.fixture
def run(rng: np.random.Generator) -> Iterator[Run]:
    """micro.gguf with room for five rows."""
    run = Run(rng, 5)
    yield run
    run.close()


@pytest.mark.parametrize("path, kv_type", [(MICRO, "f16"), (NANO, "bf16"), (MICRO, "q8_0")], ids=str)
def test_steps(rng: np.random.Generator, path: Path, kv_type: str) -> None:
    """The logits are those of single steps of the reference, the tokens the likeliest, and heat is counted once.

    Where two experts are nearly equal, a row may go to the other one, and so may what follows in its sequence; so three
    quarters of them must be near, or where two sequences go astray early, those of other tokens.
    """
    for _ in range(TRIES_MAX):
        error, elsewhere = compare(rng, path, kv_type)
        if error < ERRORS[kv_type] or not elsewhere:
            break
    assert error < ERRORS[kv_type]


def compare(rng: np.random.Generator, path: Path, kv_type: str) -> tuple[float, bool]:
    """The error that three quarters of the rows are below, and whether any went to other experts."""
    run = Run(rng, 4, path=path, kv_type=kv_type)
    n, n_steps, params = 4, 12, run.model.params
    tokens = rng.integers(0, params.n_tokens, n).tolist()
    caches = [ArrayCache(run.model, n_steps) for _ in range(n)]
    for row, token in enumerate(tokens):
        run.begin(row, row, token)
    errors = []
    for position in range(n_steps):
        chosen, logits = run.step(n)
        assert chosen == logits[:, : params.n_tokens].argmax(axis=1).tolist()
        for row, token in enumerate(tokens):
            given = np.array([token], np.int32)
            wanted = run.model.forward(given, position, run.memory, caches[row], prompt=False)
            errors.append(relative_error(logits[row], wanted))
        tokens = chosen
    assert np.isfinite(errors).all()
    assert np.array_equal(run.heat.sum(axis=1), [n * n_steps * params.top_k] * params.n_layers)
    found = [np.concatenate(run.memory.heat[layer, False]).ravel() for layer in range(params.n_layers)]
    counts = np.stack([np.bincount(experts, minlength=params.n_experts) for experts in found])
    elsewhere = not np.array_equal(run.heat, counts)
    run.close()
    return float(np.quantile(errors, 0.75)), elsewhere


def test_rows_do_not_depend_on_each_other(rng: np.random.Generator, run: Run) -> None:
    """A sequence has the same tokens and logits, bit for bit, alone or beside others that come and go, in any row."""
    options = [GREEDY, SampleOptions(1.5, 0.9, 0, 1.1, 3, 50, 0), SampleOptions(1, 1, 0, 1, 9, 0, 0)]
    first = rng.integers(0, run.model.params.n_tokens, len(options)).tolist()
    alone: list[list[tuple[int, bytes]]] = []
    for sequence, (token, how) in enumerate(zip(first, options, strict=True)):
        run.begin(0, sequence, token, how)
        steps = [run.step(1) for _ in range(10)]
        alone.append([(tokens[0], logits[0].tobytes()) for tokens, logits in steps])
    found: list[list[tuple[int, bytes]]] = [[] for _ in options]

    def step(rows: Sequence[int]) -> None:
        tokens, logits = run.step(len(rows))
        for row, sequence in enumerate(rows):
            if sequence < len(options):
                found[sequence].append((tokens[row], logits[row].tobytes()))

    for row, sequence in enumerate((1, 0)):
        run.begin(row, 3 + sequence, first[sequence], options[sequence])
    for _ in range(4):
        step((1, 0))
    run.begin(2, 5, first[2], options[2])
    run.number += 20  # others' steps
    for _ in range(3):
        step((1, 0, 2))
    run.decoder.move_row(2, 0)  # sequence 1 has ended
    run.begin(2, 6, 5)
    for _ in range(3):
        step((2, 0, 9))
    assert found == [alone[0], alone[1][:7], alone[2][:6]]


def test_steps_are_ordered(rng: np.random.Generator) -> None:
    """Barriers order what threads share, and kernels that start early take nothing of the one before until they wait.

    Without the kernel between, what one takes early is of the one before it: that shows.
    """
    with watching():
        run = Run(rng, 3, all_types=False)
    for row in range(3):
        run.begin(row, row, 9 + row)
    for _ in range(2):
        run.step(3)
    for name, launch in run.decoder.launches:
        if name != "gate_up_rows":
            launch()
    with pytest.raises(HostKernelError, match=r"down_rows: .* reads .* which the kernel before wrote, before it waits"):
        run.device.synchronize()


def test_steps_run_ahead(run: Run) -> None:
    """Steps that are enqueued before the tokens of earlier ones are read choose the same."""
    run.begin(0, 0, 17)
    run.begin(1, 1, 44)
    wanted = [run.step(2)[0] for _ in range(6)]
    run.begin(0, 2, 17)
    run.begin(1, 3, 44)
    numbers = range(run.number + 1, run.number + 7)
    for number in numbers:
        run.decoder.launch(2, number)
    run.device.synchronize()
    assert [run.decoder.ring[number % RING_WORDS, :2].tolist() for number in numbers] == wanted


def test_in_place(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices that do not fit shared memory are read where they lie, with the same bits."""
    found = []
    for shared_bytes_max in (99 * 1024, 14 * 1024):
        monkeypatch.setattr(HostDevice, "shared_bytes_max", shared_bytes_max)
        run = Run(np.random.default_rng(1), 2)
        run.begin(0, 0, 5)
        run.begin(1, 1, 6)
        found.append([run.step(2)[1].tobytes() for _ in range(3)])
        assert ("_in_place" in run.decoder.__dict__) == (shared_bytes_max < 99 * 1024)
        run.close()
    assert found[0] == found[1]


def test_wrong_rows(rng: np.random.Generator, run: Run) -> None:
    """Rows that are not there are refused, and so are more rows than kernels take, and other bits."""
    for wrong in (-1, 5):
        with pytest.raises(InvalidRequest, match=f"row {wrong}; there are 0 to 4"):
            run.begin(wrong, 0, 1)
        with pytest.raises(InvalidRequest, match="there are 0 to 4"):
            run.decoder.move_row(wrong, 0)
    for n in (0, 6):
        with pytest.raises(InvalidRequest, match="there are 0 to 4"):
            run.decoder.launch(n, 1)
    with pytest.raises(InvalidRequest, match="64 bytes; these are 3"):
        run.decoder.set_row(0, run.cells[0], 0, 1, GREEDY, np.zeros(3, np.uint8))
    for rows_max in (0, 65):
        with pytest.raises(InvalidRequest, match=f"{rows_max} sequences at once; a GPU's kernels take 1 to 64"):
            Run(rng, rows_max, n_cells=1)


def test_sources() -> None:
    """The kernels of a step are in the sources that are named."""
    for name in (*batch_decoder.SOURCES, "attend_rows_f16", "batch_matmul_in_place"):
        assert (KERNELS / f"{name}.cu").is_file()
