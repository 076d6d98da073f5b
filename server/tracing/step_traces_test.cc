#include "server/tracing/step_traces.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla::server {
namespace {

using scheduler::RequestKind;

constexpr char kParent[] = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

class Request final : public scheduler::StreamRequest {
 public:
  void Done(const absl::Status&) override {}
};

class ListExporter final : public SpanExporter {
 public:
  explicit ListExporter(std::vector<TraceSpan>* into) : into_(into) {}
  absl::Status Export(const std::vector<TraceSpan>& spans) override {
    into_->insert(into_->end(), spans.begin(), spans.end());
    return absl::OkStatus();
  }

 private:
  std::vector<TraceSpan>* const into_;
};

class StepTracesTest : public ::testing::Test {
 protected:
  StepTracesTest() {
    std::vector<std::unique_ptr<SpanExporter>> exporters;
    exporters.push_back(std::make_unique<ListExporter>(&spans_));
    tracer_ = std::make_unique<Tracer>(
        TracerOptions{.traces_per_s = 1000000, .tenant_traces_per_s = 1000000},
        std::move(exporters));
  }

  // All spans, after the tracer has ended.
  const std::vector<TraceSpan>& Spans() {
    tracer_.reset();
    return spans_;
  }
  const TraceSpan* Named(const std::string& name) {
    for (const TraceSpan& span : Spans()) {
      if (name == span.name) return &span;
    }
    return nullptr;
  }

  static void Answer(StepTraces& traces, RequestKind kind, const MessageTrace& trace,
                     const absl::Status& answer = absl::OkStatus(), bool aborted = false) {
    Request request;
    request.kind = kind;
    request.step_id = 7;
    request.step_aborted = aborted;
    request.attend.layer = 3;
    request.attend.row_count = 32;
    request.attend.num_heads = 16;
    request.timings.queue_ns = 100;
    request.timings.plan_ns = 20;
    request.timings.kernel_ns = 300;
    request.timings.launch_requests = 2;
    traces.Written(request, trace, answer, 1000);
  }

  std::vector<TraceSpan> spans_;
  std::unique_ptr<Tracer> tracer_;
};

TEST_F(StepTracesTest, AnAttendIsShownInItsParts) {
  StepTraces traces(tracer_.get(), "tenant", {});
  const TraceContext step = traces.Begin(7, kParent, 10, "model");
  ASSERT_TRUE(step.valid());
  EXPECT_EQ(traces.Find(7), step);
  EXPECT_FALSE(traces.Find(8).valid());
  Answer(traces, RequestKind::kAttend, {step, 200, 250, 900});
  Answer(traces, RequestKind::kEndStep, {step, 950, 960, 990});
  EXPECT_FALSE(traces.Find(7).valid());
  const TraceSpan& whole = *Named("step");
  const TraceSpan& attend = *Named("attend");
  const TraceSpan& launch = *Named("launch");
  EXPECT_EQ(TraceIdText(whole.trace), "4bf92f3577b34da6a3ce929d0e0e4736");
  EXPECT_EQ(whole.parent, 0x00f067aa0ba902b7u);
  EXPECT_EQ(whole.end_ns - whole.begin_ns, 990);
  EXPECT_EQ(whole.model, "model");
  EXPECT_EQ(whole.tenant, "tenant");
  EXPECT_EQ(attend.parent, whole.id);
  EXPECT_EQ(attend.end_ns - attend.begin_ns, 800);
  EXPECT_EQ(attend.layer, 3);
  EXPECT_EQ(attend.rows, 32);
  EXPECT_EQ(attend.heads, 16);
  EXPECT_EQ(attend.step, "7");
  EXPECT_EQ(Named("receive")->end_ns - Named("receive")->begin_ns, 50);
  EXPECT_EQ(Named("queue")->end_ns - Named("queue")->begin_ns, 100);
  EXPECT_EQ(launch.parent, attend.id);
  EXPECT_EQ(launch.begin_ns - attend.begin_ns, 150);
  EXPECT_EQ(launch.end_ns - attend.begin_ns, 700);
  EXPECT_EQ(launch.launch_requests, 2);
  EXPECT_EQ(Named("plan")->parent, launch.id);
  EXPECT_EQ(Named("kernel")->begin_ns - launch.begin_ns, 20);
  EXPECT_EQ(Named("kernel")->end_ns - Named("kernel")->begin_ns, 300);
  EXPECT_EQ(Named("reply")->end_ns - Named("reply")->begin_ns, 100);
  EXPECT_EQ(Named("end_step")->parent, whole.id);
}

TEST_F(StepTracesTest, ARefusedAttendHasNoLaunch) {
  StepTraces traces(tracer_.get(), "tenant", {});
  const TraceContext step = traces.Begin(7, kParent, 10, "model");
  Answer(traces, RequestKind::kAttend, {step, 200, 0, 900},
         RefuseField("attend.layer", "9", "0..3"));
  EXPECT_EQ(Named("attend")->error, "out_of_range");
  EXPECT_EQ(Named("launch"), nullptr);
  EXPECT_EQ(Named("step"), nullptr);  // the step is open
}

TEST_F(StepTracesTest, AStepThatIsAbortedEndsWithTheReason) {
  StepTraces traces(tracer_.get(), "tenant", {});
  const TraceContext step = traces.Begin(7, kParent, 10, "model");
  Answer(traces, RequestKind::kAttend, {step, 200, 250, 900},
         MakeError(absl::StatusCode::kAborted, "lost", {.reason = "participant_lost"}), true);
  EXPECT_FALSE(traces.Find(7).valid());
  EXPECT_EQ(Named("step")->error, "participant_lost");
}

TEST_F(StepTracesTest, TheStreamsContextIsTheParentOfStepsThatNameNone) {
  StepTraces traces(tracer_.get(), "tenant", {{5, 6}, 9, true});
  EXPECT_EQ(traces.Begin(1, "", 0, "m").trace, (TraceId{5, 6}));
  EXPECT_EQ(traces.Begin(2, "not a header", 0, "m").trace, (TraceId{5, 6}));
  EXPECT_EQ(TraceIdText(traces.Begin(3, kParent, 0, "m").trace).substr(0, 8), "4bf92f35");
}

TEST_F(StepTracesTest, OpenTracesAreBounded) {
  StepTraces traces(tracer_.get(), "tenant", {});
  size_t begun = 0;
  for (scheduler::StepId id = 0; id < 2 * StepTraces::kMaxOpen; ++id) {
    begun += traces.Begin(id, kParent, 0, "m").valid() ? 1 : 0;
    traces.Begin(id, kParent, 0, "m");  // an id that is used again takes no second place
    EXPECT_EQ(traces.Find(id).valid(), id < StepTraces::kMaxOpen) << id;
  }
  EXPECT_EQ(begun, StepTraces::kMaxOpen);
}

TEST_F(StepTracesTest, WithoutATracerNothingHappens) {
  StepTraces traces(nullptr, "tenant", {{5, 6}, 9, true});
  EXPECT_FALSE(traces.Begin(7, kParent, 10, "model").valid());
  Answer(traces, RequestKind::kAttend, {});
  EXPECT_TRUE(Spans().empty());
}

}  // namespace
}  // namespace mla::server
