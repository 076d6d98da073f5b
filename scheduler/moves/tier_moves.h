// Moves page groups between the pool and slower tiers, and decides which move and when.
//
//   pool --(launch reads)---> host memory --(thread writes)--> file
//   pool <--(launch writes)-- host memory <--(thread reads)--- file
//
// Only groups that the prefix cache alone holds leave the pool: the oldest of a layout, once less
// than tier_low_percent of the pool, or of what its tenant may have, is free, until
// tier_high_percent are. A copy stays while its tier has room, so a group that returns to the pool
// and leaves again is not copied again. With a file, host memory is freed between the same two
// marks, the oldest copies first. A copy is dropped if the pool or the file has the rows too. A
// group that at least tier_file_hits matches have used goes to the file; other groups are
// forgotten.
//
// Bytes move with launches (PageMover) and on the store's threads; the role only keeps the books.
// Every copy is checked, by its digest or its seal, before its rows can be seen and before its
// bytes go to the file. A damaged copy is dropped, counted and reported as an event; matches then
// miss. Launches that copy also make digests (PageTransfer::digests), of bytes leaving the pool and
// of bytes written into it.
//
// Ownership: owns the store; borrows everything else. Threading: owned by the engine role.
#ifndef MLA_SCHEDULER_MOVES_TIER_MOVES_H_
#define MLA_SCHEDULER_MOVES_TIER_MOVES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "scheduler/clock.h"
#include "scheduler/engine_types.h"
#include "scheduler/kvcache/kv_cache.h"
#include "scheduler/kvcache/tiers/tier_copies.h"
#include "scheduler/kvcache/tiers/tier_store.h"
#include "scheduler/limits.h"
#include "scheduler/moves/page_mover.h"
#include "scheduler/moves/waiting_pages.h"

namespace mla::scheduler {

class TierMoves final {
 public:
  // Bound for all moves at the same time; a single group may be larger.
  static constexpr int64_t kMovingBytes = int64_t{64} << 20;
  static constexpr size_t kMostMoves = 16;
  // One call of Pump moves at most this many groups out of the pool or out of host memory.
  static constexpr int kMostAtOnce = 256;
  // Restored pages stay in the pool for tiers.wait_ms, and at least this time, so that the waiting
  // call finds them.
  static constexpr int64_t kLeastKeptMs = 1000;
  // Nothing moves for this time after a failed launch: the device may be lost.
  static constexpr int64_t kRetryMs = 1000;

  TierMoves(const Limits& limits, kvcache::KvCache* cache, PageMover* mover, const Clock* clock,
            std::unique_ptr<kvcache::TierStore> store);
  // Waits for running jobs. REQUIRES: launches move nothing for it any more.
  ~TierMoves();

  // Continues moves whose last stage has ended, and starts new ones. Never waits. Returns true if
  // it did anything.
  bool Pump();
  // Returns true if Pump might do something.
  bool ready() const;
  // Restores the demoted pages of the chain, from the page that begins at `first_row` on, as far as
  // they are known and wanted, and the pool and the queue (WaitingPages) have room. Returns null if
  // there is nothing to wait for. With `waits`, a page still queued after twice the wait of a call
  // is dropped: the caller may have repeated the call once. Without `waits` no caller waits, and
  // queued pages are not dropped.
  std::shared_ptr<TierWait> Restore(kvcache::LayoutId layout, const kvcache::PrefixChain& chain,
                                    int64_t first_row, int64_t most_rows, bool waits = true);
  // Moves the group of a node of the prefix cache out of the pool: at once if it has a copy in a
  // slower tier, else as soon as it has been copied. Groups that are in use when their turn comes
  // stay. Returns false and does nothing during the pause after a failed launch, or if too many
  // groups wait already.
  bool Leave(int32_t node);
  // `wake` is called from other threads when Pump has something to do. Call it before any move
  // starts.
  void set_wake(std::function<void()> wake) { store_->set_wake(std::move(wake)); }
  TierStats stats() const;

