#include "tests/bench/wire/ucx_path.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>

#include "server/ucx/relay_process.h"
#include "tests/bench/wire/wire_paths.h"

namespace mla::bench {
namespace {

constexpr std::chrono::milliseconds kRelayTimeout{10000};

int Dial(const std::string& path) {
  const int connected = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (connect(connected, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    Check(absl::UnavailableError(path));
  }
  return connected;
}

}  // namespace

std::unique_ptr<client::UcxMemory> OpenUcxRing(const std::string& listener, uint64_t bytes,
                                               const UcxPathOptions& path) {
  client::UcxMemoryOptions options;
  options.link.transports = path.transports;
  options.link.puts = path.puts;
  options.spin = path.spin;
  auto memory = client::UcxMemory::Open(options);
  Check(memory.status());
  relay::RelaySetup setup{};
  setup.arena_bytes = bytes;
  setup.spin_us = static_cast<uint32_t>(path.spin.count());
  setup.puts = path.puts;
  setup.batches = path.batches;
  setup.ring_ms = kRelayTimeout.count();
  setup.handles_losses = (*memory)->handles_losses();
  setup.transports.Set(path.transports);
  setup.token.fill(1);
  setup.client.Set((*memory)->address());
  const int ring = Dial(listener);
  if (path.relay_cpu >= 0) StayOn(path.relay_cpu);  // a process begins where its starter is
  auto started = server::RelayProcess::Start("/proc/self/exe", setup, ring, kRelayTimeout);
  if (path.relay_cpu >= 0) StayOn(path.own_cpu);
  close(ring);
  Check(started.status());
  const std::shared_ptr<server::RelayProcess> relay = *std::move(started);
  (*memory)->OnGivenUp([relay] {});  // the relay lives as long as the memory
  const relay::RelayReply& reply = relay->reply();
  client::UcxRing described;
  described.worker_address = reply.address.Get();
  described.token = {reinterpret_cast<const char*>(setup.token.data()), setup.token.size()};
  described.region_bytes = reply.region_bytes;
  described.arena_offset = reply.arena_offset;
  described.entries = reply.ring_entries;
  described.arena_bytes = bytes;
  described.arena_key = reply.arena.Get();
  described.arena_address = reply.arena.address;
  described.batches = path.batches;
  Check((*memory)->Connect(described));
  return *std::move(memory);
}

}  // namespace mla::bench
