// Attention over cells of type q8_0: attend.cuh and attend_prompt.cuh say all about it.
#include "attend.cuh"
#include "attend_prompt.cuh"

ATTEND(q8_0, KvQ8, 64, 8)
ATTEND(q8_0, KvQ8, 64, 16)
ATTEND(q8_0, KvQ8, 128, 8)
ATTEND(q8_0, KvQ8, 128, 16)

ATTEND_PROMPT(q8_0, KvQ8, 64)
ATTEND_PROMPT(q8_0, KvQ8, 128)
