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
#include "client/mlactl/agents/scene.h"
#include "client/mlactl/agents/scene_report.h"
#include "client/mlactl/bench/bench_options.h"
#include "client/mlactl/bench/bench_report.h"
#include "client/mlactl/bench/bench_worker.h"
#include "client/mlactl/cli/interrupt.h"
#include "client/mlactl/cli/output.h"
#include "client/mlactl/cli/progress.h"

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
    "mlactl --target=unix:/run/mla/mla.sock bench --transport=all --json=wire.json "
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

// Runs all of them until one fails or an interrupt comes. `runs` receives the finished ones,
// whatever the status.
absl::Status RunAll(const BenchOptions& options, client::Client* client,
                    const std::string& model_id, Progress* progress, std::vector<BenchRun>* runs,
                    bool text) {
  const std::atomic<bool>& interrupted = CatchInterrupts();
  auto model = BenchModel::Create(client, options, model_id, [&](double done) {
    progress->Show("uploading weights", done);
    return !interrupted.load();
  });
  if (!model.ok()) return model.status();
  for (const BenchPoint& point : options.points) {
    auto run = BenchRunner(options, point, client, (*model)->id(), progress).Run();
    progress->Clear();
    if (!run.ok()) return WithContext(point.Name(), run.status());
    if (text && run->result.counts.steps > 0) {
      Print(BenchRunText(*run));
      std::fflush(stdout);
    }
    if (run->result.counts.steps > 0) runs->push_back(*std::move(run));
    if (interrupted.load()) break;
  }
  return (*model)->Remove();
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

int BenchScene(const CommonOptions& common, const BenchOptions& options) {
  auto trace = SceneTrace(options);
  if (!trace.ok()) return FailUsage(trace.status());
  if (const std::string& file = options.scene.save_file; !file.empty()) {
    const absl::Status written = WriteFile(file, TraceText(*trace));
    if (!written.ok()) return Fail(written);
  }
  auto client = client::Client::Connect(options.target, options.client);
  if (!client.ok()) return Fail(client.status());
  const v1::GetServerInfoReply server = (*client)->info();
  Progress progress(stderr, options.quiet);
  const std::string model_id = NewModelId("bench");
  const auto run = RunSceneOnce(options, *std::move(trace), client->get(), model_id, &progress);
  progress.Clear();
  int code = run.ok() ? kOk : Fail(run.status());
  if (run.ok()) {
    code = Emit(common, SceneJson(options, server, *run), SceneText(options, *run));
    if (!options.plot_file.empty() && code == kOk) {
      const absl::Status written = WriteFile(options.plot_file, SceneSvg(options, *run));
      if (!written.ok()) code = Fail(written);
    }
  }
  return CatchInterrupts().load() ? Interrupted(client->get(), {{model_id}}) : code;
}

int Bench(const CommonOptions& common, const BenchArguments& arguments) {
  const auto options = MakeBenchOptions(common, arguments);
  if (!options.ok()) return FailUsage(options.status());
  if (!options->scene.name.empty()) return BenchScene(common, *options);
  auto client = client::Client::Connect(options->target, options->client);
  if (!client.ok()) return Fail(client.status());
  const std::atomic<bool>& interrupted = CatchInterrupts();
  const v1::GetServerInfoReply server = (*client)->info();
  Progress progress(stderr, options->quiet);
  if (!common.json) Print(BenchHeaderText(*options, WithPlainTexts(server)));
  std::vector<BenchRun> runs;
  const std::string model_id = NewModelId("bench");
  const absl::Status status =
      RunAll(*options, client->get(), model_id, &progress, &runs, !common.json);
  progress.Clear();
  int code = kOk;
  if (!runs.empty()) {
    code = Emit(common, BenchJson(*options, server, runs),
                runs.size() > 1 ? BenchSummaryText(runs) : "");
    if (!options->plot_file.empty() && code == kOk) {
      const absl::Status written = WriteFile(options->plot_file, BenchSvg(*options, runs));
      if (!written.ok()) code = Fail(written);
    }
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
