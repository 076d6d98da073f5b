#include "server/attend/attend_request_builder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"
#include "proto/wire/attend_layout.h"
#include "server/grpc/grpc_status.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;

absl::Status CheckRotations(std::span<const float> rotations) {
  constexpr float kMost = 1024.0f;  // a rotation has 1, scaled by a model's attention factor
  for (size_t i = 0; i < rotations.size(); ++i) {
    if (std::abs(rotations[i]) <= kMost) continue;
    return RefuseField(absl::StrCat("begin_step.rotations[", i, "]"), absl::StrCat(rotations[i]),
                       absl::StrCat("finite, of magnitude ", kMost, " at most"), "not_finite");
  }
  return absl::OkStatus();
}

scheduler::TenantRef RowOf(const scheduler::Engine& engine, const std::string& tenant) {
  absl::StatusOr<scheduler::TenantRef> row = engine.tenants()->Enter(tenant);
  return row.ok() ? *std::move(row) : scheduler::TenantRef();
}

}  // namespace

AttendRequestBuilder::AttendRequestBuilder(scheduler::Engine* engine, std::string tenant,
                                           wire::ThreadTeam* team, Tracer* tracer,
                                           const TraceContext& trace)
    : engine_(engine),
      tenant_(std::move(tenant)),
      row_(RowOf(*engine, tenant_)),
      stream_(engine->OpenStream(tenant_, &steps_)),
      team_(team),
      list_checker_(team),
      traces_(tracer, tenant_, trace) {}

// Notes the arrival of a message of a recorded step.
void AttendRequestBuilder::Trace(AttendMessage* message) const {
  if (!traces_.any()) return;  // a message comes from the pool without a trace
  message->trace.step = traces_.Find(message->step_id);
  if (message->trace.on()) message->trace.received_ns = SteadyNanos();
}

absl::Status AttendRequestBuilder::Submit(AttendMessage* message) {
  // A message that the engine handed back is submitted again; its time in the queue began before.
  if (message->trace.on() && message->trace.submitted_ns == 0) {
    message->trace.submitted_ns = SteadyNanos();
  }
  message->tenant = row_.get();
  return engine_->Submit(message);
}

absl::Status AttendRequestBuilder::Prepare(const v1::AttendStreamRequest& header, size_t bytes,
                                           const ReadPayload& read, AttendMessage* message) {
  switch (header.body_case()) {
    case v1::AttendStreamRequest::kBeginStep:
      return PrepareBegin(header.begin_step(), bytes, read, message);
    case v1::AttendStreamRequest::kEndStep:
      return PrepareEnd(header.end_step(), bytes, read, message);
    case v1::AttendStreamRequest::kAbortStep:
      message->kind = RequestKind::kAbortStep;
      message->step_id = header.abort_step().step_id();
      Trace(message);
      return absl::OkStatus();
    default:
      return RefuseField("body", "nothing", "begin_step, attend, end_step or abort_step",
                         "missing");
  }
}

absl::Status AttendRequestBuilder::PrepareEnd(const v1::EndStep& end, size_t bytes,
                                              const ReadPayload& read, AttendMessage* message) {
  message->kind = RequestKind::kEndStep;
  message->step_id = end.step_id();
  Trace(message);
  absl::Status status = ParseEndStep(end, engine_->limits(), &message->end);
  if (!status.ok() || message->end.tails.empty()) return status;
  return TakeTails(bytes, read, message);
}

absl::Status AttendRequestBuilder::TakeTails(size_t bytes, const ReadPayload& read,
                                             AttendMessage* message) {
  scheduler::StepShape shape;
  if (!FindShape(message->step_id, &shape)) return absl::OkStatus();  // the engine knows why
  const auto size = static_cast<size_t>(shape.model->tail_bytes);
  const size_t want = size * message->end.tails.size();
  if (size == 0) {
    return RefuseField("end_step.tails", absl::StrCat(message->end.tails.size(), " tails"),
                       "none: the model was registered without tail_bytes", "no_tails_here");
  }
  if (bytes != want) {
    return RefuseField("end_step.tails", absl::StrCat(bytes, " bytes"),
                       absl::StrCat(want, " bytes: ", size, " a tail"), "payload_size");
  }
  if (!row_)
    return RefuseField("tenant", "one more", "fewer tenants", "tenants_exhausted",
                       absl::StatusCode::kResourceExhausted);
  size_t offset = 0;
  for (scheduler::TailArgs& args : message->end.tails) {
    MLA_ASSIGN_OR_RETURN(const auto tail,
                         engine_->MakeTail(row_, shape.model->tail_bytes, "end_step.tails"));
    read(offset, {tail->data.get(), size});
    offset += size;
    args.tail = tail;
  }
  return absl::OkStatus();
}

