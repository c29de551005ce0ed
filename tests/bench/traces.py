"""Traces of routing and growth: recorded from the packaged model, or made up; what `simulate` replays.

A token belongs to a conversation, whose K/V range grows a cell for it; a conversation
ends after its last token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

RECORDED = Path(__file__).parent / "traces"


@dataclass(frozen=True)
class Trace:
    """What was routed to, token after token.

    Attributes:
        routed: experts uint16 ``[tokens, layers, top_k]``, numbered within their layer.
        prompt: bool ``[tokens]``, whether the token is one of a prompt.
        conversation: uint16 ``[tokens]``.
    """

    name: str
    n_experts: int
    routed: npt.NDArray[np.uint16]
    prompt: npt.NDArray[np.bool_]
    conversation: npt.NDArray[np.uint16]

    def __len__(self) -> int:
        return len(self.routed)

    @property
    def n(self) -> int:
        """Experts of all layers."""
        return self.routed.shape[1] * self.n_experts

    def flat(self) -> npt.NDArray[np.int64]:
        """Experts int64 ``[tokens, layers * top_k]``, numbered over all layers."""
        layers = np.arange(self.routed.shape[1])[:, None] * self.n_experts
        found: npt.NDArray[np.int64] = (self.routed + layers).reshape(len(self), -1).astype(np.int64)
        return found

    def save(self) -> Path:
        """Writes it where `recorded` finds it."""
        path = RECORDED / f"{self.name}.npz"
        fields = {"n_experts": np.int64(self.n_experts), "routed": self.routed.astype(np.uint8)}
        np.savez_compressed(path, prompt=self.prompt, conversation=self.conversation.astype(np.uint8), **fields)
        return path


def recorded() -> list[Trace]:
    """Every recorded trace, by name."""
    found = []
    for path in sorted(RECORDED.glob("*.npz")):
        with np.load(path) as file:
            routed, conversation = file["routed"].astype(np.uint16), file["conversation"].astype(np.uint16)
            found.append(Trace(path.stem, int(file["n_experts"]), routed, file["prompt"], conversation))
    return found


def made_up(seed: int = 0, tokens: int = 4096) -> list[Trace]:
    """Uniform and Zipf routing, and Zipf routing whose order of experts changes once, often, or little by little."""
    random = np.random.default_rng(seed)
    shape = _Shape()
    flat = np.ones((shape.layers, shape.n_experts))
    found = [_trace(random, "uniform", shape, [flat], tokens)]
    for exponent in (0.8, 1.2):
        found.append(_trace(random, f"zipf-{exponent}", shape, [_zipf(random, shape, exponent)], tokens))
    for phases in (2, 8, 32):
        weights = [_zipf(random, shape, 1.0) for _ in range(phases)]
        found.append(_trace(random, f"phases-{phases}", shape, weights, tokens))
    back = [_zipf(random, shape, 1.0) for _ in range(2)]
    found.append(_trace(random, "phases-return", shape, [back[i % 2] for i in range(16)], tokens))
    found.append(_trace(random, "phases-drift", shape, list(_drift(random, shape, 64)), tokens))
    return found


@dataclass(frozen=True)
class _Shape:
    layers: int = 8
    n_experts: int = 32
    top_k: int = 4
    conversation_tokens: int = 512


def _zipf(random: np.random.Generator, shape: _Shape, exponent: float) -> npt.NDArray[np.float64]:
    """Weights ``[layers, experts]``: Zipf over an order of each layer's own."""
    ranks = np.stack([random.permutation(shape.n_experts) for _ in range(shape.layers)])
    weights: npt.NDArray[np.float64] = (1.0 + ranks) ** -exponent
    return weights


def _drift(random: np.random.Generator, shape: _Shape, phases: int) -> Iterator[npt.NDArray[np.float64]]:
    """Each phase differs from the one before by two experts of a layer that change places."""
    weights = _zipf(random, shape, 1.0)
    for _ in range(phases):
        weights = weights.copy()
        for layer in range(shape.layers):
            a, b = random.choice(shape.n_experts, 2, replace=False)
            weights[layer, [a, b]] = weights[layer, [b, a]]
        yield weights


def _trace(
    random: np.random.Generator, name: str, shape: _Shape, phases: Sequence[npt.NDArray[np.float64]], tokens: int
) -> Trace:
    """`tokens` tokens that go through the phases, each as long; experts of a token differ from each other."""
    routed = np.empty((tokens, shape.layers, shape.top_k), np.uint16)
    bounds = np.linspace(0, tokens, len(phases) + 1).astype(int)
    for weights, start, stop in zip(phases, bounds, bounds[1:], strict=False):
        # the k largest of log weight + Gumbel noise are k draws without replacement
        noise = random.gumbel(size=(stop - start, *weights.shape))
        routed[start:stop] = np.argsort(-(np.log(weights) + noise), axis=-1)[..., : shape.top_k]
    conversation = (np.arange(tokens) // shape.conversation_tokens).astype(np.uint16)
    prompt = np.arange(tokens) % shape.conversation_tokens < shape.conversation_tokens // 4
    return Trace(name, shape.n_experts, routed, prompt, conversation)
