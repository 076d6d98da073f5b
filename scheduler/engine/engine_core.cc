#include "scheduler/engine/engine_core.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "scheduler/launching/launch_sizes.h"

namespace mla::scheduler {
namespace {

// Returns the tenant options, with the server-wide bounds taken from the engine's limits.
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

// Sets every figure of `stats` that is about pages, their bytes or the prefix cache. The figures of
// slower tiers stay as they are.
void AddCacheStats(const kvcache::KvCache& cache, EngineStats* stats) {
  const kvcache::KvCacheStats figures = cache.stats();
  stats->kv_bytes_total = figures.bytes_total;
  stats->kv_bytes_used = figures.bytes_used;
  stats->page_groups_used = figures.groups_used;
  stats->page_groups_free = figures.groups_free;
  stats->page_groups_shared = figures.groups_shared;
  stats->page_groups_pinned = figures.groups_pinned;
  stats->kv_bytes_pinned = figures.bytes_pinned;
  stats->page_groups_taken = figures.allocations;
  const auto freed = [&figures](kvcache::Freed why) {
    return figures.freed[static_cast<size_t>(why)];
  };
  stats->page_groups_released = freed(kvcache::Freed::kReleased);
  stats->page_groups_expired = freed(kvcache::Freed::kExpired);
  stats->page_groups_truncated = freed(kvcache::Freed::kTruncated);
  stats->page_groups_uncommitted = freed(kvcache::Freed::kUncommitted);
  stats->page_groups_evicted = freed(kvcache::Freed::kEvicted);
  stats->page_groups_cached = figures.groups_cached;
  stats->kv_bytes_cached = figures.bytes_cached;
  stats->page_groups_kept = cache.prefixes().pinned_groups();
  stats->kv_bytes_kept = cache.prefixes().pinned_bytes();
  stats->prefix = cache.prefix_stats();
  stats->copies_on_write = figures.copies_on_write;
  stats->kv_bytes_copied = figures.bytes_copied;
  stats->page_groups_scrubbed = figures.scrubs;
}

}  // namespace

EngineCore::EngineCore(const EngineOptions& options,
                       std::unique_ptr<kernels::AttentionBackend> backend, const Clock* clock)
    : options_(options),
      limits_(options_.limits),
      clock_(clock),
      backend_(std::move(backend)),
      events_(std::make_shared<kvcache::EventLog>(RandomNumber())),
      tenant_table_(std::make_shared<TenantTable>(TenantOptionsOf(options))),
      tenants_(*tenant_table_),
      answers_(limits_, &tenants_, clock, options_.observer, &stats_) {}

// Running launches write into memory that is freed here, so wait for them.
EngineCore::~EngineCore() {
  while (step_machine_ != nullptr && launches().Complete(/*wait=*/true)) {
  }
}

std::span<uint32_t> EngineCore::page_tables() {
  const std::span<std::byte> bytes = page_tables_->bytes();
  return {reinterpret_cast<uint32_t*>(bytes.data()), bytes.size() / sizeof(uint32_t)};
}

absl::StatusOr<std::unique_ptr<EngineCore>> EngineCore::Create(
    const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
    const Clock* clock, std::function<uint64_t()> ids) {
  MLA_RETURN_IF_ERROR(CheckLimits(options.limits));
  std::unique_ptr<EngineCore> core(new EngineCore(options, std::move(backend), clock));
  MLA_RETURN_IF_ERROR(core->backend_->Configure(BackendLimitsOf(options.limits, *core->backend_)));
  MLA_RETURN_IF_ERROR(core->MakeCache());
  core->mover_ = std::make_unique<PageMover>(core->cache_.get());
  MLA_RETURN_IF_ERROR(core->MakeTiers());
  core->hints_ =
      std::make_unique<CacheHints>(core->limits_, core->cache_.get(), core->tiers_.get(), clock);
  core->MakeTables(std::move(ids));
  MLA_RETURN_IF_ERROR(core->MakeLauncher());
  return core;
}

absl::Status EngineCore::MakeCache() {
  MLA_ASSIGN_OR_RETURN(
      page_tables_,
      backend_->AllocateHost(static_cast<size_t>(PageTableEntries(limits_)) * sizeof(uint32_t)));
  kvcache::KvCacheOptions cache;
  cache.bytes = limits_.kv_cache_bytes;
  cache.max_sequences = limits_.max_sequences;
  cache.max_pages_per_sequence = limits_.max_pages_per_sequence;
  MLA_ASSIGN_OR_RETURN(cache_, kvcache::KvCache::Create(cache, page_tables()));
  cache_->set_events(events_.get());
  return absl::OkStatus();
}

absl::Status EngineCore::MakeTiers() {
  if (limits_.host_tier_bytes == 0) return absl::OkStatus();
  const auto bytes = static_cast<size_t>(limits_.host_tier_bytes + kvcache::kTierBlock);
  MLA_ASSIGN_OR_RETURN(std::unique_ptr<kernels::HostBuffer> memory, backend_->AllocateHost(bytes));
  tier_memory_ = std::move(memory);
  kvcache::TierStoreOptions options;
  options.memory = tier_memory_->bytes();
  options.host_bytes = limits_.host_tier_bytes;
  options.file_path = options_.tier_path;
  options.file_bytes = limits_.file_tier_bytes;
  options.threads = options_.tier_threads;
  MLA_ASSIGN_OR_RETURN(std::unique_ptr<kvcache::TierStore> store,
                       kvcache::TierStore::Open(options));
  tiers_ =
      std::make_unique<TierMoves>(limits_, cache_.get(), mover_.get(), clock_, std::move(store));
  return absl::OkStatus();
}

void EngineCore::MakeTables(std::function<uint64_t()> ids) {
  models_ = std::make_unique<ModelTable>(limits_, backend_.get(), cache_.get(), &tenants_, clock_);
  sequences_ = std::make_unique<SequenceTable>(limits_, cache_.get(), models_.get(), &tenants_,
                                               clock_, std::move(ids));
  if (EngineObserver* const observer = options_.observer; observer != nullptr) {
    sequences_->set_observer(observer);
    cache_->WatchLifetimes([clock = clock_] { return clock->Now(); },
                           [observer](int64_t ns) { observer->OnPageGroupFreed(ns); });
  }
  draining_ = std::make_unique<DrainState>(sequences_.get(), &load_);
  steps_ = std::make_unique<StepTable>(limits_, &tenants_);
  opener_ = std::make_unique<StepOpener>(limits_, backend_.get(), cache_.get(), &tenants_,
                                         models_.get(), sequences_.get(), steps_.get());
  transfers_ = std::make_unique<RowTransfers>(
      limits_, backend_->Info().fp8,
      RowTransfers::Parts{&tenants_, models_.get(), sequences_.get(), opener_.get(), cache_.get(),
                          mover_.get()});
}

absl::Status EngineCore::MakeLauncher() {
  MLA_ASSIGN_OR_RETURN(launcher_, Launcher::Create(limits_, backend_.get(), cache_.get(),
                                                   page_tables(), models_.get(), clock_));
  step_machine_ = std::make_unique<StepMachine>(StepParts{.limits = limits_,
                                                          .clock = clock_,
                                                          .backend = backend_.get(),
                                                          .cache = cache_.get(),
                                                          .tenants = &tenants_,
                                                          .models = models_.get(),
                                                          .sequences = sequences_.get(),
                                                          .steps = steps_.get(),
                                                          .opener = opener_.get(),
                                                          .launcher = launcher_.get(),
                                                          .mover = mover_.get(),
                                                          .tiers = tiers_.get(),
                                                          .hints = hints_.get(),
                                                          .draining = draining_.get(),
                                                          .answers = &answers_,
                                                          .load = &load_,
                                                          .stats = &stats_});
  sequence_control_ = std::make_unique<SequenceControl>(
      limits_, SequenceControl::Parts{.tenants = &tenants_,
                                      .models = models_.get(),
                                      .sequences = sequences_.get(),
                                      .cache = cache_.get(),
                                      .tiers = tiers_.get(),
                                      .hints = hints_.get(),
                                      .transfers = transfers_.get(),
                                      .launches = &step_machine_->launches(),
                                      .draining = draining_.get()});
  return absl::OkStatus();
}

void EngineCore::FailMoves(const std::string& why) {
  mover_->Fail(MakeError(absl::StatusCode::kUnavailable, why, {.reason = "stopped"}));
}

EngineStats EngineCore::Stats() const {
  EngineStats stats = stats_;
  stats.sequences = sequences_->size();
  stats.models = models_->size();
  stats.models_expired += models_->yielded();
  step_machine_->AddStats(&stats);
  AddCacheStats(*cache_, &stats);
  if (tiers_ != nullptr) stats.tiers = tiers_->stats();
  stats.host_work = backend_->Work();
  return stats;
}

}  // namespace mla::scheduler
