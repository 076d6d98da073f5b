// Device work that page groups wait for: zeroing of groups that last belonged to another tenant,
// and copies of shared groups that a sequence will write into (copy-on-write).
//
// Zeroing waits in one queue for each tenant until a launch carries it. Groups never pass from one
// tenant to another while work on them is queued or runs. So the queues are independent of each
// other; within a queue the order is kept. A ticket names a place in the order of the queues: a
// step may run once its tenant's work up to the step's ticket has been carried by that launch or an
// earlier one.
//
// Copies are not queued. Each layer's copy is made by the launch that writes the first row after
// the copied ones (TakeLayer), or by an earlier launch. A GPU takes some microseconds for a
// launch's copies, however small. If layers come in order, a few launches therefore copy all of
// them, and at most twice as many layers are copied as are written. A copy has only the rows in
// use. A group with bytes of another tenant is overwritten whole, together with the first layer.
// The copy stays known, and its source pinned, until EndCopy or Cancel.
//
// A group has at most one piece of work that fills it, so there are at most as many pieces as the
// pool has groups. Work into a group that loses its last reference before a launch takes it is
// cancelled. Work that a launch has taken stays known until Acknowledge. Requeue takes back the
// work of a failed launch: zeroing goes to the front of its queue, in order, and layers of copies
// to the layers still to be copied. Until then its groups are pinned: the pool does not hand them
// out, and a source is not written below the rows that are to be copied.
//
// Threading: owned by the KvCache that holds it. Memory grows to the largest number of pieces that
// ever waited, and is kept.
#ifndef MLA_SCHEDULER_KVCACHE_POOL_PAGE_WORK_H_
#define MLA_SCHEDULER_KVCACHE_POOL_PAGE_WORK_H_

#include <bitset>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/attention_backend.h"
#include "scheduler/kvcache/pool/slab_pool.h"

namespace mla::kvcache {

using WorkTicket = uint64_t;  // 0: before all work

// Collects the page work that one launch carries.
class LaunchWork {
 public:
  bool empty() const { return parts_.empty(); }
  std::span<const kernels::PageRange> ranges() const { return ranges_; }
  int64_t places() const { return places_; }  // of all ranges
  int64_t bytes() const { return bytes_; }    // written

 private:
  friend class PageWorkQueue;
  void Clear() {
    ranges_.clear();
    parts_.clear();
    places_ = bytes_ = 0;
  }
  struct Part {
    int32_t piece = 0;
    int32_t layer = 0;  // of a copy
    int64_t bytes = 0;
  };
  std::vector<kernels::PageRange> ranges_;
  std::vector<Part> parts_;
  int64_t places_ = 0;
  int64_t bytes_ = 0;
};

// Bounds of the work that may be added to a launch.
struct WorkRoom {
  int64_t places = 0;  // places of ranges
  int64_t bytes = 0;
  bool any = true;  // one piece may exceed these bounds, because the launch has nothing else to do
};

class PageWorkQueue {
 public:
  explicit PageWorkQueue(SlabPool* pool) : pool_(pool) {}

  // Groups with more layers are copied as a whole, others layer by layer.
  static constexpr size_t kMostLayers = 1024;

  // Queues zeroing of a group. REQUIRES, like AddCopy: the queue knows no work that fills `target`.
  void AddZeroing(TenantKey tenant, uint32_t target, int64_t bytes);
  // Copies the first `rows` rows of each layer's page from `source` to `target`, or the whole group
  // if `whole`. REQUIRES: no work that fills `source` is known.
  void AddCopy(TenantKey tenant, LayoutId layout, uint32_t target, uint32_t source, int32_t rows,
               bool whole);
  // Called for a launch that will write the first rows of the layer after those copied to `target`:
  // adds the layer's copy to `work` and reduces `room`. If all earlier layers have been taken,
  // later ones are added as far as there is room, up to the number of layers already taken, this
  // one included. Does nothing without a copy into the group, which may be kNoEntry, or a launch
  // has taken the layer's copy. Returns false if the layer itself does not fit.
  bool TakeLayer(uint32_t target, int32_t layer, WorkRoom* room, LaunchWork* work);
  // Forgets a copy whose target the sequence keeps. REQUIRES: launches have copied every layer.
  void EndCopy(uint32_t target);
  // Called when the group has lost its last reference or is about to. Cancels the work into it that
  // no launch has taken. The group gets its former mark back unless a launch may have written to
  // it.
  void Cancel(uint32_t target);

