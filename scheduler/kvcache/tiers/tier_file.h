// Reads and writes the file of the slowest tier: a header, then places for page groups. Nothing in
// it outlives the process: it is emptied at each start, and the places of rows and their seals are
// kept in memory only.
//
//   "MLATIER\n"  version: uint32 = 1  zeros up to kHeaderBytes  groups ...
//
// Reads and writes bypass the page cache (O_DIRECT) if the file system allows it.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_TIER_FILE_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_TIER_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace mla::kvcache {

// Sizes, offsets and addresses are multiples of this.
inline constexpr int64_t kTierBlock = 4096;

// Returns the part of the memory from its first multiple of kTierBlock on.
inline std::span<std::byte> FromBlock(std::span<std::byte> memory) {
  constexpr auto kBlock = static_cast<uintptr_t>(kTierBlock);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  return memory.subspan((kBlock - at % kBlock) % kBlock);
}

// Thread-safe: calls share only the descriptor.
class TierFile final {
 public:
  static constexpr int64_t kHeaderBytes = kTierBlock;

  // Opens the file and takes `bytes` of the disk for it. An existing file must be empty or a tier
  // file. It must belong to this user, have one name only and not be in use by another server. The
  // folder must exist. Afterwards only its user may read it. UNAVAILABLE with reason "disk_full" or
  // "disk_failed"; FAILED_PRECONDITION for a file of another kind.
  static absl::StatusOr<std::unique_ptr<TierFile>> Open(const std::string& path, int64_t bytes);
  // Removes the file.
  ~TierFile();

  // REQUIRES: `offset`, and size and address of `from` or `buffer`, are multiples of kTierBlock.
  absl::Status Write(int64_t offset, std::span<const std::byte> from);
  // Reads `buffer.size()` bytes from `offset` on. A file that ends before is an error.
  absl::Status Read(int64_t offset, std::span<std::byte> buffer);
  // Writes a block, reads it back and compares.
  absl::Status SelfTest();
  bool direct() const { return direct_; }
  int descriptor() const { return file_; }

 private:
  TierFile(std::string path, int file, bool direct)
      : path_(std::move(path)), file_(file), direct_(direct) {}
  absl::Status Prepare(int64_t bytes);
  // Takes the room of the whole file now, so that no later write finds the disk full. `bytes` is a
  // multiple of kTierBlock.
  absl::Status Allocate(int64_t bytes);
  absl::Status Failed(const char* what, int code) const;

  const std::string path_;
  const int file_;
  const bool direct_;
  bool ours_ = false;  // to be removed
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_TIER_FILE_H_
