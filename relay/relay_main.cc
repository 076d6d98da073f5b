#include "relay/relay_main.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "relay/relay.h"
#include "relay/relay_channel.h"

namespace mla::relay {
namespace {

// Time for the server to abort the ring's steps and free its memory.
constexpr std::chrono::milliseconds kCloseWait{1000};

void Send(const RelayReply& reply) {
  // A failure means that the server has gone.
  (void)send(kRelayControl, &reply, sizeof(reply), MSG_NOSIGNAL | MSG_DONTWAIT);
}

void SendError(const absl::Status& status) {
  RelayReply reply{};
  reply.code = static_cast<int32_t>(status.code());
  reply.text.Set(std::string(status.message()));
  Send(reply);
}

class NoReceiver final : public wire::UcxReceiver {
 public:
  absl::StatusOr<std::byte*> Place(std::span<const std::byte>, size_t) override {
    return absl::PermissionDeniedError("there is no connection");
  }
  void OnArrived(std::span<const std::byte>) override {}
  void OnSent(uint64_t) override {}
};

// Says whether UCX can be used, and which version it is.
absl::Status Probe(const wire::UcxApi& api, const wire::UcxLinkOptions& options) {
  NoReceiver receiver;
  const auto link = wire::UcxLink::Open(api, options, &receiver);
  if (!link.ok()) return link.status();
  RelayReply reply{};
  reply.text.Set(wire::UcxVersionText(api));
  Send(reply);
  return absl::OkStatus();
}

absl::Status Serve(const wire::UcxApi& api, const RelaySetup& setup, RelayOptions options) {
  client::SharedMemoryOptions region;
  region.bytes = setup.arena_bytes;
  region.server_spin_us = region.spin_us = setup.spin_us;
  region.connect_timeout_ms = static_cast<int32_t>(setup.ring_ms);
  region.device_mib = setup.device_mib;
  region.device = {client::DeviceRegionOptions::kTheServers, setup.gpu_library.Get()};
  MLA_ASSIGN_OR_RETURN(const auto memory, client::SharedMemory::Attach(kRelayRing, region));
  options.spin = std::chrono::microseconds(memory->server_spin_us());
  MLA_ASSIGN_OR_RETURN(auto relay, Relay::Open(api, std::move(options), memory.get()));
  if (relay->handles_losses() != setup.handles_losses) {
    return absl::FailedPreconditionError(
        "UCX: server and client are in different modes; let both have the same version of UCX, or "
        "name the same transports for both (ucx.transports, UCX_TLS)");
  }
  MLA_RETURN_IF_ERROR(relay->Connect(setup.client.Get()));
  RelayReply reply{};
  reply.ring_entries = memory->ring_entries();
  reply.boot_id = memory->boot_id();
  reply.region_bytes = memory->region().size();
  reply.arena_offset = memory->arena_offset();
  reply.spin_us = memory->server_spin_us();
  reply.text.Set(wire::UcxVersionText(api));
  if (!reply.address.Set(relay->address())) {
    return absl::UnavailableError("UCX: its address is too long");
  }
  if (setup.device_mib > 0) {
    MLA_ASSIGN_OR_RETURN(const auto device, relay->OfferDevice());
    if (!reply.device.Set(device.address, device.key)) {
      return absl::UnavailableError("UCX: its key is too long");
    }
    reply.device_bytes = device.bytes;
  }
  if (setup.puts) {
    MLA_ASSIGN_OR_RETURN(const auto arena, relay->Offer());
    if (!reply.arena.Set(arena.address, arena.key)) {
      return absl::UnavailableError("UCX: its key is too long");
    }
  }
  Send(reply);
  const absl::Status status = relay->Run(kRelayControl);
  relay.reset();
  memory->Close(kCloseWait);
  return status;
}

// UCX's transports of one host open the process, the descriptor, the segment or the memory of a GPU
// that a peer's address or key names, with the rights of this process. A peer of the network could
// name the server's own, so they are used only if the operator has named them.
void ChooseTransports(const RelaySetup& setup, RelayOptions* options) {
  options->link.transports = setup.transports.Get();
  options->between_hosts = options->link.transports.empty() && std::getenv("UCX_TLS") == nullptr;
  if (options->between_hosts) options->link.transports = "^shm";
}

}  // namespace

int RunRelay() {
  prctl(PR_SET_NAME, "mla-ucx-relay");
  // The server's descriptors are not its relays', even if one was not marked so.
  close_range(kRelayControl + 1, ~0u, 0);
  // A dump would hold tensors; setuid programs are of no use here.
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  // The server decides when its relays end, also if a signal comes to all processes of a service.
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) signal(number, SIG_IGN);
  auto setup = std::make_unique<RelaySetup>();
  if (recv(kRelayControl, setup.get(), sizeof(*setup), 0) != static_cast<ssize_t>(sizeof(*setup))) {
    return 1;
  }
  RelayOptions options;
  options.token = setup->token;
  ChooseTransports(*setup, &options);
  options.link.devices = setup->devices.Get();
  options.link.puts = setup->puts;
  if (setup->encrypted) options.secret = setup->secret;
  options.batches = setup->batches;
  options.device = setup->device_mib > 0;
  options.report = [](const RelayCounts& counts) {
    // A server that does not read gets the next ones.
    (void)send(kRelayControl, &counts, sizeof(counts), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  const absl::StatusOr<wire::UcxApi> api = wire::OpenUcxApi(setup->library.Get());
  absl::Status status = api.status();
  if (status.ok()) {
    status = setup->arena_bytes == 0 ? Probe(*api, options.link)
                                     : Serve(*api, *setup, std::move(options));
  }
  if (status.ok()) return 0;
  SendError(status);
  return 1;
}

}  // namespace mla::relay
