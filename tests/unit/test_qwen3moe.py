"""The model against transformers' logits, in all forms that a file can have."""

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from strata_client.models.base import ModelError
from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe import Qwen3Moe
from tests.helpers.file_memory import ArrayCache, FileMemory, greedy
from tests.helpers.gguf_builder import DATA, Tensor, build, load, small_keys, small_tensors, tensor_bytes

SHIPPED = Path(__file__).parents[2] / "strata_client" / "data" / "tiny-IQ3_S.gguf"
TOLERANCE = 1e-3


@contextmanager
def opened(path: Path) -> Iterator[tuple[Qwen3Moe, FileMemory]]:
    with open_model_file(str(path)) as model_file:
        model = Qwen3Moe(model_file)
        yield model, FileMemory(model_file, model)


@contextmanager
def built(
    tmp_path: Path, keys: dict[str, Any], tensors: list[Tensor], **how: Any
) -> Iterator[tuple[Qwen3Moe, FileMemory]]:
    path = tmp_path / "built.gguf"
    path.write_bytes(build(keys, tensors, **how))
    with opened(path) as found:
        yield found


def assert_reference(model: Qwen3Moe, memory: FileMemory, name: str) -> None:
    """Logits and greedy tokens are those of a file of references."""
    with np.load(DATA / f"ref-{name}.npz") as reference:
        prompts = [n for n in range(3) if f"ids_{n}" in reference]
        for n in prompts:
            ids, wanted = reference[f"ids_{n}"], reference[f"greedy_{n}"].tolist()
            cache = ArrayCache(model, len(ids))
            logits = model.forward(ids, 0, memory, cache, prompt=True, all_logits=True)
            assert logits.dtype == np.float32
            assert np.abs(logits - reference[f"logits_{n}"]).max() <= TOLERANCE
            assert greedy(model, memory, ids.tolist(), len(wanted)) == wanted
    assert len(prompts) >= 2


def refuse(tmp_path: Path, says: str, keys: dict[str, Any], tensors: list[Tensor]) -> None:
    with pytest.raises(ModelError, match=says) as caught, built(tmp_path, keys, tensors):
        pass
    assert len(str(caught.value).splitlines()) == 1
    assert not any(word in str(caught.value) for word in ("truncated", "corrupt"))


def test_shipped_model_gives_the_reference_logits() -> None:
    """The shipped model's logits and 64 greedy tokens are transformers', for three prompts."""
    with opened(SHIPPED) as (model, memory):
        assert_reference(model, memory, "IQ3_S")


def test_decoding_is_fast_enough_to_try() -> None:
    """64 tokens of the shipped model take well under two seconds of this thread's time."""
    with opened(SHIPPED) as (model, memory):
        greedy(model, memory, [0, 47], 64)
        start = time.thread_time()
        greedy(model, memory, [0, 47], 64)
        assert time.thread_time() - start < 2


@pytest.mark.parametrize("name", ["micro", "nano"])
def test_cuts_give_the_reference_logits(name: str) -> None:
    """Small models of fewer layers, experts and tokens give transformers' logits."""
    with opened(DATA / f"{name}.gguf") as (model, memory):
        assert_reference(model, memory, name)


def test_tied_output(tmp_path: Path) -> None:
    """Without output.weight the embedding is the output matrix, and it is in the weights once."""
    keys, tensors = load("micro.gguf")
    with built(tmp_path, keys, [t for t in tensors if t.name != "output.weight"]) as (model, memory):
        assert model.tied_output
        assert [extent.name for extent in model.weight_extents()].count("token_embd.weight") == 1
        assert_reference(model, memory, "tied")


def separate(tensors: list[Tensor]) -> list[Tensor]:
    """The same tensors with each expert's matrices on their own."""
    found = []
    for tensor in tensors:
        if "_exps." not in tensor.name:
            found.append(tensor)
            continue
        size, (prefix, _, _) = len(tensor.data) // tensor.dims[2], tensor.name.partition("_exps.")
        for e in range(tensor.dims[2]):
            part = tensor.data[e * size : (e + 1) * size]
            found.append(Tensor(f"{prefix}.{e}.weight", tensor.dims[:2], tensor.type, part))
    return found


