// What bytes that launches carry between the pool and host memory are checked by: XXH3, 128 bits,
// of each part of kDigestPartBytes; the last part may be shorter. It finds what memory, a copy or a
// bus has changed, and is no protection against someone who means to change it.
//
// Parts are as long as a near cache is small, so that who copies a part has it at hand for its
// digest, and so short that a device makes many at a time.
#ifndef MLA_KERNELS_TYPES_PART_DIGEST_H_
#define MLA_KERNELS_TYPES_PART_DIGEST_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace mla::kernels {

inline constexpr int64_t kDigestPartBytes = 4096;

struct PartDigest {
  uint64_t low = 0, high = 0;  // halves of XXH3's 128 bits

  friend bool operator==(const PartDigest&, const PartDigest&) = default;
};

constexpr int64_t DigestParts(int64_t bytes) {
  return (bytes + kDigestPartBytes - 1) / kDigestPartBytes;
}

// Of one part. Any thread.
PartDigest DigestOfPart(std::span<const std::byte> part);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_PART_DIGEST_H_
