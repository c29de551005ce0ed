"""Builds small GGUF files, sound ones and others."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

from strata_client.models.gguf_file import ModelFile, open_model_file

DATA = Path(__file__).parent.parent / "data"

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


class RawValue(NamedTuple):
    """A value as the bytes that follow the key: its type's number and its encoding."""

    type: int
    data: bytes


class Tensor(NamedTuple):
    """A tensor to write: dimensions fastest first, the type's number, the blocks, and an offset of one's own."""

    name: str
    dims: Sequence[int]
    type: int
    data: bytes
    offset: int | None = None


def string(text: str | bytes) -> bytes:
    """A string with its length before it."""
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> RawValue:
    """A Python value as GGUF writes it: int as u32, list of int as i32."""
    if isinstance(item, RawValue):
        return item
    if isinstance(item, bool):
        return RawValue(BOOL, struct.pack("<B", item))
    if isinstance(item, int):
        return RawValue(U32, struct.pack("<I", item))
    if isinstance(item, float):
        return RawValue(F32, struct.pack("<f", item))
    if isinstance(item, str):
        return RawValue(STRING, string(item))
    if len(item) and isinstance(item[0], str):
        return RawValue(ARRAY, struct.pack("<IQ", STRING, len(item)) + b"".join(map(string, item)))
    return RawValue(ARRAY, struct.pack("<IQ", I32, len(item)) + np.asarray(item, "<i4").tobytes())


def build(
    keys: Mapping[str, Any] | Sequence[tuple[str, Any]],
    tensors: Sequence[Tensor] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """The bytes of a GGUF file. `n_keys` and `n_tensors` may differ from what is there."""
    pairs = list(keys.items() if isinstance(keys, Mapping) else keys)
    head = [b"GGUF", struct.pack("<IQQ", version, n_tensors or len(tensors), n_keys or len(pairs))]
    for key, item in pairs:
        raw = value(item)
        head += [string(key), struct.pack("<I", raw.type), raw.data]
    body = b""
    for tensor in tensors:
        offset = len(body) if tensor.offset is None else tensor.offset
        dims = struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
        head += [
            string(tensor.name),
            struct.pack("<I", len(tensor.dims)),
            dims,
            struct.pack("<IQ", tensor.type, offset),
        ]
        body += tensor.data + bytes(-len(tensor.data) % alignment)
    header = b"".join(head)
    return header + bytes(-len(header) % alignment) + body


def contents(model_file: ModelFile) -> tuple[dict[str, Any], list[Tensor]]:
    """The keys and tensors of an opened file, to be changed and built again."""
    tensors = [
        Tensor(
            t.name,
            t.dims,
            int(t.type),
            Path(model_file.files[t.file].path).read_bytes()[t.offset_bytes :][: t.size_bytes],
        )
        for t in model_file.tensors.values()
    ]
    return dict(model_file.metadata), tensors


def load(name: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The keys and tensors of a file in tests/data."""
    with open_model_file(str(DATA / name)) as model_file:
        return contents(model_file)


def byte_tokens() -> list[str]:
    """The 256 bytes in GPT-2's spelling, in its order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + n) for n in range(256 - len(plain))]


def small_keys(**changes: Any) -> dict[str, Any]:
    """Metadata of a small qwen3moe model; `changes` by the last part of a key, None leaves it out."""
    tokens = ["<|endoftext|>", *byte_tokens(), "he", "ll"]
    keys: dict[str, Any] = {
        "general.architecture": "qwen3moe",
        "general.name": "small",
        "qwen3moe.block_count": 2,
        "qwen3moe.context_length": 128,
        "qwen3moe.embedding_length": 32,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 16,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ["h e", "l l"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    for name, item in changes.items():
        key = next((key for key in keys if key.endswith("." + name)), f"qwen3moe.{name}")
        if item is None:
            del keys[key]
        else:
            keys[key] = item
    return keys


def small_tensors(kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0, seed: int = 0) -> list[Tensor]:
    """Random weights that fit `small_keys()`: matrices of type `kind`, norms and router F32."""
    random = np.random.default_rng(seed)
    d, f, q, kv, e, vocab = 32, 64, 64, 32, 4, 259
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (d, vocab), "output.weight": (d, vocab)}
    shapes["output_norm.weight"] = (d,)
    for layer in range(2):
        per_layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,),
            "attn_q": (d, q),
            "attn_k": (d, kv),
            "attn_v": (d, kv),
            "attn_q_norm": (16,),
            "attn_k_norm": (16,),
            "attn_output": (q, d),
            "ffn_norm": (d,),
            "ffn_gate_inp": (d, e),
            "ffn_gate_exps": (d, f, e),
            "ffn_up_exps": (d, f, e),
            "ffn_down_exps": (f, d, e),
        }
        shapes |= {f"blk.{layer}.{name}.weight": dims for name, dims in per_layer.items()}
    tensors = []
    for name, dims in shapes.items():
        numbers = random.standard_normal(dims[::-1]).astype(np.float32) * np.float32(0.3)
        plain = len(dims) == 1 or "gate_inp" in name
        used = GGMLQuantizationType.F32 if plain else kind
        tensors.append(Tensor(name, dims, int(used), quantize(numbers + plain, used).tobytes()))
    return tensors


def tensor_bytes(dims: Sequence[int], kind: GGMLQuantizationType) -> int:
    """Bytes of a tensor."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return int(np.prod(dims)) // block * block_bytes
