// Answers on their way from the engine to the transports, in the order in which they are given.
//
// AnswerCollector counts the requests that the engine owns, answers them, and keeps the answers
// until the holder of the engine role takes them. AnswerQueue delivers these.
//
// Writing a reply costs as much as a small launch, so it is not done with the role held. The holder
// leaves its answers in the queue when it gives the role up and delivers them itself, if no other
// thread is delivering: an idle engine hands nothing over. If more work waits already, the engine's
// thread goes on with that work and the queue's own thread delivers. One thread delivers at a time,
// so the answers of a stream never overtake one another.
//
// Requests that arrive during a delivery are mostly the next ones of the clients just answered.
// They are left to gather (busy) and go when the delivery ends, so that clients in step share
// launches.
//
// Ownership: borrow the requests, whose links they use (StreamRequest::engine.next), until Done.
// Allocate nothing.
#ifndef MLA_SCHEDULER_STEPS_ANSWERS_H_
#define MLA_SCHEDULER_STEPS_ANSWERS_H_

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "scheduler/clock.h"
#include "scheduler/engine_types.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

// Answered requests, linked by engine.next; engine.status is the answer.
struct AnswerList {
  StreamRequest* head = nullptr;
  StreamRequest* tail = nullptr;

  int64_t size = 0;

  bool empty() const { return head == nullptr; }
  void PushBack(StreamRequest* request) {
    request->engine.next = nullptr;
    (tail == nullptr ? head : tail->engine.next) = request;
    tail = request;
    ++size;
  }
  // REQUIRES: not empty.
  StreamRequest* PopFront() {
    StreamRequest* const first = std::exchange(head, head->engine.next);
    if (head == nullptr) tail = nullptr;
    --size;
    return first;
  }
  void Append(const AnswerList& other) {
    if (other.empty()) return;
    (tail == nullptr ? head : tail->engine.next) = other.head;
    tail = other.tail;
    size += other.size;
  }
};

// Calls the request's Done, then tells the observer, unless it is null.
void DeliverAnswer(StreamRequest* request, const absl::Status& status, EngineObserver* observer);

// Reports of the launches that ended while the role was held once, for one call of the observer.
struct LaunchReports {
  static constexpr int kMost = 2;
  int count = 0;
  std::array<LaunchReport, kMost> items;
};

// Threading: the engine role, except where a method says any thread.
class AnswerCollector final {
 public:
  // All outlive it; `observer` may be null.
  AnswerCollector(const Limits& limits, TenantTable* tenants, const Clock* clock,
                  EngineObserver* observer, EngineStats* stats)
      : limits_(limits), tenants_(tenants), clock_(clock), observer_(observer), stats_(stats) {}

  // Counts a request that arrives at `now` and is about to be handed over, or refuses it:
  // RESOURCE_EXHAUSTED when the tenant or the server has as many as it may. Any thread.
  absl::Status Admit(StreamRequest* request, MonotonicNanos now);
  // Returns the number of requests admitted and not yet answered. Any thread.
  int32_t owned() const { return owned_; }

  void Answer(StreamRequest* request, const absl::Status& status);
  void AnswerAt(MonotonicNanos now, StreamRequest* request, const absl::Status& status);
  // Gives the request back without an answer.
  void HandBack(StreamRequest* request, HandedBack why);
  void NoteReport(const LaunchReport& report);

  // From this call on, answers are collected for TakeAnswers; before it, Done is called at once.
  void Collect() { collects_ = true; }
  bool has_answers() const { return !answers_.empty(); }
  // Returns the answers since the last call, in the order in which they were given. The caller must
  // call Done for them.
  AnswerList TakeAnswers() { return std::exchange(answers_, {}); }
  // Reports of the launches that have ended since the last call. The caller passes them to the
  // observer once it has delivered the answers: metrics cost as much as a small reply.
  LaunchReports TakeReports() {
    LaunchReports taken;
    taken.count = std::exchange(reports_.count, 0);
    std::copy_n(reports_.items.begin(), taken.count, taken.items.begin());
    return taken;
  }

 private:
  void Return(StreamRequest* request, const absl::Status& status);

  const Limits& limits_;
  TenantTable* const tenants_;
  const Clock* const clock_;
  EngineObserver* const observer_;
  EngineStats* const stats_;
  bool collects_ = false;
  LaunchReports reports_;
  AnswerList answers_;
  std::atomic<int32_t> owned_{0};
};

// Threading: all methods from any thread; Flush and Stop not from Done.
class AnswerQueue final {
 public:
  // `observer` may be null.
  explicit AnswerQueue(EngineObserver* observer) : observer_(observer) {}
  ~AnswerQueue() { Stop(); }

  // Starts the thread; without it every deliverer goes on until the queue is empty.
  // `after_delivery` is called after each delivery by that thread or by Flush.
  void Start(std::function<void()> after_delivery);
  // Delivers the remaining answers and ends the thread.
  void Stop();

  // REQUIRES of both Push and PushAndClaim: the caller holds the engine role, so answers keep their
  // order.
  // Leaves the answers to the queue's thread.
  void Push(const AnswerList& answers);
  // As Push, but returns the answers that the caller must pass to Deliver once it has given the
  // role up. Empty when there is nothing to do or another thread is delivering.
  AnswerList PushAndClaim(const AnswerList& answers);

  // Delivers the answers returned by PushAndClaim.
  void Deliver(AnswerList claimed);
  // Returns once all answers pushed before are delivered.
  void Flush();
  // Returns true if the calling thread is inside Done.
  bool IsDelivering() const {
    return deliverer_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  // Returns true while a thread delivers. No work is lost: a thread looks for new work after a
  // delivery, and a thread that brings work looks here afterwards. So one of the two sees the
  // other.
  bool busy() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return busy_.load();
  }

 private:
  void DeliverFirst(AnswerList* answers);
  bool EndDelivery(AnswerList* claimed);
  bool TryClaim(AnswerList* claimed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  EngineObserver* const observer_;
  std::atomic<std::thread::id> deliverer_{};
  int64_t delivered_now_ = 0;  // of the claim now being delivered; used by its thread only
  std::function<void()> after_delivery_;

  // An idle queue takes no lock: a claim sets busy_, and its end clears it and then looks at
  // has_waiting_ and flushing_. Both are set before busy_ is read, so of two threads that run at
  // the same time at least one sees the other.
  std::atomic<bool> busy_{false};  // a thread is delivering
  std::atomic<bool> has_waiting_{false};
  std::atomic<int32_t> flushing_{0};  // threads in Flush
  std::atomic<int64_t> pushed_{0}, delivered_{0};

  Mutex mutex_;   // also held for changes of has_waiting_
  CondVar work_;  // for the queue's thread
  CondVar done_;  // for Flush
  AnswerList waiting_ ABSL_GUARDED_BY(mutex_);
  bool wanted_ ABSL_GUARDED_BY(mutex_) = false;  // the queue's thread must deliver
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_ANSWERS_H_