def test_separate_experts(tmp_path: Path) -> None:
    """Experts in tensors of their own give the same logits; at equal distances they are one stack."""
    keys, tensors = load("micro.gguf")
    with built(tmp_path, keys, separate(tensors)) as (model, memory):
        assert len(model.stacks()) == 2 * 3
        assert_reference(model, memory, "micro")
    shuffled = sorted(separate(tensors), key=lambda tensor: tensor.data)
    with built(tmp_path, keys, shuffled) as (model, memory):
        assert len(model.stacks()) > 2 * 3
        assert sum(stack.count for stack in model.stacks()) == 2 * 3 * 4
        assert_reference(model, memory, "micro")


def test_alignment_64(tmp_path: Path) -> None:
    """Another alignment gives the same logits."""
    keys, tensors = load("micro.gguf")
    with built(tmp_path, keys | {"general.alignment": 64, "x": "odd"}, tensors, alignment=64) as (model, memory):
        assert_reference(model, memory, "micro")


def test_extra_prediction_layers(tmp_path: Path) -> None:
    """Layers for predicting further tokens are neither run nor given memory."""
    keys, tensors = load("micro.gguf")
    extra = [t._replace(name=t.name.replace("blk.1.", "blk.2.")) for t in tensors if t.name.startswith("blk.1.")]
    extra.append(Tensor("blk.2.nextn.eh_proj.weight", (8,), 0, bytes(32)))
    keys |= {"qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1}
    with built(tmp_path, keys, tensors + extra) as (model, memory):
        assert (model.params.n_layers, model.params.n_extra_layers) == (2, 1)
        assert {stack.layer for stack in model.stacks()} == {0, 1}
        assert not any("blk.2." in extent.name for extent in model.weight_extents())
        assert model.kv_cell_bytes == 2 * 2 * 2 * 64 * 4
        assert_reference(model, memory, "micro")


@pytest.mark.parametrize(
    ("scaling", "reference"),
    [
        ({"type": "none"}, "nano"),
        ({"type": "none", "factor": 4.0}, "nano"),
        ({"type": "linear"}, "nano"),
        ({"type": "linear", "factor": 4.0}, "rope-linear"),
        ({"factor": 4.0}, "rope-linear"),
    ],
)
def test_rope_scaling(tmp_path: Path, scaling: dict[str, Any], reference: str) -> None:
    """Linear scaling is applied, none is none."""
    keys, tensors = load("nano.gguf")
    keys |= {f"qwen3moe.rope.scaling.{name}": value for name, value in scaling.items()}
    with built(tmp_path, keys, tensors) as (model, memory):
        assert_reference(model, memory, reference)


def test_keys_with_defaults(tmp_path: Path) -> None:
    """Keys that have defaults may be absent."""
    keys, tensors = load("nano.gguf")
    names = ("attention.key_length", "attention.value_length", "rope.freq_base", "feed_forward_length", "vocab_size")
    for name in (*names, "expert_feed_forward_length"):
        del keys[f"qwen3moe.{name}"]
    with built(tmp_path, keys, tensors) as (model, memory):
        assert_reference(model, memory, "nano")


def test_mixed_types_of_layers_and_experts(tmp_path: Path) -> None:
    """Each layer, matrix and expert may have its own type, and is read as that."""
    q8, f16 = separate(small_tensors()), separate(small_tensors(GGMLQuantizationType.F16))
    mixed = [(q8, f16)[n % 2][n] for n in range(len(q8))]
    with built(tmp_path, small_keys(), mixed) as (model, memory):
        sizes = {model.expert_bytes(layer, expert) for layer in range(2) for expert in range(4)}
        kinds = (GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16)
        assert {size for matrices in sizes for size in matrices} == {tensor_bytes((32, 64), kind) for kind in kinds}
        mixed_logits = model.forward(np.int32([1, 2, 3]), 0, memory, ArrayCache(model, 3), prompt=True)
    with built(tmp_path, small_keys(), f16) as (model, memory):
        f16_logits = model.forward(np.int32([1, 2, 3]), 0, memory, ArrayCache(model, 3), prompt=True)
    assert 0 < np.abs(mixed_logits - f16_logits).max() < 0.3


def test_prompt_in_pieces_and_segments(tmp_path: Path) -> None:
    """Logits do not depend on how a prompt is cut nor on how many cells a slab holds."""
    ids = np.arange(1, 41, dtype=np.int32)
    with built(tmp_path, small_keys(), small_tensors()) as (model, memory):
        whole = model.forward(ids, 0, memory, ArrayCache(model, 40), prompt=True, all_logits=True)
        cache = ArrayCache(model, 40, segment_cells=16)
        pieces = [
            model.forward(ids[a:b], a, memory, cache, prompt=True, all_logits=True)
            for a, b in ((0, 7), (7, 8), (8, 33), (33, 40))
        ]
        last = model.forward(ids[39:], 39, memory, cache, prompt=False)
    assert whole.shape == (40, 259)
    assert last.shape == (259,)
    assert np.abs(np.concatenate(pieces) - whole).max() < 1e-4
    assert np.abs(last - whole[-1]).max() < 1e-4


def test_routing_is_counted(tmp_path: Path) -> None:
    """Each layer reports which experts each token was routed to, and whether in a prompt."""
    with built(tmp_path, small_keys(), small_tensors()) as (model, memory):
        cache = ArrayCache(model, 6)
        model.forward(np.int32([1, 2, 3, 4, 5]), 0, memory, cache, prompt=True)
        model.forward(np.int32([6]), 5, memory, cache, prompt=False)
        shapes = {place: [experts.shape for experts in lists] for place, lists in memory.heat.items()}
        assert shapes == {(layer, prompt): [(5 if prompt else 1, 2)] for layer in range(2) for prompt in (True, False)}
        assert all(0 <= experts.min() <= experts.max() < 4 for (experts,) in memory.heat.values())


def test_experts_are_asked_for_at_each_use(tmp_path: Path) -> None:
    """A decoded expert is used again only while its residency entry is unchanged."""
    with built(tmp_path, small_keys(), small_tensors()) as (model, memory):

        def run() -> np.ndarray:
            return model.forward(np.int32([1, 2, 3]), 0, memory, ArrayCache(model, 3), prompt=True)

        first = run()
        reads = memory.expert_reads
        assert np.array_equal(run(), first)
        assert memory.expert_reads == 2 * reads
        original = memory.expert
        zeros = lambda raw: raw._replace(down=np.zeros_like(raw.down))  # noqa: E731
        memory.expert = lambda layer, expert: zeros(original(layer, expert))  # type: ignore[method-assign]
        assert np.array_equal(run(), first)  # same entry: the bytes are taken as unchanged
        memory.entry = 1
        assert not np.array_equal(run(), first)


def test_cache_of_experts_is_bounded(tmp_path: Path) -> None:
    """With room for one decoded expert, or none, the logits are the same."""
    (tmp_path / "m.gguf").write_bytes(build(small_keys(), small_tensors()))
    results = []
    with open_model_file(str(tmp_path / "m.gguf")) as model_file:
        for size_bytes in (0, 3 * 64 * 32 * 4, 1 << 30):
            model = Qwen3Moe(model_file, expert_cache_bytes=size_bytes)
            memory = FileMemory(model_file, model)
            results.append(model.forward(np.arange(9, dtype=np.int32), 0, memory, ArrayCache(model, 9), prompt=True))
            kept = [m for _, matrices in model._experts._found.values() for m in matrices]
            assert sum(matrix.nbytes for matrix in kept) <= size_bytes
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


def test_rows_without_a_token_are_ruled_out() -> None:
    """Ids that no token belongs to have the logit -inf, so that they are never sampled."""
    with opened(DATA / "padded.gguf") as (model, memory):
        assert (model.params.n_vocab, model.params.n_tokens) == (275, 259)
        logits = model.forward(np.int32([0, 72]), 0, memory, ArrayCache(model, 2), prompt=True, all_logits=True)
        assert np.isneginf(logits[:, 259:]).all()
        assert np.isfinite(logits[:, :259]).all()


def test_damaged_weights(tmp_path: Path) -> None:
    """Weights that are not finite show in the logits, without a warning."""
    tensors = [t._replace(data=b"\xff" * len(t.data)) if "ffn_down" in t.name else t for t in small_tensors()]
    with built(tmp_path, small_keys(), tensors) as (model, memory):
        assert np.isnan(model.forward(np.int32([1]), 0, memory, ArrayCache(model, 1), prompt=True)).all()


def test_token_that_does_not_exist(tmp_path: Path) -> None:
    """A token beyond the embedding is refused with both numbers."""
    built_model = built(tmp_path, small_keys(), small_tensors())
    with built_model as (model, memory), pytest.raises(ModelError, match="token 259 does not exist: the model has 259"):
        model.forward(np.int32([259]), 0, memory, ArrayCache(model, 1), prompt=True)


def test_shape_of_the_shipped_model() -> None:
    """Sizes, stacks and extents of the shipped model cover its file."""
    with opened(SHIPPED) as (model, _):
        params = model.params
        assert (params.n_layers, params.n_experts, params.top_k, params.context_length) == (6, 16, 4, 4096)
        assert model.kv_cell_bytes == 6 * 2 * 2 * 64 * 4
        assert model.expert_bytes(0, 0) == (28160, 28160, 28160)
        assert [(s.layer, s.matrix, s.first_expert, s.count) for s in model.stacks()] == [
            (layer, matrix, 0, 16) for layer in range(6) for matrix in range(3)
        ]
        assert all(s.stride_bytes == s.expert_bytes == 28160 for s in model.stacks())
        assert len(model.weight_extents()) + len(model.stacks()) == 75


NEEDED_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
)


