#include "scheduler/engine/sequence_control.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::scheduler {
namespace {

absl::Status ModelChanged(const std::string& model_id) {
  return MakeError(absl::StatusCode::kAborted,
                   absl::StrCat("model ", model_id, " was registered while the call ran"),
                   {.field = "model_id",
                    .got = model_id,
                    .limit = "a model that stays while the call runs",
                    .reason = "changed_meanwhile"});
}

}  // namespace

absl::StatusOr<std::shared_ptr<TierWait>> SequenceControl::RestoreForOpen(
    const OpenArgs& args, const PrefixPlan& prefix) {
  MLA_ASSIGN_OR_RETURN(Model* const model, ModelToOpen(args, prefix));
  const TenantKey tenant = tenants_->Find(args.tenant);
  MLA_ASSIGN_OR_RETURN(Sequence* const repeat, sequences_->CheckOpen(tenant, *model, args, prefix));
  return repeat != nullptr ? nullptr : RestorePrefix(args.tenant, prefix, 0);
}

absl::StatusOr<std::shared_ptr<TierWait>> SequenceControl::RestoreForMatch(
    const MatchArgs& args, const PrefixPlan& prefix) {
  MLA_ASSIGN_OR_RETURN(
      Sequence* const found,
      sequences_->FindForMatch(tenants_->Find(args.tenant), args.id, args.expected_epoch));
  MLA_RETURN_IF_ERROR(sequences_->CheckMatch(*found, prefix));
  return RestorePrefix(args.tenant, prefix, prefix.committed);
}

std::shared_ptr<TierWait> SequenceControl::RestorePrefix(const std::string& tenant,
                                                         const PrefixPlan& prefix,
                                                         int64_t first_row) {
  if (tiers_ == nullptr || prefix.chain == nullptr || draining_->on()) return nullptr;
  absl::StatusOr<Model*> model = models_->Use(tenants_->Find(tenant), prefix.spec->id, "model_id");
  if (!model.ok() || (*model)->spec != prefix.spec) return nullptr;
  int64_t most = limits_.max_sequence_rows;
  if (prefix.max_rows > 0) most = std::min(most, prefix.max_rows);
  return tiers_->Restore((*model)->contents->layout_id, *prefix.chain, first_row, most);
}

absl::StatusOr<Model*> SequenceControl::ModelToOpen(const OpenArgs& args,
                                                    const PrefixPlan& prefix) {
  if (draining_->on()) return draining_->Error(/*opens=*/true);
  MLA_ASSIGN_OR_RETURN(Model* const model,
                       models_->Use(tenants_->Find(args.tenant), args.model_id, "model_id"));
  if (!args.prefix.empty() && prefix.spec != model->spec) return ModelChanged(args.model_id);
  return model;
}

absl::StatusOr<SequenceInfo> SequenceControl::Open(const OpenArgs& args, const PrefixPlan& prefix) {
  MLA_ASSIGN_OR_RETURN(Model* const model, ModelToOpen(args, prefix));
  const TenantKey tenant = tenants_->Find(args.tenant);
  MLA_ASSIGN_OR_RETURN(Sequence* const sequence, sequences_->Open(tenant, model, args, prefix));
  return sequences_->Info(*sequence);
}

absl::StatusOr<PrefixPlan> SequenceControl::PlanMatch(const MatchArgs& args,
                                                      int64_t* committed) const {
  MLA_ASSIGN_OR_RETURN(
      Sequence* const found,
      sequences_->FindForMatch(tenants_->Find(args.tenant), args.id, args.expected_epoch));
  const Sequence& sequence = *found;
  *committed = cache_->length(sequence.slot);
  PrefixPlan plan;
  plan.spec = sequence.model->spec;
  plan.before = cache_->chain(sequence.slot);
  plan.declared = cache_->declared(sequence.slot);
  plan.committed = *committed;
  return plan;
}

absl::StatusOr<SequenceInfo> SequenceControl::Match(const MatchArgs& args,
                                                    const PrefixPlan& prefix) {
  MLA_ASSIGN_OR_RETURN(
      Sequence* const sequence,
      sequences_->FindForMatch(tenants_->Find(args.tenant), args.id, args.expected_epoch));
  MLA_RETURN_IF_ERROR(sequences_->Match(sequence, prefix));
  return sequences_->Info(*sequence);
}

absl::StatusOr<HintAnswer> SequenceControl::Hint(const HintArgs& args, const PrefixPlan& prefix) {
  const TenantKey tenant = tenants_->Find(args.tenant);
  if (args.id != 0) {
    MLA_ASSIGN_OR_RETURN(Sequence* const found,
                         sequences_->FindIdle(tenant, args.id, args.expected_epoch));
    const Sequence& sequence = *found;
    const auto& chain = cache_->chain(sequence.slot);
    if (chain == nullptr) return HintAnswer{.reason = "absent"};
    const int64_t rows = std::min(cache_->declared(sequence.slot), cache_->length(sequence.slot));
    return hints_->Do(args, sequence.model->contents->layout_id, tenant, *chain, rows);
  }
  MLA_ASSIGN_OR_RETURN(Model* const model, models_->Use(tenant, args.model_id, "model_id"));
  if (prefix.spec != model->spec) return ModelChanged(args.model_id);
  int64_t rows = prefix.chain->rows();
  if (prefix.max_rows > 0) rows = std::min(rows, prefix.max_rows);
  return hints_->Do(args, model->contents->layout_id, tenant, *prefix.chain, rows);
}

