// The part of CommandRing that turns an entry into a request of the engine.
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/error.h"
#include "server/grpc/grpc_status.h"
#include "server/shared_memory/command_ring.h"

namespace mla::server {

AttendMessage* CommandRing::TakeMessage(const wire::SubmissionEntry& entry) {
  AttendMessage* const message = options_.pool->Take();
  message->owner = this;
  message->stream = builder_.stream();
  message->submitter = this;
  message->tag = entry.tag;
  message->ring_index = taken_ - 1;
  return message;
}

void CommandRing::Serve(const wire::SubmissionEntry& entry) {
  AttendMessage* const message = TakeMessage(entry);
  absl::Status status;
  switch (entry.kind) {
    case wire::kEntryAttend:
      status = PrepareAttend(entry, message);
      break;
    case wire::kEntryMessage:
      status = PrepareMessage(entry, message);
      break;
    default:
      status = RefuseField("kind", absl::StrCat(int{entry.kind}), "1 (attend) or 2 (message)",
                           "unknown_value");
  }
  Submit(message, std::move(status));
}

void CommandRing::Submit(AttendMessage* message, absl::Status prepared) {
  if (prepared.ok()) prepared = builder_.Submit(message);
  if (!prepared.ok()) Refuse(message, std::move(prepared));  // otherwise the engine has it
}

void CommandRing::Refuse(AttendMessage* message, absl::Status status) {
  options_.metrics->CountRejected(DetailOf(status).reason);
  message->handed_back = scheduler::HandedBack::kNo;  // the client gets this answer
  message->answer = std::move(status);
  OnAnswered(message);
}

absl::Status CommandRing::PrepareAttend(const wire::SubmissionEntry& entry,
                                        AttendMessage* message) {
  attend_.set_step_id(entry.step_id);
  attend_.set_layer(entry.layer);
  attend_.set_row_begin(entry.row_begin);
  attend_.set_row_count(entry.row_count);
  attend_.set_head_offset(entry.head_offset);
  attend_.set_num_heads(entry.num_heads);
  attend_.set_profile(static_cast<v1::Profile>(entry.profile));
  attend_.set_has_kv((entry.flags & wire::kEntryHasKv) != 0);
  attend_.set_want_lse((entry.flags & wire::kEntryWantLse) != 0);
  attend_.set_q_dtype(static_cast<v1::DType>(entry.dtypes & 15));
  attend_.set_o_dtype(static_cast<v1::DType>(entry.dtypes >> 4));
  attend_.set_kv_row_dtype((entry.flags & wire::kEntryFp8Kv) != 0 ? v1::DTYPE_F8_E4M3
                                                                  : v1::DTYPE_UNSPECIFIED);
  attend_.set_timeout_us(entry.timeout_us);
  attend_.set_lists((entry.flags & wire::kEntrySelects) != 0    ? v1::INDEX_LISTS_SERVER
                    : (entry.flags & wire::kEntryHasLists) != 0 ? v1::INDEX_LISTS_FIXED
                                                                : v1::INDEX_LISTS_UNSPECIFIED);
  attend_.set_want_lists((entry.flags & wire::kEntryWantLists) != 0);
  absl::Status status = builder_.PrepareAttend(attend_, kTensorsElsewhere,
                                               std::numeric_limits<int64_t>::max(), message);
  if (!status.ok() || !AttendRequestBuilder::IsSized(*message)) return status;
  if ((entry.flags & wire::kEntryOnDevice) == 0) {
    status =
        AttendRequestBuilder::PointInto(*region_, entry.in_offset, entry.out_offset, "", message);
  } else if (region_->device() != nullptr) {
    status = AttendRequestBuilder::PointIntoDevice(*region_->device(), entry.in_offset,
                                                   entry.out_offset, message);
  } else {
    status = RefuseField("flags", absl::StrCat(int{entry.flags}),
                         "without 64 on a ring without device memory");
  }
  bool stalled = false;
  if (status.ok()) status = builder_.StageShared(options_.pool.get(), message, &stalled);
  if (stalled) {
    // The ring's thread has other entries to serve, so it does not wait for memory. The client can
    // try again once one of its tenant's requests is answered, which frees memory.
    return MakeError(absl::StatusCode::kResourceExhausted,
                     "in_offset: no staging memory is free at present",
                     {.field = "in_offset",
                      .limit = "staging memory for index lists and for tensors of 8 bits",
                      .reason = "staging_full",
                      .retry_after_ms = 1});
  }
  if (!status.ok()) return status;
  WireCounters& counters = options_.metrics->wire();
  counters.shared_received_bytes.fetch_add(AttendRequestBuilder::SharedInBytes(message->sizes),
                                           std::memory_order_relaxed);
  counters.shared_sent_bytes.fetch_add(AttendRequestBuilder::SharedOutBytes(message->sizes),
                                       std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status CommandRing::PrepareMessage(const wire::SubmissionEntry& entry,
                                         AttendMessage* message) {
  const size_t length = entry.row_count;
  const size_t most = MostHeaderBytes(options_.engine->limits());
  if (length > most || !region_->Holds(entry.in_offset, length)) {
    return RefuseField("in_offset", absl::StrCat(entry.in_offset, " + ", length),
                       absl::StrCat("a message of at most ", most, " bytes within the arena"));
  }
  const size_t room = entry.num_heads;
  if (room > 0) {
    if (!region_->Holds(entry.out_offset, room)) {
      return RefuseField("out_offset", absl::StrCat(entry.out_offset, " + ", room),
                         absl::StrCat("room for the reply within ", region_->arena_offset(), "..",
                                      region_->size()));
    }
    message->reply_area = {region_->data() + entry.out_offset, room};
  }
  message_bytes_.assign(reinterpret_cast<const char*>(region_->data()) + entry.in_offset, length);
  request_arena_.Reset();
  auto* const request =
      google::protobuf::Arena::CreateMessage<v1::AttendStreamRequest>(&request_arena_);
  const bool parsed = request->ParseFromString(message_bytes_) && request->payload().empty();
  // Tails and rotations lie in the arena, so messages with them may set `shared`, whose region need
  // not be named.
  const bool has_payload = parsed && AttendRequestBuilder::HasPayload(*request);
  if (!parsed || (request->has_shared() && !has_payload)) {
    return RefuseField("message", absl::StrCat(length, " other bytes"),
                       "an AttendStreamRequest without tensors", "malformed");
  }
  message->tag = request->tag();
  absl::Status status = has_payload ? builder_.PreparePayloadIn(*region_, *request, message)
                                    : builder_.Prepare(*request, message);
  // Only the engine knows how large the step's reply is.
  message->end.lengths_max = LengthsWithin(std::max(wire::kReplySlotBytes, room));
  return status;
}

}  // namespace mla::server
