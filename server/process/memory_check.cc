#include "server/process/memory_check.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number in a one-number file; kUnlimited for "max" or no file.
int64_t ReadNumber(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  return file >> value ? value : kUnlimited;
}

int64_t MemAvailable(const std::string& root) {
  std::ifstream file(root + "/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  std::string unit;
  while (file >> name >> kib && std::getline(file, unit)) {
    if (name == "MemAvailable:") return kib * 1024;
  }
  return kUnlimited;
}

// The tightest of the group of this process and those around it.
int64_t GroupAvailable(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line, group;
  while (std::getline(file, line)) {
    if (absl::StartsWith(line, "0::")) group = line.substr(3);
  }
  int64_t available = kUnlimited;
  for (;;) {
    if (group == "/") group.clear();
    const std::string folder = absl::StrCat(root, "/sys/fs/cgroup", group);
    const int64_t limit = ReadNumber(folder + "/memory.max");
    const int64_t used = ReadNumber(folder + "/memory.current");
    if (limit != kUnlimited && used != kUnlimited) {
      available = std::min(available, std::max<int64_t>(limit - used, 0));
    }
    if (group.empty()) return available;
    group.resize(group.rfind('/'));
  }
}

}  // namespace

int64_t AvailableMemory(const std::string& root) {
  return std::min(MemAvailable(root), GroupAvailable(root));
}

absl::Status CheckMemory(const std::vector<MemoryUse>& uses, int64_t available) {
  int64_t sum = 0;
  std::string list;
  for (const MemoryUse& use : uses) {
    if (__builtin_add_overflow(sum, use.bytes, &sum)) sum = kUnlimited;
    absl::StrAppend(&list, list.empty() ? "" : ", ", use.what, " ", use.bytes >> 20, " MiB");
  }
  if (sum <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the configured buffers need ", sum >> 20, " MiB (", list, ") but ", available >> 20,
      " MiB of memory are available; lower kv_cache.bytes, limits.* or wire.staging_bytes"));
}

}  // namespace mla::server
