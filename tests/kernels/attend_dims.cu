// Attention over heads of sizes that the product has no kernels for.
#include "attend.cuh"
#include "attend_prompt.cuh"

ATTEND(f16, KvF16, 96, 8)
ATTEND(f16, KvF16, 112, 16)
ATTEND(bf16, KvBf16, 256, 16)
ATTEND(q8_0, KvQ8, 32, 8)
ATTEND(q8_0, KvQ8, 256, 8)

ATTEND_PROMPT(f16, KvF16, 96)
ATTEND_PROMPT(bf16, KvBf16, 256)
ATTEND_PROMPT(q8_0, KvQ8, 32)
ATTEND_PROMPT(q8_0, KvQ8, 256)
