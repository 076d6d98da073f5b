// Pages of the prefix cache that wait to be moved between the pool and slower tiers.
//
// Tenants take turns, a page each, so a tenant with many pages does not delay the others. Pages of
// one tenant go in the order of arrival. Waiting pages are bounded for each tenant and for all
// tenants together.
//
// Threading: owned by the engine role, except for TierWait.
#ifndef MLA_SCHEDULER_MOVES_WAITING_PAGES_H_
#define MLA_SCHEDULER_MOVES_WAITING_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "scheduler/clock.h"
#include "scheduler/kvcache/kv_cache.h"

namespace mla::scheduler {

using kvcache::TenantKey;

// Waits until the requested page groups are back or have been given up. Any thread may wait.
class TierWait final {
 public:
  explicit TierWait(int32_t groups) : remaining_(groups) {}
  void CountDown();
  void WaitFor(int64_t ms);

 private:
  Mutex mutex_;
  CondVar changed_;
  int32_t remaining_ ABSL_GUARDED_BY(mutex_);
};

struct WaitingPage {
  static constexpr MonotonicNanos kAlways = std::numeric_limits<MonotonicNanos>::max();

  int32_t node = -1;
  uint64_t life = 0;  // identifies the present use of the node's index
  TenantKey tenant = 0;
  MonotonicNanos until = kAlways;            // after that the move is not wanted any more
  std::shared_ptr<TierWait> wait = nullptr;  // null: no caller waits
};

class WaitingPages final {
 public:
  // At most this number of pages waits, for all tenants together and for each tenant.
  static constexpr size_t kMost = 1 << 16;
  static constexpr size_t kMostOfTenant = 1 << 14;

  // Returns how many pages of the tenant Add would take now.
  size_t room(TenantKey tenant) const;
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  // Returns false and does nothing if there is not enough room.
  bool Add(WaitingPage page);
  // Adds a page before all others of its tenant: its first move did not succeed.
  void AddFirst(WaitingPage page);
  // Returns the page whose turn it is. REQUIRES: not empty.
  const WaitingPage& front() const { return Next()->second.front(); }
  WaitingPage Take();
  // Removes and returns the pages for which `dead` returns true.
  std::vector<WaitingPage> TakeIf(const std::function<bool(const WaitingPage&)>& dead);

 private:
  using Lines = std::map<TenantKey, std::deque<WaitingPage>>;  // every line has pages
  Lines::const_iterator Next() const;

  Lines lines_;
  size_t size_ = 0;
  TenantKey last_ = 0;  // whose turn it was
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MOVES_WAITING_PAGES_H_
