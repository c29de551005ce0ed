// Threads, barriers, warps and launches.
//
// A grid's blocks run one after the other. Each CUDA thread of a block is a fiber that runs until it waits: at a barrier
// for all threads, at a warp's operation for the lanes of its mask, or until it ends. Between two barriers the threads
// run in ascending order, between the next two in descending order, so that a missing barrier is seen in one of them.
// When none can go on, the launch fails and says who waits where. So do faults (SIGSEGV beyond a buffer, SIGILL from
// the compiler's checks) and kernels that take too long.
#pragma once

inline dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim{1, 1, 1}, gridDim{1, 1, 1};
constexpr int warpSize = 32;

namespace strata_host {

struct Site {
  const char* file;
  int line;
  constexpr Site(const char* file_ = __builtin_FILE(), int line_ = __builtin_LINE()) : file(file_), line(line_) {}
};
#define STRATA_SITE strata_host::Site(__builtin_FILE(), __builtin_LINE())

struct Copy {
  void* to;
  uint8_t bytes[16];
};

enum State { READY, PAUSED, AT_BARRIER, AT_WARP, ENDED };

struct Fiber {
  void* stack_pointer;
  ucontext_t context;  // where there is no switch of our own
  dim3 thread;
  State state;
  const char* operation;  // that it waits in
  Site site;
  unsigned mask;
  const void* in;
  void* out;
  int predicate;                          // given to a barrier
  bool has_waited;                        // for the kernel before
  std::vector<std::vector<Copy>> copies;  // committed groups, and last the open one
};

struct Emulator {
  std::vector<Fiber> fibers;
  uint8_t* stacks = nullptr;  // of as many fibers as a block may have
  void* scheduler = nullptr;
  ucontext_t scheduler_context;
  int current = 0;
  int n_threads = 0;
  void (*kernel)(void**) = nullptr;
  void** arguments = nullptr;
  uint8_t* dynamic = nullptr;  // shared memory of the launch, before an inaccessible page
  size_t dynamic_bytes = 0;
  bool failed = false;
  bool is_inside = true;  // what runs is no kernel
  uint32_t code = 0, other = 0;  // of `fail_at`
  int barrier_result[3];  // or, and, count
  char message[2048];
  sigjmp_buf fault;
  siginfo_t fault_info;
  void* fault_code = nullptr;
};

inline Emulator emulator;

constexpr size_t PAGE = 4096, STACK_BYTES = 256 * 1024;
constexpr unsigned THREADS_MAX = 1024;
constexpr size_t DYNAMIC_SHARED_MAX = 227 * 1024;

// Saves the registers that a call keeps, and goes on where another stack was left.
#ifdef __x86_64__
extern "C" void strata_host_switch(void** left, void* to);
asm(R"(
  .text
  .hidden strata_host_switch
  .globl strata_host_switch
  .type strata_host_switch, @function
strata_host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size strata_host_switch, . - strata_host_switch
)");
#endif

inline void to_scheduler() {
  Emulator& e = emulator;
#ifdef __x86_64__
  strata_host_switch(&e.fibers[e.current].stack_pointer, e.scheduler);
#else
  swapcontext(&e.fibers[e.current].context, &e.scheduler_context);
#endif
}

inline void to_fiber(int index) {
  Emulator& e = emulator;
  Fiber& fiber = e.fibers[index];
  e.current = index;
  threadIdx = fiber.thread;
#ifdef __x86_64__
  strata_host_switch(&e.scheduler, fiber.stack_pointer);
#else
  swapcontext(&e.scheduler_context, &fiber.context);
#endif
}

// While a kernel's thread is in here: not watched.
struct Inside {
  Inside() { emulator.is_inside = true; }
  ~Inside() { emulator.is_inside = false; }
};

inline void fiber_main() {
  Emulator& e = emulator;
  e.is_inside = false;
  e.kernel(e.arguments);
  e.is_inside = true;
  e.fibers[e.current].state = ENDED;
  to_scheduler();
  __builtin_unreachable();
}

inline Fiber& self() { return emulator.fibers[emulator.current]; }

// Ends the launch from within a thread.
template <typename... Values>
[[noreturn]] inline void fail(const char* format, Values... values) {
  Emulator& e = emulator;
  e.is_inside = true;
  const int n = snprintf(e.message, sizeof e.message, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x,
                         blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
  snprintf(e.message + n, sizeof e.message - n, format, values...);
  e.failed = true;
  to_scheduler();
  __builtin_unreachable();
}

template <typename... Values>
[[noreturn]] inline void fail_at(uint32_t code, uint32_t other, const char* format, Values... values) {
  emulator.code = code;
  emulator.other = other;
  fail(format, values...);
}

inline void start_fiber(int index) {
  Emulator& e = emulator;
  Fiber& fiber = e.fibers[index];
  const unsigned i = static_cast<unsigned>(index);
  fiber.thread = dim3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
  fiber.state = READY;
  fiber.copies.assign(1, {});
  fiber.has_waited = !WATCHES || watch.before == 0;
  uint8_t* stack = e.stacks + index * (STACK_BYTES + PAGE) + PAGE;
#ifdef __x86_64__
  void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
  top[-1] = nullptr;
  top[-2] = reinterpret_cast<void*>(&fiber_main);
  for (int k = 3; k <= 8; ++k) top[-k] = nullptr;
  fiber.stack_pointer = top - 8;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
#endif
}

// Stacks for launches of all libraries, one at a time: each is two of the 65,530 mappings that a process may have.
inline void* make_stacks() {
  void* map = mmap(nullptr, THREADS_MAX * (STACK_BYTES + PAGE), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) abort();
  auto* stacks = static_cast<uint8_t*>(map);
  for (size_t i = 0; i < THREADS_MAX; ++i) {
    if (mprotect(stacks + i * (STACK_BYTES + PAGE), PAGE, PROT_NONE) != 0) abort();
  }
  return stacks;
}

// ---- Shared memory.

struct Bytes {
  uint8_t* begin = nullptr;
  size_t size = 0;
  bool holds(const void* p, size_t n) const {
    const auto* at = static_cast<const uint8_t*>(p);
    return at >= begin && at + n <= begin + size;
  }
};

static thread_local char static_shared_anchor;

// This library's thread-local storage, which is where variables in shared memory lie.
inline Bytes static_shared() {
  asm volatile("" : : "r"(&static_shared_anchor) : "memory");  // makes the storage of this thread
  Bytes found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* to = static_cast<Bytes*>(data);
        const auto here = reinterpret_cast<uintptr_t>(&emulator);
        bool ours = false;
        size_t size = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const ElfW(Phdr)& part = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
          if (part.p_type == PT_LOAD && here >= begin && here < begin + part.p_memsz) ours = true;
          if (part.p_type == PT_TLS) size = part.p_memsz;
        }
        if (!ours) return 0;
        to->begin = static_cast<uint8_t*>(info->dlpi_tls_data);
        to->size = to->begin == nullptr ? 0 : size;
        return 1;
      },
      &found);
  return found;
}

