"""Writes a Qwen3 mixture-of-experts model of random weights, as a GGUF file, about as fast as the disk takes it.

Blocks are made directly in their quantized form. Weights of one type and standard deviation come from a pool of
random blocks, and each expert (each MiB of any other matrix) begins at a random block of it: experts differ, and
nothing is computed for most of the file.

::

    python -m tests.bench.make_random_gguf 30b.gguf --mix q4_k_m            # Qwen3-30B-A3B's shape: 18.5 GB
    python -m tests.bench.make_random_gguf small.gguf --layers 4 --experts 16 --vocab 4096
    python -m tests.bench.make_random_gguf tiny.gguf --preset tiny          # 2 layers of 8 experts: 3 MB
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from tests.helpers.gguf_builder import Tensor, build, byte_tokens, tensor_bytes

Bytes = npt.NDArray[np.uint8]

POOL_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
ALIGNMENT = 32
LOGIT_STD = 3.0
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


class TypeFacts(NamedTuple):
    """What a type's blocks are as they are made here."""

    std: float  # of the weights where the scale d is 1
    file_type: int  # `general.file_type` of a model that is mostly of this type


TYPES = {
    Type.F32: TypeFacts(1, 0),
    Type.F16: TypeFacts(1, 1),
    Type.BF16: TypeFacts(1, 32),
    Type.Q4_0: TypeFacts(4.64, 2),
    Type.Q8_0: TypeFacts(73.9, 7),
    Type.Q2_K: TypeFacts(13.2, 10),
    Type.Q3_K: TypeFacts(43.7, 12),
    Type.Q4_K: TypeFacts(224, 15),
    Type.Q5_K: TypeFacts(450, 17),
    Type.Q6_K: TypeFacts(900, 18),
    Type.IQ4_XS: TypeFacts(1250, 30),
    Type.IQ3_S: TypeFacts(141, 26),
    Type.IQ2_XXS: TypeFacts(53.7, 19),
    Type.MXFP4: TypeFacts(6.65, 38),
}


@dataclass(frozen=True)
class Shape:
    """A model's dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    expert_hidden: int
    vocab: int
    context: int


PRESETS = {
    "30b": Shape(48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960),
    "235b": Shape(94, 4096, 64, 4, 128, 128, 8, 1536, 151936, 40960),
    "tiny": Shape(2, 256, 4, 2, 64, 8, 2, 256, 512, 4096),
}


@dataclass(frozen=True)
class Options:
    """Types and distribution of the weights."""

    type: Type = Type.Q4_K  # of experts; what is None below has it too
    type_down: Type | None = None
    type_attention: Type | None = None
    type_embedding: Type | None = None  # None: as attention
    type_output: Type = Type.Q6_K
    mix: Literal["plain", "q4_k_m"] = "plain"
    skew: float = 0.0  # of the logarithm of router rows' norms: 0.3 makes some experts warm, 1 some hot
    seed: int = 1


class Plan(NamedTuple):
    """A tensor to write: dimensions fastest first; its weights' standard deviation, or what else it is."""

    name: str
    dims: tuple[int, ...]
    type: Type
    fill: float | Literal["norm", "router"]

    @property
    def size_bytes(self) -> int:
        """Without padding."""
        return tensor_bytes(self.dims, self.type)