@pytest.mark.parametrize("name", NEEDED_KEYS)
def test_missing_key(tmp_path: Path, name: str) -> None:
    """A key that is needed is named in full."""
    keys = small_keys()
    del keys[f"qwen3moe.{name}"]
    refuse(tmp_path, f"lacks the key qwen3moe.{name};", keys, small_tensors())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "llama"}, "general.architecture is llama; only qwen3moe"),
        ({"general.architecture": "a\x1b"}, r"general.architecture is a\\x1b;"),
        ({"qwen3moe.block_count": 0}, "qwen3moe.block_count is 0"),
        ({"qwen3moe.block_count": 3}, "lacks the tensor blk.2."),
        ({"qwen3moe.block_count": 1 << 30}, "qwen3moe.block_count is 1073741824; it must be less than"),
        ({"qwen3moe.block_count": "2"}, "qwen3moe.block_count is 2, not one int"),
        ({"qwen3moe.expert_count": 1 << 30}, "blk.0.ffn_gate"),
        ({"qwen3moe.expert_count": 1, "qwen3moe.expert_used_count": 2}, "qwen3moe.expert_used_count is 2; it must be"),
        ({"qwen3moe.attention.head_count_kv": 3}, "qwen3moe.attention.head_count_kv is 3; it must be a divisor of 4"),
        ({"qwen3moe.attention.key_length": 15}, "qwen3moe.attention.key_length is 15; it must be even"),
        ({"qwen3moe.attention.value_length": 8}, "qwen3moe.attention.value_length is 8; it must be as long as"),
        ({"qwen3moe.rope.dimension_count": 8}, "qwen3moe.rope.dimension_count is 8; it must be"),
        ({"qwen3moe.rope.scaling.type": "yarn"}, "qwen3moe.rope.scaling.type is yarn;"),
        ({"qwen3moe.rope.scaling.factor": 0.0}, "qwen3moe.rope.scaling.factor is 0.0; it must be above 0"),
        ({"qwen3moe.rope.freq_base": float("nan")}, "qwen3moe.rope.freq_base is nan"),
        ({"qwen3moe.nextn_predict_layers": 2}, "qwen3moe.nextn_predict_layers is 2; it must be less than"),
        ({"qwen3moe.vocab_size": 258}, "qwen3moe.vocab_size is 258; it must be .* 259"),
        ({"tokenizer.ggml.tokens": ["x"] * 260}, "260 tokens, but token_embd.weight has 259 rows"),
        ({"qwen3moe.embedding_length": 64}, r"tensor token_embd.weight has the shape \(32, 259\), not \(64, 259\)"),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """A value that makes no model, or asks for what is not done here, is refused by its key."""
    refuse(tmp_path, says, small_keys() | changes, small_tensors())


