#include "server/process/memory_check.h"

#include <algorithm>
#include <fstream>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/control_groups.h"

namespace mla::server {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// Returns the number in a file with a single number; kUnlimited for "max" or if the file does not
// exist.
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

// Returns the bytes of files in the page cache of a group, which count as used and which the kernel
// gives back before it refuses memory. `prefix`: of the lines that also count nested groups.
int64_t CachedFiles(const std::string& path, const std::string& prefix) {
  std::ifstream file(path);
  std::string name;
  int64_t value = 0, sum = 0;
  while (file >> name >> value) {
    if (name == prefix + "inactive_file" || name == prefix + "active_file") sum += value;
  }
  return sum;
}

// Returns the bytes that are left in the tightest control group around this process.
int64_t GroupAvailable(const std::string& root) {
  int64_t available = kUnlimited;
  for (const base::ControlGroup& group : base::ControlGroupsOf("memory", root)) {
    const bool v2 = group.version == 2;
    const int64_t limit =
        ReadNumber(group.folder + (v2 ? "/memory.max" : "/memory.limit_in_bytes"));
    const int64_t used =
        ReadNumber(group.folder + (v2 ? "/memory.current" : "/memory.usage_in_bytes"));
    if (limit == kUnlimited || used == kUnlimited) continue;
    const int64_t cached = CachedFiles(group.folder + "/memory.stat", v2 ? "" : "total_");
    const int64_t kept = std::max<int64_t>(used - cached, 0);
    available = std::min(available, std::max<int64_t>(limit - kept, 0));
  }
  return available;
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
