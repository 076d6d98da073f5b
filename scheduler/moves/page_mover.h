// Carries parts of page groups between the pool and host memory, with the launches.
//
// A move goes with the next launch that has room, in the order of arrival. Page work that its group
// needs must first have been carried by an earlier launch. A launch writes moved rows before it
// does its page work, so a launch that zeroes a group takes no rows into it: the zeroing would be
// done last. A move of more bytes than a launch may carry goes with several, one after another. Its
// group is pinned from Add to the answer, so that no other sequence gets it even if its own
// sequence ends before.
//
// Ownership: borrows the cache and the moves. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_MOVES_PAGE_MOVER_H_
#define MLA_SCHEDULER_MOVES_PAGE_MOVER_H_

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "scheduler/batching/batch_policy.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/page_moves.h"

namespace mla::scheduler {

using kvcache::PageMove;

class PageMover final {
 public:
  // All moves of one launch together: bounds how long steps wait for them.
  static constexpr int64_t kLaunchBytes = int64_t{8} << 20;

  explicit PageMover(kvcache::KvCache* cache) : cache_(cache) {}

  // REQUIRES: all fields of PageMove::engine except the pin are set.
  void Add(PageMove* move);
  bool waiting() const { return !waiting_.empty(); }
  // Adds to the batch the moves that may go with its launch, and page work for which moves wait.
  // Not needed unless waiting().
  void Take(const BatchPolicy& policy, Batch* batch);
  // Answers the moves of a launch that has ended; unfinished moves wait for the next launch.
  void Finish(Batch* batch, const absl::Status& status);
  // A launch has failed: answers the moves that wait for page work carried by it, because that work
  // may never be done. REQUIRES: the work has not been queued again yet.
  void FailBehind(const kvcache::LaunchWork& lost, const absl::Status& status);
  // Answers all that wait.
  void Fail(const absl::Status& status);

  uint64_t bytes_out() const { return bytes_out_; }  // by launches that have completed
  uint64_t bytes_in() const { return bytes_in_; }

 private:
  // Adds the part of the move's transfers that fits; returns false if nothing does.
  static bool AddPart(PageMove* move, kvcache::WorkRoom* room, Batch* batch);
  void Answer(PageMove* move, const absl::Status& status);

  kvcache::KvCache* const cache_;
  std::deque<PageMove*> waiting_;
  uint64_t bytes_out_ = 0, bytes_in_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MOVES_PAGE_MOVER_H_
