#include "server/attend/attend_reply.h"

#include <algorithm>
#include <string>

#include "base/clock.h"
#include "server/grpc/grpc_status.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;

uint32_t Micros(int64_t ns) {
  return static_cast<uint32_t>(std::clamp<int64_t>(ns / 1000, 0, UINT32_MAX));
}

}  // namespace

void FillReply(const AttendMessage& message, uint64_t boot_id, v1::AttendStreamReply* reply) {
  // An attend's reply sets every field below, so a reply of that kind can be reused without
  // clearing it.
  const bool attended = message.answer.ok() && message.kind == RequestKind::kAttend;
  if (!attended || !reply->has_attend()) reply->Clear();
  reply->set_tag(message.tag);
  reply->set_boot_id(boot_id);
  if (!message.answer.ok()) {
    v1::StepError* error = reply->mutable_error();
    error->set_code(static_cast<int32_t>(message.answer.code()));
    error->set_message(std::string(message.answer.message()));
    *error->mutable_detail() = ToErrorDetail(message.answer);
    if (message.trace.on()) {
      error->mutable_detail()->set_trace_id(TraceIdText(message.trace.step.trace));
    }
    error->set_step_aborted(message.step_aborted);
    return;
  }
  switch (message.kind) {
    case RequestKind::kBeginStep: {
      v1::BeginStepReply* body = reply->mutable_begin_step();
      body->set_total_rows(static_cast<uint32_t>(message.total_rows));
      body->set_lease_ms(static_cast<uint32_t>(message.lease_ms));
      body->set_joined(static_cast<uint32_t>(message.joined));
      return;
    }
    case RequestKind::kEndStep:
      reply->mutable_end_step()->mutable_lengths()->Add(message.lengths.begin(),
                                                        message.lengths.end());
      return;
    case RequestKind::kAbortStep:
      reply->mutable_abort_step();
      return;
    case RequestKind::kAttend:
      break;
  }
  const scheduler::AttendArgs& args = message.attend;
  v1::AttendReply* body = reply->mutable_attend();
  body->set_row_begin(static_cast<uint32_t>(args.row_begin));
  body->set_row_count(static_cast<uint32_t>(args.row_count));
  body->set_head_offset(static_cast<uint32_t>(args.head_offset));
  body->set_num_heads(static_cast<uint32_t>(args.num_heads));
  body->set_layer(static_cast<uint32_t>(args.layer));
  body->set_o_dtype(args.o_dtype == kernels::DType::kBf16 ? v1::DTYPE_BF16 : v1::DTYPE_F32);
  const scheduler::RequestTimings& took = message.timings;
  v1::Timings* timings = reply->mutable_timings();
  timings->set_queue_us(Micros(took.queue_ns));
  timings->set_plan_us(Micros(took.plan_ns));
  timings->set_kernel_us(Micros(took.kernel_ns));
  timings->set_write_us(Micros(SteadyNanos() - message.answered_ns));
  timings->set_launch_requests(static_cast<uint32_t>(took.launch_requests));
  timings->set_launch_layers(static_cast<uint32_t>(took.launch_layers));
  timings->set_launch_clients(static_cast<uint32_t>(took.launch_clients));
  timings->set_plan_reused(took.plan_reused);
}

}  // namespace mla::server
