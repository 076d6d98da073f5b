// Open sequences: identity, epoch, lease and idempotency of their life cycle. Rows and pages are
// KvCache's.
//
// Sequence states: open, in a step (Step* set), gone. An id of another tenant is answered exactly
// like an absent one. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_TABLES_SEQUENCE_TABLE_H_
#define MLA_SCHEDULER_TABLES_SEQUENCE_TABLE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/error.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/lease_table.h"
#include "scheduler/limits.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/prefix_plan.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

struct Step;

// What a request asked for that opened a sequence, to tell its repeat from a clash. Compared field
// by field: names may hold any character, so no text that joins them tells where one ends.
struct SequenceOrigin {
  std::string model_id = {};  // empty: a fork
  std::string client_id = {};
  std::string prefix = {};  // a digest of it; empty: none
  SequenceId parent = 0;
  uint64_t epoch = 0;  // expected of the parent
  std::optional<int64_t> length = {};
  friend bool operator==(const SequenceOrigin&, const SequenceOrigin&) = default;
};

struct Sequence {
  static constexpr int64_t kNoRow = std::numeric_limits<int64_t>::max();

  // Its rows change: it takes part in no other call that needs them to stay.
  bool busy() const { return step != nullptr || imports; }
  // To be called when the rows from `length` on are gone.
  void ForgetRowsFrom(int64_t length) {
    if (not_finite_from >= length) not_finite_from = kNoRow;
    if (tail.position > length) tail.tail.reset();
  }
  // `bytes`, or none, take the tail's place; `bytes` are then what was there.
  void SwapTail(int64_t position, std::shared_ptr<const Tail>* bytes) {
    tail.position = position;
    tail.tail.swap(*bytes);
    ++tail.serial;
  }

  SequenceId id = 0;
  TenantKey tenant = kNoTenant;
  Model* model = nullptr;
  kvcache::SeqSlot slot = -1;
  kvcache::SeqSlot window_slot = -1;  // of models with a window: its rows; `slot` has the entries
  uint64_t epoch = 1;
  int64_t lease_ns = 0;
  MonotonicNanos opened_ns = 0;
  Step* step = nullptr;  // the open step that holds it
  bool imports = false;  // rows of an import are on their way into it
  bool exports = false;  // it is the fork that holds the rows of an export
  SequenceTail tail;     // null: none
  std::string client_id;
  std::string request_id;  // as opened or forked
  SequenceOrigin origin;   // likewise
  // The first position that holds, at some layer, a KV row with a NaN or an infinity; rows that see
  // it may have answers that are not finite. kNoRow: no row does.
  int64_t not_finite_from = kNoRow;
  // The last Truncate, so that its repeat gives the same answer.
  uint64_t truncated_from_epoch = 0;
  int64_t truncated_length = -1;
  int64_t prefix_tokens = 0;     // declared rows, as counted for the tenant
  kvcache::PrefixMatch matched;  // the last match
};

class SequenceTable {
 public:
  // `ids` yields sequence ids; it must be unpredictable in production.
  SequenceTable(const Limits& limits, kvcache::KvCache* cache, ModelTable* models,
                TenantTable* tenants, const Clock* clock, std::function<uint64_t()> ids);

  // What Open refuses, but for the cache's bound of sequences, without a change. The sequence that
  // an earlier call with the same request id opened, or null.
  absl::StatusOr<Sequence*> CheckOpen(TenantKey tenant, const Model& model, const OpenArgs& args,
                                      const PrefixPlan& prefix);
  // `prefix`: a plan for the model's spec, if args.prefix is not empty.
  absl::StatusOr<Sequence*> Open(TenantKey tenant, Model* model, const OpenArgs& args,
                                 const PrefixPlan& prefix);
  // The sequence, if it has that epoch and is in no step or import.
  absl::StatusOr<Sequence*> FindIdle(TenantKey tenant, SequenceId id, uint64_t expected_epoch);
  // The same, if it may declare rows.
  absl::StatusOr<Sequence*> ForMatch(TenantKey tenant, SequenceId id, uint64_t expected_epoch);
  // What Match refuses, without a change.
  absl::Status CheckMatch(const Sequence& sequence, const PrefixPlan& prefix);
  // Declares the plan's rows and adds those that are cached. ABORTED if others were declared, or
  // rows committed, since the plan was made, RESOURCE_EXHAUSTED beyond the bounds of declared rows.
  absl::Status Match(Sequence* sequence, const PrefixPlan& prefix);
  // Declares what the rows stood for before a restart, as far as the bounds of declared rows allow.
  // Nothing where the model has other contents: its keys are others.
  // REQUIRES: state.chain, made under the secret of this process; no reservation.
  void Redeclare(Sequence* sequence, const SequenceState& state);
  absl::StatusOr<Sequence*> Fork(TenantKey tenant, const ForkArgs& args);
  absl::StatusOr<Sequence*> Truncate(TenantKey tenant, SequenceId id, int64_t length,
                                     uint64_t expected_epoch);
  // REQUIRES: sequence->step == nullptr.
  void Release(Sequence* sequence, kvcache::Freed why = kvcache::Freed::kReleased);
  // The same, as the server at `peer` has it now: FindOrRefuse says so, of the latest of these.
  void ReleaseMoved(Sequence* sequence, const std::string& peer);
  // Where it is; null: it has not moved.
  const std::string* MovedTo(TenantKey tenant, SequenceId id) const {
    const auto found = moved_.find(id);
    return found != moved_.end() && found->second.tenant == tenant ? &found->second.peer : nullptr;
  }
  // Told of every sequence that goes; null: none. It outlives the table.
  void set_observer(EngineObserver* observer) { observer_ = observer; }
  // The lease of sequences whose client asks for none; in force for those opened from now on.
  void set_default_lease_ms(int64_t lease_ms) { default_lease_ms_ = lease_ms; }
  int64_t default_lease_ms() const { return default_lease_ms_; }
  // Starts the lease again, with `lease_ms` > 0 as its new length.
  void Renew(Sequence* sequence, int64_t lease_ms = 0);

