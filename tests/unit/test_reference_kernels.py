"""The numpy reference kernels against plain formulas and the gguf package."""

from itertools import pairwise

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from strata_kernels import reference as kernels

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def close(ours: np.ndarray, wanted: np.ndarray, tolerance: float = 2e-6) -> None:
    """float32 as the kernels must give, near the float64 formula."""
    assert ours.dtype == np.float32
    assert ours.shape == wanted.shape
    assert np.abs(ours - wanted).max() <= tolerance * max(1.0, float(np.abs(wanted).max()))


DECODED = [kind for kind in GGML_QUANT_SIZES if kernels.can_dequantize(kind)]


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_dequantize_is_exact(kind: GGMLQuantizationType) -> None:
    """Every type that is decoded gives the gguf package's values bit for bit, from any bytes."""
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    raw = RANDOM.integers(0, 256, (3, 5, 4 * block_bytes), np.uint8)
    with np.errstate(all="ignore"):  # random bytes hold infinities and NaN
        ours, theirs = kernels.dequantize(raw, kind), gguf.dequantize(raw, kind)
    assert ours.shape == (3, 5, 4 * block_values)
    assert np.array_equal(ours.view(np.uint32) | _nan(ours), theirs.view(np.uint32) | _nan(theirs))


def _nan(values: np.ndarray) -> np.ndarray:
    """All bits where a value is NaN, as NaNs of other payloads are the same to us."""
    return np.where(np.isnan(values), np.uint32(0xFFFFFFFF), np.uint32(0))


def test_dequantize_makes_a_new_array() -> None:
    """What is decoded does not change with the bytes that it came from."""
    for kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0):
        raw = gguf.quantize(normal(2, 32), kind).view(np.uint8)
        decoded = kernels.dequantize(raw, kind)
        before = decoded.copy()
        raw[:] = 0
        assert np.array_equal(decoded, before)


def test_types_that_are_not_decoded() -> None:
    """Types that no weights have are not claimed."""
    assert {kind.name for kind in GGML_QUANT_SIZES} - {kind.name for kind in DECODED} >= {"I8", "I32", "F64", "Q8_K"}
    assert {"F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ3_S", "MXFP4"} <= {kind.name for kind in DECODED}


def test_large_tensors_are_decoded_in_groups() -> None:
    """A tensor of more blocks than are decoded at once gives the same values."""
    raw = gguf.quantize(normal(9000, 32), GGMLQuantizationType.Q8_0)
    theirs = gguf.dequantize(raw, GGMLQuantizationType.Q8_0)
    assert np.array_equal(kernels.dequantize(raw, GGMLQuantizationType.Q8_0), theirs)


def test_embedding_decodes_the_rows() -> None:
    """The rows of the tokens, in their order, also twice."""
    table = normal(7, 64)
    raw = gguf.quantize(table, GGMLQuantizationType.Q8_0)
    wanted = gguf.dequantize(raw, GGMLQuantizationType.Q8_0)[[3, 0, 3]]
    assert np.array_equal(kernels.embedding(np.int32([3, 0, 3]), raw, GGMLQuantizationType.Q8_0), wanted)


def test_matmul() -> None:
    """A weight matrix has a row for each output."""
    x, weight = normal(3, 40), normal(5, 40)
    close(kernels.matmul(x, weight), np.einsum("nk,mk->nm", x.astype(float), weight.astype(float)))


def test_rms_norm() -> None:
    """Each row is divided by its root mean square and scaled; rows of zeros stay finite."""
    x, weight = normal(2, 3, 16), normal(16)
    wide = x.astype(float)
    close(kernels.rms_norm(x, weight, 1e-6), wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight)
    assert not kernels.rms_norm(np.zeros_like(x), weight, 1e-6).any()


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_rope(scale: float) -> None:
    """Each pair (i, i + half) turns as a complex number by position times frequency."""
    x = normal(4, 2, 8)
    pairs = x[..., :4].astype(complex) + 1j * x[..., 4:]
    frequencies = 10000.0 ** -np.array([0, 2 / 8, 4 / 8, 6 / 8])
    angles = scale * np.arange(100, 104)[:, None, None] * frequencies
    turned = pairs * np.exp(1j * angles)
    close(kernels.rope(x, 100, 10000.0, scale), np.concatenate([turned.real, turned.imag], axis=-1))


