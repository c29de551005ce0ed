// The next token from logits, and the end of a step.
//
// Operation: repeat penalty, top-k, top-p, min-p, temperature and a draw, as `SampleOptions` say; then the token is marked as
//   seen, stored for the next step and for the host, and the step is retired.
// Must match: strata_kernels.reference.sample and .uniform: the same choice unless rounding decides it.
// Shapes: `logits` float32 [n_tokens], -inf rules a token out; `seen` uint32, a bit a token; `ring` uint64 [RING_WORDS] and
//   `retired` in registered host memory. `workspace`: strata_kernels.structs.sample_workspace_bytes(n_tokens) bytes, aligned to
//   16, zero before the first launch; launches that share one must not overlap.
// Result: ring[number % RING_WORDS * rows.ring] is the token, or all ones where a logit is NaN or inf or none is finite: then
//   `step->token` and `seen` stay as they are.
// Launch geometry: ceil(n_tokens / 5120) blocks or more, at most 64, of 512 threads. Every block looks at up to 5120 tokens,
//   in runs of 32 that go round the blocks; the last to finish chooses. Along y a sequence each (`SampleRows`): with several,
//   `retired` is null, and the kernel after it retires the step.
// Accumulation: float64, in an order that depends on n_tokens and blocks alone; on the slow path, integers of 2^-44.
//
// How. A token's score and id make one key of 64 bits that orders tokens as the options need, so all keys differ.
// Each block hands on some of its greatest keys (all of those from a threshold on). Every key that is at least the greatest of these
// thresholds is then known to the last block; it sorts some of the greatest and finds where top-k, top-p and min-p end. If they end
// beyond what is known, the last block looks at all logits again, by radix (SLOW below). Without limits, blocks add
// up the weights of each run of 32, and the last block draws a run, then a token.
#include "intrinsics.cuh"
#include "step.cuh"

namespace strata {

// In device memory, so that one captured graph serves all options. `strata_kernels.structs.SampleOptions`.
struct SampleOptions {
  double temperature;
  double top_p;
  double min_p;
  double repeat_penalty;
  uint64_t seed;
  int32_t top_k;
  int32_t first_position;  // the draw's number is the step's position less this
};

// How far the next row is, where several sequences choose at once: in values, words, bytes, and words from one step's to the
// next's in the ring. `strata_kernels.structs.SampleRows`.
struct SampleRows {
  int32_t logits;
  int32_t seen;
  int32_t workspace;
  int32_t ring;
};

namespace sample {

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int ROWS = 10;  // tokens a thread
constexpr int BLOCKS_MAX = 64;
constexpr int LEAST = 32, MOST = 64;                               // keys that a block hands on
constexpr int FINAL_ROWS = BLOCKS_MAX * MOST / THREADS;            // of them a thread of the last block
constexpr int FEW = 128, MANY = 1024;                              // keys that the last block sorts
constexpr int DIGIT = 11, BINS = 1 << DIGIT, BINS_A_THREAD = BINS / THREADS;
constexpr uint32_t ALL = 0xFFFFFFFFu;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000u); }

// What a block tells the last one.
struct Part {
  uint64_t greatest;   // key, or 0
  uint64_t threshold;  // its keys from this on are handed on; 0: all are
  double sum;          // of exp(score - its greatest score), where top-p needs it
  int32_t n_keys;      // handed on
  int32_t n_possible;  // tokens that are not ruled out
  int32_t not_finite;
  int32_t padding;
};

struct Workspace {
  uint32_t* arrived;
  Part* parts;       // [blocks]
  uint64_t* keys;    // [blocks][MOST]
  double* run_sums;  // [runs], of weights relative to the greatest score of the run's block

  __device__ __forceinline__ Workspace(uint8_t* memory, int n_blocks) {
    arrived = reinterpret_cast<uint32_t*>(memory);
    parts = reinterpret_cast<Part*>(memory + 16);
    keys = reinterpret_cast<uint64_t*>(parts + n_blocks);
    run_sums = reinterpret_cast<double*>(keys + n_blocks * MOST);
  }
};

