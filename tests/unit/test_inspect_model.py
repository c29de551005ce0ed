"""What inspect prints."""

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from strata_client.inspect_model import inspect_lines
from strata_client.models.gguf_file import open_model_file
from tests.helpers.gguf_builder import DATA, Tensor, build, load, small_keys, small_tensors

SHIPPED = Path(__file__).parents[2] / "strata_client" / "data" / "tiny-IQ3_S.gguf"


def inspect(path: Path) -> str:
    with open_model_file(str(path)) as model_file:
        return "\n".join(inspect_lines(model_file))


def inspect_built(tmp_path: Path, keys: dict[str, Any], tensors: list[Tensor]) -> str:
    path = tmp_path / "built.gguf"
    path.write_bytes(build(keys, tensors))
    return inspect(path)


def test_shipped_model() -> None:
    """Name, shape, types, bytes and how experts fill slabs are there."""
    text = inspect(SHIPPED)
    for line in (
        "general.name: Strata tiny MoE (stories)",
        "general.architecture: qwen3moe",
        "files: 1, 10177216 bytes (9.71 MiB)",
        "tensors: 75",
        "  Q6_K: 1 tensors, 860160 bytes",
        "layers: 6, width 256, context 4096",
        "attention: 4 heads, 2 K/V heads of 64",
        "experts: 16 a layer, 4 a token, inner width 256",
        "vocabulary: 4096 tokens",
        "output: a matrix of its own",
        "expert: 84480 bytes",
        "experts in all: 96, 8110080 bytes (7.73 MiB)",
        "K/V: 6144 bytes a token in float32",
        "slots of 84480 bytes for 96 experts:",
        "  slab of 1 MiB: 12 slots, 3.3% wasted, 8 slabs for all",
        "  slab of 64 MiB: 794 slots, 0.0% wasted, 1 slabs for all",
    ):
        assert line in text.splitlines()


def test_tied_output_and_extra_layers(tmp_path: Path) -> None:
    """A tied output, padding, rope scaling and extra prediction layers are said."""
    keys, tensors = load("nano.gguf")
    extra = {"qwen3moe.block_count": 2, "qwen3moe.nextn_predict_layers": 1, "qwen3moe.rope.scaling.factor": 4.0}
    text = inspect_built(tmp_path, keys | extra, [t for t in tensors if t.name != "output.weight"])
    assert "output: tied to the embedding" in text
    assert "extra prediction layers: 1, left out" in text
    assert "rope: linear scaling, factor 4" in text
    assert "vocabulary: 259 tokens, 16 rows without a token" in inspect(DATA / "padded.gguf")


def test_experts_of_different_sizes(tmp_path: Path) -> None:
    """Mixed types give a range of sizes and a class of slots each."""
    plain, f16 = small_tensors(), small_tensors(GGMLQuantizationType.F16)
    text = inspect_built(
        tmp_path, small_keys(), [b if "blk.1.ffn_down" in b.name else a for a, b in zip(plain, f16, strict=True)]
    )
    assert "expert: 6528 bytes to 8448 bytes" in text
    assert "slots of 6912 bytes for 4 experts:" in text
    assert "slots of 8704 bytes for 4 experts:" in text


def test_expert_larger_than_a_slab(tmp_path: Path) -> None:
    """A slab that no expert fits is said to be too small."""
    keys, tensors = small_keys(embedding_length=1024, expert_feed_forward_length=256), []
    for tensor in small_tensors():
        dims = tuple({32: 1024, 64: 256}.get(n, n) if "ffn" in tensor.name or n == 32 else n for n in tensor.dims)
        count = 1
        for n in dims:
            count *= n
        kind = GGMLQuantizationType.F32
        if "attn_k." in tensor.name or "attn_v." in tensor.name:
            dims, count = (1024, 32), 1024 * 32
        tensors.append(Tensor(tensor.name, dims, int(kind), bytes(4 * count)))
    text = inspect_built(tmp_path, keys, tensors)
    assert "  slab of 2 MiB: too small for an expert" in text
    assert "  slab of 4 MiB: 1 slots, 25.0% wasted, 8 slabs for all" in text


def test_what_cannot_be_run(tmp_path: Path) -> None:
    """A sound file of another architecture is still described, with the reason why it cannot be run."""
    text = inspect_built(tmp_path, small_keys(architecture="llama"), small_tensors())
    assert "tensors: 27" in text
    assert "cannot be run here: general.architecture is llama" in text


def test_names_that_are_terminal_commands() -> None:
    """Control characters of the file are printed escaped."""
    text = inspect(DATA / "escapes.gguf")
    assert "general.name: nice\\x1b[2J\\x1b]0;owned\\x07 model" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
