// The kernel's queue of reads and writes (io_uring), as far as a tier's file needs it.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_IO_RING_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_IO_RING_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

struct io_uring_cqe;
struct io_uring_sqe;

namespace mla::kvcache {

// Start: one thread at a time. Next: one thread, while others start.
class IoRing final {
 public:
  struct Ended {
    uint64_t tag = 0;
    int32_t result = 0;  // bytes, or -errno
  };

  // Null where the kernel has no such queue, or this process may not have one.
  static std::unique_ptr<IoRing> Make(uint32_t entries);
  ~IoRing();  // REQUIRES: Next has returned all that was started
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // At most `entries` at a time. False: the kernel takes none now.
  bool StartRead(int file, std::span<std::byte> to, int64_t at, uint64_t tag);
  bool StartWrite(int file, std::span<const std::byte> from, int64_t at, uint64_t tag);
  // Ends at once.
  bool StartNothing(uint64_t tag);
  // Waits for the next that has ended.
  Ended Next();

 private:
  struct Mapping {
    void* data = nullptr;
    size_t bytes = 0;
    bool Map(int ring, size_t size, int64_t offset);
    template <typename T>
    T* At(uint32_t offset) const {
      return reinterpret_cast<T*>(static_cast<std::byte*>(data) + offset);
    }
    ~Mapping();
  };

  IoRing() = default;
  bool Prepare(uint32_t entries);
  io_uring_sqe* Entry();
  bool Submit();

  int ring_ = -1;
  Mapping queues_, entries_;
  uint32_t* tail_ = nullptr;  // of what is started
  uint32_t* array_ = nullptr;
  uint32_t mask_ = 0;
  uint32_t* ended_head_ = nullptr;
  uint32_t* ended_tail_ = nullptr;
  uint32_t ended_mask_ = 0;
  io_uring_cqe* ended_ = nullptr;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_IO_RING_H_
