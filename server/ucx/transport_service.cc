#include "server/ucx/transport_service.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "base/random_bytes.h"
#include "base/status_macros.h"
#include "server/grpc/grpc_status.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

// Between two looks at a ring's relay and its call. The end of either ends the other then.
constexpr std::chrono::milliseconds kLook{20};

constexpr uint64_t kMiB = 1 << 20;

absl::Status CheckRequest(const v1::OpenUcxRequest& request, const Config::Ucx& ucx) {
  if (request.version() != wire::kUcxVersion) {
    return RefuseField("version", absl::StrCat(request.version()), absl::StrCat(wire::kUcxVersion),
                       "unknown_version", absl::StatusCode::kUnimplemented);
  }
  const size_t address = request.worker_address().size();
  if (address == 0 || address > wire::kUcxMostAddressBytes) {
    return RefuseField("worker_address", absl::StrCat(address, " bytes"),
                       absl::StrCat("1..", wire::kUcxMostAddressBytes, " bytes"));
  }
  if (request.bytes() == 0) return RefuseField("bytes", "0", "at least 1");
  if (request.device_memory() && !ucx.device_memory) {
    return RefuseField("device_memory", "true", "false: ucx.device_memory is", "no_device_memory",
                       absl::StatusCode::kFailedPrecondition);
  }
  if (request.device_memory() && !request.puts()) {
    return RefuseField("device_memory", "true", "false without puts");
  }
  if (ucx.encrypted && !request.encrypts()) {
    return RefuseField("encrypts", "false", "true: ucx.encrypted is", "not_encrypted",
                       absl::StatusCode::kFailedPrecondition);
  }
  return absl::OkStatus();
}

// Adds to `wire` by how much the relay's counts exceed `counted`, and keeps them there. A relay
// that counts backwards adds nothing.
void AddCounts(const relay::RelayCounts& now, relay::RelayCounts* counted, WireCounters* wire) {
  const auto add = [&](uint64_t relay::RelayCounts::*number, std::atomic<uint64_t>* sum) {
    if (now.*number <= counted->*number) return;
    *sum += now.*number - counted->*number;
    counted->*number = now.*number;
  };
  add(&relay::RelayCounts::received_frames, &wire->ucx_received_frames);
  add(&relay::RelayCounts::sent_frames, &wire->ucx_sent_frames);
  add(&relay::RelayCounts::received_bytes, &wire->ucx_received_bytes);
  add(&relay::RelayCounts::sent_bytes, &wire->ucx_sent_bytes);
  add(&relay::RelayCounts::put_bytes, &wire->ucx_put_bytes);
}

}  // namespace

TransportService::TransportService(const RpcContext& rpc, TransportOptions options,
                                   const ServerState* state)
    : rpc_(rpc),
      options_(std::move(options)),
      program_(options_.program.empty() ? "/proc/self/exe" : options_.program),
      sessions_(state, options_.ucx.sessions),
      usable_(absl::UnimplementedError("the server offers no UCX: ucx.enabled is false")) {
  if (options_.ucx.enabled) usable_ = Probe();
}

absl::Status TransportService::Probe() const {
  const auto relay = RelayProcess::Start(program_, SetupOf({}), -1,
                                         std::chrono::milliseconds(options_.ucx.open_ms));
  if (!relay.ok()) {
    Log(LogLevel::kWarning, "ucx_unusable", {{"why", std::string(relay.status().message())}});
    return absl::UnimplementedError(
        absl::StrCat("the server offers no UCX: ", relay.status().message()));
  }
  Log(LogLevel::kInfo, "ucx", {{"version", (*relay)->reply().text.Get()}});
  return absl::OkStatus();
}

void TransportService::Offer(SharedMemoryListener* listener) {
  const MutexLock lock(mutex_);
  listener_ = listener;
}

relay::RelaySetup TransportService::SetupOf(const v1::OpenUcxRequest& request) const {
  relay::RelaySetup setup{};
  setup.arena_bytes = request.bytes();
  setup.spin_us = request.spin_us();
  setup.handles_losses = request.handles_losses();
  setup.puts = options_.ucx.puts && request.puts();
  if (request.device_memory()) {
    // Next to the tensors lie words of chains.
    const uint64_t words = wire::NearbyBytes(static_cast<uint64_t>(options_.ring_entries));
    const uint64_t most = uint64_t{UINT32_MAX} * kMiB - words;
    setup.device_mib =
        static_cast<uint32_t>((std::min(request.bytes(), most - kMiB) + words + kMiB - 1) / kMiB);
  }
  setup.encrypted = options_.ucx.encrypted;
  setup.batches = request.batches();
  setup.ring_ms = static_cast<uint32_t>(options_.ucx.open_ms);
  setup.library.Set(options_.ucx.library);
  setup.transports.Set(options_.ucx.transports);
  setup.devices.Set(options_.ucx.devices);
  setup.gpu_library.Set(options_.gpu_library);
  setup.client.Set(request.worker_address());
  return setup;
}

