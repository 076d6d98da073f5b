#include "scheduler/engine.h"
#include "absl/base/thread_annotations.h"
#include "base/error.h"
#include "base/mutex.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "scheduler/engine/answer_queue.h"
#include "scheduler/engine/engine_core.h"
#include "scheduler/engine/inbox.h"
#include "scheduler/engine/model_directory.h"
#include "scheduler/launching/launch_sizes.h"
#include "scheduler/tables/prefix_plan.h"
#include "scheduler/tables/random_ids.h"

namespace mla::scheduler {
namespace {

// The engine's thread looks at its timers at least this often, whatever it was told.
constexpr int64_t kLongestSleepNanos = 200'000'000;
// Launches that a submitting thread runs before it leaves the rest to the engine's thread.
constexpr int kInlineLaunches = 2;
// How long a call that takes the role many times yields to threads that wait for the role.
constexpr int kYields = 1000;

}  // namespace

class Engine::Impl {
 public:
  Impl(const EngineOptions& options, Clock* clock)
      : options_(options),
        clock_(clock),
        prefixes_(options.prefix_secret.value_or(RandomSecret()), options.limits),
        answers_(options.observer) {}

  // Passes them to the observer; any thread.
  void Observe(const LaunchReports& reports) {
    for (int i = 0; i < reports.count; ++i) {
      options_.observer->OnLaunch(reports.of[static_cast<size_t>(i)]);
    }
  }

  // Holds the role for its lifetime, then delivers the answers given meanwhile. Control calls
  // announce themselves so that the engine's thread, which would otherwise take the role again at
  // once, lets them in.
  class ABSL_SCOPED_LOCKABLE Role {
   public:
    explicit Role(Impl& impl) ABSL_EXCLUSIVE_LOCK_FUNCTION(impl.role_) : impl_(impl) {
      ++impl_.waiting_for_role_;
      impl_.role_.Lock();
      --impl_.waiting_for_role_;
    }
    // Takes over a role that TryLock has got.
    Role(Impl& impl, std::adopt_lock_t) ABSL_EXCLUSIVE_LOCKS_REQUIRED(impl.role_) : impl_(impl) {}
    ~Role() ABSL_UNLOCK_FUNCTION() {
      // What waits for siblings or KV rows is no work: its time is NextTick.
      const bool work_left = impl_.core_->inflight() || impl_.core_->MayLaunch();
      const bool sooner = impl_.core_->NextTick() < impl_.wake_at_;
      const AnswerList answers = impl_.answers_.PushAndClaim(impl_.core_->TakeAnswers());
      const LaunchReports reports = impl_.core_->TakeReports();
      impl_.role_.Unlock();
      if (std::this_thread::get_id() == impl_.engine_thread_) {
        impl_.answers_.Deliver(answers);
        impl_.Observe(reports);
        return;
      }
      const bool left = work_left || sooner || !impl_.inbox_.empty();
      if (left && left_ == nullptr) impl_.inbox_.Wake();
      impl_.answers_.Deliver(answers);
      impl_.Observe(reports);
      // What came meanwhile has been left to gather.
      const bool came = !answers.empty() && !impl_.inbox_.empty();
      if (left_ != nullptr) {
        *left_ = left || came;
      } else if (came) {
        impl_.inbox_.Wake();
      }
    }
    // Whether anything is left to do is noted in `left`, for a caller that goes on with it, instead
    // of waking the engine's thread.
    void ComeBack(bool* left) { left_ = left; }
    Role(const Role&) = delete;
    Role& operator=(const Role&) = delete;

   private:
    Impl& impl_;
    bool* left_ = nullptr;
  };

  // Runs `fn(core)` with the role, after everything that was submitted before.
  template <typename Fn>
  auto WithRole(Fn&& fn) {
    Role role(*this);
    Drain();
    if (clock_->Now() >= core_->NextTick()) core_->Tick();
    return fn(*core_);
  }

  void Drain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    StreamRequest* request = inbox_.TakeAll();
    while (request != nullptr) {
      StreamRequest* const next = request->engine.next;
      request->engine.next = nullptr;
      core_->Accept(request);
      request = next;
    }
  }