  WorkTicket last() const { return last_; }
  // Returns true if work of the tenant up to the ticket is still queued.
  bool Waits(TenantKey tenant, WorkTicket until) const;
  // Moves the tenant's work up to the ticket into `work`, oldest first, as long as `room` allows,
  // and reduces `room`. Returns true if none of this work is left in the queue.
  bool Take(TenantKey tenant, WorkTicket until, WorkRoom* room, LaunchWork* work);
  // As Take, for work of any tenant, to make progress with it.
  void TakeAny(WorkRoom* room, LaunchWork* work);
  // Marks the work as done, once the launch that carried it has completed.
  void Acknowledge(LaunchWork* work);
  // Returns true if the launch carries work into the group.
  bool Fills(const LaunchWork& work, uint32_t target) const;
  // Returns true if the launch carries work of the tenant up to the ticket.
  bool Carries(const LaunchWork& work, TenantKey tenant, WorkTicket until) const;
  // Call it when the launch has failed. If several launches failed, call it for the latest first.
  void Requeue(LaunchWork* work);

  // Groups with zeroing that no launch has taken.
  int64_t queued() const { return queued_; }
  int64_t copies_open() const { return copies_open_; }  // copies that are known
  // Groups with a copied layer, and bytes copied, by launches that have completed.
  uint64_t groups_copied() const { return groups_copied_; }
  uint64_t bytes_copied() const { return bytes_copied_; }

 private:
  static constexpr int32_t kNone = -1;
  struct Piece {
    TenantKey tenant = 0;
    uint32_t target = SlabPool::kNoEntry;
    uint32_t source = SlabPool::kNoEntry;  // kNoEntry: zeroing
    int64_t bytes = 0;                     // of the group
    WorkTicket ticket = 0;                 // of zeroing
    bool queued = false;                   // of zeroing: in its queue
    // For a copy layer by layer; kNone: the whole group is copied, as layer 0.
    LayoutId layout = kNone;
    int32_t rows = 0;
    std::bitset<kMostLayers> left;  // layers of the copy that no launch has taken
    int32_t running = 0;            // running launches that carry it or layers of it
    bool begun = false;             // a launch has taken at least a part of it
    bool copied = false;            // ... and completed
    bool tried = false;             // ... and failed, so that a part of it may be done
    // Links of its tenant's queue; the free list uses next alone.
    int32_t prev = kNone, next = kNone;
    bool copies() const { return source != SlabPool::kNoEntry; }
  };
  struct Queue {
    int32_t head = kNone, tail = kNone;
  };

  Piece& At(int32_t piece) { return pieces_[static_cast<size_t>(piece)]; }
  const Piece& At(int32_t piece) const { return pieces_[static_cast<size_t>(piece)]; }
  int32_t Add(const Piece& piece);
  // Adds the layer of the copy unless a launch has taken it; returns false if it does not fit.
  bool AddLayer(int32_t piece, int32_t layer, WorkRoom* room, LaunchWork* work);
  // Adds a part of the piece to the launch; returns false if it does not fit.
  bool AddPart(int32_t piece, int32_t layer, int64_t places, int64_t bytes, WorkRoom* room,
               LaunchWork* work);
  void Link(int32_t piece, bool front);
  void Unlink(int32_t piece);
  // Removes the piece and unpins its groups.
  void Forget(int32_t piece);

  SlabPool* const pool_;
  std::vector<Piece> pieces_;
  int32_t free_ = kNone;
  absl::flat_hash_map<TenantKey, Queue> queues_;  // the non-empty ones
  WorkTicket last_ = 0;
  int64_t queued_ = 0;
  int64_t copies_open_ = 0;
  uint64_t groups_copied_ = 0, bytes_copied_ = 0;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_POOL_PAGE_WORK_H_