@pytest.mark.parametrize(
    "tensor", [t for t in small_tensors() if "blk.1" not in t.name], ids=lambda tensor: tensor.name
)
def test_missing_and_misshapen_tensors(tmp_path: Path, tensor: Tensor) -> None:
    """A tensor that is missing or has another shape is named in full."""
    others = [other for other in small_tensors() if other.name != tensor.name]
    if tensor.name != "output.weight":
        refuse(tmp_path, f"lacks the tensor {tensor.name};", small_keys(), others)
    longer = (*tensor.dims, 2) if len(tensor.dims) < 3 else (*tensor.dims[:2], 5)
    wrong = Tensor(tensor.name, longer, tensor.type, tensor.data * 2)
    if tensor.name != "token_embd.weight":
        refuse(tmp_path, f"tensor {tensor.name} has the shape", small_keys(), [*others, wrong])


def test_missing_separate_expert(tmp_path: Path) -> None:
    """One missing matrix of one separate expert is named in full."""
    tensors = [t for t in separate(small_tensors()) if t.name != "blk.1.ffn_up.2.weight"]
    refuse(tmp_path, r"lacks the tensor blk\.1\.ffn_up\.2\.weight;", small_keys(), tensors)


def test_type_that_cannot_be_decoded(tmp_path: Path) -> None:
    """A tensor of a type without a decoder is refused by name and type."""
    tensors = [t for t in small_tensors() if t.name != "output_norm.weight"]
    tensors.append(Tensor("output_norm.weight", (32,), int(GGMLQuantizationType.I32), bytes(128)))
    refuse(tmp_path, "tensor output_norm.weight has the type I32, which cannot be decoded", small_keys(), tensors)


