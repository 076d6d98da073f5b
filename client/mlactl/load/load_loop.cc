#include "client/mlactl/load/load_loop.h"

#include <sys/prctl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"

namespace mla::mlactl {
namespace {

using TimePoint = LoadClock::time_point;
using Seconds = std::chrono::duration<double>;

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kLongestNap = std::chrono::milliseconds(20);

LoadClock::duration Of(double seconds) {
  return std::chrono::duration_cast<LoadClock::duration>(Seconds(seconds));
}

int64_t Nanos(LoadClock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

// Returns the name under which a failure is counted.
std::string ReasonOf(const absl::Status& status) {
  const auto detail = client::DetailOf(status);
  return detail && !detail->reason().empty() ? detail->reason()
                                             : absl::StatusCodeToString(status.code());
}

}  // namespace

void LoadCounts::Merge(const LoadCounts& other) {
  for (size_t i = 0; i < kStages; ++i) stages[i].Merge(other.stages[i]);
  steps += other.steps;
  attends += other.attends;
  bytes += other.bytes;
  unfinished += other.unfinished;
  for (const auto& [reason, count] : other.failures) failures[reason] += count;
  launch_requests += other.launch_requests;
  launch_layers += other.launch_layers;
  launch_clients += other.launch_clients;
  plans_reused += other.plans_reused;
}

// One run: the workers' threads, and the caller's thread, which ends the run in time.
class LoadRun final {
 public:
  LoadRun(const LoadOptions& options, const LoadHooks& hooks, const std::atomic<bool>& interrupted)
      : options_(options),
        hooks_(hooks),
        interrupted_(interrupted),
        recorders_(options.concurrency) {
    for (LoadRecorder& recorder : recorders_) recorder.run_ = this;
  }

  absl::StatusOr<LoadResult> Run();

  bool stopping() const { return stopping_.load() || interrupted_.load(); }
  bool Measured(TimePoint at) const { return at >= measure_begin_ && at < measure_end_; }

 private:
  void Work(uint32_t worker);
  void Loop(uint32_t worker);
  std::optional<TimePoint> NextStart();
  void Sleep(TimePoint until) const;
  void Finished(LoadRecorder* recorder, TimePoint intended, TimePoint start, TimePoint done);
  void Failed(LoadRecorder* recorder, const absl::Status& status);
  void Unfinished(LoadRecorder* recorder, TimePoint intended, TimePoint now) const;
  void End(const absl::Status& status);
  void Stop(TimePoint end);
  bool WaitUntilReady();
  void Start();
  void KeepTime();
  SeriesPoint TakeInterval(TimePoint from, TimePoint end);

  const LoadOptions& options_;
  const LoadHooks& hooks_;
  const std::atomic<bool>& interrupted_;
  std::vector<LoadRecorder> recorders_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> measured_steps_{0};
  std::unique_ptr<Arrivals> arrivals_;
  TimePoint measure_begin_{}, measure_end_{};
  LoadResult result_;
  uint64_t failed_ = 0;

