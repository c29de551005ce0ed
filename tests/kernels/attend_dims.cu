// Attention over heads of sizes that the product has no kernels for.
#include "attend.cuh"

ATTEND(f16, KvF16, 96, 8)
ATTEND(f16, KvF16, 112, 16)
ATTEND(bf16, KvBf16, 256, 16)
ATTEND(q8_0, KvQ8, 32, 8)
ATTEND(q8_0, KvQ8, 256, 8)
