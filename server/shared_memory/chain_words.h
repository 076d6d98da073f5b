// Keeps the words that announce chained entries of a ring and their answers
// (proto/wire/ring_layout.h). They lie in the ring and, if the client asks for that, in device
// memory.
//
// Words in device memory are stored by calls of the driver, which may take a while. So the ring's
// own thread makes these calls, at most one for each of its entries; other threads leave them to
// it.
//
// Borrows the region. Threading: call Enable first; then any thread.
#ifndef MLA_SERVER_SHARED_MEMORY_CHAIN_WORDS_H_
#define MLA_SERVER_SHARED_MEMORY_CHAIN_WORDS_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "kernels/shared_device_memory.h"
#include "kernels/types/word.h"
#include "proto/wire/ring_layout.h"

namespace mla::server {

class ChainWords {
 public:
  ChainWords(wire::RingHeader* header, wire::CompletionEntry* completions, uint64_t entries)
      : header_(header), completions_(completions), entries_(entries) {}

  // Offers words at the end of `device` if its runtime can store them. Returns
  // wire::DeviceHeader::words.
  uint64_t Enable(kernels::SharedDeviceMemory* device) {
    if (!device->StoresWords()) return 0;
    device_ = device;
    offset_ = device->bytes().size() - wire::NearbyBytes(entries_);
    const MutexLock lock(mutex_);
    later_.reserve(entries_);
    taken_.reserve(entries_);
    return offset_;
  }

  // Returns the words of submission `index`, at the client's present choice of memory.
  kernels::WordValue Ready(uint64_t index) const {
    return {&header_->ready, wire::PublishedSequence(index), Nearby(0)};
  }
  kernels::WordValue Done(uint64_t index) const {
    const uint64_t slot = index & (entries_ - 1);
    return {&completions_[slot].done, wire::PublishedSequence(index),
            Nearby(wire::NearbyDoneOffset(slot))};
  }
  // `signalled`: the device has stored the word in its memory already. Returns true if the ring's
  // thread must call StoreLater.
  bool Store(const kernels::WordValue& done, bool signalled) {
    done.Store();
    if (done.nearby == nullptr || signalled) return false;
    const MutexLock lock(mutex_);
    later_.push_back(done);
    any_later_ = true;
    return true;
  }
  bool HasLater() const { return any_later_; }
  // Call it on the ring's thread, or when that has ended. Calls the driver without holding the
  // mutex, because threads that bring answers to all clients take it.
  void StoreLater() {
    {
      const MutexLock lock(mutex_);
      later_.swap(taken_);
      any_later_ = false;
    }
    for (const kernels::WordValue& done : taken_) device_->StoreWord(done.nearby, done.value);
    taken_.clear();
  }

 private:
  uint32_t* Nearby(uint64_t offset) const {
    if (device_ == nullptr || std::atomic_ref(header_->nearby).load() == 0) return nullptr;
    return reinterpret_cast<uint32_t*>(device_->bytes().data() + offset_ + offset);
  }

  wire::RingHeader* const header_;
  wire::CompletionEntry* const completions_;
  const uint64_t entries_;
  kernels::SharedDeviceMemory* device_ = nullptr;
  uint64_t offset_ = 0;
  Mutex mutex_;
  std::vector<kernels::WordValue> later_ ABSL_GUARDED_BY(mutex_);
  // The words that StoreLater has taken out of later_; a member, so that its memory is used again.
  std::vector<kernels::WordValue> taken_;
  std::atomic<bool> any_later_{false};
};

}  // namespace mla::server

#endif  // MLA_SERVER_SHARED_MEMORY_CHAIN_WORDS_H_
