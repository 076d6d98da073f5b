#include "server/stream_poller.h"

#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace mla::server {
namespace {

using Clock = std::chrono::steady_clock;

// The poller for which this thread has the duty of polling.
thread_local const StreamPoller* duty_of = nullptr;

}  // namespace

int32_t DefaultSpinMicros(int32_t cpus, bool computes_on_cpus) {
  if (cpus < 4) return 0;
  return computes_on_cpus ? 50 : 1000;
}

StreamPoller::StreamPoller(grpc::ServerBuilder* builder, const StreamPollerOptions& options)
    : thread_count_(options.threads),
      spin_us_(options.spin_us),
      queue_(builder->AddCompletionQueue()) {}

StreamPoller::~StreamPoller() { Stop(); }

void StreamPoller::Start() {
  for (int32_t i = 0; i < thread_count_; ++i) threads_.emplace_back([this] { Run(); });
}

void StreamPoller::Stop() {
  if (std::exchange(stopped_, true)) return;
  if (!threads_.empty()) {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return calls_ == 0; });
  }
  queue_->Shutdown();
  if (threads_.empty()) Run();  // a queue must be empty before it goes
  for (std::thread& thread : threads_) thread.join();
}

void StreamPoller::CallMade() {
  const std::lock_guard lock(mutex_);
  ++calls_;
}

void StreamPoller::CallGone() {
  const std::lock_guard lock(mutex_);
  if (--calls_ == 0) idle_.notify_all();
}

void StreamPoller::HandOver() {
  if (thread_count_ < 2 || duty_of != this) return;
  duty_of = nullptr;
  {
    const std::lock_guard lock(mutex_);
    polled_ = false;
  }
  free_.notify_one();
}

// False: the queue was shut down and is empty.
bool StreamPoller::Next(void** tag, bool* ok) {
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

void StreamPoller::Run() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      free_.wait(lock, [this] { return !polled_; });
      polled_ = true;
    }
    duty_of = this;
    while (duty_of == this) {
      void* tag = nullptr;
      bool ok = false;
      if (!Next(&tag, &ok)) {
        HandOver();  // so that the others see it, too
        duty_of = nullptr;
        return;
      }
      static_cast<StreamEvent*>(tag)->Happened(ok);
    }
  }
}

}  // namespace mla::server
