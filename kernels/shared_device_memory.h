// Device memory that one other process of the host maps as well, with events by which that process
// reports that its writes there are complete.
//
// This process owns both, so the death of the other process releases neither. The other process
// opens the memory by a descriptor or a handle, and the events by handles. The memory is zeroed
// when it is made.
//
// Ownership: from AttentionBackend::AllocateShared; the backend outlives it. The destructor waits
// until no launch uses the memory, at most for the time after which a launch counts as lost. The
// other process keeps its mapping until it unmaps it or ends.
// Threading: any thread; Done from one thread at a time.
#ifndef MLA_KERNELS_SHARED_DEVICE_MEMORY_H_
#define MLA_KERNELS_SHARED_DEVICE_MEMORY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"

namespace mla::kernels {

class SharedDeviceMemory {
 public:
  // A handle has this number of bytes in the vendors' runtimes.
  static constexpr size_t kHandleBytes = 64;
  using Handle = std::array<uint8_t, kHandleBytes>;
  // Tells the other process how to open the memory.
  struct Export {
    bool nvidia = false;                    // else AMD
    std::array<uint8_t, 16> device_uuid{};  // as the runtime reports it
    int descriptor = -1;                    // of the whole memory; -1 if `memory` is its handle
    Handle memory{};
    std::span<const Handle> events;
  };

  virtual ~SharedDeviceMemory() = default;
  // Returns device addresses; the first is a multiple of 64.
  virtual std::span<std::byte> bytes() const = 0;
  virtual const Export& exported() const = 0;
  // Returns true if the work that the other process recorded last in this event is complete, or if
  // it recorded nothing. Does not block. REQUIRES: event < exported().events.size().
  virtual absl::StatusOr<bool> Done(size_t event) = 0;
  // StoreWord stores a word of the memory soon, concurrently with the device's other work, and does
  // not wait. StoresWords returns false if the runtime has no call for it.
  virtual bool StoresWords() const { return false; }
  virtual void StoreWord(uint32_t* word, uint32_t value) {
    static_cast<void>(word), static_cast<void>(value);
  }
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_SHARED_DEVICE_MEMORY_H_
