#include "client/cpp/shared_memory/ring_memory.h"

#include <optional>

namespace mla::client {

void RingMemory::SetRegion(std::span<std::byte> region, uint64_t arena_offset) {
  region_ = region;
  arena_offset_ = arena_offset;
  blocks_.Add(arena_offset, arena_bytes());
}

std::span<std::byte> RingMemory::Allocate(uint64_t bytes) {
  const std::optional<uint64_t> at = blocks_.Take(bytes);
  return at ? region_.subspan(*at, bytes) : std::span<std::byte>();
}

void RingMemory::Free(std::span<std::byte> block) {
  if (block.data() != nullptr) blocks_.Return(OffsetOf(block.data()));
}

bool RingMemory::Holds(const void* data, uint64_t bytes) const {
  const auto* const from = static_cast<const std::byte*>(data);
  const std::byte* const arena = region_.data() + arena_offset_;
  const std::byte* const end = region_.data() + region_.size();
  return from >= arena && from <= end && bytes <= static_cast<uint64_t>(end - from);
}

std::string_view RingMemory::Message(const wire::CompletionEntry& entry) const {
  if (entry.message_offset > region_.size() ||
      entry.message_length > region_.size() - entry.message_offset) {
    return {};
  }
  return {reinterpret_cast<const char*>(region_.data()) + entry.message_offset,
          entry.message_length};
}

absl::Status RingMemory::device_status() const {
  return absl::UnavailableError("device memory: this transport has none");
}

absl::Status RingMemory::pinned() const {
  return absl::UnavailableError("chained: this transport chains nothing");
}

absl::StatusOr<void*> RingMemory::CaptureTurn(void*) {
  return absl::UnimplementedError("chained: calls of this transport cannot be captured");
}

absl::Status RingMemory::SubmitGraph(std::span<const GraphEntry>, void*, void*) {
  return absl::UnimplementedError("chained: calls of this transport cannot be captured");
}

}  // namespace mla::client
