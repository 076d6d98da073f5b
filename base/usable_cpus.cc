#include "base/usable_cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>

namespace mla::base {

int32_t WithinQuota(int32_t cpus, const std::string& file) {
  std::ifstream stream(file);
  double quota = 0, period = 0;
  if (stream >> quota >> period && quota > 0 && period > 0 && quota / period < cpus) {
    cpus = static_cast<int32_t>(quota / period);
  }
  return std::max(cpus, 1);
}

int32_t AllowedCpuCount() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  return CPU_COUNT(&allowed);
}

int32_t UsableCpuCount() { return WithinQuota(AllowedCpuCount()); }

}  // namespace mla::base
