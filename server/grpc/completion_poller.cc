#include "server/grpc/completion_poller.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace mla::server {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

thread_local CompletionPoller::PollThread* CompletionPoller::own_thread = nullptr;

int32_t DefaultSpinMicros(int32_t cpus, bool computes_on_cpus) {
  if (cpus < 4) return 0;
  return computes_on_cpus ? 50 : 1000;
}

CompletionPoller::CompletionPoller(grpc::ServerBuilder* builder,
                                   const CompletionPollerOptions& options)
    : thread_count_(options.threads),
      spin_us_(options.spin_us),
      queue_(builder->AddCompletionQueue()) {}

CompletionPoller::~CompletionPoller() { Stop(); }

void CompletionPoller::Start() {
  for (int32_t i = 0; i < thread_count_; ++i) {
    threads_.push_back(std::make_unique<PollThread>(this));
    threads_.back()->thread =
        std::thread([this, poll_thread = threads_.back().get()] { Run(poll_thread); });
  }
  if (thread_count_ > 1) watch_ = std::thread([this] { Watch(); });
}

void CompletionPoller::Stop() {
  if (std::exchange(stopped_, true)) return;
  {
    MutexLock lock(mutex_);
    if (!threads_.empty())
      idle_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_ == 0; });
    stop_watch_ = true;
    watched_.NotifyAll();
  }
  if (watch_.joinable()) watch_.join();
  queue_->Shutdown();
  PollThread drain_thread(this);
  if (threads_.empty()) Run(&drain_thread);  // gRPC requires an empty queue before it is destroyed
  for (const auto& poll_thread : threads_) poll_thread->thread.join();
}

void CompletionPoller::AddCall() {
  const MutexLock lock(mutex_);
  ++calls_;
}

void CompletionPoller::RemoveCall() {
  const MutexLock lock(mutex_);
  if (--calls_ == 0) idle_.NotifyAll();
}

void CompletionPoller::HandOver() {
  PollThread* const poll_thread = own_thread;
  if (thread_count_ < 2 || poll_thread == nullptr || poll_thread->poller != this) return;
  if (polling_.load(std::memory_order_relaxed) != poll_thread) return;
  {
    const MutexLock lock(mutex_);
    if (polling_.load(std::memory_order_relaxed) != poll_thread) return;
    polling_.store(nullptr, std::memory_order_relaxed);
  }
  free_.NotifyOne();
}

// Takes the polling away from a thread that is seen in the same event twice.
void CompletionPoller::Watch() {
  const PollThread* seen = nullptr;
  uint64_t events_seen = 0;
  MutexLock lock(mutex_);
  while (!watched_.WaitFor(lock, kEventTimeout, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stop_watch_;
  })) {
    const PollThread* const poll_thread = polling_.load(std::memory_order_relaxed);
    const uint64_t events =
        poll_thread == nullptr ? 0 : poll_thread->events.load(std::memory_order_relaxed);
    if (events % 2 == 1 && poll_thread == seen && events == events_seen) {
      polling_.store(nullptr, std::memory_order_relaxed);
      free_.NotifyOne();
    }
    seen = poll_thread;
    events_seen = events;
  }
}

// Returns false once the queue is shut down and empty.
bool CompletionPoller::Next(void** tag, bool* ok) {
  using Queue = grpc::CompletionQueue;
  if (const int32_t spin = spin_us_.load(std::memory_order_relaxed); spin > 0) {
    const auto end = Clock::now() + std::chrono::microseconds(spin);
    do {
      const Queue::NextStatus status =
          queue_->AsyncNext(tag, ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
      if (status != Queue::TIMEOUT) return status == Queue::GOT_EVENT;
    } while (Clock::now() < end);
  }
  return queue_->Next(tag, ok);
}

void CompletionPoller::Run(PollThread* poll_thread) {
  own_thread = poll_thread;
  for (;;) {
    {
      MutexLock lock(mutex_);
      free_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return polling_.load(std::memory_order_relaxed) == nullptr;
      });
      polling_.store(poll_thread, std::memory_order_relaxed);
    }
    while (polling_.load(std::memory_order_relaxed) == poll_thread) {
      void* tag = nullptr;
      bool ok = false;
      if (!Next(&tag, &ok)) {
        HandOver();  // so that the other threads see it too
        own_thread = nullptr;
        return;
      }
      const uint64_t events = poll_thread->events.load(std::memory_order_relaxed);
      poll_thread->events.store(events + 1, std::memory_order_relaxed);
      static_cast<StreamEvent*>(tag)->OnEvent(ok);
      poll_thread->events.store(events + 2, std::memory_order_relaxed);
    }
  }
}

}  // namespace mla::server