struct Shared {
  uint64_t list[MANY];
  uint64_t bins[BINS];
  int bin_counts[BINS];
  uint64_t warp_words[WARPS];
  double warp_sums[WARPS];
  int counters[3];
  int warp_counts[WARPS];
  int n;
  int chosen;
  int is_last;
  uint64_t word;
  double number;
};

// ---- Keys: greater is likelier, and of equals the lower id. 0 is a token that is ruled out.

__device__ __forceinline__ uint64_t key_of(float score, int id) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes 0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return score == -infinity() ? 0 : static_cast<uint64_t>(ordered) << 32 | ~static_cast<uint32_t>(id);
}

__device__ __forceinline__ float score_of(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}

__device__ __forceinline__ int id_of(uint64_t key) { return static_cast<int>(~static_cast<uint32_t>(key)); }

// A token's score; sets `not_finite` where its logit is NaN or inf.
__device__ __forceinline__ uint64_t read_key(const float* logits, const uint32_t* seen, double penalty, int id,
                                             int& not_finite) {
  float score = __ldcg(logits + id);
  not_finite |= !(score < infinity());
  if (penalty != 1.0 && score > -infinity() && __ldcg(seen + id / 32) >> (id % 32) & 1u) {
    const double wide = score, largest = 3.4028234663852886e38;
    const double penalized = wide > 0.0 ? wide / penalty : wide * penalty;
    score = static_cast<float>(fmin(fmax(penalized, -largest), largest));
  }
  return key_of(score, id);
}

// exp((score - top) / temperature).
__device__ __forceinline__ double weight(float score, float top, double inverse_temperature) {
  const double difference = static_cast<double>(score) - static_cast<double>(top);
  return difference == 0.0 ? 1.0 : static_cast<double>(expf(static_cast<float>(difference * inverse_temperature)));
}

// ---- Sums, counts and sorting in a block. Each begins and ends with shared memory free to be used again.

template <typename T>
__device__ __forceinline__ T* warp_slots(Shared& shared);
template <>
__device__ __forceinline__ double* warp_slots<double>(Shared& shared) {
  return shared.warp_sums;
}
template <>
__device__ __forceinline__ uint64_t* warp_slots<uint64_t>(Shared& shared) {
  return shared.warp_words;
}

// The sum of the values of the threads before this one, and of all.
template <typename T>
__device__ __forceinline__ T scan(Shared& shared, T value, T& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T* slots = warp_slots<T>(shared);
  T sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(ALL, sum, offset);
    if (lane >= offset) sum += other;
  }
  T before = __shfl_up_sync(ALL, sum, 1);
  if (lane == 0) before = 0;
  if (lane == 31) slots[warp] = sum;
  __syncthreads();
  T base = 0, all = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i == warp) base = all;
    all += slots[i];
  }
  __syncthreads();
  total = all;
  return base + before;
}

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(ALL, key, offset);
    key = other > key ? other : key;
  }
  return key;
}

// A key from which on there are `least` to `most` keys of the block's. There are more from `low` on, and all are below
// `high`. Every step halves what lies between.
template <int N>
__device__ __forceinline__ uint64_t find_threshold(Shared& shared, const uint64_t (&keys)[N], int n_rows, uint64_t low,
                                                   uint64_t high, int least, int most) {
  if (threadIdx.x == 0) shared.counters[0] = 0;
  __syncthreads();
  for (int step = 0;; step = step == 2 ? 0 : step + 1) {
    const uint64_t middle = low + (high - low) / 2;
    int count = 0;
#pragma unroll
    for (int row = 0; row < N; ++row) {
      if (row < n_rows) count += keys[row] >= middle;
    }
    count = __reduce_add_sync(ALL, count);
    if (threadIdx.x % 32 == 0 && count > 0) atomicAdd(&shared.counters[step], count);
    // the counter after the next was read before the last barrier
    if (threadIdx.x == 0) shared.counters[step == 2 ? 0 : step + 1] = 0;
    __syncthreads();
    count = shared.counters[step];
    if (count >= least && count <= most) {
      __syncthreads();
      return middle;
    }
    if (count > most) {
      low = middle;
    } else {
      high = middle;
    }
  }
}

