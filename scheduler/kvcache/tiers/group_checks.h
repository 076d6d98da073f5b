// What page groups outside the pool are checked by, 128 bits over all bytes of a group each:
//
//   in memory   a digest, XXH3 of the XXH3s of its parts (kernels/types/part_digest.h), at the
//   speed
//               of memory or made by the launch that copies. It finds what memory or a copy has
//               changed.
//   in a file   a seal, AES-GMAC (NIST SP 800-38D) under a key of this process, so that no other
//               process can make one that holds. Each seal has a nonce of its own, which is never
//               used again under the key.
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
// The same of a group whose parts have these.
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
  // Of bytes that are to have this digest; none if they have another. One pass over memory.
  std::optional<GroupSeal> SealIf(const GroupDigest& digest, std::span<const std::byte> bytes);
  bool Holds(const GroupSeal& seal, std::span<const std::byte> bytes) const;

 private:
  std::array<std::byte, 16> key_;
  std::atomic<uint64_t> next_{1};
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_GROUP_CHECKS_H_
