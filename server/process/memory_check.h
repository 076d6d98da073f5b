// Refuses to start a server that cannot fit: compares the counted buffers with the available
// memory.
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

// Returns the number of bytes that this process may still take: the kernel's MemAvailable, or less
// if a control group around the process allows less. Cached files of the group do not count as
// used. Returns INT64_MAX if nothing is known. Tests set `root`, which is put before /proc and
// /sys.
int64_t AvailableMemory(const std::string& root = "");

// Returns RESOURCE_EXHAUSTED with a list of all uses if their sum exceeds `available`.
absl::Status CheckMemory(const std::vector<MemoryUse>& uses, int64_t available);

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_MEMORY_CHECK_H_