def random_blocks(rng: np.random.Generator, kind: Type, n: int, std: float) -> Bytes:
    """Blocks whose weights have about this standard deviation and a mean near zero, uint8 `[n, block_bytes]`.

    Integers from -8 to 7, as in Q4_0, have a mean of -0.5, a tenth of their standard deviation.
    """
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if kind in (Type.F32, Type.F16, Type.BF16):
        values = rng.standard_normal(n * block_values, dtype=np.float32) * np.float32(std)
        return as_type(values, kind).view(np.uint8).reshape(n, block_bytes)
    blocks = np.frombuffer(rng.bytes(n * block_bytes), np.uint8).reshape(n, block_bytes).copy()
    d = (std / TYPES[kind].std * rng.uniform(0.8, 1.2, n)).astype(np.float32)

    def set_half(at: int, values: npt.NDArray[np.float32]) -> None:
        blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(n, 2)

    if kind in (Type.Q4_0, Type.Q8_0, Type.IQ4_XS, Type.IQ3_S, Type.IQ2_XXS):
        set_half(0, d)
    elif kind in (Type.Q4_K, Type.Q5_K):
        set_half(0, d)
        set_half(2, d * np.float32(7.5 if kind == Type.Q4_K else 15.5))
        blocks[:, 4:8] |= 0xA0  # all eight scales of 6 bits are at least 32
        blocks[:, 8:12] = blocks[:, 4:8]  # minima like scales, so that the mean is zero
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    elif kind == Type.Q2_K:
        set_half(80, d)
        set_half(82, d * np.float32(1.5))
        blocks[:, :16] = (blocks[:, :16] & 15 | 8) * 17
    elif kind == Type.Q3_K:
        set_half(108, d)
    elif kind == Type.Q6_K:
        set_half(208, d)
        scales = blocks[:, 192:208].astype(np.int16)
        magnitudes = (scales & 31) + 32
        blocks[:, 192:208] = np.where(scales & 0x80, 256 - magnitudes, magnitudes)
    elif kind == Type.MXFP4:
        blocks[:, 0] = np.clip(np.rint(np.log2(d)) + 128, 1, 254)
    return blocks


def as_type(values: npt.NDArray[np.float32], kind: Type) -> npt.NDArray[Any]:
    """Floats as one of the plain types; bfloat16, which is cut off, as uint16."""
    if kind == Type.F16:
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16) if kind == Type.BF16 else values


