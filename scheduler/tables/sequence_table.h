// The open sequences, with identity, epoch, lease and idempotency. Their rows and pages are in
// KvCache.
//
// A sequence is open, in a step (Step* is set), or gone. An id of another tenant gets exactly the
// same answer as an absent one. Threading: owned by the engine role.
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
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/lease_table.h"
#include "scheduler/limits.h"
#include "scheduler/tables/model_table.h"
#include "scheduler/tables/prefix_plan.h"
#include "scheduler/tenant_table.h"

namespace mla::scheduler {

struct Step;

// Keeps the arguments of the request that opened a sequence, to tell a repeat from a clash.
// Compared field by field: names may hold any character, so in a joined text the fields would be
// ambiguous.
struct SequenceOrigin {
  std::string model_id = {};  // empty: a fork
  std::string client_id = {};
  std::string prefix = {};  // a digest of it; empty: no prefix
  SequenceId parent = 0;
  uint64_t epoch = 0;  // expected of the parent
  std::optional<int64_t> length = {};
  friend bool operator==(const SequenceOrigin&, const SequenceOrigin&) = default;
};

struct Sequence {
  static constexpr int64_t kNoRow = std::numeric_limits<int64_t>::max();

  // Returns true if its rows are changing, so that calls that need them unchanged are refused.
  bool busy() const { return step != nullptr || imports; }
  // Call it when the rows from `length` on are gone.
  void ForgetRowsFrom(int64_t length) {
    if (not_finite_from >= length) not_finite_from = kNoRow;
    if (tail.position > length) tail.tail.reset();
  }
  // Swaps the tail with `bytes`, either of which may be null.
  void SwapTail(int64_t position, std::shared_ptr<const Tail>* bytes) {
    tail.position = position;
    tail.tail.swap(*bytes);
    ++tail.serial;
  }

  SequenceId id = 0;
  TenantKey tenant = kNoTenant;
  Model* model = nullptr;
  kvcache::SeqSlot slot = -1;
  uint64_t epoch = 1;
  int64_t lease_ns = 0;
  MonotonicNanos opened_ns = 0;
  Step* step = nullptr;  // the open step that the sequence is in
  bool imports = false;  // an import is bringing its rows
  bool exports = false;  // it is the fork that holds the rows of an export
  SequenceTail tail;     // null: no tail
  std::string client_id;
  std::string request_id;  // as opened or forked
  SequenceOrigin origin;   // as opened or forked
  // The first position with a NaN or an infinity in a KV row of any layer. Answers of rows that see
  // it may not be finite. kNoRow: all rows are finite.
  int64_t not_finite_from = kNoRow;
  // The last Truncate, so that a repeat of it gets the same answer.
  uint64_t truncated_from_epoch = 0;
  int64_t truncated_length = -1;
  int64_t prefix_tokens = 0;     // declared rows that are counted for the tenant
  kvcache::PrefixMatch matched;  // the last match
};

class SequenceTable {
 public:
  // `ids` yields sequence ids; it must be unpredictable in production.
  SequenceTable(const Limits& limits, kvcache::KvCache* cache, ModelTable* models,
                TenantTable* tenants, const Clock* clock, std::function<uint64_t()> ids);

