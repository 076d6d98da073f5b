#include "client/mlactl/agents/scene.h"

#include <chrono>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/mlactl/cli/output.h"

namespace mla::mlactl {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kRound = std::chrono::milliseconds(50);  // period of the thread that watches a run
constexpr int kRoundsARead = 10;                        // between reads of events

// Decides which turn goes next. Threading: any thread.
class Schedule {
 public:
  Schedule(const Trace& trace, double speed, const std::function<bool()>& stopping)
      : trace_(trace), speed_(speed), stopping_(stopping) {
    for (size_t i = 0; i < trace.turns.size(); ++i) {
      conversations_[trace.turns[i].conversation].turns.push_back(i);
    }
    const MutexLock lock(mutex_);
    for (const auto& [id, conversation] : conversations_) AddNext(conversation);
  }

  // Waits until a turn is due and its conversation has no other turn under way; returns nullopt
  // when all turns are taken, or when stopping.
  std::optional<size_t> Take() {
    MutexLock lock(mutex_);
    while (!stopping_()) {
      if (!ready_.empty()) {
        const auto [at_ms, turn] = *ready_.begin();
        if (speed_ == 0 ||
            std::chrono::duration<double>(Clock::now() - start_).count() >= at_ms / 1e3 / speed_) {
          ready_.erase(ready_.begin());
          ++conversations_[trace_.turns[turn].conversation].next;
          ++running_;
          return turn;
        }
      } else if (running_ == 0) {
        return std::nullopt;
      }
      // Wakes also to check for due turns, and for the end.
      changed_.WaitFor(lock, std::chrono::milliseconds(5));
    }
    return std::nullopt;
  }

  // Returns the conversation's next turn if it is a branch of the one under way; the worker of that
  // one takes it.
  std::optional<size_t> TakeBranch(size_t turn, bool take) {
    const MutexLock lock(mutex_);
    Conversation& conversation = conversations_[trace_.turns[turn].conversation];
    if (conversation.next == conversation.turns.size()) return std::nullopt;
    const size_t next = conversation.turns[conversation.next];
    if (!trace_.turns[next].branch) return std::nullopt;
    if (take) ++conversation.next;
    return next;
  }

  // The conversation may go on.
  void Done(size_t turn) {
    const MutexLock lock(mutex_);
    AddNext(conversations_[trace_.turns[turn].conversation]);
    --running_;
    changed_.NotifyAll();
  }

 private:
  struct Conversation {
    std::vector<size_t> turns;
    size_t next = 0;
  };
  void AddNext(const Conversation& conversation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (conversation.next == conversation.turns.size()) return;
    const size_t turn = conversation.turns[conversation.next];
    ready_.emplace(trace_.turns[turn].at_ms, turn);
  }

  const Trace& trace_;
  const double speed_;
  const std::function<bool()>& stopping_;
  const Clock::time_point start_ = Clock::now();
  Mutex mutex_;
  CondVar changed_;
  std::map<uint32_t, Conversation> conversations_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<double, size_t>> ready_ ABSL_GUARDED_BY(mutex_);
  size_t running_ ABSL_GUARDED_BY(mutex_) = 0;
};

class SceneRunner {
 public:
  SceneRunner(const BenchOptions& options, Trace trace, const std::string& model_id,
              const std::atomic<bool>& interrupted)
      : options_(options), model_id_(model_id), interrupted_(interrupted) {
    run_.trace = std::move(trace);
    run_.turns.resize(run_.trace.turns.size());
  }

  absl::StatusOr<SceneRun> Run(client::Client* client, Progress* progress) {
    std::vector<std::unique_ptr<TurnWorker>> workers;
    for (uint32_t i = 0; i < options_.points.front().concurrency; ++i) {
      MLA_ASSIGN_OR_RETURN(auto worker, TurnWorker::Create(options_, model_id_, i, stopping_));
      workers.push_back(std::move(worker));
    }
    run_.transport = workers.front()->transport();
    auto stats = client->GetStats();
    if (!stats.ok()) return stats.status();
    run_.before = *std::move(stats);
    Schedule schedule(run_.trace, options_.scene.speed, stopping_);
    std::vector<std::thread> threads;
    for (const auto& worker : workers) {
      threads.emplace_back([&, worker = worker.get()] { Work(&schedule, worker); });
    }
    TierEvents events(model_id_);
    for (int i = 0; !Ended(progress); ++i) {
      // A server without events, or without room for a watcher, gives no figures by tier.
      if (i % kRoundsARead == 0) events.Read(client).IgnoreError();
      std::this_thread::sleep_for(kRound);
    }
    for (std::thread& thread : threads) thread.join();
    run_.seconds = Seconds();
    run_.interrupted = interrupted_;
    workers.clear();
    events.Read(client).IgnoreError();
    run_.tiers = events.rows();
    run_.restored = events.restored();
    run_.tiers_complete = events.complete();
    stats = client->GetStats();
    if (!stats.ok()) return stats.status();
    run_.after = *std::move(stats);
    const MutexLock lock(mutex_);
    if (!failed_.ok() && !interrupted_) return failed_;
    return std::move(run_);
  }

