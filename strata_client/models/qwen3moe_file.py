"""What a `qwen3moe` GGUF file must hold: its keys with their defaults, its tensors with their shapes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from strata_kernels.reference import can_dequantize

from strata_client.models.base import ModelError
from strata_client.models.gguf_file import ArrayLength, ModelFile, TensorInfo
from strata_client.text import escape_controls

ARCHITECTURE = "qwen3moe"
MATRICES = ("ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True)
class Params:
    """The shape of a model.

    Attributes:
        n_layers: layers that are run.
        n_extra_layers: layers for predicting further tokens, after those; left out.
        context_length: token positions that it was made for.
        d_model: width of the residual stream (`embedding_length`).
        n_heads: query heads of a layer.
        n_kv_heads: K/V heads of a layer.
        head_dim: width of a head.
        n_experts: routed experts of a layer.
        top_k: experts that a token is routed to.
        d_expert: inner width of an expert.
        n_vocab: rows of the embedding.
        n_tokens: tokens of the vocabulary; ids from here to `n_vocab` stand for nothing.
        rms_eps: epsilon of the norms.
        rope_freq_base: base of the rotary frequencies.
        rope_scale: what positions are multiplied by.
    """

    n_layers: int
    n_extra_layers: int
    context_length: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    top_k: int
    d_expert: int
    n_vocab: int
    n_tokens: int
    rms_eps: float
    rope_freq_base: float
    rope_scale: float


class _Keys:
    """Typed access to `qwen3moe.*` metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """The value of a key; ModelError if it is missing without a default, or not of its kind."""
        key = f"{ARCHITECTURE}.{name}"
        value = self._metadata.get(key, default)
        if value is None:
            raise ModelError(f"the model lacks the key {key}; convert it again from its original")
        if type(value) is not kind:
            raise ModelError(f"{key} is {_shown(value)}, not one {kind.__name__}; convert the model again")
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value: int = self.get(name, int, default)
        if not least <= value < 1 << 31:
            raise ModelError(f"{ARCHITECTURE}.{name} is {value}; at least {least} makes a model")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value: float = self.get(name, float, default)
        if not 0 < value < math.inf:
            raise ModelError(f"{ARCHITECTURE}.{name} is {value}; it must be above 0")
        return value


def read_params(model_file: ModelFile) -> Params:
    """The shape of a model from its metadata, and of the embedding where that has no default.

    Raises:
        ModelError: another architecture; a key is missing, senseless, or asks for something that is not done here.
    """
    metadata = model_file.metadata
    architecture = metadata.get("general.architecture", "missing")
    if architecture != ARCHITECTURE:
        raise ModelError(f"general.architecture is {_shown(architecture)}; only {ARCHITECTURE} can be run")
    keys = _Keys(metadata)
    n_blocks = keys.count("block_count")
    _demand(n_blocks <= len(model_file.tensors), "block_count", n_blocks, "less than the count of tensors")
    n_extra_layers = keys.count("nextn_predict_layers", 0, least=0)
    d_model, n_heads = keys.count("embedding_length"), keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", max(d_model // n_heads, 1))
    n_experts, top_k = keys.count("expert_count"), keys.count("expert_used_count")
    d_expert_default = _dim(model_file, ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate.0.weight"), 1)
    n_vocab = _dim(model_file, ("token_embd.weight",), 1)
    n_tokens = n_vocab
    match metadata.get("tokenizer.ggml.tokens"):
        case ArrayLength(length):
            n_tokens = length
        case list(tokens):
            n_tokens = len(tokens)
    params = Params(
        n_layers=n_blocks - n_extra_layers,
        n_extra_layers=n_extra_layers,
        context_length=keys.count("context_length"),
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=keys.count("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        n_experts=n_experts,
        top_k=top_k,
        d_expert=keys.count("expert_feed_forward_length", d_expert_default),
        n_vocab=n_vocab,
        n_tokens=n_tokens,
        rms_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        rope_freq_base=keys.positive("rope.freq_base", 10000.0),
        rope_scale=_rope_scale(keys),
    )
    _demand(params.n_layers > 0, "nextn_predict_layers", n_extra_layers, f"less than block_count, {n_blocks}")
    _demand(n_heads % params.n_kv_heads == 0, "attention.head_count_kv", params.n_kv_heads, f"a divisor of {n_heads}")
    _demand(head_dim % 2 == 0, "attention.key_length", head_dim, "even")
    for name in ("attention.value_length", "rope.dimension_count"):
        value = keys.count(name, head_dim)
        _demand(value == head_dim, name, value, f"as long as attention.key_length, {head_dim}")
    _demand(top_k <= n_experts, "expert_used_count", top_k, f"at most expert_count, {n_experts}")
    vocab_size = keys.count("vocab_size", n_vocab)
    _demand(vocab_size == n_vocab, "vocab_size", vocab_size, f"the number of rows of token_embd.weight, {n_vocab}")
    if not 0 < params.n_tokens <= n_vocab:
        raise ModelError(
            f"tokenizer.ggml.tokens has {params.n_tokens} tokens, but token_embd.weight has {n_vocab} rows;"
            " convert the model again"
        )
    return params


def _rope_scale(keys: _Keys) -> float:
    """What positions are multiplied by."""
    kind = keys.get("rope.scaling.type", str, "linear")
    if kind == "none":
        return 1.0
    if kind != "linear":
        raise ModelError(
            f"{ARCHITECTURE}.rope.scaling.type is {_shown(kind)}; only none and linear are done here,"
            " use a model without it"
        )
    return 1.0 / keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))