  // One round of the engine; true if it did anything.
  bool Round() ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    Drain();
    const MonotonicNanos now = clock_->Now();
    if (now >= core_->NextTick()) core_->Tick();
    bool busy = core_->StartLaunch();
    if (core_->backend().Info().unified_memory) {
      busy |= core_->CompleteLaunch(/*wait=*/true);
    } else {
      busy |= core_->CompleteLaunch(/*wait=*/false);
      if (!busy && core_->inflight()) {
        std::this_thread::yield();
        busy = true;
      }
    }
    return busy || !inbox_.empty();
  }

  // Rounds until there is nothing to do, others want the role, or there are answers and no work
  // that could go on while they are delivered. True in the last case.
  bool RunRounds() ABSL_EXCLUSIVE_LOCKS_REQUIRED(role_) {
    bool busy = true;
    while (busy && waiting_for_role_ == 0 && !stopping_) {
      busy = Round();
      if (!core_->has_answers()) continue;
      if (!core_->MayLaunch() && !core_->inflight() && inbox_.empty()) return true;
      answers_.Push(core_->TakeAnswers());
    }
    return false;
  }

  void RunThread() {
    engine_thread_ = std::this_thread::get_id();
    while (!stopping_) {
      int64_t sleep = kLongestSleepNanos;
      {
        Role role(*this);
        const bool answered = RunRounds();
        const MonotonicNanos now = clock_->Now();
        const MonotonicNanos tick = core_->NextTick();
        sleep = std::clamp<int64_t>(tick - now, 0, kLongestSleepNanos);
        wake_at_ = now + sleep;
        if (answered || core_->inflight() || waiting_for_role_ > 0) sleep = 0;
      }
      while (waiting_for_role_ > 0 && !stopping_) std::this_thread::yield();
      if (sleep > 0) inbox_.Wait(sleep);
    }
  }

  // For Admit, the table of tenants and the registration of memory, which need no role.
  EngineCore& AnyThread() ABSL_NO_THREAD_SAFETY_ANALYSIS { return *core_; }

  void LetOthersIn() const {
    for (int i = 0; i < kYields && waiting_for_role_ > 0; ++i) std::this_thread::yield();
  }

  // The submitting thread takes the role if it is free, and runs what is small.
  void RunInline() {
    if (answers_.IsDelivering()) return;  // called from Done: its caller looks again
    if (options_.inline_work <= 0) return inbox_.Wake();
    bool left = false;
    for (int i = 0; i < kInlineLaunches; ++i) {
      if (answers_.busy() || !role_.TryLock()) break;
      left = false;
      {
        Role role(*this, std::adopt_lock);
        Drain();
        if (core_->pending().empty() || core_->ReadyWork() > options_.inline_work ||
            !core_->StartLaunch()) {
          return;
        }
        core_->CompleteLaunch(/*wait=*/true);
        if (i + 1 < kInlineLaunches) role.ComeBack(&left);
      }
      if (!left) return;
    }
    if (left) inbox_.Wake();
  }

  const EngineOptions options_;
  Clock* const clock_;
  std::unique_ptr<EngineCore> core_ ABSL_PT_GUARDED_BY(role_);
  kernels::BackendInfo info_;

  Mutex role_;
  std::atomic<int> waiting_for_role_{0};
  std::atomic<MonotonicNanos> wake_at_{0};  // when the engine's thread will look by itself
  Inbox inbox_;
  const PrefixPlanner prefixes_;
  AnswerQueue answers_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::atomic<std::thread::id> engine_thread_{};

  std::atomic<UploadId> next_upload_{1};
  ModelDirectory directory_;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
    Clock* clock) {
  auto impl = std::make_unique<Impl>(options, clock);
  impl->info_ = backend->Info();
  absl::StatusOr<std::unique_ptr<EngineCore>> core =
      EngineCore::Create(options, std::move(backend), clock,
                         options.ids != nullptr ? options.ids : std::function(RandomId));
  if (!core.ok()) return core.status();
  (*core)->CollectAnswers();
  Impl* raw = impl.get();
  (*core)->models().set_on_gone(
      [raw](const Model& model) { raw->directory_.Erase(model.account->name(), model.spec->id); });
  impl->core_ = *std::move(core);
  if (options.dedicated_thread) {
    impl->answers_.Start([raw] {
      if (!raw->inbox_.empty()) raw->inbox_.Wake();
    });
    impl->thread_ = std::thread([raw] { raw->RunThread(); });
  }
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::~Engine() {
  impl_->WithRole([](EngineCore& core) { core.AbortAllSteps("the server stops"); });
  impl_->stopping_ = true;
  impl_->inbox_.Wake();
  if (impl_->thread_.joinable()) impl_->thread_.join();
  impl_->answers_.Stop();
}

StreamId Engine::OpenStream(const std::string& tenant, std::shared_ptr<const StreamSteps>* steps) {
  return impl_->WithRole([&](EngineCore& core) { return core.OpenStream(tenant, steps); });
}

void Engine::CloseStream(StreamId stream) {
  impl_->WithRole([&](EngineCore& core) { core.CloseStream(stream); });
  impl_->answers_.Flush();
}

absl::Status Engine::Submit(StreamRequest* request) {
  if (impl_->stopping_) {
    return MakeError(absl::StatusCode::kUnavailable, "the server stops",
                     {.reason = "stopped", .retry_after_ms = 1000});
  }
  const absl::Status admitted = impl_->AnyThread().Admit(request);
  if (!admitted.ok()) return admitted;
  request->engine.arrival_ns = impl_->clock_->Now();
  impl_->inbox_.Push(request);
  if (impl_->options_.dedicated_thread) impl_->RunInline();
  return absl::OkStatus();
}

absl::StatusOr<ModelInfo> Engine::RegisterModel(const std::string& tenant, const ModelSpec& spec,
                                                int64_t lease_ms,
                                                std::span<const float> kv_scales) {
  return impl_->WithRole([&](EngineCore& core) -> absl::StatusOr<ModelInfo> {
    const absl::StatusOr<TenantRef> row = core.tenants().Enter(tenant);
    if (!row.ok()) return row.status();
    if (!kv_scales.empty()) {
      absl::Status good = ModelTable::CheckScales(spec, kv_scales, "kv_scales");
      if (!good.ok()) return good;
    }
    absl::StatusOr<Model*> model = core.models().Register((*row)->key(), spec, lease_ms);
    if (!model.ok()) return model.status();
    impl_->directory_.Put(tenant, (*model)->spec);
    if (!kv_scales.empty()) {
      absl::Status set = core.models().SetScales(**model, kv_scales, "kv_scales");
      if (!set.ok()) return set;
    }
    return core.models().Info(**model);
  });
}

absl::Status Engine::UnregisterModel(const std::string& tenant, const std::string& id) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.models().Unregister(core.FindTenant(tenant), id); });
}