 private:
  enum class Kind : uint8_t { kDemote, kRestore, kStore };
  struct Move {
    Kind kind = Kind::kDemote;
    int32_t node = -1;
    uint64_t life = 0;
    kvcache::LayoutId layout = -1;
    TenantKey tenant = 0;
    int64_t bytes = 0;
    kvcache::KvCache::RestoreRoom restore;
    uint32_t room = kvcache::TierCopies::kNoRoom;         // not yet assigned to the node
    kvcache::TierIndex from = kvcache::TierIndex::kHost;  // for a restore
    MonotonicNanos began = 0;
    kvcache::TierJob job;
    PageMove part;
    std::vector<kernels::PartDigest> digests;  // of `part`
    absl::Status part_status;
    std::vector<WaitingPage> wanted;  // whose page it is
  };
  struct Keeping {
    uint64_t life = 0;
    MonotonicNanos until = 0;
  };

  bool Lives(const Move& move) const { return copies_.Lives(move.node, move.life); }
  bool MayBegin(int64_t bytes) const;
  Move* Begin(Kind kind, int32_t node);
  Move* Find(int32_t node) const;
  void End(Move* move);
  std::span<std::byte> HostBytes(const Move& move) const;
  void StartJob(Move* move, kvcache::TierJob::Kind kind);
  void StartPart(Move* move, uint32_t entry, bool in);
  // Counts a fault of the tier: it returned other bytes than were stored (`damaged`), or none.
  void Fault(kvcache::TierIndex tier, int32_t node, bool damaged);
  TierFigures& Figures(kvcache::TierIndex tier) {
    return tier == kvcache::TierIndex::kHost ? stats_.host : stats_.file;
  }

  // Returns how long restored pages are kept in the pool.
  int64_t KeepNanos() const;
  // Keeps the node's group in the pool for that time.
  void Keep(int32_t node);
  bool Kept(int32_t node) const;
  bool Pauses() const { return clock_->Now() < retry_at_; }

  // --- Out of the pool
  int64_t MarkOf(kvcache::LayoutId layout, int32_t percent) const;
  int64_t FreeOf(kvcache::LayoutId layout) const;
  bool WantsRoom(kvcache::LayoutId layout) const;
  bool DemoteOne();
  bool DemoteWanted();
  // Begins to copy the group to a slower tier. Returns false if it cannot go now.
  bool DemoteGroup(kvcache::LayoutId layout, uint32_t entry);
  void OnCopied(Move* move, const kvcache::GroupDigest& digest);
  // --- Out of host memory
  bool StoreOne();
  void OnWritten(Move* move);
  // --- Back
  void Want(const WaitingPage& page);
  // Tells the waiting caller that its page was restored, or that its restore was abandoned.
  void Answer(const WaitingPage& page);
  void DropUnwanted();
  bool RestoreOne();
  void OnRead(Move* move);
  void WriteToPool(Move* move);
  void OnRestored(Move* move);
  // Ends a restore because the copy in this tier is faulty. If there is another copy, the waiting
  // callers get that one.
  void EndFaulty(Move* move, kvcache::TierIndex tier, bool damaged);

  void OnJob(Move* move);
  void OnPart(Move* move);

  const Limits& limits_;
  kvcache::KvCache* const cache_;
  PageMover* const mover_;
  const Clock* const clock_;
  std::vector<std::unique_ptr<Move>> moves_;  // outlive the store's threads
  const std::unique_ptr<kvcache::TierStore> store_;
  kvcache::TierCopies copies_;
  std::vector<Move*> parts_done_;
  WaitingPages wanted_;                         // back
  WaitingPages leaving_;                        // to leave the pool
  absl::flat_hash_map<int32_t, Keeping> kept_;  // by node
  MonotonicNanos drop_kept_at_ = 0;
  MonotonicNanos drop_unwanted_at_ = 0;
  MonotonicNanos retry_at_ = 0;
  int64_t moving_bytes_ = 0;
  int64_t leaving_bytes_ = 0;  // part of moving_bytes_ that leaves the pool
  // The layout whose groups are being demoted until its high mark is reached.
  kvcache::LayoutId demoting_ = -1;
  bool storing_ = false;
  uint64_t looked_at_ = ~uint64_t{0};  // the cache's steps() after the last Pump
  TierStats stats_;
};

}  // namespace mla::scheduler

#endif  // MLA_SCHEDULER_MOVES_TIER_MOVES_H_
