// Who touched what: finds accesses that nothing orders, and what a kernel takes before it may.
//
// With STRATA_WATCH sources are compiled with -fsanitize=thread, whose calls come here in the place of its own library: one
// for each access that kernels make. An error is
//   - two threads' accesses to a byte of shared memory of which one writes, with no barrier between them; in a warp,
//     __syncwarp of all lanes is one, and nothing else: shuffles and votes order no memory;
//   - any access to shared memory while a copy is on its way there, until the thread that copies has waited for it;
//   - two blocks' accesses to a word of global memory of which one writes, unless the later block has used an atomic before;
//   - what a kernel that may start early does before it waits: reading what the kernel before it wrote, or writing.
// Atomics count as reads: two of them are in order, one and a plain write are not.
#pragma once

namespace strata_host {

#ifdef STRATA_WATCH
constexpr bool WATCHES = true;
#else
constexpr bool WATCHES = false;
#endif

#define STRATA_UNWATCHED __attribute__((no_sanitize("thread")))

// Of global memory, four bytes each; blocks from 1 on.
struct Word {
  uint32_t writer_launch, writer_block, reader_launch, reader_block;
};

constexpr uint32_t SEVERAL = 0xFFFFFFFFu;
constexpr size_t WORDS_A_PAGE = 1024, PAGES_MAX = 16384;

struct WatchedPage {
  Word words[WORDS_A_PAGE];
};

// What is known of global memory, for the libraries of a thread together: they launch one at a time.
struct History {
  std::unordered_map<uintptr_t, WatchedPage*> pages;
  uintptr_t recent_number = 0;
  WatchedPage* recent = nullptr;
  uint32_t launch = 0;

  STRATA_UNWATCHED Word& word(uintptr_t address) {
    const uintptr_t number = address / (4 * WORDS_A_PAGE);
    if (number != recent_number || recent == nullptr) {
      WatchedPage*& page = pages[number];
      if (page == nullptr) page = static_cast<WatchedPage*>(calloc(1, sizeof(WatchedPage)));
      recent_number = number;
      recent = page;
    }
    return recent->words[address / 4 % WORDS_A_PAGE];
  }

  // Forgets all launches where they have touched too much.
  void begin_launch(uint32_t number) {
    launch = number;
    if (pages.size() < PAGES_MAX) return;
    for (auto& [_, page] : pages) free(page);
    pages.clear();
    recent = nullptr;
  }
};

// Of a byte of shared memory. `written` and `read` count synchronizations, and are 0 before.
struct Byte {
  uint32_t written, read;
  uint32_t written_at, read_at;  // code, from the library's start
  uint32_t in_flight;            // the block that copies there, from 1 on
  uint16_t writer, reader;       // threads; a reader may be ONE_WARP + its number, or ALL_WARPS
};

constexpr uint16_t ONE_WARP = 0x4000, ALL_WARPS = 0x8000;

struct Watch {
  History* history = nullptr;
  std::vector<Byte> fixed, dynamic;  // bytes of the two kinds of shared memory
  uint32_t now = 0;                  // synchronizations of any threads so far
  uint32_t at_barrier = 0;           // when all threads of the block were in order last
  uint32_t at_warp[32] = {};
  uint32_t block = 0;      // of all launches, from 1 on
  uint32_t in_grid = 0;    // of this one, from 1 on
  uint32_t before = 0;     // launch that may not have ended until a thread has waited; 0: none
  bool is_acquired = false;  // the block has used an atomic in global memory
  bool has_waited = false;   // a thread of the launch

