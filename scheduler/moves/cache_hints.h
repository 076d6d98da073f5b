// Hints of clients about their cached rows: to keep them in the pool for a time, to evict them
// later than others, to restore them, or to demote them. The answer to each hint gives its results
// in rows.
//
// A pin holds page groups in the pool until its time is up, or until it is taken back. Pins are
// bounded for each tenant and for all tenants together, so that steps find room. A pin is the
// group's, not the caller's: any call of the tenant that names the same rows changes it.
//
// Ownership: all pointers are borrowed. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_MOVES_CACHE_HINTS_H_
#define MLA_SCHEDULER_MOVES_CACHE_HINTS_H_

#include <cstdint>
#include <vector>

#include "scheduler/clock.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
#include "scheduler/moves/tier_moves.h"

namespace mla::scheduler {

class CacheHints final {
 public:
  // `tiers` may be null if there are no slower tiers.
  CacheHints(const Limits& limits, kvcache::KvCache* cache, TierMoves* tiers, const Clock* clock)
      : limits_(limits), cache_(cache), tiers_(tiers), clock_(clock) {}

  // Applies the hint to those pages of the chain's first `rows` rows that are cached. REQUIRES: the
  // arguments have been checked.
  HintAnswer Do(const HintArgs& args, kvcache::LayoutId layout, TenantKey tenant,
                const kvcache::PrefixChain& chain, int64_t rows);
  // Ends pins whose time is over.
  void Expire();
  MonotonicNanos NextExpiry() const;  // max() if never

 private:
  struct Page {
    int32_t node = -1;
    int32_t rows = 0;
  };
  struct Pin {
    MonotonicNanos until = 0;
    int32_t node = -1;
    uint64_t id = 0;
    static bool Later(const Pin& a, const Pin& b) { return a.until > b.until; }
  };

  std::vector<Page> Find(kvcache::LayoutId layout, const kvcache::PrefixChain& chain,
                         int64_t rows) const;
  void Remember(const Pin& pin);
  // The result for one page.
  enum class Done : uint8_t { kYes, kLater, kNo, kNoRoom };
  Done Away(int32_t node) const;  // for a page that is not in the pool
  Done PinOne(const HintArgs& args, kvcache::LayoutId layout, TenantKey tenant, int32_t node);
  Done DemoteOne(int32_t node);

  const Limits& limits_;
  kvcache::KvCache* const cache_;
  TierMoves* const tiers_;
  const Clock* const clock_;
  // A heap with the pin that ends next on top; some of its pins have already been removed or
  // replaced.
  std::vector<Pin> pins_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MOVES_CACHE_HINTS_H_
