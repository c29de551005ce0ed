// Attention over cells of type f16: attend.cuh and attend_prompt.cuh say all about it.
#include "attend.cuh"

ATTEND(f16, KvF16, 64, 8)
ATTEND(f16, KvF16, 64, 16)
ATTEND(f16, KvF16, 128, 8)
ATTEND(f16, KvF16, 128, 16)
