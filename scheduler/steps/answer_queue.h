// Delivers answers from the engine's role to the transports, in the order in which they were given.
//
// Writing a reply costs as much as a small launch, so it is not done with the role held. The holder
// leaves its answers here when it gives the role up and delivers them itself, if no other thread is
// delivering: an idle engine hands nothing over. If more work waits already, the engine's thread
// goes on with that work and the queue's own thread delivers. One thread delivers at a time, so the
// answers of a stream never overtake one another.
//
// Requests that arrive during a delivery are mostly the next ones of the clients just answered.
// They are left to gather (busy) and go when the delivery ends, so that clients in step share
// launches.
//
// Ownership: borrows the requests, whose links it uses (StreamRequest::engine.next), until Done.
// Threading: all methods from any thread; Flush and Stop not from Done. Allocates nothing.
#ifndef MLA_SCHEDULER_STEPS_ANSWER_QUEUE_H_
#define MLA_SCHEDULER_STEPS_ANSWER_QUEUE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "scheduler/engine_types.h"
#include "scheduler/request.h"

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

#endif  // MLA_SCHEDULER_STEPS_ANSWER_QUEUE_H_
