"""Reference kernels in numpy: one operation a file, float32, written to be read.

They define what each operation computes. The CUDA kernels are held to them, and without
a GPU they run the model themselves.
"""

from strata_kernels.reference.attention import attention
from strata_kernels.reference.dequantize import can_dequantize, dequantize
from strata_kernels.reference.embedding import embedding
from strata_kernels.reference.expert_ffn import expert_ffn
from strata_kernels.reference.kv_store import kv_store
from strata_kernels.reference.matmul import matmul
from strata_kernels.reference.rms_norm import rms_norm
from strata_kernels.reference.rope import rope
from strata_kernels.reference.router import router
from strata_kernels.reference.sample import philox, sample, uniform
from strata_kernels.reference.softmax import softmax
from strata_kernels.reference.swiglu import swiglu

__all__ = [
    "attention",
    "can_dequantize",
    "dequantize",
    "embedding",
    "expert_ffn",
    "kv_store",
    "matmul",
    "philox",
    "rms_norm",
    "rope",
    "router",
    "sample",
    "softmax",
    "swiglu",
    "uniform",
]