def test_rope_depends_on_the_position_alone() -> None:
    """A token is turned the same in a batch as alone."""
    x = normal(4, 2, 8)
    alone = np.concatenate([kernels.rope(x[n : n + 1], 7 + n, 1e6) for n in range(4)])
    assert np.array_equal(kernels.rope(x, 7, 1e6), alone)


def segments(k: np.ndarray, v: np.ndarray, sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    at = np.cumsum([0, *sizes])
    return [(k[a:b].copy(), v[a:b].copy()) for a, b in pairwise(at)]


@pytest.mark.parametrize("sizes", [[9], [4, 5], [1, 3, 5], [8, 1]])
def test_attention(sizes: list[int]) -> None:
    """Grouped causal attention is the plain formula, however the cells are cut into segments."""
    n, position, n_heads, n_kv_heads, head_dim = 3, 6, 4, 2, 8
    q, k, v = normal(n, n_heads, head_dim), normal(9, n_kv_heads, head_dim), normal(9, n_kv_heads, head_dim)
    wanted = np.zeros(q.shape)
    for token in range(n):
        for head in range(n_heads):
            cells = slice(0, position + token + 1)
            keys, values = k[cells, head // 2].astype(float), v[cells, head // 2].astype(float)
            weights = np.exp(keys @ q[token, head] / np.sqrt(head_dim))
            wanted[token, head] = weights @ values / weights.sum()
    close(kernels.attention(q, segments(k, v, sizes), position), wanted)


@pytest.mark.parametrize("n", [1, 64])
def test_attention_has_the_same_bits_in_all_segments(n: int) -> None:
    """The bits are the same however the cells are cut: slabs of a stage's layers hold more cells than a model's."""
    q, k, v = normal(n, 4, 32), normal(300, 2, 32), normal(300, 2, 32)
    wanted = kernels.attention(q, segments(k, v, [300]), 300 - n)
    for sizes in ([160, 140], [16] * 18 + [12], [299, 1]):
        assert np.array_equal(kernels.attention(q, segments(k, v, sizes), 300 - n), wanted)


@pytest.mark.parametrize("position", [0, 2, 3, 4, 6])
def test_kv_store(position: int) -> None:
    """New cells are written where they belong, across segments, and no others."""
    cells = segments(np.zeros((9, 2, 4), np.float32), np.zeros((9, 2, 4), np.float32), [4, 1, 4])
    k, v = normal(3, 2, 4), normal(3, 2, 4)
    kernels.kv_store(k, v, cells, position)
    for number, new in enumerate((k, v)):
        whole = np.concatenate([pair[number] for pair in cells])
        assert np.array_equal(whole[position : position + 3], new)
        assert not whole[:position].any() and not whole[position + 3 :].any()


def test_softmax() -> None:
    """Large scores do not overflow, and -inf is impossible."""
    close(kernels.softmax(np.float32([[1000, 999, -np.inf]])), np.array([[1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0]]))


def test_router() -> None:
    """The likeliest experts with weights of sum 1; of equals the lower numbers."""
    experts, weights = kernels.router(np.float32([[0, 2, 1, 2], [5, 5, 5, 5]]), 2)
    assert experts.dtype == np.int32
    assert experts.tolist() == [[1, 3], [0, 1]]
    close(weights, np.full((2, 2), 0.5))
    scores = normal(50, 16)
    experts, weights = kernels.router(scores, 4)
    assert np.array_equal(experts, np.argsort(-scores, kind="stable")[:, :4])
    chosen = np.exp(np.take_along_axis(scores.astype(float), experts, 1))
    close(weights, chosen / chosen.sum(1, keepdims=True))


def test_swiglu() -> None:
    """silu(gate) * up, without a warning also for very negative values."""
    gate, up = normal(3, 8), normal(3, 8)
    close(kernels.swiglu(gate, up), gate / (1 + np.exp(-gate.astype(float))) * up)
    assert kernels.swiglu(np.float32([[-1000, 1000]]), np.float32([[1, 1]])).tolist() == [[0, 1000]]


def test_expert_ffn() -> None:
    """Gate and up go through the activation into down."""
    x, gate, up, down = normal(3, 16), normal(24, 16), normal(24, 16), normal(16, 24)
    g = x.astype(float) @ gate.T.astype(float)
    close(kernels.expert_ffn(x, gate, up, down), (g / (1 + np.exp(-g)) * (x.astype(float) @ up.T)) @ down.T, 1e-5)
