// Device memory that one other process of the host maps as well, and events by which that process
// says that what it wrote there is complete.
//
// This process owns both: the other one opens the memory by a descriptor or a handle and the events
// by handles, and a death of the other one takes neither away. The memory is zeros when it is made.
//
// Ownership: from AttentionBackend::AllocateShared; the backend outlives it. The destructor waits
// until no launch uses the memory, at most for the time after which a launch counts as lost. What
// the other process has mapped stays in its hands until it unmaps it or ends.
// Threading: any thread; Done from one at a time.
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
  // Bytes of a handle in the vendors' runtimes.
  static constexpr size_t kHandleBytes = 64;
  using Handle = std::array<uint8_t, kHandleBytes>;
  // How the other process opens it.
  struct Export {
    bool nvidia = false;                    // else AMD
    std::array<uint8_t, 16> device_uuid{};  // as the runtime reports it
    int descriptor = -1;                    // of the whole memory; -1: `memory` is its handle
    Handle memory{};
    std::span<const Handle> events;
  };

  virtual ~SharedDeviceMemory() = default;
  // Device addresses, from a multiple of 64 on.
  virtual std::span<std::byte> bytes() const = 0;
  virtual const Export& exported() const = 0;
  // Whether what the other process recorded last in this event is complete; true if it recorded
  // nothing. Does not block. REQUIRES: event < exported().events.size().
  virtual absl::StatusOr<bool> Done(size_t event) = 0;
  // Stores a word of it soon, beside whatever the device does. Does not wait. False: the runtime
  // has no call for it.
  virtual bool StoresWords() const { return false; }
  virtual void StoreWord(uint32_t* word, uint32_t value) {
    static_cast<void>(word), static_cast<void>(value);
  }
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_SHARED_DEVICE_MEMORY_H_
