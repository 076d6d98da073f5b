#include "scheduler/engine.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/mutex.h"
#include "scheduler/engine/engine_impl.h"
#include "scheduler/launching/launch_sizes.h"
#include "scheduler/tables/model_checks.h"

namespace mla::scheduler {
namespace {

// The chosen size of a pool that is not configured is a multiple of this.
constexpr int64_t kKvCacheStep = 1 << 20;

// Waits for the answer of a move.
class MoveAnswer {
 public:
  void Set(const absl::Status& status) {
    const MutexLock lock(mutex_);
    status_ = status;
    done_ = true;
    changed_.NotifyAll();
  }
  absl::Status Wait() {
    MutexLock lock(mutex_);
    changed_.Wait(lock, [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return done_; });
    return status_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

// Returns the model if it is still registered. Being read counts as use, so that its lease does not
// end.
absl::StatusOr<Model*> FindHeld(EngineCore& core, const HeldWeights& held) {
  MLA_ASSIGN_OR_RETURN(Model* const model,
                       core.models().Use(core.FindTenant(held.tenant), held.spec->id, "model_id"));
  if (model->spec == held.spec) return model;
  return MakeError(
      absl::StatusCode::kNotFound,
      absl::StrCat("model ", held.spec->id, " was registered again, with other contents"),
      {.field = "model_id",
       .got = held.spec->id,
       .limit = "the model as it was registered before",
       .reason = "model_not_found"});
}

}  // namespace

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
    Clock* clock) {
  auto impl = std::make_unique<Impl>(options, clock);
  impl->info_ = backend->Info();
  MLA_ASSIGN_OR_RETURN(
      std::unique_ptr<EngineCore> core,
      EngineCore::Create(options, std::move(backend), clock,
                         options.ids != nullptr ? options.ids : std::function(RandomNumber)));
  core->answers().Collect();
  Impl* raw = impl.get();
  if (TierMoves* const tiers = core->tiers()) {
    tiers->set_wake([raw] { raw->inbox_.Wake(); });
  }
  core->models().set_on_gone(
      [raw](const Model& model) { raw->directory_.Erase(model.account->name(), model.spec->id); });
  impl->core_ = std::move(core);
  if (options.dedicated_thread) {
    impl->answers_.Start([raw] {
      if (!raw->inbox_.empty()) raw->inbox_.Wake();
    });
    if (options.notes_pauses) impl->pauses_.Start();
    impl->thread_ = std::thread([raw] { raw->RunThread(); });
  }
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::~Engine() {
  impl_->WithRole([](EngineCore& core) {
    core.steps().AbortAll("the server stops");
    core.FailMoves("the server stops");
  });
  impl_->stopping_ = true;
  impl_->inbox_.Wake();
  if (impl_->thread_.joinable()) impl_->thread_.join();
  impl_->answers_.Stop();
  impl_->DropCore();
}

StreamId Engine::OpenStream(const std::string& tenant, std::shared_ptr<const StreamSteps>* steps) {
  return impl_->WithRole([&](EngineCore& core) { return core.steps().OpenStream(tenant, steps); });
}

void Engine::CloseStream(StreamId stream) {
  impl_->WithRole([&](EngineCore& core) { core.steps().CloseStream(stream); });
  impl_->answers_.Flush();
}

absl::Status Engine::Submit(StreamRequest* request) {
  if (impl_->stopping_) {
    return MakeError(absl::StatusCode::kUnavailable, "the server stops",
                     {.reason = "stopped", .retry_after_ms = 1000});
  }
  const MonotonicNanos now = impl_->clock_->Now();
  MLA_RETURN_IF_ERROR(impl_->AnyThread().answers().Admit(request, now));
  // The request may be answered from Push on, so it is read before.
  const bool leave = request->leave_launch;
  const Submitter* const submitter = request->submitter;
  impl_->inbox_.Push(request);
  if (impl_->options_.dedicated_thread) impl_->RunInline(leave, submitter, now);
  return absl::OkStatus();
}

absl::StatusOr<ModelInfo> Engine::RegisterModel(const std::string& tenant, const ModelSpec& spec,
                                                int64_t lease_ms, std::span<const float> kv_scales,
                                                std::span<const float> sinks) {
  return impl_->WithRole([&](EngineCore& core) -> absl::StatusOr<ModelInfo> {
    MLA_ASSIGN_OR_RETURN(const TenantRef row, core.tenants().Enter(tenant));
    if (!kv_scales.empty()) {
      MLA_RETURN_IF_ERROR(CheckKvScales(spec, kv_scales, "kv_scales"));
    }
    if (!sinks.empty()) {
      SinkSlice all;
      MLA_RETURN_IF_ERROR(CheckSinks(spec, sinks, "sinks", &all));
    }
    MLA_ASSIGN_OR_RETURN(Model* const model, core.models().Register(row->key(), spec, lease_ms));
    impl_->directory_.Put(tenant, model->spec);
    if (!kv_scales.empty()) {
      MLA_RETURN_IF_ERROR(core.models().SetScales(*model, kv_scales, "kv_scales"));
    }
    if (!sinks.empty()) {
      MLA_RETURN_IF_ERROR(core.models().SetSinks(*model, {}, sinks, "sinks"));
    }
    return core.models().Info(*model);
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
    MLA_ASSIGN_OR_RETURN(Model* const model,
                         core.models().Use(core.FindTenant(tenant), id, "model_id"));
    return core.models().SetScales(*model, scales, "scales");
  });
}

absl::StatusOr<std::vector<int32_t>> Engine::SetSinks(const std::string& tenant,
                                                      const std::string& id, const SinkSlice& slice,
                                                      std::span<const float> sinks) {
  return impl_->WithRole([&](EngineCore& core) -> absl::StatusOr<std::vector<int32_t>> {
    MLA_ASSIGN_OR_RETURN(Model* const model,
                         core.models().Use(core.FindTenant(tenant), id, "model_id"));
    MLA_RETURN_IF_ERROR(core.models().SetSinks(*model, slice, sinks, "sinks"));
    return core.models().LayersWithoutSinks(*model);
  });
}

UploadId Engine::NewUpload() { return impl_->next_upload_.fetch_add(1); }

absl::Status Engine::LoadWeights(const std::string& tenant, const std::string& id, UploadId upload,
                                 int32_t layer, int32_t head_begin, int32_t head_count,
                                 std::span<const std::byte> w_uk_w_uv) {
  const auto with_model = [&](auto&& fn) {
    return impl_->WithRole([&](EngineCore& core) {
      absl::StatusOr<Model*> model =
          core.models().Use(core.FindTenant(tenant), id, "header.model_id");
      return model.ok() ? fn(core.models(), **model) : model.status();
    });
  };
  kernels::Geometry g;
  absl::Status status = with_model([&](ModelTable& models, Model& model) {
    g = model.spec->geometry;
    return models.weights().CheckChunk(model, layer, head_begin, head_count, w_uk_w_uv);
  });
  // The loop handles one head at a time, because repacking a chunk of all heads takes as long as
  // many launches.
  const size_t uk = size_t(g.nope_dim) * g.kv_lora_rank * sizeof(kernels::Bf16);
  const size_t uv = size_t(g.kv_lora_rank) * g.v_dim * sizeof(kernels::Bf16);
  std::vector<std::byte> head(uk + uv);
  for (int32_t h = 0; h < head_count && status.ok(); ++h) {
    std::memcpy(head.data(), w_uk_w_uv.data() + h * uk, uk);
    std::memcpy(head.data() + uk, w_uk_w_uv.data() + head_count * uk + h * uv, uv);
    status = with_model([&](ModelTable& models, Model& model) {
      return models.weights().Load(model, upload, layer, head_begin + h, 1, head);
    });
    impl_->LetOthersIn();
  }
  return status;
}

absl::Status Engine::LoadProjected(const std::string& tenant, const std::string& id,
                                   UploadId upload, kernels::ProjectedPart part, int32_t layer,
                                   int32_t head, std::span<const std::byte> weights) {
  const absl::Status status = impl_->WithRole([&](EngineCore& core) {
    absl::StatusOr<Model*> model =
        core.models().Use(core.FindTenant(tenant), id, "header.model_id");
    return model.ok()
               ? core.models().weights().LoadProjected(**model, upload, part, layer, head, weights)
               : model.status();
  });
  impl_->LetOthersIn();
  return status;
}

absl::StatusOr<std::vector<int32_t>> Engine::CommitWeights(const std::string& tenant,
                                                           const std::string& id, UploadId upload) {
  return impl_->WithRole([&](EngineCore& core) -> absl::StatusOr<std::vector<int32_t>> {
    MLA_ASSIGN_OR_RETURN(Model* const model,
                         core.models().Use(core.FindTenant(tenant), id, "header.model_id"));
    return core.models().weights().Commit(*model, upload);
  });
}

void Engine::DiscardWeights(const std::string& tenant, const std::string& id, UploadId upload) {
  impl_->WithRole([&](EngineCore& core) {
    absl::StatusOr<Model*> model =
        core.models().Use(core.FindTenant(tenant), id, "header.model_id");
    if (model.ok()) core.models().weights().Discard(**model, upload);
  });
}

void Engine::WithdrawModel(const std::string& tenant, const std::string& id) {
  impl_->WithRole([&](EngineCore& core) { core.models().Withdraw(core.FindTenant(tenant), id); });
}

std::vector<HeldWeights> Engine::AllWeights() {
  return impl_->WithRole([](EngineCore& core) { return core.models().AllWeights(); });
}

absl::Status Engine::ReadWeights(const HeldWeights& held, int32_t layer, int32_t head,
                                 std::span<kernels::Bf16> weights) {
  const absl::Status status = impl_->WithRole([&](EngineCore& core) -> absl::Status {
    MLA_ASSIGN_OR_RETURN(const Model* const model, FindHeld(core, held));
    return core.models().weights().Read(*model, layer, head, weights);
  });
  impl_->LetOthersIn();
  return status;
}

absl::Status Engine::ReadProjected(const HeldWeights& held, kernels::ProjectedPart part,
                                   int32_t layer, int32_t head, std::span<std::byte> weights) {
  const absl::Status status = impl_->WithRole([&](EngineCore& core) -> absl::Status {
    MLA_ASSIGN_OR_RETURN(const Model* const model, FindHeld(core, held));
    return core.models().weights().ReadProjected(*model, part, layer, head, weights);
  });
  impl_->LetOthersIn();
  return status;
}

absl::StatusOr<SequenceInfo> Engine::OpenSequence(const OpenArgs& args) {
  PrefixPlan prefix;
  if (!args.prefix.empty()) {
    prefix.spec = FindModel(args.tenant, args.model_id);
    if (prefix.spec != nullptr) {
      MLA_RETURN_IF_ERROR(impl_->prefixes_.Fill(args.tenant, args.prefix, 0, 0, &prefix));
    }
  }
  MLA_RETURN_IF_ERROR(impl_->AwaitTiers(prefix, args.most_wait_ms, [&](EngineCore& core) {
    return core.sequences().RestoreForOpen(args, prefix);
  }));
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().Open(args, prefix); });
}

absl::StatusOr<SequenceInfo> Engine::MatchSequence(const MatchArgs& args) {
  int64_t committed = 0;
  MLA_ASSIGN_OR_RETURN(PrefixPlan plan, impl_->WithRole([&](EngineCore& core) {
    return core.sequences().PlanMatch(args, &committed);
  }));
  MLA_RETURN_IF_ERROR(
      impl_->prefixes_.Fill(args.tenant, args.prefix, args.first_row, committed, &plan));
  MLA_RETURN_IF_ERROR(impl_->AwaitTiers(plan, args.most_wait_ms, [&](EngineCore& core) {
    return core.sequences().RestoreForMatch(args, plan);
  }));
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().Match(args, plan); });
}

