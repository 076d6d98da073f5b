// Reads the resources that this process uses, as the kernel counts them.
#ifndef MLA_SERVER_PROCESS_PROCESS_USAGE_H_
#define MLA_SERVER_PROCESS_PROCESS_USAGE_H_

#include <cstdint>

namespace mla::server {

struct ProcessUsage {
  double cpu_seconds = 0;         // user and system, all threads
  double start_time_seconds = 0;  // since 1970
  int64_t resident_bytes = 0;
  int64_t virtual_bytes = 0;
  int64_t threads = 0;
  int64_t open_fds = 0;
  int64_t max_fds = 0;
};

// Reads a few files below /proc; values that cannot be read stay 0. Any thread.
ProcessUsage ReadProcessUsage();

// Raises the number of descriptors that this process may have to the most that it may ask for.
// Shells and containers often allow only 1,024 of many more, which idle connections can use up;
// then neither tenants nor probes get an answer. Call it before any thread starts.
void RaiseDescriptorLimit();

// Descriptors that connections leave free, so that probes, files and reloads find some: a quarter
// of the process's limit, at most kDescriptorReserve. A descriptor is in the reserve by its number:
// the kernel gives the lowest free number, so all lower ones are taken then.
inline constexpr int64_t kDescriptorReserve = 64;
bool InDescriptorReserve(int descriptor);
// Returns the number of descriptors outside of the reserve.
int64_t DescriptorsForConnections();

}  // namespace mla::server

#endif  // MLA_SERVER_PROCESS_PROCESS_USAGE_H_
