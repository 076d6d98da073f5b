#include "scheduler/moves/waiting_pages.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

namespace mla::scheduler {

void TierWait::CountDown() {
  const MutexLock lock(mutex_);
  if (--remaining_ == 0) changed_.NotifyAll();
}

void TierWait::WaitFor(int64_t ms) {
  MutexLock lock(mutex_);
  changed_.WaitFor(lock, std::chrono::milliseconds(ms),
                   [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return remaining_ <= 0; });
}

size_t WaitingPages::room(TenantKey tenant) const {
  const auto line = lines_.find(tenant);
  const size_t own = line == lines_.end() ? 0 : line->second.size();
  return std::min(kMost - std::min(kMost, size_), kMostOfTenant - std::min(kMostOfTenant, own));
}

bool WaitingPages::Add(WaitingPage page) {
  if (room(page.tenant) == 0) return false;
  ++size_;
  lines_[page.tenant].push_back(std::move(page));
  return true;
}

void WaitingPages::AddFirst(WaitingPage page) {
  ++size_;
  lines_[page.tenant].push_front(std::move(page));
}

WaitingPages::Lines::const_iterator WaitingPages::Next() const {
  const auto line = lines_.upper_bound(last_);
  return line == lines_.end() ? lines_.begin() : line;
}

WaitingPage WaitingPages::Take() {
  const auto line = lines_.find(Next()->first);
  last_ = line->first;
  WaitingPage page = std::move(line->second.front());
  line->second.pop_front();
  if (line->second.empty()) lines_.erase(line);
  --size_;
  return page;
}

std::vector<WaitingPage> WaitingPages::TakeIf(const std::function<bool(const WaitingPage&)>& dead) {
  std::vector<WaitingPage> dead_pages;
  for (auto line = lines_.begin(); line != lines_.end();) {
    std::deque<WaitingPage>& pages = line->second;
    const auto first = std::stable_partition(pages.begin(), pages.end(),
                                             [&](const WaitingPage& page) { return !dead(page); });
    std::move(first, pages.end(), std::back_inserter(dead_pages));
    pages.erase(first, pages.end());
    line = pages.empty() ? lines_.erase(line) : std::next(line);
  }
  size_ -= dead_pages.size();
  return dead_pages;
}

}  // namespace mla::scheduler