// Sorts shared.list[0 .. n), the greatest first; n up to MANY.
__device__ __forceinline__ void sort(Shared& shared, int n) {
  int size = 1;
  while (size < n) size *= 2;
  for (int i = n + static_cast<int>(threadIdx.x); i < size; i += THREADS) shared.list[i] = 0;
  __syncthreads();
  for (int width = 2; width <= size; width *= 2) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
        const int i = pair / distance * (2 * distance) + pair % distance, j = i + distance;
        const uint64_t a = shared.list[i], b = shared.list[j];
        if ((i & width) == 0 ? a < b : a > b) {
          shared.list[i] = b;
          shared.list[j] = a;
        }
      }
      __syncthreads();
    }
  }
}

// ---- Random numbers.

// 53 bits of Philox4x32-10: in [0, 1).
__device__ __forceinline__ double uniform(uint64_t seed, uint64_t draw) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(draw), c1 = static_cast<uint32_t>(draw >> 32), c2 = 0, c3 = 0;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t left = __umulhi(0xD2511F53u, c0), right = __umulhi(0xCD9E8D57u, c2);
    const uint32_t left_low = 0xD2511F53u * c0, right_low = 0xCD9E8D57u * c2;
    c0 = right ^ c1 ^ k0;
    c2 = left ^ c3 ^ k1;
    c1 = right_low;
    c3 = left_low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (static_cast<double>(c0 >> 5) * 67108864.0 + static_cast<double>(c1 >> 6)) * (1.0 / 9007199254740992.0);
}

// ---- The last block.

struct Task {
  const float* logits;
  const uint32_t* seen;
  SampleOptions options;
  int n_tokens;
  int n_blocks;
  int top_k;  // 0: off
  double inverse_temperature;
  double random;

  __device__ __forceinline__ uint64_t key(int id) const {
    int not_finite = 0;
    return id < n_tokens ? read_key(logits, seen, options.repeat_penalty, id, not_finite) : 0;
  }
};

// The token of the run whose part of the sums the random number falls into. `sum(run)` gives a run's, `kept(key)` whether
// a token counts, relative to `top`.
template <typename Sum, typename Kept>
__device__ __forceinline__ int draw_from_runs(Shared& shared, const Task& task, float top, Sum sum, Kept kept) {
  const int n_runs = (task.n_tokens + 31) / 32, n = (n_runs + THREADS - 1) / THREADS;
  const int first = threadIdx.x * n, end = min(first + n, n_runs);
  double mine = 0.0, total;
  for (int run = first; run < end; ++run) mine += sum(run);
  if (threadIdx.x == 0) shared.chosen = -1;
  const double before = scan(shared, mine, total);
  const double at = task.random * total;
  // The last thread whose part begins at or before it: a last resort where sums in other orders leave a gap.
  if (mine > 0.0 && before <= at) atomicMax(&shared.chosen, static_cast<int>(threadIdx.x));
  __syncthreads();
  if (static_cast<int>(threadIdx.x) == shared.chosen) {
    double begins = before, reached = before;
    int chosen = first;
    for (int run = first; run < end; ++run) {
      const double part = sum(run);
      if (part > 0.0 && reached <= at) {
        chosen = run;
        begins = reached;
      }
      reached += part;
    }
    shared.n = chosen;
    shared.number = begins;
  }
  __syncthreads();
  const int run = shared.n;
  if (threadIdx.x < 32) {
    const uint64_t key = task.key(32 * run + static_cast<int>(threadIdx.x));
    const double part = key != 0 && kept(key) ? weight(score_of(key), top, task.inverse_temperature) : 0.0;
    double reached = part;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const double other = __shfl_up_sync(ALL, reached, offset);
      if (static_cast<int>(threadIdx.x) >= offset) reached += other;
    }
    const uint32_t candidates = __ballot_sync(ALL, part > 0.0 && shared.number + (reached - part) <= at);
    const uint32_t possible = __ballot_sync(ALL, part > 0.0);
    const uint32_t from = candidates != 0 ? candidates : possible & (0u - possible);
    if (threadIdx.x == 0) shared.chosen = 32 * run + 31 - __clz(static_cast<int>(from));
  }
  __syncthreads();
  return shared.chosen;
}

