// Attention over cells of type bf16: attend.cuh and attend_prompt.cuh say all about it.
#include "attend.cuh"
#include "attend_prompt.cuh"

ATTEND(bf16, KvBf16, 64, 8)
ATTEND(bf16, KvBf16, 64, 16)
ATTEND(bf16, KvBf16, 128, 8)
ATTEND(bf16, KvBf16, 128, 16)

ATTEND_PROMPT(bf16, KvBf16, 64)
ATTEND_PROMPT(bf16, KvBf16, 128)
