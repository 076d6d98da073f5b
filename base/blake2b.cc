#include "base/blake2b.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace mla {
namespace {

constexpr std::array<uint64_t, 8> kStart = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
constexpr int kRounds = 12;

struct Mixer {
  std::array<uint64_t, 16> v;

  void Mix(size_t a, size_t b, size_t c, size_t d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 63);
  }
};

}  // namespace

Blake2b::Blake2b(size_t digest_bytes, std::string_view key)
    : digest_bytes_(digest_bytes), state_(kStart) {
  state_[0] ^= 0x01010000 ^ key.size() << 8 ^ digest_bytes;
  if (key.empty()) return;
  std::memcpy(block_.data(), key.data(), key.size());
  filled_ = kBlockBytes;
}

void Blake2b::Compress(bool last) {
  uint64_t words[16];
  for (size_t i = 0; i < 16; ++i) {
    words[i] = 0;
    for (size_t j = 8; j-- > 0;) words[i] = words[i] << 8 | block_[i * 8 + j];
  }
  count_ += filled_;
  Mixer mixer;
  std::copy(state_.begin(), state_.end(), mixer.v.begin());
  std::copy(kStart.begin(), kStart.end(), mixer.v.begin() + 8);
  mixer.v[12] ^= count_;
  if (last) mixer.v[14] = ~mixer.v[14];
  for (int round = 0; round < kRounds; ++round) {
    const uint8_t* const order = kOrder[round % 10];
    for (size_t i = 0; i < 4; ++i) {
      mixer.Mix(i, i + 4, i + 8, i + 12, words[order[2 * i]], words[order[2 * i + 1]]);
    }
    for (size_t i = 0; i < 4; ++i) {
      mixer.Mix(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, words[order[2 * i + 8]],
                words[order[2 * i + 9]]);
    }
  }
  for (size_t i = 0; i < 8; ++i) state_[i] ^= mixer.v[i] ^ mixer.v[i + 8];
  block_.fill(0);
  filled_ = 0;
}

void Blake2b::Add(std::string_view bytes) {
  while (!bytes.empty()) {
    if (filled_ == kBlockBytes) Compress(false);  // the last block waits for Digest
    const size_t taken = std::min(bytes.size(), kBlockBytes - filled_);
    std::memcpy(block_.data() + filled_, bytes.data(), taken);
    filled_ += taken;
    bytes.remove_prefix(taken);
  }
}

void Blake2b::AddNumber(uint32_t value) {
  const char bytes[] = {static_cast<char>(value), static_cast<char>(value >> 8),
                        static_cast<char>(value >> 16), static_cast<char>(value >> 24)};
  Add({bytes, sizeof(bytes)});
}

std::string Blake2b::Digest() {
  Compress(true);
  std::string digest;
  for (size_t i = 0; i < digest_bytes_; ++i) {
    digest += static_cast<char>(state_[i / 8] >> (i % 8 * 8));
  }
  return digest;
}

}  // namespace mla
