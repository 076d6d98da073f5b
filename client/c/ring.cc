// Rings without a client: mla_ring.h over RingStream.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "client/c/handles.h"
#include "client/c/mla_ring.h"
#include "client/c/ring.h"
#include "client/cpp/shared_memory/shared_memory.h"
#include "client/cpp/streams/errors.h"

struct mla_graph {
  std::shared_ptr<mla::client::RingStream> stream;
  std::vector<mla::client::RingMemory::GraphEntry> calls;
};

namespace mla::capi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kConnectMs = 10'000, kRequestMs = 60'000;
constexpr uint64_t kMiB = 1 << 20;
constexpr int32_t kMostSpinUs = 1'000'000;

absl::Status CheckOptions(const mla_ring_options& options) {
  absl::Status s = CheckRange("options.connect_ms", options.connect_ms, 0, kMostMs);
  if (s.ok()) s = CheckRange("options.request_ms", options.request_ms, 0, kMostMs);
  if (s.ok()) s = CheckRange("options.spin_us", options.spin_us, 0, kMostSpinUs);
  if (s.ok()) s = CheckRange("options.server_spin_us", options.server_spin_us, 0, kMostSpinUs);
  if (s.ok() && (options.gpu < -1 || options.reserved != 0)) {
    s = Refuse("options.gpu", "-1 or the number of a GPU", std::to_string(options.gpu));
  }
  if (s.ok() && options.device_bytes > 0 && options.gpu < 0) {
    s = Refuse("options.device_bytes", "0 without a GPU", std::to_string(options.device_bytes));
  }
  if (s.ok() && options.device_bytes / kMiB > std::numeric_limits<uint32_t>::max() - 1) {
    s = Refuse("options.device_bytes", "less", std::to_string(options.device_bytes));
  }
  return s;
}

client::SharedMemoryOptions MemoryOptions(const mla_ring_options& options) {
  client::SharedMemoryOptions memory;
  memory.tenant = Text(options.tenant);
  memory.bytes = options.bytes;
  memory.server_spin_us = static_cast<uint32_t>(options.server_spin_us);
  memory.spin_us = static_cast<uint32_t>(options.spin_us);
  const int64_t connect_ms = options.connect_ms > 0 ? options.connect_ms : kConnectMs;
  memory.connect_timeout_ms =
      static_cast<int32_t>(std::min<int64_t>(connect_ms, std::numeric_limits<int32_t>::max()));
  memory.server_uid = options.server_uid > 0 ? options.server_uid : -1;
  if (options.gpu >= 0) {
    memory.device_mib = static_cast<uint32_t>((options.device_bytes + kMiB - 1) / kMiB);
    memory.device = {options.gpu, Text(options.gpu_library)};
    memory.pins = true;
  }
  return memory;
}

absl::StatusOr<std::unique_ptr<mla_ring>> Open(const char* path, const mla_ring_options* given) {
  mla_ring_options options;
  absl::Status status = CheckNotNull(path, "path");
  if (status.ok()) status = Read(given, true, "options", &options);
  if (status.ok()) status = CheckOptions(options);
  if (!status.ok()) return status;
  MLA_ASSIGN_OR_RETURN(auto memory, client::SharedMemory::Connect(path, MemoryOptions(options)));
  auto ring = std::make_unique<mla_ring>();
  ring->boot_id = memory->boot_id();
  const client::DeviceRegion* const device = memory->device();
  if (options.device_bytes > 0 && !memory->has_device_memory()) {
    ring->why_no_device = std::string(memory->device_status().message());
  }
  if (!memory->pinned().ok()) ring->why_no_chains = std::string(memory->pinned().message());
  if (device != nullptr) ring->warning = device->warning();
  const int64_t request_ms = options.request_ms > 0 ? options.request_ms : kRequestMs;
  ring->stream = std::make_shared<client::RingStream>(
      std::move(memory), ring->boot_id, milliseconds(request_ms),
      std::numeric_limits<uint64_t>::max(), wire::ThreadTeamOptions());
  return ring;
}