absl::Status AttendRequestBuilder::PreparePayloadIn(const SharedRegion& region,
                                                    const v1::AttendStreamRequest& header,
                                                    AttendMessage* message) {
  const v1::SharedTensors& where = header.shared();
  const uint64_t begin = where.in_offset(), bytes = where.in_length();
  if (where.out_length() != 0) {
    return RefuseField("shared.out_length", absl::StrCat(where.out_length()), "0 bytes",
                       "payload_size");
  }
  MLA_RETURN_IF_ERROR(TensorMemory::Of(region).Check(begin, bytes, "shared.", "in_offset"));
  return Prepare(
      header, bytes,
      [from = region.data() + begin](size_t offset, std::span<std::byte> to) {
        std::memcpy(to.data(), from + offset, to.size());
      },
      message);
}

absl::Status AttendRequestBuilder::TakeRotations(const scheduler::StepShape& shape, size_t bytes,
                                                 const ReadPayload& read, AttendMessage* message) {
  if (!shape.model->projected.present()) {
    return RefuseField("begin_step.rotations", "true",
                       "false: the worker rotates the queries of the model (rope_owner)",
                       "no_rotations_here");
  }
  const int64_t want =
      int64_t{shape.rows} * shape.model->geometry.rope_dim * int64_t{sizeof(float)};
  if (static_cast<int64_t>(bytes) != want) {
    return RefuseField("begin_step.rotations", absl::StrCat(bytes, " bytes"),
                       absl::StrCat(want, " bytes: fp32 [rows of the step, rope_dim]"),
                       "payload_size");
  }
  if (want == 0) return absl::OkStatus();
  if (!row_)
    return RefuseField("tenant", "one more", "fewer tenants", "tenants_exhausted",
                       absl::StatusCode::kResourceExhausted);
  MLA_ASSIGN_OR_RETURN(auto rotations, engine_->MakeTail(row_, want, "begin_step.rotations"));
  const std::span<std::byte> target(rotations->data.get(), bytes);
  read(0, target);
  message->begin.rotations = std::move(rotations);
  return CheckRotations({reinterpret_cast<const float*>(target.data()), bytes / sizeof(float)});
}

absl::Status AttendRequestBuilder::PrepareBegin(const v1::BeginStep& begin, size_t bytes,
                                                const ReadPayload& read, AttendMessage* message) {
  message->kind = RequestKind::kBeginStep;
  message->step_id = begin.step_id();
  const int64_t now = SteadyNanos();
  message->trace.step = traces_.Begin(message->step_id, begin.traceparent(), now, begin.model_id());
  message->trace.received_ns = now;
  scheduler::StepShape shape;
  MLA_RETURN_IF_ERROR(ParseBeginStep(begin, engine_->limits(), &message->begin, &shape.rows));
  shape.model = engine_->FindModel(tenant_, begin.model_id());
  if (shape.model == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, "begin_step.model_id: no such model",
                     {.field = "begin_step.model_id",
                      .got = begin.model_id(),
                      .limit = "a registered model of this tenant",
                      .reason = "model_not_found"});
  }
  if (shape.model->attention != kernels::AttentionKind::kDense) {
    shape.positions =
        std::make_shared<const std::vector<scheduler::StepSequenceArgs>>(message->begin.sequences);
    message->begin.positions = shape.positions;
  }
  if (begin.rotations()) {
    MLA_RETURN_IF_ERROR(TakeRotations(shape, bytes, read, message));
  }
  const MutexLock lock(mutex_);
  message->begin_order = ++last_begin_;
  begins_.push_back({message->step_id, message->begin_order, std::move(shape)});
  begins_pending_.fetch_add(1, std::memory_order_release);
  return absl::OkStatus();
}

bool AttendRequestBuilder::FindShape(scheduler::StepId id, scheduler::StepShape* shape) {
  // The engine lists a step before it answers the BeginStep, so a step that is not in begins_ is
  // listed by the engine.
  if (begins_pending_.load(std::memory_order_acquire) > 0) {
    const MutexLock lock(mutex_);
    const auto last = std::find_if(begins_.rbegin(), begins_.rend(),
                                   [id](const PendingBegin& begin) { return begin.id == id; });
    if (last != begins_.rend()) {
      *shape = last->shape;
      return true;
    }
  }
  return steps_->Find(id, shape);
}

