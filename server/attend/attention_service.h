// The Attention service: creates one AttendStream for each call and maintains all of them.
//
// Ownership: streams own themselves until their call is over; the service only lists them. Serve is
// called once the gRPC server was started; Stop after it has shut down and before its poller stops
// or the service is destroyed. Threading: a maintenance thread resumes stalled streams when staging
// memory comes back and disconnects those whose client has stopped reading. A resumed stream may
// run a small launch on the maintenance thread. If the launch hangs, no stream is disconnected;
// none could be closed then either. Opening and closing a stream wait for a running launch, so
// another thread, the open/close thread, does both, each in the order of the calls: the poller's
// threads serve health and administration too and must go on while a device hangs. The open/close
// thread closes before it opens: a closed stream releases staging memory and open steps, for which
// new streams may wait.
#ifndef MLA_SERVER_ATTEND_ATTENTION_SERVICE_H_
#define MLA_SERVER_ATTEND_ATTENTION_SERVICE_H_

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "mla/v1/attention.grpc.pb.h"
#include "server/attend/attend_stream.h"
#include "server/grpc/completion_poller.h"
#include "server/grpc/stream_call.h"

namespace mla::server {

class AttentionService final : public v1::Attention::WithRawMethod_Attend<v1::Attention::Service> {
 public:
  explicit AttentionService(WireContext shared);
  ~AttentionService() override;

  // Takes calls from now on. `poller` belongs to the gRPC server that serves this service, and must
  // exist until Stop returns.
  void Serve(CompletionPoller* poller);
  // Sets whether queries of new streams stay in place if the backend reads_fragments, as they do at
  // first. If not, all tensors are gathered into staging memory. For measurements. Any thread.
  void set_reads_in_place(bool in_place) {
    reads_in_place_ = in_place && shared_.engine->backend_info().reads_fragments;
  }

  // --- Called by the streams. A stalled one is resumed when staging memory has come back, an
  // ending one closed, and one that has gone is about to delete itself.
  void OnStalled(AttendStream* stream);
  void OnEnding(AttendStream* stream);
  void OnGone(AttendStream* stream);

  // Waits until all streams have gone, then ends both threads.
  void Stop();

 private:
  struct Opening {
    std::unique_ptr<StreamCall> call;
    scheduler::TenantRef tenant;
  };

  void Accept(std::unique_ptr<StreamCall> call);
  void TakeSlot();
  void OpenAndClose();
  void Maintain();
  void ResumeStalled();

  const WireContext shared_;
  std::atomic<bool> reads_in_place_;
  std::optional<StreamAcceptor> acceptor_;
  Mutex mutex_;
  CondVar changed_;
  // streams, and calls that are about to become one
  int32_t slots_taken_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Opening> opening_ ABSL_GUARDED_BY(mutex_);       // calls to become streams
  std::deque<AttendStream*> ending_ ABSL_GUARDED_BY(mutex_);  // streams to be closed
  CondVar open_or_close_;                                     // there is a stream to open or close
  std::set<AttendStream*> streams_ ABSL_GUARDED_BY(mutex_);
  std::deque<AttendStream*> stalled_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread maintenance_thread_, open_close_thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_ATTENTION_SERVICE_H_
