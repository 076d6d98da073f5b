// The same-host path without the client library: a client that keeps no rule of its own, for tests
// of how the server treats clients that break the rules.
//
// ShmConnection performs the handshake with any bytes. RingHand writes any entries into a ring and
// reads its completions. It works on a region from a server and on memory in this process.
// Threading: one thread each.
#ifndef MLA_TESTS_INTEGRATION_SHARED_MEMORY_RING_RING_HAND_H_
#define MLA_TESTS_INTEGRATION_SHARED_MEMORY_RING_RING_HAND_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "mla/v1/attention.pb.h"
#include "proto/wire/ring_layout.h"

namespace mla::integration {

class RingHand final {
 public:
  // `region` must stay mapped. REQUIRES: it has room for a ring of `entries`.
  RingHand(std::span<std::byte> region, uint32_t entries);

  wire::RingHeader& header() const { return *header_; }
  std::span<std::byte> region() const { return region_; }
  uint64_t published() const { return published_; }

  // Publishes the next submission and wakes the server. Ignores the entry's sequence.
  void Submit(const wire::SubmissionEntry& entry);
  // Submits a message whose bytes are put at `at`, with `room` bytes at `room_at` for the reply.
  void SubmitMessage(const v1::AttendStreamRequest& request, uint64_t at, uint64_t room_at,
                     uint32_t room);
  // Returns the next completion, if any. Releases its slot unless `keep`.
  std::optional<wire::CompletionEntry> Poll(bool keep = false);
  std::optional<wire::CompletionEntry> Wait(std::chrono::milliseconds timeout);
  // The message that a completion of kEntryMessage refers to. Empty if it lies outside the region
  // or is not such a message.
  std::optional<v1::AttendStreamReply> Message(const wire::CompletionEntry& done) const;

 private:
  const std::span<std::byte> region_;
  const uint32_t entries_;
  wire::RingHeader* const header_;
  wire::SubmissionEntry* const submissions_;
  wire::CompletionEntry* const completions_;
  uint64_t published_ = 0, taken_ = 0;
};

class ShmConnection final {
 public:
  // Connects to the socket at `path`; connected() says whether that worked.
  explicit ShmConnection(const std::string& path);
  ~ShmConnection();
  ShmConnection(const ShmConnection&) = delete;
  ShmConnection& operator=(const ShmConnection&) = delete;

  // A packet that a correct client would send.
  static wire::ConnectRequest Request(const std::string& tenant, uint64_t bytes, bool ring);

  bool connected() const { return socket_ >= 0; }
  bool Send(const void* data, size_t size) const;
  // Returns the server's reply, or nothing if the server ended the connection or `timeout` has
  // passed. Maps the region that comes with it.
  std::optional<wire::ConnectReply> Receive(std::chrono::milliseconds timeout);
  // Returns true if the server ends the connection within `timeout`.
  bool Ended(std::chrono::milliseconds timeout) const;
  // Sends Request and maps the region. Returns an empty span if the server refused.
  std::span<std::byte> Open(const std::string& tenant, uint64_t bytes, bool ring);

  std::span<std::byte> region() const { return region_; }
  int descriptor() const { return descriptor_; }  // of the region, or -1
  const wire::ConnectReply& reply() const { return reply_; }

 private:
  int socket_ = -1;
  int descriptor_ = -1;
  wire::ConnectReply reply_{};
  std::span<std::byte> region_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_SHARED_MEMORY_RING_RING_HAND_H_
