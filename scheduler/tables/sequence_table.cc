#include "scheduler/tables/sequence_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/status_macros.h"

namespace mla::scheduler {
namespace {

// Epochs of restored sequences begin at one of this many multiples of 2^32, chosen at random, so
// that calls with an epoch of the sequence's earlier life are refused, whatever process it was in.
constexpr uint64_t kRestoredEpochs = 1 << 20;

// Returns how many sequences of the cache a sequence of the model uses. Its tenant is charged for
// all of them, so that its bound also limits its share of the cache.
int64_t CountOf(const Model& model) { return model.spec->windowed() ? 2 : 1; }

int64_t DeclaredOf(const PrefixPlan& prefix) {
  return prefix.chain == nullptr ? 0 : prefix.chain->rows();
}

SequenceOrigin OriginOf(const OpenArgs& args, const PrefixPlan& prefix) {
  return {.model_id = args.model_id, .client_id = args.client_id, .prefix = prefix.digest};
}

SequenceOrigin OriginOf(const ForkArgs& args) {
  return {{}, args.client_id, {}, args.parent, args.expected_epoch, args.length};
}

absl::Status MovedError(SequenceId id, std::string field, const std::string& peer) {
  return MakeError(absl::StatusCode::kNotFound,
                   absl::StrCat("sequence ", id, " has moved to the server at ", peer),
                   {.field = std::move(field),
                    .got = absl::StrCat(id),
                    .limit = "an open sequence of this tenant",
                    .reason = "moved",
                    .peer = peer});
}

absl::Status NoPrefix() {
  return RefuseField("prefix", "rows to be found", "none: rows of a window are not shared",
                     "no_prefix_here", absl::StatusCode::kUnimplemented);
}

}  // namespace

SequenceTable::SequenceTable(const Limits& limits, kvcache::KvCache* cache, ModelTable* models,
                             TenantTable* tenants, const Clock* clock,
                             std::function<uint64_t()> ids)
    : limits_(limits),
      cache_(cache),
      models_(models),
      tenants_(tenants),
      clock_(clock),
      ids_(std::move(ids)),
      leases_(limits.max_sequences),
      by_slot_(limits.max_sequences) {
  by_id_.reserve(limits.max_sequences);
}

absl::StatusOr<int64_t> SequenceTable::LeaseNanos(int64_t lease_ms) const {
  if (lease_ms == 0) return default_lease_ms_ * kNanosPerMilli;
  MLA_RETURN_IF_ERROR(CheckRange("lease_ms", lease_ms, 0, limits_.max_lease_ms));
  return lease_ms * kNanosPerMilli;
}

absl::Status SequenceTable::CheckNames(const std::string& client_id,
                                       const std::string& request_id) const {
  const size_t limit = static_cast<size_t>(limits_.max_name_bytes);
  const bool client_bad = client_id.size() > limit;
  if (!client_bad && request_id.size() <= limit) return absl::OkStatus();
  return RefuseField(client_bad ? "client_id" : "request_id",
                     absl::StrCat(client_bad ? client_id.size() : request_id.size(), " bytes"),
                     absl::StrCat("at most ", limit, " bytes"), "name_too_long");
}

absl::StatusOr<Sequence*> SequenceTable::Repeated(TenantKey tenant, const std::string& request_id,
                                                  const SequenceOrigin& origin) const {
  if (request_id.empty()) return nullptr;
  const auto found = by_request_.find(std::pair(tenant, request_id));
  if (found == by_request_.end()) return nullptr;
  if (found->second->origin == origin) return found->second;
  return RefuseField("request_id", request_id, "new, or a repeat of the same request",
                     "request_id_reused", absl::StatusCode::kAlreadyExists);
}

Sequence* SequenceTable::Insert(kvcache::SeqSlot slot, TenantKey tenant, Model* model,
                                int64_t lease_ns, const std::string& client_id,
                                const std::string& request_id, SequenceOrigin origin,
                                SequenceId id) {
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  while (sequence->id == 0 || by_id_.contains(sequence->id)) sequence->id = ids_();
  sequence->tenant = tenant;
  sequence->model = model;
  sequence->slot = slot;
  sequence->lease_ns = lease_ns;
  sequence->opened_ns = clock_->Now();
  sequence->client_id = client_id;
  sequence->request_id = request_id;
  sequence->origin = std::move(origin);
  Sequence* raw = sequence.get();
  by_slot_[slot] = std::move(sequence);
  by_id_.emplace(raw->id, raw);
  if (moved_.erase(raw->id) > 0) std::erase(moved_order_, raw->id);
  if (!request_id.empty()) by_request_.emplace(std::pair(tenant, request_id), raw);
  cache_->SetName(slot, raw->id, model->name);
  ++model->sequences;
  Renew(raw);
  return raw;
}

// Returns the error for a cache that has no sequence slot left.
absl::Status SequenceTable::Exhausted(const absl::Status& status) const {
  return MakeError(status.code(), status.message(),
                   {.field = "sequence",
                    .got = "one more",
                    .limit = absl::StrCat("at most ", limits_.max_sequences, " open sequences"),
                    .reason = "sequences_exhausted",
                    .retry_after_ms = default_lease_ms_});
}

absl::Status SequenceTable::OtherEpoch(const Sequence& sequence, uint64_t expected) const {
  return RefuseField({.field = "expected_epoch",
                      .got = absl::StrCat(expected),
                      .limit = absl::StrCat(sequence.epoch),
                      .reason = "epoch_mismatch",
                      .last_good_position = cache_->length(sequence.slot)},
                     absl::StatusCode::kFailedPrecondition);
}

absl::Status SequenceTable::InStep(const Sequence& sequence) const {
  return MakeError(absl::StatusCode::kFailedPrecondition,
                   sequence.imports ? "rows are being imported into the sequence"
                                    : "the sequence is in an open step: end or abort it first",
                   {.field = "sequence_id",
                    .got = absl::StrCat(sequence.id),
                    .limit = "a sequence in no open step",
                    .reason = "in_step",
                    .last_good_position = cache_->length(sequence.slot)});
}

// For a sequence with a window: its last rows before `length` must still be there.
absl::Status SequenceTable::CheckKept(const Sequence& sequence, int64_t length) const {
  const int64_t least = cache_->least_length(sequence.slot);
  if (length >= least) return absl::OkStatus();
  return RefuseField(
      {.field = "length",
       .got = absl::StrCat(length),
       .limit = absl::StrCat("at least ", least, ": the window has passed earlier rows"),
       .reason = "window_passed",
       .last_good_position = cache_->length(sequence.slot)},
      absl::StatusCode::kFailedPrecondition);
}

absl::StatusOr<Sequence*> SequenceTable::CheckOpenArgs(TenantKey tenant, const Model& model,
                                                       const OpenArgs& args,
                                                       const PrefixPlan& prefix) const {
  MLA_RETURN_IF_ERROR(CheckNames(args.client_id, args.request_id));
  if (prefix.chain != nullptr && model.spec->windowed()) return NoPrefix();
  MLA_RETURN_IF_ERROR(LeaseNanos(args.lease_ms).status());
  absl::StatusOr<Sequence*> repeat = Repeated(tenant, args.request_id, OriginOf(args, prefix));
  if (!repeat.ok() || *repeat != nullptr) return repeat;
  if (args.restored_id != 0 && by_id_.contains(args.restored_id)) {
    return RefuseField("sequence_ids", absl::StrCat(args.restored_id),
                       "sequences that are not open", "sequence_open",
                       absl::StatusCode::kAlreadyExists);
  }
  return nullptr;
}

absl::Status SequenceTable::TakeForOpen(const Model& model, int64_t declared) {
  Tenant& account = *model.account;
  MLA_RETURN_IF_ERROR(tenants_->Take(account, Resource::kSequences, CountOf(model), "sequence"));
  absl::Status status = tenants_->Take(account, Resource::kPrefixTokens, declared, "prefix");
  if (!status.ok()) tenants_->Return(account, Resource::kSequences, CountOf(model));
  return status;
}

void SequenceTable::ReturnForOpen(const Model& model, int64_t declared) {
  tenants_->Return(*model.account, Resource::kPrefixTokens, declared);
  tenants_->Return(*model.account, Resource::kSequences, CountOf(model));
}

absl::StatusOr<Sequence*> SequenceTable::CheckOpen(TenantKey tenant, const Model& model,
                                                   const OpenArgs& args, const PrefixPlan& prefix) {
  absl::StatusOr<Sequence*> repeat = CheckOpenArgs(tenant, model, args, prefix);
  if (!repeat.ok() || *repeat != nullptr) return repeat;
  const int64_t declared = DeclaredOf(prefix);
  MLA_RETURN_IF_ERROR(TakeForOpen(model, declared));
  ReturnForOpen(model, declared);
  return nullptr;
}

absl::StatusOr<Sequence*> SequenceTable::Open(TenantKey tenant, Model* model, const OpenArgs& args,
                                              const PrefixPlan& prefix) {
  absl::StatusOr<Sequence*> repeat = CheckOpenArgs(tenant, *model, args, prefix);
  if (!repeat.ok() || *repeat != nullptr) return repeat;
  const int64_t declared = DeclaredOf(prefix);
  MLA_RETURN_IF_ERROR(TakeForOpen(*model, declared));
  const absl::StatusOr<kvcache::SeqSlot> slot =
      cache_->Open(model->contents->layout_id, tenant, model->contents->window_layout_id);
  if (!slot.ok()) {
    ReturnForOpen(*model, declared);
    return Exhausted(slot.status());
  }
  Sequence* const sequence =
      Insert(*slot, tenant, model, *LeaseNanos(args.lease_ms), args.client_id, args.request_id,
             OriginOf(args, prefix), args.restored_id);
  if (args.restored_id != 0) sequence->epoch = (1 + ids_() % kRestoredEpochs) << 32;
  if (prefix.chain == nullptr) return sequence;
  sequence->prefix_tokens = declared;
  DeclareAndMatch(sequence, prefix);
  return sequence;
}

absl::StatusOr<Sequence*> SequenceTable::Fork(TenantKey tenant, const ForkArgs& args) {
  MLA_RETURN_IF_ERROR(CheckNames(args.client_id, args.request_id));
  MLA_ASSIGN_OR_RETURN(int64_t lease, LeaseNanos(args.lease_ms));
  absl::StatusOr<Sequence*> repeat = Repeated(tenant, args.request_id, OriginOf(args));
  if (!repeat.ok() || *repeat != nullptr) return repeat;
  MLA_ASSIGN_OR_RETURN(Sequence* const parent, FindOrRefuse(tenant, args.parent, "sequence_id"));
  if (parent->epoch != args.expected_epoch) {
    return OtherEpoch(*parent, args.expected_epoch);
  }
  if (parent->busy()) return InStep(*parent);
  const int64_t committed = cache_->length(parent->slot);
  const int64_t length = args.length.value_or(committed);
  MLA_RETURN_IF_ERROR(CheckRange("length", length, 0, committed));
  MLA_RETURN_IF_ERROR(CheckKept(*parent, length));
  Tenant& account = *parent->model->account;
  const int64_t count = CountOf(*parent->model);
  MLA_RETURN_IF_ERROR(tenants_->Take(account, Resource::kSequences, count, "sequence"));
  const absl::StatusOr<kvcache::SeqSlot> slot =
      cache_->Fork(parent->slot, static_cast<int32_t>(length));
  if (!slot.ok()) {
    tenants_->Return(account, Resource::kSequences, count);
    return Exhausted(slot.status());
  }
  Renew(parent);
  Sequence* const child = Insert(*slot, tenant, parent->model, lease,
                                 args.client_id.empty() ? parent->client_id : args.client_id,
                                 args.request_id, OriginOf(args));
  child->not_finite_from = parent->not_finite_from;
  child->tail = parent->tail;
  child->ForgetRowsFrom(length);
  // If the declared rows exceed the bounds, the child is made without declared rows.
  const int64_t declared = cache_->declared(child->slot);
  if (tenants_->TryTake(account, Resource::kPrefixTokens, declared)) {
    child->prefix_tokens = declared;
  } else {
    cache_->Undeclare(child->slot, 0);
  }
  return child;
}

absl::StatusOr<Sequence*> SequenceTable::FindForMatch(TenantKey tenant, SequenceId id,
                                                      uint64_t expected_epoch) const {
  absl::StatusOr<Sequence*> found = FindIdle(tenant, id, expected_epoch);
  if (found.ok() && (*found)->model->spec->windowed()) return NoPrefix();
  return found;
}

absl::StatusOr<Sequence*> SequenceTable::FindIdle(TenantKey tenant, SequenceId id,
                                                  uint64_t expected_epoch) const {
  MLA_ASSIGN_OR_RETURN(Sequence* const sequence, FindOrRefuse(tenant, id, "sequence_id"));
  if (sequence->epoch != expected_epoch) return OtherEpoch(*sequence, expected_epoch);
  if (sequence->busy()) return InStep(*sequence);
  return sequence;
}

absl::Status SequenceTable::TakeForMatch(const Sequence& sequence, const PrefixPlan& prefix,
                                         int64_t* more) {
  if (cache_->chain(sequence.slot) != prefix.before ||
      cache_->declared(sequence.slot) != prefix.declared ||
      cache_->length(sequence.slot) != prefix.committed) {
    return MakeError(absl::StatusCode::kAborted,
                     "another call has declared the sequence or added rows in between",
                     {.field = "sequence_id",
                      .got = absl::StrCat(sequence.id),
                      .limit = "a sequence that one call changes at a time",
                      .reason = "changed_meanwhile"});
  }
  *more = prefix.chain->rows() - sequence.prefix_tokens;
  return tenants_->Take(*sequence.model->account, Resource::kPrefixTokens,
                        std::max<int64_t>(*more, 0), "prefix");
}

absl::Status SequenceTable::CheckMatch(const Sequence& sequence, const PrefixPlan& prefix) {
  int64_t more = 0;
  absl::Status status = TakeForMatch(sequence, prefix, &more);
  if (status.ok() && more > 0) {
    tenants_->Return(*sequence.model->account, Resource::kPrefixTokens, more);
  }
  return status;
}

absl::Status SequenceTable::Match(Sequence* sequence, const PrefixPlan& prefix) {
  int64_t more = 0;
  MLA_RETURN_IF_ERROR(TakeForMatch(*sequence, prefix, &more));
  if (more < 0) tenants_->Return(*sequence->model->account, Resource::kPrefixTokens, -more);
  sequence->prefix_tokens += more;
  DeclareAndMatch(sequence, prefix);
  Renew(sequence);
  return absl::OkStatus();
}

void SequenceTable::DeclareAndMatch(Sequence* sequence, const PrefixPlan& prefix) {
  const kvcache::SeqSlot slot = sequence->slot;
  // Rows that are not finite are not shared with other sequences.
  const int64_t rows = std::min<int64_t>(prefix.chain->rows(), sequence->not_finite_from);
  cache_->Declare(slot, prefix.chain, static_cast<int32_t>(rows));
  int64_t most = limits_.max_sequence_rows;
  if (prefix.max_rows > 0) most = std::min(most, prefix.max_rows);
  sequence->matched = cache_->Match(slot, static_cast<int32_t>(most));
}

void SequenceTable::Redeclare(Sequence* sequence, const SequenceState& state) {
  const int64_t rows =
      std::min<int64_t>({state.declared, state.chain->rows(), cache_->length(sequence->slot),
                         sequence->not_finite_from});
  if (state.contents != sequence->model->spec->ContentsText() ||
      !tenants_->TryTake(*sequence->model->account, Resource::kPrefixTokens, state.chain->rows())) {
    return;
  }
  sequence->prefix_tokens = state.chain->rows();
  cache_->Declare(sequence->slot, state.chain, static_cast<int32_t>(rows));
}

absl::StatusOr<Sequence*> SequenceTable::Truncate(TenantKey tenant, SequenceId id, int64_t length,
                                                  uint64_t expected_epoch) {
  MLA_ASSIGN_OR_RETURN(Sequence* const sequence, FindOrRefuse(tenant, id, "sequence_id"));
  const int64_t committed = cache_->length(sequence->slot);
  const bool repeat = sequence->truncated_length == length && committed == length &&
                      sequence->truncated_from_epoch == expected_epoch &&
                      sequence->epoch == expected_epoch + 1;
  if (repeat) return sequence;
  if (sequence->epoch != expected_epoch) {
    return OtherEpoch(*sequence, expected_epoch);
  }
  if (sequence->busy()) return InStep(*sequence);
  MLA_RETURN_IF_ERROR(CheckRange("length", length, 0, committed));
  MLA_RETURN_IF_ERROR(CheckKept(*sequence, length));
  MLA_RETURN_IF_ERROR(cache_->Truncate(sequence->slot, static_cast<int32_t>(length)));
  sequence->ForgetRowsFrom(length);
  sequence->truncated_from_epoch = sequence->epoch++;
  sequence->truncated_length = length;
  Renew(sequence);
  return sequence;
}

void SequenceTable::Release(Sequence* sequence, kvcache::Freed why) {
  const kvcache::SeqSlot slot = sequence->slot;
  if (observer_ != nullptr) {
    observer_->OnSequenceClosed(cache_->length(slot), clock_->Now() - sequence->opened_ns);
  }
  Model* const model = sequence->model;
  const int64_t prefix_tokens = sequence->prefix_tokens;
  --model->sequences;
  models_->Touch(model);
  leases_.Drop(slot);
  by_id_.erase(sequence->id);
  if (!sequence->request_id.empty()) {
    by_request_.erase(std::pair(sequence->tenant, sequence->request_id));
  }
  cache_->Release(slot, why);
  by_slot_[slot].reset();
  tenants_->Return(*model->account, Resource::kSequences, CountOf(*model));
  tenants_->Return(*model->account, Resource::kPrefixTokens, prefix_tokens);
}

void SequenceTable::Renew(Sequence* sequence, int64_t lease_ms) {
  if (lease_ms > 0) {
    sequence->lease_ns = std::min(lease_ms, limits_.max_lease_ms) * kNanosPerMilli;
  }
  leases_.Grant(sequence->slot, clock_->Now() + sequence->lease_ns);
}

void SequenceTable::ReleaseMoved(Sequence* sequence, const std::string& peer) {
  if (moved_.insert_or_assign(sequence->id, Moved{sequence->tenant, peer}).second) {
    moved_order_.push_back(sequence->id);
  }
  if (std::cmp_greater(moved_order_.size(), limits_.max_sequences)) {
    moved_.erase(moved_order_.front());
    moved_order_.pop_front();
  }
  Release(sequence);
}

Sequence* SequenceTable::Find(TenantKey tenant, SequenceId id) const {
  const auto found = by_id_.find(id);
  if (found == by_id_.end() || found->second->tenant != tenant) return nullptr;
  return found->second;
}

absl::StatusOr<Sequence*> SequenceTable::FindOrRefuse(TenantKey tenant, SequenceId id,
                                                      std::string field) const {
  if (Sequence* sequence = Find(tenant, id)) return sequence;
  if (const std::string* peer = MovedTo(tenant, id)) {
    return MovedError(id, std::move(field), *peer);
  }
  return MakeError(
      absl::StatusCode::kNotFound,
      absl::StrCat("sequence ", id,
                   " is not open here: it was released, its lease expired, or it never was"),
      {.field = std::move(field),
       .got = absl::StrCat(id),
       .limit = "an open sequence of this tenant",
       .reason = "sequence_not_found"});
}

std::vector<Sequence*> SequenceTable::OfTenant(TenantKey tenant,
                                               const std::string& client_id) const {
  bool more = false;
  return Page(tenant, client_id, {}, &more);
}

std::vector<Sequence*> SequenceTable::Page(TenantKey tenant, const std::string& client_id,
                                           const SequencePage& page, bool* more) const {
  std::vector<Sequence*> result;
  for (const std::unique_ptr<Sequence>& sequence : by_slot_) {
    if (sequence == nullptr || sequence->id <= page.after) continue;
    if (!page.all_tenants && sequence->tenant != tenant) continue;
    if (!client_id.empty() && sequence->client_id != client_id) continue;
    result.push_back(sequence.get());
  }
  const auto by_id = [](const Sequence* a, const Sequence* b) { return a->id < b->id; };
  *more = std::cmp_greater(result.size(), page.most);
  if (*more) {
    // Sorts no more than the part, because a list of n parts would sort all sequences n times.
    std::nth_element(result.begin(), result.begin() + page.most, result.end(), by_id);
    result.resize(static_cast<size_t>(page.most));
  }
  std::sort(result.begin(), result.end(), by_id);
  return result;
}

std::vector<Sequence*> SequenceTable::OfModel(const Model& model) const {
  std::vector<Sequence*> result;
  for (const std::unique_ptr<Sequence>& sequence : by_slot_) {
    if (sequence != nullptr && sequence->model == &model) result.push_back(sequence.get());
  }
  return result;
}

SequenceInfo SequenceTable::Info(const Sequence& sequence) const {
  SequenceInfo info;
  info.id = sequence.id;
  info.epoch = sequence.epoch;
  info.length = cache_->length(sequence.slot);
  info.lease_ms = sequence.lease_ns / kNanosPerMilli;
  const MonotonicNanos now = clock_->Now();
  info.lease_left_ms = leases_.left_ns(sequence.slot, now) / kNanosPerMilli;
  info.age_ms = (now - sequence.opened_ns) / kNanosPerMilli;
  info.in_step = sequence.busy();
  info.model_id = sequence.model->spec->id;
  info.client_id = sequence.client_id;
  const int64_t rows = info.length + cache_->reserved(sequence.slot);
  const kvcache::GroupLayout& layout = sequence.model->contents->layout;
  info.page_groups = (rows + layout.page_size - 1) / layout.page_size;
  info.kv_bytes = info.page_groups * layout.group_bytes();
  info.declared = cache_->declared(sequence.slot);
  info.matched = sequence.matched;
  if (sequence.tail.tail != nullptr) info.tail_position = sequence.tail.position;
  return info;
}

int32_t SequenceTable::ExpireLeases() {
  int32_t expired = 0;
  const MonotonicNanos now = clock_->Now();
  for (int32_t slot; (slot = leases_.PopExpired(now)) != kvcache::LeaseTable::kNone;) {
    Sequence* sequence = by_slot_[slot].get();
    if (sequence->step != nullptr) {
      Renew(sequence);  // a sequence in a step lives as long as the lease of the step
      continue;
    }
    cache_->Note(slot, kvcache::EventKind::kExpired);
    Release(sequence, kvcache::Freed::kExpired);
    ++expired;
  }
  return expired;
}

}  // namespace mla::scheduler
