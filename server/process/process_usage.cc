#include "server/process/process_usage.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

namespace mla::server {
namespace {

// The numbers in /proc/self/stat count from 1 in proc(5). The fields up to the command's name are
// skipped, because the name may hold blanks and parentheses.
constexpr size_t kFirstField = 3;
constexpr size_t kUserTicks = 14;
constexpr size_t kSystemTicks = 15;
constexpr size_t kThreads = 20;
constexpr size_t kStartTicks = 22;
constexpr size_t kVirtualBytes = 23;
constexpr size_t kResidentPages = 24;

// When the machine was started, in seconds since 1970 ("btime").
double BootSeconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  while (file >> word) {
    double seconds = 0;
    if (word == "btime" && file >> seconds) return seconds;
    std::getline(file, word);
  }
  return 0;
}

}  // namespace

ProcessUsage ReadProcessUsage() {
  ProcessUsage usage;
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end != std::string::npos) {
    std::istringstream rest(line.substr(name_end + 1));
    const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
    const auto number = [&fields](size_t field) {
      const size_t index = field - kFirstField;
      return index < fields.size() ? std::strtod(fields[index].c_str(), nullptr) : 0.0;
    };
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    usage.cpu_seconds = (number(kUserTicks) + number(kSystemTicks)) / ticks;
    usage.start_time_seconds = BootSeconds() + number(kStartTicks) / ticks;
    usage.threads = static_cast<int64_t>(number(kThreads));
    usage.virtual_bytes = static_cast<int64_t>(number(kVirtualBytes));
    usage.resident_bytes = static_cast<int64_t>(number(kResidentPages)) * sysconf(_SC_PAGESIZE);
  }
  std::error_code ignored;
  for (std::filesystem::directory_iterator at("/proc/self/fd", ignored), end; at != end;
       at.increment(ignored)) {
    ++usage.open_fds;
  }
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) usage.max_fds = static_cast<int64_t>(files.rlim_cur);
  return usage;
}

void RaiseDescriptorLimit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);  // otherwise the limit stays as mla_process_max_fds shows it
}

int64_t DescriptorsForConnections() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur > INT32_MAX) return INT32_MAX;
  const auto limit = static_cast<int64_t>(files.rlim_cur);
  return std::max<int64_t>(limit - std::min(limit / 4, kDescriptorReserve), 1);
}

bool InDescriptorReserve(int descriptor) { return descriptor >= DescriptorsForConnections(); }

}  // namespace mla::server