mla_ring_info InfoOf(const mla_ring& ring) {
  client::RingMemory& memory = ring.stream->memory();
  const client::DeviceRegion* const device = memory.device();
  mla_ring_info info{};
  info.boot_id = ring.boot_id;
  info.memory = memory.region().data();
  info.memory_bytes = memory.region().size();
  info.arena_offset = info.memory_bytes - memory.arena_bytes();
  info.entries = memory.ring_entries();
  info.chains_in_memory = memory.pinned().ok() ? 1 : 0;
  if (device != nullptr) info.nvidia = device->nvidia() ? 1 : 0;
  if (memory.has_device_memory()) {
    info.device_memory = device->memory().data();
    info.device_bytes = device->memory().size();
    info.chains_on_device = device->chains() ? 1 : 0;
  }
  info.why_no_device = ring.why_no_device.c_str();
  info.why_no_chains = ring.why_no_chains.c_str();
  info.device_warning = ring.warning.c_str();
  return info;
}

std::unique_ptr<mla_request> NewRequest(std::shared_ptr<client::RingStream> stream) {
  auto request = std::make_unique<mla_request>();
  request->stream = std::move(stream);
  request->pending = std::make_shared<client::PendingReply>();
  return request;
}

absl::Status Attend(mla_ring* ring, const mla_ring_entry* entry, int64_t room_ms,
                    mla_request** out) {
  GivenEntry given;
  absl::Status status = CheckNotNull(ring, "ring");
  if (status.ok()) status = CheckNotNull(out, "out");
  if (status.ok()) status = CheckRange("room_ms", room_ms, 0, kMostMs);
  if (status.ok()) status = ReadEntry(entry, &given);
  if (!status.ok()) return status;
  MLA_ASSIGN_OR_RETURN(const client::RingPlaces places, PlacesOf(*ring, given.entry));
  auto request = NewRequest(ring->stream);
  request->pending->stream = given.entry.stream;
  request->pending->chained = (given.entry.flags & MLA_RING_CHAINED) != 0;
  status = ring->stream->SendPlaced(EntryOf(given.entry), places, given.in(), given.out(),
                                    milliseconds(room_ms), request->pending);
  if (status.ok()) *out = request.release();
  return status;
}

absl::Status Capture(mla_graph* graph, const mla_ring_entry* entry) {
  GivenEntry given;
  absl::Status status = CheckNotNull(graph, "graph");
  if (status.ok()) status = ReadEntry(entry, &given);
  if (status.ok() && (given.entry.flags & MLA_RING_CHAINED) == 0) {
    status = Refuse("entry.flags", "MLA_RING_CHAINED", std::to_string(given.entry.flags));
  }
  if (!status.ok()) return status;
  graph->calls.reserve(graph->calls.size() + 1);
  auto call =
      graph->stream->Capture(EntryOf(given.entry), given.in(), given.out(), given.entry.stream);
  if (call.ok()) graph->calls.push_back(*call);
  return call.status();
}

absl::Status SendGraph(mla_graph* graph, uint64_t step_id, void* exec, void* stream,
                       int64_t room_ms, mla_request** out) {
  absl::Status status = CheckNotNull(graph, "graph");
  if (status.ok()) status = CheckNotNull(exec, "exec");
  if (status.ok()) status = CheckNotNull(out, "out");
  if (status.ok()) status = CheckRange("room_ms", room_ms, 0, kMostMs);
  if (!status.ok()) return status;
  std::vector<std::unique_ptr<mla_request>> requests;
  std::vector<std::shared_ptr<client::PendingReply>> pending;
  for (size_t i = 0; i < graph->calls.size(); ++i) {
    requests.push_back(NewRequest(graph->stream));
    pending.push_back(requests.back()->pending);
    pending.back()->asked = v1::AttendStreamRequest::kAttend;
    pending.back()->stream = stream;
    pending.back()->chained = true;
  }
  status = graph->stream->Replay(graph->calls, step_id, exec, stream,
                                 Clock::now() + milliseconds(room_ms), pending);
  for (size_t i = 0; status.ok() && i < requests.size(); ++i) out[i] = requests[i].release();
  return status;
}

