// From a message of the stepping protocol to a request that the engine can take: the common work of
// every transport of Attend messages once it has the message's header.
//
// An attend message names only its step, so its sizes follow from the step's model: the model of
// the last unanswered BeginStep with this id, else the model of the open step in the engine's list.
// A message whose step is neither goes to the engine without tensors; the engine knows why the step
// is gone. The transport places the tensors, except for tensors in a shared-memory region:
// AttendMessage::PointInto checks and sets their addresses.
//
// Ownership: opens the engine's stream; the transport closes it. Every function returns OK, or the
// status to answer with. An attend allocates nothing. A BeginStep of a sparse model allocates the
// positions of its rows, for the checks of lists.
//
// Threading: the Prepare methods from one thread at a time, Release from any thread.
#ifndef MLA_SERVER_ATTEND_ATTEND_REQUEST_BUILDER_H_
#define MLA_SERVER_ATTEND_ATTEND_REQUEST_BUILDER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "mla/v1/attention.pb.h"
#include "proto/wire/thread_team.h"
#include "scheduler/engine.h"
#include "server/attend/attend_message.h"
#include "server/index_lists/list_checker.h"
#include "server/memory/shared_region.h"

namespace mla::server {

class AttendRequestBuilder final {
 public:
  // `engine` and `team` must outlive it; the threads of `team` copy and check large index lists.
  // `team` may be null. The constructor waits for the engine role.
  // `tracer` must outlive it too and may be null; `trace` is the parent of steps that name none.
  AttendRequestBuilder(scheduler::Engine* engine, std::string tenant, wire::ThreadTeam* team,
                       Tracer* tracer = nullptr, const TraceContext& trace = {});

  const std::string& tenant() const { return tenant_; }
  scheduler::StreamId stream() const { return stream_; }

  // Submits a prepared message to the engine as a request of the tenant. If this returns an error,
  // the engine has not taken the message and the error is its answer.
  absl::Status Submit(AttendMessage* message);

  // Prepares begin_step, end_step and abort_step. INVALID_ARGUMENT for any other body.
  absl::Status Prepare(const v1::AttendStreamRequest& header, AttendMessage* message) {
    return Prepare(header, 0, nullptr, message);
  }
  // Returns true for a begin_step with rotations and an end_step with tails.
  static bool HasPayload(const v1::AttendStreamRequest& header) {
    return header.begin_step().rotations() || header.end_step().tails_size() > 0;
  }
  // Prepares such a message, whose payload has `bytes`; `read` copies bytes from `offset` on.
  // INVALID_ARGUMENT if their number differs from the number that the step's model asks for, or a
  // rotation is not finite.
  using ReadPayload = std::function<void(size_t offset, std::span<std::byte> to)>;
  absl::Status Prepare(const v1::AttendStreamRequest& header, size_t bytes, const ReadPayload& read,
                       AttendMessage* message);
  // Does what PreparePayload does, for a payload in `region`, at header.shared's in_offset.
  absl::Status PreparePayloadIn(const SharedRegion& region, const v1::AttendStreamRequest& header,
                                AttendMessage* message);
  // Fills arguments and sizes; the tensors' addresses stay null. Sizes as ParseAttend. For a step
  // that is neither open nor about to be, all sizes stay 0 and AttendMessage::IsSized returns
  // false.
  absl::Status PrepareAttend(const v1::Attend& attend, int64_t payload_bytes, int64_t reply_bytes,
                             AttendMessage* message);
  // Sets the message's region to the one that `where` names. Such a message must not have a
  // payload. NOT_FOUND if the tenant does not have such a region. `regions` is null if the
  // shared-memory path is off.
  absl::Status FindRegion(const SharedRegionTable* regions, const v1::SharedTensors& where,
                          size_t payload_bytes, AttendMessage* message) const;
  // Checks the index lists of a prepared attend, which lie in `memory` at the places that SentLists
  // gives, and points the attend at them.
  absl::Status CheckLists(std::byte* memory, AttendMessage* message);
  // Handles tensors in a region that the engine cannot use in place: takes staging memory for index
  // lists, which it checks, and for 8-bit tensors, which it decodes. `stalled`: see
  // AttendMessagePool::TakeStaging.
  absl::Status StageShared(AttendMessagePool* pool, AttendMessage* message, bool* stalled);
  // Releases what the builder holds for an answered message: its entry among the unanswered
  // BeginSteps, and tails that the engine did not keep. The client can use their room at once. Call
  // it for every message before its answer is sent.
  void Release(AttendMessage* message);
  // Records the spans of a message that is traced. Call it when the message's reply is written.
  void NoteWritten(const AttendMessage& message) {
    if (message.trace.on()) {
      traces_.Written(message, message.trace, message.answer, SteadyNanos());
    }
  }

 private:
  // A BeginStep that has not been answered yet. A client may send the step's rows without waiting
  // for the answer.
  struct PendingBegin {
    scheduler::StepId id = 0;
    uint64_t order = 0;  // AttendMessage::begin_order
    scheduler::StepShape shape;
  };

  absl::Status PrepareEnd(const v1::EndStep& end, size_t bytes, const ReadPayload& read,
                          AttendMessage* message);
  absl::Status TakeTails(size_t bytes, const ReadPayload& read, AttendMessage* message);
  absl::Status PrepareBegin(const v1::BeginStep& begin, size_t bytes, const ReadPayload& read,
                            AttendMessage* message);
  absl::Status TakeRotations(const scheduler::StepShape& shape, size_t bytes,
                             const ReadPayload& read, AttendMessage* message);
  bool FindShape(scheduler::StepId id, scheduler::StepShape* shape);
  void Trace(AttendMessage* message) const;

  scheduler::Engine* const engine_;
  const std::string tenant_;
  const scheduler::TenantRef row_;  // empty if the table had no room for a row
  std::shared_ptr<const scheduler::StreamSteps> steps_;
  const scheduler::StreamId stream_;

  // Size of begins_; the engine lists all other open steps.
  std::atomic<int32_t> begins_pending_{0};
  wire::ThreadTeam* const team_;
  ListChecker list_checker_;  // used by Prepare*
  StepTraces traces_;
  Mutex mutex_;
  std::vector<PendingBegin> begins_ ABSL_GUARDED_BY(mutex_);  // by order
  uint64_t last_begin_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_ATTEND_REQUEST_BUILDER_H_
