// Owns device and pinned host memory, and lays out the regions of a launch slot.
#ifndef MLA_KERNELS_HIP_RUNTIME_DEVICE_MEMORY_H_
#define MLA_KERNELS_HIP_RUNTIME_DEVICE_MEMORY_H_

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "kernels/attention_backend.h"
#include "kernels/hip/runtime/gpu_runtime.h"

namespace mla::kernels::hip {

inline constexpr int64_t kRegionAlignment = 256;
inline int64_t AlignRegion(int64_t bytes) {
  return (bytes + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
}

// Lists the host memory that the device's copies reach directly, in pieces, because a copy may not
// cross from one piece into another. Any thread.
//
// A launch counts as user of the pieces that its copies reach, from Begin (after Find) until End. A
// piece is removed by Retire, then AwaitUnused.
class PinnedRanges {
 public:
  using Id = uint64_t;
  static constexpr Id kNone = 0;

  void Add(const void* at, int64_t bytes);
  // Returns the piece that holds these bytes.
  Id Find(const void* at, int64_t bytes) const;
  // Adds a user; returns false if the piece has been removed.
  bool Begin(Id piece);
  void End(std::span<const Id> pieces);
  // Hides the piece that begins at `at` from Find and returns it, or kNone if there is none.
  Id Retire(const void* at);
  // Forgets a retired piece once it is unused. Returns false if that took longer than `most`.
  bool AwaitUnused(Id piece, std::chrono::milliseconds most);

 private:
  struct Range {
    Id id;
    uintptr_t begin, end;
    int32_t uses;
    bool retired;
  };
  Range* Of(Id id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar unused_;
  std::vector<Range> ranges_ ABSL_GUARDED_BY(mutex_);
  Id last_ ABSL_GUARDED_BY(mutex_) = kNone;
};

// Owns device memory and frees it. Move-only. The runtime outlives it.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  ~DeviceBuffer() { Reset(); }
  DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  // Allocates the memory; RESOURCE_EXHAUSTED names `what`, the requested bytes and the API's text.
  static absl::StatusOr<DeviceBuffer> Create(GpuRuntime* runtime, const char* what, int64_t bytes);

  DevicePtr at() const { return at_; }
  int64_t bytes() const { return bytes_; }
  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(at_);
  }

 private:
  void Reset();
  GpuRuntime* runtime_ = nullptr;
  DevicePtr at_ = 0;
  int64_t bytes_ = 0;
};

// Owns pinned host memory, as DeviceBuffer does device memory.
class PinnedBuffer final : public HostBuffer {
 public:
  PinnedBuffer() = default;
  ~PinnedBuffer() override { Reset(); }
  PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  static absl::StatusOr<PinnedBuffer> Create(GpuRuntime* runtime, const char* what, int64_t bytes);

  std::span<std::byte> bytes() override { return {data_, static_cast<size_t>(size_)}; }
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  void Reset();
  GpuRuntime* runtime_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// A region of host and device memory of equal size. A launch fills it from the start, and one copy
// uploads it. Writing bytes that the device already holds changes nothing, so a launch like the
// previous one needs no upload.
class StagedRegion {
 public:
  static absl::StatusOr<StagedRegion> Create(GpuRuntime* runtime, const char* what, int64_t bytes);

  int64_t bytes() const { return host_.size(); }
  // Starts again at offset 0.
  void Clear();
  int64_t used() const { return used_; }
  // Returns true if the device lacks bytes that were written since Clear.
  bool changed() const { return changed_; }
  // Call when an upload of used() bytes has been enqueued, before the work that reads them.
  void NoteUpload();
  // Invalidates the cached copy: the next upload sends everything.
  void Forget() { known_ = 0; }
  // Reserves `bytes` more, aligned to kRegionAlignment, and returns their offset.
  // RESOURCE_EXHAUSTED names the region.
  absl::StatusOr<int64_t> Take(int64_t bytes);
  std::byte* host(int64_t offset) const { return host_.data() + offset; }
  DevicePtr device(int64_t offset) const { return device_.at() + static_cast<uint64_t>(offset); }
  // Returns the offset of an address in the region's device memory.
  int64_t OffsetOf(const std::byte* device) const {
    return static_cast<int64_t>(reinterpret_cast<DevicePtr>(device) - device_.at());
  }

  // Writes to bytes that Take has reserved.
  void Write(int64_t offset, const void* from, size_t bytes);

  // Copies `values` in and returns their device address.
  template <class T>
  absl::StatusOr<const T*> Put(std::span<const T> values) {
    MLA_ASSIGN_OR_RETURN(const int64_t begin, Take(static_cast<int64_t>(values.size_bytes())));
    Write(begin, values.data(), values.size_bytes());
    return reinterpret_cast<const T*>(device(begin));
  }
  // As Put, for the results of stored(value).
  template <class T, class Stored>
  absl::StatusOr<const T*> PutEach(std::span<const T> values, Stored&& stored) {
    MLA_ASSIGN_OR_RETURN(const int64_t begin, Take(static_cast<int64_t>(values.size_bytes())));
    int64_t offset = begin;
    for (const T& value : values) {
      T record = stored(value);
#if __has_builtin(__builtin_clear_padding)
      __builtin_clear_padding(&record);  // so that equal records have equal bytes
#endif
      Write(offset, &record, sizeof(T));
      offset += static_cast<int64_t>(sizeof(T));
    }
    return reinterpret_cast<const T*>(device(begin));
  }

 private:
  std::string what_;
  PinnedBuffer host_;
  DeviceBuffer device_;
  int64_t used_ = 0;
  int64_t known_ = 0;  // leading bytes that are equal on both sides, except changed ones
  bool changed_ = false;
};

}  // namespace mla::kernels::hip

#endif  // MLA_KERNELS_HIP_RUNTIME_DEVICE_MEMORY_H_
