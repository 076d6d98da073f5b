// Checks of page groups outside the pool, 128 bits over all bytes of a group each:
//
//   in memory   a digest, XXH3 of the XXH3s of its parts (kernels/types/part_digest.h). It is as
//               fast as memory, or made by the launch that copies, and detects changes by faulty
//               memory or copies.
//   in a file   a seal, AES-GMAC (NIST SP 800-38D) under a key of this process, so that no other
//               process can make a valid one. Each seal has its own nonce, which is never used
//               again with the key.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_GROUP_CHECKS_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_GROUP_CHECKS_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kernels/types/part_digest.h"

namespace mla::kvcache {

struct GroupDigest {
  uint64_t low = 0, high = 0;

  friend bool operator==(const GroupDigest&, const GroupDigest&) = default;
};

GroupDigest DigestOf(std::span<const std::byte> bytes);
// Does what DigestOf does, from the digests of the group's parts.
GroupDigest DigestOfParts(std::span<const kernels::PartDigest> parts);

struct GroupSeal {
  uint64_t nonce = 0;
  std::array<std::byte, 16> tag = {};
};

// Thread-safe.
class GroupMac final {
 public:
  GroupMac();  // with an unpredictable key

  GroupSeal Seal(std::span<const std::byte> bytes);
  // Returns the seal of bytes with this digest, or nullopt if they have another digest. Reads the
  // memory once.
  std::optional<GroupSeal> SealIf(const GroupDigest& digest, std::span<const std::byte> bytes);
  bool Holds(const GroupSeal& seal, std::span<const std::byte> bytes) const;

 private:
  std::array<std::byte, 16> key_;
  std::atomic<uint64_t> next_{1};
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_GROUP_CHECKS_H_
