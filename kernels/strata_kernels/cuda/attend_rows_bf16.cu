// Attention of several sequences over cells of type bf16: attend_rows.cuh says all about it.
#include "attend_rows.cuh"

ATTEND_ROWS(bf16, KvBf16, 64, 8)
ATTEND_ROWS(bf16, KvBf16, 64, 16)
ATTEND_ROWS(bf16, KvBf16, 128, 8)
ATTEND_ROWS(bf16, KvBf16, 128, 16)
