#include "client/mlactl/bench_command.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/mlactl/agents/scene.h"
#include "client/mlactl/agents/scene_report.h"
#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/bench/bench_report.h"
#include "client/mlactl/bench/bench_worker.h"
#include "client/mlactl/bench/plotter.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/progress.h"
#include "client/mlactl/load/rate_search.h"

namespace mla::mlactl {
namespace {

constexpr char kNotes[] =
    "Simulated model workers send decode steps: BeginStep, one Attend for each layer, each sent\n"
    "when the one before is answered, EndStep. LIST options take values separated by commas; "
    "every\n"
    "combination is a run. The command registers a model of random weights under a new name and\n"
    "removes it at the end. Ctrl-C ends the run early; the results so far are printed.\n"
    "\n"
    "In a closed loop each worker starts a step when its last one is done. With --rate steps\n"
    "arrive whether or not the server keeps up, and latency runs from the intended arrival, so\n"
    "that a stall counts in every step that it delays; concurrency is then the most steps under\n"
    "way.\n"
    "\n"
    "network is the layer's time without the server's own queue, plan, kernel and write.\n"
    "\n"
    "--scene=agents runs conversations instead, whose turns share the rows of those before "
    "through\n"
    "the server's prefix cache; --scene=agent-turn a long turn, with and without its rows in the\n"
    "cache. --context is the rows of the longest turn. The report has the share of rows that was\n"
    "found and the time to the first output.\n";

constexpr char kExamples[] =
    "mlactl bench\n"
    "mlactl --target=unix:/run/mla-server/mla.sock bench --transport=all --json=wire.json "
    "--plot=wire.svg\n"
    "mlactl bench --preset=deepseek-v3 --batch=1,32,128 --context=4096 --shared-context\n"
    "mlactl bench --rate=500,1000,2000 --concurrency=64 --duration=30\n"
    "mlactl bench --rows=512 --context=0 --steps=20       # prefill\n"
    "mlactl bench --scene=agents --context=8192 --concurrency=2 --plot=agents.svg\n";

std::string MeasureText(const LoadProgress& progress) {
  const auto micros = [](int64_t ns) { return static_cast<double>(ns) * 1e-3; };
  std::string text =
      absl::StrFormat("%.0f steps/s, p50 %.0f us, p99 %.0f us", progress.latest.steps_per_s,
                      micros(progress.latest.p50_ns), micros(progress.latest.p99_ns));
  if (progress.failed > 0) absl::StrAppend(&text, ", ", progress.failed, " refused");
  return text;
}

// One run with its workers, and the server's counters before and after.
class BenchRunner {
 public:
  BenchRunner(const BenchOptions& options, const BenchPoint& point, client::Client* client,
              const std::string& model_id, Progress* progress)
      : options_(options),
        point_(point),
        client_(client),
        model_id_(model_id),
        progress_(progress),
        workers_(point.concurrency),
        filled_(point.concurrency) {}

  absl::StatusOr<BenchRun> Run() {
    LoadOptions load = options_.load;
    load.concurrency = point_.concurrency;
    load.rate_per_s = point_.rate_per_s;
    LoadHooks hooks;
    hooks.set_up = [this](uint32_t worker) { return SetUp(worker); };
    hooks.step = [this](uint32_t worker, LoadRecorder* recorder) {
      return workers_[worker]->Step(recorder);
    };
    hooks.tear_down = [this](uint32_t worker) { workers_[worker].reset(); };
    hooks.progress = [this](const LoadProgress& progress) { Watch(progress); };
    auto result = RunLoad(load, hooks, CatchInterrupts());
    if (!result.ok()) return result.status();
    return BenchRun{point_, transport_, *std::move(result), CopiedPerAttend()};
  }

 private:
  absl::Status SetUp(uint32_t index) {
    auto worker = BenchWorker::Create(options_, point_, model_id_, index);
    if (!worker.ok()) return worker.status();
    workers_[index] = *std::move(worker);
    absl::Status status =
        workers_[index]->FillContext([this, index](double done) { return Filled(index, done); });
    if (index == 0) transport_ = workers_[index]->transport();
    return status;
  }

  bool Filled(uint32_t index, double done) {
    const MutexLock lock(mutex_);
    filled_[index] = done;
    double sum = 0;
    for (const double one : filled_) sum += one;
    progress_->Show(point_.Name() + ": filling the context",
                    sum / static_cast<double>(filled_.size()));
    return !CatchInterrupts().load();
  }

