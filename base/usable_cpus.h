// Counts the CPUs that this process may keep busy, for defaults of threads and spinning.
#ifndef MLA_BASE_USABLE_CPUS_H_
#define MLA_BASE_USABLE_CPUS_H_

#include <cstdint>
#include <string>

namespace mla::base {

// Returns `cpus`, or fewer if the quota of a control group around this process amounts to fewer
// whole CPUs; at least 1. A file that is missing or has other contents sets no quota. `root` is
// prefixed to /proc and /sys for tests.
int32_t WithinQuota(int32_t cpus, const std::string& root = "");

// Returns the number of CPUs that the scheduler may put this thread on.
int32_t AllowedCpuCount();

// Returns AllowedCpuCount, but at most the quota of the container. A quota gives time, not places:
// more threads than it has would all be stopped together until the next period.
int32_t UsableCpuCount();

}  // namespace mla::base

#endif  // MLA_BASE_USABLE_CPUS_H_
