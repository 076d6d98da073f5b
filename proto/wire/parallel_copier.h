// Threads that copy large tensors together.
//
// One core copies at 6 to 13 GB/s what other cores have written, four at 26 to 38: on the way of
// megabytes into staging memory or into a shared-memory region this is most of what a request costs
// (docs/benchmarks/wire.md). The caller copies, too, and helpers take whatever pieces are left when
// they come; so a team whose helpers sleep through a copy is as fast as the caller alone, less the
// cost of waking them. A helper that loses its core in the midst of a piece is waited for, first
// spinning, then asleep: teams larger than the number of usable CPUs are slower than smaller ones.
//
// Helpers spin for a while after a copy that was shared and then sleep until the next one. Small
// copies are the caller's own. Threading: Copy from any thread; one that finds the team busy copies
// alone. Ownership: the team owns its helpers; it outlives every Copy. Nothing allocates but the
// constructor.
#ifndef MLA_PROTO_WIRE_PARALLEL_COPIER_H_
#define MLA_PROTO_WIRE_PARALLEL_COPIER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace mla::wire {

struct ParallelCopierOptions {
  // That copy, the caller of Copy among them; 1 and less: no helpers. Where the system has no more
  // threads the team does with those that it got.
  int32_t threads = 1;
  int32_t spin_us = 0;  // of a helper, after a shared copy
};

class ParallelCopier final {
 public:
  using Fragment = std::span<const std::byte>;

  // Copies of this many bytes and more are shared: below, waiting for helpers costs what they save.
  static constexpr size_t kSharedBytes = size_t{512} << 10;

  explicit ParallelCopier(const ParallelCopierOptions& options);
  ~ParallelCopier();
  ParallelCopier(const ParallelCopier&) = delete;
  ParallelCopier& operator=(const ParallelCopier&) = delete;

  // Copies `size` bytes from `offset` of what the fragments hold together, as GatherBytes does.
  // REQUIRES: offset + size <= their total size.
  void Gather(std::span<const Fragment> fragments, size_t offset, size_t size, std::byte* to);
  void Copy(Fragment from, std::byte* to) { Gather({&from, 1}, 0, from.size(), to); }

  int32_t threads() const { return static_cast<int32_t>(helpers_.size()) + 1; }
  // Pieces that helpers have copied since the start, those of all returned copies among them.
  uint64_t helped() const { return helped_.load(std::memory_order_relaxed); }

 private:
  // Pieces are claimed one by one. Large enough for the claim to cost nothing, small enough that
  // the last one does not keep the others waiting.
  static constexpr size_t kPieceBytes = size_t{64} << 10;

  struct Job {
    std::span<const Fragment> fragments;
    size_t offset = 0, size = 0;
    std::byte* to = nullptr;
  };

  // The lock's holder does not change the job before all its pieces are finished, so a thread that
  // has claimed one reads the job without the lock.
  bool CopyPiece(bool helping) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void CopyShared(const Job& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(busy_);
  void Help();

  const ParallelCopierOptions options_;
  Mutex busy_;  // held by the Copy that has the helpers
  Job job_ ABSL_GUARDED_BY(busy_);
  // Pieces that no thread has claimed.
  alignas(64) std::atomic<uint32_t> unclaimed_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  std::atomic<uint64_t> helped_{0};

  // Of helpers that go to sleep; guards no data. What wakes them is set before it is taken.
  Mutex sleep_;
  CondVar wake_;
  std::atomic<int32_t> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_PARALLEL_COPIER_H_
