#include "scheduler/kvcache/prefix/prefix_hasher.h"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>

#include <cstring>
#include <memory>

#include "base/random_bytes.h"
#include "scheduler/kvcache/pool/require.h"

namespace mla::kvcache {
namespace {

// Computes one hash at a time; may be used many times under the same secret.
class Hash final {
 public:
  explicit Hash(const PrefixSecret& secret) {
    static EVP_MAC* const kSipHash = EVP_MAC_fetch(nullptr, "SIPHASH", nullptr);
    Require(kSipHash != nullptr, "the cryptographic library has no SipHash");
    context_.reset(EVP_MAC_CTX_new(kSipHash));
    size_t bytes = sizeof(PrefixKey);
    const OSSL_PARAM params[] = {OSSL_PARAM_construct_size_t(OSSL_MAC_PARAM_SIZE, &bytes),
                                 OSSL_PARAM_construct_end()};
    Require(context_ != nullptr &&
                EVP_MAC_init(context_.get(), reinterpret_cast<const unsigned char*>(secret.data()),
                             secret.size(), params) == 1,
            "the hash of prefixes does not start");
  }

  void Add(const void* data, size_t bytes) {
    Require(EVP_MAC_update(context_.get(), static_cast<const unsigned char*>(data), bytes) == 1,
            "the hash of prefixes takes no data");
  }

  // Returns the key, and starts over for the next one.
  PrefixKey Take() {
    unsigned char out[sizeof(PrefixKey)];
    size_t bytes = 0;
    Require(EVP_MAC_final(context_.get(), out, &bytes, sizeof(out)) == 1 && bytes == sizeof(out) &&
                EVP_MAC_init(context_.get(), nullptr, 0, nullptr) == 1,
            "the hash of prefixes does not end");
    PrefixKey key;
    std::memcpy(&key.high, out, sizeof(key.high));
    std::memcpy(&key.low, out + sizeof(key.high), sizeof(key.low));
    return key;
  }

 private:
  struct Free {
    void operator()(EVP_MAC_CTX* context) const { EVP_MAC_CTX_free(context); }
  };
  std::unique_ptr<EVP_MAC_CTX, Free> context_;
};

}  // namespace

PrefixSecret RandomSecret() {
  PrefixSecret secret;
  Require(FillRandom(&secret), "the system gives no random numbers");
  return secret;
}

PrefixKey PrefixHasher::Root(std::span<const absl::string_view> fields) const {
  Hash hash(secret_);
  for (const absl::string_view field : fields) {
    const uint64_t bytes = field.size();
    hash.Add(&bytes, sizeof(bytes));
    hash.Add(field.data(), field.size());
  }
  return hash.Take();
}

void PrefixHasher::AddTokens(std::span<const uint32_t> tokens, PrefixChain* chain) const {
  Require(!chain->opaque, "tokens after pages that were named by keys");
  chain->tokens.insert(chain->tokens.end(), tokens.begin(), tokens.end());
  const auto pages = static_cast<int32_t>(chain->tokens.size() / chain->page_size);
  chain->keys.reserve(static_cast<size_t>(pages));
  Hash hash(secret_);
  for (auto page = static_cast<int32_t>(chain->keys.size()); page < pages; ++page) {
    const PrefixKey& parent = chain->parent(page);
    hash.Add(&parent, sizeof(parent));
    const auto own = chain->page_tokens(page, chain->page_size);
    hash.Add(own.data(), own.size_bytes());
    chain->keys.push_back(hash.Take());
  }
}

void PrefixHasher::AddPageKeys(std::span<const std::string> page_keys, PrefixChain* chain) const {
  Require(chain->tokens.empty(), "keys of pages after tokens");
  chain->opaque = true;
  chain->keys.reserve(chain->keys.size() + page_keys.size());
  Hash hash(secret_);
  for (const std::string& own : page_keys) {
    const PrefixKey& parent = chain->parent(static_cast<int32_t>(chain->keys.size()));
    hash.Add(&parent, sizeof(parent));
    hash.Add(own.data(), own.size());
    chain->keys.push_back(hash.Take());
  }
}

}  // namespace mla::kvcache