std::vector<ModelInfo> Engine::ListModels(const std::string& tenant) {
  return impl_->WithRole([&](EngineCore& core) {
    std::vector<ModelInfo> list;
    for (const Model* model : core.models().OfTenant(core.FindTenant(tenant))) {
      list.push_back(core.models().Info(*model));
    }
    return list;
  });
}

std::vector<std::pair<std::string, std::shared_ptr<const ModelSpec>>> Engine::AllModels() {
  return impl_->directory_.All();
}

std::shared_ptr<const ModelSpec> Engine::FindModel(const std::string& tenant,
                                                   const std::string& id) {
  return impl_->directory_.Find(tenant, id);
}

absl::Status Engine::SetScales(const std::string& tenant, const std::string& id,
                               std::span<const float> scales) {
  return impl_->WithRole([&](EngineCore& core) -> absl::Status {
    absl::StatusOr<Model*> model = core.models().Find(core.FindTenant(tenant), id, "model_id");
    if (!model.ok()) return model.status();
    return core.models().SetScales(**model, scales, "scales");
  });
}

UploadId Engine::NewUpload() { return impl_->next_upload_.fetch_add(1); }

absl::Status Engine::LoadWeights(const std::string& tenant, const std::string& id, UploadId upload,
                                 int32_t layer, int32_t head_begin, int32_t head_count,
                                 std::span<const std::byte> w_uk_w_uv) {
  const auto with_model = [&](auto&& fn) {
    return impl_->WithRole([&](EngineCore& core) {
      absl::StatusOr<Model*> model =
          core.models().Find(core.FindTenant(tenant), id, "header.model_id");
      return model.ok() ? fn(core.models(), **model) : model.status();
    });
  };
  kernels::Geometry g;
  absl::Status status = with_model([&](ModelTable& models, Model& model) {
    g = model.spec->geometry;
    return models.CheckChunk(model, layer, head_begin, head_count, w_uk_w_uv);
  });
  // One head at a time: repacking a chunk of all heads takes as long as many launches.
  const size_t uk = size_t(g.nope_dim) * g.kv_lora_rank * sizeof(kernels::Bf16);
  const size_t uv = size_t(g.kv_lora_rank) * g.v_dim * sizeof(kernels::Bf16);
  std::vector<std::byte> head(uk + uv);
  for (int32_t h = 0; h < head_count && status.ok(); ++h) {
    std::memcpy(head.data(), w_uk_w_uv.data() + h * uk, uk);
    std::memcpy(head.data() + uk, w_uk_w_uv.data() + head_count * uk + h * uv, uv);
    status = with_model([&](ModelTable& models, Model& model) {
      return models.LoadWeights(model, upload, layer, head_begin + h, 1, head);
    });
    impl_->LetOthersIn();
  }
  return status;
}

absl::StatusOr<std::vector<int32_t>> Engine::CommitWeights(const std::string& tenant,
                                                           const std::string& id, UploadId upload) {
  return impl_->WithRole([&](EngineCore& core) -> absl::StatusOr<std::vector<int32_t>> {
    absl::StatusOr<Model*> model =
        core.models().Find(core.FindTenant(tenant), id, "header.model_id");
    if (!model.ok()) return model.status();
    return core.models().CommitWeights(**model, upload);
  });
}