absl::StatusOr<ProbeAnswer> Engine::Probe(const std::string& tenant, const std::string& model_id,
                                          const PrefixArgs& prefix) {
  const EngineCore& core = impl_->AnyThread();
  ProbeAnswer answer;
  const std::shared_ptr<const ModelSpec> spec = FindModel(tenant, model_id);
  if (spec != nullptr) {
    MLA_RETURN_IF_ERROR(impl_->prefixes_.CountHeld(tenant, *spec, prefix,
                                                   core.cache().prefixes().directory(), &answer));
  } else if (!model_id.empty()) {
    return MakeError(absl::StatusCode::kNotFound,
                     absl::StrCat("model ", model_id, " is not registered"),
                     {.field = "model_id",
                      .got = model_id,
                      .limit = "a registered model of this tenant",
                      .reason = "model_not_found"});
  }
  core.load().Fill(&answer);
  const TenantTable& tenants = *core.shared_tenants();
  answer.sequences = static_cast<int32_t>(tenants.server_used(Resource::kSequences));
  answer.queued_requests = core.answers().owned();
  if (answer.queued_requests == 0) answer.wait_ns = 0;
  answer.kv_bytes_free =
      std::min(answer.kv_bytes_free, tenants.Usage(tenant).bound[Resource::kKvBytes]);
  return answer;
}