def _demand(good: bool, name: str, value: int, wanted: str) -> None:
    if not good:
        raise ModelError(f"{ARCHITECTURE}.{name} is {value}; it must be {wanted}")


def _dim(model_file: ModelFile, names: tuple[str, ...], axis: int) -> int:
    """A dimension of the first of some tensors that is there."""
    for name in names:
        tensor = model_file.tensors.get(name)
        if tensor is not None and len(tensor.dims) > axis:
            return tensor.dims[axis]
    raise _missing(names[0])


def expert_tensor(tensors: Mapping[str, TensorInfo], layer: int, matrix: str, expert: int) -> TensorInfo:
    """The tensor that holds an expert's matrix: the layer's stack, or one of its own.

    Raises:
        ModelError: neither is there.
    """
    stacked = f"blk.{layer}.{matrix}_exps.weight"
    found = tensors.get(stacked) or tensors.get(f"blk.{layer}.{matrix}.{expert}.weight")
    if found is None:
        separate = any(f"blk.{layer}.{other}.{expert}.weight" in tensors for other in MATRICES)
        raise _missing(f"blk.{layer}.{matrix}.{expert}.weight" if separate else stacked)
    return found


def check_tensors(model_file: ModelFile, params: Params) -> dict[str, TensorInfo]:
    """The tensors that the model is made of, by name, in the order of the file.

    Raises:
        ModelError: one is missing, has the wrong shape or a type that cannot be decoded; or there is one more,
            without which the results would be wrong.
    """
    tensors = model_file.tensors
    wanted = weight_shapes(params)
    if "output.weight" not in tensors:
        del wanted["output.weight"]
    for layer, matrix in product(range(params.n_layers), MATRICES):
        dims = (params.d_expert, params.d_model) if matrix == "ffn_down" else (params.d_model, params.d_expert)
        stacked = f"blk.{layer}.{matrix}_exps.weight"
        if stacked in tensors:
            wanted[stacked] = (*dims, params.n_experts)
        else:
            wanted |= {expert_tensor(tensors, layer, matrix, e).name: dims for e in range(params.n_experts)}

    for name, shape in wanted.items():
        if name not in tensors:
            raise _missing(name)
        tensor = tensors[name]
        if tensor.dims != shape:
            raise ModelError(f"tensor {name} has the shape {tensor.dims}, not {shape}; convert the model again")
        if not can_dequantize(tensor.type):
            raise ModelError(f"tensor {name} has the type {tensor.type.name}, which cannot be decoded here")

    extra = tuple(f"blk.{params.n_layers + n}." for n in range(params.n_extra_layers))
    for name in tensors:
        if name not in wanted and not name.startswith(extra):
            raise ModelError(
                f"tensor {_shown(name)} is not part of {ARCHITECTURE}; ignoring it would give wrong results"
            )
    return {name: tensor for name, tensor in tensors.items() if name in wanted}


def weight_shapes(params: Params) -> dict[str, tuple[int, ...]]:
    """Every tensor that is not a routed expert, with its dimensions, fastest first."""
    d_model, head_dim, n_vocab = params.d_model, params.head_dim, params.n_vocab
    d_q, d_kv = params.n_heads * head_dim, params.n_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (d_model, n_vocab),
        "output_norm.weight": (d_model,),
        "output.weight": (d_model, n_vocab),
    }
    for layer in range(params.n_layers):
        blk = f"blk.{layer}."
        shapes |= {
            blk + "attn_norm.weight": (d_model,),
            blk + "attn_q.weight": (d_model, d_q),
            blk + "attn_k.weight": (d_model, d_kv),
            blk + "attn_v.weight": (d_model, d_kv),
            blk + "attn_q_norm.weight": (head_dim,),
            blk + "attn_k_norm.weight": (head_dim,),
            blk + "attn_output.weight": (d_q, d_model),
            blk + "ffn_norm.weight": (d_model,),
            blk + "ffn_gate_inp.weight": (d_model, params.n_experts),
        }
    return shapes


def _missing(name: str) -> ModelError:
    return ModelError(f"the model lacks the tensor {name}; convert it again from its original")


def _shown(value: object) -> str:
    """A value out of a file, fit for one line on a terminal."""
    return escape_controls(str(value), "")[:120]
