// Parts of page groups that wait for a launch to carry them between the pool and host memory.
//
// A move goes with the next launch that has room for it, in the order of arrival, once the page
// work that its group may need has been carried by an earlier launch: writes come before page work
// within one. Its group is pinned from the hand-over to the answer, so that it is not given to
// others even if its sequence ends meanwhile.
//
// Ownership: borrows cache and moves. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_MOVES_PAGE_MOVER_H_
#define MLA_SCHEDULER_MOVES_PAGE_MOVER_H_

#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "scheduler/batching/batch.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/page_moves.h"

namespace mla::scheduler {

using kvcache::PageMove;

class PageMover final {
 public:
  // Of all moves of one launch; a single one may be larger.
  static constexpr int64_t kLaunchBytes = int64_t{8} << 20;

  explicit PageMover(kvcache::KvCache* cache) : cache_(cache) {}

  // REQUIRES: the engine's fields are filled in, but for the pin.
  void Add(PageMove* move);
  bool waiting() const { return !waiting_.empty(); }
  // Adds to the batch what may go with its launch, and page work that moves wait for.
  void Take(const BatchPolicy& policy, Batch* batch);
  // Answers the moves of a launch that has ended.
  void Finish(Batch* batch, const absl::Status& status);
  // Answers all that wait.
  void Fail(const absl::Status& status);

  uint64_t bytes_out() const { return bytes_out_; }  // by launches that have completed
  uint64_t bytes_in() const { return bytes_in_; }

 private:
  void Answer(PageMove* move, const absl::Status& status);

  kvcache::KvCache* const cache_;
  std::deque<PageMove*> waiting_;
  uint64_t bytes_out_ = 0, bytes_in_ = 0;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MOVES_PAGE_MOVER_H_
