#include "scheduler/kvcache/tiers/group_checks.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/random_bytes.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr size_t kNonceBytes = 12;
// Two algorithms read blocks of this size in turns, so that the second finds a block in a near
// cache.
constexpr size_t kTurnBytes = size_t{64} << 10;
static_assert(kTurnBytes % kernels::kDigestPartBytes == 0);

struct Free {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
};

const unsigned char* Bytes(const void* data) { return static_cast<const unsigned char*>(data); }

// Calls each(part) for the consecutive parts of the bytes, of at most `most` bytes each.
template <typename Each>
void ForParts(std::span<const std::byte> bytes, size_t most, Each each) {
  for (size_t at = 0; at < bytes.size(); at += most) {
    each(bytes.subspan(at, std::min(most, bytes.size() - at)));
  }
}

// Computes the digest of bytes that come in consecutive parts.
class Digesting {
 public:
  Digesting() : state_(XXH3_createState()) {
    Require(state_ != nullptr && XXH3_128bits_reset(state_.get()) == XXH_OK,
            "no memory for a digest");
  }
  void Add(std::span<const kernels::PartDigest> parts) {
    XXH3_128bits_update(state_.get(), parts.data(), parts.size_bytes());
  }
  // Adds the bytes of whole parts, and in the last call the remaining bytes.
  void AddBytes(std::span<const std::byte> bytes) {
    ForParts(bytes, kernels::kDigestPartBytes, [this](std::span<const std::byte> part) {
      const kernels::PartDigest digest = kernels::DigestOfPart(part);
      Add({&digest, 1});
    });
  }
  GroupDigest End() {
    const XXH128_hash_t hash = XXH3_128bits_digest(state_.get());
    return {hash.low64, hash.high64};
  }

 private:
  const std::unique_ptr<XXH3_state_t, Free> state_;
};

// Computes a seal step by step.
class Sealing {
 public:
  Sealing(std::span<const std::byte, 16> key, uint64_t nonce)
      : context_(EVP_CIPHER_CTX_new()), seal_{nonce, {}} {
    std::array<unsigned char, kNonceBytes> iv = {};
    std::memcpy(iv.data(), &nonce, sizeof(nonce));
    Must(context_ != nullptr && EVP_EncryptInit_ex(context_.get(), EVP_aes_128_gcm(), nullptr,
                                                   Bytes(key.data()), iv.data()) == 1);
  }
  // `part` has at most kTurnBytes, because the library counts in int.
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

}  // namespace

GroupDigest DigestOf(std::span<const std::byte> bytes) {
  Digesting digesting;
  digesting.AddBytes(bytes);
  return digesting.End();
}

GroupDigest DigestOfParts(std::span<const kernels::PartDigest> parts) {
  Digesting digesting;
  digesting.Add(parts);
  return digesting.End();
}

GroupMac::GroupMac() { Require(FillRandom(&key_), "the system gives no random numbers"); }

GroupSeal GroupMac::Seal(std::span<const std::byte> bytes) {
  Sealing sealing(key_, next_.fetch_add(1, std::memory_order_relaxed));
  ForParts(bytes, kTurnBytes, [&](std::span<const std::byte> part) { sealing.Add(part); });
  return sealing.End();
}

std::optional<GroupSeal> GroupMac::SealIf(const GroupDigest& digest,
                                          std::span<const std::byte> bytes) {
  Digesting digesting;
  Sealing sealing(key_, next_.fetch_add(1, std::memory_order_relaxed));
  ForParts(bytes, kTurnBytes, [&](std::span<const std::byte> part) {
    digesting.AddBytes(part);
    sealing.Add(part);
  });
  if (digesting.End() != digest) return std::nullopt;
  return sealing.End();
}

bool GroupMac::Holds(const GroupSeal& seal, std::span<const std::byte> bytes) const {
  Sealing sealing(key_, seal.nonce);
  ForParts(bytes, kTurnBytes, [&](std::span<const std::byte> part) { sealing.Add(part); });
  return CRYPTO_memcmp(sealing.End().tag.data(), seal.tag.data(), seal.tag.size()) == 0;
}

}  // namespace mla::kvcache
