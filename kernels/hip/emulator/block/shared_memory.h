// Shared memory of a block, and the copies to it that are on their way.
//
// A copy lands as late as its lane's waits allow, oldest first. From its start until it lands the
// words it fills hold NaN, and touching them is a fault. So is touching what another wave has
// written, or writing what another wave has read, since the last barrier of the block: which of the
// two comes first is chance. Words that nothing has written hold NaN.
//
// Kernels that synchronise by other means than barriers of the whole block are watched for copies
// alone.
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
    const void* from;
    int bytes;
    uint64_t group;  // of copies that are waited for together
  };
  void Add(const Copy& copy);
  int count() const { return count_; }
  int64_t bytes() const { return bytes_; }  // of all copies in it
  uint64_t open_group() const { return group_; }
  void CloseGroup() { ++group_; }
  const Copy& oldest() const { return ring_[static_cast<size_t>(first_)]; }
  void DropOldest();
  void Clear() {
    first_ = count_ = 0;
    bytes_ = 0;
  }

 private:
  static constexpr int kMost = 128;
  int first_ = 0, count_ = 0;
  int64_t bytes_ = 0;
  uint64_t group_ = 0;
  Copy ring_[kMost];
};

class SharedMemory {
 public:
  // For the next block.
  void Reset();
  // `bytes` of shared memory, as all lanes of a block take it.
  char* Base(size_t bytes);
  char* base() const { return memory_.get(); }

  // Before a lane of wave `wave` reads or writes.
  void Read(const void* at, size_t bytes, int wave);
  void Write(const void* at, size_t bytes, int wave);
  // Before an atomic operation, which comes in any order with others of other waves.
  void Update(const void* at, size_t bytes, int wave);

  void StartCopy(CopyQueue& queue, void* to, const void* from, int bytes, int wave);
  // Lands the oldest copies until `younger` are left, or all of groups before `group`.
  void LandAllBut(CopyQueue& queue, int younger, int wave);
  void LandBefore(CopyQueue& queue, uint64_t group, int wave);

  // All waves have met.
  void NextInterval() { ++interval_; }
  // From here on waves of this block synchronise by other means.
  void WatchCopiesOnly() { copies_only_ = true; }

 private:
  static constexpr uint8_t kUpdates = 0xff;  // as writer: atomic operations, of any waves
  struct Delete {
    void operator()(char* memory) const;
  };
  // Of four bytes. Intervals count from 1.
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
  bool taken_ = false;  // by a lane of this block
  bool copies_only_ = false;
};

}  // namespace mla::kernels::hip::host

#endif  // MLA_KERNELS_HIP_EMULATOR_BLOCK_SHARED_MEMORY_H_
