// Which tenants' launches may not wait on the device for them at present: one that has waited for
// Limits::ahead_us without success keeps those of its tenant from waiting for a while, so that a
// tenant whose work is never done in time takes little of the device's time.
//
// Memory is constant: tenants with the same place share their pauses. Threading: the engine role.
#ifndef MLA_SCHEDULER_BATCHING_AHEAD_PAUSES_H_
#define MLA_SCHEDULER_BATCHING_AHEAD_PAUSES_H_

#include <array>
#include <cstddef>

#include "scheduler/clock.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class AheadPauses {
 public:
  static constexpr MonotonicNanos kPauseNanos = 10'000'000;

  void Begin(TenantKey tenant, MonotonicNanos now) { ends_[PlaceOf(tenant)] = now + kPauseNanos; }
  bool Lasts(TenantKey tenant, MonotonicNanos now) const { return now < ends_[PlaceOf(tenant)]; }

 private:
  static constexpr size_t kPlaces = 64;
  static size_t PlaceOf(TenantKey tenant) { return static_cast<size_t>(tenant) % kPlaces; }

  std::array<MonotonicNanos, kPlaces> ends_ = {};
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_AHEAD_PAUSES_H_
