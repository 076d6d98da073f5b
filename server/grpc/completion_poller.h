// Runs the threads that poll gRPC for the Attend streams.
//
// The form is chosen for latency. gRPC's own callback threads pass the polling on before they run a
// callback. So every message wakes a second thread, and each of them sleeps again at once. Here one
// thread at a time polls a queue that all share, and handles arriving events itself. After each
// event it goes on polling for `spin_us` before it sleeps. The other threads are on standby: after
// HandOver one of them polls while the first thread does something long.
//
// A thread may take long without calling HandOver, for example in a small launch on a device that
// hangs. One more thread, which never polls, checks for this every kEventTimeout and then lets a
// standby thread poll. This costs two stores for each event.
//
// A process should have one poller and no service of gRPC's callback kind: one thread at a time
// polls all of gRPC's sockets, and a callback thread that sleeps in there would receive the events
// of this one. Services of the synchronous kind may be served at the same time: a server with such
// a queue lets their threads wait without polling.
//
// Cost: after the last event one core is busy for `spin_us`, then none. If `spin_us` is longer than
// the pause between two layers of a step, a core stays busy for as long as a client decodes.
//
// Life: created while the server is being built. Call Start when the server has started, and Stop
// after its Shutdown. Threading: Start and Stop from one thread; HandOver and set_spin_us from any.
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

// The tag of a gRPC operation.
class StreamEvent {
 public:
  virtual void OnEvent(bool ok) = 0;

 protected:
  ~StreamEvent() = default;
};

struct CompletionPollerOptions {
  int32_t threads = 4;  // 1: no other thread ever takes over
  int32_t spin_us = 0;  // after an event; 0: sleep at once
};

// Returns how long to spin by default: `cpus` is the number of CPUs of this process;
// `computes_on_cpus` says whether the backend needs them for itself. Returns 0 below four CPUs,
// where a spinning thread takes its core from a thread that has work.
int32_t DefaultSpinMicros(int32_t cpus, bool computes_on_cpus);

class CompletionPoller final {
 public:
  // An event that takes longer than this loses the polling to another thread.
  static constexpr std::chrono::milliseconds kEventTimeout{20};

  // Adds its queue to `builder`.
  CompletionPoller(grpc::ServerBuilder* builder, const CompletionPollerOptions& options);
  ~CompletionPoller();

  grpc::ServerCompletionQueue* queue() { return queue_.get(); }
  void Start();
  // Waits until no call is left, then ends the threads. gRPC would abort the process if an
  // operation were started on a queue that was shut down. REQUIRES: the server was shut down or
  // never started.
  void Stop();

  // StreamCall calls these; they count the existing calls.
  void AddCall();
  void RemoveCall();

  // Call it inside OnEvent before work that may take long. Another thread polls during that work.
  // Does nothing on other threads.
  void HandOver();
  // Returns true if the last caller was not `user`, which means that more than one needs the
  // polling.
  bool Alternates(const void* user) {
    return last_user_.exchange(user, std::memory_order_relaxed) != user;
  }

  void set_spin_us(int32_t spin_us) { spin_us_.store(spin_us, std::memory_order_relaxed); }

 private:
  // A thread that polls.
  struct PollThread {
    explicit PollThread(const CompletionPoller* its_poller) : poller(its_poller) {}
    const CompletionPoller* const poller;
    // Counts beginnings and ends, so it is odd while an event is handled.
    std::atomic<uint64_t> events{0};
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
