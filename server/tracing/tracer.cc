#include "server/tracing/tracer.h"

#include <chrono>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

// Spans wait for each other this long, so that an export holds many.
constexpr auto kGather = std::chrono::milliseconds(200);
// Names that are counted in one second. Any more share one count, so that invented tenants cost no
// memory.
constexpr size_t kTenantsCounted = 256;
// The clocks may differ by this much from their difference at the last adjustment.
constexpr int64_t kMostDriftNanos = 1'000'000;

}  // namespace

std::string SpanError(const absl::Status& status) {
  if (status.ok()) return "";
  const std::string reason = DetailOf(status).reason;
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

Tracer::Tracer(TracerOptions options, std::vector<std::unique_ptr<SpanExporter>> exporters)
    : options_(options), exporters_(std::move(exporters)) {
  random_.seed(RandomNumber());
  next_span_ = random_();
  if (on()) thread_ = std::thread([this] { Run(); });
}

Tracer::~Tracer() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

int64_t Tracer::Now() { return SteadyNanos(); }

bool Tracer::WithinBounds(const std::string& tenant) {
  const int64_t second = Now() / 1000000000;
  if (second != second_) {
    second_ = second;
    begun_ = 0;
    begun_by_tenant_.clear();
  }
  const bool counted =
      begun_by_tenant_.size() < kTenantsCounted || begun_by_tenant_.contains(tenant);
  int64_t& own = begun_by_tenant_[counted ? tenant : ""];
  if (begun_ >= options_.traces_per_s || own >= options_.tenant_traces_per_s) return false;
  ++begun_;
  ++own;
  return true;
}

TraceContext Tracer::Sample(const TraceContext& parent, const std::string& tenant) {
  if (!on()) return {};
  if (parent.valid()) {
    if (!parent.sampled) return {};
  } else {
    if (options_.sample_every == 0) return {};
    const uint64_t seen = seen_.fetch_add(1, std::memory_order_relaxed);
    if (seen % static_cast<uint64_t>(options_.sample_every) != 0) return {};
  }
  const MutexLock lock(mutex_);
  if (!WithinBounds(tenant)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return {};
  }
  TraceContext context = parent;
  const auto draw = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    uint64_t id = 0;
    while (id == 0) id = random_();
    return id;
  };
  if (!parent.valid()) context.trace = {draw(), draw()};
  context.span = NewSpanId();
  context.sampled = true;
  return context;
}

// The clock of Unix time may be set while the server runs, for example soon after the host's start.
// Smaller differences come from reading two clocks one after the other. They would tear the spans
// of a trace apart.
int64_t Tracer::UnixOffset() {
  const int64_t now = options_.unix_nanos() - SteadyNanos();
  if (std::abs(now - unix_offset_ns_) > kMostDriftNanos) unix_offset_ns_ = now;
  return unix_offset_ns_;
}

void Tracer::Record(std::vector<TraceSpan> spans) {
  const MutexLock lock(mutex_);
  const int64_t offset = UnixOffset();
  for (TraceSpan& span : spans) {
    span.begin_ns += offset;
    span.end_ns += offset;
  }
  if (queue_.size() + spans.size() > static_cast<size_t>(options_.queue_spans) || stop_) {
    dropped_.fetch_add(spans.size(), std::memory_order_relaxed);
    return;
  }
  const bool first = queue_.empty();
  queue_.insert(queue_.end(), std::make_move_iterator(spans.begin()),
                std::make_move_iterator(spans.end()));
  if (first) changed_.NotifyAll();
}

TracerStats Tracer::stats() const {
  return {exported_.load(std::memory_order_relaxed), dropped_.load(std::memory_order_relaxed),
          refused_.load(std::memory_order_relaxed)};
}

void Tracer::Export(std::vector<TraceSpan> spans) {
  bool exported = false;
  for (const auto& exporter : exporters_) {
    const absl::Status status = exporter->Export(spans);
    if (!status.ok()) {
      Log(LogLevel::kDebug, "spans_lost",
          {{"spans", spans.size()}, {"reason", std::string(status.message())}});
    }
    exported |= status.ok();
  }
  (exported ? exported_ : dropped_).fetch_add(spans.size(), std::memory_order_relaxed);
}

void Tracer::Run() {
  MutexLock lock(mutex_);
  while (true) {
    changed_.Wait(
        lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || !queue_.empty(); });
    if (!stop_) {
      changed_.WaitFor(lock, kGather,
                       [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_; });
    }
    if (queue_.empty()) return;  // stopped
    std::vector<TraceSpan> spans = std::exchange(queue_, {});
    lock.Unlock();
    Export(std::move(spans));
    lock.Lock();
  }
}

}  // namespace mla::server
