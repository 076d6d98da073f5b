// Device work that page groups wait for: zeroing of groups that last belonged to another tenant,
// and copies of shared groups that a sequence is about to write into (copy-on-write). A copy into a
// group that holds no other tenant's bytes takes the rows that count, of every layer's page.
//
// Work waits in one queue for each tenant until a launch carries it. Groups never pass from one
// tenant to another while work on them is queued or runs, so the queues are independent of each
// other; within a queue the order is kept. A ticket names a place in the order of all work: a step
// may run once its tenant's work up to the step's ticket has been carried by that launch or an
// earlier one.
//
// A group has at most one piece of work that fills it, so the queue holds at most as many pieces as
// the pool has groups. Work into a group that loses its last reference while the work is queued is
// cancelled. Work that a launch has taken stays known until Acknowledge; Requeue puts what a failed
// launch took back to the front, in order. Until then its groups are pinned: the pool does not hand
// them out, and a source is not written below the rows that are to be copied.
//
// Threading: owned by the KvCache that holds it. Memory grows to the largest number of pieces that
// ever waited, and stays.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_PAGE_WORK_H_
#define MLA_SCHEDULER_KVCACHE_POOL_PAGE_WORK_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/attention_backend.h"
#include "scheduler/kvcache/pool/slab_pool.h"

namespace mla::kvcache {

using WorkTicket = uint64_t;  // 0: before all work

// Page work that one launch carries.
class LaunchWork {
 public:
  bool empty() const { return pieces_.empty(); }
  std::span<const kernels::PageRange> ranges() const { return ranges_; }
  int64_t places() const { return places_; }  // of all ranges
  int64_t bytes() const { return bytes_; }    // written

 private:
  friend class PageWorkQueue;
  void Clear() {
    ranges_.clear();
    pieces_.clear();
    places_ = bytes_ = 0;
  }
  std::vector<kernels::PageRange> ranges_;
  std::vector<int32_t> pieces_;
  int64_t places_ = 0;
  int64_t bytes_ = 0;
};

// What may be added to a launch's work.
struct WorkRoom {
  int64_t places = 0;  // of ranges; kMostPlaces at least take any piece
  int64_t bytes = 0;
  bool any = true;  // one piece may be larger, as the launch has nothing else to do
};

class PageWorkQueue {
 public:
  explicit PageWorkQueue(SlabPool* pool) : pool_(pool) {}

  // Places that a piece of work has at most; a group whose rows lie at more is copied whole.
  static constexpr int64_t kMostPlaces = 1024;

  // Queues zeroing of a group, or a copy of the first `rows` rows of each page into it, which is of
  // the whole group if `whole`. The source's rows below `rows` must stay as they are until then.
  // REQUIRES: no work into `target` is known.
  void AddZeroing(TenantKey tenant, uint32_t target, int64_t bytes);
  void AddCopy(TenantKey tenant, LayoutId layout, uint32_t target, uint32_t source, int32_t rows,
               bool whole);
  // The group has lost its last reference, or is about to: work into it that is still queued goes,
  // and the group's former mark returns unless a failed launch may have written. Nothing happens if
  // there is none, or if a copy reads it.
  void Cancel(uint32_t target);

  WorkTicket last() const { return last_; }
  // Whether work of the tenant up to the ticket is still queued.
  bool Waits(TenantKey tenant, WorkTicket until) const;
  // Moves the tenant's work up to the ticket into `work`, oldest first, as far as `room` goes and
  // reduces it. True when none of it is left in the queue.
  bool Take(TenantKey tenant, WorkTicket until, WorkRoom* room, LaunchWork* work);
  // The same for work of any tenant, to get it done.
  void TakeAny(WorkRoom* room, LaunchWork* work);
  // The launch has completed.
  void Acknowledge(LaunchWork* work);
  // Whether the launch carries work of the tenant up to the ticket.
  bool Carries(const LaunchWork& work, TenantKey tenant, WorkTicket until) const;
  // The launch has failed. When several have, the latest comes first.
  void Requeue(LaunchWork* work);

  int64_t queued() const { return queued_; }               // pieces that no launch has taken
  uint64_t bytes_copied() const { return bytes_copied_; }  // by launches that have completed

 private:
  static constexpr int32_t kNone = -1;
  struct Piece {
    TenantKey tenant = 0;
    uint32_t target = SlabPool::kNoEntry;
    uint32_t source = SlabPool::kNoEntry;  // kNoEntry: zeroing
    int64_t bytes = 0;
    int64_t places = 1;
    LayoutId layout = kNone;  // of a copy by rows
    int32_t rows = 0;
    WorkTicket ticket = 0;
    bool queued = false;
    bool tried = false;                  // by a launch that failed, and so done in part, perhaps
    int32_t prev = kNone, next = kNone;  // in its tenant's queue; next alone in the free list
  };
  struct Queue {
    int32_t head = kNone, tail = kNone;
  };

  Piece& At(int32_t piece) { return pieces_[static_cast<size_t>(piece)]; }
  const Piece& At(int32_t piece) const { return pieces_[static_cast<size_t>(piece)]; }
  void Add(const Piece& piece);
  void AddRanges(const Piece& piece, std::vector<kernels::PageRange>* ranges) const;
  void Link(int32_t piece, bool front);
  void Unlink(int32_t piece);
  // The piece is not known any more: its groups are unpinned.
  void Forget(int32_t piece);

  SlabPool* const pool_;
  std::vector<Piece> pieces_;
  int32_t free_ = kNone;
  absl::flat_hash_map<TenantKey, Queue> queues_;  // those that are not empty
  WorkTicket last_ = 0;
  int64_t queued_ = 0;
  uint64_t bytes_copied_ = 0;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_PAGE_WORK_H_
