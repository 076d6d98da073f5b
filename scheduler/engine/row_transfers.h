// Exports and imports: chooses the rows of a sequence that move, checks their meaning, and holds
// their pages during the move.
//
// An export holds its rows by means of a fork of the sequence; one in place has no fork and relies
// on the caller to leave the sequence alone. An import reserves the pages of its rows, which are
// committed together when all have come. Launches carry the bytes (PageMover).
//
// Ownership: the objects in `parts` are borrowed. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_ENGINE_ROW_TRANSFERS_H_
#define MLA_SCHEDULER_ENGINE_ROW_TRANSFERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/formats/fp8.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
#include "scheduler/moves/page_mover.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tables/step_opener.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class RowTransfers final {
 public:
  struct Parts {
    const TenantTable* tenants;
    ModelTable* models;
    SequenceTable* sequences;
    StepOpener* opener;
    kvcache::KvCache* cache;
    PageMover* mover;
  };
  // `fp8` is the kind of 8-bit floats in the pool.
  RowTransfers(const Limits& limits, kernels::Fp8Kind fp8, const Parts& parts)
      : limits_(limits),
        fp8_(fp8),
        tenants_(parts.tenants),
        models_(parts.models),
        sequences_(parts.sequences),
        opener_(parts.opener),
        cache_(parts.cache),
        mover_(parts.mover) {}

  // Engine has the same calls and documents them.
  absl::StatusOr<MovingPages> BeginExport(const ExportArgs& args);
  absl::StatusOr<MovingPages> BeginImport(const ImportArgs& args);
  // Starts moving a part. The move is answered later unless this returns an error.
  absl::Status Start(PageMove* move);
  // Commits the reserved rows.
  absl::StatusOr<SequenceInfo> EndImport(const std::string& tenant, SequenceId id,
                                         int64_t not_finite_from,
                                         const SequenceState* state = nullptr,
                                         SequenceTail tail = {});
  void AbortImport(const std::string& tenant, const MovingPages& pages);
  std::vector<SequenceInfo> AllSequences() const;
  absl::Status EndHandOver(const SequenceInfo& sequence, const std::string& peer);

 private:
  absl::Status CheckTags(const Model& model, const PageTags& tags) const;
  absl::StatusOr<Sequence*> ImportTarget(const ImportArgs& args, Model* model);
  absl::Status CheckWindow(const Model& model, const PageTags& tags) const;
  MovingPages Moving(const Sequence& sequence, int64_t first_row, int64_t rows) const;

  const Limits& limits_;
  const kernels::Fp8Kind fp8_;
  const TenantTable* const tenants_;
  ModelTable* const models_;
  SequenceTable* const sequences_;
  StepOpener* const opener_;
  kvcache::KvCache* const cache_;
  PageMover* const mover_;
  // Imports that have not ended, their sequences perhaps gone: no other sequence may get the id
  // until then, or it would get their rows.
  absl::flat_hash_set<SequenceId> importing_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_ENGINE_ROW_TRANSFERS_H_
