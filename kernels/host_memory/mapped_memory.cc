#include "kernels/host_memory/mapped_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace mla::kernels {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Maps `bytes` of address space that begin at a multiple of kHugePage, so that their first bytes
// can lie in a huge page, too: the kernel aligns only mappings whose size is such a multiple.
// Returns MAP_FAILED where mmap does.
void* MapAligned(size_t bytes) {
  const size_t whole = bytes + kHugePage;
  void* const data = mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return data;
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t end = (aligned + bytes + page - 1) / page * page;
  if (aligned > begin) munmap(data, aligned - begin);
  if (begin + whole > end) munmap(reinterpret_cast<void*>(end), begin + whole - end);
  return reinterpret_cast<void*>(aligned);
}

}  // namespace

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
  const auto size = static_cast<size_t>(bytes);
  void* const data = huge_pages && size >= kHugePage
                         ? MapAligned(size)
                         : mmap(nullptr, size, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": cannot map ", bytes, " bytes: ", std::strerror(errno)));
  }
  if (huge_pages) madvise(data, size, MADV_HUGEPAGE);
  return MappedMemory(static_cast<std::byte*>(data), bytes);
}

}  // namespace mla::kernels
