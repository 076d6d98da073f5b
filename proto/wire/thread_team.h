// Threads that share the work of one message: they copy large tensors, or check index lists.
//
// One core copies data that other cores have written at 6 to 13 GB/s, and four cores at 26 to 38
// GB/s. Copies into staging memory or a shared-memory region are most of the cost of a request with
// megabytes of tensors (docs/benchmarks/wire.md). The caller works too, and helpers take the pieces
// that are left when they come. So a team whose helpers sleep through a job is as fast as the
// caller alone, less the cost of waking them. The caller waits for a helper that loses its core in
// the midst of a piece, first spinning, then asleep. Teams larger than the number of usable CPUs
// are therefore slower than smaller ones.
//
// Helpers spin for a while after a job that was shared and then sleep until the next one. Small
// copies are the caller's own. Threading: Run and Gather from any thread; one that finds the team
// busy works alone. Ownership: the team owns its helpers; it outlives every Run. Only the
// constructor allocates.
#ifndef MLA_PROTO_WIRE_THREAD_TEAM_H_
#define MLA_PROTO_WIRE_THREAD_TEAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace mla::wire {

struct ThreadTeamOptions {
  // Threads that work, including the caller of Run; with 1 or less there are no helpers. If the
  // system refuses threads, the team uses the threads it got.
  int32_t threads = 1;
  int32_t spin_us = 0;  // spin time of a helper after a shared job
};

class ThreadTeam final {
 public:
  using Fragment = std::span<const std::byte>;
  using Work = absl::FunctionRef<void(uint32_t piece)>;

  // Copies of this many bytes and more are shared: for smaller ones, waiting for helpers would cost
  // as much as they save.
  static constexpr size_t kSharedBytes = size_t{512} << 10;

  explicit ThreadTeam(const ThreadTeamOptions& options);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // Does pieces 0 .. pieces - 1, each once and several at a time; returns when all are done. They
  // are begun in this order, so a piece may wait for earlier ones. Returns false if no piece was
  // done, because the team has no helpers or they are busy; the caller then does the work in its
  // own way.
  bool Run(uint32_t pieces, Work work);

  // Copies `size` bytes from `offset` of the joined fragments, as GatherBytes does. REQUIRES:
  // offset + size <= their total size.
  void Gather(std::span<const Fragment> fragments, size_t offset, size_t size,
              std::byte* destination);
  void Copy(Fragment from, std::byte* destination) {
    Gather({&from, 1}, 0, from.size(), destination);
  }

  int32_t threads() const { return static_cast<int32_t>(helpers_.size()) + 1; }
  // Returns the number of pieces that helpers have done since the start. When Run returns, the
  // pieces of its job are counted.
  uint64_t helped() const { return helped_.load(std::memory_order_relaxed); }

 private:
  // Size of the pieces of a copy. Large enough that a claim costs little, and small enough that the
  // threads need not wait long for the last piece.
  static constexpr size_t kPieceBytes = size_t{64} << 10;

  // The lock's holder does not change the work before all its pieces are finished. So a thread that
  // has claimed a piece calls it without the lock.
  bool DoPiece(bool helping) ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void RunShared(uint32_t pieces, const Work& work) ABSL_EXCLUSIVE_LOCKS_REQUIRED(busy_);
  void Help();

  const ThreadTeamOptions options_;
  Mutex busy_;  // held by the Run call that uses the helpers
  const Work* work_ ABSL_GUARDED_BY(busy_) = nullptr;
  uint32_t pieces_ ABSL_GUARDED_BY(busy_) = 0;
  // The pieces that no thread has claimed yet.
  alignas(64) std::atomic<uint32_t> unclaimed_{0};
  alignas(64) std::atomic<uint32_t> unfinished_{0};
  std::atomic<uint64_t> helped_{0};

  // Lock of helpers that go to sleep; guards no data. The conditions that wake them are set before
  // it is taken.
  Mutex sleep_;
  CondVar wake_;
  std::atomic<int32_t> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_THREAD_TEAM_H_