inline Bytes static_bytes;

inline bool is_shared(const void* p, size_t n) {
  return static_bytes.holds(p, n) || Bytes{emulator.dynamic, emulator.dynamic_bytes}.holds(p, n);
}

inline uint8_t* dynamic_shared() { return emulator.dynamic; }

inline void make_dynamic(size_t size) {
  Emulator& e = emulator;
  static uint8_t* area = nullptr;
  const size_t area_bytes = (DYNAMIC_SHARED_MAX + PAGE - 1) / PAGE * PAGE;
  if (area == nullptr) {
    void* map = mmap(nullptr, area_bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) abort();
    area = static_cast<uint8_t*>(map);
    mprotect(area + area_bytes, PAGE, PROT_NONE);
  }
  e.dynamic_bytes = (size + 15) / 16 * 16;
  e.dynamic = area + area_bytes - e.dynamic_bytes;
}

// ---- Barriers and warps.

inline int barrier(const char* operation, int predicate, int which, Site site) {
  const Inside inside;
  Fiber& me = self();
  me.state = AT_BARRIER;
  me.operation = operation;
  me.site = site;
  me.predicate = predicate;
  to_scheduler();
  return emulator.barrier_result[which];
}

// Lets other threads run.
inline void pause_thread() {
  const Inside inside;
  self().state = PAUSED;
  to_scheduler();
}

