#include "server/pages/page_digest.h"

#include <xxhash.h>
#if defined(__x86_64__)
// Dispatches XXH3 to the widest vectors of the processor.
#include <xxh_x86dispatch.h>
#endif

namespace mla::server {

PageDigest::PageDigest(DigestKind kind)
    : sha256_(kind == DigestKind::kSha256 ? EVP_MD_CTX_new() : nullptr, EVP_MD_CTX_free),
      xxh3_(kind == DigestKind::kXxh3 ? XXH3_createState() : nullptr) {
  Begin();
}

PageDigest::~PageDigest() { XXH3_freeState(xxh3_); }

void PageDigest::Begin() {
  if (xxh3_ != nullptr) {
    XXH3_128bits_reset(xxh3_);
  } else {
    EVP_DigestInit_ex(sha256_.get(), EVP_sha256(), nullptr);
  }
}

void PageDigest::Add(absl::string_view bytes) {
  if (xxh3_ != nullptr) {
    XXH3_128bits_update(xxh3_, bytes.data(), bytes.size());
  } else {
    EVP_DigestUpdate(sha256_.get(), bytes.data(), bytes.size());
  }
}

std::string PageDigest::End() {
  if (xxh3_ != nullptr) {
    XXH128_canonical_t digest;
    XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(xxh3_));
    return std::string(reinterpret_cast<const char*>(digest.digest), sizeof(digest.digest));
  }
  std::string out(kMostDigestBytes, '\0');
  EVP_DigestFinal_ex(sha256_.get(), reinterpret_cast<unsigned char*>(out.data()), nullptr);
  return out;
}

}  // namespace mla::server
