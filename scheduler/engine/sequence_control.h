// Carries out the calls about sequences: it opens, matches, forks, cuts, lists, releases and evicts
// them, and renews their leases. It finds the sequences that a call names, checks that a drain
// allows the call, and calls the tables.
//
// Threading: the engine role.
#ifndef MLA_SCHEDULER_ENGINE_SEQUENCE_CONTROL_H_
#define MLA_SCHEDULER_ENGINE_SEQUENCE_CONTROL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "scheduler/engine/row_transfers.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
#include "scheduler/moves/cache_hints.h"
#include "scheduler/moves/tier_moves.h"
#include "scheduler/steps/drain_state.h"
#include "scheduler/steps/launches.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class SequenceControl final {
 public:
  // All outlive it; `tiers` null: no slower tiers.
  struct Parts {
    TenantTable* tenants;
    ModelTable* models;
    SequenceTable* sequences;
    kvcache::KvCache* cache;
    TierMoves* tiers;
    CacheHints* hints;
    RowTransfers* transfers;
    Launches* launches;
    DrainState* draining;
  };
  SequenceControl(const Limits& limits, const Parts& parts)
      : limits_(limits),
        tenants_(parts.tenants),
        models_(parts.models),
        sequences_(parts.sequences),
        cache_(parts.cache),
        tiers_(parts.tiers),
        hints_(parts.hints),
        transfers_(parts.transfers),
        launches_(parts.launches),
        draining_(parts.draining) {}

  // --- As the calls of Engine (engine.h). A prefix plan is the plan for the prefix of `args`.
  absl::StatusOr<SequenceInfo> Open(const OpenArgs& args, const PrefixPlan& prefix = {});
  // Makes a plan for the sequence as it is now; the caller fills it without the role.
  absl::StatusOr<PrefixPlan> PlanMatch(const MatchArgs& args, int64_t* committed) const;
  // Returns ABORTED if the sequence has changed since the plan was made.
  absl::StatusOr<SequenceInfo> Match(const MatchArgs& args, const PrefixPlan& prefix);
  absl::StatusOr<SequenceInfo> Fork(const ForkArgs& args);
  absl::StatusOr<SequenceInfo> Truncate(const std::string& tenant, SequenceId id, int64_t length,
                                        uint64_t expected_epoch);
  SequenceList Get(const SequenceSelection& selection, const SequencePage& page = {}) const;
  absl::StatusOr<SequenceTail> ReadTail(const std::string& tenant, SequenceId id,
                                        uint64_t expected_epoch);
  int32_t Release(const std::string& tenant, std::span<const SequenceId> ids,
                  std::vector<SequenceId>* not_found);
  // `prefix` is the plan for args.prefix, if args.prefix names the rows.
  absl::StatusOr<HintAnswer> Hint(const HintArgs& args, const PrefixPlan& prefix);
  int32_t Renew(const SequenceSelection& selection, int64_t lease_ms,
                std::vector<SequenceId>* not_found);
  int32_t Evict(const SequenceSelection& selection, std::vector<SequenceId>* not_found);
  absl::StatusOr<int32_t> EvictModel(const std::string& tenant, const std::string& id);
  // As RowTransfers::BeginImport, but refuses while the server drains.
  absl::StatusOr<MovingPages> BeginImport(const ImportArgs& args);

  // --- Slower tiers. Bring back the call's rows that are there. Return an error instead if the
  // call would be refused. Return null if there is nothing to wait for.
  absl::StatusOr<std::shared_ptr<TierWait>> RestoreForOpen(const OpenArgs& args,
                                                           const PrefixPlan& prefix);
  absl::StatusOr<std::shared_ptr<TierWait>> RestoreForMatch(const MatchArgs& args,
                                                            const PrefixPlan& prefix);
  // Does what RestoreForMatch does, for the plan's rows from `first_row` on.
  std::shared_ptr<TierWait> RestorePrefix(const std::string& tenant, const PrefixPlan& prefix,
                                          int64_t first_row);

 private:
  // Returns the model of a sequence that may be opened now, or the error.
  absl::StatusOr<Model*> ModelToOpen(const OpenArgs& args, const PrefixPlan& prefix);
  // Aborts the sequence's open step, then releases it.
  void End(Sequence* sequence, const char* why);
  void Preempt(Sequence* sequence);

  const Limits& limits_;
  TenantTable* const tenants_;
  ModelTable* const models_;
  SequenceTable* const sequences_;
  kvcache::KvCache* const cache_;
  TierMoves* const tiers_;
  CacheHints* const hints_;
  RowTransfers* const transfers_;
  Launches* const launches_;
  DrainState* const draining_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_SEQUENCE_CONTROL_H_