// What the lanes of a warp gave to an operation and where each gets its result.
template <typename In, typename Out>
struct Lanes {
  Fiber* first;
  unsigned mask;
  bool has(int lane) const { return lane >= 0 && lane < 32 && (mask >> lane & 1u); }
  const In& in(int lane) const { return *static_cast<const In*>(first[lane].in); }
  Out& out(int lane) const { return *static_cast<Out*>(first[lane].out); }
};

// One operation of the lanes in `mask`: the last to come runs `combine` for all.
template <typename Out, typename In, typename Combine>
inline Out collective(const char* operation, unsigned mask, const In& in, Combine combine, Site site) {
  const Inside inside;
  Emulator& e = emulator;
  const int first = e.current / 32 * 32, lane = e.current % 32;
  if (!(mask >> lane & 1u)) fail("%s (%s:%d) without its own lane in the mask 0x%08x", operation, site.file, site.line, mask);
  Fiber& me = self();
  Out out{};
  me.state = AT_WARP;
  me.operation = operation;
  me.site = site;
  me.mask = mask;
  me.in = &in;
  me.out = &out;
  for (int l = 0; l < 32; ++l) {
    if (!(mask >> l & 1u)) continue;
    if (first + l < e.n_threads) {
      const Fiber& other = e.fibers[first + l];
      if (other.state == AT_WARP && other.mask == mask && strcmp(other.operation, operation) == 0) continue;
    }
    to_scheduler();
    return out;
  }
  combine(Lanes<In, Out>{&e.fibers[first], mask});
  for (int l = 0; l < 32; ++l) {
    if (mask >> l & 1u) e.fibers[first + l].state = READY;
  }
  return out;
}

inline void describe_deadlock() {
  Emulator& e = emulator;
  size_t n = snprintf(e.message, sizeof e.message, "block (%u, %u, %u): no thread can go on", blockIdx.x, blockIdx.y,
                      blockIdx.z);
  // Neighbours that wait in the same place are told of together.
  const auto same = [](const Fiber& a, const Fiber& b) {
    if (a.state != b.state) return false;
    if (a.state == ENDED) return true;
    return a.site.line == b.site.line && strcmp(a.operation, b.operation) == 0 &&
           (a.state == AT_BARRIER || a.mask == b.mask);
  };
  for (int i = 0; i < e.n_threads && n < sizeof e.message - 256;) {
    int last = i;
    while (last + 1 < e.n_threads && same(e.fibers[i], e.fibers[last + 1])) ++last;
    const Fiber& f = e.fibers[i];
    n += snprintf(e.message + n, sizeof e.message - n, "; threads %d to %d ", i, last);
    if (f.state == ENDED) {
      n += snprintf(e.message + n, sizeof e.message - n, "ended");
    } else {
      n += snprintf(e.message + n, sizeof e.message - n, "wait at %s", f.operation);
      if (f.state == AT_WARP) n += snprintf(e.message + n, sizeof e.message - n, " of lanes 0x%08x", f.mask);
      n += snprintf(e.message + n, sizeof e.message - n, " (%s:%d)", f.site.file, f.site.line);
    }
    i = last + 1;
  }
  e.failed = true;
}

// Runs the block `blockIdx` to its end or to a failure.
inline void run_block(bool forward) {
  Emulator& e = emulator;
  memset(static_bytes.begin, 0xFF, static_bytes.size);
  memset(e.dynamic, 0xFF, e.dynamic_bytes);
  if (WATCHES) watch.begin_block(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) + 1);
  const int n = e.n_threads, n_warps = (n + 31) / 32;
  for (int i = 0; i < n; ++i) start_fiber(i);
  for (;;) {
    for (int w = 0; w < n_warps; ++w) {
      const int first = 32 * (forward ? w : n_warps - 1 - w), lanes = n - first < 32 ? n - first : 32;
      for (bool ran = true; ran;) {
        ran = false;
        for (int l = 0; l < lanes; ++l) {
          const int index = first + (forward ? l : lanes - 1 - l);
          if (e.fibers[index].state != READY) continue;
          to_fiber(index);
          if (e.failed) return;
          ran = true;
        }
      }
    }
    int n_ended = 0, n_waiting = 0, any = 0, all = 1, count = 0;
    bool paused = false, together = true;
    for (int i = 0; i < n; ++i) {
      Fiber& fiber = e.fibers[i];
      n_ended += fiber.state == ENDED;
      if (fiber.state == PAUSED) {
        paused = true;
        fiber.state = READY;
      }
      if (fiber.state != AT_BARRIER) continue;
      ++n_waiting;
      any |= fiber.predicate != 0;
      all &= fiber.predicate != 0;
      count += fiber.predicate != 0;
      together &= fiber.site.line == e.fibers[0].site.line && strcmp(fiber.site.file, e.fibers[0].site.file) == 0;
    }
    if (n_ended == n) return;
    if (paused) continue;
    if (n_waiting < n || !together) return describe_deadlock();
    e.barrier_result[0] = any;
    e.barrier_result[1] = all;
    e.barrier_result[2] = count;
    for (int i = 0; i < n; ++i) e.fibers[i].state = READY;
    if (WATCHES) watch_barrier();
    forward = !forward;
  }
}

