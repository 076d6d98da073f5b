// Anonymous memory for pools and workspaces: sparse, zero-filled on first touch, page aligned.
//
// A mapping reserves address space only; a page costs memory from its first write on. So a pool of
// many gigabytes can be configured (and tested) on a small machine while little of it is used.
// Ownership: move-only; the mapping ends with the object, and with it every pointer into it.
// Threading: the object has no lock. Its methods may be called from any thread while no thread
// moves or destroys it; who may touch which bytes is the user's matter.
#ifndef MLA_KERNELS_HOST_MEMORY_MAPPED_MEMORY_H_
#define MLA_KERNELS_HOST_MEMORY_MAPPED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "kernels/attention_backend.h"

namespace mla::kernels {

class MappedMemory {
 public:
  MappedMemory() = default;
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  ~MappedMemory();

  // `what` names the mapping in the error. RESOURCE_EXHAUSTED when the address space cannot be had,
  // INVALID_ARGUMENT for negative sizes. Zero bytes are a valid, empty mapping. `huge_pages` asks
  // for transparent huge pages, which the system may decline; memory of at least 2 MiB then begins
  // at a huge page.
  static absl::StatusOr<MappedMemory> Create(const char* what, int64_t bytes, bool huge_pages);

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  template <typename T>
  T* As(int64_t byte_offset = 0) const {
    return reinterpret_cast<T*>(data_ + byte_offset);
  }

 private:
  MappedMemory(std::byte* data, int64_t size) : data_(data), size_(size) {}
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// The HostBuffer that host backends return from AllocateHost: a mapping.
class MappedHostBuffer final : public HostBuffer {
 public:
  explicit MappedHostBuffer(MappedMemory memory) : memory_(static_cast<MappedMemory&&>(memory)) {}
  std::span<std::byte> bytes() override {
    return {memory_.data(), static_cast<size_t>(memory_.size())};
  }

 private:
  MappedMemory memory_;
};

}  // namespace mla::kernels

#endif  // MLA_KERNELS_HOST_MEMORY_MAPPED_MEMORY_H_
