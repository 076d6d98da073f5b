// Ends streamed calls whose client neither sends nor takes anything for too long, because each of
// them holds a thread.
//
// Threading: any thread; one more thread watches the clock.
#ifndef MLA_SERVER_LIFECYCLE_IDLE_CALLS_H_
#define MLA_SERVER_LIFECYCLE_IDLE_CALLS_H_

#include <grpcpp/server_context.h>

#include <chrono>
#include <map>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"

namespace mla::server {

class IdleCalls final {
 public:
  // Cancels calls that wait for their client for longer than `idle`.
  explicit IdleCalls(std::chrono::milliseconds idle);
  ~IdleCalls();
  IdleCalls(const IdleCalls&) = delete;
  IdleCalls& operator=(const IdleCalls&) = delete;

  // Notes that the call waits for its client, until Works or End.
  void Waits(grpc::ServerContext* call);
  // Notes that the server works for the call, so that the wait for the client has ended.
  void Works(grpc::ServerContext* call);
  // Ends the account of a call that ends with `status`. Returns DEADLINE_EXCEEDED if the call was
  // cancelled here, else `status`.
  absl::Status End(grpc::ServerContext* call, const absl::Status& status);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    Clock::time_point heard;
    bool cancelled = false;
  };
  void Watch();

  const std::chrono::milliseconds idle_;
  Mutex mutex_;
  std::map<grpc::ServerContext*, Watched> watched_ ABSL_GUARDED_BY(mutex_);
  CondVar stopping_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_LIFECYCLE_IDLE_CALLS_H_
