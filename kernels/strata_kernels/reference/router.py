"""Chooses the experts of each token."""

import numpy as np
import numpy.typing as npt

from strata_kernels.reference.softmax import softmax


def router(scores: npt.NDArray[np.float32], top_k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The `top_k` likeliest experts, their probabilities scaled to a sum of 1.

    Args:
        scores: float32 `[n, n_experts]`, the router's logits.
        top_k: experts a token.

    Returns:
        Experts int32 `[n, top_k]`, likeliest first and the lower number first of equals, and their
        weights float32 `[n, top_k]`.

    Source: Qwen3-MoE with `norm_topk_prob`: softmax over all experts, then the choice.
    """
    probabilities = softmax(scores)
    experts = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(probabilities, experts, axis=-1)
    return experts.astype(np.int32), chosen / chosen.sum(axis=-1, keepdims=True)