def plan(shape: Shape, options: Options) -> list[Plan]:
    """The tensors in the order of the file. Standard deviations keep the residual stream at about 1."""
    experts = options.type
    attention = options.type_attention or (Type.Q8_0 if experts == Type.MXFP4 else experts)
    s = shape
    into = 1 / math.sqrt(s.hidden)
    back = 1 / math.sqrt(2 * s.layers)
    tensors = [
        Plan("token_embd.weight", (s.hidden, s.vocab), options.type_embedding or attention, 1.0),
        Plan("output_norm.weight", (s.hidden,), Type.F32, "norm"),
        Plan("output.weight", (s.hidden, s.vocab), options.type_output, LOGIT_STD * into),
    ]
    for layer in range(s.layers):
        more = options.mix == "q4_k_m" and has_more_bits(layer, s.layers)
        value = Type.Q6_K if more else attention
        down = Type.Q6_K if more else options.type_down or experts
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        of_layer: list[tuple[str, tuple[int, ...], Type, float | Literal["norm", "router"]]] = [
            ("attn_norm", (s.hidden,), Type.F32, "norm"),
            ("attn_q", (s.hidden, q), attention, into),
            ("attn_k", (s.hidden, kv), attention, into),
            ("attn_v", (s.hidden, kv), value, into),
            ("attn_output", (q, s.hidden), attention, 2 * back / math.sqrt(q)),
            ("attn_q_norm", (s.head_dim,), Type.F32, "norm"),
            ("attn_k_norm", (s.head_dim,), Type.F32, "norm"),
            ("ffn_norm", (s.hidden,), Type.F32, "norm"),
            ("ffn_gate_inp", (s.hidden, s.experts), Type.F32, "router"),
            ("ffn_gate_exps", (s.hidden, s.expert_hidden, s.experts), experts, into),
            ("ffn_up_exps", (s.hidden, s.expert_hidden, s.experts), experts, into),
            ("ffn_down_exps", (s.expert_hidden, s.hidden, s.experts), down, 6 * back / math.sqrt(s.expert_hidden)),
        ]
        tensors += [Plan(f"blk.{layer}.{name}.weight", *rest) for name, *rest in of_layer]
    for tensor in tensors:
        if tensor.dims[0] % GGML_QUANT_SIZES[tensor.type][0]:
            raise click.UsageError(
                f"{tensor.name}: a row of {tensor.dims[0]} is not whole blocks of {tensor.type.name}"
            )
    return tensors


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether llama-quantize gives a layer's values and down matrices Q6_K in the mix Q4_K_M."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def metadata(shape: Shape, options: Options) -> dict[str, Any]:
    """The keys of the file, with a tokenizer of 256 bytes and the three special tokens near the end."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    plain = [*byte_tokens(), "he", "in"]
    first_special = max(len(plain), shape.vocab - 293)
    if first_special + len(special) > shape.vocab:
        first_special, plain = shape.vocab - len(special), plain[:256]
    tokens = [f"[PAD{i}]" for i in range(shape.vocab)]
    kinds = [5] * shape.vocab  # unused
    tokens[: len(plain)], kinds[: len(plain)] = plain, [1] * len(plain)
    tokens[first_special : first_special + len(special)] = special
    kinds[first_special : first_special + len(special)] = [3] * len(special)
    qwen3moe = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": 3 * shape.hidden,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": shape.experts,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.expert_hidden,
    }
    tokenizer = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": kinds,
        "merges": ["h e", "i n"][: len(plain) - 256],
        "eos_token_id": first_special + 2,
        "padding_token_id": first_special,
        "bos_token_id": first_special,
        "add_bos_token": False,
    }
    return {
        "general.architecture": "qwen3moe",
        "general.type": "model",
        "general.name": f"random qwen3moe {shape.layers}L {shape.experts}x{shape.expert_hidden}",
        "general.quantization_version": 2,
        "general.file_type": TYPES[options.type].file_type,
        **{f"qwen3moe.{key}": item for key, item in qwen3moe.items()},
        **{f"tokenizer.ggml.{key}": item for key, item in tokenizer.items()},
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


class Contents:
    """Makes the tensors' bytes, in the order of the file."""

    def __init__(self, tensors: Sequence[Plan], options: Options) -> None:
        self._skew = options.skew
        self._pools: dict[tuple[Type, float], Bytes] = {}
        self._pool_rng = np.random.default_rng(np.random.SFC64(options.seed))
        self._rng = np.random.default_rng(options.seed + 1)
        self._largest: dict[tuple[Type, float], int] = {}
        for tensor in tensors:
            if isinstance(tensor.fill, float):
                key = tensor.type, tensor.fill
                self._largest[key] = max(self._largest.get(key, 0), tensor.size_bytes)

    def pieces(self, tensor: Plan) -> Iterator[npt.NDArray[Any]]:
        """A tensor's bytes, in arrays that must not be changed."""
        if tensor.fill == "norm":
            yield (1 + 0.1 * self._rng.standard_normal(tensor.dims[0])).astype(np.float32)
        elif tensor.fill == "router":
            columns, rows = tensor.dims
            weights = self._rng.standard_normal((rows, columns)).astype(np.float32) * np.float32(1 / math.sqrt(columns))
            norms = np.exp(self._skew * self._rng.standard_normal((rows, 1)))
            yield as_type(weights * norms.astype(np.float32), tensor.type)
        else:
            yield from self._from_pool(tensor, tensor.fill)

    def _from_pool(self, tensor: Plan, std: float) -> Iterator[Bytes]:
        pool, block_bytes = self._pool(tensor.type, std), GGML_QUANT_SIZES[tensor.type][1]
        is_experts, size_bytes = len(tensor.dims) == 3, tensor.size_bytes
        unit = size_bytes // tensor.dims[2] if is_experts else PIECE_BYTES // block_bytes * block_bytes
        for start in range(0, size_bytes, unit):
            left = min(unit, size_bytes - start)
            while left:
                at = int(self._rng.integers(len(pool) // block_bytes)) * block_bytes
                piece = pool[at : at + left]
                left -= len(piece)
                yield piece

    def _pool(self, kind: Type, std: float) -> Bytes:
        if (kind, std) not in self._pools:
            n = min(POOL_BYTES, self._largest[kind, std]) // GGML_QUANT_SIZES[kind][1]
            self._pools[kind, std] = random_blocks(self._pool_rng, kind, n, std).reshape(-1)
        return self._pools[kind, std]


def header(shape: Shape, options: Options) -> tuple[bytes, int]:
    """What the file has before the tensors' bytes, and how many these are."""
    offset, headers = 0, []
    for tensor in plan(shape, options):
        headers.append(Tensor(tensor.name, tensor.dims, int(tensor.type), b"", offset))
        offset += -(-tensor.size_bytes // ALIGNMENT) * ALIGNMENT
    return build(metadata(shape, options), headers), offset


def write_model(path: Path, shape: Shape, options: Options) -> int:
    """Writes the file; returns its size in bytes."""
    tensors = plan(shape, options)
    contents = Contents(tensors, options)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(descriptor, [np.frombuffer(header(shape, options)[0], np.uint8)])
        for tensor in tensors:
            write_all(descriptor, list(contents.pieces(tensor)))
            write_all(descriptor, [np.zeros(-tensor.size_bytes % ALIGNMENT, np.uint8)])
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def write_all(descriptor: int, arrays: Sequence[npt.NDArray[Any]]) -> None:
    """Writes arrays one after the other, many a call."""
    views = [memoryview(array).cast("B") for array in arrays if array.size]
    while views:
        written = os.writev(descriptor, views[:512])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]


TYPE_CHOICE = click.Choice([kind.name for kind in TYPES])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--preset", type=click.Choice(list(PRESETS)), default="30b", show_default=True)
@click.option("--layers", type=int)
@click.option("--hidden", type=int)
@click.option("--experts", type=int)
@click.option("--top-k", type=int)
@click.option("--expert-hidden", type=int)
@click.option("--vocab", type=int)
@click.option("--context", type=int)
@click.option("--type", "kind", type=TYPE_CHOICE, default="Q4_K", show_default=True, help="Experts and attention.")
@click.option("--type-down", type=TYPE_CHOICE, help="The experts' down matrices.")
@click.option("--type-attention", type=TYPE_CHOICE)
@click.option("--type-embedding", type=TYPE_CHOICE)
@click.option("--type-output", type=TYPE_CHOICE, default="Q6_K", show_default=True)
@click.option(
    "--mix",
    type=click.Choice(["plain", "q4_k_m"]),
    default="plain",
    show_default=True,
    help="q4_k_m: Q6_K for the matrices that llama-quantize gives it.",
)
@click.option("--skew", type=float, default=0.0, show_default=True, help="Makes some experts hot: 0.3 a bit, 1 much.")
@click.option("--seed", type=int, default=1, show_default=True)
def main(
    path: Path,
    preset: str,
    kind: str,
    type_down: str | None,
    type_attention: str | None,
    type_embedding: str | None,
    type_output: str,
    mix: Literal["plain", "q4_k_m"],
    skew: float,
    seed: int,
    **dimensions: int | None,
) -> None:
    """Writes a model of random weights to PATH; dimensions that are not given are the preset's."""
    shape = replace(PRESETS[preset], **{name: size for name, size in dimensions.items() if size is not None})
    shape = replace(shape, top_k=min(shape.top_k, shape.experts))
    down, attention, embedding = (
        None if name is None else Type[name] for name in (type_down, type_attention, type_embedding)
    )
    options = Options(Type[kind], down, attention, embedding, Type[type_output], mix, skew, seed)
    start = time.monotonic()
    size_bytes = write_model(path, shape, options)
    seconds = time.monotonic() - start
    click.echo(f"{path}: {size_bytes / 1e9:.3f} GB in {seconds:.1f} s, {size_bytes / seconds / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
