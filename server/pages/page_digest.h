// Computes the digest of a page group, or of all groups of a stream: SHA-256, or XXH3 of 128 bits,
// which takes a tenth of the processor time. Both find what was damaged on its way. Neither proves
// who has written the bytes: TLS and keyed MACs do.
//
// Not thread-safe.
#ifndef MLA_SERVER_PAGES_PAGE_DIGEST_H_
#define MLA_SERVER_PAGES_PAGE_DIGEST_H_

#include <openssl/evp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

// XXH3's state; its header is not for every includer.
struct XXH3_state_s;

namespace mla::server {

enum class DigestKind : uint8_t { kSha256, kXxh3 };

// The longest digest has this number of bytes.
inline constexpr size_t kMostDigestBytes = 32;

class PageDigest final {
 public:
  explicit PageDigest(DigestKind kind);
  ~PageDigest();
  PageDigest(const PageDigest&) = delete;
  PageDigest& operator=(const PageDigest&) = delete;

  // Forgets what was added.
  void Begin();
  void Add(absl::string_view bytes);
  // Returns the digest of all that was added since Begin: 32 bytes of SHA-256, or 16 of XXH3, the
  // most significant first. Call Begin before the next Add.
  std::string End();

 private:
  // One of the two is there.
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> sha256_;
  XXH3_state_s* const xxh3_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_PAGES_PAGE_DIGEST_H_