absl::Status Message(mla_ring* ring, const void* message, size_t bytes, const void* tails,
                     size_t tail_bytes, int64_t room_ms, mla_request** out) {
  absl::Status status = CheckNotNull(ring, "ring");
  if (status.ok()) status = CheckNotNull(message, "message");
  if (status.ok()) status = CheckNotNull(out, "out");
  if (status.ok() && tail_bytes > 0) status = CheckNotNull(tails, "tails");
  if (status.ok()) status = CheckRange("room_ms", room_ms, 0, kMostMs);
  if (!status.ok()) return status;
  v1::AttendStreamRequest parsed;
  if (bytes > std::numeric_limits<int32_t>::max() ||
      !parsed.ParseFromArray(message, static_cast<int>(bytes)) || parsed.has_attend()) {
    return Refuse("message", "an AttendStreamRequest without attend", "other bytes");
  }
  auto request = NewRequest(ring->stream);
  status = ring->stream->SendMessage(&parsed, {static_cast<const std::byte*>(tails), tail_bytes},
                                     Clock::now() + milliseconds(room_ms), request->pending);
  if (status.ok()) *out = request.release();
  return status;
}

absl::Status WaitFor(std::span<mla_request* const> requests, int64_t wait_ms) {
  absl::Status status = CheckRange("wait_ms", wait_ms, 0, kMostMs);
  for (const mla_request* request : requests) {
    if (status.ok()) status = CheckNotNull(request, "request");
  }
  if (!status.ok()) return status;
  const auto until = Clock::now() + milliseconds(wait_ms);
  for (mla_request* request : requests) {
    const absl::Status late =
        AwaitReply(request->stream.get(), request->pending.get(), until, &status);
    if (!late.ok()) return late;
  }
  return status;
}

}  // namespace

absl::Status CheckRange(std::string_view field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return Refuse(field, std::to_string(low) + ".." + std::to_string(high), std::to_string(got));
}

namespace {

absl::Status ReadCopies(std::string_view field, const mla_ring_copy* given, uint32_t count,
                        bool from_here, GivenEntry::Copies* copies) {
  absl::Status status = CheckRange(field, count, 0, MLA_RING_MOST_COPIES);
  if (status.ok() && count > 0) status = CheckNotNull(given, field);
  for (uint32_t i = 0; status.ok() && i < count; ++i) {
    const mla_ring_copy& one = given[i];
    if (one.to_pitch < one.width || one.from_pitch < one.width) {
      return Refuse(field, "rows that do not overlap", std::to_string(one.width));
    }
    (*copies)[i] = {one.to, one.from, one.width, one.rows, one.to_pitch, one.from_pitch, from_here};
  }
  return status;
}

}  // namespace

absl::Status ReadEntry(const mla_ring_entry* from, GivenEntry* given) {
  mla_ring_entry& known = given->entry;
  absl::Status status = Read(from, true, "entry", &known);
  if (status.ok()) status = CheckRange("entry.q_dtype", known.q_dtype, 0, 15);
  if (status.ok()) status = CheckRange("entry.o_dtype", known.o_dtype, 0, 15);
  if (status.ok() && known.in_count + known.out_count > 0 &&
      (known.flags & MLA_RING_CHAINED) == 0) {
    return Refuse("entry.in_count", "0 without MLA_RING_CHAINED", std::to_string(known.in_count));
  }
  if (status.ok()) status = CheckRange("entry.in_on_gpu", known.in_on_gpu, 0, 1);
  if (status.ok()) status = CheckRange("entry.reserved", known.reserved, 0, 0);
  if (status.ok()) {
    status = ReadCopies("entry.in", known.in, known.in_count, known.in_on_gpu != 0, &given->before);
  }
  if (status.ok()) {
    status = ReadCopies("entry.out", known.out, known.out_count, false, &given->after);
  }
  return status;
}

