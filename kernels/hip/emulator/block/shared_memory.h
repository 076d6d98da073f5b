// Shared memory of a block, and the copies to it that are in flight.
//
// A copy lands as late as its lane's waits allow, oldest first. From its start until it lands, the
// words that it fills hold NaN, and touching them is a fault. It is also a fault to touch words
// that another wave has written, or to write words that another wave has read, since the last
// barrier of the block, because their order would be chance. Words that were never written hold
// NaN.
//
// In kernels that synchronise by other means than barriers of the whole block, only copies are
// watched.
#ifndef MLA_KERNELS_HIP_EMULATOR_BLOCK_SHARED_MEMORY_H_
#define MLA_KERNELS_HIP_EMULATOR_BLOCK_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace mla::kernels::hip::host {

// A lane's copies in the order of their start.
class CopyQueue {
 public:
  struct Copy {
    char* to;
    const void* from;  // null: zeros
    int bytes;
    uint64_t group;  // of copies that are waited for together
    int turn;        // chunk c of 16 bytes lands in place c ^ turn
  };
  void Add(const Copy& copy);
  int count() const { return count_; }
  int64_t bytes() const { return bytes_; }  // bytes of all queued copies
  uint64_t open_group() const { return group_; }
  void CloseGroup() { ++group_; }
  const Copy& oldest() const { return ring_[static_cast<size_t>(first_)]; }
  void DropOldest();
  void Clear() {
    first_ = count_ = 0;
    bytes_ = 0;
  }

 private:
  static constexpr int kMost = 512;
  int first_ = 0, count_ = 0;
  int64_t bytes_ = 0;
  uint64_t group_ = 0;
  Copy ring_[kMost];
};

class SharedMemory {
 public:
  // Prepares for the next block.
  void Reset();
  // Returns `bytes` of shared memory; all lanes of a block ask for the same number.
  char* Base(size_t bytes);
  char* base() const { return memory_.get(); }

  // Call before a lane of wave `wave` reads or writes.
  void Read(const void* address, size_t bytes, int wave);
  void Write(const void* address, size_t bytes, int wave);
  // Call before an atomic operation; its order with atomic operations of other waves is free.
  void Update(const void* address, size_t bytes, int wave);

  void StartCopy(CopyQueue& queue, void* target, const void* from, int bytes, int wave,
                 int turn = 0);
  // Lands the oldest copies until `younger` are left, or all of groups before `group`.
  void LandAllBut(CopyQueue& queue, int younger, int wave);
  void LandBefore(CopyQueue& queue, uint64_t group, int wave);

  // Call when all waves have met.
  void NextInterval() { ++interval_; }
  // From here on waves of this block synchronise by other means than its barrier.
  void WatchCopiesOnly() { copies_only_ = true; }

 private:
  static constexpr uint8_t kUpdates = 0xff;  // as writer: atomic operations, by any waves
  struct Delete {
    void operator()(char* memory) const;
  };
  // State of four bytes. Intervals count from 1.
  struct Word {
    uint32_t written = 0;  // interval
    uint32_t read = 0;
    uint16_t readers = 0;  // a bit a wave
    uint8_t writer = 0;    // wave, or kUpdates
    bool in_flight = false;
  };
  Word* Words(const void* at, size_t bytes, const char* what, size_t* count);
  void Land(CopyQueue& queue, int wave);
  void Describe(const char* what, const void* at, int wave, int other) const;

  std::unique_ptr<char, Delete> memory_;
  size_t bytes_ = 0;
  std::vector<Word> words_;
  uint32_t interval_ = 1;
  bool taken_ = false;  // a lane of this block has asked for it
  bool copies_only_ = false;
};

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_SHARED_MEMORY_H_
