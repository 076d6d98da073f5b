// Digest of the bytes that launches carry between the pool and host memory: XXH3, 128 bits, of each
// part of kDigestPartBytes; the last part may be shorter. It detects corruption by memory, a copy
// or a bus. It does not protect against deliberate changes.
//
// A part fits in a near cache, so that a thread that copies it digests it without another read of
// memory. It is also small enough that a device digests many parts in parallel.
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

// Returns the digest of one part. Any thread.
PartDigest DigestOfPart(std::span<const std::byte> part);

}  // namespace mla::kernels

#endif  // MLA_KERNELS_TYPES_PART_DIGEST_H_
