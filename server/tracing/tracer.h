// Spans of calls and steps: which are recorded, and the queue between their threads and the thread
// that exports them.
//
// A trace is recorded if the caller's `traceparent` says so, or if it is one of the server's own
// sample (TracerOptions::sample_every). A tenant begins at most `tenant_traces_per_s` recorded
// steps and calls a second, all tenants together `traces_per_s`; the others are served unrecorded.
// A full queue drops spans. So no caller can slow the server down, and none can crowd out another
// tenant.
//
// Times of spans are taken from the steady clock and turned into Unix time with an offset that is
// read once, so that the spans of a step keep their order when the wall clock is set.
//
// Threading: all methods from any thread. Without an exporter nothing is ever recorded, and Sample
// is one comparison. Sample takes a lock only for what may be recorded; Record takes it for each
// group of spans.
#ifndef MLA_SERVER_TRACING_TRACER_H_
#define MLA_SERVER_TRACING_TRACER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "scheduler/request.h"
#include "server/tracing/trace_context.h"

namespace mla::server {

// A part of one trace, from a begin to an end. Times are nanoseconds of the steady clock until
// Record has turned them into Unix time.
struct TraceSpan {
  TraceId trace;
  SpanId id = 0;
  SpanId parent = 0;
  const char* name = "";  // a literal, or the name of a method, which outlives the tracer
  bool server = false;    // begins at a message from another process
  int64_t begin_ns = 0, end_ns = 0;
  // Attributes; empty and -1: none.
  std::string tenant, model, step;
  int64_t layer = -1, rows = -1, heads = -1, sequences = -1, launch_requests = -1;
  std::string error;  // empty: it went well
};

// Returns the failure that a span reports: the reason of the error, or its code; "" if it went
// well.
std::string SpanError(const absl::Status& status);

// Sends spans to somewhere.
class SpanExporter {
 public:
  virtual ~SpanExporter() = default;
  // Called by the tracer's thread only; may block, for a bounded time. An error loses the spans.
  virtual absl::Status Export(const std::vector<TraceSpan>& spans) = 0;
};

struct TracerOptions {
  // One of this many steps and calls without a `traceparent` is recorded; 0: none is.
  int64_t sample_every = 0;
  int64_t traces_per_s = 100;
  int64_t tenant_traces_per_s = 50;
  int64_t queue_spans = 16384;  // waiting for the exporter
  int64_t (*unix_nanos)() = UnixNanos;
};

struct TracerStats {
  uint64_t exported = 0;  // spans that an exporter has taken
  uint64_t dropped = 0;   // spans that found a full queue or whose export failed
  uint64_t refused = 0;   // steps and calls beyond the bounds a second
};

// A message of a recorded step whose reply has been written, with the engine's times for it.
struct TracedMessage {
  TraceId trace;
  scheduler::RequestKind kind = scheduler::RequestKind::kAttend;
  int64_t total_ns = 0;
  int64_t queue_ns = -1;  // -1: no launch took it
};

class Tracer {
 public:
  // Records nothing.
  Tracer() = default;
  Tracer(TracerOptions options, std::vector<std::unique_ptr<SpanExporter>> exporters);
  // Exports the spans that wait, for at most the time of one export.
  ~Tracer();

  bool on() const { return !exporters_.empty(); }
  // Returns the time of spans: nanoseconds of the steady clock.
  static int64_t Now();
  // Decides whether a step or call is recorded whose caller sent `parent`, which is invalid if the
  // caller sent none. Returns an invalid context if it is not recorded. Otherwise the context's
  // span is the id for the span of the step or call itself, whose parent is parent.span.
  TraceContext Sample(const TraceContext& parent, const std::string& tenant);
  SpanId NewSpanId() {
    const SpanId id = next_span_.fetch_add(1, std::memory_order_relaxed);
    return id != 0 ? id : NewSpanId();
  }
  // Gets each message of recorded steps, from any thread. Set it before steps are recorded.
  void set_observer(std::function<void(const TracedMessage&)> observer) {
    observer_ = std::move(observer);
  }
  void Observe(const TracedMessage& message) const {
    if (observer_) observer_(message);
  }
  // Takes finished spans of one trace.
  void Record(std::vector<TraceSpan> spans);
  TracerStats stats() const;

 private:
  void Run();
  bool WithinBounds(const std::string& tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t UnixOffset() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Export(std::vector<TraceSpan> spans);

  const TracerOptions options_;
  const std::vector<std::unique_ptr<SpanExporter>> exporters_;
  std::function<void(const TracedMessage&)> observer_;
  std::atomic<uint64_t> seen_{0};     // steps and calls without a traceparent
  std::atomic<SpanId> next_span_{0};  // from a random one on
  std::atomic<uint64_t> exported_{0}, dropped_{0}, refused_{0};

  Mutex mutex_;
  CondVar changed_;
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
  int64_t unix_offset_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // Unix time - steady clock
  int64_t second_ ABSL_GUARDED_BY(mutex_) = -1;         // of the counts below
  int64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, int64_t> begun_by_tenant_ ABSL_GUARDED_BY(mutex_);
  std::vector<TraceSpan> queue_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_TRACING_TRACER_H_