// How many of the n greatest keys, sorted in shared.list, the limits keep; -1 where that depends on keys after them.
// `sum` is that of all weights at temperature 1 and counts where top-k is off; `all` says that there are no other keys.
__device__ __forceinline__ int count_kept(Shared& shared, const Task& task, int n, bool all, double sum) {
  const float top = score_of(shared.list[0]);
  if (task.top_k > 0 && n >= task.top_k) {
    n = task.top_k;
    all = true;
  }
  if (task.top_k > 0 && !all) return -1;
  const int i = 2 * threadIdx.x;
  const double first = i < n ? weight(score_of(shared.list[i]), top, 1.0) : 0.0;
  const double second = i + 1 < n ? weight(score_of(shared.list[i + 1]), top, 1.0) : 0.0;
  double total;
  const double before = scan(shared, first + second, total);
  const double reach = task.options.top_p < 1.0 ? task.options.top_p * (task.top_k > 0 ? total : sum) : infinity();
  const bool keeps_first = i < n && (i == 0 || (before < reach && first >= task.options.min_p));
  const bool keeps_second = i + 1 < n && before + first < reach && second >= task.options.min_p;
  const int kept = __syncthreads_count(keeps_first) + __syncthreads_count(keeps_second);
  return kept < n || all ? kept : -1;
}

// A token of the first n keys of shared.list.
__device__ __forceinline__ int draw_from_list(Shared& shared, const Task& task, int n) {
  const float top = score_of(shared.list[0]);
  __syncthreads();
  // ids first, complemented as they are: descending, so the lowest id comes first
  for (int i = threadIdx.x; i < n; i += THREADS) shared.list[i] = shared.list[i] << 32 | shared.list[i] >> 32;
  sort(shared, n);
  const int i = 2 * threadIdx.x;
  const auto part = [&](int at) {
    return at < n ? weight(score_of(shared.list[at] << 32), top, task.inverse_temperature) : 0.0;
  };
  const double first = part(i), second = part(i + 1);
  double total;
  if (threadIdx.x == 0) shared.chosen = 0;
  const double before = scan(shared, first + second, total);
  const double at = task.random * total;
  if (first > 0.0 && before <= at) atomicMax(&shared.chosen, i);
  if (second > 0.0 && before + first <= at) atomicMax(&shared.chosen, i + 1);
  __syncthreads();
  return id_of(shared.list[shared.chosen] >> 32);
}

// ---- SLOW: one block over all logits.

