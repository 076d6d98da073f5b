// Reads and writes of a tier's file, many at the same time: by the kernel's queue (io_uring) if it
// exists, else by its own threads.
//
// If the kernel's queue does not finish a move, a plain call does the rest and reports any error.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_DISK_QUEUE_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_DISK_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "scheduler/kvcache/tiers/io_ring.h"
#include "scheduler/kvcache/tiers/tier_file.h"

namespace mla::kvcache {

// The caller owns it, and keeps it from Start until `done`.
struct DiskMove {
  bool write = false;
  std::span<std::byte> bytes;
  int64_t at = 0;  // in the file
  absl::Status status;
  std::function<void()> done;  // called once, from one of the queue's threads
};

// Thread-safe. Borrows the file.
class DiskQueue final {
 public:
  // At most this many moves are in the kernel's queue at a time; others wait.
  static constexpr uint32_t kMostAtOnce = 32;
  enum class Kind : uint8_t { kBest, kThreads };

  // `threads` is used if the kernel does not have a queue.
  DiskQueue(TierFile* file, int32_t threads, Kind kind = Kind::kBest);
  // Returns once running moves have ended. Waiting moves are dropped: their `done` is never called.
  ~DiskQueue();

  void Start(DiskMove* move);
  bool in_kernel() const { return ring_ != nullptr; }

 private:
  static constexpr uint64_t kStop = 0;  // the tag of no move

  void RunThread();
  void RunRing();
  // Does the rest of the move, after its first `done` bytes, by a plain call.
  void Finish(DiskMove* move, size_t done);
  // Starts waiting moves as long as the ring has room.
  void FillRing();
  // Starts waiting moves; returns the first one that the ring had no room for, or null.
  DiskMove* StartNext();

  TierFile* const file_;
  std::unique_ptr<IoRing> ring_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<DiskMove*> waiting_ ABSL_GUARDED_BY(mutex_);
  uint32_t in_ring_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_DISK_QUEUE_H_
