// Threads that poll gRPC for the Attend streams.
//
// The form is chosen for latency. gRPC's own callback threads pass the polling on before they run a
// callback. So every message wakes a second thread, and each of them sleeps again at once. Here one
// thread at a time polls a queue that all share, and handles arriving events itself. After each
// event it goes on polling for `spin_us` before it sleeps. The other threads are on standby: after
// HandOver one of them polls while the first thread does something long.
//
// A thread may take long without having called HandOver (a small launch on a device that hangs).
// One more thread, which never polls, looks for that every kEventTimeout and moves the polling to a
// standby thread. For this an event costs two stores.
//
// A process should have one poller and no service of gRPC's callback kind: one thread at a time
// polls all of gRPC's sockets, and a callback thread that sleeps in there would receive the events
// of this one. Services of the synchronous kind may be served at the same time: a server with such
// a queue lets their threads wait without polling.
//
// Cost: after the last event one core is busy for `spin_us` and then none. Spinning longer than the
// pause between two layers of a step keeps a core busy for as long as a client decodes.
//
// Life: made while the server is being built, Start once it was started, Stop after its Shutdown.
// Threading: Start and Stop from one thread; HandOver and set_spin_us from any.
#ifndef MLA_SERVER_GRPC_COMPLETION_POLLER_H_
#define MLA_SERVER_GRPC_COMPLETION_POLLER_H_

#include <grpcpp/completion_queue.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace grpc {
class ServerBuilder;
}  // namespace grpc

namespace mla::server {

// Tag of a gRPC operation.
class StreamEvent {
 public:
  virtual void OnEvent(bool ok) = 0;

 protected:
  ~StreamEvent() = default;
};

struct CompletionPollerOptions {
  int32_t threads = 4;  // 1: no thread ever takes over
  int32_t spin_us = 0;  // after an event; 0: sleeps at once
};

// How long to spin by default: `cpus` is the number of CPUs of this process; `computes_on_cpus`
// says whether the backend needs them for itself. 0 below four CPUs, where a spinning thread takes
// its core from a thread that has work.
int32_t DefaultSpinMicros(int32_t cpus, bool computes_on_cpus);

class CompletionPoller final {
 public:
  // How long one event may keep the polling.
  static constexpr std::chrono::milliseconds kEventTimeout{20};

  // Adds its queue to `builder`.
  CompletionPoller(grpc::ServerBuilder* builder, const CompletionPollerOptions& options);
  ~CompletionPoller();

  grpc::ServerCompletionQueue* queue() { return queue_.get(); }
  void Start();
  // Waits until no call is left, then ends the threads: gRPC aborts the process when an operation
  // is started on a queue that was shut down. REQUIRES: the server was shut down, or never started.
  void Stop();

  // For StreamCall: counts the calls that exist.
  void AddCall();
  void RemoveCall();

  // From inside OnEvent: Call it inside OnEvent before work that may take long: another thread
  // polls during that work. Does nothing on other threads.
  void HandOver();
  // True if the last caller was not `user`: more than one user needs the polling.
  bool Alternates(const void* user) {
    return last_user_.exchange(user, std::memory_order_relaxed) != user;
  }

  void set_spin_us(int32_t spin_us) { spin_us_.store(spin_us, std::memory_order_relaxed); }

 private:
  // A thread that polls.
  struct PollThread {
    explicit PollThread(const CompletionPoller* its_poller) : poller(its_poller) {}
    const CompletionPoller* const poller;
    std::atomic<uint64_t> events{0};  // begun and ended, so that it is odd while one is handled
    std::thread thread;
  };

  void Run(PollThread* poll_thread);
  void Watch();
  bool Next(void** tag, bool* ok);
  static thread_local PollThread* own_thread;  // of the calling thread

  const int32_t thread_count_;
  std::atomic<int32_t> spin_us_;
  std::atomic<const void*> last_user_{nullptr};
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  std::vector<std::unique_ptr<PollThread>> threads_;
  std::thread watch_;
  bool stopped_ = false;

  Mutex mutex_;
  CondVar free_;
  std::atomic<PollThread*> polling_{nullptr};  // the thread that polls; changed with the mutex held
  CondVar watched_;
  bool stop_watch_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar idle_;
  int32_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_GRPC_COMPLETION_POLLER_H_
