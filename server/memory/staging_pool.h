// Host memory for request payloads and replies, taken once at start.
//
// A buddy allocator over one region from Engine::AllocateHost. Device copies reach this memory
// directly, and nothing is allocated while serving. Blocks are powers of two of at least 4 KiB.
// They are aligned to 4 KiB within the region, and in memory to at least 64 bytes. A rest of the
// region of less than 4 KiB stays unused.
//
// Ownership: the pool owns the region; a Block is a move-only handle whose destructor returns the
// memory. Blocks must not outlive the pool. Threading: any thread; each call takes one short lock.
#ifndef MLA_SERVER_MEMORY_STAGING_POOL_H_
#define MLA_SERVER_MEMORY_STAGING_POOL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/attention_backend.h"

namespace mla::server {

class StagingPool final {
 public:
  class Block {
   public:
    Block() = default;
    Block(Block&& other) noexcept { *this = std::move(other); }
    Block& operator=(Block&& other) noexcept;
    ~Block() { Reset(); }
    std::byte* data() const { return data_; }
    size_t size() const { return size_; }  // as asked for
    explicit operator bool() const { return data_ != nullptr; }
    void Reset();

   private:
    friend class StagingPool;
    StagingPool* pool_ = nullptr;
    std::byte* data_ = nullptr;
    size_t size_ = 0;
    uint8_t order_ = 0;
  };

  static constexpr size_t kUnit = 4096;

  explicit StagingPool(std::unique_ptr<kernels::HostBuffer> memory);

  // Returns an empty block if no contiguous part is free, or if `bytes` is 0.
  Block Take(size_t bytes);
  // Returns a number that changes when memory comes back. A caller that found no room polls it
  // before it tries Take again.
  uint64_t releases() const;
  // Returns the bytes of the pool that a block of `bytes` takes.
  static size_t BlockBytes(size_t bytes) { return bytes == 0 ? 0 : kUnit << OrderFor(bytes); }
  size_t used_bytes() const;
  size_t total_bytes() const { return units_ * kUnit; }

 private:
  void Return(std::byte* data, uint8_t order);
  static uint8_t OrderFor(size_t bytes);
  void PushFree(uint32_t unit, uint8_t order) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveFree(uint32_t unit, uint8_t order) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  static constexpr uint32_t kNone = UINT32_MAX;
  struct Unit {
    // Links of the free list of its order; valid in the first unit of a free block.
    uint32_t next = kNone, prev = kNone;
    int8_t free_order = -1;
  };

  std::unique_ptr<kernels::HostBuffer> memory_;
  std::byte* base_ = nullptr;
  size_t units_ = 0;
  mutable Mutex mutex_;
  std::vector<Unit> unit_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mutex_);  // head of each order's list
  size_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t releases_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace mla::server

#endif  // MLA_SERVER_MEMORY_STAGING_POOL_H_