absl::StatusOr<HintAnswer> Engine::Hint(const HintArgs& args) {
  PrefixPlan prefix;
  if (args.id == 0) {
    prefix.spec = FindModel(args.tenant, args.model_id);
    if (prefix.spec != nullptr) {
      MLA_RETURN_IF_ERROR(impl_->prefixes_.Fill(args.tenant, args.prefix, 0, 0, &prefix));
    }
  }
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().Hint(args, prefix); });
}

absl::StatusOr<SequenceInfo> Engine::ForkSequence(const ForkArgs& args) {
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().Fork(args); });
}

absl::StatusOr<MovingPages> Engine::BeginExport(const ExportArgs& args) {
  return impl_->WithRole([&](EngineCore& core) { return core.transfers().BeginExport(args); });
}

absl::StatusOr<MovingPages> Engine::BeginImport(const ImportArgs& args) {
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().BeginImport(args); });
}

absl::Status Engine::StartMove(PageMove* move) {
  return impl_->WithRole([&](EngineCore& core) { return core.transfers().Start(move); });
}

absl::Status Engine::MovePart(PageMove* move) {
  MoveAnswer answer;
  move->done = [&answer](const absl::Status& status) { answer.Set(status); };
  const absl::Status status = StartMove(move);
  return status.ok() ? answer.Wait() : status;
}

