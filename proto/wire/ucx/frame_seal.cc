#include "proto/wire/ucx/frame_seal.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "proto/wire/frame_mac.h"

namespace mla::wire {
namespace {

constexpr size_t kNonceBytes = 12;
constexpr size_t kMostAtOnce = 1 << 30;  // OpenSSL counts bytes in an int
constexpr size_t kMostHeaderBytes = 8192;

using Nonce = std::array<unsigned char, kNonceBytes>;

// A nonce is used once with each key, because a direction's numbers never repeat.
Nonce NonceOf(uint64_t number, uint8_t part) {
  Nonce nonce{};
  std::memcpy(nonce.data(), &number, sizeof(number));
  nonce.back() = part;
  return nonce;
}

// A failure of OpenSSL's own is a broken invariant: nothing may leave unencrypted.
void Require(int result) {
  if (result != 1) std::abort();
}

unsigned char* Bytes(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* Bytes(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

}  // namespace

FrameSeal::FrameSeal(const UcxSecret& secret, Sender sender)
    : encrypts_(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free),
      decrypts_(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free) {
  MacKey base{};
  std::copy(secret.begin(), secret.end(), base.begin());
  MacKey key = DeriveKey(base, sender == Sender::kClient ? "mla ucx frames of the client"
                                                         : "mla ucx frames of the server");
  const EVP_CIPHER* const cipher = EVP_aes_256_gcm();
  Require(EVP_EncryptInit_ex(encrypts_.get(), cipher, nullptr, key.data(), nullptr));
  Require(EVP_DecryptInit_ex(decrypts_.get(), cipher, nullptr, key.data(), nullptr));
  OPENSSL_cleanse(key.data(), key.size());
  OPENSSL_cleanse(base.data(), base.size());
}

void FrameSeal::Encrypt(uint64_t number, Part part, std::span<const std::byte> from,
                        std::byte* destination, unsigned char* tag) {
  EVP_CIPHER_CTX* const context = encrypts_.get();
  const Nonce nonce = NonceOf(number, static_cast<uint8_t>(part));
  Require(EVP_EncryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()));
  for (size_t offset = 0; offset < from.size();) {
    int done = 0;
    const int bytes = static_cast<int>(std::min(from.size() - offset, kMostAtOnce));
    Require(EVP_EncryptUpdate(context, Bytes(destination + offset), &done,
                              Bytes(from.data() + offset), bytes));
    offset += static_cast<size_t>(done);
  }
  int none = 0;
  unsigned char rest[16];
  Require(EVP_EncryptFinal_ex(context, rest, &none));
  Require(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_GET_TAG, kTagBytes, tag));
}

bool FrameSeal::Decrypt(uint64_t number, Part part, std::span<const std::byte> from,
                        std::byte* destination, const unsigned char* tag) {
  EVP_CIPHER_CTX* const context = decrypts_.get();
  const Nonce nonce = NonceOf(number, static_cast<uint8_t>(part));
  Require(EVP_DecryptInit_ex(context, nullptr, nullptr, nullptr, nonce.data()));
  for (size_t offset = 0; offset < from.size();) {
    int done = 0;
    const int bytes = static_cast<int>(std::min(from.size() - offset, kMostAtOnce));
    Require(EVP_DecryptUpdate(context, Bytes(destination + offset), &done,
                              Bytes(from.data() + offset), bytes));
    offset += static_cast<size_t>(done);
  }
  std::array<unsigned char, kTagBytes> expected;
  std::copy_n(tag, kTagBytes, expected.begin());
  Require(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_GCM_SET_TAG, kTagBytes, expected.data()));
  int none = 0;
  unsigned char rest[16];
  return EVP_DecryptFinal_ex(context, rest, &none) == 1;
}

void FrameSeal::Seal(std::span<const std::byte> header, std::span<const std::byte> payload,
                     std::byte* sealed_header, std::byte* sealed_payload) {
  const uint64_t number = next_++;
  std::vector<std::byte> clear(header.begin(), header.end());
  clear.resize(header.size() + kTagBytes);
  Encrypt(number, Part::kPayload, payload, sealed_payload, Bytes(clear.data() + header.size()));
  std::memcpy(sealed_header, &number, sizeof(number));
  std::byte* const ciphertext = sealed_header + sizeof(number);
  Encrypt(number, Part::kHeader, clear, ciphertext, Bytes(ciphertext + clear.size()));
}

bool FrameSeal::OpenHeader(std::span<const std::byte> sealed, std::byte* header, Opening* opening) {
  if (sealed.size() < kOverhead || sealed.size() > kMostHeaderBytes) return false;
  std::memcpy(&opening->number, sealed.data(), sizeof(opening->number));
  const auto ciphertext =
      sealed.subspan(sizeof(opening->number), sealed.size() - sizeof(uint64_t) - kTagBytes);
  std::array<std::byte, kMostHeaderBytes> clear;
  const bool whole = Decrypt(opening->number, Part::kHeader, ciphertext, clear.data(),
                             Bytes(sealed.data() + sealed.size() - kTagBytes));
  if (!whole) return false;
  const size_t bytes = sealed.size() - kOverhead;
  std::copy_n(clear.begin(), bytes, header);
  std::memcpy(opening->tag.data(), clear.data() + bytes, kTagBytes);
  return true;
}

bool FrameSeal::OpenPayload(const Opening& opening, std::span<std::byte> payload) {
  if (Decrypt(opening.number, Part::kPayload, payload, payload.data(), opening.tag.data())) {
    return true;
  }
  std::fill(payload.begin(), payload.end(), std::byte{0});
  return false;
}

}  // namespace mla::wire
