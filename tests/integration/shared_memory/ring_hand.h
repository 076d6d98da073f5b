// The same-host path spoken by hand: a client that keeps no rule of its own, for tests of what the
// server does about clients that break the rules. Nothing here comes from the client library.
//
// ShmConnection speaks the handshake with any bytes. RingHand writes any entries into a ring and
// reads its completions; it works on a region that a server handed out as well as on memory in this
// process. Threading: one thread each.
#ifndef MLA_TESTS_INTEGRATION_SHARED_MEMORY_RING_HAND_H_
#define MLA_TESTS_INTEGRATION_SHARED_MEMORY_RING_HAND_H_

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

  // Publishes the next submission and wakes the server. The entry's sequence is ignored.
  void Submit(const wire::SubmissionEntry& entry);
  // A message whose bytes are put at `at`, with `room` bytes at `room_at` for the reply.
  void SubmitMessage(const v1::AttendStreamRequest& request, uint64_t at, uint64_t room_at,
                     uint32_t room);
  // The next completion if there is one; its slot is given back unless `keep`.
  std::optional<wire::CompletionEntry> Poll(bool keep = false);
  std::optional<wire::CompletionEntry> Wait(std::chrono::milliseconds timeout);
  // What a completion of kEntryMessage points at. Empty when it lies outside the region or is no
  // such message.
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
  // The server's reply; nothing when the server ended the connection or `timeout` has passed. The
  // region that comes with it is mapped.
  std::optional<wire::ConnectReply> Receive(std::chrono::milliseconds timeout);
  // True once the server has ended the connection, which is waited for until `timeout`.
  bool Ended(std::chrono::milliseconds timeout) const;
  // Sends Request and maps the region. Empty when the server refused.
  std::span<std::byte> Open(const std::string& tenant, uint64_t bytes, bool ring);

  std::span<std::byte> region() const { return region_; }
  int descriptor() const { return descriptor_; }  // of the region; -1: none
  const wire::ConnectReply& reply() const { return reply_; }

 private:
  int socket_ = -1;
  int descriptor_ = -1;
  wire::ConnectReply reply_{};
  std::span<std::byte> region_;
};

}  // namespace mla::integration

#endif  // MLA_TESTS_INTEGRATION_SHARED_MEMORY_RING_HAND_H_
