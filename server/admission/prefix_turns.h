// Decides whose turn it is to have a large prefix parsed and hashed.
//
// Open, Match and Hint may bring 163,840 tokens, which take milliseconds of a processor before the
// engine sees the call. Many such calls at a time would take the processors from decode, whichever
// tenant sends them. So such calls take turns: a few run at the same time. After each turn its
// place rests for as long as the turn used a processor, which leaves half of the processor to
// everything else. The time is charged to the tenant: the next turn goes to the tenant that has
// been served least, by weight.
//
// Threading: any thread; a turn belongs to the thread that began it.
#ifndef MLA_SERVER_ADMISSION_PREFIX_TURNS_H_
#define MLA_SERVER_ADMISSION_PREFIX_TURNS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"
#include "scheduler/tenant_table.h"

namespace mla::server {

class PrefixTurns final {
 public:
  // Processors for each turn that may run at the same time.
  static constexpr int32_t kCpusATurn = 8;
  // A waiting call checks at this interval if its client has given up.
  static constexpr std::chrono::milliseconds kLook{50};

  struct Options {
    int32_t turns = 1;  // turns at the same time, at least 1
    bool rests = true;  // false: places do not rest (tests)
    // Returns the processor time that the calling thread has used, in nanoseconds.
    std::function<int64_t()> cpu_ns;
  };
  // Returns one turn for each kCpusATurn processors that this process may use.
  static Options Defaults();

  explicit PrefixTurns(Options options);

  // Waits for a turn of the tenant, until `given_up` returns true; then returns false without a
  // turn. REQUIRES: the thread does not have a turn.
  bool Begin(scheduler::TenantKey tenant, int32_t weight, const std::function<bool()>& given_up);
  // Ends the calling thread's turn, if it has one, on whichever PrefixTurns it was begun.
  static void End();

  int64_t waiting() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Caller {
    scheduler::TenantKey tenant = 0;
    uint64_t order = 0;
  };
  struct Share {
    int64_t served = 0;  // nanoseconds by weight
    int32_t waiting = 0;
  };

  // Returns a place that is free; if there is none, sets `*next` to the time at which the first one
  // becomes free.
  size_t FreePlace(Clock::time_point now, Clock::time_point* next) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Caller* Next() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(const Caller* caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndTurn(scheduler::TenantKey tenant, int32_t weight, size_t place, int64_t used_ns);

  const Options options_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<Clock::time_point> free_at_ ABSL_GUARDED_BY(mutex_);  // by place; max(): taken
  std::vector<const Caller*> callers_ ABSL_GUARDED_BY(mutex_);      // waiting calls
  absl::flat_hash_map<scheduler::TenantKey, Share> shares_ ABSL_GUARDED_BY(mutex_);
  int64_t floor_ ABSL_GUARDED_BY(mutex_) = 0;  // service that a new tenant starts with
  uint64_t arrivals_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ADMISSION_PREFIX_TURNS_H_
