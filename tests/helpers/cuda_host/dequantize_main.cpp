// Runs one of the dequantization kernels on the host: `dequantize NAME N_BYTES N_VALUES < blocks > floats`.
//
// The blocks end where an inaccessible page begins, so that reading past them ends the program.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dequantize.cu"

int main(int, char** arguments) {
  using Kernel = void (*)(const uint8_t*, float*, int64_t);
  const auto kernel = reinterpret_cast<Kernel>(dlsym(RTLD_DEFAULT, arguments[1]));
  const size_t n_bytes = std::strtoull(arguments[2], nullptr, 10), n_values = std::strtoull(arguments[3], nullptr, 10);
  const size_t page = sysconf(_SC_PAGESIZE);
  if (kernel == nullptr || n_bytes % page != 0) return 2;

  void* map = mmap(nullptr, n_bytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return 3;
  auto* blocks = static_cast<uint8_t*>(map);
  if (mprotect(blocks + n_bytes, page, PROT_NONE) != 0) return 3;
  if (std::fread(blocks, 1, n_bytes, stdin) != n_bytes) return 4;

  std::vector<float4> out(n_values / 4, float4{NAN, NAN, NAN, NAN});
  kernel(blocks, &out[0].x, static_cast<int64_t>(n_values));
  return std::fwrite(out.data(), sizeof(float4), out.size(), stdout) == out.size() ? 0 : 5;
}