def test_tensor_that_nobody_knows(tmp_path: Path) -> None:
    """A tensor whose absence would change the results is refused, not left out."""
    bias = Tensor("blk.0.attn_q.bias", (64,), 0, struct.pack("<64f", *[1.0] * 64))
    refuse(tmp_path, "tensor blk.0.attn_q.bias is not part of qwen3moe", small_keys(), [*small_tensors(), bias])


def test_tokens_of_several_sequences_give_what_each_gives_alone() -> None:
    """Logits of a token of each of several sequences are those of the token alone, to the bit, at any position."""
    rng = np.random.default_rng()
    with opened(SHIPPED) as (model, memory):
        lengths = [1, 70, 17, 64]
        together, alone = ([ArrayCache(model, 80) for _ in lengths] for _ in range(2))
        for length, *caches in zip(lengths, together, alone, strict=True):
            prompt = rng.integers(0, model.params.n_tokens, length).astype(np.int32)
            for cache in caches:
                model.forward(prompt, 0, memory, cache, prompt=True)
        for step in range(4):
            tokens = rng.integers(0, model.params.n_tokens, len(lengths)).astype(np.int32)
            positions = [length + step for length in lengths]
            logits = model.decode(tokens, positions, memory, together)
            for i, cache in enumerate(alone):
                wanted = model.forward(tokens[i : i + 1], positions[i], memory, cache, prompt=False)
                assert np.array_equal(logits[i], wanted)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("form", [list, separate])
def test_stages(tmp_path: Path, is_tied: bool, form: Any) -> None:
    """A model stage by stage gives the same bits as whole, wherever it is split; each has its own tensors only."""
    tensors = [t for t in small_tensors() if not (is_tied and t.name == "output.weight")]
    ids = np.int32([1, 2, 3, 4])
    with built(tmp_path, small_keys(), form(tensors)) as (model, memory):
        wanted = model.forward(ids, 0, memory, ArrayCache(model, 4), prompt=True, all_logits=True)
        n = model.params.n_layers
        for stop in range(1, n):
            stages = [model.stage(range(stop)), model.stage(range(stop, n))]
            assert [(s.is_first, s.is_last) for s in stages] == [(True, False), (False, True)]
            memories = [FileMemory(memory._file, stage) for stage in stages]
            caches = [ArrayCache(stage, 4) for stage in stages]
            given: Any = ids
            for stage, held, cache in zip(stages, memories, caches, strict=True):
                given = stage.forward(given, 0, held, cache, prompt=True, all_logits=True)
            assert np.array_equal(given, wanted)
            # the norm that the second begins with is there twice, and a tied embedding
            extents = [stage.weight_extents() for stage in stages]
            assert len(extents[0]) + len(extents[1]) == len(model.weight_extents()) + 1 + is_tied
            assert sum(len(stage.stacks()) for stage in stages) == len(model.stacks())
            assert {s.layer for s in stages[1].stacks()} == set(range(n - stop))
            assert sum(stage.kv_cell_bytes for stage in stages) == model.kv_cell_bytes
            assert [stage.type_names() for stage in stages] == [model.type_names()] * 2