// ---- Launches.

struct Shape {
  uint32_t grid[3];
  uint32_t block[3];
  uint64_t shared_bytes;
  uint32_t seconds;  // of the processor's time that the launch may take
  void* stacks;      // of `make_stacks`
  void* history;     // of `make_history`
  uint32_t number;   // of the launch, from 1 on
  uint32_t before;   // number of the launch that may not have ended until this one waits for it; 0: none
};

struct Failure {
  const char* message;
  uintptr_t address;  // of the access that faulted, else 0
  uintptr_t code;     // where in this library it faulted, from its start; else 0
  uintptr_t other;    // where the access before was that this one is at odds with; else 0
};

inline void* make_history() { return new History; }

inline void on_fault(int, siginfo_t* info, void* context) {
  Emulator& e = emulator;
  e.fault_info = *info;
#ifdef __x86_64__
  e.fault_code = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#endif
  siglongjmp(e.fault, 1);
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGVTALRM};

inline void describe_fault(Failure* failure) {
  Emulator& e = emulator;
  e.is_inside = true;
  const int number = e.fault_info.si_signo;
  const char* what = number == SIGSEGV || number == SIGBUS ? "memory that is not mapped, or may not be written"
                     : number == SIGILL || number == SIGTRAP ? "a misaligned access, an index or a shift out of bounds"
                     : number == SIGFPE                      ? "a division by zero"
                                                             : "the kernel takes too long";
  snprintf(e.message, sizeof e.message, "block (%u, %u, %u), thread (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z,
           threadIdx.x, threadIdx.y, threadIdx.z, what);
  e.failed = true;
  if (number == SIGSEGV || number == SIGBUS) failure->address = reinterpret_cast<uintptr_t>(e.fault_info.si_addr);
  Dl_info info;
  if (e.fault_code != nullptr && dladdr(e.fault_code, &info) && info.dli_fbase != nullptr) {
    failure->code = reinterpret_cast<uintptr_t>(e.fault_code) - reinterpret_cast<uintptr_t>(info.dli_fbase);
  }
}

inline void run_grid(const Shape& shape, Failure* failure) {
  Emulator& e = emulator;
  static uint8_t* signal_stack = static_cast<uint8_t*>(malloc(65536));
  stack_t alternate{}, old_alternate{};
  alternate.ss_sp = signal_stack;
  alternate.ss_size = 65536;
  sigaltstack(&alternate, &old_alternate);
  constexpr int n_signals = sizeof SIGNALS / sizeof *SIGNALS;
  struct sigaction old[n_signals], action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < n_signals; ++i) sigaction(SIGNALS[i], &action, &old[i]);
  itimerval timer{}, old_timer{};
  timer.it_value.tv_sec = shape.seconds;
  setitimer(ITIMER_VIRTUAL, &timer, &old_timer);

  if (sigsetjmp(e.fault, 1) == 0) {
    bool forward = true;
    for (unsigned z = 0; z < gridDim.z && !e.failed; ++z) {
      for (unsigned y = 0; y < gridDim.y && !e.failed; ++y) {
        for (unsigned x = 0; x < gridDim.x && !e.failed; ++x) {
          blockIdx = dim3(x, y, z);
          run_block(forward);
          forward = !forward;
        }
      }
    }
  } else {
    describe_fault(failure);
  }

  setitimer(ITIMER_VIRTUAL, &old_timer, nullptr);
  for (int i = 0; i < n_signals; ++i) sigaction(SIGNALS[i], &old[i], nullptr);
  sigaltstack(&old_alternate, nullptr);
}

