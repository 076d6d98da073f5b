#include "scheduler/engine/engine_core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "scheduler/engine/cache_stats.h"
#include "scheduler/kvcache/prefix/random_ids.h"
#include "scheduler/launching/launch_sizes.h"

namespace mla::scheduler {
namespace {

// Tenant options with the server-wide bounds taken from the engine's limits.
TenantTableOptions TenantOptionsOf(const EngineOptions& options) {
  const Limits& limits = options.limits;
  TenantTableOptions tenants = options.tenants;
  tenants.max_tenants = limits.max_tenants;
  tenants.server_bounds[Resource::kKvBytes] = limits.kv_cache_bytes;
  tenants.server_bounds[Resource::kKvSlabBytes] = limits.kv_cache_bytes;
  tenants.server_bounds[Resource::kSequences] = limits.max_sequences;
  tenants.server_bounds[Resource::kModels] = limits.max_models;
  tenants.server_bounds[Resource::kWeightBytes] = limits.weights_bytes;
  tenants.server_bounds[Resource::kOpenSteps] = limits.max_open_steps;
  tenants.server_bounds[Resource::kQueuedRequests] = limits.queue_requests;
  tenants.server_bounds[Resource::kPrefixTokens] = limits.prefix_tokens;
  tenants.server_bounds[Resource::kTailBytes] = limits.tail_bytes;
  return tenants;
}

absl::Status ModelChanged(const std::string& model_id) {
  return MakeError(absl::StatusCode::kAborted,
                   absl::StrCat("model ", model_id, " was registered while the call ran"),
                   {.field = "model_id",
                    .got = model_id,
                    .limit = "a model that stays while the call runs",
                    .reason = "changed_meanwhile"});
}

}  // namespace

EngineCore::EngineCore(const EngineOptions& options,
                       std::unique_ptr<kernels::AttentionBackend> backend, const Clock* clock)
    : options_(options),
      limits_(options_.limits),
      clock_(clock),
      backend_(std::move(backend)),
      events_(std::make_shared<kvcache::EventLog>(kvcache::RandomId())),
      tenant_table_(std::make_shared<TenantTable>(TenantOptionsOf(options))),
      tenants_(*tenant_table_),
      policy_(options.limits, GatherBytes(options.limits, *backend_),
              PieceBudgetOf(options.limits, *backend_)) {
  policy_.ExpectRate(backend_->Info().nanos_per_kv_byte);
  // Staging copies can merge rows at no extra cost.
  if (!backend_->Info().unified_memory) policy_.FormRuns();
}

// Running launches write into memory that is freed here, so wait for them.
EngineCore::~EngineCore() {
  while (launcher_ != nullptr && CompleteLaunch(/*wait=*/true)) {
  }
}

std::span<uint32_t> EngineCore::page_tables() {
  const std::span<std::byte> bytes = page_tables_->bytes();
  return {reinterpret_cast<uint32_t*>(bytes.data()), bytes.size() / sizeof(uint32_t)};
}

absl::StatusOr<std::unique_ptr<EngineCore>> EngineCore::Create(
    const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
    const Clock* clock, std::function<uint64_t()> ids) {
  absl::Status status = CheckLimits(options.limits);
  if (!status.ok()) return status;
  std::unique_ptr<EngineCore> core(new EngineCore(options, std::move(backend), clock));
  status = core->backend_->Configure(BackendLimitsOf(options.limits, *core->backend_));
  if (!status.ok()) return status;

  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> tables = core->backend_->AllocateHost(
      static_cast<size_t>(PageTableEntries(options.limits)) * sizeof(uint32_t));
  if (!tables.ok()) return tables.status();
  core->page_tables_ = *std::move(tables);

  kvcache::KvCacheOptions cache;
  cache.bytes = options.limits.kv_cache_bytes;
  cache.max_sequences = options.limits.max_sequences;
  cache.max_pages_per_sequence = options.limits.max_pages_per_sequence;
  absl::StatusOr<std::unique_ptr<kvcache::KvCache>> made =
      kvcache::KvCache::Create(cache, core->page_tables());
  if (!made.ok()) return made.status();
  core->cache_ = *std::move(made);
  core->cache_->set_events(core->events_.get());

  core->mover_ = std::make_unique<PageMover>(core->cache_.get());
  if (status = core->MakeTiers(); !status.ok()) return status;
  core->hints_ =
      std::make_unique<CacheHints>(core->limits_, core->cache_.get(), core->tiers_.get(), clock);
  core->models_ = std::make_unique<ModelTable>(options.limits, core->backend_.get(),
                                               core->cache_.get(), &core->tenants_, clock);
  core->sequences_ =
      std::make_unique<SequenceTable>(options.limits, core->cache_.get(), core->models_.get(),
                                      &core->tenants_, clock, std::move(ids));
  if (EngineObserver* const observer = options.observer; observer != nullptr) {
    core->sequences_->set_observer(observer);
    core->cache_->WatchLifetimes([clock] { return clock->Now(); },
                                 [observer](int64_t ns) { observer->OnPageGroupFreed(ns); });
  }
  core->steps_ = std::make_unique<StepTable>(options.limits, &core->tenants_);
  core->opener_ = std::make_unique<StepOpener>(
      core->limits_, core->backend_.get(), core->cache_.get(), &core->tenants_, core->models_.get(),
      core->sequences_.get(), core->steps_.get());
  core->transfers_ = std::make_unique<RowTransfers>(
      core->limits_, core->backend_->Info().fp8,
      RowTransfers::Parts{&core->tenants_, core->models_.get(), core->sequences_.get(),
                          core->opener_.get(), core->cache_.get(), core->mover_.get()});
  absl::StatusOr<std::unique_ptr<Launcher>> launcher =
      Launcher::Create(options.limits, core->backend_.get(), core->cache_.get(),
                       core->page_tables(), core->models_.get(), clock);
  if (!launcher.ok()) return launcher.status();
  core->launcher_ = *std::move(launcher);
  return core;
}

absl::Status EngineCore::MakeTiers() {
  if (limits_.host_tier_bytes == 0) return absl::OkStatus();
  const auto bytes = static_cast<size_t>(limits_.host_tier_bytes + kvcache::kTierBlock);
  absl::StatusOr<std::unique_ptr<kernels::HostBuffer>> memory = backend_->AllocateHost(bytes);
  if (!memory.ok()) return memory.status();
  tier_memory_ = *std::move(memory);
  kvcache::TierStoreOptions options;
  options.memory = tier_memory_->bytes();
  options.host_bytes = limits_.host_tier_bytes;
  options.file_path = options_.tier_path;
  options.file_bytes = limits_.file_tier_bytes;
  options.threads = options_.tier_threads;
  absl::StatusOr<std::unique_ptr<kvcache::TierStore>> store = kvcache::TierStore::Open(options);
  if (!store.ok()) return store.status();
  tiers_ =
      std::make_unique<TierMoves>(limits_, cache_.get(), mover_.get(), clock_, *std::move(store));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<TierWait>> EngineCore::RestoreForOpen(const OpenArgs& args,
                                                                     const PrefixPlan& prefix) {
  const absl::StatusOr<Model*> model = ModelToOpen(args, prefix);
  if (!model.ok()) return model.status();
  const TenantKey tenant = tenants_.Find(args.tenant);
  const absl::StatusOr<Sequence*> repeat = sequences_->CheckOpen(tenant, **model, args, prefix);
  if (!repeat.ok()) return repeat.status();
  return *repeat != nullptr ? nullptr : RestorePrefix(args.tenant, prefix, 0);
}

absl::StatusOr<std::shared_ptr<TierWait>> EngineCore::RestoreForMatch(const MatchArgs& args,
                                                                      const PrefixPlan& prefix) {
  absl::StatusOr<Sequence*> found =
      sequences_->ForMatch(tenants_.Find(args.tenant), args.id, args.expected_epoch);
  if (!found.ok()) return found.status();
  if (absl::Status status = sequences_->CheckMatch(**found, prefix); !status.ok()) return status;
  return RestorePrefix(args.tenant, prefix, prefix.committed);
}

std::shared_ptr<TierWait> EngineCore::RestorePrefix(const std::string& tenant,
                                                    const PrefixPlan& prefix, int64_t first_row) {
  if (tiers_ == nullptr || prefix.chain == nullptr || draining_) return nullptr;
  absl::StatusOr<Model*> model = models_->Find(tenants_.Find(tenant), prefix.spec->id, "model_id");
  if (!model.ok() || (*model)->spec != prefix.spec) return nullptr;
  int64_t most = limits_.max_sequence_rows;
  if (prefix.max_rows > 0) most = std::min(most, prefix.max_rows);
  return tiers_->Restore((*model)->contents->layout_id, *prefix.chain, first_row, most);
}

StreamId EngineCore::OpenStream(const std::string& tenant,
                                std::shared_ptr<const StreamSteps>* steps) {
  const StreamId id = next_stream_++;
  absl::StatusOr<TenantRef> row = tenants_.Enter(tenant);
  auto open = std::make_shared<StreamSteps>();
  if (steps != nullptr) *steps = open;
  streams_.emplace(id, Stream{tenant, row.ok() ? *row : TenantRef(), std::move(open)});
  return id;
}

absl::Status EngineCore::Admit(StreamRequest* request) {
  Tenant* const tenant = request->tenant;
  if (tenant != nullptr && !tenants_.TryTake(*tenant, Resource::kQueuedRequests, 1)) {
    return tenants_.Refusal(*tenant, Resource::kQueuedRequests, 1, "request");
  }
  // Requests without a tenant have this bound only.
  if (owned_.fetch_add(1) >= limits_.queue_requests) {
    owned_.fetch_sub(1);
    if (tenant != nullptr) tenants_.Return(*tenant, Resource::kQueuedRequests, 1);
    return MakeError(
        absl::StatusCode::kResourceExhausted,
        absl::StrCat("the queue holds ", limits_.queue_requests, " requests, which is its limit"),
        {.reason = "queue_full", .retry_after_ms = RowOf(Resource::kQueuedRequests).retry_ms});
  }
  request->engine.counted = tenant != nullptr;
  return absl::OkStatus();
}

void EngineCore::CloseStream(StreamId stream) {
  bool changed = true;
  while (changed) {
    changed = false;
    for (Step* step : steps_->open()) {
      if (!step->Includes(stream)) continue;
      const bool leader = step->streams[0] == stream;
      AbortStep(step->tenant, step->id,
                absl::CancelledError(leader ? "the stream that began the step has closed"
                                            : "a participant's stream has closed"));
      changed = true;  // The walk starts again, because the list of open steps has changed.
      break;
    }
  }
  streams_.erase(stream);
  models_->StreamClosed(stream);
}

absl::Status EngineCore::DrainingError(bool opens) const {
  // A named sequence is at the peer only after it has moved, but a new one may be opened there.
  const bool moves = !opens && !drain_peer_.empty();
  return MakeError(absl::StatusCode::kUnavailable,
                   moves ? "the server is draining, and its sequences move to another one"
                         : "the server is draining",
                   {.reason = "draining",
                    .retry_after_ms = moves ? kMovingRetryMs : sequences_->default_lease_ms(),
                    .peer = opens ? drain_peer_ : ""});
}

absl::Status EngineCore::RefuseDraining(TenantKey tenant, SequenceId id, const std::string& field) {
  if (sequences_->MovedTo(tenant, id) == nullptr) return DrainingError(/*opens=*/false);
  return sequences_->FindOrRefuse(tenant, id, field).status();
}

absl::StatusOr<Model*> EngineCore::ModelToOpen(const OpenArgs& args, const PrefixPlan& prefix) {
  if (draining_) return DrainingError(/*opens=*/true);
  absl::StatusOr<Model*> model =
      models_->Find(tenants_.Find(args.tenant), args.model_id, "model_id");
  if (!model.ok()) return model.status();
  if (!args.prefix.empty() && prefix.spec != (*model)->spec) return ModelChanged(args.model_id);
  return model;
}

absl::StatusOr<SequenceInfo> EngineCore::OpenSequence(const OpenArgs& args,
                                                      const PrefixPlan& prefix) {
  const absl::StatusOr<Model*> model = ModelToOpen(args, prefix);
  if (!model.ok()) return model.status();
  const TenantKey tenant = tenants_.Find(args.tenant);
  absl::StatusOr<Sequence*> sequence = sequences_->Open(tenant, *model, args, prefix);
  if (!sequence.ok()) return sequence.status();
  return sequences_->Info(**sequence);
}

absl::StatusOr<PrefixPlan> EngineCore::PlanMatch(const MatchArgs& args, int64_t* committed) {
  absl::StatusOr<Sequence*> found =
      sequences_->ForMatch(tenants_.Find(args.tenant), args.id, args.expected_epoch);
  if (!found.ok()) return found.status();
  const Sequence& sequence = **found;
  *committed = cache_->length(sequence.slot);
  PrefixPlan plan;
  plan.spec = sequence.model->spec;
  plan.before = cache_->chain(sequence.slot);
  plan.declared = cache_->declared(sequence.slot);
  plan.committed = *committed;
  return plan;
}

absl::StatusOr<SequenceInfo> EngineCore::MatchSequence(const MatchArgs& args,
                                                       const PrefixPlan& prefix) {
  absl::StatusOr<Sequence*> sequence_or =
      sequences_->ForMatch(tenants_.Find(args.tenant), args.id, args.expected_epoch);
  if (!sequence_or.ok()) return sequence_or.status();
  absl::Status status = sequences_->Match(*sequence_or, prefix);
  if (!status.ok()) return status;
  return sequences_->Info(**sequence_or);
}

absl::StatusOr<HintAnswer> EngineCore::Hint(const HintArgs& args, const PrefixPlan& prefix) {
  const TenantKey tenant = tenants_.Find(args.tenant);
  if (args.id != 0) {
    absl::StatusOr<Sequence*> found = sequences_->FindIdle(tenant, args.id, args.expected_epoch);
    if (!found.ok()) return found.status();
    const Sequence& sequence = **found;
    const auto& chain = cache_->chain(sequence.slot);
    if (chain == nullptr) return HintAnswer{.reason = "absent"};
    const int64_t rows = std::min(cache_->declared(sequence.slot), cache_->length(sequence.slot));
    return hints_->Do(args, sequence.model->contents->layout_id, tenant, *chain, rows);
  }
  absl::StatusOr<Model*> model = models_->Find(tenant, args.model_id, "model_id");
  if (!model.ok()) return model.status();
  if (prefix.spec != (*model)->spec) return ModelChanged(args.model_id);
  int64_t rows = prefix.chain->rows();
  if (prefix.max_rows > 0) rows = std::min(rows, prefix.max_rows);
  return hints_->Do(args, (*model)->contents->layout_id, tenant, *prefix.chain, rows);
}

absl::StatusOr<SequenceInfo> EngineCore::ForkSequence(const ForkArgs& args) {
  if (draining_) return RefuseDraining(tenants_.Find(args.tenant), args.parent, "sequence_id");
  absl::StatusOr<Sequence*> child = sequences_->Fork(tenants_.Find(args.tenant), args);
  if (!child.ok()) return child.status();
  return sequences_->Info(**child);
}

absl::StatusOr<SequenceInfo> EngineCore::TruncateSequence(const std::string& tenant, SequenceId id,
                                                          int64_t length, uint64_t expected_epoch) {
  absl::StatusOr<Sequence*> sequence =
      sequences_->Truncate(tenants_.Find(tenant), id, length, expected_epoch);
  if (!sequence.ok()) return sequence.status();
  return sequences_->Info(**sequence);
}

SequenceList EngineCore::GetSequences(const SequenceSelection& selection) {
  const TenantKey tenant = tenants_.Find(selection.tenant);
  SequenceList list;
  const auto add = [&](const Sequence& sequence) {
    SequenceInfo info = sequences_->Info(sequence);
    if (sequence.step != nullptr) info.open_step = sequence.step->id;
    list.sequences.push_back(std::move(info));
  };
  if (selection.ids.empty()) {
    for (const Sequence* sequence : sequences_->OfTenant(tenant, selection.client_id)) {
      add(*sequence);
    }
  }
  for (const SequenceId id : selection.ids) {
    const Sequence* sequence = sequences_->Find(tenant, id);
    if (sequence == nullptr) {
      list.not_found.push_back(id);
      const std::string* const peer = sequences_->MovedTo(tenant, id);
      if (peer != nullptr) list.moved.emplace_back(id, *peer);
    } else {
      add(*sequence);
    }
  }
  return list;
}

absl::StatusOr<SequenceTail> EngineCore::ReadTail(const std::string& tenant, SequenceId id,
                                                  uint64_t expected_epoch) {
  absl::StatusOr<Sequence*> owner = sequences_->FindIdle(tenants_.Find(tenant), id, expected_epoch);
  if (!owner.ok()) return owner.status();
  if ((*owner)->tail.tail == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, absl::StrCat("sequence ", id, " has no tail"),
                     {.field = "sequence_id",
                      .got = absl::StrCat(id),
                      .limit = "a sequence that a step has left with a tail",
                      .reason = "no_tail",
                      .last_good_position = cache_->length((*owner)->slot)});
  }
  sequences_->Renew(*owner);
  return (*owner)->tail;
}

int32_t EngineCore::ReleaseSequences(const std::string& tenant_name,
                                     std::span<const SequenceId> ids,
                                     std::vector<SequenceId>* not_found) {
  const TenantKey tenant = tenants_.Find(tenant_name);
  int32_t released = 0;
  for (const SequenceId id : ids) {
    Sequence* sequence = sequences_->Find(tenant, id);
    if (sequence == nullptr) {
      not_found->push_back(id);
      continue;
    }
    EvictSequence(sequence, "released");
    ++released;
  }
  return released;
}

void EngineCore::EvictSequence(Sequence* sequence, const char* why) {
  if (sequence->step != nullptr) {
    AbortStep(sequence->tenant, sequence->step->id,
              absl::AbortedError(absl::StrCat("its sequence ", sequence->id, " was ", why)));
  }
  sequences_->Release(sequence);
}

int32_t EngineCore::EvictSequences(const SequenceSelection& selection,
                                   std::vector<SequenceId>* not_found) {
  const TenantKey tenant = tenants_.Find(selection.tenant);
  std::vector<Sequence*> going;
  if (selection.ids.empty() && tenant != kNoTenant) {
    going = sequences_->OfTenant(tenant, selection.client_id);
  }
  for (const SequenceId id : selection.ids) {
    Sequence* const sequence = sequences_->Find(tenant, id);
    if (sequence == nullptr) {
      not_found->push_back(id);
    } else if (std::find(going.begin(), going.end(), sequence) == going.end()) {
      going.push_back(sequence);
    }
  }
  for (Sequence* sequence : going) Preempt(sequence);
  return static_cast<int32_t>(going.size());
}

void EngineCore::Preempt(Sequence* sequence) {
  if (!sequence->exports) cache_->Note(sequence->slot, kvcache::EventKind::kPreempted);
  EvictSequence(sequence, "evicted by an operator");
}

absl::StatusOr<int32_t> EngineCore::EvictModel(const std::string& tenant, const std::string& id) {
  const TenantKey key = tenants_.Find(tenant);
  absl::StatusOr<Model*> model = models_->Find(key, id, "model_id");
  if (!model.ok()) return model.status();
  const std::vector<Sequence*> going = sequences_->OfModel(**model);
  for (Sequence* sequence : going) Preempt(sequence);
  absl::Status status = models_->Unregister(key, id);
  if (!status.ok()) return status;
  return static_cast<int32_t>(going.size());
}

absl::StatusOr<MovingPages> EngineCore::BeginImport(const ImportArgs& args) {
  if (draining_ && args.id == 0) return DrainingError(/*opens=*/true);
  if (draining_) return RefuseDraining(tenants_.Find(args.tenant), args.id, "target.sequence_id");
  return transfers_->BeginImport(args);
}

void EngineCore::FailMoves(const std::string& why) {
  mover_->Fail(MakeError(absl::StatusCode::kUnavailable, why, {.reason = "stopped"}));
}

int32_t EngineCore::RenewLeases(const SequenceSelection& selection, int64_t lease_ms,
                                std::vector<SequenceId>* not_found) {
  const TenantKey tenant = tenants_.Find(selection.tenant);
  int32_t renewed = 0;
  if (selection.ids.empty()) {
    for (Sequence* sequence : sequences_->OfTenant(tenant, selection.client_id)) {
      sequences_->Renew(sequence, lease_ms);
      ++renewed;
    }
  }
  for (const SequenceId id : selection.ids) {
    Sequence* sequence = sequences_->Find(tenant, id);
    if (sequence == nullptr) {
      not_found->push_back(id);
      continue;
    }
    sequences_->Renew(sequence, lease_ms);
    ++renewed;
  }
  return renewed;
}

int32_t EngineCore::AbortAllSteps(const std::string& why) {
  int32_t aborted = 0;
  while (!steps_->open().empty()) {
    Step* step = steps_->open().front();
    AbortStep(step->tenant, step->id, absl::AbortedError(why));
    ++aborted;
  }
  return aborted;
}

EngineStats EngineCore::Stats() const {
  EngineStats stats = stats_;
  stats.sequences = sequences_->size();
  stats.open_steps = static_cast<int32_t>(steps_->open().size());
  stats.models = models_->size();
  stats.models_expired += models_->yielded();
  stats.streams = static_cast<int32_t>(streams_.size());
  stats.requests_waiting = pending_.size();
  const MonotonicNanos now = clock_->Now();
  for (const StreamRequest* request = pending_.front(); request != nullptr;
       request = WaitingRequests::Next(request)) {
    const size_t stage = BatchPolicy::Ready(*request)
                             ? static_cast<size_t>(policy_.StageOf(*request))
                             : stats.oldest_waiting_ns.size() - 1;
    int64_t& oldest = stats.oldest_waiting_ns[stage];
    oldest = std::max(oldest, now - request->engine.arrival_ns);
  }
  stats.plan_hits = launcher_->plan_stats().hits;
  stats.plan_misses = launcher_->plan_stats().misses;
  AddCacheStats(*cache_, &stats);
  if (tiers_ != nullptr) stats.tiers = tiers_->stats();
  stats.host_work = backend_->Work();
  for (const Step* step : steps_->open()) stats.requests_running += step->inflight;
  return stats;
}

}  // namespace mla::scheduler
