#include "scheduler/kvcache/tiers/group_checks.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sys/random.h>
#include <xxhash.h>
#if defined(__x86_64__)
// The same functions by the widest vectors that the processor has.
#include <xxh_x86dispatch.h>
#endif

#include <algorithm>
#include <cstring>
#include <memory>

#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr size_t kNonceBytes = 12;
// What two algorithms look at in turn, so that the second finds it in a near cache.
constexpr size_t kPartBytes = size_t{64} << 10;

struct Free {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

const unsigned char* Bytes(const void* data) { return static_cast<const unsigned char*>(data); }

GroupDigest FromHash(const XXH128_hash_t& hash) { return {hash.low64, hash.high64}; }

// A seal in the making.
class Sealing {
 public:
  Sealing(std::span<const std::byte, 16> key, uint64_t nonce)
      : context_(EVP_CIPHER_CTX_new()), seal_{nonce, {}} {
    std::array<unsigned char, kNonceBytes> iv = {};
    std::memcpy(iv.data(), &nonce, sizeof(nonce));
    Must(context_ != nullptr && EVP_EncryptInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr,
                                                   Bytes(key.data()), iv.data()) == 1);
  }
  // At most kPartBytes: the library counts in int.
  void Add(std::span<const std::byte> part) {
    int ignored = 0;
    Must(EVP_EncryptUpdate(context_.get(), nullptr, &ignored, Bytes(part.data()),
                           static_cast<int>(part.size())) == 1);
  }
  GroupSeal End() {
    int ignored = 0;
    Must(EVP_EncryptFinal_ex(context_.get(), nullptr, &ignored) == 1 &&
         EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG,
                             static_cast<int>(seal_.tag.size()), seal_.tag.data()) == 1);
    return seal_;
  }

 private:
  static void Must(bool good) { Require(good, "the cryptographic library makes no GMAC"); }

  const std::unique_ptr<EVP_CIPHER_CTX, Free> context_;
  GroupSeal seal_;
};

// Calls each(part) for all parts of the bytes, in their order.
template <typename Each>
void ForParts(std::span<const std::byte> bytes, Each each) {
  for (size_t at = 0; at < bytes.size(); at += kPartBytes) {
    each(bytes.subspan(at, std::min(kPartBytes, bytes.size() - at)));
  }
}

}  // namespace

GroupDigest DigestOf(std::span<const std::byte> bytes) {
  return FromHash(XXH3_128bits(bytes.data(), bytes.size()));
}

GroupMac::GroupMac() {
  Require(getrandom(key_.data(), key_.size(), 0) == static_cast<ssize_t>(key_.size()),
          "the system gives no random numbers");
}

GroupSeal GroupMac::Seal(std::span<const std::byte> bytes) {
  Sealing sealing(key_, next_.fetch_add(1, std::memory_order_relaxed));
  ForParts(bytes, [&](std::span<const std::byte> part) { sealing.Add(part); });
  return sealing.End();
}

std::optional<GroupSeal> GroupMac::SealIf(const GroupDigest& digest,
                                          std::span<const std::byte> bytes) {
  const std::unique_ptr<XXH3_state_t, Free> hash(XXH3_createState());
  Require(hash != nullptr && XXH3_128bits_reset(hash.get()) == XXH_OK, "no memory for a digest");
  Sealing sealing(key_, next_.fetch_add(1, std::memory_order_relaxed));
  ForParts(bytes, [&](std::span<const std::byte> part) {
    XXH3_128bits_update(hash.get(), part.data(), part.size());
    sealing.Add(part);
  });
  if (FromHash(XXH3_128bits_digest(hash.get())) != digest) return std::nullopt;
  return sealing.End();
}

bool GroupMac::Holds(const GroupSeal& seal, std::span<const std::byte> bytes) const {
  Sealing sealing(key_, seal.nonce);
  ForParts(bytes, [&](std::span<const std::byte> part) { sealing.Add(part); });
  return CRYPTO_memcmp(sealing.End().tag.data(), seal.tag.data(), seal.tag.size()) == 0;
}

}  // namespace mla::kvcache
