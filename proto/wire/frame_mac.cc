#include "proto/wire/frame_mac.h"

#include <openssl/core_names.h>
#include <openssl/hmac.h>
#include <openssl/params.h>

#include <cstdint>
#include <utility>

namespace mla::wire {

MacKey DeriveKey(const MacKey& key, absl::string_view purpose) {
  MacKey derived;
  unsigned int bytes = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
       reinterpret_cast<const unsigned char*>(purpose.data()), purpose.size(), derived.data(),
       &bytes);
  return derived;
}

FrameMac::FrameMac(const MacKey& key, std::string beginning)
    : context_(nullptr, EVP_MAC_CTX_free), key_(key), last_(std::move(beginning)) {
  static EVP_MAC* const kHmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  context_.reset(EVP_MAC_CTX_new(kHmac));
}

std::string FrameMac::Next(absl::string_view frame) {
  char digest[] = "SHA256";
  const OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
                               OSSL_PARAM_construct_end()};
  const auto add = [this](const void* data, size_t bytes) {
    EVP_MAC_update(context_.get(), static_cast<const unsigned char*>(data), bytes);
  };
  const auto size = static_cast<uint32_t>(frame.size());
  EVP_MAC_init(context_.get(), key_.data(), key_.size(), params);
  add(last_.data(), last_.size());
  add(&size, sizeof(size));
  add(frame.data(), frame.size());
  unsigned char out[32];
  size_t bytes = 0;
  EVP_MAC_final(context_.get(), out, &bytes, sizeof(out));
  last_.assign(reinterpret_cast<const char*>(out), kBytes);
  return last_;
}

}  // namespace mla::wire
