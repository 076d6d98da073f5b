// Decides which thread holds the engine's role, and which event wakes which thread. The methods of
// Engine are written in terms of it (engine.cc); nothing else includes this header.
#ifndef MLA_SCHEDULER_ENGINE_ENGINE_IMPL_H_
#define MLA_SCHEDULER_ENGINE_ENGINE_IMPL_H_

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "base/pauses.h"
#include "base/status_macros.h"
#include "scheduler/engine.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/engine/model_directory.h"
#include "scheduler/request.h"
#include "scheduler/steps/answers.h"
#include "scheduler/tables/prefix_plan.h"

namespace mla::scheduler {

// The engine's thread looks at its timers at least this often, even if told to sleep longer.
inline constexpr int64_t kLongestSleepNanos = 200'000'000;
// Launches that a submitting thread runs before it leaves the rest to the engine's thread.
inline constexpr int kInlineLaunches = 2;
// A call that takes the role many times lets waiting threads in between two of its turns: it yields
// up to this many times while any thread waits for the role.
inline constexpr int kYields = 1000;

// Hands requests over from transports to the engine: a list that many threads add to. The links lie
// in the requests, so the list never allocates. Push and TakeAll are one atomic operation each;
// only sleeping takes a lock.
class Inbox {
 public:
  void Push(StreamRequest* request) {
    request->engine.next = last_.load(std::memory_order_relaxed);
    while (!last_.compare_exchange_weak(request->engine.next, request)) {
    }
  }

  // Returns all requests pushed before the call, linked by engine.next in order of arrival, or
  // null.
  StreamRequest* TakeAll() {
    if (empty()) return nullptr;
    StreamRequest* newest = last_.exchange(nullptr);
    StreamRequest* first = nullptr;
    while (newest != nullptr) {
      StreamRequest* const before = std::exchange(newest->engine.next, first);
      first = std::exchange(newest, before);
    }
    return first;
  }

  bool empty() const { return last_.load(std::memory_order_acquire) == nullptr; }

  // Wakes the waiter; if none waits, the next Wait returns at once.
  void Wake() {
    {
      const MutexLock lock(mutex_);
      woken_ = true;
    }
    wake_.NotifyOne();
  }

  // Sleeps until Wake is called or `nanos` have passed. Returns at once if something was pushed
  // that TakeAll has not taken.
  void Wait(int64_t nanos) {
    MutexLock lock(mutex_);
    wake_.WaitFor(lock, std::chrono::nanoseconds(nanos),
                  [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return woken_ || !empty(); });
    woken_ = false;
  }

