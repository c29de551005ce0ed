"""What `strata-client inspect` prints of a model file."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

from strata_client.models.base import ModelError
from strata_client.models.gguf_file import ModelFile
from strata_client.models.qwen3moe import Qwen3Moe
from strata_client.text import escape_controls

SLAB_MIB = (1, 2, 4, 8, 16, 32, 64)
MATRIX_ALIGNMENT_BYTES = 256  # of an expert's matrices within a slot
_MIB = 1 << 20


def inspect_lines(model_file: ModelFile) -> list[str]:
    """Lines about a model, safe to print on a terminal.

    They say what the file holds, and how its experts would fill slabs of several sizes. A sound
    file that cannot be run has a line that says why instead of the latter.
    """
    return [escape_controls(line, keep="") for line in _lines(model_file)]


def _lines(model_file: ModelFile) -> Iterator[str]:
    total_bytes = sum(part.size_bytes for part in model_file.files)
    for key in ("general.name", "general.architecture", "general.description", "tokenizer.ggml.pre"):
        if key in model_file.metadata:
            yield f"{key}: {model_file.metadata[key]}"
    yield f"files: {len(model_file.files)}, {_size(total_bytes)}"
    for part in model_file.files:
        yield f"  {part.path}: {_size(part.size_bytes)}"

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in model_file.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.size_bytes
    yield f"tensors: {len(model_file.tensors)}"
    for kind, size_bytes in sizes.most_common():
        yield f"  {kind}: {counts[kind]} tensors, {_size(size_bytes)}"

    try:
        model = Qwen3Moe(model_file)
    except ModelError as error:
        yield f"cannot be run here: {error}"
        return
    yield from _shape_lines(model)
    yield from _memory_lines(model)


def _shape_lines(model: Qwen3Moe) -> Iterator[str]:
    params = model.params
    yield f"layers: {params.n_layers}, width {params.d_model}, context {params.context_length}"
    if params.n_extra_layers:
        yield f"extra prediction layers: {params.n_extra_layers}, left out"
    yield f"attention: {params.n_heads} heads, {params.n_kv_heads} K/V heads of {params.head_dim}"
    if params.rope_scale != 1:
        yield f"rope: linear scaling, factor {1 / params.rope_scale:g}"
    yield f"experts: {params.n_experts} a layer, {params.top_k} a token, inner width {params.d_expert}"
    padding = params.n_vocab - params.n_tokens
    yield f"vocabulary: {params.n_tokens} tokens" + (f", {padding} rows without a token" if padding else "")
    yield "output: " + ("tied to the embedding, one matrix for both" if model.tied_output else "a matrix of its own")


def _memory_lines(model: Qwen3Moe) -> Iterator[str]:
    params = model.params
    experts = [model.expert_bytes(*place) for place in product(range(params.n_layers), range(params.n_experts))]
    sizes = [sum(matrices) for matrices in experts]
    yield f"weights: {_size(sum(extent.length_bytes for extent in model.weight_extents()))} besides the experts"
    yield f"expert: {_size(min(sizes))}" + (f" to {_size(max(sizes))}" if min(sizes) < max(sizes) else "")
    yield f"experts in all: {len(experts)}, {_size(sum(sizes))}"
    yield f"K/V: {_size(model.kv_cell_bytes)} a token in float32"
    classes = Counter(sum(-(-size // MATRIX_ALIGNMENT_BYTES) * MATRIX_ALIGNMENT_BYTES for size in e) for e in experts)
    for slot_bytes, count in sorted(classes.items()):
        yield f"slots of {_size(slot_bytes)} for {count} experts:"
        for slab_mib in SLAB_MIB:
            slots = slab_mib * _MIB // slot_bytes
            if not slots:
                yield f"  slab of {slab_mib} MiB: too small for an expert"
                continue
            waste = 1 - slots * slot_bytes / (slab_mib * _MIB)
            yield f"  slab of {slab_mib} MiB: {slots} slots, {waste:.1%} wasted, {-(-count // slots)} slabs for all"


def _size(n_bytes: int) -> str:
    """A number of bytes, also in a larger unit where that reads better."""
    for unit, name in ((1 << 30, "GiB"), (_MIB, "MiB")):
        if n_bytes >= unit:
            return f"{n_bytes} bytes ({n_bytes / unit:.2f} {name})"
    return f"{n_bytes} bytes"
