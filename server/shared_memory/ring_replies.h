// Makes the completions of a command ring. Replies that are messages go into the slot of their
// completion, or into the room that their request offered inside the arena: this is the only place
// that writes one, and it checks its size against that room. Allocates nothing once the buffers
// have grown.
//
// Threading: one thread at a time.
#ifndef MLA_SERVER_SHARED_MEMORY_RING_REPLIES_H_
#define MLA_SERVER_SHARED_MEMORY_RING_REPLIES_H_

#include <google/protobuf/arena.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mla/v1/attention.pb.h"
#include "proto/wire/ring_layout.h"
#include "server/attend/attend_message.h"
#include "server/memory/shared_region.h"

namespace mla::server {

// Returns options of an arena that begins with the memory of `block`.
google::protobuf::ArenaOptions InitialBlock(std::vector<char>* block);

// Returns the number of sequences whose lengths fit an EndStepReply of this size.
int32_t LengthsWithin(size_t bytes);

class RingReplies {
 public:
  RingReplies(std::shared_ptr<SharedRegion> region, uint32_t entries, uint64_t boot_id)
      : region_(std::move(region)),
        entries_(entries),
        boot_id_(boot_id),
        arena_(InitialBlock(&block_)) {}

  // Makes the entry of completion slot `slot`, whose reply slot must be free for writing. Leaves
  // the entry's two words unset.
  wire::CompletionEntry Make(const AttendMessage& message, uint64_t slot);

 private:
  void Fill(const AttendMessage& message, uint64_t slot, wire::CompletionEntry* entry);
  bool Write(const v1::AttendStreamReply& reply, std::span<std::byte> room,
             wire::CompletionEntry* entry) const;

  const std::shared_ptr<SharedRegion> region_;
  const uint32_t entries_;
  const uint64_t boot_id_;
  std::vector<char> block_;
  google::protobuf::Arena arena_;
};

}  // namespace mla::server

#endif  // MLA_SERVER_SHARED_MEMORY_RING_REPLIES_H_