  // Runs Open's checks except for the cache's bound of sequences; changes nothing. Returns the
  // sequence that an earlier call with the same request id opened, or null.
  absl::StatusOr<Sequence*> CheckOpen(TenantKey tenant, const Model& model, const OpenArgs& args,
                                      const PrefixPlan& prefix);
  // `prefix`: a plan for the model's spec; not used if args.prefix is empty.
  absl::StatusOr<Sequence*> Open(TenantKey tenant, Model* model, const OpenArgs& args,
                                 const PrefixPlan& prefix);
  // Returns the sequence if it has that epoch and is not in a step or import.
  absl::StatusOr<Sequence*> FindIdle(TenantKey tenant, SequenceId id,
                                     uint64_t expected_epoch) const;
  // As FindIdle, and checks that the sequence may declare rows.
  absl::StatusOr<Sequence*> FindForMatch(TenantKey tenant, SequenceId id,
                                         uint64_t expected_epoch) const;
  // Runs Match's checks; changes nothing.
  absl::Status CheckMatch(const Sequence& sequence, const PrefixPlan& prefix);
  // Declares the plan's rows and appends the cached ones. ABORTED if other rows were declared, or
  // rows committed, since the plan was made. RESOURCE_EXHAUSTED beyond the bounds of declared rows.
  absl::Status Match(Sequence* sequence, const PrefixPlan& prefix);
  // Declares the contents that the rows had before a restart, as far as the bounds of declared rows
  // allow. Does nothing if the model has other contents, because its keys differ. REQUIRES:
  // state.chain, made under the secret of this process; no reservation.
  void Redeclare(Sequence* sequence, const SequenceState& state);
  absl::StatusOr<Sequence*> Fork(TenantKey tenant, const ForkArgs& args);
  absl::StatusOr<Sequence*> Truncate(TenantKey tenant, SequenceId id, int64_t length,
                                     uint64_t expected_epoch);
  // REQUIRES: sequence->step == nullptr.
  void Release(Sequence* sequence, kvcache::Freed why = kvcache::Freed::kReleased);
  // As Release, for a sequence that the server at `peer` has now: FindOrRefuse then names the peer,
  // for the latest of such sequences.
  void ReleaseMoved(Sequence* sequence, const std::string& peer);
  // Returns the server that has the sequence now, or null if it has not moved.
  const std::string* MovedTo(TenantKey tenant, SequenceId id) const {
    const auto found = moved_.find(id);
    return found != moved_.end() && found->second.tenant == tenant ? &found->second.peer : nullptr;
  }
  // Is told of every sequence that ends; may be null. It outlives the table.
  void set_observer(EngineObserver* observer) { observer_ = observer; }
  // Sets the lease of sequences whose client asks for none, from the next Open on.
  void set_default_lease_ms(int64_t lease_ms) { default_lease_ms_ = lease_ms; }
  int64_t default_lease_ms() const { return default_lease_ms_; }
  // Starts the lease again; `lease_ms` > 0 is its new length.
  void Renew(Sequence* sequence, int64_t lease_ms = 0);

  // Returns null if the tenant does not have such a sequence.
  Sequence* Find(TenantKey tenant, SequenceId id) const;
  absl::StatusOr<Sequence*> FindOrRefuse(TenantKey tenant, SequenceId id, std::string field) const;
  // Returns the tenant's sequences, ordered by id; if `client_id` is not empty, only that client's.
  std::vector<Sequence*> OfTenant(TenantKey tenant, const std::string& client_id) const;
  // Returns a part of that list, or of the list of all tenants' sequences. Sets `more` if sequences
  // follow it.
  std::vector<Sequence*> Page(TenantKey tenant, const std::string& client_id,
                              const SequencePage& page, bool* more) const;
  std::vector<Sequence*> OfModel(const Model& model) const;
  std::span<const std::unique_ptr<Sequence>> slots() const { return by_slot_; }  // null: free
  SequenceInfo Info(const Sequence& sequence) const;

  // Releases sequences whose lease has run out, except for those in a step, which keeps them alive.
  // Returns their number.
  int32_t ExpireLeases();
  void PostponeLeases(int64_t nanos) { leases_.Postpone(nanos); }
  // Returns when ExpireLeases should next be called; max() if no lease runs.
  MonotonicNanos NextExpiry() const { return leases_.next_deadline_ns(); }
  int32_t size() const { return static_cast<int32_t>(by_id_.size()); }

 private:
  absl::StatusOr<int64_t> LeaseNanos(int64_t lease_ms) const;
  absl::Status CheckNames(const std::string& client_id, const std::string& request_id) const;
  // Returns the sequence that an earlier call with this request id opened, or null. ALREADY_EXISTS
  // if that call had other arguments.
  absl::StatusOr<Sequence*> Repeated(TenantKey tenant, const std::string& request_id,
                                     const SequenceOrigin& origin) const;
  // Runs the checks of Open that need only its arguments.
  absl::StatusOr<Sequence*> CheckOpenArgs(TenantKey tenant, const Model& model,
                                          const OpenArgs& args, const PrefixPlan& prefix) const;
  // Counts the sequence and its declared rows for the tenant; on an error, counts nothing.
  absl::Status TakeForOpen(const Model& model, int64_t declared);
  void ReturnForOpen(const Model& model, int64_t declared);
  absl::Status TakeForMatch(const Sequence& sequence, const PrefixPlan& prefix, int64_t* more);
  absl::Status Exhausted(const absl::Status& status) const;
  absl::Status OtherEpoch(const Sequence& sequence, uint64_t expected) const;
  absl::Status InStep(const Sequence& sequence) const;
  void DeclareAndMatch(Sequence* sequence, const PrefixPlan& prefix);
  absl::Status CheckKept(const Sequence& sequence, int64_t length) const;
  Sequence* Insert(kvcache::SeqSlot slot, TenantKey tenant, Model* model, int64_t lease_ns,
                   const std::string& client_id, const std::string& request_id,
                   SequenceOrigin origin, SequenceId id = 0);

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
