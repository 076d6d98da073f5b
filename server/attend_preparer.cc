#include "server/attend_preparer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/ring_layout.h"
#include "server/grpc_status.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;

// Of an EndStepReply: everything around the lengths, and one length as a varint.
constexpr size_t kReplyFixedBytes = 64;
constexpr size_t kLengthBytes = 10;

absl::Status UnknownStep(uint64_t step_id, scheduler::Fault* fault) {
  fault->field = "step_id";
  fault->got = absl::StrCat(step_id);
  fault->limit = "a step that this stream has begun or joined";
  fault->reason = "step_not_found";
  return absl::NotFoundError(absl::StrCat("step_id: no open step ", step_id, " on this stream"));
}

// Two tensors one after the other, the second aligned.
uint64_t Together(int64_t first, int64_t second) {
  const auto size = static_cast<uint64_t>(first);
  return second == 0 ? size : wire::AlignShared(size) + static_cast<uint64_t>(second);
}

absl::Status CheckPlace(const SharedRegion& region, uint64_t offset, uint64_t length,
                        const char* prefix, const char* field, scheduler::Fault* fault) {
  if (length == 0) return absl::OkStatus();
  if (offset % wire::kSharedAlignment != 0) {
    return InvalidField(fault, absl::StrCat(prefix, field),
                        absl::StrCat("a multiple of ", wire::kSharedAlignment),
                        absl::StrCat(offset), "misaligned");
  }
  if (!region.Holds(offset, length)) {
    return InvalidField(fault, absl::StrCat(prefix, field),
                        absl::StrCat("such that ", length, " bytes lie within ",
                                     region.arena_offset(), "..", region.size()),
                        absl::StrCat(offset));
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t AttendPreparer::SharedInBytes(const AttendSizes& sizes) {
  return Together(sizes.kv_bytes, sizes.q_bytes);
}

uint64_t AttendPreparer::SharedOutBytes(const AttendSizes& sizes) {
  return Together(sizes.o_bytes, sizes.lse_bytes);
}

absl::Status AttendPreparer::Prepare(const v1::AttendStreamRequest& header,
                                     AttendMessage* message) {
  switch (header.body_case()) {
    case v1::AttendStreamRequest::kBeginStep:
      return PrepareBegin(header.begin_step(), message);
    case v1::AttendStreamRequest::kEndStep:
      return PrepareEnd(header.end_step(), message);
    case v1::AttendStreamRequest::kAbortStep:
      message->kind = RequestKind::kAbortStep;
      message->step_id = header.abort_step().step_id();
      return absl::OkStatus();
    default:
      return InvalidField(&message->fault, "body", "begin_step, attend, end_step or abort_step",
                          "nothing", "missing");
  }
}

absl::Status AttendPreparer::PrepareEnd(const v1::EndStep& end, AttendMessage* message) {
  message->kind = RequestKind::kEndStep;
  message->step_id = end.step_id();
  {
    const std::lock_guard lock(mutex_);
    const auto found = steps_.find(end.step_id());
    if (found != steps_.end()) {
      message->reply_bound = kReplyFixedBytes + kLengthBytes * found->second.sequences;
    }
  }
  return ParseEndStep(end, engine_->limits(), &message->end, &message->fault);
}

absl::Status AttendPreparer::PrepareBegin(const v1::BeginStep& begin, AttendMessage* message) {
  message->kind = RequestKind::kBeginStep;
  message->step_id = begin.step_id();
  StepShape shape;
  absl::Status status =
      ParseBeginStep(begin, engine_->limits(), &message->begin, &shape.rows, &message->fault);
  if (!status.ok()) return status;
  shape.sequences = begin.sequences_size();
  shape.model = engine_->FindModel(tenant_, begin.model_id());
  if (shape.model == nullptr) {
    message->fault.field = "begin_step.model_id";
    message->fault.got = begin.model_id();
    message->fault.reason = "model_not_found";
    return absl::NotFoundError("begin_step.model_id: no such model");
  }
  // Remembered before the engine has answered: a client may send its rows without waiting.
  message->new_step = Remember(message->step_id, std::move(shape));
  return absl::OkStatus();
}

bool AttendPreparer::Remember(scheduler::StepId id, StepShape shape) {
  const std::lock_guard lock(mutex_);
  // Steps whose lease ran out are forgotten here only when something is said about them, so the
  // oldest give way once there are far more than can be open.
  if (steps_.size() >= 4 * static_cast<size_t>(engine_->limits().max_open_steps)) {
    steps_.erase(std::min_element(steps_.begin(), steps_.end(), [](const auto& a, const auto& b) {
      return a.second.order < b.second.order;
    }));
  }
  shape.order = ++steps_begun_;
  return steps_.emplace(id, std::move(shape)).second;
}

absl::Status AttendPreparer::PrepareAttend(const v1::Attend& attend, int64_t payload_bytes,
                                           int64_t reply_bytes, AttendMessage* message) {
  message->kind = RequestKind::kAttend;
  message->step_id = attend.step_id();
  StepShape shape;
  {
    const std::lock_guard lock(mutex_);
    const auto found = steps_.find(attend.step_id());
    if (found == steps_.end()) return UnknownStep(attend.step_id(), &message->fault);
    shape = found->second;
  }
  return ParseAttend(attend, *shape.model, shape.rows, payload_bytes, reply_bytes, &message->attend,
                     &message->sizes, &message->fault);
}

absl::Status AttendPreparer::PointInto(const SharedRegion& region, uint64_t in_offset,
                                       uint64_t out_offset, const char* prefix,
                                       AttendMessage* message) {
  const AttendSizes& sizes = message->sizes;
  absl::Status status =
      CheckPlace(region, in_offset, SharedInBytes(sizes), prefix, "in_offset", &message->fault);
  if (status.ok()) {
    status = CheckPlace(region, out_offset, SharedOutBytes(sizes), prefix, "out_offset",
                        &message->fault);
  }
  if (!status.ok()) return status;
  scheduler::AttendArgs& args = message->attend;
  const auto kv_end = wire::AlignShared(static_cast<uint64_t>(sizes.kv_bytes));
  const auto o_end = wire::AlignShared(static_cast<uint64_t>(sizes.o_bytes));
  if (sizes.kv_bytes > 0) args.kv = region.data() + in_offset;
  if (sizes.q_bytes > 0) args.q = region.data() + in_offset + kv_end;
  if (sizes.o_bytes > 0) args.o = region.data() + out_offset;
  if (sizes.lse_bytes > 0) {
    args.lse = reinterpret_cast<float*>(region.data() + out_offset + o_end);
  }
  return absl::OkStatus();
}

void AttendPreparer::Answered(const AttendMessage& message) {
  const bool ended = message.answer.ok() && (message.kind == RequestKind::kEndStep ||
                                             message.kind == RequestKind::kAbortStep);
  if (!ended && !message.step_aborted && !(message.new_step && !message.answer.ok())) return;
  const std::lock_guard lock(mutex_);
  steps_.erase(message.step_id);
}

}  // namespace mla::server
