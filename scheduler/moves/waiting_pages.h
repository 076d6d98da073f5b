// Pages of the prefix cache that wait for a move between the pool and slower tiers.
//
// Tenants take turns, a page each, so one that wants much holds no other up; the pages of a tenant
// go in the order in which they came. What one tenant and what all of them have waiting is bounded.
//
// Threading: owned by the engine role, but for TierWait.
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

// Until page groups that were asked for are back, or have been given up. Any thread may wait.
class TierWait final {
 public:
  explicit TierWait(int32_t groups) : left_(groups) {}
  void CountDown();
  void WaitFor(int64_t ms);

 private:
  Mutex mutex_;
  CondVar changed_;
  int32_t left_ ABSL_GUARDED_BY(mutex_);
};

struct WaitingPage {
  static constexpr MonotonicNanos kAlways = std::numeric_limits<MonotonicNanos>::max();

  int32_t node = -1;
  uint64_t life = 0;  // of the node's index
  TenantKey tenant = 0;
  MonotonicNanos until = kAlways;            // the move is not wanted any more from then on
  std::shared_ptr<TierWait> wait = nullptr;  // null: nothing waits
};

class WaitingPages final {
 public:
  // Pages that wait: of all tenants, and of one.
  static constexpr size_t kMost = 1 << 16;
  static constexpr size_t kMostOfTenant = 1 << 14;

  // Pages of the tenant that Add takes now.
  size_t room(TenantKey tenant) const;
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  // False, and nothing happens, without room for it.
  bool Add(WaitingPage page);
  // Before all others of its tenant: it has had its turn, and must be moved once more.
  void AddFirst(WaitingPage page);
  // The page whose turn it is. REQUIRES: not empty.
  const WaitingPage& front() const { return Next()->second.front(); }
  WaitingPage Take();
  // Takes all pages that are `dead`.
  std::vector<WaitingPage> TakeIf(const std::function<bool(const WaitingPage&)>& dead);

 private:
  using Lines = std::map<TenantKey, std::deque<WaitingPage>>;  // none is empty
  Lines::const_iterator Next() const;

  Lines lines_;
  size_t size_ = 0;
  TenantKey last_ = 0;  // whose turn it was
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MOVES_WAITING_PAGES_H_
