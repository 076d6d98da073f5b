#include "server/shared_memory/ring_replies.h"

#include <algorithm>
#include <string>

#include "scheduler/limits.h"

namespace mla::server {
namespace {

// Messages are parsed and written in an arena of this size, so that they do not use the heap.
constexpr size_t kArenaBytes = 65536;
// An EndStepReply needs this number of bytes for everything except the lengths, and one length as a
// varint.
constexpr size_t kReplyFixedBytes = 64;
constexpr size_t kLengthBytes = 10;
// A StepError whose texts have at most this length fits a slot.
constexpr size_t kMaxErrorText = 153;
constexpr size_t kTraceIdText = 32;
static_assert(kReplyFixedBytes < wire::kReplySlotBytes);
static_assert(5 * (kMaxErrorText + 3) + scheduler::kMostPeerBytes + 3 + kTraceIdText + 2 +
                  kReplyFixedBytes <
              wire::kReplySlotBytes);

// Cuts between characters, because protobuf rejects text that is not UTF-8.
void Truncate(std::string* text) {
  if (text->size() <= kMaxErrorText) return;
  size_t end = kMaxErrorText;
  while (end > 0 && (static_cast<unsigned char>((*text)[end]) & 0xc0) == 0x80) --end;
  text->resize(end);
}

void ShortenTexts(v1::StepError* error) {
  Truncate(error->mutable_message());
  Truncate(error->mutable_detail()->mutable_field());
  Truncate(error->mutable_detail()->mutable_limit());
  Truncate(error->mutable_detail()->mutable_got());
  Truncate(error->mutable_detail()->mutable_reason());
}

uint32_t Micros(int64_t ns) {
  return static_cast<uint32_t>(std::clamp<int64_t>(ns / 1000, 0, UINT32_MAX));
}

}  // namespace

int32_t LengthsWithin(size_t bytes) {
  return static_cast<int32_t>((bytes - kReplyFixedBytes) / kLengthBytes);
}

google::protobuf::ArenaOptions InitialBlock(std::vector<char>* block) {
  google::protobuf::ArenaOptions options;
  block->resize(kArenaBytes);
  options.initial_block = block->data();
  options.initial_block_size = block->size();
  return options;
}

wire::CompletionEntry RingReplies::Make(const AttendMessage& message, uint64_t slot) {
  wire::CompletionEntry entry{};
  entry.tag = message.tag;
  entry.boot_id = boot_id_;
  if (!message.answer.ok() || message.kind != scheduler::RequestKind::kAttend) {
    entry.kind = wire::kEntryMessage;
    Fill(message, slot, &entry);
    return entry;
  }
  const scheduler::RequestTimings& took = message.timings;
  entry.kind = wire::kEntryAttend;
  entry.flags = took.plan_reused ? wire::kEntryPlanReused : 0;
  entry.launch_layers = static_cast<uint16_t>(took.launch_layers);
  entry.queue_us = Micros(took.queue_ns);
  entry.plan_us = Micros(took.plan_ns);
  entry.kernel_us = Micros(took.kernel_ns);
  entry.launch_requests = static_cast<uint32_t>(took.launch_requests);
  entry.launch_clients = static_cast<uint32_t>(took.launch_clients);
  return entry;
}

void RingReplies::Fill(const AttendMessage& message, uint64_t slot, wire::CompletionEntry* entry) {
  arena_.Reset();
  auto* const reply = google::protobuf::Arena::CreateMessage<v1::AttendStreamReply>(&arena_);
  message.FillReply(boot_id_, reply);
  const std::span<std::byte> slot_bytes(
      region_->data() + wire::RepliesOffset(entries_) + slot * wire::kReplySlotBytes,
      wire::kReplySlotBytes);
  if (Write(*reply, slot_bytes, entry) || Write(*reply, message.reply_area, entry)) return;
  // This must be an error with long texts, because the sizes of all other replies were checked
  // before the engine did the work.
  if (!reply->has_error()) {
    reply->mutable_error()->set_code(static_cast<int32_t>(absl::StatusCode::kInternal));
    reply->mutable_error()->set_message("the request succeeded, but its reply has no room");
  }
  ShortenTexts(reply->mutable_error());
  Write(*reply, slot_bytes, entry);
}

// Returns false and writes nothing if the reply does not fit `room`.
bool RingReplies::Write(const v1::AttendStreamReply& reply, std::span<std::byte> room,
                        wire::CompletionEntry* entry) const {
  const size_t bytes = reply.ByteSizeLong();
  if (bytes > room.size()) return false;
  reply.SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(room.data()));
  entry->message_offset = static_cast<uint64_t>(room.data() - region_->data());
  entry->message_length = static_cast<uint32_t>(bytes);
  return true;
}

}  // namespace mla::server
