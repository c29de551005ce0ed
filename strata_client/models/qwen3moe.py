"""The Qwen3-MoE architecture (`qwen3moe`), in float32 on the numpy reference kernels."""

from strata_client.models.base import F32, I32, ExpertStack, KVCache, Memory, WeightExtent
from strata_client.models.gguf_file import ModelFile


class Params:
    """What the file's metadata says about the model's shape."""

    n_layers: int
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
    n_extra_layers: int


class Qwen3Moe:
    """A model of a file."""

    params: Params
    kv_cell_bytes: int

    def __init__(self, model_file: ModelFile) -> None:
        raise NotImplementedError

    def stacks(self) -> list[ExpertStack]:
        """Where the routed experts lie."""
        raise NotImplementedError

    def weight_extents(self) -> list[WeightExtent]:
        """Every tensor that is not a routed expert, once."""
        raise NotImplementedError

    def expert_bytes(self, layer: int, expert: int) -> tuple[int, int, int]:
        """Bytes of an expert's gate, up and down."""
        raise NotImplementedError

    def forward(
        self, tokens: I32, position: int, memory: Memory, cache: KVCache, *, prompt: bool, all_logits: bool = False
    ) -> F32:
        """Logits float32 `[vocab]` after the last of `tokens`, or `[n, vocab]` after each."""
        raise NotImplementedError
