#include "scheduler/steps/drain_state.h"

#include "absl/strings/str_cat.h"
#include "base/error.h"

namespace mla::scheduler {

void DrainState::Start(const std::string& peer) {
  on_ = true;
  load_->NoteDraining(true);
  peer_ = peer;
}

void DrainState::Cancel() {
  on_ = false;
  load_->NoteDraining(false);
}

absl::Status DrainState::Error(bool opens) const {
  // A named sequence is at the peer only after it has moved, but a new one may be opened there.
  const bool moves = !opens && !peer_.empty();
  return MakeError(absl::StatusCode::kUnavailable,
                   moves ? "the server is draining, and its sequences move to another one"
                         : "the server is draining",
                   {.reason = "draining",
                    .retry_after_ms = moves ? kMovingRetryMs : sequences_->default_lease_ms(),
                    .peer = opens ? peer_ : ""});
}

absl::Status DrainState::Refuse(TenantKey tenant, SequenceId id, const std::string& field) {
  if (sequences_->MovedTo(tenant, id) == nullptr) return Error(/*opens=*/false);
  return sequences_->FindOrRefuse(tenant, id, field).status();
}

absl::Status DrainState::Refuse(TenantKey tenant, const BeginStepArgs& args) {
  for (size_t i = 0; i < args.sequences.size(); ++i) {
    if (sequences_->MovedTo(tenant, args.sequences[i].id) == nullptr) continue;
    return Refuse(tenant, args.sequences[i].id,
                  absl::StrCat("begin_step.sequences[", i, "].sequence_id"));
  }
  return Error(/*opens=*/false);
}

}  // namespace mla::scheduler