  // Null when the tenant has no such sequence.
  Sequence* Find(TenantKey tenant, SequenceId id);
  absl::StatusOr<Sequence*> FindOrRefuse(TenantKey tenant, SequenceId id, std::string field);
  // The tenant's sequences, of one client if `client_id` is not empty; ordered by id.
  std::vector<Sequence*> OfTenant(TenantKey tenant, const std::string& client_id);
  std::vector<Sequence*> OfModel(const Model& model);
  std::span<const std::unique_ptr<Sequence>> slots() const { return by_slot_; }  // null: free
  SequenceInfo Info(const Sequence& sequence) const;

  // Releases what has outlived its lease; sequences in a step are alive through it. Returns how
  // many.
  int32_t ExpireLeases();
  void PostponeLeases(int64_t nanos) { leases_.Postpone(nanos); }
  // When ExpireLeases should next be called; max() if nothing is leased.
  MonotonicNanos NextExpiry() const { return leases_.next_deadline_ns(); }
  int32_t size() const { return static_cast<int32_t>(by_id_.size()); }

 private:
  absl::StatusOr<int64_t> LeaseNanos(int64_t lease_ms) const;
  absl::Status CheckNames(const std::string& client_id, const std::string& request_id) const;
  // The sequence an earlier call with this request id opened, or null; ALREADY_EXISTS on a clash.
  absl::StatusOr<Sequence*> Repeated(TenantKey tenant, const std::string& request_id,
                                     const SequenceOrigin& origin);
  // Of all that the arguments of Open say by themselves.
  absl::StatusOr<Sequence*> CheckOpenArgs(TenantKey tenant, const Model& model,
                                          const OpenArgs& args, const PrefixPlan& prefix);
  // Counts the sequence and its declared rows for the tenant, or nothing.
  absl::Status TakeForOpen(const Model& model, int64_t declared);
  void ReturnForOpen(const Model& model, int64_t declared);
  absl::Status TakeForMatch(const Sequence& sequence, const PrefixPlan& prefix, int64_t* more);
  absl::Status Exhausted(const absl::Status& status) const;
  absl::Status OtherEpoch(const Sequence& sequence, uint64_t expected) const;
  absl::Status InStep(const Sequence& sequence) const;
  void DeclareAndMatch(Sequence* sequence, const PrefixPlan& prefix);
  absl::Status CheckKept(const Sequence& sequence, int64_t length) const;
  Sequence* Insert(kvcache::SeqSlot slot, kvcache::SeqSlot window_slot, TenantKey tenant,
                   Model* model, int64_t lease_ns, const std::string& client_id,
                   const std::string& request_id, SequenceOrigin origin, SequenceId id = 0);

  const Limits limits_;
  int64_t default_lease_ms_ = limits_.sequence_lease_ms;
  kvcache::KvCache* const cache_;
  ModelTable* const models_;
  TenantTable* const tenants_;
  const Clock* const clock_;
  const std::function<uint64_t()> ids_;
  EngineObserver* observer_ = nullptr;
  kvcache::LeaseTable leases_;                      // keyed by SeqSlot
  std::vector<std::unique_ptr<Sequence>> by_slot_;  // null when free
  absl::flat_hash_map<SequenceId, Sequence*> by_id_;
  absl::flat_hash_map<std::pair<TenantKey, std::string>, Sequence*> by_request_;  // by request id
  struct Moved {
    TenantKey tenant = kNoTenant;
    std::string peer;
  };
  absl::flat_hash_map<SequenceId, Moved> moved_;  // at most max_sequences
  std::deque<SequenceId> moved_order_;            // the oldest first
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_TABLES_SEQUENCE_TABLE_H_
