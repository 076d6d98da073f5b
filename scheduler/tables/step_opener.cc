#include "scheduler/tables/step_opener.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::scheduler {

absl::Status StepOpener::CheckBeginSequence(TenantKey tenant, const Model& model,
                                            const StepSequenceArgs& args, size_t index) {
  const Sequence* sequence = sequences_->Find(tenant, args.id);
  if (sequence == nullptr) {
    return sequences_
        ->FindOrRefuse(tenant, args.id,
                       absl::StrCat("begin_step.sequences[", index, "].sequence_id"))
        .status();
  }
  const int64_t length = cache_->length(sequence->slot);
  const absl::Status status = CheckContinues(*sequence, length, model, args, index);
  if (status.ok()) return status;
  return AmendDetail(status, [&](ErrorDetail& detail) { detail.last_good_position = length; });
}

absl::Status StepOpener::CheckContinues(const Sequence& sequence, int64_t length,
                                        const Model& model, const StepSequenceArgs& args,
                                        size_t index) const {
  const auto path = [index](const char* field) {
    return absl::StrCat("begin_step.sequences[", index, "].", field);
  };
  if (sequence.model != &model) {
    return RefuseField(path("sequence_id"),
                       absl::StrCat("a sequence of model ", sequence.model->spec->id),
                       absl::StrCat("one of model ", model.spec->id), "wrong_model");
  }
  if (sequence.epoch != args.epoch) {
    return RefuseField(path("epoch"), absl::StrCat(args.epoch), absl::StrCat(sequence.epoch),
                       "epoch_mismatch", absl::StatusCode::kFailedPrecondition);
  }
  if (sequence.step != nullptr) {
    return RefuseField(path("sequence_id"),
                       absl::StrCat("a sequence in open step ", sequence.step->id),
                       "a sequence in no step", "in_step", absl::StatusCode::kFailedPrecondition);
  }
  if (sequence.imports) {
    return RefuseField(path("sequence_id"), "a sequence that rows are imported into",
                       "a sequence in no step", "in_step", absl::StatusCode::kFailedPrecondition);
  }
  if (args.start_position != length) {
    return RefuseField(path("start_position"), absl::StrCat(args.start_position),
                       absl::StrCat(length), "position_mismatch",
                       absl::StatusCode::kFailedPrecondition);
  }
  const int64_t room =
      std::min<int64_t>(limits_.max_sequence_rows, cache_->max_rows(sequence.slot)) - length;
  const int64_t most = std::min<int64_t>(limits_.max_step_rows, room);
  return CheckRange([&] { return path("rows"); }, args.rows, 1, most);
}

absl::Status StepOpener::CheckBegin(TenantKey tenant, const BeginStepArgs& args, Model** model) {
  if (absl::Status healthy = backend_->Healthy(); !healthy.ok()) {
    return MakeError(absl::StatusCode::kUnavailable,
                     absl::StrCat("the backend is not healthy: ", healthy.message()),
                     {.reason = "backend_unhealthy"});
  }
  MLA_ASSIGN_OR_RETURN(*model, models_->Use(tenant, args.model_id, "begin_step.model_id"));
  return CheckStepBounds(static_cast<int64_t>(args.sequences.size()), args.participants,
                         args.lease_ms, limits_);
}