absl::StatusOr<SequenceInfo> Engine::EndImport(const std::string& tenant, SequenceId id,
                                               int64_t not_finite_from, const SequenceState* state,
                                               SequenceTail tail) {
  return impl_->WithRole([&](EngineCore& core) {
    return core.transfers().EndImport(tenant, id, not_finite_from, state, std::move(tail));
  });
}

void Engine::AbortImport(const std::string& tenant, const MovingPages& pages) {
  impl_->WithRole([&](EngineCore& core) { core.transfers().AbortImport(tenant, pages); });
}

absl::StatusOr<SequenceInfo> Engine::TruncateSequence(const std::string& tenant, SequenceId id,
                                                      int64_t length, uint64_t expected_epoch) {
  return impl_->WithRole([&](EngineCore& core) {
    return core.sequences().Truncate(tenant, id, length, expected_epoch);
  });
}

SequenceList Engine::GetSequences(const SequenceSelection& selection, const SequencePage& page) {
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().Get(selection, page); });
}

absl::StatusOr<std::shared_ptr<Tail>> Engine::MakeTail(const TenantRef& tenant, int64_t bytes,
                                                       const char* field) {
  TenantTable* const table = tenants().get();
  MLA_RETURN_IF_ERROR(table->Take(*tenant, Resource::kTailBytes, bytes, field));
  return std::make_shared<Tail>(static_cast<size_t>(bytes),
                                TenantUse(table, tenant, Resource::kTailBytes, bytes));
}

absl::StatusOr<SequenceTail> Engine::ReadTail(const std::string& tenant, SequenceId id,
                                              uint64_t expected_epoch) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.sequences().ReadTail(tenant, id, expected_epoch); });
}

int32_t Engine::ReleaseSequences(const std::string& tenant, std::span<const SequenceId> ids,
                                 std::vector<SequenceId>* not_found) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.sequences().Release(tenant, ids, not_found); });
}

int32_t Engine::RenewLeases(const SequenceSelection& selection, int64_t lease_ms,
                            std::vector<SequenceId>* not_found) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.sequences().Renew(selection, lease_ms, not_found); });
}

EngineStats Engine::Stats() {
  return impl_->WithRole([](EngineCore& core) { return core.Stats(); });
}

