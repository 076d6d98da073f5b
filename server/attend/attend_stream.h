// One Attend stream: reads messages, submits them to the engine and writes the replies.
//
// Life of a message: OnReadDone scans the header, checks it, gathers the tensors once into staging
// memory, and submits. Tensors in a shared-memory region stay where they are. So do queries that
// the backend reads from their slices, unless they are many small ones. The engine answers through
// OnAnswered, which drops the slices; the reply is framed over the output memory and written;
// OnWriteDone gives the memory back. Requests are submitted in the order they arrived, replies
// leave in the order they were answered.
//
// Bounds: bytes of messages that are not yet answered and written count against the stream. Its
// reads pause above wire.inflight_bytes, so a slow reader holds at most that much. After
// wire.slow_reader_ms it is disconnected. When the tenant's share of the staging memory, or all of
// it, is used up, the stream is stalled: it keeps its one unprocessed message and is resumed by the
// service's maintenance thread.
//
// Failures: a refused request gets a StepError and the stream goes on. Bytes that are not a message
// of the contract end the stream with INVALID_ARGUMENT.
//
// Ending: the engine's stream is closed (which aborts its steps) before Finish, never from inside
// OnAnswered. After Finish only OnDone touches the object, and deletes it.
//
// Threading: On* are called by the poller's threads, which hand the polling over before anything
// that is known to take long. OnAnswered is called by the engine's deliverer, Resume and
// DisconnectIfSlow by the maintenance thread. The constructor and Close wait for a running launch,
// so they are for threads that may. One mutex guards the state and is never held across a call into
// gRPC or the engine.
#ifndef MLA_SERVER_ATTEND_ATTEND_STREAM_H_
#define MLA_SERVER_ATTEND_ATTEND_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "mla/v1/attention.pb.h"
#include "proto/wire/tensor_codec.h"
#include "proto/wire/thread_team.h"
#include "scheduler/engine.h"
#include "server/attend/attend_message.h"
#include "server/attend/attend_request_builder.h"
#include "server/config/config.h"
#include "server/grpc/stream_call.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"

namespace mla::server {

// The parts that all streams share. Outlives them.
struct WireContext {
  scheduler::Engine* engine = nullptr;
  std::shared_ptr<AttendMessagePool> pool;
  Config::Wire wire;
  Metrics* metrics = nullptr;
  // Gathers tensors that are not read in place, and checks lists.
  wire::ThreadTeam* team = nullptr;
  SharedRegionTable* regions = nullptr;  // null: the path is off
  uint64_t boot_id = 0;
  std::string unix_tenant;   // server.unix_tenant
  Tracer* tracer = nullptr;  // null: no traces
};

class AttentionService;

class AttendStream final : public StreamHandler, public AttendMessageOwner {
 public:
  // `in_place`: queries stay in gRPC's slices. REQUIRES for this: the backend reads_fragments.
  AttendStream(const WireContext& shared, AttentionService* service,
               std::unique_ptr<StreamCall> call, scheduler::TenantRef tenant, bool in_place);

  void Start();
  void Resume();
  void Close();
  void DisconnectIfSlow(int64_t now_ns);
  const scheduler::TenantRef& tenant() const { return tenant_; }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;
  void OnAnswered(AttendMessage* message) override;

 private:
  enum class Reader { kReading, kPaused, kStalled, kDone };

  // Reading side. Handle returns false if staging memory was lacking; call it again later.
  bool Handle();
  void Continue();
  void ReadNext();
  bool ScanHeader();
  void Break(const absl::Status& status);
  // Breaks the stream because a message cannot be read. Always returns false.
  bool BreakMalformed(const absl::Status& status, std::string_view reason = "malformed",
                      std::string_view limit = "an AttendStreamRequest");
  AttendMessage* Accept();
  absl::Status Prepare(AttendMessage* message, bool* stalled);
  absl::Status PreparePayload(AttendMessage* message);
  absl::Status PrepareShared(AttendMessage* message, bool* stalled);
  absl::Status TakeStaging(AttendMessage* message, bool* stalled);
  bool ReadsInPlace(const AttendMessage& message) const;
  void KeepInPlace(AttendMessage* message);
  void ReleaseBytes(AttendMessage* message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Writing side.
  void Write(AttendMessage* message);
  void MaybeFinish();

  const WireContext& shared_;
  AttentionService* const service_;
  const std::unique_ptr<StreamCall> call_;
  const scheduler::TenantRef tenant_;
  AttendRequestBuilder builder_;
  TenantCounters* const requests_;
  const bool in_place_;

  // Only the reading side uses this.
  grpc::ByteBuffer incoming_;
  std::vector<grpc::Slice> slices_;
  std::vector<wire::Fragment> fragments_;
  std::string header_bytes_;
  v1::AttendStreamRequest header_;
  wire::PayloadRange payload_;

  // Only the writing thread, which has set writing_, uses these.
  v1::AttendStreamReply reply_;
  std::string reply_header_;
  grpc::ByteBuffer outgoing_;

  Mutex mutex_;
  Reader reader_ ABSL_GUARDED_BY(mutex_) = Reader::kReading;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status final_status_ ABSL_GUARDED_BY(mutex_);
  size_t inflight_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int32_t pending_ ABSL_GUARDED_BY(mutex_) = 0;  // messages accepted and not yet written or dropped
  int64_t write_started_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  AttendMessage* writing_message_ ABSL_GUARDED_BY(mutex_) = nullptr;
  AttendMessage* queue_head_ ABSL_GUARDED_BY(mutex_) = nullptr;
  AttendMessage* queue_tail_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_ATTEND_STREAM_H_
