// Computes keyed MACs of the frames of a file, for checkpoints and files of rows.
//
// The MAC of a frame is HMAC-SHA-256 over the MAC before it, its size (uint32, little endian) and
// its bytes, cut to 16 bytes. The first frame has the file's beginning instead of a MAC before it.
// So a frame cannot be changed, left out, moved or brought from another file without detection.
//
// Not thread-safe: one object a file.
#ifndef MLA_PROTO_WIRE_FRAME_MAC_H_
#define MLA_PROTO_WIRE_FRAME_MAC_H_

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace mla::wire {

using MacKey = std::array<unsigned char, 32>;

// Derives a key for one purpose from `key`.
MacKey DeriveKey(const MacKey& key, absl::string_view purpose);

class FrameMac final {
 public:
  static constexpr size_t kBytes = 16;
  FrameMac(const MacKey& key, std::string beginning);
  // Returns the MAC of the next frame.
  std::string Next(absl::string_view frame);

 private:
  std::unique_ptr<EVP_MAC_CTX, decltype(&EVP_MAC_CTX_free)> context_;
  const MacKey key_;
  std::string last_;
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_FRAME_MAC_H_
