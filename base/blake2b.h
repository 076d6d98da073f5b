// Computes BLAKE2b (RFC 7693) digests of any length, with a key or without one, equal to those of
// Python's hashlib. OpenSSL 3.0 has digests shorter than 64 bytes with a key only, and the clients
// of a cluster must agree on hashes without one. For names and places, not for secrets: its time
// depends on lengths alone, its memory is not wiped.
#ifndef MLA_BASE_BLAKE2B_H_
#define MLA_BASE_BLAKE2B_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace mla {

inline constexpr size_t kMostBlake2bBytes = 64;  // of a key, and of a digest

// Threading: one thread at a time.
class Blake2b final {
 public:
  // REQUIRES: 1 to 64 bytes of digest, at most 64 bytes of key.
  explicit Blake2b(size_t digest_bytes, std::string_view key = {});

  void Add(std::string_view bytes);
  void AddNumber(uint32_t value);  // four bytes, the lowest first
  std::string Digest();            // to be called once

 private:
  static constexpr size_t kBlockBytes = 128;
  void Compress(bool last);

  const size_t digest_bytes_;
  std::array<uint64_t, 8> state_;
  std::array<unsigned char, kBlockBytes> block_{};
  size_t filled_ = 0;   // bytes of the block
  uint64_t count_ = 0;  // bytes before the block
};

}  // namespace mla

#endif  // MLA_BASE_BLAKE2B_H_
