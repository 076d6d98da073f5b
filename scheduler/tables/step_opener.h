// Checks of BeginStep, before a step of it is open: the model, its sequences as the client knows
// them, and pages for all rows of all layers.
//
// Ownership: borrows the tables and the cache, which must outlive it. Threading: used with the
// engine role held. Errors: as the documentation of BeginStepReply says. A call that fails has
// changed nothing.
#ifndef MLA_SCHEDULER_TABLES_STEP_OPENER_H_
#define MLA_SCHEDULER_TABLES_STEP_OPENER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/limits.h"
#include "scheduler/request.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/sequence_table.h"
#include "scheduler/tables/step_table.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

class StepOpener final {
 public:
  StepOpener(const Limits& limits, const kernels::AttentionBackend* backend,
             kvcache::KvCache* cache, TenantTable* tenants, ModelTable* models,
             SequenceTable* sequences, StepTable* steps)
      : limits_(limits),
        backend_(backend),
        cache_(cache),
        tenants_(tenants),
        models_(models),
        sequences_(sequences),
        steps_(steps),
        default_lease_ms_(limits.step_lease_ms) {}

  // Sets the lease of steps whose client asks for none, for steps that begin from now on.
  void set_default_lease_ms(int64_t lease_ms) { default_lease_ms_ = lease_ms; }

  // Opens the step that `request` begins: it is listed as open, its pages are reserved and its
  // sequences are bound to it. The stream of the request is its first. REQUIRES: the tenant does
  // not have an open step with that id, and request.begin.participants >= 1.
  absl::StatusOr<Step*> Open(TenantKey tenant, const StreamRequest& request);

  // Reserves pages for all these rows, or for none. `field` is the field that a refusal names.
  absl::Status ReservePages(const std::vector<StepEntry>& entries, const Model& model,
                            const char* field);

 private:
  absl::Status CheckBegin(TenantKey tenant, const BeginStepArgs& args, Model** model);
  absl::Status CheckBeginSequence(TenantKey tenant, const Model& model,
                                  const StepSequenceArgs& args, size_t index);
  // Checks that a step's arguments continue the sequence, which has `length` rows: the same model
  // and epoch, in no other step, and beginning at `length`. `index` is for the path of the error.
  absl::Status CheckContinues(const Sequence& sequence, int64_t length, const Model& model,
                              const StepSequenceArgs& args, size_t index) const;
  absl::Status RefusePages(const std::vector<StepEntry>& entries, const Model& model,
                           const char* field, std::optional<Resource> refused,
                           const absl::Status& status);

  const Limits& limits_;
  const kernels::AttentionBackend* const backend_;
  kvcache::KvCache* const cache_;
  TenantTable* const tenants_;
  ModelTable* const models_;
  SequenceTable* const sequences_;
  StepTable* const steps_;
  int64_t default_lease_ms_;
  std::vector<kvcache::StepRows> step_rows_;  // scratch of ReservePages
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_STEP_OPENER_H_
