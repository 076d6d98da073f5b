// Who owns which page: the accounting of the KV pool. Bytes belong to the backend; this class deals
// in offsets.
//
// One byte budget is cut into slabs; a slab serves page groups of one layout at a time and returns
// to the budget when its last group is free. A sequence is a list of page groups plus a length;
// groups are shared by Fork and copied when a sequence is about to write into one that it shares
// (copy-on-write). A group that last belonged to another tenant is zeroed before it is handed out.
//
// Conservation invariant, checked after every mutation in debug builds: free + used groups of a
// slab equal its groups, every used group's reference count equals the number of tables that hold
// it, slab bytes sum to the budget.
//
// Threading: owned by the engine role. No call blocks. Errors leave everything as it was.
#ifndef MLA_SCHEDULER_KVCACHE_KV_CACHE_H_
#define MLA_SCHEDULER_KVCACHE_KV_CACHE_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"
#include "scheduler/kvcache/cache_layout.h"

namespace mla::kvcache {

using SeqSlot = int32_t;     // index of an open sequence, reused after Release
using LayoutId = int32_t;    // index of a registered layout
using TenantKey = uint32_t;  // small integer the engine gives each tenant

struct KvCacheOptions {
  int64_t bytes = 0;       // pool budget
  int64_t slab_bytes = 0;  // 0: chosen from the budget; never smaller than one group
  int32_t max_sequences = 0;
  int32_t max_pages_per_sequence = 0;  // page-table entries of a sequence
};

// Device work that a reservation asks for; the engine enqueues it before the step's first append.
// Vectors are cleared and refilled by the caller and keep their capacity.
struct KvWork {
  std::vector<kernels::KvCopy> copies;
  std::vector<kernels::KvRange> scrubs;
  std::vector<kernels::TableRange> tables;
  void Clear() {
    copies.clear();
    scrubs.clear();
    tables.clear();
  }
};

struct StepRows {  // rows that one sequence adds in a step
  SeqSlot sequence = -1;
  int32_t rows = 0;
};

struct KvCacheStats {
  int64_t bytes_total = 0;
  int64_t bytes_used = 0;  // bytes of groups in use
  int64_t groups_used = 0;
  int64_t groups_free = 0;  // free groups in slabs that are assigned to a layout
  int64_t slabs_free = 0;
  int64_t groups_shared = 0;  // reference count above one
  int64_t sequences = 0;
  uint64_t allocations = 0;  // counters since start
  uint64_t copies_on_write = 0;
  uint64_t scrubs = 0;
};

class KvCache {
 public:
  // `page_tables` is backend memory of at least max_sequences x max_pages_per_sequence entries.
  static absl::StatusOr<std::unique_ptr<KvCache>> Create(const KvCacheOptions& options,
                                                         std::span<uint32_t> page_tables);
  ~KvCache();

  // RESOURCE_EXHAUSTED when one group does not fit the budget.
  absl::StatusOr<LayoutId> AddLayout(const GroupLayout& layout);
  // FAILED_PRECONDITION while sequences use it.
  absl::Status RemoveLayout(LayoutId layout);

  absl::StatusOr<SeqSlot> Open(LayoutId layout, TenantKey tenant);
  // A child that shares the parent's first `length` rows (<= its committed length).
  absl::StatusOr<SeqSlot> Fork(SeqSlot parent, int32_t length);
  // Drops rows from `length` on; returns whole groups that hold none of the rest.
  absl::Status Truncate(SeqSlot sequence, int32_t length);
  void Release(SeqSlot sequence);

  // Reserves pages for all rows of a step or for none (RESOURCE_EXHAUSTED with pages wanted and
  // free). Appends copies, scrubs and changed table ranges to `work`. A sequence with a reservation
  // refuses another one, Fork and Truncate (FAILED_PRECONDITION).
  absl::Status Reserve(std::span<const StepRows> rows, KvWork* work);
  // Keeps the first `rows` reserved rows, returns the other pages and ends the reservation.
  void Commit(SeqSlot sequence, int32_t rows);
  void Rollback(SeqSlot sequence);

  int32_t length(SeqSlot sequence) const;    // committed rows
  int32_t reserved(SeqSlot sequence) const;  // rows of the open reservation, 0 if none
  bool has_reservation(SeqSlot sequence) const;
  int64_t page_table(SeqSlot sequence) const;  // index of its first entry in the page tables
  int32_t max_rows(SeqSlot sequence) const;    // rows that its page table can address
  // Pages wanted beyond those owned for `rows` more rows, and pages that could be allocated now for
  // its layout.
  int64_t free_groups(LayoutId layout) const;
  KvCacheStats stats() const;
  // Walks everything; empty when the conservation invariant holds, else what is broken.
  std::string CheckInvariants() const;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_KV_CACHE_H_