const std::shared_ptr<TenantTable>& Engine::tenants() const {
  return impl_->AnyThread().shared_tenants();
}

const std::shared_ptr<kvcache::EventLog>& Engine::events() const {
  return impl_->AnyThread().events();
}

int32_t Engine::EvictSequences(const SequenceSelection& selection,
                               std::vector<SequenceId>* not_found) {
  return impl_->WithRole(
      [&](EngineCore& core) { return core.sequences().Evict(selection, not_found); });
}

absl::StatusOr<int32_t> Engine::EvictModel(const std::string& tenant, const std::string& id) {
  return impl_->WithRole([&](EngineCore& core) { return core.sequences().EvictModel(tenant, id); });
}

const kernels::BackendInfo& Engine::backend_info() const { return impl_->info_; }

void Engine::SetDefaultLeases(const DefaultLeases& leases) {
  impl_->WithRole([&](EngineCore& core) { core.SetDefaultLeases(leases); });
}

const Limits& Engine::limits() const { return impl_->options_.limits; }

absl::Status Engine::Healthy() {
  return impl_->WithRole([](EngineCore& core) { return core.backend().Healthy(); });
}

std::string Engine::StuckCall() const { return impl_->AnyThread().backend().StuckCall(); }

absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> Engine::AllocateHost(size_t bytes) {
  return impl_->WithRole([&](EngineCore& core) { return core.backend().AllocateHost(bytes); });
}

absl::Status Engine::RegisterHost(std::span<std::byte> memory) {
  // This call does not take the role, because it takes a while.
  return impl_->AnyThread().backend().RegisterHost(memory);
}

void Engine::UnregisterHost(std::span<std::byte> memory) {
  impl_->AnyThread().backend().UnregisterHost(memory);
}

absl::StatusOr<std::unique_ptr<kernels::SharedDeviceMemory>> Engine::AllocateShared(
    int64_t bytes, int32_t events) {
  return impl_->AnyThread().backend().AllocateShared(bytes, events);
}

void Engine::StartDrain(const std::string& peer) {
  impl_->WithRole([&](EngineCore& core) { core.draining().Start(peer); });
}

void Engine::CancelDrain() {
  impl_->WithRole([](EngineCore& core) { core.draining().Cancel(); });
}

std::vector<SequenceInfo> Engine::AllSequences() {
  return impl_->WithRole([](EngineCore& core) { return core.transfers().AllSequences(); });
}

absl::Status Engine::EndHandOver(const SequenceInfo& sequence, const std::string& peer) {
  return impl_->WithRole([&](EngineCore& core) {
    return core.draining().on() ? core.transfers().EndHandOver(sequence, peer)
                                : absl::AbortedError("the server does not drain");
  });
}

int32_t Engine::AbortAllSteps() {
  const int32_t aborted = impl_->WithRole(
      [](EngineCore& core) { return core.steps().AbortAll("the server aborts all open steps"); });
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

EngineBytes Engine::CountBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const kernels::BackendLimits sizes = BackendLimitsOf(limits, backend);
  EngineBytes bytes;
  bytes.host = LaunchHostBytes(limits, backend) + backend.HostWorkspaceSize(sizes);
  if (limits.host_tier_bytes > 0) bytes.host += limits.host_tier_bytes + kvcache::kTierBlock;
  bytes.host += limits.tail_bytes;
  (backend.Info().unified_memory ? bytes.host : bytes.device) += backend.WorkspaceSize(sizes);
  return bytes;
}

int64_t Engine::KvCacheBytes(const Limits& limits, const kernels::AttentionBackend& backend) {
  const int64_t memory = backend.Info().memory_bytes;
  if (memory <= 0) return Limits().kv_cache_bytes;
  // Some workspaces grow with the pool, so they are counted for the largest pool possible.
  Limits most = limits;
  most.kv_cache_bytes = std::min(memory, kMostKvCacheBytes);
  const int64_t rest = backend.WorkspaceSize(BackendLimitsOf(most, backend)) - most.kv_cache_bytes;
  return std::clamp((memory - rest) / kKvCacheStep * kKvCacheStep, kKvCacheStep, kMostKvCacheBytes);
}

}  // namespace mla::scheduler
