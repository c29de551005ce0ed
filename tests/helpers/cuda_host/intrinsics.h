// What intrinsics.cuh declares, for the host.
#pragma once

#define DYNAMIC_SHARED(name) uint8_t* const name = strata_host::dynamic_shared()

namespace strata {

inline uint32_t dynamic_shared_bytes() { return static_cast<uint32_t>(strata_host::emulator.dynamic_bytes); }

inline void wait_for_previous() {
  const strata_host::Inside inside;
  strata_host::self().has_waited = strata_host::watch.has_waited = true;
}

inline void let_next_start(STRATA_HERE) {
  if (strata_host::WATCHES && !strata_host::self().has_waited) {
    strata_host::fail("let_next_start (%s:%d) before it waits", site.file, site.line);
  }
}

inline uint32_t count_arrival(uint32_t* counter) {
  const strata_host::Atomic atomic(counter, sizeof *counter);
  return (*counter)++;
}

inline int dot4(uint32_t a, uint32_t b, int sum) { return __dp4a(static_cast<int>(a), static_cast<int>(b), sum); }

inline float exp2_fast(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

inline uint4 load_once(const void* p, STRATA_HERE) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) {
    strata_host::fail("load_once (%s:%d) from %p, which is not aligned to 16", site.file, site.line, p);
  }
  return *static_cast<const uint4*>(p);
}

// The bytes arrive when they are waited for. Until then there is poison where they go, as a copy may write early.
inline void copy_part_async(void* shared, const void* global, uint32_t n, STRATA_HERE) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || (n > 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0)) {
    strata_host::fail("copy_async (%s:%d) from %p to %p, which are not both aligned to 16", site.file, site.line, global,
                      shared);
  }
  if (!strata_host::is_shared(shared, 16)) {
    strata_host::fail("copy_async (%s:%d) to %p, which is not shared memory", site.file, site.line, shared);
  }
  if (n > 0) strata_host::touch_here(global, n, strata_host::READS);
  strata_host::touch_here(shared, 16, strata_host::COPIES);
  const strata_host::Inside inside;
  strata_host::Copy copy{shared, {}};
  memcpy(copy.bytes, global, n);
  memset(shared, 0xFF, 16);
  strata_host::self().copies.back().push_back(copy);
}

inline void copy_async(void* shared, const void* global, bool valid, STRATA_HERE) {
  copy_part_async(shared, global, valid ? 16 : 0, site);
}

inline void copy_async(void* shared, const void* global, STRATA_HERE) { copy_part_async(shared, global, 16, site); }

inline void commit_copies() {
  const strata_host::Inside inside;
  strata_host::self().copies.emplace_back();
}

template <int PENDING>
inline void wait_for_copies() {
  const strata_host::Inside inside;
  auto& groups = strata_host::self().copies;
  const size_t n_committed = groups.size() - 1;
  if (n_committed <= PENDING) return;
  const size_t n_done = n_committed - PENDING;
  for (size_t i = 0; i < n_done; ++i) {
    for (const strata_host::Copy& copy : groups[i]) {
      strata_host::emulator.is_inside = false;
      strata_host::touch_here(copy.to, 16, strata_host::ARRIVES);
      strata_host::emulator.is_inside = true;
      memcpy(copy.to, copy.bytes, 16);
    }
  }
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(n_done));
}

// ---- Tensor cores. Lane 4 g + t has of a [16][16], b [16][8] and d [16][8] what intrinsics.cuh says.

struct MmaLane {
  float d[4];
  uint32_t a[4], b[2];
};

struct MmaResult {
  float d[4];
};

template <float (*TO_FLOAT)(unsigned short)>
inline void mma(const char* operation, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                strata_host::Site site) {
  MmaLane mine;
  memcpy(mine.d, d, sizeof d);
  memcpy(mine.a, a, sizeof a);
  memcpy(mine.b, b, sizeof b);
  const MmaResult result = strata_host::collective<MmaResult>(
      operation, 0xFFFFFFFFu, mine,
      [](const strata_host::Lanes<MmaLane, MmaResult>& lanes) {
        float left[16][16], right[16][8];
        for (int l = 0; l < 32; ++l) {
          const int g = l / 4, t = l % 4;
          const MmaLane& from = lanes.in(l);
          for (int i = 0; i < 8; ++i) {
            const auto value = static_cast<unsigned short>(from.a[i / 2] >> (16 * (i % 2)));
            left[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = TO_FLOAT(value);
          }
          for (int i = 0; i < 4; ++i) {
            const auto value = static_cast<unsigned short>(from.b[i / 2] >> (16 * (i % 2)));
            right[2 * t + i % 2 + i / 2 * 8][g] = TO_FLOAT(value);
          }
        }
        for (int l = 0; l < 32; ++l) {
          for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
            double sum = lanes.in(l).d[i];
            for (int k = 0; k < 16; ++k) sum += static_cast<double>(left[row][k]) * right[k][column];
            lanes.out(l).d[i] = static_cast<float>(sum);
          }
        }
      },
      site);
  memcpy(d, result.d, sizeof d);
}

inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], STRATA_HERE) {
  mma<strata_host::half_to_float>("mma_f16", d, a, b, site);
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], STRATA_HERE) {
  mma<strata_host::bfloat_to_float>("mma_bf16", d, a, b, site);
}

struct MatrixWords {
  uint32_t words[4];
};

template <bool TRANSPOSED>
inline void load_matrices_(const char* operation, uint32_t (&out)[4], const void* row, strata_host::Site site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0 || !strata_host::is_shared(row, 16)) {
    strata_host::fail("%s (%s:%d) from %p, which is not shared memory aligned to 16", operation, site.file, site.line, row);
  }
  strata_host::touch_here(row, 16, strata_host::READS);
  const MatrixWords result = strata_host::collective<MatrixWords>(
      operation, 0xFFFFFFFFu, row,
      [](const strata_host::Lanes<const void*, MatrixWords>& lanes) {
        for (int m = 0; m < 4; ++m) {
          uint16_t matrix[8][8];
          for (int r = 0; r < 8; ++r) memcpy(matrix[r], lanes.in(8 * m + r), 16);
          for (int l = 0; l < 32; ++l) {
            const int r = l / 4, c = 2 * (l % 4);
            const uint32_t low = TRANSPOSED ? matrix[c][r] : matrix[r][c];
            const uint32_t high = TRANSPOSED ? matrix[c + 1][r] : matrix[r][c + 1];
            lanes.out(l).words[m] = low | high << 16;
          }
        }
      },
      site);
  memcpy(out, result.words, sizeof out);
}

inline void load_matrices(uint32_t (&out)[4], const void* row, STRATA_HERE) {
  load_matrices_<false>("load_matrices", out, row, site);
}

inline void load_matrices_transposed(uint32_t (&out)[4], const void* row, STRATA_HERE) {
  load_matrices_<true>("load_matrices_transposed", out, row, site);
}

}  // namespace strata
