// CUDA's C++ for a host compiler, which includes this before a kernel's source.
//
// language.h: qualifiers, vector types, arithmetic. halves.h: float16 and bfloat16. fibers.h: threads, barriers, warps,
// launches. watch.h: what nothing orders. intrinsics.h: what intrinsics.cuh declares.
#pragma once
#include "language.h"
// after it: what needs the names above
#include "halves.h"
#include "watch.h"
// after it: threads
#include "fibers.h"
// after it: the product's own intrinsics
#include "intrinsics.h"
