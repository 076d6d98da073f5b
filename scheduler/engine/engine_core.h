// The engine without threads: it holds all scheduler and cache state, and the parts that change it,
// in a form that one thread can step by hand. Engine (engine.h) adds the inbox, the role and the
// dedicated thread.
//
// EngineCore makes the parts and connects them. StepMachine has streams, steps and launches
// (scheduler/steps), SequenceControl the calls about sequences, RowTransfers exports and imports,
// and AnswerCollector the answers.
//
// Threading: one thread at a time; asserted by the caller (Engine holds the role).
#ifndef MLA_SCHEDULER_ENGINE_ENGINE_CORE_H_
#define MLA_SCHEDULER_ENGINE_ENGINE_CORE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/engine/row_transfers.h"
#include "scheduler/engine/sequence_control.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/launching/launcher.h"
#include "scheduler/moves/cache_hints.h"
#include "scheduler/moves/page_mover.h"
#include "scheduler/moves/tier_moves.h"
#include "scheduler/steps/answers.h"
#include "scheduler/steps/drain_state.h"
#include "scheduler/steps/engine_load.h"
#include "scheduler/steps/step_machine.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tables/step_opener.h"
#include "scheduler/tables/step_table.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class EngineCore final {
 public:
  // `ids` yields sequence ids.
  static absl::StatusOr<std::unique_ptr<EngineCore>> Create(
      const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
      const Clock* clock, std::function<uint64_t()> ids);
  ~EngineCore();

  // --- The parts.
  StepMachine& steps() { return *step_machine_; }
  Launches& launches() { return step_machine_->launches(); }
  SequenceControl& sequences() { return *sequence_control_; }
  ModelTable& models() { return *models_; }
  RowTransfers& transfers() { return *transfers_; }
  DrainState& draining() { return *draining_; }
  AnswerCollector& answers() { return answers_; }
  const AnswerCollector& answers() const { return answers_; }
  TierMoves* tiers() { return tiers_.get(); }  // null: no slower tiers
  std::span<std::byte> tier_memory() { return tier_memory_->bytes(); }
  kernels::AttentionBackend& backend() { return *backend_; }
  const kvcache::KvCache& cache() const { return *cache_; }
  std::span<uint32_t> page_tables();
  const Limits& limits() const { return limits_; }
  TenantTable& tenants() { return tenants_; }
  TenantKey FindTenant(const std::string& name) const { return tenants_.Find(name); }
  // Shared, because transports may return staged bytes after the engine is gone.
  const std::shared_ptr<TenantTable>& shared_tenants() const { return tenant_table_; }
  const std::shared_ptr<kvcache::EventLog>& events() const { return events_; }

  // --- What concerns several of them.
  EngineStats Stats() const;
  void SetDefaultLeases(const DefaultLeases& leases) {
    sequences_->set_default_lease_ms(leases.sequence_ms);
    models_->set_default_lease_ms(leases.model_ms);
    opener_->set_default_lease_ms(leases.step_ms);
  }
  // Answers all moves that wait.
  void FailMoves(const std::string& why);
  // Any thread may read it. NoteLoad brings it up to date; only the engine role may call that.
  const EngineLoad& load() const { return load_; }
  void NoteLoad() {
    const kvcache::SlabPoolStats& pool = cache_->pool().stats();
    load_.NotePool(pool.bytes_total, pool.bytes_total - cache_->bytes_used(), pool.bytes_cached);
  }

 private:
  EngineCore(const EngineOptions& options, std::unique_ptr<kernels::AttentionBackend> backend,
             const Clock* clock);
  absl::Status MakeCache();
  absl::Status MakeTiers();
  void MakeTables(std::function<uint64_t()> ids);
  absl::Status MakeLauncher();

  // Each part refers to parts before it.
  const EngineOptions options_;
  const Limits& limits_;
  const Clock* const clock_;
  std::unique_ptr<kernels::AttentionBackend> backend_;
  std::unique_ptr<kernels::HostBuffer> page_tables_;  // for all sequences; written by the cache
  std::unique_ptr<kernels::HostBuffer> tier_memory_;  // null: no slower tiers
  const std::shared_ptr<kvcache::EventLog> events_;   // readers may outlive the engine
  std::unique_ptr<kvcache::KvCache> cache_;
  const std::shared_ptr<TenantTable> tenant_table_;
  TenantTable& tenants_;
  EngineLoad load_;
  EngineStats stats_;
  AnswerCollector answers_;
  std::unique_ptr<ModelTable> models_;
  std::unique_ptr<SequenceTable> sequences_;
  std::unique_ptr<DrainState> draining_;
  std::unique_ptr<StepTable> steps_;
  std::unique_ptr<StepOpener> opener_;
  std::unique_ptr<PageMover> mover_;
  std::unique_ptr<TierMoves> tiers_;  // null: no slower tiers
  std::unique_ptr<CacheHints> hints_;
  std::unique_ptr<RowTransfers> transfers_;
  std::unique_ptr<Launcher> launcher_;
  std::unique_ptr<StepMachine> step_machine_;
  std::unique_ptr<SequenceControl> sequence_control_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_ENGINE_CORE_H_