absl::StatusOr<SequenceInfo> SequenceControl::Fork(const ForkArgs& args) {
  if (draining_->on())
    return draining_->Refuse(tenants_->Find(args.tenant), args.parent, "sequence_id");
  MLA_ASSIGN_OR_RETURN(Sequence* const child, sequences_->Fork(tenants_->Find(args.tenant), args));
  return sequences_->Info(*child);
}

absl::StatusOr<SequenceInfo> SequenceControl::Truncate(const std::string& tenant, SequenceId id,
                                                       int64_t length, uint64_t expected_epoch) {
  MLA_ASSIGN_OR_RETURN(Sequence* const sequence,
                       sequences_->Truncate(tenants_->Find(tenant), id, length, expected_epoch));
  return sequences_->Info(*sequence);
}

SequenceList SequenceControl::Get(const SequenceSelection& selection,
                                  const SequencePage& page) const {
  const TenantKey tenant = tenants_->Find(selection.tenant);
  SequenceList list;
  const auto add = [&](const Sequence& sequence) {
    SequenceInfo info = sequences_->Info(sequence);
    if (sequence.step != nullptr) info.open_step = sequence.step->id;
    if (page.all_tenants) {
      const TenantRef owner = tenants_->Get(sequence.tenant);
      if (owner) info.tenant = owner->name();
    }
    list.sequences.push_back(std::move(info));
  };
  if (selection.ids.empty()) {
    for (const Sequence* sequence :
         sequences_->Page(tenant, selection.client_id, page, &list.more)) {
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

absl::StatusOr<SequenceTail> SequenceControl::ReadTail(const std::string& tenant, SequenceId id,
                                                       uint64_t expected_epoch) {
  MLA_ASSIGN_OR_RETURN(Sequence* const owner,
                       sequences_->FindIdle(tenants_->Find(tenant), id, expected_epoch));
  if (owner->tail.tail == nullptr) {
    return MakeError(absl::StatusCode::kNotFound, absl::StrCat("sequence ", id, " has no tail"),
                     {.field = "sequence_id",
                      .got = absl::StrCat(id),
                      .limit = "a sequence that a step has left with a tail",
                      .reason = "no_tail",
                      .last_good_position = cache_->length(owner->slot)});
  }
  sequences_->Renew(owner);
  return owner->tail;
}

int32_t SequenceControl::Release(const std::string& tenant_name, std::span<const SequenceId> ids,
                                 std::vector<SequenceId>* not_found) {
  const TenantKey tenant = tenants_->Find(tenant_name);
  int32_t released = 0;
  for (const SequenceId id : ids) {
    Sequence* sequence = sequences_->Find(tenant, id);
    if (sequence == nullptr) {
      not_found->push_back(id);
      continue;
    }
    End(sequence, "released");
    ++released;
  }
  return released;
}

void SequenceControl::End(Sequence* sequence, const char* why) {
  if (sequence->step != nullptr) {
    launches_->AbortStep(
        sequence->tenant, sequence->step->id,
        absl::AbortedError(absl::StrCat("its sequence ", sequence->id, " was ", why)));
  }
  sequences_->Release(sequence);
}

int32_t SequenceControl::Evict(const SequenceSelection& selection,
                               std::vector<SequenceId>* not_found) {
  const TenantKey tenant = tenants_->Find(selection.tenant);
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

void SequenceControl::Preempt(Sequence* sequence) {
  if (!sequence->exports) cache_->Note(sequence->slot, kvcache::EventKind::kPreempted);
  End(sequence, "evicted by an operator");
}

absl::StatusOr<int32_t> SequenceControl::EvictModel(const std::string& tenant,
                                                    const std::string& id) {
  const TenantKey key = tenants_->Find(tenant);
  MLA_ASSIGN_OR_RETURN(Model* const model, models_->Find(key, id, "model_id"));
  const std::vector<Sequence*> going = sequences_->OfModel(*model);
  for (Sequence* sequence : going) Preempt(sequence);
  MLA_RETURN_IF_ERROR(models_->Unregister(key, id));
  return static_cast<int32_t>(going.size());
}

absl::StatusOr<MovingPages> SequenceControl::BeginImport(const ImportArgs& args) {
  if (draining_->on() && args.id == 0) return draining_->Error(/*opens=*/true);
  if (draining_->on())
    return draining_->Refuse(tenants_->Find(args.tenant), args.id, "target.sequence_id");
  return transfers_->BeginImport(args);
}

int32_t SequenceControl::Renew(const SequenceSelection& selection, int64_t lease_ms,
                               std::vector<SequenceId>* not_found) {
  const TenantKey tenant = tenants_->Find(selection.tenant);
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

}  // namespace mla::scheduler
