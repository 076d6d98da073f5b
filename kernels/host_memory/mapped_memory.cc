#include "kernels/host_memory/mapped_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::kernels {

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedMemory::~MappedMemory() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
}

absl::StatusOr<MappedMemory> MappedMemory::Create(const char* what, int64_t bytes,
                                                  bool huge_pages) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": size got ", bytes, ", want >= 0"));
  }
  if (bytes == 0) return MappedMemory();
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": cannot map ", bytes, " bytes: ", std::strerror(errno)));
  }
  if (huge_pages) madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return MappedMemory(static_cast<std::byte*>(data), bytes);
}

}  // namespace mla::kernels