absl::StatusOr<std::unique_ptr<RelayProcess>> TransportService::StartRelay(
    const Identity& who, const relay::RelaySetup& setup) {
  absl::StatusOr<int> ring;
  {
    const MutexLock lock(mutex_);
    if (listener_ == nullptr) {
      return absl::UnimplementedError("the server offers no UCX: it has no shared memory");
    }
    ring = listener_->ConnectFor(who.tenant);
  }
  if (!ring.ok()) return ring.status();
  auto relay =
      RelayProcess::Start(program_, setup, *ring, std::chrono::milliseconds(options_.ucx.open_ms));
  close(*ring);  // the relay has its own; its end ends the ring
  return relay;
}

absl::Status TransportService::Serve(grpc::ServerContext* context, const Identity& who,
                                     const v1::OpenUcxRequest& request,
                                     grpc::ServerWriter<v1::OpenUcxReply>* writer) {
  const Watchers::Place place(&sessions_, who.tenant);
  MLA_RETURN_IF_ERROR(place.Check("OpenUcx"));
  relay::RelaySetup setup = SetupOf(request);
  if (!FillRandom(&setup.token) || !FillRandom(&setup.secret)) {
    return absl::InternalError("UCX: no random bytes");
  }
  MLA_ASSIGN_OR_RETURN(const auto relay, StartRelay(who, setup));
  const relay::RelayReply& relay_reply = relay->reply();
  Log(LogLevel::kDebug, "ucx_ring_opened", {{"tenant", who.tenant}, {"relay", relay->pid()}});
  v1::OpenUcxReply reply;
  reply.set_boot_id(rpc_.boot_id);
  reply.set_worker_address(std::string(relay_reply.address.Get()));
  reply.set_token(std::string(setup.token.begin(), setup.token.end()));
  reply.set_region_bytes(relay_reply.region_bytes);
  reply.set_arena_offset(relay_reply.arena_offset);
  reply.set_ring_entries(relay_reply.ring_entries);
  reply.set_spin_us(relay_reply.spin_us);
  reply.set_batches(true);
  if (setup.encrypted) reply.set_secret(std::string(setup.secret.begin(), setup.secret.end()));
  if (setup.puts) {
    reply.set_arena_address(relay_reply.arena.address);
    reply.set_arena_key(std::string(relay_reply.arena.Get()));
  }
  if (setup.device_mib > 0) {
    reply.set_device_address(relay_reply.device.address);
    reply.set_device_key(std::string(relay_reply.device.Get()));
    reply.set_device_bytes(relay_reply.device_bytes);
  }
  if (!writer->Write(reply)) return absl::CancelledError("the client has gone");
  const std::optional<absl::Status> ended = Watch(context, relay.get());
  if (!ended.has_value()) return absl::OkStatus();
  Log(LogLevel::kWarning, "ucx_ring_ended",
      {{"tenant", who.tenant}, {"why", std::string(ended->message())}});
  return *ended;
}

std::optional<absl::Status> TransportService::Watch(grpc::ServerContext* context,
                                                    RelayProcess* relay) {
  WireCounters& wire = rpc_.metrics->wire();
  ++wire.ucx_rings_opened;
  ++wire.ucx_rings;
  relay::RelayCounts counted;
  std::optional<absl::Status> ended;
  while (!ended.has_value() && !sessions_.OverAfter(*context, std::chrono::milliseconds(0))) {
    ended = relay->EndedAfter(kLook);
    AddCounts(relay->counts(), &counted, &wire);
  }
  if (!ended.has_value()) relay->Finish();
  AddCounts(relay->counts(), &counted, &wire);
  ++(ended.has_value() ? wire.ucx_ended_by_relay : wire.ucx_ended_by_client);
  --wire.ucx_rings;
  return ended;
}

grpc::Status TransportService::OpenUcx(grpc::ServerContext* context,
                                       const v1::OpenUcxRequest* request,
                                       grpc::ServerWriter<v1::OpenUcxReply>* writer) {
  const auto who = Identify(*context, static_cast<size_t>(rpc_.engine->limits().max_name_bytes),
                            rpc_.unix_tenant);
  absl::Status status = who.status();
  if (status.ok()) status = usable_;
  if (status.ok()) status = CheckRequest(*request, options_.ucx);
  // Not counted among the tenant's control calls, which a few rings would use up for good:
  // `sessions_` bounds them.
  if (status.ok()) status = Serve(context, *who, *request, writer);
  rpc_.Note("Transports.OpenUcx", who.ok() ? who->tenant : "", status);
  return ToGrpcStatus(status, context);
}

}  // namespace mla::server
