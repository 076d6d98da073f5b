#include "server/admission/prefix_turns.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "base/usable_cpus.h"

namespace mla::server {
namespace {

int64_t ThreadCpuNanos() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// The turn of this thread.
struct Turn {
  PrefixTurns* of = nullptr;
  scheduler::TenantKey tenant = 0;
  int32_t weight = 1;
  size_t place = 0;
  int64_t begun_ns = 0;  // of the thread's processor time
};
thread_local Turn current;

}  // namespace

PrefixTurns::Options PrefixTurns::Defaults() {
  return {.turns = std::max(1, base::UsableCpuCount() / kCpusATurn), .cpu_ns = ThreadCpuNanos};
}

PrefixTurns::PrefixTurns(Options options)
    : options_(std::move(options)), free_at_(static_cast<size_t>(options_.turns)) {}

size_t PrefixTurns::FreePlace(Clock::time_point now, Clock::time_point* next) const {
  const auto soonest = std::min_element(free_at_.begin(), free_at_.end());
  *next = *soonest;
  return *soonest <= now ? static_cast<size_t>(soonest - free_at_.begin()) : free_at_.size();
}

const PrefixTurns::Caller* PrefixTurns::Next() const {
  return *std::min_element(
      callers_.begin(), callers_.end(), [this](const Caller* a, const Caller* b) {
        const int64_t served_a = shares_.at(a->tenant).served;
        const int64_t served_b = shares_.at(b->tenant).served;
        return served_a != served_b ? served_a < served_b : a->order < b->order;
      });
}

void PrefixTurns::Leave(const Caller* caller) {
  std::erase(callers_, caller);
  --shares_.at(caller->tenant).waiting;
}

bool PrefixTurns::Begin(scheduler::TenantKey tenant, int32_t weight,
                        const std::function<bool()>& given_up) {
  MutexLock lock(mutex_);
  const Caller self{tenant, ++arrivals_};
  Share& share = shares_[tenant];
  // A tenant does not save up service while it asks for none.
  if (share.waiting++ == 0) share.served = std::max(share.served, floor_);
  callers_.push_back(&self);
  size_t place = 0;
  while (true) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next;
    place = FreePlace(now, &next);
    if (place < free_at_.size() && Next() == &self) break;
    if (given_up()) {
      Leave(&self);
      changed_.NotifyAll();
      return false;
    }
    // The end of a rest notifies no one, so the wait ends then.
    changed_.WaitUntil(lock, std::min(now + kLook, place < free_at_.size() ? now + kLook : next));
  }
  Leave(&self);
  floor_ = std::max(floor_, shares_.at(tenant).served);
  free_at_[place] = Clock::time_point::max();
  changed_.NotifyAll();  // another place may be free for the next call
  current = {this, tenant, weight, place, options_.cpu_ns()};
  return true;
}

void PrefixTurns::End() {
  if (current.of == nullptr) return;
  const Turn ended = std::exchange(current, Turn());
  ended.of->EndTurn(ended.tenant, ended.weight, ended.place,
                    ended.of->options_.cpu_ns() - ended.begun_ns);
}

void PrefixTurns::EndTurn(scheduler::TenantKey tenant, int32_t weight, size_t place,
                          int64_t used_ns) {
  const MutexLock lock(mutex_);
  const auto rest = options_.rests ? std::chrono::nanoseconds(used_ns) : std::chrono::nanoseconds();
  free_at_[place] = Clock::now() + rest;
  shares_[tenant].served += used_ns / std::max(1, weight);
  // Tenants without waiting calls that have had no more service than a newcomer are forgotten.
  absl::erase_if(shares_, [this](const auto& one) {
    return one.second.waiting == 0 && one.second.served <= floor_;
  });
  changed_.NotifyAll();
}

int64_t PrefixTurns::waiting() const {
  const MutexLock lock(mutex_);
  return static_cast<int64_t>(callers_.size());
}

}  // namespace mla::server
