"""The models of random weights that benches run."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata_client.models.gguf_file import open_model_file
from strata_client.models.qwen3moe_file import check_tensors, read_params
from tests.bench.make_random_gguf import PRESETS, TYPES, Options, Type, has_more_bits, random_blocks, write_model


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_distribution(kind: Type) -> None:
    """Blocks of every type have the standard deviation that was asked for, and a mean near zero."""
    blocks = random_blocks(np.random.default_rng(3), kind, 4096 if kind > Type.F16 else 1 << 20, 0.02)
    values = gguf.dequantize(blocks, kind).astype(np.float64)
    assert np.isfinite(values).all()
    assert 0.018 < values.std() < 0.022
    assert abs(values.mean()) < (0.0025 if kind == Type.Q4_0 else 0.0006)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_tiny_model_opens(tmp_path: Path, kind: Type) -> None:
    """The client takes a model of every type, with all tensors in their places."""
    path = tmp_path / "tiny.gguf"
    size_bytes = write_model(path, PRESETS["tiny"], Options(kind, mix="q4_k_m"))
    assert path.stat().st_size == size_bytes
    with open_model_file(str(path)) as model_file:
        params = read_params(model_file)
        tensors = check_tensors(model_file, params)
        assert (params.n_layers, params.n_experts, params.top_k) == (2, 8, 2)
        assert tensors["blk.0.ffn_gate_exps.weight"].type == kind
        last = max(tensors.values(), key=lambda tensor: tensor.offset_bytes)
        assert size_bytes - 32 < last.offset_bytes + last.size_bytes <= size_bytes


def test_experts_differ_and_seeds_decide(tmp_path: Path) -> None:
    """The same options give the same bytes, another seed others; no two experts are alike."""
    shape = replace(PRESETS["tiny"], layers=1)
    files = []
    for i, seed in enumerate((1, 1, 2)):
        write_model(tmp_path / f"{i}.gguf", shape, Options(Type.Q4_K, skew=1.0, seed=seed))
        files.append((tmp_path / f"{i}.gguf").read_bytes())
    assert files[0] == files[1] != files[2]
    with open_model_file(str(tmp_path / "0.gguf")) as model_file:
        tensor = model_file.tensors["blk.0.ffn_gate_exps.weight"]
        router = model_file.tensors["blk.0.ffn_gate_inp.weight"]
    parts = np.frombuffer(files[0], np.uint8)[tensor.offset_bytes :][: tensor.size_bytes].reshape(shape.experts, -1)
    assert len(np.unique(parts, axis=0)) == shape.experts
    weights = np.frombuffer(files[0], np.float32, shape.experts * shape.hidden, router.offset_bytes)
    norms = np.linalg.norm(weights.reshape(shape.experts, -1), axis=1)
    assert norms.max() > 2 * norms.min()


def test_mix() -> None:
    """Half of Qwen3-30B-A3B's layers get more bits: the first and last eighth and every third between."""
    assert [layer for layer in range(48) if has_more_bits(layer, 48)] == [
        *range(6), *range(8, 42, 3), *range(42, 48),
    ]  # fmt: skip
