#include "kernels/hip/runtime/device_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace mla::kernels::hip {
namespace {

absl::Status Named(const absl::Status& status, const char* what) {
  return absl::Status(status.code(), absl::StrCat(what, ": ", status.message()));
}

}  // namespace

void PinnedRanges::Add(const void* at, int64_t bytes) {
  const MutexLock lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(at);
  ranges_.push_back({++last_, begin, begin + static_cast<uintptr_t>(bytes), 0, false});
}

PinnedRanges::Range* PinnedRanges::Of(Id id) {
  const auto found =
      std::find_if(ranges_.begin(), ranges_.end(), [id](const Range& r) { return r.id == id; });
  return found == ranges_.end() ? nullptr : &*found;
}

PinnedRanges::Id PinnedRanges::Find(const void* at, int64_t bytes) const {
  const MutexLock lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(at);
  for (const Range& r : ranges_) {
    if (!r.retired && begin >= r.begin && begin + static_cast<uintptr_t>(bytes) <= r.end) {
      return r.id;
    }
  }
  return kNone;
}

bool PinnedRanges::Begin(Id piece) {
  const MutexLock lock(mutex_);
  Range* const range = Of(piece);
  if (range == nullptr || range->retired) return false;
  ++range->uses;
  return true;
}

void PinnedRanges::End(std::span<const Id> pieces) {
  bool unused = false;
  {
    const MutexLock lock(mutex_);
    for (const Id id : pieces) {
      Range* const range = Of(id);
      unused |= range != nullptr && --range->uses == 0 && range->retired;
    }
  }
  if (unused) unused_.NotifyAll();
}

PinnedRanges::Id PinnedRanges::Retire(const void* at) {
  const MutexLock lock(mutex_);
  const auto begin = reinterpret_cast<uintptr_t>(at);
  for (Range& r : ranges_) {
    if (r.retired || r.begin != begin) continue;
    r.retired = true;
    return r.id;
  }
  return kNone;
}

bool PinnedRanges::AwaitUnused(Id piece, std::chrono::milliseconds most) {
  MutexLock lock(mutex_);
  const bool unused = unused_.WaitFor(lock, most, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Range* range = Of(piece);
    return range == nullptr || range->uses == 0;
  });
  if (unused) std::erase_if(ranges_, [piece](const Range& r) { return r.id == piece; });
  return unused;
}

absl::StatusOr<DeviceBuffer> DeviceBuffer::Create(GpuRuntime* runtime, const char* what,
                                                  int64_t bytes) {
  DeviceBuffer buffer;
  if (bytes <= 0) return buffer;
  absl::StatusOr<DevicePtr> at = runtime->Malloc(bytes);
  if (!at.ok()) return Named(at.status(), what);
  buffer.runtime_ = runtime;
  buffer.at_ = *at;
  buffer.bytes_ = bytes;
  return buffer;
}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(runtime_, other.runtime_);
  std::swap(at_, other.at_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceBuffer::Reset() {
  if (runtime_ != nullptr) runtime_->Free(at_);
  runtime_ = nullptr;
}

absl::StatusOr<PinnedBuffer> PinnedBuffer::Create(GpuRuntime* runtime, const char* what,
                                                  int64_t bytes) {
  PinnedBuffer buffer;
  if (bytes <= 0) return buffer;
  absl::StatusOr<void*> at = runtime->MallocHost(bytes);
  if (!at.ok()) return Named(at.status(), what);
  buffer.runtime_ = runtime;
  buffer.data_ = static_cast<std::byte*>(*at);
  buffer.size_ = bytes;
  return buffer;
}

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(runtime_, other.runtime_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void PinnedBuffer::Reset() {
  if (runtime_ != nullptr) runtime_->FreeHost(data_);
  runtime_ = nullptr;
}

absl::StatusOr<StagedRegion> StagedRegion::Create(GpuRuntime* runtime, const char* what,
                                                  int64_t bytes) {
  StagedRegion region;
  region.what_ = what;
  MLA_ASSIGN_OR_RETURN(PinnedBuffer host, PinnedBuffer::Create(runtime, what, AlignRegion(bytes)));
  MLA_ASSIGN_OR_RETURN(DeviceBuffer device,
                       DeviceBuffer::Create(runtime, what, AlignRegion(bytes)));
  region.host_ = std::move(host);
  region.device_ = std::move(device);
  return region;
}

void StagedRegion::Clear() {
  if (changed_) known_ = 0;  // the written bytes were not uploaded
  used_ = 0;
  changed_ = false;
}

void StagedRegion::NoteUpload() {
  known_ = std::max(known_, used_);
  changed_ = false;
}

absl::StatusOr<int64_t> StagedRegion::Take(int64_t bytes) {
  const int64_t offset = AlignRegion(used_);
  if (bytes < 0 || offset + bytes > host_.size()) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what_, ": ", used_, " bytes used, ", bytes, " wanted, limit ", host_.size()));
  }
  used_ = offset + bytes;
  return offset;
}

void StagedRegion::Write(int64_t offset, const void* from, size_t bytes) {
  if (bytes == 0) return;
  const bool known = offset + static_cast<int64_t>(bytes) <= known_;
  if (known && std::memcmp(host(offset), from, bytes) == 0) return;
  std::memcpy(host(offset), from, bytes);
  changed_ = true;
}

}  // namespace mla::kernels::hip
