// Tries of other servers to hand a sequence over here, which they have given up. The import of such
// a try may still be on its way, because calls of an ended connection are not ordered with calls of
// the next one: it must not bring a sequence that the other server goes on with.
//
// An import asks Contains between its BeginImport and its EndImport; a server that gives a try up
// calls Add and then evicts the sequence. So either the import sees the try here, or the eviction
// finds the sequence.
//
// Thread-safe.
#ifndef MLA_SERVER_HAND_OVER_ABANDONED_IMPORTS_H_
#define MLA_SERVER_HAND_OVER_ABANDONED_IMPORTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "base/mutex.h"

namespace mla::server {

// At most this many are remembered; the oldest are forgotten for new ones.
inline constexpr size_t kMostAbandonedImports = 4096;

class AbandonedImports final {
 public:
  // `attempt`: ImportTarget.attempt; 0 means no attempt and is ignored.
  void Add(uint64_t attempt) {
    const MutexLock lock(mutex_);
    if (attempt == 0 || !attempts_.insert(attempt).second) return;
    order_.push_back(attempt);
    if (order_.size() <= kMostAbandonedImports) return;
    attempts_.erase(order_.front());
    order_.pop_front();
  }
  bool Contains(uint64_t attempt) const {
    const MutexLock lock(mutex_);
    return attempts_.contains(attempt);
  }

 private:
  mutable Mutex mutex_;
  absl::flat_hash_set<uint64_t> attempts_ ABSL_GUARDED_BY(mutex_);
  std::deque<uint64_t> order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace mla::server

#endif  // MLA_SERVER_HAND_OVER_ABANDONED_IMPORTS_H_
