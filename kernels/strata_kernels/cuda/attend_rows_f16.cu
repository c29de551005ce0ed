// Attention of several sequences over cells of type f16: attend_rows.cuh says all about it.
#include "attend_rows.cuh"

ATTEND_ROWS(f16, KvF16, 64, 8)
ATTEND_ROWS(f16, KvF16, 64, 16)
ATTEND_ROWS(f16, KvF16, 128, 8)
ATTEND_ROWS(f16, KvF16, 128, 16)