wire::SubmissionEntry EntryOf(const mla_ring_entry& from) {
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  entry.profile = from.profile;
  entry.flags = static_cast<uint8_t>(from.flags & ~MLA_RING_CHAINED);
  entry.dtypes = static_cast<uint8_t>(from.q_dtype | from.o_dtype << 4);
  entry.step_id = from.step_id;
  entry.layer = from.layer;
  entry.row_begin = from.row_begin;
  entry.row_count = from.row_count;
  entry.head_offset = from.head_offset;
  entry.num_heads = from.num_heads;
  entry.timeout_us = from.timeout_us;
  entry.in_offset = from.in_offset;
  entry.out_offset = from.out_offset;
  return entry;
}

absl::StatusOr<client::RingPlaces> PlacesOf(const mla_ring& ring, const mla_ring_entry& entry) {
  if (ring.ucx == nullptr) return client::RingPlaces();
  const uint64_t size = ring.ucx->region().size();
  if (entry.in_offset > size || entry.in_bytes > size - entry.in_offset) {
    return Refuse("entry.in_bytes", "within the ring's memory", std::to_string(entry.in_bytes));
  }
  if (entry.out_offset > size || entry.out_bytes > size - entry.out_offset) {
    return Refuse("entry.out_bytes", "within the ring's memory", std::to_string(entry.out_bytes));
  }
  return client::RingPlaces{entry.in_offset, entry.in_bytes, entry.out_bytes};
}

absl::Status AwaitReply(client::RingStream* stream, client::PendingReply* pending,
                        Clock::time_point until, absl::Status* first) {
  if (!stream->WaitUntil(pending, until)) {
    v1::ErrorDetail detail;
    detail.set_reason("no_reply_yet");
    return client::MakeStatus(MLA_DEADLINE_EXCEEDED, "no reply yet", detail);
  }
  if (first->ok()) *first = pending->status;
  return absl::OkStatus();
}

}  // namespace mla::capi

using mla::capi::Guard;

