// The handshake of the shared-memory socket with arbitrary packets. Every connection gets a reply
// by the protocol or is ended, and every region is sealed, has the stated size, and is bounded.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "kernels/reference/reference_backend.h"
#include "scheduler/clock.h"
#include "scheduler/engine.h"
#include "scheduler/testing/heap_buffers.h"
#include "server/memory/shared_region.h"
#include "server/metrics/metrics.h"
#include "server/shared_memory/shared_memory_listener.h"
#include "tests/fuzz/harness/target.h"
#include "tests/integration/shared_memory/ring/ring_hand.h"

namespace mla::fuzz {
namespace {

using integration::ShmConnection;
using std::chrono::seconds;

constexpr uint64_t kMostArenaBytes = 1 << 20;
constexpr int kMostPackets = 4;
constexpr int kRegions = 4;

// A listener with an engine, shared by all inputs.
class Listener {
 public:
  Listener() {
    scheduler::EngineOptions options;
    options.limits.kv_cache_bytes = 1 << 18;
    options.limits.weights_bytes = 1 << 16;
    engine_ =
        *scheduler::Engine::Create(options, std::make_unique<kernels::ReferenceBackend>(), &clock_);
    const server::RegionLimits limits = {kMostArenaBytes, kRegions * (kMostArenaBytes + (1 << 20)),
                                         kRegions, kRegions};
    regions_ = std::make_unique<server::SharedRegionTable>(limits, server::RegionHooks{});
    server::SharedMemoryListenerOptions listener;
    listener.engine = engine_.get();
    listener.regions = regions_.get();
    listener.metrics = &metrics_;
    listener.pool = std::make_shared<server::AttendMessagePool>(
        std::make_unique<scheduler::testing::HeapBuffer>(4096), engine_->tenants());
    listener.boot_id = 7;
    listener.path = path();
    listener.shm.regions_max = kRegions;
    listener.shm.ring_entries = 16;
    listener.shm.spin_us = 0;
    listener_ = *server::SharedMemoryListener::Open(std::move(listener));
  }
  ~Listener() {
    listener_.reset();
    rmdir(folder_.c_str());
  }
  std::string path() const { return folder_ + "/s"; }

 private:
  char name_[26] = "/tmp/mla-handshake-XXXXXX";
  const std::string folder_ = mkdtemp(name_);
  scheduler::RealClock clock_;
  server::Metrics metrics_;
  std::unique_ptr<scheduler::Engine> engine_;
  std::unique_ptr<server::SharedRegionTable> regions_;
  std::unique_ptr<server::SharedMemoryListener> listener_;
};

// Returns "" or what is wrong with the region that came with the reply.
std::string CheckRegion(const ShmConnection& connection, const wire::ConnectRequest& request,
                        const wire::ConnectReply& reply) {
  if (connection.descriptor() < 0 || connection.region().empty()) return "no region";
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if ((fcntl(connection.descriptor(), F_GET_SEALS) & kSeals) != kSeals) return "not sealed";
  struct stat found {};
  fstat(connection.descriptor(), &found);
  if (static_cast<uint64_t>(found.st_size) != reply.region_bytes) return "another size";
  const bool ring = (request.flags & wire::kWantRing) != 0;
  if (ring != (reply.ring_entries > 0)) return "a ring that was not requested, or a missing ring";
  if (reply.arena_offset != (ring ? wire::RingBytes(reply.ring_entries) : 0)) return "arena";
  if (reply.region_bytes - reply.arena_offset < request.bytes ||
      reply.region_bytes - reply.arena_offset > kMostArenaBytes) {
    return absl::StrCat("an arena of ", reply.region_bytes - reply.arena_offset, " for ",
                        request.bytes);
  }
  return "";
}

std::string CheckReply(const ShmConnection& connection, std::string_view packet,
                       const wire::ConnectReply& reply) {
  wire::ConnectRequest request;
  if (packet.size() != sizeof(request)) return "an answer to a packet of another size";
  std::memcpy(&request, packet.data(), sizeof(request));
  if (request.magic != wire::kHandshakeMagic) return "an answer to another magic";
  if (reply.magic != wire::kHandshakeMagic || reply.version != wire::kHandshakeVersion)
    return "magic";
  if (reply.boot_id != 7) return "boot_id";
  if (reply.code == 0 && request.version != wire::kHandshakeVersion)
    return "another version accepted";
  if (reply.code == 0) return CheckRegion(connection, request, reply);
  if (connection.descriptor() >= 0) return "a region with a refusal";
  if (reply.code < 0 || reply.code > 16) return absl::StrCat("code ", reply.code);
  return reply.message[0] == 0 ? "a refusal that explains nothing" : "";
}

// The first byte of a packet's description gives its length: that many bytes, or a whole request.
std::string CheckOne(const Listener& listener, const std::string& input) {
  ShmConnection connection(listener.path());
  if (!connection.connected()) return "cannot connect";
  std::string_view rest = input;
  for (int i = 0; i < kMostPackets && !rest.empty(); ++i) {
    const auto length = static_cast<unsigned char>(rest[0]);
    rest.remove_prefix(1);
    const std::string_view packet = rest.substr(0, length);
    rest.remove_prefix(packet.size());
    if (!connection.Send(packet.data(), packet.size()))
      return "";  // the listener has already ended it
    const auto reply = connection.Receive(seconds(10));
    if (!reply.has_value()) return connection.Ended(seconds(10)) ? "" : "no answer and no end";
    if (i > 0) return "a second answer";
    if (std::string fault = CheckReply(connection, packet, *reply); !fault.empty()) return fault;
    if (reply->code != 0) return connection.Ended(seconds(10)) ? "" : "refused and not ended";
  }
  return "";
}

std::string Described(const wire::ConnectRequest& request,
                      size_t size = sizeof(wire::ConnectRequest)) {
  return std::string(1, static_cast<char>(size)) +
         std::string(reinterpret_cast<const char*>(&request), size);
}

}  // namespace

FuzzTarget TargetUnderTest() {
  FuzzTarget target;
  target.executions = 2000;
  const wire::ConnectRequest plain = ShmConnection::Request("a", 4096, false);
  const wire::ConnectRequest ring = ShmConnection::Request("", 65536, true);
  wire::ConnectRequest other = ring;
  other.bytes = kMostArenaBytes + 1;
  wire::ConnectRequest unending = plain;
  std::memset(unending.tenant, 'x', sizeof(unending.tenant));
  wire::ConnectRequest later = plain;
  later.version = 2;
  target.seeds = {Described(plain), Described(ring),     Described(plain) + Described(ring),
                  Described(other), Described(unending), Described(ring, 151),
                  Described(later)};
  return target;
}

}  // namespace mla::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const mla::fuzz::Listener listener;
  mla::fuzz::Require(mla::fuzz::CheckOne(listener, {reinterpret_cast<const char*>(data), size}));
  return 0;
}
