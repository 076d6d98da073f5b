#include "server/tracing/tracer.h"

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace mla::server {
namespace {

// Spans that an exporter got, and when it lets the tracer's thread go on.
struct Sink {
  Mutex mutex;
  CondVar changed;
  std::vector<TraceSpan> spans ABSL_GUARDED_BY(mutex);
  bool fails ABSL_GUARDED_BY(mutex) = false;
  bool holds ABSL_GUARDED_BY(mutex) = false;
  int calls ABSL_GUARDED_BY(mutex) = 0;
};

class SinkExporter final : public SpanExporter {
 public:
  explicit SinkExporter(Sink* sink) : sink_(sink) {}
  absl::Status Export(const std::vector<TraceSpan>& spans) override {
    MutexLock lock(sink_->mutex);
    ++sink_->calls;
    sink_->changed.NotifyAll();
    sink_->changed.Wait(
        lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink_->mutex) { return !sink_->holds; });
    if (sink_->fails) return absl::UnavailableError("away");
    sink_->spans.insert(sink_->spans.end(), spans.begin(), spans.end());
    return absl::OkStatus();
  }

 private:
  Sink* const sink_;
};

std::unique_ptr<Tracer> MakeTracer(TracerOptions options, Sink* sink) {
  std::vector<std::unique_ptr<SpanExporter>> exporters;
  exporters.push_back(std::make_unique<SinkExporter>(sink));
  return std::make_unique<Tracer>(options, std::move(exporters));
}

constexpr TraceContext kCaller{{1, 2}, 3, true};

TEST(TracerTest, WithoutAnExporterNothingIsRecorded) {
  Tracer tracer;
  EXPECT_FALSE(tracer.on());
  EXPECT_FALSE(tracer.Sample(kCaller, "t").valid());
}

int64_t clock_is_set_by = 0;

TEST(TracerTest, SpansHaveTheTimeOfTheClockAsItIsSetNow) {
  constexpr int64_t kHour = int64_t{3600} * 1000000000;
  Sink sink;
  auto tracer = MakeTracer({.unix_nanos = [] { return UnixNanos() + clock_is_set_by; }}, &sink);
  TraceSpan span;
  span.begin_ns = Tracer::Now();
  span.end_ns = span.begin_ns + 5;
  tracer->Record({span, span});
  for (const int64_t set_by : {-kHour, kHour}) {
    clock_is_set_by = set_by;
    tracer->Record({span});
  }
  tracer.reset();
  const MutexLock lock(sink.mutex);
  ASSERT_EQ(sink.spans.size(), 4u);
  EXPECT_EQ(sink.spans[0].begin_ns, sink.spans[1].begin_ns);
  const auto later = [&](size_t i) ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink.mutex) {
    EXPECT_EQ(sink.spans[i].end_ns - sink.spans[i].begin_ns, 5);
    return static_cast<double>(sink.spans[i].begin_ns - sink.spans[0].begin_ns);
  };
  EXPECT_NEAR(later(2), -kHour, kHour / 60);
  EXPECT_NEAR(later(3), kHour, kHour / 60);
}

TEST(TracerTest, FollowsTheCaller) {
  Sink sink;
  const auto tracer = MakeTracer({}, &sink);
  const TraceContext context = tracer->Sample(kCaller, "t");
  EXPECT_EQ(context.trace, kCaller.trace);
  EXPECT_TRUE(context.sampled);
  EXPECT_NE(context.span, kCaller.span);
  EXPECT_NE(context.span, 0u);
  EXPECT_FALSE(tracer->Sample({{1, 2}, 3, false}, "t").valid());
  EXPECT_FALSE(tracer->Sample({}, "t").valid());  // sample_every is 0
}

TEST(TracerTest, SamplesOneOfMany) {
  Sink sink;
  const auto tracer = MakeTracer({.sample_every = 10, .tenant_traces_per_s = 1000}, &sink);
  std::set<uint64_t> traces;
  for (int i = 0; i < 100; ++i) {
    const TraceContext context = tracer->Sample({}, "t");
    if (context.valid()) traces.insert(context.trace.low);
    // A caller who has decided against it is not asked for again.
    EXPECT_FALSE(tracer->Sample({{1, 2}, 3, false}, "t").valid());
  }
  EXPECT_EQ(traces.size(), 10u);
}

TEST(TracerTest, NoTenantCrowdsOutAnother) {
  Sink sink;
  const auto tracer = MakeTracer({.traces_per_s = 1000000, .tenant_traces_per_s = 0}, &sink);
  EXPECT_FALSE(tracer->Sample(kCaller, "greedy").valid());
  EXPECT_EQ(tracer->stats().refused, 1u);
  const auto shared = MakeTracer({.traces_per_s = 0, .tenant_traces_per_s = 50}, &sink);
  EXPECT_FALSE(shared->Sample(kCaller, "one").valid());
  // A tenant is held to its own bound while others are served. At most two seconds can begin here.
  const auto both = MakeTracer({.traces_per_s = 1000000, .tenant_traces_per_s = 50}, &sink);
  int greedy = 0, other = 0;
  for (int i = 0; i < 1000; ++i) greedy += both->Sample(kCaller, "greedy").valid() ? 1 : 0;
  for (int i = 0; i < 10; ++i) other += both->Sample(kCaller, "other").valid() ? 1 : 0;
  EXPECT_LT(greedy, 1000);
  EXPECT_EQ(other, 10);
}

TEST(TracerTest, SpansArriveInUnixTimeBeforeItEnds) {
  Sink sink;
  TraceSpan span;
  span.trace = {1, 2};
  span.name = "step";
  span.begin_ns = 5;
  span.end_ns = 9;
  {
    const auto tracer = MakeTracer({}, &sink);
    tracer->Record({span, span});
  }
  const MutexLock lock(sink.mutex);
  ASSERT_EQ(sink.spans.size(), 2u);
  EXPECT_EQ(sink.spans[0].end_ns - sink.spans[0].begin_ns, 4);
  EXPECT_GT(sink.spans[0].begin_ns, int64_t{1'700'000'000'000'000'000});  // since November 2023
}

TEST(TracerTest, AFullQueueDropsSpansAndFailuresAreCounted) {
  Sink sink;
  {
    const MutexLock lock(sink.mutex);
    sink.holds = true;
  }
  const auto tracer = MakeTracer({.queue_spans = 3}, &sink);
  tracer->Record(std::vector<TraceSpan>(1));
  {
    MutexLock lock(sink.mutex);
    sink.changed.Wait(lock,
                      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink.mutex) { return sink.calls == 1; });
  }
  tracer->Record(std::vector<TraceSpan>(3));  // waits
  tracer->Record(std::vector<TraceSpan>(1));  // one too many
  EXPECT_EQ(tracer->stats().dropped, 1u);
  MutexLock lock(sink.mutex);
  sink.fails = true;
  sink.holds = false;
  sink.changed.NotifyAll();
  sink.changed.Wait(lock,
                    [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(sink.mutex) { return sink.calls == 2; });
  EXPECT_TRUE(sink.spans.empty());
}

}  // namespace
}  // namespace mla::server