template <auto KERNEL>
struct Entry;

template <typename... Parameters, void (*KERNEL)(Parameters...)>
struct Entry<KERNEL> {
  template <size_t... I>
  static void call(void** arguments, std::index_sequence<I...>) {
    KERNEL(*static_cast<std::remove_cv_t<Parameters>*>(arguments[I])...);
  }

  static void run(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>()); }

  // Sizes of the parameters, and their number.
  static int describe(uint32_t* sizes, int n_max) {
    const uint32_t all[] = {static_cast<uint32_t>(sizeof(Parameters))..., 0};
    for (int i = 0; i < static_cast<int>(sizeof...(Parameters)) && i < n_max; ++i) sizes[i] = all[i];
    return static_cast<int>(sizeof...(Parameters));
  }

  // As cuLaunchKernel: `arguments` are addresses of the values. 0, or 1 with what went wrong.
  static int launch(const Shape* shape, void** arguments, Failure* failure) {
    Emulator& e = emulator;
    *failure = {e.message, 0, 0, 0};
    e.message[0] = 0;
    e.failed = false;
    e.code = e.other = 0;
    gridDim = dim3(shape->grid[0], shape->grid[1], shape->grid[2]);
    blockDim = dim3(shape->block[0], shape->block[1], shape->block[2]);
    const uint64_t n = uint64_t{blockDim.x} * blockDim.y * blockDim.z;
    if (n == 0 || n > THREADS_MAX || uint64_t{gridDim.x} * gridDim.y * gridDim.z == 0) {
      snprintf(e.message, sizeof e.message, "%llu threads a block; a block has 1 to 1024, and a grid a block at least",
               static_cast<unsigned long long>(n));
      return 1;
    }
    if (shape->shared_bytes > DYNAMIC_SHARED_MAX) {
      snprintf(e.message, sizeof e.message, "%llu bytes of shared memory; %zu are the most",
               static_cast<unsigned long long>(shape->shared_bytes), DYNAMIC_SHARED_MAX);
      return 1;
    }
    e.kernel = &run;
    e.arguments = arguments;
    e.n_threads = static_cast<int>(n);
    if (e.fibers.size() < n) e.fibers.resize(n);
    e.stacks = static_cast<uint8_t*>(shape->stacks);
    make_dynamic(shape->shared_bytes);
    static_bytes = static_shared();
    if (WATCHES) {
      watch.history = static_cast<History*>(shape->history);
      watch.history->begin_launch(shape->number);
      watch.before = shape->before;
      watch.has_waited = false;
      watch.dynamic.assign(e.dynamic_bytes, {});
      watch.fixed.assign(static_bytes.size, {});
    }
    run_grid(*shape, failure);
    if (WATCHES && e.failed && failure->code == 0) {
      failure->code = e.code;
      failure->other = e.other;
    }
    if (WATCHES && !e.failed && watch.before != 0 && !watch.has_waited) {
      snprintf(e.message, sizeof e.message, "no thread waits: the kernel after it may begin before the one before it has ended");
      e.failed = true;
    }
    return e.failed ? 1 : 0;
  }
};

// Shuffles: a value and the lane to take it from; a lane without a source keeps its own.
template <typename T>
struct Shuffle {
  T value;
  int from;
};

template <typename T>
inline T shuffle(const char* operation, unsigned mask, T value, int from, Site site) {
  static_assert(sizeof(T) <= 8, "shuffles take 2, 4 or 8 bytes");
  return collective<T>(
      operation, mask, Shuffle<T>{value, from},
      [](const Lanes<Shuffle<T>, T>& lanes) {
        for (int l = 0; l < 32; ++l) {
          if (!lanes.has(l)) continue;
          const int source = lanes.in(l).from;
          if (lanes.has(source)) {
            lanes.out(l) = lanes.in(source).value;
          } else {
            memset(&lanes.out(l), 0xFF, sizeof(T));  // of a lane outside the mask: not defined
          }
        }
      },
      site);
}

inline int lane() { return emulator.current % 32; }

