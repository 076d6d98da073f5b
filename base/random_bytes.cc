#include "base/random_bytes.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace mla {

bool FillRandom(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t filled = getrandom(bytes.data(), bytes.size(), 0);
    if (filled > 0) bytes = bytes.subspan(static_cast<size_t>(filled));
    if (filled < 0 && errno != EINTR) return false;
  }
  return true;
}

uint64_t RandomNumber() {
  uint64_t number[1] = {0};
  while (number[0] == 0) {
    if (FillRandom(&number)) continue;
    std::perror("getrandom");
    std::abort();
  }
  return number[0];
}

}  // namespace mla
