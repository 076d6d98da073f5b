// Seals of page groups that have left the pool: 128 bits over all bytes of a group, under a key of
// this process. They find what memory or a disk has changed, and without the key no other process
// can make one that holds.
//
// AES-GMAC (NIST SP 800-38D): each seal has a nonce of its own, which is never used again under the
// key.
#ifndef MLA_SCHEDULER_KVCACHE_TIERS_GROUP_MAC_H_
#define MLA_SCHEDULER_KVCACHE_TIERS_GROUP_MAC_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::kvcache {

struct GroupSeal {
  uint64_t nonce = 0;
  std::array<std::byte, 16> tag = {};
};

// Thread-safe.
class GroupMac final {
 public:
  GroupMac();  // with an unpredictable key

  GroupSeal Seal(std::span<const std::byte> bytes);
  bool Holds(const GroupSeal& seal, std::span<const std::byte> bytes) const;

 private:
  GroupSeal Compute(uint64_t nonce, std::span<const std::byte> bytes) const;

  std::array<std::byte, 16> key_;
  std::atomic<uint64_t> next_{1};
};

}  // namespace mla::kvcache

#endif  // MLA_SCHEDULER_KVCACHE_TIERS_GROUP_MAC_H_