template <typename T, typename Combine>
inline T reduce(const char* operation, unsigned mask, T value, Combine combine, Site site) {
  return collective<T>(
      operation, mask, value,
      [combine](const Lanes<T, T>& lanes) {
        bool any = false;
        T result{};
        for (int l = 0; l < 32; ++l) {
          if (!lanes.has(l)) continue;
          result = any ? combine(result, lanes.in(l)) : lanes.in(l);
          any = true;
        }
        for (int l = 0; l < 32; ++l) {
          if (lanes.has(l)) lanes.out(l) = result;
        }
      },
      site);
}

// ---- What threads touch.

#ifdef STRATA_WATCH

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;  // of this library

STRATA_UNWATCHED inline uint32_t place_of(const void* code) {
  return static_cast<uint32_t>(static_cast<const char*>(code) - &__ehdr_start);
}

STRATA_UNWATCHED inline void touch(const void* p, size_t n, Access access, const void* code) {
  Emulator& e = emulator;
  if (e.is_inside) return;
  e.is_inside = true;
  const auto* at = static_cast<const uint8_t*>(p);
  const uint32_t place = place_of(code) - 1;
  if (at >= e.dynamic && at < e.dynamic + e.dynamic_bytes) {
    touch_shared(watch.dynamic, "dynamic", at - e.dynamic, n, access, e.current, place);
  } else if (at >= static_bytes.begin && at < static_bytes.begin + static_bytes.size) {
    touch_shared(watch.fixed, "static", at - static_bytes.begin, n, access, e.current, place);
  } else if ((at < e.stacks || at >= e.stacks + THREADS_MAX * (STACK_BYTES + PAGE)) &&
             (p < static_cast<void*>(&__ehdr_start) || p >= static_cast<void*>(&_end))) {
    touch_global(reinterpret_cast<uintptr_t>(p), n, access, e.fibers[e.current].has_waited, place);
  }
  e.is_inside = false;
}

// For what the emulator itself does for a thread.
__attribute__((noinline)) STRATA_UNWATCHED inline void touch_here(const void* p, size_t n, Access access) {
  touch(p, n, access, __builtin_return_address(0));
}

STRATA_UNWATCHED inline Atomic::Atomic(const void* p, size_t size) {
  touch_here(p, size, ADDS);
  emulator.is_inside = true;
}
STRATA_UNWATCHED inline Atomic::~Atomic() { emulator.is_inside = false; }

#else

inline void touch_here(const void*, size_t, Access) {}

#endif

}  // namespace strata_host

#ifdef STRATA_WATCH
// What -fsanitize=thread calls.
#define STRATA_HOOK(name, parameters, size, access)                                                       \
  extern "C" __attribute__((visibility("hidden"), noinline, no_sanitize("thread"), used)) inline void     \
      __tsan_##name parameters {                                                                          \
    strata_host::touch(p, size, strata_host::access, __builtin_return_address(0));                        \
  }
