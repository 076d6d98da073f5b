// Encrypts frames over UCX by AES-256-GCM, with keys that both ends derive from a secret which gRPC
// has carried. A header travels as its frame's number in this direction (8 bytes, little endian),
// the ciphertext of the header and of its payload's tag, and a tag. A payload travels as ciphertext
// of its own size.
//
// A process that lacks the secret can neither read nor make nor change a frame. One that is sent
// again has a number that the receiver of the ring has seen. Threading: none.
#ifndef MLA_PROTO_WIRE_UCX_FRAME_SEAL_H_
#define MLA_PROTO_WIRE_UCX_FRAME_SEAL_H_

#include <openssl/evp.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace mla::wire {

inline constexpr size_t kUcxSecretBytes = 32;
using UcxSecret = std::array<uint8_t, kUcxSecretBytes>;

class FrameSeal final {
 public:
  static constexpr size_t kTagBytes = 16;
  // A sealed header is longer by this number of bytes.
  static constexpr size_t kOverhead = sizeof(uint64_t) + 2 * kTagBytes;

  enum class Sender : uint8_t { kClient, kServer };
  // Makes the seal for the frames that `sender` sends.
  FrameSeal(const UcxSecret& secret, Sender sender);

  // A frame is opened in two parts, since its header says where the payload goes.
  struct Opening {
    uint64_t number = 0;
    std::array<unsigned char, kTagBytes> tag{};
  };

  // Seals the next frame. `sealed_header` has room for kOverhead bytes more than the header,
  // `sealed_payload` for the payload.
  void Seal(std::span<const std::byte> header, std::span<const std::byte> payload,
            std::byte* sealed_header, std::byte* sealed_payload);
  // `header` has room for kOverhead bytes fewer than `sealed`. Returns false if it was not sealed
  // with this secret for this direction.
  bool OpenHeader(std::span<const std::byte> sealed, std::byte* header, Opening* opening);
  // Decrypts in place. False, with zeros in the payload, if it is not the header's.
  bool OpenPayload(const Opening& opening, std::span<std::byte> payload);

 private:
  enum class Part : uint8_t { kHeader, kPayload };
  using Context = std::unique_ptr<EVP_CIPHER_CTX, decltype(&EVP_CIPHER_CTX_free)>;
  void Encrypt(uint64_t number, Part part, std::span<const std::byte> from, std::byte* destination,
               unsigned char* tag);
  bool Decrypt(uint64_t number, Part part, std::span<const std::byte> from, std::byte* destination,
               const unsigned char* tag);

  Context encrypts_, decrypts_;
  uint64_t next_ = 0;
};

}  // namespace mla::wire

#endif  // MLA_PROTO_WIRE_UCX_FRAME_SEAL_H_