// Explains which pages of the step were refused: by the tenant's bound, or because the pool is
// full.
absl::Status StepOpener::RefusePages(const std::vector<StepEntry>& entries, const Model& model,
                                     const char* field, std::optional<Resource> refused,
                                     const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  int64_t groups = 0, wanted = 0;
  for (const StepEntry& entry : entries) {
    const kvcache::PageNeed need = cache_->NeedOf(entry.sequence->slot, entry.rows);
    groups += need.groups;
    wanted += need.bytes;
  }
  absl::Status answer = status;
  if (refused) {
    answer = tenants_->Refusal(*model.account, *refused, wanted, field);
  } else {
    int64_t free_groups = cache_->free_groups(model.contents->layout_id);
    int64_t free_bytes = free_groups * model.contents->layout.group_bytes();
    // Reports the layout with less room.
    if (model.contents->window_layout_id >= 0) {
      const int64_t of_window = cache_->free_groups(model.contents->window_layout_id);
      free_groups = std::min(free_groups, of_window);
      free_bytes = std::min(free_bytes, of_window * model.contents->window_layout.group_bytes());
    }
    answer = MakeError(
        status.code(), status.message(),
        {.field = field,
         .got = absl::StrCat("rows that need ", groups, " page groups and copies of shared ones"),
         .limit = absl::StrCat(free_groups, " free page groups"),
         .reason = RowOf(Resource::kKvBytes).reason,
         .resource = RowOf(Resource::kKvBytes).name,
         .wanted = wanted,
         .free = free_bytes,
         .bound = limits_.kv_cache_bytes,
         .bound_of = BoundOwner::kServer});
  }
  return AmendDetail(answer,
                     [&](ErrorDetail& detail) { detail.retry_after_ms = default_lease_ms_; });
}

absl::Status StepOpener::ReservePages(const std::vector<StepEntry>& entries, const Model& model,
                                      const char* field) {
  step_rows_.clear();
  for (const StepEntry& entry : entries) {
    step_rows_.push_back({entry.sequence->slot, entry.rows});
  }
  model.contents->pool_account->TakeRefused();  // clears refusals of restores from slower tiers
  const absl::Status status = cache_->Reserve(step_rows_);
  const std::optional<Resource> refused = model.contents->pool_account->TakeRefused();
  if (!status.ok()) return RefusePages(entries, model, field, refused, status);
  return status;
}

absl::StatusOr<Step*> StepOpener::Open(TenantKey tenant, const StreamRequest& request) {
  Model* model = nullptr;
  const BeginStepArgs& args = request.begin;
  absl::Status status = CheckBegin(tenant, args, &model);
  if (!status.ok()) return status;
  MLA_ASSIGN_OR_RETURN(Step* const created, steps_->Create(model, request.step_id));
  Step* step = created;
  int64_t total = 0;
  for (size_t i = 0; i < args.sequences.size() && status.ok(); ++i) {
    const StepSequenceArgs& wanted = args.sequences[i];
    status = CheckBeginSequence(tenant, *model, wanted, i);
    if (!status.ok()) break;
    Sequence* sequence = sequences_->Find(tenant, wanted.id);
    sequence->step = step;  // set in the loop, so that a sequence named twice is refused
    step->entries.push_back({sequence, static_cast<int32_t>(wanted.start_position), wanted.rows,
                             static_cast<int32_t>(total), sequence->slot});
    total += wanted.rows;
    status = CheckStepRows(total, limits_);
  }
  if (status.ok()) status = CheckRotations(*model->spec, total, args);
  if (status.ok()) status = ReservePages(step->entries, *model, "begin_step.sequences");
  if (!status.ok()) {
    for (const StepEntry& entry : step->entries) entry.sequence->step = nullptr;
    steps_->Remove(step, "");
    return status;
  }
  step->ticket = cache_->work().last();
  step->pages_ready = !cache_->work().Waits(tenant, step->ticket);
  for (StepEntry& entry : step->entries) {
    entry.copied = cache_->copied_groups(entry.slot);
    step->copies = step->copies || entry.copied != kvcache::CopiedGroups();
  }
  step->total_rows = static_cast<int32_t>(total);
  step->rotations = args.rotations;
  step->participants = args.participants;
  step->ranks.assign(step->participants, StepRank());
  step->streams.push_back(request.stream);
  step->layers.assign(model->spec->layers, LayerProgress());
  step->lease_ns = (args.lease_ms > 0 ? args.lease_ms : default_lease_ms_) * kNanosPerMilli;
  return step;
}

}  // namespace mla::scheduler
