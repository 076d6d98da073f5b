// Chained attends of one shape: mla_chain of mla_ring.h. All that is the same for each of them is
// checked and laid out once, because a program gives its stream the work of a layer between two.
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "client/c/handles.h"
#include "client/c/mla_ring.h"
#include "client/c/ring.h"

struct mla_chain {
  std::shared_ptr<mla::client::RingStream> stream;
  mla::wire::SubmissionEntry entry;
  mla::client::RingPlaces places;
  std::vector<mla::client::DeviceCopy> in, out;
  std::vector<std::shared_ptr<mla::client::PendingReply>> replies;  // of calls that are not awaited
};

namespace mla::capi {
namespace {

using std::chrono::milliseconds;

absl::StatusOr<std::unique_ptr<mla_chain>> NewChain(const mla_ring& ring,
                                                    const mla_ring_entry* entry) {
  GivenEntry given;
  absl::Status status = ReadEntry(entry, &given);
  if (status.ok() && (given.entry.flags & MLA_RING_CHAINED) == 0) {
    status = Refuse("entry.flags", "MLA_RING_CHAINED", std::to_string(given.entry.flags));
  }
  if (!status.ok()) return status;
  const absl::StatusOr<client::RingPlaces> places = PlacesOf(ring, given.entry);
  if (!places.ok()) return places.status();
  auto chain = std::make_unique<mla_chain>();
  chain->stream = ring.stream;
  chain->entry = EntryOf(given.entry);
  chain->places = *places;
  chain->in.assign(given.in().begin(), given.in().end());
  chain->out.assign(given.out().begin(), given.out().end());
  return chain;
}

absl::Status Attend(mla_chain* chain, uint64_t step_id, uint32_t layer, void* stream,
                    void* const* addresses, int64_t room_ms) {
  absl::Status status = CheckNotNull(chain, "chain");
  if (status.ok()) status = CheckRange("room_ms", room_ms, 0, kMostMs);
  if (status.ok() && chain->in.size() + chain->out.size() > 0) {
    status = CheckNotNull(addresses, "addresses");
  }
  if (!status.ok()) return status;
  for (client::DeviceCopy& copy : chain->in) copy.from = *addresses++;
  for (client::DeviceCopy& copy : chain->out) copy.to = *addresses++;
  chain->entry.step_id = step_id;
  chain->entry.layer = layer;
  auto reply = std::make_shared<client::PendingReply>();
  reply->stream = stream;
  reply->chained = true;
  status = chain->stream->SendPlaced(chain->entry, chain->places, chain->in, chain->out,
                                     milliseconds(room_ms), reply);
  if (status.ok()) chain->replies.push_back(std::move(reply));
  return status;
}

absl::Status Wait(mla_chain* chain, int64_t wait_ms) {
  absl::Status status = CheckNotNull(chain, "chain");
  if (status.ok()) status = CheckRange("wait_ms", wait_ms, 0, kMostMs);
  if (!status.ok()) return status;
  const auto until = std::chrono::steady_clock::now() + milliseconds(wait_ms);
  for (const auto& reply : chain->replies) {
    const absl::Status late = AwaitReply(chain->stream.get(), reply.get(), until, &status);
    if (!late.ok()) return late;
  }
  chain->replies.clear();
  return status;
}

}  // namespace
}  // namespace mla::capi

using mla::capi::Guard;

extern "C" {

mla_code mla_chain_new(mla_ring* ring, const mla_ring_entry* entry, mla_chain** out,
                       mla_error** error) {
  return Guard(error, [&] {
    absl::Status status = mla::capi::CheckNotNull(ring, "ring");
    if (status.ok()) status = mla::capi::CheckNotNull(out, "out");
    if (!status.ok()) return status;
    auto chain = mla::capi::NewChain(*ring, entry);
    if (chain.ok()) *out = chain->release();
    return chain.status();
  });
}

mla_code mla_chain_attend(mla_chain* chain, uint64_t step_id, uint32_t layer, void* stream,
                          void* const* addresses, int64_t room_ms, mla_error** error) {
  return Guard(
      error, [&] { return mla::capi::Attend(chain, step_id, layer, stream, addresses, room_ms); });
}

mla_code mla_chain_wait(mla_chain* chain, int64_t wait_ms, mla_error** error) {
  return Guard(error, [&] { return mla::capi::Wait(chain, wait_ms); });
}

void mla_chain_free(mla_chain* chain) { delete chain; }

}  // extern "C"