// The key before which, from the greatest on, `target` is reached: of `amount(key)` over keys from `floor` on. 0 is returned
// where all do not reach it. Amounts are integers, so that their sums have no order.
template <typename Amount>
__device__ __forceinline__ uint64_t select(Shared& shared, const Task& task, uint64_t target, uint64_t floor,
                                           Amount amount) {
  uint64_t prefix = 0;
  int shift = 64;
  while (shift > 0) {
    const int bits = shift < DIGIT ? shift : DIGIT, lower = shift - bits;
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
      shared.bins[i] = 0;
      shared.bin_counts[i] = 0;
    }
    __syncthreads();
    for (int id = threadIdx.x; id < task.n_tokens; id += THREADS) {
      const uint64_t key = task.key(id);
      if (key == 0 || key < floor || (shift < 64 && key >> shift != prefix)) continue;
      const int bin = static_cast<int>(key >> lower & ((1u << bits) - 1u));
      atomicAdd(reinterpret_cast<unsigned long long*>(&shared.bins[bin]), static_cast<unsigned long long>(amount(key)));
      atomicAdd(&shared.bin_counts[bin], 1);
    }
    if (threadIdx.x == 0) shared.chosen = -1;
    __syncthreads();
    // thread t has the bins from the greatest on
    const int first = BINS - 1 - BINS_A_THREAD * static_cast<int>(threadIdx.x);
    uint64_t mine = 0, total;
#pragma unroll
    for (int i = 0; i < BINS_A_THREAD; ++i) mine += shared.bins[first - i];
    uint64_t reached = scan(shared, mine, total);
#pragma unroll
    for (int i = 0; i < BINS_A_THREAD; ++i) {
      const uint64_t next = reached + shared.bins[first - i];
      if (reached < target && next >= target) {  // in one bin of one thread
        shared.chosen = first - i;
        shared.word = reached;
      }
      reached = next;
    }
    __syncthreads();
    const int bin = shared.chosen;
    if (bin < 0) return 0;
    prefix = shift < 64 ? prefix << bits | static_cast<uint64_t>(bin) : static_cast<uint64_t>(bin);
    target -= shared.word;
    shift = lower;
    const bool is_one = shared.bin_counts[bin] == 1;
    __syncthreads();
    if (is_one) break;  // nothing else begins so
  }
  return prefix << shift;
}

__device__ __forceinline__ int choose_slowly(Shared& shared, const Task& task, double* run_sums, float top) {
  const auto amount = [&](uint64_t key) {
    return static_cast<uint64_t>(weight(score_of(key), top, 1.0) * 17592186044416.0 + 0.5);  // 2^44
  };
  uint64_t threshold = 1;
  if (task.top_k > 0) {
    threshold = select(shared, task, task.top_k, threshold, [](uint64_t) { return uint64_t{1}; });
  }
  if (task.options.top_p < 1.0) {
    uint64_t mine = 0, total;
    for (int id = threadIdx.x; id < task.n_tokens; id += THREADS) {
      const uint64_t key = task.key(id);
      if (key != 0 && key >= threshold) mine += amount(key);
    }
    scan(shared, mine, total);
    const uint64_t target = static_cast<uint64_t>(ceil(task.options.top_p * static_cast<double>(total)));
    const uint64_t found = select(shared, task, target > 0 ? target : 1, threshold, amount);
    threshold = found > threshold ? found : threshold;
  }
  const auto kept = [&](uint64_t key) {
    return key >= threshold && weight(score_of(key), top, 1.0) >= task.options.min_p;
  };
  const int n_runs = (task.n_tokens + 31) / 32;
  for (int run = threadIdx.x / 32; run < n_runs; run += WARPS) {
    const uint64_t key = task.key(32 * run + static_cast<int>(threadIdx.x % 32));
    double sum = key != 0 && kept(key) ? weight(score_of(key), top, task.inverse_temperature) : 0.0;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL, sum, offset);
    if (threadIdx.x % 32 == 0) run_sums[run] = sum;
  }
  __syncthreads();
  return draw_from_runs(shared, task, top, [&](int run) { return run_sums[run]; }, kept);
}

