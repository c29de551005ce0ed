// Attention over cells of type f16: attend.cuh and attend_prompt.cuh say all about it.
#include "attend.cuh"
#include "attend_prompt.cuh"

ATTEND(f16, KvF16, 64, 8)
ATTEND(f16, KvF16, 64, 16)
ATTEND(f16, KvF16, 128, 8)
ATTEND(f16, KvF16, 128, 16)

ATTEND_PROMPT(f16, KvF16, 64)
ATTEND_PROMPT(f16, KvF16, 128)