 private:
  double Seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  void Work(Schedule* schedule, TurnWorker* worker) {
    while (const std::optional<size_t> taken = schedule->Take()) {
      size_t turn = *taken;
      bool going = RunTurn(schedule, worker, turn);
      while (going) {
        const std::optional<size_t> branch = schedule->TakeBranch(turn, /*take=*/true);
        if (!branch) break;
        turn = *branch;
        going = RunTurn(schedule, worker, turn);
      }
      worker->Drop();
      schedule->Done(turn);
    }
    const MutexLock lock(mutex_);
    ++ended_;
  }

  bool RunTurn(Schedule* schedule, TurnWorker* worker, size_t index) {
    const Turn& turn = run_.trace.turns[index];
    const bool keep = !turn.branch && schedule->TakeBranch(index, /*take=*/false).has_value();
    const double start_s = Seconds();
    auto result = worker->Run(run_.trace, turn, keep);
    const MutexLock lock(mutex_);
    ++answered_;
    if (result.ok()) {
      result->start_s = start_s;
      run_.turns[index] = *std::move(result);
      return true;
    }
    if (failed_.ok()) {
      failed_ = WithContext(absl::StrCat("turn ", index + 1), result.status());
    }
    stop_ = true;
    return false;
  }

  bool Ended(Progress* progress) {
    const MutexLock lock(mutex_);
    progress->Show("turns", static_cast<double>(answered_) / static_cast<double>(run_.turns.size()),
                   absl::StrFormat("%d of %d", answered_, run_.turns.size()));
    return ended_ == options_.points.front().concurrency;
  }

  const BenchOptions& options_;
  const std::string& model_id_;
  const std::atomic<bool>& interrupted_;
  std::atomic<bool> stop_ = false;
  const std::function<bool()> stopping_ = [this] { return stop_ || interrupted_; };
  const Clock::time_point start_ = Clock::now();
  SceneRun run_;  // the thread that runs a turn writes its result
  Mutex mutex_;
  uint64_t answered_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t ended_ ABSL_GUARDED_BY(mutex_) = 0;  // workers
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<Trace> ReadTrace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  auto trace = ParseTrace(text.str());
  if (!trace.ok()) return WithContext(path, trace.status());
  return trace;
}

}  // namespace

absl::StatusOr<Trace> SceneTrace(const BenchOptions& options) {
  const SceneOptions& scene = options.scene;
  if (!scene.trace_file.empty()) return ReadTrace(scene.trace_file);
  const uint32_t context = options.points.front().context;
  if (scene.name == "agent-turn") {
    if (context <= Trace().block_rows) {
      return absl::InvalidArgumentError(
          absl::StrCat("--context: got ", context, ", must be more than ", Trace().block_rows));
    }
    return GenerateTurn(context, scene.share, scene.repeats, options.load.seed);
  }
  AgentsShape shape = scene.shape;
  shape.context = context;
  const uint64_t least = shape.system + uint64_t{shape.turns} * (shape.output + 1);
  if (context < least) {
    return absl::InvalidArgumentError(absl::StrCat("--context: got ", context,
                                                   ", must be at least ", least,
                                                   " for --system and the outputs of --turns"));
  }
  return GenerateAgents(shape, options.load.seed);
}

absl::StatusOr<SceneRun> RunScene(const BenchOptions& options, Trace trace, client::Client* client,
                                  const std::string& model_id, Progress* progress,
                                  const std::atomic<bool>& interrupted) {
  return SceneRunner(options, std::move(trace), model_id, interrupted).Run(client, progress);
}

}  // namespace mla::mlactl