 private:
  std::atomic<StreamRequest*> last_{nullptr};  // pushed; its links lead to earlier ones
  Mutex mutex_;
  CondVar wake_;
  bool woken_ ABSL_GUARDED_BY(mutex_) = false;
};

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, Clock* clock)
      : options_(options),
        clock_(clock),
        pauses_([clock] { return clock->Now(); }),
        prefixes_(options.prefix_secret.value_or(kvcache::RandomSecret()), options.limits),
        answers_(options.observer) {}

  // Passes the reports to the observer; any thread.
  void Observe(const LaunchReports& reports) {
    for (int i = 0; i < reports.count; ++i) {
      options_.observer->OnLaunch(reports.items[static_cast<size_t>(i)]);
    }
  }

  // Holds the role for its lifetime, then delivers the answers given in that time. Control calls
  // announce themselves so that the engine's thread, which would otherwise take the role again at
  // once, lets them in.
  class ABSL_SCOPED_LOCKABLE Role {
   public:
    explicit Role(Impl& impl) ABSL_EXCLUSIVE_LOCK_FUNCTION(impl.role_) : impl_(impl) {
      ++impl_.waiting_for_role_;
      impl_.role_.Lock();
      --impl_.waiting_for_role_;
    }
    // Takes over the role after a successful TryLock.
    Role(Impl& impl, std::adopt_lock_t) ABSL_EXCLUSIVE_LOCKS_REQUIRED(impl.role_) : impl_(impl) {}
    ~Role() ABSL_UNLOCK_FUNCTION() {
      impl_.core_->NoteLoad();
      // Requests waiting for siblings or KV rows are not work left; NextTick wakes the engine for
      // them.
      const bool work_left =
          impl_.core_->launches().inflight() || impl_.core_->launches().MayStart();
      const bool sooner = impl_.core_->steps().NextTick() < impl_.wake_at_;
      const AnswerList answers = impl_.answers_.PushAndClaim(impl_.core_->answers().TakeAnswers());
      const LaunchReports reports = impl_.core_->answers().TakeReports();
      impl_.role_.Unlock();
      if (std::this_thread::get_id() == impl_.engine_thread_) {
        impl_.answers_.Deliver(answers);
        impl_.Observe(reports);
        return;
      }
      const bool unfinished = work_left || sooner || !impl_.inbox_.empty();
      if (unfinished && more_work_ == nullptr) impl_.inbox_.Wake();
      impl_.answers_.Deliver(answers);
      impl_.Observe(reports);
      // Requests that arrived during the delivery were left in the inbox, to share a launch.
      const bool came = !answers.empty() && !impl_.inbox_.empty();
      if (more_work_ != nullptr) {
        *more_work_ = unfinished || came;
      } else if (came) {
        impl_.inbox_.Wake();
      }
    }
    // Makes the destructor set `more_work` to true if work is left, instead of waking the engine's
    // thread. This is for a caller that goes on with that work itself.
    void ComeBack(bool* more_work) { more_work_ = more_work; }
    Role(const Role&) = delete;
    Role& operator=(const Role&) = delete;

   private:
    Impl& impl_;
    bool* more_work_ = nullptr;
  };

  // Runs `fn(core)` with the role, after all requests submitted before have been accepted.
  template <typename Fn>
  auto WithRole(Fn&& fn) {
    Role role(*this);
    const MonotonicNanos now = clock_->Now();
    Drain(now);
    if (now >= core_->steps().NextTick()) core_->steps().Tick();
    return fn(*core_);
  }

  // Accepts all submitted requests. `now` decides whether the process was paused before them.
  void Drain(MonotonicNanos now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    if (options_.dedicated_thread && options_.notes_pauses) {
      if (const int64_t paused = pauses_.Take(now); paused > 0) core_->steps().NotePause(paused);
    }
    StreamRequest* request = inbox_.TakeAll();
    while (request != nullptr) {
      StreamRequest* const next = request->engine.next;
      request->engine.next = nullptr;
      core_->steps().Accept(request);
      request = next;
    }
  }

  // Runs one round of the engine; returns true if there may be more to do.
  bool Round() ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    const MonotonicNanos now = clock_->Now();
    Drain(now);
    if (now >= core_->steps().NextTick()) core_->steps().Tick();
    core_->NoteLoad();
    bool busy = core_->launches().Start(now);
    if (core_->backend().Info().unified_memory) {
      busy |= core_->launches().Complete(/*wait=*/true);
    } else {
      busy |= core_->launches().Complete(/*wait=*/false);
      if (!busy && (core_->launches().inflight() || core_->steps().queue().AwaitsSlices())) {
        if (options_.dedicated_thread) std::this_thread::yield();
        busy = true;
      }
    }
    return busy || !inbox_.empty();
  }

  // Runs rounds until all work is done, other threads want the role, or only the delivery of
  // answers is left. Returns true in the last case.
  bool RunRounds() ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    bool busy = true;
    while (busy && waiting_for_role_ == 0 && !stopping_) {
      busy = Round();
      if (!core_->answers().has_answers()) continue;
      if (!core_->launches().MayStart() && !core_->launches().inflight() && inbox_.empty())
        return true;
      answers_.Push(core_->answers().TakeAnswers());
    }
    return false;
  }

  void RunThread() {
    // Operators find this thread by its name, because its time is what all tenants share.
    pthread_setname_np(pthread_self(), "mla-engine");
    engine_thread_ = std::this_thread::get_id();
    while (!stopping_) {
      int64_t sleep = kLongestSleepNanos;
      {
        Role role(*this);
        const bool answered = RunRounds();
        const MonotonicNanos now = clock_->Now();
        const MonotonicNanos tick = core_->steps().NextTick();
        sleep = std::clamp<int64_t>(tick - now, 0, kLongestSleepNanos);
        wake_at_ = now + sleep;
        if (answered || core_->launches().inflight() || waiting_for_role_ > 0) sleep = 0;
      }
      while (waiting_for_role_ > 0 && !stopping_) std::this_thread::yield();
      if (sleep > 0) inbox_.Wait(sleep);
    }
  }

  // Brings back rows from slower tiers and waits for them as long as the call may wait. `restore`,
  // called with the role, maps core -> StatusOr<shared_ptr<TierWait>>; it returns an error for
  // calls that will be refused anyway.
  template <typename Restore>
  absl::Status AwaitTiers(const PrefixPlan& prefix, int64_t most_ms, Restore&& restore) {
    if (options_.limits.host_tier_bytes == 0 || prefix.chain == nullptr) return absl::OkStatus();
    MLA_ASSIGN_OR_RETURN(const std::shared_ptr<TierWait> wait, WithRole(restore));
    if (wait != nullptr && options_.dedicated_thread) {
      wait->WaitFor(std::min(options_.limits.tier_wait_ms, most_ms));
    }
    return absl::OkStatus();
  }

  // Access for Admit, the table of tenants and the registration of memory, none of which needs the
  // role.
  EngineCore& AnyThread() ABSL_NO_THREAD_SAFETY_ANALYSIS { return *core_; }

  // Call it while everything that the core's threads may wake still exists. REQUIRES: no more calls
  // come.
  void DropCore() ABSL_NO_THREAD_SAFETY_ANALYSIS { core_.reset(); }

  void LetOthersIn() const {
    for (int i = 0; i < kYields && waiting_for_role_ > 0; ++i) std::this_thread::yield();
  }

  // Returns true if the submitter may await a launch of this work, which is not small.
  bool MayAwait(const Submitter* submitter, int64_t work) const {
    return submitter != nullptr && work <= options_.awaited_work && !info_.unified_memory &&
           submitter->IsIdle();
  }

  // Awaits the launch on behalf of an idle submitter. Returns false if other threads want the role
  // or the submitter has work again.
  bool AwaitLaunch(const Submitter& submitter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    while (!core_->launches().Complete(/*wait=*/false)) {
      if (waiting_for_role_ > 0 || !inbox_.empty() || !submitter.IsIdle()) return false;
    }
    return true;
  }

  // The submitting thread takes the role if it is free and runs small launches, unless
  // `leave_launch` leaves them to the engine's thread. `arrival` is the time of the submission.
  void RunInline(bool leave_launch, const Submitter* submitter, MonotonicNanos arrival) {
    if (answers_.IsDelivering()) return;  // called from Done, whose caller looks again afterwards
    if (options_.inline_work <= 0 || leave_launch) return inbox_.Wake();
    bool work_left = false;
    for (int i = 0; i < kInlineLaunches; ++i) {
      if (answers_.busy() || !role_.TryLock()) break;
      work_left = false;
      {
        Role role(*this, std::adopt_lock);
        const MonotonicNanos now = i == 0 ? arrival : clock_->Now();
        Drain(now);
        if (core_->steps().queue().empty()) return;
        const int64_t work = core_->steps().queue().ReadyWork();
        const bool small = work <= options_.inline_work;
        if (!(small || MayAwait(submitter, work)) || !core_->launches().Start(now)) {
          return;
        }
        if (small) {
          core_->launches().Complete(/*wait=*/true);
        } else if (!AwaitLaunch(*submitter)) {
          return;
        }
        if (i + 1 < kInlineLaunches) role.ComeBack(&work_left);
      }
      if (!work_left) return;
    }
    if (work_left) inbox_.Wake();
  }

  const EngineOptions options_;
  Clock* const clock_;
  std::unique_ptr<EngineCore> core_ ABSL_PT_GUARDED_BY(role_);
  kernels::BackendInfo info_;

  Mutex role_;
  std::atomic<int> waiting_for_role_{0};
  std::atomic<MonotonicNanos> wake_at_{0};  // when the engine's thread will wake by itself
  Inbox inbox_;
  PauseWatch pauses_;
  const PrefixPlanner prefixes_;
  AnswerQueue answers_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::atomic<std::thread::id> engine_thread_{};

  std::atomic<UploadId> next_upload_{1};
  ModelDirectory directory_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_ENGINE_IMPL_H_