extern "C" {

mla_code mla_ring_open(const char* path, const mla_ring_options* options, mla_ring** out,
                       mla_error** error) {
  return Guard(error, [&]() -> absl::Status {
    MLA_RETURN_IF_ERROR(mla::capi::CheckNotNull(out, "out"));
    auto ring = mla::capi::Open(path, options);
    if (ring.ok()) *out = ring->release();
    return ring.status();
  });
}

mla_code mla_ring_describe(const mla_ring* ring, mla_ring_info* info, mla_error** error) {
  return Guard(error, [&]() -> absl::Status {
    MLA_RETURN_IF_ERROR(mla::capi::CheckNotNull(ring, "ring"));
    mla_ring_info known;
    MLA_RETURN_IF_ERROR(mla::capi::Read(info, true, "info", &known));
    mla::capi::Write(mla::capi::InfoOf(*ring), info);
    return absl::OkStatus();
  });
}

uint64_t mla_ring_allocate(mla_ring* ring, uint64_t bytes, int32_t on_device) {
  if (ring == nullptr || bytes == 0) return UINT64_MAX;
  mla::client::RingMemory& memory = ring->stream->memory();
  if (on_device == 0) {
    const auto block = memory.Allocate(bytes);
    return block.empty() ? UINT64_MAX : memory.OffsetOf(block.data());
  }
  if (!memory.has_device_memory()) return UINT64_MAX;
  const auto block = memory.device()->Allocate(bytes);
  return block.empty() ? UINT64_MAX : memory.device()->OffsetOf(block.data());
}

void mla_ring_deallocate(mla_ring* ring, uint64_t offset, int32_t on_device) {
  if (ring == nullptr) return;
  mla::client::RingMemory& memory = ring->stream->memory();
  if (on_device == 0) {
    if (offset < memory.region().size()) memory.Free(memory.region().subspan(offset, 1));
  } else if (memory.has_device_memory() && offset < memory.device()->memory().size()) {
    memory.device()->Free(memory.device()->memory().subspan(offset, 1));
  }
}

mla_code mla_ring_attend(mla_ring* ring, const mla_ring_entry* entry, int64_t room_ms,
                         mla_request** out, mla_error** error) {
  return Guard(error, [&] { return mla::capi::Attend(ring, entry, room_ms, out); });
}

mla_code mla_graph_new(mla_ring* ring, mla_graph** out, mla_error** error) {
  return Guard(error, [&]() -> absl::Status {
    absl::Status status = mla::capi::CheckNotNull(ring, "ring");
    if (status.ok()) status = mla::capi::CheckNotNull(out, "out");
    if (status.ok()) *out = new mla_graph{ring->stream, {}};
    return status;
  });
}

mla_code mla_graph_capture(mla_graph* graph, const mla_ring_entry* entry, mla_error** error) {
  return Guard(error, [&] { return mla::capi::Capture(graph, entry); });
}

size_t mla_graph_size(const mla_graph* graph) { return graph == nullptr ? 0 : graph->calls.size(); }

mla_code mla_graph_send(mla_graph* graph, uint64_t step_id, void* exec, void* stream,
                        int64_t room_ms, mla_request** out, mla_error** error) {
  return Guard(error,
               [&] { return mla::capi::SendGraph(graph, step_id, exec, stream, room_ms, out); });
}

void mla_graph_free(mla_graph* graph) { delete graph; }

mla_code mla_ring_message(mla_ring* ring, const void* message, size_t bytes, const void* tails,
                          size_t tail_bytes, int64_t room_ms, mla_request** out,
                          mla_error** error) {
  return Guard(error, [&] {
    return mla::capi::Message(ring, message, bytes, tails, tail_bytes, room_ms, out);
  });
}

mla_code mla_request_wait(mla_request* request, int64_t wait_ms, mla_error** error) {
  return Guard(error, [&] { return mla::capi::WaitFor({&request, 1}, wait_ms); });
}

mla_code mla_requests_wait(mla_request* const* requests, size_t count, int64_t wait_ms,
                           mla_error** error) {
  return Guard(error, [&] {
    const absl::Status named = mla::capi::CheckNotNull(requests, "requests");
    return count > 0 && !named.ok() ? named : mla::capi::WaitFor({requests, count}, wait_ms);
  });
}

void mla_request_times(const mla_request* request, mla_attend_times* times) {
  if (request == nullptr) return;
  const mla::v1::Timings& from = request->pending->reply.timings();
  mla_attend_times known{};
  known.queue_us = from.queue_us();
  known.plan_us = from.plan_us();
  known.kernel_us = from.kernel_us();
  known.write_us = from.write_us();
  known.launch_requests = from.launch_requests();
  known.messages = 1;
  known.launch_layers = from.launch_layers();
  known.launch_clients = from.launch_clients();
  known.plan_reused = from.plan_reused() ? 1 : 0;
  mla::capi::Write(known, times);
}

const void* mla_request_reply(mla_request* request, size_t* bytes) {
  if (request == nullptr) return nullptr;
  request->reply = request->pending->reply.SerializeAsString();
  if (bytes != nullptr) *bytes = request->reply.size();
  return request->reply.data();
}

void mla_request_free(mla_request* request) { delete request; }

void mla_requests_free(mla_request* const* requests, size_t count) {
  for (size_t i = 0; requests != nullptr && i < count; ++i) delete requests[i];
}

mla_code mla_ring_state(mla_ring* ring, mla_error** error) {
  return Guard(error, [&]() -> absl::Status {
    MLA_RETURN_IF_ERROR(mla::capi::CheckNotNull(ring, "ring"));
    return ring->stream->broken();
  });
}

void mla_ring_end(mla_ring* ring, int64_t wait_ms) {
  if (ring == nullptr || ring->stream->left()) return;
  ring->stream->End(std::chrono::milliseconds(std::clamp<int64_t>(wait_ms, 0, mla::capi::kMostMs)));
}

void mla_ring_free(mla_ring* ring) {
  if (ring != nullptr && !ring->stream->left()) delete ring;
}

}  // extern "C"