  void Watch(const LoadProgress& progress) {
    if (progress.warming) return progress_->Show(point_.Name() + ": warm-up", -1);
    if (!before_) {
      if (const auto stats = client_->GetStats(); stats.ok()) before_ = *stats;
    }
    const double target = options_.load.steps > 0 ? static_cast<double>(options_.load.steps)
                                                  : progress.target_seconds;
    const double done =
        options_.load.steps > 0 ? static_cast<double>(progress.steps) : progress.seconds;
    progress_->Show(point_.Name(), target > 0 ? done / target : -1,
                    progress.latest.at_s > 0 ? MeasureText(progress) : "");
  }

  // Returns the bytes that the server copied for an attend, from its counters over all clients.
  // They count requests, of which each step has two in addition to its attends.
  double CopiedPerAttend() const {
    const auto after = client_->GetStats();
    if (!before_ || !after.ok()) return 0;
    const uint64_t requests = after->requests_total() - before_->requests_total();
    const uint64_t copied = after->copied_bytes() - before_->copied_bytes();
    const double layers = options_.model.layers();
    const double attends = static_cast<double>(requests) * layers / (layers + 2);
    return requests == 0 ? 0 : static_cast<double>(copied) / attends;
  }

  const BenchOptions& options_;
  const BenchPoint& point_;
  client::Client* const client_;
  const std::string& model_id_;
  Progress* const progress_;
  std::string transport_;
  std::vector<std::unique_ptr<BenchWorker>> workers_;
  std::optional<v1::GetStatsReply> before_;
  Mutex mutex_;  // guards filled_
  std::vector<double> filled_ ABSL_GUARDED_BY(mutex_);
};

// The runs of one command, on one registered model.
class BenchRuns {
 public:
  // `text`: results are printed as they come.
  BenchRuns(const BenchOptions& options, client::Client* client, std::string model,
            Progress* progress, bool text)
      : options_(options),
        client_(client),
        model_(std::move(model)),
        progress_(progress),
        text_(text) {}

  absl::Status Run(const BenchPoint& point) { return Measure(point).status(); }

  // Runs a closed loop for the capacity, and then open loops until the rate is found.
  absl::Status FindRate(const BenchPoint& point) {
    const BenchOptions& options = options_;
    const double seconds = options.load.steps > 0 ? 0 : options.load.duration_s;
    MLA_ASSIGN_OR_RETURN(const Measured closed, Measure(point));
    RateSearch search(closed.steps_per_s);
    BenchPoint open = point;
    while (const auto rate = search.Next()) {
      // So few steps have no p99.
      if (CatchInterrupts().load() || (seconds > 0 && *rate * seconds < kLeastSteps)) break;
      open.rate_per_s = *rate;
      MLA_ASSIGN_OR_RETURN(const Measured measured, Measure(open));
      search.Note(static_cast<double>(measured.p99_ns) <= options.within_p99_ms * 1e6);
    }
    rates_.push_back({point, search.highest()});
    if (text_) Print(BenchRateText(options_, rates_.back()));
    return absl::OkStatus();
  }

  const std::vector<BenchRun>& runs() const { return runs_; }
  const std::vector<BenchRate>& rates() const { return rates_; }

 private:
  static constexpr double kLeastSteps = 20;
  struct Measured {
    double steps_per_s = 0;
    int64_t p99_ns = 0;
  };

  absl::StatusOr<Measured> Measure(const BenchPoint& point) {
    auto run = BenchRunner(options_, point, client_, model_, progress_).Run();
    progress_->Clear();
    if (!run.ok()) return WithContext(point.Name(), run.status());
    const LoadCounts& counts = run->result.counts;
    const Measured measured{static_cast<double>(counts.steps) / std::max(run->result.seconds, 1e-9),
                            counts.of(Stage::kStep).ValueAt(0.99)};
    if (counts.steps == 0) return measured;
    if (text_) {
      Print(BenchRunText(*run));
      std::fflush(stdout);
    }
    runs_.push_back(*std::move(run));
    return measured;
  }

