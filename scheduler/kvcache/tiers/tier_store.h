// Keeps page groups outside the pool: host memory, and a file. Rooms for groups of any size, and
// the work between them: seals, reads and writes, on threads of its own.
//
// The rows of a cached group never change, so each of its checks (group_checks.h) is computed once:
// the digest by the launch that takes them out of the pool, the seal when they go to the file, if
// the digest still holds. The seal is checked when they have come from the file. The disk works on
// other groups during this time (disk_queue.h).
//
// Ownership: owns the file and the threads; borrows memory. Threading: rooms belong to the engine
// role; jobs run on the store's threads, or in Start if there are none.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_TIER_STORE_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_TIER_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "scheduler/kvcache/pool/slab_pool.h"
#include "scheduler/kvcache/tiers/disk_queue.h"
#include "scheduler/kvcache/tiers/group_checks.h"
#include "scheduler/kvcache/tiers/tier_file.h"

namespace mla::kvcache {

// Manages the rooms of one tier. A budget of bytes is cut into rooms for groups of any size. Not
// thread-safe.
class TierRooms final {
 public:
  static constexpr uint32_t kNone = SlabPool::kNoEntry;

  explicit TierRooms(int64_t bytes) : pool_(bytes, 0, SlabPool::Books::kAsNeeded) {}
  // Returns the number of bytes of a group's room.
  static int64_t Rounded(int64_t bytes) {
    return (bytes + kTierBlock - 1) / kTierBlock * kTierBlock;
  }
  uint32_t Take(int64_t group_bytes);  // kNone: no room
  void Free(uint32_t room, int64_t group_bytes);
  int64_t offset(uint32_t room) const { return pool_.offset(room); }
  int64_t bytes_total() const { return pool_.stats().bytes_total; }
  int64_t bytes_used() const { return pool_.stats().bytes_used; }
  int64_t groups_used() const { return pool_.stats().groups_used; }

 private:
  struct Size {
    LayoutId layout = -1;
    int64_t groups = 0;
  };
  SlabPool pool_;
  std::map<int64_t, Size> sizes_;  // in use, by Rounded bytes
};

struct TierJob {
  enum class Kind : uint8_t {
    kWrite,  // checks `host` against the digest, makes the seal and writes `host` to the file
    kRead,   // reads `host` from the file and checks it against the seal
  };
  Kind kind = Kind::kWrite;
  std::span<std::byte> host;  // the group's room in host memory, up to a multiple of kTierBlock
  size_t bytes = 0;           // part of it covered by digest and seal
  int64_t at = 0;             // in the file
  GroupDigest digest;
  GroupSeal seal;
  // Valid once the job has been collected. DATA_LOSS: the digest or the seal does not match;
  // UNAVAILABLE: the disk failed.
  absl::Status status;

  // The store's.
  DiskMove disk;
  bool was_read = false;
};

struct TierStoreOptions {
  std::span<std::byte> memory;  // of the host tier; kTierBlock longer than host_bytes
  int64_t host_bytes = 0;
  std::string file_path;  // empty: no file
  int64_t file_bytes = 0;
  int32_t threads = 0;  // 0: jobs run in Start
};

class TierStore final {
 public:
  // Opens the store: empties the file, takes its bytes and tests it.
  static absl::StatusOr<std::unique_ptr<TierStore>> Open(const TierStoreOptions& options);
  ~TierStore();  // waits for jobs that run or are with the disk; drops the others

  TierRooms& host() { return host_; }
  const TierRooms& host() const { return host_; }
  TierRooms* file() { return file_rooms_.get(); }  // null: no file
  const TierRooms* file() const { return file_rooms_.get(); }
  bool direct() const { return file_ != nullptr && file_->direct(); }
  std::span<std::byte> host_bytes(uint32_t room, int64_t group_bytes) const {
    return memory_.subspan(static_cast<size_t>(host_.offset(room)),
                           static_cast<size_t>(TierRooms::Rounded(group_bytes)));
  }
  int64_t file_offset(uint32_t room) const {
    return TierFile::kHeaderBytes + file_rooms_->offset(room);
  }

  // Starts the job, which the caller owns and gets back from Collect.
  void Start(TierJob* job);
  // Returns the jobs that have ended since the last call.
  std::vector<TierJob*> Collect();
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }
  // `wake` is called from the store's threads when a job has ended. Call this before the first
  // Start.
  void set_wake(std::function<void()> wake) { wake_ = std::move(wake); }

 private:
  explicit TierStore(const TierStoreOptions& options);
  // Does the store thread's part of the job before the disk's part. Returns true if the disk has a
  // part to do.
  bool Prepare(TierJob* job);
  void Run(TierJob* job);
  void OnDisk(TierJob* job);
  void Queue(TierJob* job);
  void Work();
  // Called by the thread that has ended the job: Collect returns it from then on.
  void End(TierJob* job);

  GroupMac mac_;
  std::span<std::byte> memory_;
  TierRooms host_;
  std::unique_ptr<TierRooms> file_rooms_;
  std::unique_ptr<TierFile> file_;
  std::function<void()> wake_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<TierJob*> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<TierJob*> ended_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> has_ended_{false};
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
  std::unique_ptr<DiskQueue> disk_;  // null: the store has no threads or no file
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_TIER_STORE_H_
