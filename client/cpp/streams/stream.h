// The client's end of one Attend stream. Internal to the library.
//
// Requests are sent in the order of Send, each as its header bytes and the caller's tensors.
// Replies are matched by tag, and their tensors are copied once, to the caller's memory.
//
// Waiting threads do the work: the first one in Wait polls the stream's own completion queue and
// handles everything that arrives, even for the others. When it has its reply, another one takes
// over. So no thread is woken between a reply's arrival and its waiter, which spins for a while
// before it sleeps. If no thread waits yet, a thread of the stream does this work after some
// hundred microseconds. It is started when it is first needed.
//
// A read is under way only while replies are awaited. A stream that the server has ended is
// therefore noticed by the next Send or Wait.
//
// Ownership: shared by session, steps and pending calls. Threading: any thread; one mutex, which is
// not held while messages are copied.
#ifndef MLA_CLIENT_CPP_STREAMS_STREAM_H_
#define MLA_CLIENT_CPP_STREAMS_STREAM_H_

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "client/cpp/streams/step_stream.h"
#include "mla/v1/attention.pb.h"
#include "proto/wire/tensor_codec.h"

namespace mla::client {

struct StreamOptions {
  std::string tenant;    // sent without TLS only; empty: the server's default
  uint64_t boot_id = 0;  // replies of another server end the stream with ABORTED
  // Says why a server with another boot id answers; called by a thread that waits for a reply.
  std::function<absl::Status(uint64_t boot_id)> why_replaced;
  uint64_t message_bytes = 0;                // most tensor bytes of one request or reply
  std::chrono::milliseconds timeout{60000};  // for each request, and for Close
  std::chrono::microseconds spin{0};         // how long a waiting thread spins before it sleeps
};

// Returns how long to spin by default where this process may keep `cpus` busy: a spinning thread
// needs one that no other thread wants.
std::chrono::microseconds DefaultStreamSpin(int32_t cpus);

class Stream final : public StepStream {
 public:
  Stream(std::shared_ptr<grpc::Channel> channel, const StreamOptions& options);
  ~Stream() override;

  std::string_view transport() const override { return "inline"; }
  uint64_t message_bytes() const override { return options_.message_bytes; }
  bool InPlace(const InputTensors&, const PendingReply&) const override { return false; }
  void Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
            const std::shared_ptr<PendingReply>& pending) override;
  absl::Status Wait(PendingReply* pending) override;
  bool Ready(PendingReply* pending) override;
  absl::Status Close() override;
  void Cancel(const absl::Status& why) override;
  std::span<std::byte> Allocate(uint64_t) override { return {}; }
  void Free(std::span<std::byte>) override {}

 private:
  using Clock = std::chrono::steady_clock;

  // Polling.
  template <typename Done>
  bool PollUntil(MutexLock* lock, Clock::time_point deadline, Done done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PollOnce(Clock::time_point deadline, bool spin);
  template <typename Done>
  void PollWhatIsThere(MutexLock* lock, Done done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pump();
  void WakePump(size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Handle the events of the queue.
  void OnReadDone(bool ok);
  void OnWriteDone(bool ok);
  void OnFinished();
  absl::Status Take(uint64_t* tag);
  void CopyPayload(PendingReply* pending) const;

  void StartNextWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartFinish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Break(absl::Status why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const StreamOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;

  // Only the polling thread uses these.
  std::vector<grpc::Slice> slices_;
  std::vector<wire::Fragment> fragments_;
  std::string header_bytes_;
  v1::AttendStreamReply reply_;
  wire::PayloadRange payload_;

  grpc::ByteBuffer incoming_;  // of the read under way
  grpc::Status result_;        // of the finish under way
  std::atomic<uint64_t> next_tag_{1};

  Mutex mutex_;
  CondVar changed_;
  std::deque<grpc::ByteBuffer> unsent_ ABSL_GUARDED_BY(mutex_);
  int32_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;   // threads in PollUntil
  bool polling_ ABSL_GUARDED_BY(mutex_) = false;  // a thread polls
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool finishing_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status final_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);  // why this side has cancelled it
  absl::flat_hash_map<uint64_t, std::shared_ptr<PendingReply>> pending_
      ABSL_GUARDED_BY(mutex_);  // by tag

  CondVar pump_wanted_;
  bool pumping_ ABSL_GUARDED_BY(mutex_) = false;
  bool stop_pump_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread pump_;
};

}  // namespace mla::client

#endif  // MLA_CLIENT_CPP_STREAMS_STREAM_H_