  const BenchOptions& options_;
  client::Client* const client_;
  const std::string model_;
  Progress* const progress_;
  const bool text_;
  std::vector<BenchRun> runs_;
  std::vector<BenchRate> rates_;
};

// Runs all of them until one fails or an interrupt comes. `runs` receives the finished ones,
// whatever the status.
absl::Status RunAll(const BenchOptions& options, client::Client* client,
                    const std::string& model_id, Progress* progress, std::vector<BenchRun>* runs,
                    std::vector<BenchRate>* rates, bool text) {
  const std::atomic<bool>& interrupted = CatchInterrupts();
  auto model = BenchModel::Create(client, options, model_id, [&](double done) {
    progress->Show("uploading weights", done);
    return !interrupted.load();
  });
  if (!model.ok()) return model.status();
  BenchRuns all(options, client, (*model)->id(), progress, text);
  absl::Status status;
  for (const BenchPoint& point : options.points) {
    status = options.within_p99_ms > 0 ? all.FindRate(point) : all.Run(point);
    if (!status.ok() || interrupted.load()) break;
  }
  *runs = all.runs();
  *rates = all.rates();
  return status.ok() ? (*model)->Remove() : status;
}

// Registers the model, runs the trace and removes the model.
absl::StatusOr<SceneRun> RunSceneOnce(const BenchOptions& options, Trace trace,
                                      client::Client* client, const std::string& model_id,
                                      Progress* progress) {
  const std::atomic<bool>& interrupted = CatchInterrupts();
  auto model = BenchModel::Create(client, options, model_id, [&](double done) {
    progress->Show("uploading weights", done);
    return !interrupted.load();
  });
  if (!model.ok()) return model.status();
  auto run = RunScene(options, std::move(trace), client, model_id, progress, interrupted);
  if (!run.ok()) return run.status();
  if (absl::Status status = (*model)->Remove(); !status.ok()) return status;
  return run;
}

// Prints the report and draws it.
int Report(const CommonOptions& common, const std::optional<Plotter>& plotter,
           const std::string& json, const std::string& text) {
  const int code = Emit(common, json, text);
  if (code != kOk || !plotter) return code;
  const absl::Status drawn = plotter->Draw(json);
  return drawn.ok() ? kOk : Fail(drawn);
}

// Returns what draws the report, or nothing if no picture is wanted.
absl::StatusOr<std::optional<Plotter>> PlotterFor(const BenchOptions& options) {
  if (options.plot_file.empty()) return std::nullopt;
  return Plotter::Find(options.plot_file);
}

int BenchScene(const CommonOptions& common, const BenchOptions& options) {
  auto trace = SceneTrace(options);
  if (!trace.ok()) return FailUsage(trace.status());
  if (const std::string& file = options.scene.save_file; !file.empty()) {
    const absl::Status written = WriteFile(file, TraceText(*trace));
    if (!written.ok()) return Fail(written);
  }
  const auto plotter = PlotterFor(options);
  if (!plotter.ok()) return Fail(plotter.status());
  auto client = client::Client::Connect(options.target, options.client);
  if (!client.ok()) return Fail(client.status());
  const v1::GetServerInfoReply server = (*client)->info();
  Progress progress(stderr, options.quiet);
  const std::string model_id = NewModelId("bench");
  const auto run = RunSceneOnce(options, *std::move(trace), client->get(), model_id, &progress);
  progress.Clear();
  int code = run.ok() ? kOk : Fail(run.status());
  if (run.ok()) {
    code = Report(common, *plotter, SceneJson(options, server, *run), SceneText(options, *run));
  }
  return CatchInterrupts().load() ? Interrupted(client->get(), {{model_id}}) : code;
}

int Bench(const CommonOptions& common, const BenchArguments& arguments) {
  const auto options = MakeBenchOptions(common, arguments);
  if (!options.ok()) return FailUsage(options.status());
  if (!options->scene.name.empty()) return BenchScene(common, *options);
  const auto plotter = PlotterFor(*options);
  if (!plotter.ok()) return Fail(plotter.status());
  auto client = client::Client::Connect(options->target, options->client);
  if (!client.ok()) return Fail(client.status());
  const std::atomic<bool>& interrupted = CatchInterrupts();
  const v1::GetServerInfoReply server = (*client)->info();
  Progress progress(stderr, options->quiet);
  if (!common.json) Print(BenchHeaderText(*options, WithPlainTexts(server)));
  std::vector<BenchRun> runs;
  std::vector<BenchRate> rates;
  const std::string model_id = NewModelId("bench");
  const absl::Status status =
      RunAll(*options, client->get(), model_id, &progress, &runs, &rates, !common.json);
  progress.Clear();
  int code = kOk;
  if (!runs.empty()) {
    code = Report(common, *plotter, BenchJson(*options, server, runs, rates),
                  runs.size() > 1 ? BenchSummaryText(runs) : "");
  }
  if (interrupted.load()) {
    if (!status.ok() && !absl::IsCancelled(status)) Fail(status);
    return Interrupted(client->get(), {{model_id}});
  }
  return status.ok() ? code : Fail(status);
}

}  // namespace

void AddBenchCommand(Program* program) {
  const auto arguments = std::make_shared<BenchArguments>();
  Command command = program->Add({.name = "bench",
                                  .group = "Checks and load",
                                  .summary = "put load on the server and measure it",
                                  .examples = kExamples,
                                  .notes = kNotes});
  AddBenchOptions(&command, arguments.get());
  command.Run([arguments](const CommonOptions& common) { return Bench(common, *arguments); });
}

}  // namespace mla::mlactl
