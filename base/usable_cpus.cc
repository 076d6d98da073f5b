#include "base/usable_cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>

#include "base/control_groups.h"

namespace mla::base {

namespace {

// Returns the number of whole CPUs that a group's quota amounts to, at most `cpus`.
int32_t QuotaOf(const ControlGroup& group, int32_t cpus) {
  double quota = 0, period = 0;
  if (group.version == 2) {
    std::ifstream(group.folder + "/cpu.max") >> quota >> period;  // or "max"
  } else {
    std::ifstream(group.folder + "/cpu.cfs_quota_us") >> quota;  // or -1
    std::ifstream(group.folder + "/cpu.cfs_period_us") >> period;
  }
  if (quota <= 0 || period <= 0 || quota / period >= cpus) return cpus;
  return static_cast<int32_t>(quota / period);
}

}  // namespace

int32_t WithinQuota(int32_t cpus, const std::string& root) {
  for (const ControlGroup& group : ControlGroupsOf("cpu", root)) cpus = QuotaOf(group, cpus);
  return std::max(cpus, 1);
}

int32_t AllowedCpuCount() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return CPU_COUNT(&allowed);
}

int32_t UsableCpuCount() { return WithinQuota(AllowedCpuCount()); }

}  // namespace mla::base