void Engine::DiscardWeights(const std::string& tenant, const std::string& id, UploadId upload) {
  impl_->WithRole([&](EngineCore& core) {
    absl::StatusOr<Model*> model =
        core.models().Find(core.FindTenant(tenant), id, "header.model_id");
    if (model.ok()) core.models().DiscardWeights(**model, upload);
  });
}

absl::StatusOr<SequenceInfo> Engine::OpenSequence(const OpenArgs& args) {
  PrefixPlan prefix;
  if (!args.prefix.empty()) {
    prefix.spec = FindModel(args.tenant, args.model_id);
    if (prefix.spec != nullptr) {
      absl::Status status = impl_->prefixes_.Fill(args.tenant, args.prefix, 0, 0, &prefix);
      if (!status.ok()) return status;
    }
  }
  return impl_->WithRole([&](EngineCore& core) { return core.OpenSequence(args, prefix); });
}

absl::StatusOr<SequenceInfo> Engine::MatchSequence(const MatchArgs& args) {
  int64_t committed = 0;
  absl::StatusOr<PrefixPlan> plan =
      impl_->WithRole([&](EngineCore& core) { return core.PlanMatch(args, &committed); });
  if (!plan.ok()) return plan.status();
  absl::Status status =
      impl_->prefixes_.Fill(args.tenant, args.prefix, args.first_row, committed, &*plan);
  if (!status.ok()) return status;
  return impl_->WithRole([&](EngineCore& core) { return core.MatchSequence(args, *plan); });
}

absl::StatusOr<SequenceInfo> Engine::ForkSequence(const ForkArgs& args) {
  return impl_->WithRole([&](EngineCore& core) { return core.ForkSequence(args); });
}

absl::StatusOr<SequenceInfo> Engine::TruncateSequence(const std::string& tenant, SequenceId id,
                                                      int64_t length, uint64_t expected_epoch) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.TruncateSequence(tenant, id, length, expected_epoch); });
}

SequenceList Engine::GetSequences(const SequenceSelection& selection) {
  return impl_->WithRole([&](EngineCore& core) { return core.GetSequences(selection); });
}

int32_t Engine::ReleaseSequences(const std::string& tenant, std::span<const SequenceId> ids,
                                 std::vector<SequenceId>* not_found) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.ReleaseSequences(tenant, ids, not_found); });
}

int32_t Engine::RenewLeases(const SequenceSelection& selection, int64_t lease_ms,
                            std::vector<SequenceId>* not_found) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.RenewLeases(selection, lease_ms, not_found); });
}

EngineStats Engine::Stats() {
  return impl_->WithRole([](EngineCore& core) { return core.Stats(); });
}

const std::shared_ptr<TenantTable>& Engine::tenants() const {
  return impl_->AnyThread().shared_tenants();
}

int32_t Engine::EvictSequences(const SequenceSelection& selection,
                               std::vector<SequenceId>* not_found) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.EvictSequences(selection, not_found); });
}

absl::StatusOr<int32_t> Engine::EvictModel(const std::string& tenant, const std::string& id) {
  return impl_->WithRole([&](EngineCore& core) { return core.EvictModel(tenant, id); });
}

const kernels::BackendInfo& Engine::backend_info() const { return impl_->info_; }

const Limits& Engine::limits() const { return impl_->options_.limits; }

absl::Status Engine::Healthy() {
  return impl_->WithRole([](EngineCore& core) { return core.backend().Healthy(); });
}

absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> Engine::AllocateHost(size_t bytes) {
  return impl_->WithRole([&](EngineCore& core) { return core.backend().AllocateHost(bytes); });
}

absl::Status Engine::RegisterHost(std::span<std::byte> memory) {
  return impl_->AnyThread().backend().RegisterHost(memory);  // without the role: it takes a while
}

void Engine::UnregisterHost(std::span<std::byte> memory) {
  impl_->AnyThread().backend().UnregisterHost(memory);
}

void Engine::StartDrain() {
  impl_->WithRole([](EngineCore& core) { core.StartDrain(); });
}

void Engine::CancelDrain() {
  impl_->WithRole([](EngineCore& core) { core.CancelDrain(); });
}

int32_t Engine::AbortAllSteps() {
  const int32_t aborted = impl_->WithRole(
      [](EngineCore& core) { return core.AbortAllSteps("the server aborts all open steps"); });
  impl_->answers_.Flush();
  return aborted;
}

std::string Engine::CheckInvariants() {
  return impl_->WithRole([](EngineCore& core) { return core.cache().CheckInvariants(); });
}

bool Engine::Poll() {
  Impl::Role role(*impl_);
  return impl_->Round();
}

}  // namespace mla::scheduler
