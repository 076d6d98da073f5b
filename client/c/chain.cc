// Chained attends of one shape, and the begins and ends of their steps: mla_chain of mla_ring.h.
// All that is the same for each of them is checked and laid out once, because a program gives its
// stream the work of a layer between two.
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "client/c/handles.h"
#include "client/c/mla_ring.h"
#include "client/c/ring.h"

struct mla_chain {
  std::shared_ptr<mla::client::RingStream> stream;
  mla::wire::SubmissionEntry entry;
  mla::client::RingPlaces places;
  std::vector<mla::client::DeviceCopy> in, out;
  std::vector<std::shared_ptr<mla::client::PendingReply>> replies;  // of calls that are not awaited
  // The begin of the step under way, or of the last one, which the next one follows; without a body
  // there is none.
  mla::v1::AttendStreamRequest begin;
  bool open = false;  // the step has begun and not ended
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
  MLA_ASSIGN_OR_RETURN(const client::RingPlaces places, PlacesOf(ring, given.entry));
  auto chain = std::make_unique<mla_chain>();
  chain->stream = ring.stream;
  chain->entry = EntryOf(given.entry);
  chain->places = places;
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

// Sends a message whose reply Wait takes.
absl::Status Send(mla_chain* chain, v1::AttendStreamRequest* message, int64_t room_ms) {
  auto reply = std::make_shared<client::PendingReply>();
  const absl::Status status = chain->stream->SendMessage(
      message, {}, std::chrono::steady_clock::now() + milliseconds(room_ms), reply);
  if (status.ok()) chain->replies.push_back(std::move(reply));
  return status;
}

absl::Status CheckStep(const mla_chain* chain, bool open, int64_t room_ms) {
  absl::Status status = CheckNotNull(chain, "chain");
  if (status.ok()) status = CheckRange("room_ms", room_ms, 0, kMostMs);
  if (!status.ok()) return status;
  if (chain->open != open) {
    return absl::FailedPreconditionError(open ? "chain: no step of it is open"
                                              : "chain: a step of it is open");
  }
  if (!open && !chain->replies.empty()) {
    return absl::FailedPreconditionError("chain: calls of the step before were not awaited");
  }
  return absl::OkStatus();
}

absl::Status Begin(mla_chain* chain, const void* message, size_t bytes, int64_t room_ms) {
  absl::Status status = CheckStep(chain, false, room_ms);
  if (status.ok()) status = CheckNotNull(message, "message");
  if (!status.ok()) return status;
  v1::AttendStreamRequest begin;
  if (bytes > std::numeric_limits<int32_t>::max() ||
      !begin.ParseFromArray(message, static_cast<int>(bytes)) || !begin.has_begin_step()) {
    return Refuse("message", "an AttendStreamRequest with begin_step", "other bytes");
  }
  const v1::BeginStep& step = begin.begin_step();
  if (step.participants() > 1 || step.rotations()) {
    return Refuse("message.begin_step", "one participant, and no rotations", "others");
  }
  status = Send(chain, &begin, room_ms);
  if (!status.ok()) return status;
  chain->begin = std::move(begin);
  chain->open = true;
  return status;
}

absl::Status BeginNext(mla_chain* chain, uint64_t step_id, int64_t room_ms) {
  absl::Status status = CheckStep(chain, false, room_ms);
  if (!status.ok()) return status;
  if (!chain->begin.has_begin_step()) {
    return absl::FailedPreconditionError("chain: no step of it has succeeded");
  }
  v1::AttendStreamRequest next = chain->begin;
  next.mutable_begin_step()->set_step_id(step_id);
  for (v1::StepSequence& sequence : *next.mutable_begin_step()->mutable_sequences()) {
    sequence.set_start_position(sequence.start_position() + sequence.rows());
  }
  status = Send(chain, &next, room_ms);
  if (!status.ok()) return status;
  chain->begin.Swap(&next);
  chain->open = true;
  return status;
}

absl::Status End(mla_chain* chain, int64_t room_ms) {
  absl::Status status = CheckStep(chain, true, room_ms);
  if (!status.ok()) return status;
  v1::AttendStreamRequest end;
  end.mutable_end_step()->set_step_id(chain->begin.begin_step().step_id());
  status = Send(chain, &end, room_ms);
  if (status.ok()) chain->open = false;
  return status;
}

// Returns DATA_LOSS if a begin or end has another answer than it must have.
absl::Status CheckReply(const v1::BeginStep& step, const client::PendingReply& reply) {
  if (reply.asked == v1::AttendStreamRequest::kBeginStep) {
    uint64_t rows = 0;
    for (const v1::StepSequence& sequence : step.sequences()) rows += sequence.rows();
    if (reply.reply.begin_step().total_rows() == rows) return absl::OkStatus();
    return absl::DataLossError("begin_step: the server counts other rows");
  }
  if (reply.asked != v1::AttendStreamRequest::kEndStep) return absl::OkStatus();
  const auto& lengths = reply.reply.end_step().lengths();
  bool same = lengths.size() == step.sequences_size();
  for (int i = 0; same && i < lengths.size(); ++i) {
    same = lengths[i] == step.sequences(i).start_position() + step.sequences(i).rows();
  }
  return same ? absl::OkStatus() : absl::DataLossError("end_step: the server has other lengths");
}

absl::Status Wait(mla_chain* chain, int64_t wait_ms) {
  absl::Status status = CheckNotNull(chain, "chain");
  if (status.ok()) status = CheckRange("wait_ms", wait_ms, 0, kMostMs);
  if (!status.ok()) return status;
  const auto until = std::chrono::steady_clock::now() + milliseconds(wait_ms);
  for (const auto& reply : chain->replies) {
    const absl::Status late = AwaitReply(chain->stream.get(), reply.get(), until, &status);
    if (!late.ok()) return late;
    if (status.ok()) status = CheckReply(chain->begin.begin_step(), *reply);
  }
  chain->replies.clear();
  if (!status.ok()) {
    chain->begin.Clear();
    chain->open = false;
  }
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

mla_code mla_chain_begin(mla_chain* chain, const void* message, size_t bytes, int64_t room_ms,
                         mla_error** error) {
  return Guard(error, [&] { return mla::capi::Begin(chain, message, bytes, room_ms); });
}

mla_code mla_chain_begin_next(mla_chain* chain, uint64_t step_id, int64_t room_ms,
                              mla_error** error) {
  return Guard(error, [&] { return mla::capi::BeginNext(chain, step_id, room_ms); });
}

mla_code mla_chain_end(mla_chain* chain, int64_t room_ms, mla_error** error) {
  return Guard(error, [&] { return mla::capi::End(chain, room_ms); });
}

mla_code mla_chain_wait(mla_chain* chain, int64_t wait_ms, mla_error** error) {
  return Guard(error, [&] { return mla::capi::Wait(chain, wait_ms); });
}

void mla_chain_free(mla_chain* chain) { delete chain; }

}  // extern "C"