// The token, from the keys that all blocks handed on.
__device__ __forceinline__ int choose(Shared& shared, const Task& task, const Workspace& workspace, float top,
                                      uint64_t known_from, int n_possible, double sum) {
  const int n_slots = task.n_blocks * MOST, n_rows = (n_slots + THREADS - 1) / THREADS;
  uint64_t keys[FINAL_ROWS];
  int mine = 0;
#pragma unroll
  for (int row = 0; row < FINAL_ROWS; ++row) {
    keys[row] = 0;
    const int slot = row * THREADS + static_cast<int>(threadIdx.x);
    if (row < n_rows && slot < n_slots && slot % MOST < __ldcg(&workspace.parts[slot / MOST].n_keys)) {
      const uint64_t key = __ldcg(workspace.keys + slot);
      if (key >= known_from) keys[row] = key;
    }
    mine += keys[row] != 0;
  }
  uint64_t known_words;
  scan(shared, static_cast<uint64_t>(mine), known_words);
  const int n_known = static_cast<int>(known_words);
  const uint64_t above = key_of(top, 0) + 1;
#pragma unroll 1
  for (int most = FEW; most <= MANY; most *= MANY / FEW) {
    if (task.top_k > most && n_known > most) continue;
    uint64_t from = 1;
    if (n_known > most) {
      from = find_threshold(shared, keys, n_rows, 1, above, task.top_k > most / 2 ? task.top_k : most / 2, most);
    }
    if (threadIdx.x == 0) shared.n = 0;
    __syncthreads();
#pragma unroll
    for (int row = 0; row < FINAL_ROWS; ++row) {
      if (row < n_rows && keys[row] >= from) {
        const int at = atomicAdd(&shared.n, 1);
        if (at < MANY) shared.list[at] = keys[row];
      }
    }
    __syncthreads();
    const int n = shared.n;
    sort(shared, n);
    const int kept = count_kept(shared, task, n, n == n_possible, sum);
    if (kept > 0) return draw_from_list(shared, task, kept);
    if (n == n_known) break;
  }
  return choose_slowly(shared, task, workspace.run_sums, top);
}

}  // namespace sample
}  // namespace strata

extern "C" __global__ void __launch_bounds__(strata::sample::THREADS, 1)
    sample(const float* __restrict__ logits, int32_t n_tokens, const strata::SampleOptions* __restrict__ options_at,
           uint32_t* seen, uint8_t* memory, strata::Step* step, uint64_t* ring, volatile uint64_t* retired,
           strata::SampleRows rows) {
  using namespace strata;
  using namespace strata::sample;
  __shared__ Shared shared;
  const int of_row = blockIdx.y;
  logits += static_cast<int64_t>(of_row) * rows.logits;
  options_at += of_row;
  seen += static_cast<int64_t>(of_row) * rows.seen;
  memory += static_cast<int64_t>(of_row) * rows.workspace;
  step += of_row;
  ring += of_row;
  wait_for_previous();
  let_next_start();

  Task task{logits, seen, *options_at, n_tokens, static_cast<int>(gridDim.x), 0, 0.0, 0.0};
  const SampleOptions& options = task.options;
  task.top_k = options.top_k >= n_tokens ? 0 : options.top_k;
  task.inverse_temperature = 1.0 / options.temperature;
  const bool greedy = options.temperature == 0.0 || options.top_k == 1;
  const bool limited = task.top_k > 0 || options.top_p < 1.0 || options.min_p > 0.0;
  const bool needs_sum = task.top_k == 0 && options.top_p < 1.0;
  const Workspace workspace(memory, task.n_blocks);
  const int block = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // ---- This block's tokens.
  uint64_t keys[ROWS], greatest = 0;
  int not_finite = 0, n_possible = 0;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const int id = ((row * WARPS + warp) * task.n_blocks + block) * 32 + lane;
    keys[row] = id < n_tokens ? read_key(logits, seen, options.repeat_penalty, id, not_finite) : 0;
    greatest = keys[row] > greatest ? keys[row] : greatest;
    n_possible += keys[row] != 0;
  }
  greatest = warp_max(greatest);
  n_possible = __reduce_add_sync(ALL, n_possible);
  if (lane == 0) {
    shared.warp_words[warp] = greatest;
    shared.warp_counts[warp] = n_possible;
  }
  if (threadIdx.x == 0) shared.n = 0;
  not_finite = __syncthreads_or(not_finite);
  n_possible = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    greatest = shared.warp_words[i] > greatest ? shared.warp_words[i] : greatest;
    n_possible += shared.warp_counts[i];
  }
  __syncthreads();

  const float block_top = score_of(greatest);
  double sum = 0.0;
  uint64_t threshold = 0;
  if (!greedy && !limited) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      double part = keys[row] != 0 ? weight(score_of(keys[row]), block_top, task.inverse_temperature) : 0.0;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) part += __shfl_xor_sync(ALL, part, offset);
      const int run = (row * WARPS + warp) * task.n_blocks + block;
      if (lane == 0 && 32 * run < n_tokens) workspace.run_sums[run] = part;
    }
  } else if (!greedy) {
    if (needs_sum) {
      double mine = 0.0;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        if (keys[row] != 0) mine += weight(score_of(keys[row]), block_top, 1.0);
      }
      scan(shared, mine, sum);
    }
    if (n_possible > MOST) threshold = find_threshold(shared, keys, ROWS, 1, greatest + 1, LEAST, MOST);
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      if (keys[row] != 0 && keys[row] >= threshold) {
        const int slot = atomicAdd(&shared.n, 1);
        if (slot < MOST) workspace.keys[block * MOST + slot] = keys[row];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    workspace.parts[block] = {greatest, threshold, sum, shared.n, n_possible, not_finite != 0, 0};
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.is_last = atomicInc(workspace.arrived, task.n_blocks - 1) == static_cast<uint32_t>(task.n_blocks - 1);
  }
  __syncthreads();
  if (!shared.is_last) return;

  // ---- The last block: all parts, one a thread.
  __threadfence();
  Part part{};
  if (static_cast<int>(threadIdx.x) < task.n_blocks) {
    const Part* from = workspace.parts + threadIdx.x;
    part = {__ldcg(&from->greatest), __ldcg(&from->threshold),  __ldcg(&from->sum), 0,
            __ldcg(&from->n_possible), __ldcg(&from->not_finite), 0};
  }
  const uint64_t warp_greatest = warp_max(part.greatest), warp_threshold = warp_max(part.threshold);
  if (lane == 0) {
    shared.warp_words[warp] = warp_greatest;
    shared.list[warp] = warp_threshold;
  }
  not_finite = __syncthreads_or(part.not_finite);
  uint64_t known_from = 0;
  greatest = 0;
