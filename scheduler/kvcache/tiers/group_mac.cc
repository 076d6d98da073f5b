#include "scheduler/kvcache/tiers/group_mac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

constexpr size_t kNonceBytes = 12;
constexpr size_t kMostUpdate = size_t{1} << 30;  // the library counts in int

struct Free {
  void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
};

const unsigned char* Bytes(const void* data) { return static_cast<const unsigned char*>(data); }

}  // namespace

GroupMac::GroupMac() {
  Require(getrandom(key_.data(), key_.size(), 0) == static_cast<ssize_t>(key_.size()),
          "the system gives no random numbers");
}

GroupSeal GroupMac::Compute(uint64_t nonce, std::span<const std::byte> bytes) const {
  GroupSeal seal{nonce, {}};
  std::array<unsigned char, kNonceBytes> iv = {};
  std::memcpy(iv.data(), &nonce, sizeof(nonce));
  const std::unique_ptr<EVP_CIPHER_CTX, Free> context(EVP_CIPHER_CTX_new());
  int ignored = 0;
  bool good = context != nullptr && EVP_EncryptInit_ex(context.get(), EVP_aes_128_gcm(), nullptr,
                                                       Bytes(key_.data()), iv.data()) == 1;
  for (size_t at = 0; good && at < bytes.size(); at += kMostUpdate) {
    const auto part = static_cast<int>(std::min(kMostUpdate, bytes.size() - at));
    good = EVP_EncryptUpdate(context.get(), nullptr, &ignored, Bytes(bytes.data() + at), part) == 1;
  }
  good = good && EVP_EncryptFinal_ex(context.get(), nullptr, &ignored) == 1 &&
         EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_GCM_GET_TAG, static_cast<int>(seal.tag.size()),
                             seal.tag.data()) == 1;
  Require(good, "the cryptographic library makes no GMAC");
  return seal;
}

GroupSeal GroupMac::Seal(std::span<const std::byte> bytes) {
  return Compute(next_.fetch_add(1, std::memory_order_relaxed), bytes);
}

bool GroupMac::Holds(const GroupSeal& seal, std::span<const std::byte> bytes) const {
  const GroupSeal found = Compute(seal.nonce, bytes);
  return CRYPTO_memcmp(found.tag.data(), seal.tag.data(), seal.tag.size()) == 0;
}

}  // namespace mla::kvcache
