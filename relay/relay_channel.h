// Messages of a server and its relay over the socket between them: the server sends one RelaySetup
// and gets one RelayReply, and RelayCounts from time to time. A relay that ends for a reason of its
// own sends another reply with it. The relay ends when the server closes the socket, or its side.
//
// Both are the same program, so nothing here has a version. Plain data: any thread.
#ifndef MLA_RELAY_RELAY_CHANNEL_H_
#define MLA_RELAY_RELAY_CHANNEL_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "absl/status/status.h"
#include "proto/wire/ucx/frame_seal.h"
#include "proto/wire/ucx/frames.h"

namespace mla::relay {

// First argument of this program's command line that makes it a relay.
inline constexpr char kRelayCommand[] = "ucx-relay";
// Descriptors of a relay: a connection to the listener for shared memory, and the socket to its
// server.
inline constexpr int kRelayRing = 3;
inline constexpr int kRelayControl = 4;

inline constexpr size_t kRelayTextBytes = 512;

struct RelayText {
  char bytes[kRelayTextBytes];

  // Cuts a text that is too long.
  void Set(const std::string& text) {
    std::memset(bytes, 0, sizeof(bytes));
    text.copy(bytes, sizeof(bytes) - 1);
  }
  std::string Get() const { return std::string(bytes, strnlen(bytes, sizeof(bytes))); }
};

struct RelayAddress {
  uint32_t size;
  char bytes[wire::kUcxMostAddressBytes];

  // Returns true if the address is not too long.
  bool Set(std::string_view address) {
    if (address.size() > sizeof(bytes)) return false;
    size = static_cast<uint32_t>(address.size());
    address.copy(bytes, size);
    return true;
  }
  std::string_view Get() const { return {bytes, size <= sizeof(bytes) ? size : sizeof(bytes)}; }
};

// A key of UCX, and the memory that it is for; `size` 0: none.
struct RelayKey {
  uint64_t address;
  uint32_t size;
  char bytes[wire::kUcxMostKeyBytes];

  // Returns true if the key is not too long.
  bool Set(uint64_t memory, std::string_view key) {
    if (key.size() > sizeof(bytes)) return false;
    address = memory;
    size = static_cast<uint32_t>(key.size());
    key.copy(bytes, size);
    return true;
  }
  std::string_view Get() const { return {bytes, size <= sizeof(bytes) ? size : sizeof(bytes)}; }
};

struct RelaySetup {
  uint64_t arena_bytes;  // 0: only say if UCX works
  uint32_t spin_us;
  uint32_t ring_ms;     // time for the server to make the ring
  bool handles_losses;  // as of wire::UcxLink, of the client's
  bool puts;            // as of wire::UcxLinkOptions
  bool encrypted;       // with `secret`
  bool batches;         // as of RelayOptions
  uint32_t device_mib;  // memory of the server's GPU for puts, in MiB; 0: none
  wire::UcxSecret secret;
  wire::UcxToken token;
  RelayText library, transports, devices;  // as of wire::OpenUcxApi and wire::UcxLinkOptions
  RelayText gpu_library;                   // of the GPU's runtime; empty: search for it
  RelayAddress client;
};

struct RelayReply {
  int32_t code;  // canonical status code
  uint32_t ring_entries;
  uint64_t boot_id, region_bytes, arena_offset;
  uint32_t spin_us;  // as granted
  RelayText text;    // of an error; else UCX's version
  RelayAddress address;
  RelayKey arena;   // of setup.puts
  RelayKey device;  // of setup.device_mib
  uint64_t device_bytes;

  absl::Status status() const {
    return absl::Status(static_cast<absl::StatusCode>(code), text.Get());
  }
};

// Frames and bytes that a relay has carried so far. The relay reports them before it ends, and
// while it runs whenever they have changed.
struct RelayCounts {
  uint64_t received_frames = 0, sent_frames = 0;
  uint64_t received_bytes = 0, sent_bytes = 0;  // payloads of frames
  uint64_t put_bytes = 0;                       // outputs that were put

  friend bool operator==(const RelayCounts&, const RelayCounts&) = default;
};

static_assert(std::is_trivially_copyable_v<RelayCounts>);
static_assert(std::is_trivially_copyable_v<RelaySetup>);
static_assert(std::is_trivially_copyable_v<RelayReply>);

}  // namespace mla::relay

#endif  // MLA_RELAY_RELAY_CHANNEL_H_