  Mutex mutex_;
  CondVar changed_;
  uint32_t ready_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t working_ ABSL_GUARDED_BY(mutex_) = 0;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::optional<TimePoint> stopped_
      ABSL_GUARDED_BY(mutex_);  // when Stop was called, if before the end
};

bool LoadRecorder::stopping() const { return run_->stopping(); }

bool LoadRecorder::Measured(TimePoint at) const { return run_->Measured(at); }

void LoadRecorder::Record(Stage stage, TimePoint sent, TimePoint done) {
  if (Measured(done)) counts_.of(stage).Record(Nanos(done - sent));
}

void LoadRecorder::Begin(TimePoint sent, TimePoint done) { Record(Stage::kBegin, sent, done); }

void LoadRecorder::End(TimePoint sent, TimePoint done) { Record(Stage::kEnd, sent, done); }

void LoadRecorder::Attend(TimePoint sent, TimePoint done, const client::AttendTimes& times,
                          uint64_t bytes) {
  if (!Measured(done)) return;
  const int64_t total = Nanos(done - sent);
  const auto micros = [](uint32_t us) { return int64_t{us} * 1000; };
  const int64_t server = micros(times.queue_us) + micros(times.plan_us) + micros(times.kernel_us) +
                         micros(times.write_us);
  counts_.of(Stage::kAttend).Record(total);
  counts_.of(Stage::kNetwork).Record(total - server);
  counts_.of(Stage::kQueue).Record(micros(times.queue_us));
  counts_.of(Stage::kPlan).Record(micros(times.plan_us));
  counts_.of(Stage::kKernel).Record(micros(times.kernel_us));
  counts_.of(Stage::kWrite).Record(micros(times.write_us));
  ++counts_.attends;
  counts_.bytes += bytes;
  counts_.launch_requests += times.launch_requests;
  counts_.launch_layers += times.launch_layers;
  counts_.launch_clients += times.launch_clients;
  counts_.plans_reused += times.plan_reused ? 1 : 0;
}

// ------------------------------------------------------------------------------------- Workers

void LoadRun::Work(uint32_t worker) {
  // Without it the kernel may end a sleep 50 us late.
  prctl(PR_SET_TIMERSLACK, 1UL);
  const absl::Status status = hooks_.set_up(worker);
  bool go = false;
  {
    MutexLock lock(mutex_);
    if (status.ok()) {
      ++ready_;
    } else if (status_.ok()) {
      status_ = status;
    }
    changed_.NotifyAll();
    changed_.Wait(
        lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return started_ || !status_.ok(); });
    go = started_;
  }
  if (go) Loop(worker);
  hooks_.tear_down(worker);
  const MutexLock lock(mutex_);
  --working_;
  changed_.NotifyAll();
}

void LoadRun::Loop(uint32_t worker) {
  LoadRecorder& recorder = recorders_[worker];
  while (!stopping()) {
    const std::optional<TimePoint> intended = NextStart();
    if (!intended) return;
    const TimePoint start = LoadClock::now();
    if (stopping()) return Unfinished(&recorder, *intended, start);
    const absl::Status status = hooks_.step(worker, &recorder);
    const TimePoint done = LoadClock::now();
    if (status.ok()) {
      Finished(&recorder, *intended, start, done);
    } else if (stopping()) {
      Unfinished(&recorder, *intended, done);
    } else {
      Failed(&recorder, status);
    }
  }
}

std::optional<TimePoint> LoadRun::NextStart() {
  if (arrivals_ == nullptr) return LoadClock::now();
  const std::optional<TimePoint> next = arrivals_->TakeBefore(measure_end_);
  if (next) Sleep(*next);
  return next;
}

void LoadRun::Sleep(TimePoint until) const {
  while (!stopping()) {
    const TimePoint now = LoadClock::now();
    if (now >= until) return;
    std::this_thread::sleep_until(std::min(until, now + kLongestNap));
  }
}

void LoadRun::Finished(LoadRecorder* recorder, TimePoint intended, TimePoint start,
                       TimePoint done) {
  const bool counts = Measured(done);
  // An open loop measures by arrival: a step that ends late still counts.
  const bool times = arrivals_ == nullptr ? counts : Measured(intended);
  if (counts) {
    const uint64_t before = measured_steps_.fetch_add(1);
    if (options_.steps > 0 && before >= options_.steps) return;
    if (before + 1 == options_.steps) Stop(done);
    ++recorder->counts_.steps;
    const MutexLock lock(recorder->mutex_);
    recorder->interval_.Record(Nanos(done - intended));
  }
  if (!times) return;
  recorder->counts_.of(Stage::kStep).Record(Nanos(done - intended));
  if (arrivals_ != nullptr) {
    recorder->counts_.of(Stage::kStartDelay).Record(Nanos(start - intended));
  }
}

void LoadRun::Failed(LoadRecorder* recorder, const absl::Status& status) {
  const auto detail = client::DetailOf(status);
  if (!detail || detail->retry_after_ms() == 0) return End(status);
  if (Measured(LoadClock::now())) {
    ++recorder->counts_.failures[ReasonOf(status)];
    const MutexLock lock(recorder->mutex_);
    ++recorder->failed_;
  }
  Sleep(LoadClock::now() + std::chrono::milliseconds(detail->retry_after_ms()));
}

void LoadRun::Unfinished(LoadRecorder* recorder, TimePoint intended, TimePoint now) const {
  if (arrivals_ == nullptr || !Measured(intended) || intended > now) return;
  ++recorder->counts_.unfinished;
  recorder->counts_.of(Stage::kStep).Record(Nanos(now - intended));
}

void LoadRun::Stop(TimePoint end) {
  stopping_ = true;
  const MutexLock lock(mutex_);
  if (!stopped_) stopped_ = end;
}

void LoadRun::End(const absl::Status& status) {
  Stop(LoadClock::now());
  const MutexLock lock(mutex_);
  if (status_.ok()) status_ = status;
  changed_.NotifyAll();
}

// ------------------------------------------------------------------------------ Caller's thread

bool LoadRun::WaitUntilReady() {
  MutexLock lock(mutex_);
  changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ready_ == options_.concurrency || !status_.ok();
  });
  return status_.ok();
}