#define STRATA_HOOKS(size)                                 \
  STRATA_HOOK(read##size, (void* p), size, READS)          \
  STRATA_HOOK(write##size, (void* p), size, WRITES)        \
  STRATA_HOOK(unaligned_read##size, (void* p), size, READS) \
  STRATA_HOOK(unaligned_write##size, (void* p), size, WRITES)
STRATA_HOOK(read1, (void* p), 1, READS)
STRATA_HOOK(write1, (void* p), 1, WRITES)
STRATA_HOOKS(2)
STRATA_HOOKS(4)
STRATA_HOOKS(8)
STRATA_HOOKS(16)
STRATA_HOOK(read_range, (void* p, long size), size, READS)
STRATA_HOOK(write_range, (void* p, long size), size, WRITES)
extern "C" __attribute__((visibility("hidden"), no_sanitize("thread"), used)) inline void __tsan_init() {}
#endif

#define STRATA_HERE strata_host::Site site = STRATA_SITE

inline void __syncthreads(STRATA_HERE) { strata_host::barrier("__syncthreads", 0, 0, site); }
inline int __syncthreads_or(int predicate, STRATA_HERE) {
  return strata_host::barrier("__syncthreads_or", predicate, 0, site);
}
inline int __syncthreads_and(int predicate, STRATA_HERE) {
  return strata_host::barrier("__syncthreads_and", predicate, 1, site);
}
inline int __syncthreads_count(int predicate, STRATA_HERE) {
  return strata_host::barrier("__syncthreads_count", predicate, 2, site);
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, STRATA_HERE) {
  strata_host::collective<int>(
      "__syncwarp", mask, 0,
      [](const strata_host::Lanes<int, int>& lanes) {
        if (strata_host::WATCHES && lanes.mask == 0xFFFFFFFFu) strata_host::watch_warp(strata_host::emulator.current / 32);
      },
      site);
}

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int from, int width = 32, STRATA_HERE) {
  const int lane = strata_host::lane();
  return strata_host::shuffle("__shfl_sync", mask, value, (lane & -width) | (from & (width - 1)), site);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, STRATA_HERE) {
  const int lane = strata_host::lane(), from = lane ^ lane_mask;
  return strata_host::shuffle("__shfl_xor_sync", mask, value, from >= (lane & -width) + width ? lane : from, site);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, STRATA_HERE) {
  const int lane = strata_host::lane(), from = lane - static_cast<int>(delta);
  return strata_host::shuffle("__shfl_up_sync", mask, value, from < (lane & -width) ? lane : from, site);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, STRATA_HERE) {
  const int lane = strata_host::lane(), from = lane + static_cast<int>(delta);
  return strata_host::shuffle("__shfl_down_sync", mask, value, from >= (lane & -width) + width ? lane : from, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, STRATA_HERE) {
  const unsigned mine = predicate ? 1u << strata_host::lane() : 0u;
  return strata_host::reduce("__ballot_sync", mask, mine, [](unsigned a, unsigned b) { return a | b; }, site);
}
inline int __any_sync(unsigned mask, int predicate, STRATA_HERE) {
  return strata_host::reduce("__any_sync", mask, predicate != 0 ? 1 : 0, [](int a, int b) { return a | b; }, site);
}
inline int __all_sync(unsigned mask, int predicate, STRATA_HERE) {
  return strata_host::reduce("__all_sync", mask, predicate != 0 ? 1 : 0, [](int a, int b) { return a & b; }, site);
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value, STRATA_HERE) {
  return strata_host::collective<unsigned>(
      "__match_any_sync", mask, value,
      [](const strata_host::Lanes<T, unsigned>& lanes) {
        for (int l = 0; l < 32; ++l) {
          if (!lanes.has(l)) continue;
          for (int other = 0; other < 32; ++other) {
            if (lanes.has(other) && lanes.in(other) == lanes.in(l)) lanes.out(l) |= 1u << other;
          }
        }
      },
      site);
}

#define STRATA_REDUCE(name, expression)                                                                  \
  inline unsigned name(unsigned mask, unsigned value, STRATA_HERE) {                                     \
    return strata_host::reduce(#name, mask, value, [](unsigned a, unsigned b) { return expression; }, site); \
  }
#define STRATA_REDUCE_INT(name, expression)                                                              \
  STRATA_REDUCE(name, expression)                                                                        \
  inline int name(unsigned mask, int value, STRATA_HERE) {                                               \
    return strata_host::reduce(#name, mask, value, [](int a, int b) { return expression; }, site);       \
  }
STRATA_REDUCE_INT(__reduce_add_sync, (static_cast<decltype(a)>(static_cast<unsigned>(a) + static_cast<unsigned>(b))))
STRATA_REDUCE_INT(__reduce_min_sync, (b < a ? b : a))
STRATA_REDUCE_INT(__reduce_max_sync, (a < b ? b : a))
STRATA_REDUCE(__reduce_and_sync, (a & b))
STRATA_REDUCE(__reduce_or_sync, (a | b))
STRATA_REDUCE(__reduce_xor_sync, (a ^ b))

// Lanes that have not ended.
inline unsigned __activemask() {
  const strata_host::Emulator& e = strata_host::emulator;
  unsigned mask = 0;
  for (int l = 0, first = e.current / 32 * 32; l < 32 && first + l < e.n_threads; ++l) {
    if (e.fibers[first + l].state != strata_host::ENDED) mask |= 1u << l;
  }
  return mask;
}

inline void __nanosleep(unsigned) { strata_host::pause_thread(); }
[[noreturn]] inline void __trap() { strata_host::fail("__trap"); }
inline long long clock64() { return 0; }
inline unsigned long long __globaltimer() { return 0; }
