// From a message of the stepping protocol to a request that the engine can take: what every
// transport of Attend messages does alike, once it has the message's header.
//
// Remembers the shapes of the steps that were begun on its stream, because an attend message names
// only the step; so sizes are known, and checked, before the engine sees anything. Where the
// tensors lie is the transport's business, except for tensors in a shared-memory region, which
// PointInto checks and points to.
//
// The bound on an end_step's reply is noted in the message, for transports with fixed slots.
//
// Every function: OK, or the status to answer with; the message's fault then says the same.
// Allocates nothing for an attend, and nothing for the others once its table has grown.
//
// Threading: Prepare* from one thread at a time, Answered from any.
#ifndef MLA_SERVER_ATTEND_PREPARER_H_
#define MLA_SERVER_ATTEND_PREPARER_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "mla/v1/attention.pb.h"
#include "scheduler/engine.h"
#include "server/attend_message.h"
#include "server/shared_region.h"

namespace mla::server {

class AttendPreparer final {
 public:
  // `engine` outlives it.
  AttendPreparer(scheduler::Engine* engine, std::string tenant)
      : engine_(engine), tenant_(std::move(tenant)) {}

  const std::string& tenant() const { return tenant_; }

  // begin_step, end_step and abort_step. INVALID_ARGUMENT for any other body.
  absl::Status Prepare(const v1::AttendStreamRequest& header, AttendMessage* message);
  // Fills arguments and sizes; the tensors' addresses stay null. Sizes as ParseAttend.
  absl::Status PrepareAttend(const v1::Attend& attend, int64_t payload_bytes, int64_t reply_bytes,
                             AttendMessage* message);
  // Points a prepared attend at its tensors in `region`, which must stay mapped until it is
  // answered. INVALID_ARGUMENT when a place is unaligned or outside the arena. `prefix` stands
  // before the field's name in the fault.
  static absl::Status PointInto(const SharedRegion& region, uint64_t in_offset, uint64_t out_offset,
                                const char* prefix, AttendMessage* message);
  // Bytes that the tensors of a prepared attend take in shared memory.
  static uint64_t SharedInBytes(const AttendSizes& sizes);
  static uint64_t SharedOutBytes(const AttendSizes& sizes);

  // To be told of every answered message: forgets steps that are over.
  void Answered(const AttendMessage& message);

 private:
  struct StepShape {
    std::shared_ptr<const scheduler::ModelSpec> model;
    int32_t rows = 0;
    int32_t sequences = 0;
    uint64_t order = 0;  // of its BeginStep
  };

  absl::Status PrepareEnd(const v1::EndStep& end, AttendMessage* message);
  absl::Status PrepareBegin(const v1::BeginStep& begin, AttendMessage* message);
  bool Remember(scheduler::StepId id, StepShape shape);

  scheduler::Engine* const engine_;
  const std::string tenant_;
  std::mutex mutex_;
  absl::flat_hash_map<scheduler::StepId, StepShape> steps_;
  uint64_t steps_begun_ = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_ATTEND_PREPARER_H_
