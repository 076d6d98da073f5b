#include "scheduler/kvcache/prefix/event_log.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/splitmix.h"

namespace mla::kvcache {
namespace {

// The first event number of a tenant is one of this many multiples of 2^32.
constexpr uint64_t kFirstNumbers = 1 << 20;
constexpr int kFirstNumberShift = 32;

}  // namespace

EventLog::EventLog(uint64_t seed, int32_t kept)
    : seed_(seed), events_(static_cast<size_t>(kept)), misses_(static_cast<size_t>(kept)) {}

uint64_t EventLog::FirstNumber() {
  return (1 + NextSplitMix(&seed_) % kFirstNumbers) << kFirstNumberShift;
}

void EventLog::SetLayout(LayoutId layout, TenantKey tenant, const std::string& tenant_name,
                         const std::string& model) {
  const MutexLock lock(mutex_);
  if (layouts_.size() <= static_cast<size_t>(layout)) {
    layouts_.resize(static_cast<size_t>(layout) + 1);
  }
  const auto same = std::find_if(layouts_.begin(), layouts_.end(), [tenant](const Layout& other) {
    return other.model != nullptr && other.tenant == tenant;
  });
  Layout set;
  set.tenant = tenant;
  set.tenant_name = std::make_shared<const std::string>(tenant_name);
  set.model = std::make_shared<const std::string>(model);
  set.last = same == layouts_.end() ? std::make_shared<uint64_t>(FirstNumber()) : same->last;
  layouts_[static_cast<size_t>(layout)] = std::move(set);
}

void EventLog::DropLayout(LayoutId layout) {
  const MutexLock lock(mutex_);
  if (static_cast<size_t>(layout) < layouts_.size()) layouts_[static_cast<size_t>(layout)] = {};
}

const EventLog::Layout* EventLog::Find(LayoutId layout) const {
  if (layout < 0 || static_cast<size_t>(layout) >= layouts_.size()) return nullptr;
  const Layout& found = layouts_[static_cast<size_t>(layout)];
  return found.model == nullptr ? nullptr : &found;
}

void EventLog::Add(LayoutId layout, Event event) {
  event.unix_ms = UnixMillis();
  const MutexLock lock(mutex_);
  const Layout* const owner = Find(layout);
  if (owner == nullptr) return;
  event.number = ++*owner->last;
  event.tenant = owner->tenant;
  event.tenant_name = owner->tenant_name;
  if (event.model == nullptr) event.model = owner->model;
  events_[added_++ % events_.size()] = std::move(event);
}

void EventLog::Add(LayoutId layout, Miss miss) {
  miss.unix_ms = UnixMillis();
  const MutexLock lock(mutex_);
  const Layout* const owner = Find(layout);
  if (owner == nullptr) return;
  miss.tenant = owner->tenant;
  miss.tenant_name = owner->tenant_name;
  if (miss.model == nullptr) miss.model = owner->model;
  misses_[missed_++ % misses_.size()] = std::move(miss);
}

uint64_t EventLog::Oldest() const { return added_ - std::min<uint64_t>(added_, events_.size()); }

EventLog::Cursor EventLog::After(TenantKey tenant, uint64_t after) const {
  const MutexLock lock(mutex_);
  for (uint64_t at = added_; at-- > Oldest();) {
    const Event& event = events_[at % events_.size()];
    if (event.tenant == tenant && event.number == after) return {at + 1};
  }
  return {Oldest()};
}

EventLog::Cursor EventLog::End() const {
  const MutexLock lock(mutex_);
  return {added_};
}

EventLog::Cursor EventLog::Begin() const {
  const MutexLock lock(mutex_);
  return {Oldest()};
}

std::vector<Event> EventLog::Read(std::optional<TenantKey> tenant, size_t limit,
                                  Cursor* cursor) const {
  const MutexLock lock(mutex_);
  std::vector<Event> read;
  uint64_t& at = cursor->next;
  for (at = std::max(at, Oldest()); at < added_ && read.size() < limit; ++at) {
    const Event& event = events_[at % events_.size()];
    if (!tenant || event.tenant == *tenant) read.push_back(event);
  }
  return read;
}

std::vector<Miss> EventLog::Misses(std::optional<TenantKey> tenant, size_t limit) const {
  const MutexLock lock(mutex_);
  std::vector<Miss> misses;
  const uint64_t kept = std::min<uint64_t>(missed_, misses_.size());
  for (uint64_t back = 1; back <= kept && misses.size() < limit; ++back) {
    const Miss& miss = misses_[(missed_ - back) % misses_.size()];
    if (!tenant || miss.tenant == *tenant) misses.push_back(miss);
  }
  return misses;
}

}  // namespace mla::kvcache
