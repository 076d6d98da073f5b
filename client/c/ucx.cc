// Implements rings over UCX for which the caller makes the call: mla_ring.h over UcxMemory.
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "base/status_macros.h"
#include "client/c/handles.h"
#include "client/c/mla_ring.h"
#include "client/c/ring.h"

struct mla_ucx {
  std::unique_ptr<mla::client::UcxMemory> memory;  // null once a ring has it
  std::string address;
  bool handles_losses = false;
};

namespace mla::capi {
namespace {

constexpr int32_t kMostSpinUs = 1'000'000;
constexpr int64_t kRequestMs = 60'000, kMostMs = int64_t{1} << 40;

absl::Status Start(const mla_ucx_options* given, mla_ucx** out) {
  mla_ucx_options known;
  absl::Status status = CheckNotNull(out, "out");
  if (status.ok()) status = Read(given, true, "options", &known);
  if (!status.ok()) return status;
  if (known.spin_us < 0 || known.spin_us > kMostSpinUs) {
    return Refuse("options.spin_us", "0..1000000", std::to_string(known.spin_us));
  }
  client::UcxMemoryOptions options;
  options.library = Text(known.library);
  if (known.puts < 0 || known.puts > 1) {
    return Refuse("options.puts", "0..1", std::to_string(known.puts));
  }
  if (known.pins < 0 || known.pins > 1) {
    return Refuse("options.pins", "0..1", std::to_string(known.pins));
  }
  if (known.device_memory < 0 || known.device_memory > known.puts) {
    return Refuse("options.device_memory", "0, or 1 with puts",
                  std::to_string(known.device_memory));
  }
  if (known.gpu < 0) return Refuse("options.gpu", "0 or more", std::to_string(known.gpu));
  options.pins = known.pins == 1;
  options.device = {known.gpu, Text(known.gpu_library)};
  options.link = {Text(known.transports), Text(known.devices), known.puts == 1};
  options.device_memory = known.device_memory == 1;
  options.spin = std::chrono::microseconds(known.spin_us);
  MLA_ASSIGN_OR_RETURN(auto memory, client::UcxMemory::Open(options));
  auto ucx = std::make_unique<mla_ucx>();
  ucx->address = memory->address();
  ucx->handles_losses = memory->handles_losses();
  ucx->memory = std::move(memory);
  *out = ucx.release();
  return absl::OkStatus();
}

absl::Status Open(mla_ucx* ucx, const mla_ucx_reply* given, mla_ring** out) {
  mla_ucx_reply known;
  absl::Status status = CheckNotNull(ucx, "ucx");
  if (status.ok()) status = CheckNotNull(out, "out");
  if (status.ok()) status = Read(given, true, "reply", &known);
  if (status.ok()) status = CheckNotNull(known.worker_address, "reply.worker_address");
  if (status.ok()) status = CheckNotNull(known.token, "reply.token");
  if (!status.ok()) return status;
  if (ucx->memory == nullptr) return absl::FailedPreconditionError("it has a ring already");
  if (known.request_ms < 0 || known.request_ms > kMostMs) {
    return Refuse("reply.request_ms", "0..2^40", std::to_string(known.request_ms));
  }
  client::UcxRing described;
  described.worker_address = {static_cast<const char*>(known.worker_address),
                              known.worker_address_bytes};
  described.token = {static_cast<const char*>(known.token), known.token_bytes};
  described.region_bytes = known.region_bytes;
  described.arena_offset = known.arena_offset;
  described.entries = known.ring_entries;
  described.arena_bytes = known.bytes;
  if (known.arena_key != nullptr) {
    described.arena_key = {static_cast<const char*>(known.arena_key), known.arena_key_bytes};
  }
  described.arena_address = known.arena_address;
  if (known.device_key != nullptr) {
    described.device_key = {static_cast<const char*>(known.device_key), known.device_key_bytes};
  }
  described.device_address = known.device_address;
  described.device_bytes = known.device_bytes;
  if (known.secret != nullptr) {
    described.secret = {static_cast<const char*>(known.secret), known.secret_bytes};
  }
  described.batches = known.batches != 0;
  if (known.give_up != nullptr) {
    ucx->memory->OnGivenUp(
        [give_up = known.give_up, argument = known.argument] { give_up(argument); });
  }
  if (status = ucx->memory->Connect(described); !status.ok()) return status;
  auto ring = std::make_unique<mla_ring>();
  ring->boot_id = known.boot_id;
  if (!ucx->memory->pinned().ok()) {
    ring->why_no_chains = std::string(ucx->memory->pinned().message());
  }
  ring->ucx = ucx->memory.get();
  const int64_t request_ms = known.request_ms > 0 ? known.request_ms : kRequestMs;
  ring->stream = std::make_shared<client::RingStream>(
      std::move(ucx->memory), ring->boot_id, std::chrono::milliseconds(request_ms),
      std::numeric_limits<uint64_t>::max(), wire::ThreadTeamOptions());
  *out = ring.release();
  return status;
}

}  // namespace
}  // namespace mla::capi

extern "C" {

mla_code mla_ucx_start(const mla_ucx_options* options, mla_ucx** out, mla_error** error) {
  return mla::capi::Guard(error, [&] { return mla::capi::Start(options, out); });
}

const void* mla_ucx_address(const mla_ucx* ucx, size_t* bytes) {
  if (ucx == nullptr || bytes == nullptr) return nullptr;
  *bytes = ucx->address.size();
  return ucx->address.data();
}

int32_t mla_ucx_handles_losses(const mla_ucx* ucx) {
  return ucx != nullptr && ucx->handles_losses ? 1 : 0;
}

mla_code mla_ucx_open(mla_ucx* ucx, const mla_ucx_reply* reply, mla_ring** out, mla_error** error) {
  return mla::capi::Guard(error, [&] { return mla::capi::Open(ucx, reply, out); });
}

void mla_ucx_free(mla_ucx* ucx) { delete ucx; }

void mla_ring_call_ended(mla_ring* ring, const char* why) {
  if (ring == nullptr || ring->ucx == nullptr) return;
  ring->ucx->SetEnded(absl::UnavailableError(why == nullptr ? "the call has ended" : why));
}

}  // extern "C"
