// Wraps the kernel's queue of reads and writes (io_uring, through liburing), with only what a
// tier's file needs.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_IO_RING_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_IO_RING_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

struct io_uring;
struct io_uring_sqe;

namespace mla::kvcache {

// Threading: one thread at a time calls the Start functions. One thread calls Next, even at the
// same time.
class IoRing final {
 public:
  struct Ended {
    uint64_t tag = 0;
    int32_t result = 0;  // bytes, or -errno
  };

  // Returns null if the kernel does not have such a queue with reads and writes by address, or if
  // this process may not have one.
  static std::unique_ptr<IoRing> Make(uint32_t entries);
  ~IoRing();  // REQUIRES: Next has returned everything that was started
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  // At most `entries` operations may run at a time. Returns false if the kernel does not take the
  // operation now; it is then not started later either. A tag must not have all bits set.
  bool StartRead(int file, std::span<std::byte> buffer, int64_t offset, uint64_t tag);
  bool StartWrite(int file, std::span<const std::byte> from, int64_t offset, uint64_t tag);
  // Ends at once.
  bool StartNothing(uint64_t tag);
  // Waits for the next operation that ends, and returns it.
  Ended Next();

 private:
  explicit IoRing(std::unique_ptr<io_uring> ring);
  io_uring_sqe* Entry();  // null: no entry is free
  bool Submit(io_uring_sqe* entry, uint64_t tag);

  const std::unique_ptr<io_uring> ring_;
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_IO_RING_H_
