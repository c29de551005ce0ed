"""What kernels take of a sequence, made of what the client has."""

from collections.abc import Collection

import numpy as np
from strata_kernels import structs
from strata_kernels.structs import KvCells, SampleOptions

from strata_client.cells import KVRange
from strata_client.models.base import U8
from strata_client.models.qwen3moe_file import Params
from strata_client.sampler import SamplerOptions

KV_TYPES = {"f16": structs.KV_F16, "bf16": structs.KV_BF16, "q8_0": structs.KV_Q8_0}


def kv_cells(kv: KVRange, params: Params, kv_type: str) -> KvCells:
    """A sequence's cells, which hold a key of `KV_TYPES`."""
    return KvCells(
        kv.range.address,
        kv.range.slab_bytes,
        kv.cells_per_slab,
        params.n_kv_heads,
        params.head_dim,
        KV_TYPES[kv_type],
    )


def sample_options(options: SamplerOptions, seed: int, prompt_tokens: int) -> SampleOptions:
    """How the tokens are chosen that follow a prompt, with this seed whatever `options` has."""
    return SampleOptions(
        options.temperature,
        options.top_p,
        options.min_p,
        options.repeat_penalty,
        seed % (1 << 64),
        min(options.top_k, (1 << 31) - 1),
        prompt_tokens - 1,
    )


def seen_bits(tokens: Collection[int], n_vocab: int) -> U8:
    """uint8 `[ceil(n_vocab / 32) * 4]`, a bit a token of the vocabulary."""
    seen = np.zeros(-(-n_vocab // 32) * 32, np.uint8)
    seen[list(tokens)] = 1
    return np.packbits(seen, bitorder="little")