void LoadRun::Start() {
  const MutexLock lock(mutex_);
  const TimePoint begin = LoadClock::now();
  measure_begin_ = begin + Of(options_.warmup_s);
  measure_end_ = options_.steps > 0 ? TimePoint::max() : measure_begin_ + Of(options_.duration_s);
  if (options_.rate_per_s > 0) {
    arrivals_ =
        std::make_unique<Arrivals>(options_.arrivals, options_.rate_per_s, options_.seed, begin);
  }
  started_ = true;
  changed_.NotifyAll();
}

SeriesPoint LoadRun::TakeInterval(TimePoint from, TimePoint end) {
  LatencyHistogram steps;
  failed_ = 0;
  for (LoadRecorder& recorder : recorders_) {
    const MutexLock lock(recorder.mutex_);
    steps.Merge(recorder.interval_);
    recorder.interval_.Clear();
    failed_ += recorder.failed_;
  }
  SeriesPoint point;
  point.at_s = Seconds(end - measure_begin_).count();
  const double length_s = Seconds(end - from).count();
  point.steps_per_s = length_s > 0 ? static_cast<double>(steps.count()) / length_s : 0;
  point.p50_ns = steps.ValueAt(0.5);
  point.p99_ns = steps.ValueAt(0.99);
  point.max_ns = steps.max_ns();
  return point;
}

// Ends a closed loop at its time, and an open loop after a grace period, in which the last arrivals
// can finish.
void LoadRun::KeepTime() {
  const double grace_s = arrivals_ == nullptr ? 0 : std::clamp(options_.duration_s / 4, 0.0, 1.0);
  const bool timed = options_.steps == 0;
  const auto interval = Of(timed ? std::clamp(options_.duration_s / 100, 0.1, 60.0) : 0.5);
  TimePoint from = measure_begin_;
  LoadProgress progress;
  progress.target_seconds = timed ? options_.duration_s : 0;
  MutexLock lock(mutex_);
  while (working_ > 0) {
    const TimePoint tick = LoadClock::now() + kTick;
    // Wakes exactly at the end; afterwards once a tick, while the last requests finish.
    const TimePoint wake = timed && !stopping() ? std::min(tick, measure_end_ + Of(grace_s)) : tick;
    changed_.WaitUntil(lock, wake,
                       [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return working_ == 0; });
    lock.Unlock();
    const TimePoint now = LoadClock::now();
    if (interrupted_.load() || (timed && now >= measure_end_ + Of(grace_s))) Stop(now);
    if (now - from >= interval && from < measure_end_) {
      const TimePoint to = std::min(now, measure_end_);
      result_.series.push_back(TakeInterval(from, to));
      from = to;
    }
    progress.warming = now < measure_begin_;
    progress.seconds = Seconds(std::min(now, measure_end_) - measure_begin_).count();
    progress.steps = measured_steps_.load();
    progress.failed = failed_;
    if (!result_.series.empty()) progress.latest = result_.series.back();
    if (hooks_.progress) hooks_.progress(progress);
    lock.Lock();
  }
}

absl::StatusOr<LoadResult> LoadRun::Run() {
  std::vector<std::thread> threads;
  {
    const MutexLock lock(mutex_);
    working_ = options_.concurrency;
  }
  for (uint32_t i = 0; i < options_.concurrency; ++i) threads.emplace_back([this, i] { Work(i); });
  if (WaitUntilReady()) {
    Start();
    KeepTime();
  }
  for (std::thread& thread : threads) thread.join();
  const MutexLock lock(mutex_);
  result_.interrupted = interrupted_.load();
  if (!status_.ok() && !result_.interrupted) return status_;
  const TimePoint end = std::min(stopped_.value_or(measure_end_), measure_end_);
  result_.seconds = std::max(0.0, Seconds(end - measure_begin_).count());
  for (LoadRecorder& recorder : recorders_) result_.counts.Merge(recorder.counts_);
  if (arrivals_ != nullptr) {
    LoadRecorder recorder;
    recorder.run_ = this;
    const TimePoint now = stopped_.value_or(measure_end_);
    while (true) {
      const auto at = arrivals_->TakeBefore(end);
      if (!at.has_value()) break;
      Unfinished(&recorder, *at, now);
    }
    result_.counts.Merge(recorder.counts_);
  }
  if (result_.counts.steps == 0 && !result_.interrupted) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no step finished in ", result_.seconds, " s",
        result_.counts.failures.empty()
            ? ": measure for longer"
            : absl::StrCat(": all failed, first with ", result_.counts.failures.begin()->first)));
  }
  return std::move(result_);
}

absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options, const LoadHooks& hooks,
                                   const std::atomic<bool>& interrupted) {
  return LoadRun(options, hooks, interrupted).Run();
}

}  // namespace mla::mlactl
