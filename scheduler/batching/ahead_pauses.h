// Decides which tenants' launches may not wait for them on the device at present. A request that
// has waited for Limits::ahead_us without success keeps the requests of its tenant from waiting for
// a while. The pause doubles after each further failure until a wait succeeds. So a tenant whose
// work is never done in time takes little of the device's time. An example is a tenant whose
// process takes turns on the device with this one.
//
// Memory is constant: tenants with the same place in the array share their pauses. Threading: the
// engine role.
#ifndef MLA_SCHEDULER_BATCHING_AHEAD_PAUSES_H_
#define MLA_SCHEDULER_BATCHING_AHEAD_PAUSES_H_

#include <algorithm>
#include <array>
#include <cstddef>

#include "scheduler/clock.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class AheadPauses {
 public:
  static constexpr MonotonicNanos kPauseNanos = 10'000'000;
  static constexpr MonotonicNanos kLongestNanos = 128 * kPauseNanos;

  // Notes that a launch ahead was late, and begins a pause. Does nothing during a pause, because
  // such a launch was made before the pause began.
  void Begin(TenantKey tenant, MonotonicNanos now) {
    Pause& pause = pauses_[PlaceOf(tenant)];
    if (now < pause.end) return;
    pause.next = pause.next == 0 ? kPauseNanos : pause.next;
    pause.end = now + pause.next;
    pause.next = std::min(2 * pause.next, kLongestNanos);
  }
  // Notes that a launch ahead was in time: the next pause is short again.
  void NoteInTime(TenantKey tenant) { pauses_[PlaceOf(tenant)].next = 0; }
  bool Lasts(TenantKey tenant, MonotonicNanos now) const {
    return now < pauses_[PlaceOf(tenant)].end;
  }

 private:
  static constexpr size_t kPlaces = 64;
  static size_t PlaceOf(TenantKey tenant) { return static_cast<size_t>(tenant) % kPlaces; }

  struct Pause {
    MonotonicNanos end = 0;
    MonotonicNanos next = 0;  // how long the next pause will last; 0: kPauseNanos
  };
  std::array<Pause, kPlaces> pauses_ = {};
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_BATCHING_AHEAD_PAUSES_H_
