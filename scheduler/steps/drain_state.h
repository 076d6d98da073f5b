// The state of the engine's drain, and the errors of calls that a drain refuses.
//
// Threading: the engine role.
#ifndef MLA_SCHEDULER_STEPS_DRAIN_STATE_H_
#define MLA_SCHEDULER_STEPS_DRAIN_STATE_H_

#include <string>

#include "absl/status/status.h"
#include "scheduler/request.h"
#include "scheduler/steps/engine_load.h"
#include "scheduler/tables/sequence_table.h"

namespace mla::scheduler {

class DrainState final {
 public:
  // Both outlive it.
  DrainState(SequenceTable* sequences, EngineLoad* load) : sequences_(sequences), load_(load) {}

  // `peer`: the server that takes over the sequences; empty: none.
  void Start(const std::string& peer = "");
  void Cancel();
  bool on() const { return on_; }

  // Returns the error of calls that open a sequence (`opens`), or that name sequences still on this
  // server.
  absl::Status Error(bool opens) const;
  // Reports instead that a named sequence has moved, if one has, because the client can then
  // continue on the other server.
  absl::Status Refuse(TenantKey tenant, SequenceId id, const std::string& field);
  absl::Status Refuse(TenantKey tenant, const BeginStepArgs& args);

 private:
  SequenceTable* const sequences_;
  EngineLoad* const load_;
  bool on_ = false;
  std::string peer_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_STEPS_DRAIN_STATE_H_
