// Attention of several sequences over cells of type q8_0: attend_rows.cuh says all about it.
#include "attend_rows.cuh"

ATTEND_ROWS(q8_0, KvQ8, 64, 8)
ATTEND_ROWS(q8_0, KvQ8, 64, 16)
ATTEND_ROWS(q8_0, KvQ8, 128, 8)
ATTEND_ROWS(q8_0, KvQ8, 128, 16)
