#include "scheduler/moves/cache_hints.h"

#include <algorithm>
#include <limits>

#include "base/clock.h"

namespace mla::scheduler {
namespace {

constexpr size_t kSparePins = 64;

}  // namespace

using kvcache::LayoutId;
using kvcache::PrefixCache;
using kvcache::PrefixChain;

std::vector<CacheHints::Page> CacheHints::Find(LayoutId layout, const PrefixChain& chain,
                                               int64_t rows) const {
  PrefixCache& prefixes = cache_->prefixes();
  std::vector<Page> pages;
  for (int64_t row = 0; row < rows; row += chain.page_size) {
    const auto page = static_cast<int32_t>(row / chain.page_size);
    const auto remaining = static_cast<int32_t>(std::min<int64_t>(rows - row, chain.page_size));
    PrefixCache::Found cached;
    if (remaining == chain.page_size) cached = prefixes.Find(layout, chain, page);
    if (cached.rows == 0) cached = prefixes.FindRows(layout, chain, page, remaining);
    if (cached.rows == 0) break;
    pages.push_back({cached.node, cached.rows});
    if (cached.rows < chain.page_size) break;
  }
  return pages;
}

CacheHints::Done CacheHints::Away(int32_t node) const {
  return cache_->prefixes().Comes(node) ? Done::kLater : Done::kNoRoom;
}

CacheHints::Done CacheHints::PinOne(const HintArgs& args, LayoutId layout, TenantKey tenant,
                                    int32_t node) {
  PrefixCache& prefixes = cache_->prefixes();
  if (args.ttl_ms == 0) {
    prefixes.Unpin(node);
    return Done::kYes;
  }
  if (prefixes.about(node).demoted()) return Away(node);
  const int64_t pool = cache_->pool().stats().bytes_total;
  const int64_t may = std::min(pool, cache_->pool().GroupBound(layout));
  const int64_t bytes = prefixes.pin(node) != 0 ? 0 : cache_->pool().group_bytes(layout);
  const bool fits =
      prefixes.pinned_bytes(tenant) + bytes <= may / 100 * limits_.tenant_pinned_percent &&
      prefixes.pinned_bytes() + bytes <= pool / 100 * limits_.pinned_percent;
  if (!fits) return Done::kNo;
  Remember({clock_->Now() + args.ttl_ms * kNanosPerMilli, node, prefixes.Pin(node)});
  return Done::kYes;
}

void CacheHints::Remember(const Pin& pin) {
  const PrefixCache& prefixes = cache_->prefixes();
  // Callers may replace their pins often, so pins that no longer count are removed here.
  if (pins_.size() > 2 * static_cast<size_t>(prefixes.pinned_groups()) + kSparePins) {
    std::erase_if(pins_, [&](const Pin& one) { return prefixes.pin(one.node) != one.id; });
    std::make_heap(pins_.begin(), pins_.end(), Pin::Later);
  }
  pins_.push_back(pin);
  std::push_heap(pins_.begin(), pins_.end(), Pin::Later);
}

CacheHints::Done CacheHints::DemoteOne(int32_t node) {
  const PrefixCache::About about = cache_->prefixes().about(node);
  if (about.demoted()) return Done::kYes;
  if (!cache_->pool().idle(about.entry)) return Done::kNo;
  if (!tiers_->Leave(node)) return Done::kNoRoom;
  return cache_->prefixes().about(node).demoted() ? Done::kYes : Done::kLater;
}

HintAnswer CacheHints::Do(const HintArgs& args, LayoutId layout, TenantKey tenant,
                          const PrefixChain& chain, int64_t rows) {
  HintAnswer answer;
  answer.rows = rows;
  if (args.kind == HintKind::kDemote && tiers_ == nullptr) {
    answer.reason = "no_tiers";
    return answer;
  }
  const bool comes_back =
      args.kind == HintKind::kPrefetch || (args.kind == HintKind::kPin && args.ttl_ms > 0);
  if (tiers_ != nullptr && comes_back) tiers_->Restore(layout, chain, 0, rows, /*waits=*/false);
  int64_t found_rows = 0;
  bool refused = false, no_room = false;
  for (const Page& page : Find(layout, chain, rows)) {
    Done done = Done::kYes;
    switch (args.kind) {
      case HintKind::kPin:
        done = PinOne(args, layout, tenant, page.node);
        break;
      case HintKind::kRetain:
        cache_->prefixes().SetPriority(page.node, args.priority);
        break;
      case HintKind::kPrefetch:
        if (cache_->prefixes().about(page.node).demoted()) done = Away(page.node);
        break;
      case HintKind::kDemote:
        done = DemoteOne(page.node);
        break;
    }
    found_rows += page.rows;
    if (done == Done::kYes) answer.rows_done += page.rows;
    if (done == Done::kLater) answer.rows_deferred += page.rows;
    refused |= done == Done::kNo;
    no_room |= done == Done::kNoRoom;
  }
  if (found_rows < rows) answer.reason = "absent";
  if (no_room) answer.reason = "no_room";
  if (refused) answer.reason = args.kind == HintKind::kPin ? "pins_exhausted" : "in_use";
  if (answer.rows_deferred > 0) {
    answer.outcome = HintOutcome::kDeferred;
  } else if (answer.rows_done == rows) {
    answer.outcome = HintOutcome::kAccepted;
  } else {
    answer.outcome = answer.rows_done > 0 ? HintOutcome::kClipped : HintOutcome::kRefused;
  }
  return answer;
}

void CacheHints::Expire() {
  const MonotonicNanos now = clock_->Now();
  while (!pins_.empty() && pins_.front().until <= now) {
    cache_->prefixes().Unpin(pins_.front().node, pins_.front().id);
    std::pop_heap(pins_.begin(), pins_.end(), Pin::Later);
    pins_.pop_back();
  }
}

MonotonicNanos CacheHints::NextExpiry() const {
  return pins_.empty() ? std::numeric_limits<MonotonicNanos>::max() : pins_.front().until;
}

}  // namespace mla::scheduler
