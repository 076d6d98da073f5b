// Refuses to start what cannot fit: the counted buffers against the memory there is.
#ifndef MLA_SERVER_PROCESS_MEMORY_CHECK_H_
#define MLA_SERVER_PROCESS_MEMORY_CHECK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace mla::server {

struct MemoryUse {
  const char* what;
  int64_t bytes;
};

// Bytes that this process may still take: the kernel's MemAvailable, and less if a control group
// around the process allows less, whose cached files do not count as used. INT64_MAX when nothing
// can be found out. `root` is prefixed to /proc and /sys for tests.
int64_t AvailableMemory(const std::string& root = "");

// RESOURCE_EXHAUSTED listing every use when their sum exceeds `available`.
absl::Status CheckMemory(const std::vector<MemoryUse>& uses, int64_t available);

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_MEMORY_CHECK_H_
