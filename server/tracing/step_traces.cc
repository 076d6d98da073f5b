#include "server/tracing/step_traces.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;
using scheduler::StreamRequest;

const char* NameOf(RequestKind kind) {
  switch (kind) {
    case RequestKind::kBeginStep:
      return "begin_step";
    case RequestKind::kAttend:
      return "attend";
    case RequestKind::kEndStep:
      return "end_step";
    case RequestKind::kAbortStep:
      return "abort_step";
  }
  return "message";
}

}  // namespace

StepTraces::StepTraces(Tracer* tracer, std::string tenant, const TraceContext& stream)
    : tracer_(tracer), tenant_(std::move(tenant)), stream_(stream) {}

TraceContext StepTraces::Begin(scheduler::StepId id, std::string_view traceparent, int64_t now_ns,
                               const std::string& model) {
  if (tracer_ == nullptr || !tracer_->on()) return {};
  TraceContext parent = ParseTraceparent(traceparent);
  if (!parent.valid()) parent = stream_;
  const TraceContext context = tracer_->Sample(parent, tenant_);
  if (!context.valid()) return {};
  const MutexLock lock(mutex_);
  // An id that is used again: its old step is over, and this stream has not been told so yet.
  std::erase_if(open_, [id](const Open& open) { return open.id == id; });
  const bool room = open_.size() < kMaxOpen;
  if (room) open_.push_back({id, context, parent.span, now_ns, model});
  open_count_.store(open_.size(), std::memory_order_relaxed);
  return room ? context : TraceContext();
}

TraceContext StepTraces::Find(scheduler::StepId id) const {
  if (!any()) return {};
  const MutexLock lock(mutex_);
  for (const Open& open : open_) {
    if (open.id == id) return open.context;
  }
  return {};
}

void StepTraces::End(const StreamRequest& message, const absl::Status& answer, int64_t now_ns,
                     std::vector<TraceSpan>* spans) {
  const MutexLock lock(mutex_);
  const auto entry = std::find_if(open_.begin(), open_.end(), [&message](const Open& open) {
    return open.id == message.step_id;
  });
  if (entry == open_.end()) return;
  TraceSpan span;
  span.trace = entry->context.trace;
  span.id = entry->context.span;
  span.parent = entry->parent;
  span.name = "step";
  span.server = true;
  span.begin_ns = entry->begin_ns;
  span.end_ns = now_ns;
  span.tenant = tenant_;
  span.model = entry->model;
  span.step = absl::StrCat(message.step_id);
  span.error = SpanError(answer);
  spans->push_back(std::move(span));
  open_.erase(entry);
  open_count_.store(open_.size(), std::memory_order_relaxed);
}

void StepTraces::Written(const StreamRequest& message, const MessageTrace& trace,
                         const absl::Status& answer, int64_t now_ns) {
  if (!trace.on()) return;
  std::vector<TraceSpan> spans;
  spans.reserve(8);  // the references below stay valid
  const auto add = [&](const char* name, SpanId parent, int64_t begin, int64_t end) -> TraceSpan& {
    TraceSpan span;
    span.trace = trace.step.trace;
    span.id = tracer_->NewSpanId();
    span.parent = parent;
    span.name = name;
    span.begin_ns = begin;
    span.end_ns = std::max(begin, end);
    spans.push_back(std::move(span));
    return spans.back();
  };
  TraceSpan& whole = add(NameOf(message.kind), trace.step.span, trace.received_ns, now_ns);
  whole.tenant = tenant_;
  whole.step = absl::StrCat(message.step_id);
  whole.error = SpanError(answer);
  const SpanId id = whole.id;
  if (message.kind == RequestKind::kBeginStep) {
    whole.model = message.begin.model_id;
    whole.sequences = static_cast<int64_t>(message.begin.sequences.size());
    whole.rows = message.total_rows;
  }
  if (message.kind == RequestKind::kAttend) {
    const scheduler::RequestTimings& took = message.timings;
    whole.layer = message.attend.layer;
    whole.rows = message.attend.row_count;
    whole.heads = message.attend.num_heads;
    // A message that was refused before the engine took it was never submitted.
    const int64_t submitted = trace.submitted_ns != 0 ? trace.submitted_ns : trace.answered_ns;
    add("receive", id, trace.received_ns, submitted);
    if (answer.ok()) {
      const int64_t start = std::min(submitted + took.queue_ns, trace.answered_ns);
      add("queue", id, submitted, start);
      TraceSpan& launch = add("launch", id, start, trace.answered_ns);
      launch.launch_requests = took.launch_requests;
      const SpanId launch_id = launch.id;
      const int64_t planned = std::min(start + took.plan_ns, trace.answered_ns);
      add("plan", launch_id, start, planned);
      add("kernel", launch_id, planned, std::min(planned + took.kernel_ns, trace.answered_ns));
    }
    add("reply", id, trace.answered_ns, now_ns);
  }
  const bool ends =
      message.kind == RequestKind::kEndStep || message.kind == RequestKind::kAbortStep;
  const bool refused = message.kind == RequestKind::kBeginStep && !answer.ok();
  if ((ends && answer.ok()) || refused || message.step_aborted) {
    End(message, answer, now_ns, &spans);
  }
  tracer_->Record(std::move(spans));
  if (trace.submitted_ns == 0) return;  // the engine has not seen it
  const bool launched = message.kind == RequestKind::kAttend && answer.ok();
  tracer_->Observe({trace.step.trace, message.kind,
                    std::max<int64_t>(0, trace.answered_ns - trace.submitted_ns),
                    launched ? message.timings.queue_ns : -1});
}

}  // namespace mla::server