  STRATA_UNWATCHED void begin_block(uint32_t number) {
    at_barrier = ++now;
    ++block;
    in_grid = number;
    is_acquired = false;
  }
};

inline Watch watch;

STRATA_UNWATCHED inline void watch_barrier() { watch.at_barrier = ++watch.now; }
STRATA_UNWATCHED inline void watch_warp(int warp) { watch.at_warp[warp] = ++watch.now; }

// Whether something that thread `other` (or several) did when `when` was the time comes before what `thread` does now.
STRATA_UNWATCHED inline bool is_ordered(uint32_t when, int other, int thread) {
  if (other == thread || when < watch.at_barrier) return true;
  const int warp = other >= ALL_WARPS ? -1 : other >= ONE_WARP ? other - ONE_WARP : other / 32;
  return warp == thread / 32 && when < watch.at_warp[warp];
}

enum Access { READS, WRITES, COPIES, ARRIVES, ADDS };  // the middle two: a copy is begun, and waited for

// Ends the launch; `code` and `other`: where this access and that before it were, from the library's start.
template <typename... Values>
[[noreturn]] inline void fail_at(uint32_t code, uint32_t other, const char* format, Values... values);

STRATA_UNWATCHED inline void touch_shared(std::vector<Byte>& bytes, const char* kind, size_t first, size_t n, Access access,
                                          int thread, uint32_t code) {
  for (size_t at = first; at < first + n && at < bytes.size(); ++at) {
    Byte& b = bytes[at];
    if (b.in_flight == watch.block && access != ARRIVES) {
      fail_at(code, b.written_at, "touches byte %zu of %s shared memory while a copy by thread %d is on its way there", at,
              kind, b.writer);
    }
    if (b.written != 0 && !is_ordered(b.written, b.writer, thread)) {
      fail_at(code, b.written_at, "%s byte %zu of %s shared memory, which thread %d wrote, with nothing between",
              access == READS ? "reads" : "writes", at, kind, b.writer);
    }
    if (access == READS || access == ADDS) {
      if (b.read == 0 || b.read < watch.at_barrier) {
        b.reader = static_cast<uint16_t>(thread);
      } else if (b.reader != thread) {
        const int warp = ONE_WARP + thread / 32;
        const bool same = b.reader == warp || (b.reader < ONE_WARP && b.reader / 32 == thread / 32);
        b.reader = static_cast<uint16_t>(same ? warp : ALL_WARPS);
      }
      b.read = watch.now;
      b.read_at = code;
      continue;
    }
    if (b.read != 0 && !is_ordered(b.read, b.reader, thread)) {
      fail_at(code, b.read_at, "writes byte %zu of %s shared memory, which %s %d read, with nothing between", at, kind,
              b.reader >= ONE_WARP ? "a warp, of threads from" : "thread",
              b.reader >= ALL_WARPS ? 0 : b.reader >= ONE_WARP ? (b.reader - ONE_WARP) * 32 : b.reader);
    }
    b.written = watch.now;
    b.written_at = code;
    b.writer = static_cast<uint16_t>(thread);
    b.in_flight = access == COPIES ? watch.block : 0;
  }
}

STRATA_UNWATCHED inline void touch_global(uintptr_t first, size_t n, Access access, bool has_waited, uint32_t code) {
  const uint32_t launch = watch.history->launch, block = watch.in_grid;
  watch.is_acquired |= access == ADDS;
  if (access != READS && !has_waited) {
    fail_at(code, 0, "writes global memory at %p before it waits", reinterpret_cast<void*>(first));
  }
  for (uintptr_t at = first / 4 * 4; at < first + n; at += 4) {
    Word& w = watch.history->word(at);
    if (!has_waited && w.writer_launch == watch.before) {
      fail_at(code, 0, "reads global memory at %p, which the kernel before wrote, before it waits",
              reinterpret_cast<void*>(at));
    }
    if (w.writer_launch == launch && w.writer_block != block && !watch.is_acquired) {
      fail_at(code, 0, "%s global memory at %p, which block number %u wrote, without an atomic before",
              access == READS ? "reads" : "writes", reinterpret_cast<void*>(at), w.writer_block - 1);
    }
    if (access != WRITES) {
      w.reader_block = w.reader_launch == launch && w.reader_block != block ? SEVERAL : block;
      w.reader_launch = launch;
      continue;
    }
    if (w.reader_launch == launch && w.reader_block != block && !watch.is_acquired) {
      fail_at(code, 0, "writes global memory at %p, which another block read, without an atomic before",
              reinterpret_cast<void*>(at));
    }
    w.writer_launch = launch;
    w.writer_block = block;
  }
}

}  // namespace strata_host
