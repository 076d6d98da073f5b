// The opaque types of mla_ring.h, and what a program gives for an attend, checked.
//
// Ownership and threading: as mla_ring.h says.
#ifndef MLA_CLIENT_C_RING_H_
#define MLA_CLIENT_C_RING_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "client/c/mla_ring.h"
#include "client/cpp/streams/ring_stream.h"
#include "client/cpp/ucx/ucx_memory.h"

struct mla_ring {
  std::shared_ptr<mla::client::RingStream> stream;
  uint64_t boot_id = 0;
  std::string why_no_device, why_no_chains, warning;
  mla::client::UcxMemory* ucx = nullptr;  // the stream's; null: another kind of ring
};

struct mla_request {
  std::shared_ptr<mla::client::RingStream> stream;
  std::shared_ptr<mla::client::PendingReply> pending;
  std::string reply;
};

namespace mla::capi {

// Longest time that can be added to a clock's time; 30 years.
inline constexpr int64_t kMostMs = int64_t{1} << 40;

absl::Status CheckRange(std::string_view field, int64_t got, int64_t low, int64_t high);

// An attend as a program gives it. The spans point into this object.
struct GivenEntry {
  using Copies = std::array<client::DeviceCopy, MLA_RING_MOST_COPIES>;
  mla_ring_entry entry;
  Copies before, after;
  std::span<const client::DeviceCopy> in() const { return {before.data(), entry.in_count}; }
  std::span<const client::DeviceCopy> out() const { return {after.data(), entry.out_count}; }
};
absl::Status ReadEntry(const mla_ring_entry* from, GivenEntry* given);

// Returns the entry as it is sent, without its sequence and tag.
wire::SubmissionEntry EntryOf(const mla_ring_entry& from);
// Returns the places of an attend, inside the memory that travels.
absl::StatusOr<client::RingPlaces> PlacesOf(const mla_ring& ring, const mla_ring_entry& entry);

// Waits for a reply. DEADLINE_EXCEEDED with the reason "no_reply_yet" if none has come by `until`;
// otherwise OK, and *first has the reply's error if it had none before.
absl::Status AwaitReply(client::RingStream* stream, client::PendingReply* pending,
                        std::chrono::steady_clock::time_point until, absl::Status* first);

}  // namespace mla::capi

#endif  // MLA_CLIENT_C_RING_H_