absl::Status AttendRequestBuilder::PrepareAttend(const v1::Attend& attend, int64_t payload_bytes,
                                                 int64_t reply_bytes, AttendMessage* message) {
  message->kind = RequestKind::kAttend;
  message->step_id = attend.step_id();
  Trace(message);
  scheduler::StepShape shape;
  // This error is for a step whose BeginStep was prepared for a dense model, before another model
  // of that name replaced it. Such a step has no positions, so tensors cannot be sized.
  const auto no_positions = [&shape] {
    return shape.model->attention != kernels::AttentionKind::kDense && shape.positions == nullptr;
  };
  if (!FindShape(attend.step_id(), &shape) || no_positions()) {
    message->attend = {};
    message->attend.sized_for.num_heads = scheduler::AttendArgs::kUnsized;
    message->sizes = {};
    return absl::OkStatus();
  }
  absl::Status status = ParseAttend(attend, *shape.model, shape.rows, payload_bytes, reply_bytes,
                                    &message->attend, &message->sizes, shape.positions);
  if (message->sizes.list_bytes > 0 || shape.model->windowed()) {
    message->attend.listed_for = std::move(shape.positions);
  }
  return status;
}

absl::Status AttendRequestBuilder::FindRegion(const SharedRegionTable* regions,
                                              const v1::SharedTensors& where, size_t payload_bytes,
                                              AttendMessage* message) const {
  if (payload_bytes != 0) {
    return RefuseField("payload", absl::StrCat(payload_bytes, " bytes"),
                       "empty together with shared", "payload_size");
  }
  if (regions != nullptr) message->region = regions->Find(tenant_, where.handle());
  if (message->region != nullptr) return absl::OkStatus();
  // Same text for unknown, foreign and closed handles: callers must not be able to tell them apart.
  return MakeError(absl::StatusCode::kNotFound, "shared.handle: no such region",
                   {.field = "shared.handle",
                    .got = "another handle",
                    .limit = "the handle of a region whose connection stands",
                    .reason = "region_not_found"});
}

absl::Status AttendRequestBuilder::CheckLists(std::byte* memory, AttendMessage* message) {
  const SentLists sent = message->Lists();
  auto* const begins = reinterpret_cast<int32_t*>(memory);
  if (message->sizes.selects) {
    PlaceSelectedLists(sent, *message->attend.listed_for, begins);
    message->attend.list_begin = begins;
    return absl::OkStatus();
  }
  absl::Status status = list_checker_.Check(sent, *message->attend.listed_for, begins);
  message->attend.list_begin = begins;
  message->attend.list = begins + sent.rows + 1;
  return status;
}

absl::Status AttendRequestBuilder::StageShared(AttendMessagePool* pool, AttendMessage* message,
                                               bool* stalled) {
  const AttendSizes& sizes = message->sizes;
  const bool kv_fp8 = sizes.kv_fp8.vectors > 0, q_fp8 = sizes.q_fp8.vectors > 0;
  if (sizes.list_bytes == 0 && !kv_fp8 && !q_fp8) return absl::OkStatus();
  message->tenant = row_.get();
  *stalled = message->tenant == nullptr;
  if (*stalled) return absl::OkStatus();
  const SentLists sent = message->Lists();
  // Only these tensors need memory of the server.
  const wire::AttendLayout staged({.kv = kv_fp8 ? static_cast<uint64_t>(sizes.kv_bytes) : 0,
                                   .q = q_fp8 ? static_cast<uint64_t>(sizes.q_bytes) : 0,
                                   .lists = sizes.list_bytes > 0 ? sent.bytes() : 0});
  absl::Status status = pool->TakeStaging(staged.inputs.bytes(), 0, message, stalled);
  if (!status.ok() || *stalled) return status;
  std::byte* const memory = message->input.data();
  std::byte* const lists_at = memory + staged.lists;
  if (kv_fp8) status = message->DecodeKv(message->attend.kv, memory);
  if (q_fp8 && status.ok()) status = message->DecodeQueries(message->attend.q, memory + staged.q);
  if (!status.ok() || sizes.list_bytes == 0) return status;
  if (message->sizes.selects) {
    // Not copied: even if the client changes these inputs later, the indexer chooses only positions
    // that the row may see.
    message->attend.index_inputs = message->sent_lists;
    return CheckLists(lists_at, message);
  }
  const std::span<const std::byte> lists(message->sent_lists,
                                         static_cast<size_t>(message->sizes.list_bytes));
  if (team_ != nullptr) {
    team_->Copy(lists, lists_at + sent.offset());
  } else {
    std::memcpy(lists_at + sent.offset(), lists.data(), lists.size());
  }
  return CheckLists(lists_at, message);
}

void AttendRequestBuilder::Release(AttendMessage* message) {
  message->end.tails.clear();        // refused, or replaced by others
  message->begin.rotations.reset();  // the step has them
  if (message->trace.on()) message->trace.answered_ns = SteadyNanos();
  if (message->begin_order == 0) return;
  const MutexLock lock(mutex_);
  const auto begin = std::find_if(
      begins_.begin(), begins_.end(),
      [message](const PendingBegin& pending) { return pending.order == message->begin_order; });
  begins_.erase(begin);
  begins_pending_.fetch_sub(1, std::memory_order_release);
}

}  // namespace mla::server