#pragma unroll
  for (int i = 0; i < (BLOCKS_MAX + 31) / 32; ++i) {
    greatest = shared.warp_words[i] > greatest ? shared.warp_words[i] : greatest;
    known_from = shared.list[i] > known_from ? shared.list[i] : known_from;
  }
  __syncthreads();

  const bool failed = not_finite != 0 || greatest == 0;
  int token = id_of(greatest);
  if (!failed && !greedy) {
    const float top = score_of(greatest);
    task.random = uniform(options.seed, static_cast<uint64_t>(static_cast<int64_t>(step->position) - options.first_position));
    if (limited) {
      const double scaled = needs_sum && part.greatest != 0 ? part.sum * weight(score_of(part.greatest), top, 1.0) : 0.0;
      double total;
      scan(shared, scaled, total);
      uint64_t n_all;
      scan(shared, static_cast<uint64_t>(part.n_possible), n_all);
      token = choose(shared, task, workspace, top, known_from, static_cast<int>(n_all), total);
    } else {
      // weights of a block's runs are relative to the block's own greatest score
      double* scales = reinterpret_cast<double*>(shared.list);
      if (static_cast<int>(threadIdx.x) < task.n_blocks) {
        scales[threadIdx.x] =
            part.greatest != 0 ? weight(score_of(part.greatest), top, task.inverse_temperature) : 0.0;
      }
      __syncthreads();
      token = draw_from_runs(
          shared, task, top,
          [&](int run) {
            const double scale = scales[run % task.n_blocks];
            return scale > 0.0 ? __ldcg(workspace.run_sums + run) * scale : 0.0;
          },
          [](uint64_t) { return true; });
    }
  }

  // ---- The end of the step.
  if (threadIdx.x == 0) {
    const uint64_t number = step->number;
    ring[number % RING_WORDS * rows.ring] = failed ? ~uint64_t{0} : static_cast<uint64_t>(static_cast<uint32_t>(token));
    if (!failed) {
      step->token = token;
      seen[token / 32] |= 1u << (token % 32);
    }
    step->position += 1;
    __threadfence_system();
    if (retired != nullptr) *retired = number;
    step->number = number + 1;
  }
}
