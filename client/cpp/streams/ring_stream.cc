#include "client/cpp/streams/ring_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/streams/errors.h"

namespace mla::client {
namespace {

using Clock = std::chrono::steady_clock;

// Room for the lengths of thousands of sequences, beside the ring's own reply slots.
constexpr uint64_t kReplyRoom = 65536;

wire::SubmissionEntry EntryOf(const v1::Attend& attend) {
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryAttend;
  entry.profile = static_cast<uint8_t>(attend.profile());
  entry.flags = static_cast<uint8_t>(
      (attend.has_kv() ? wire::kEntryHasKv : 0) | (attend.want_lse() ? wire::kEntryWantLse : 0) |
      (attend.lists() == v1::INDEX_LISTS_SERVER        ? wire::kEntrySelects
       : attend.lists() != v1::INDEX_LISTS_UNSPECIFIED ? wire::kEntryHasLists
                                                       : 0) |
      (attend.want_lists() ? wire::kEntryWantLists : 0) |
      (attend.kv_row_dtype() == v1::DTYPE_F8_E4M3 ? wire::kEntryFp8Kv : 0));
  entry.dtypes = static_cast<uint8_t>(attend.q_dtype() | attend.o_dtype() << 4);
  entry.step_id = attend.step_id();
  entry.layer = attend.layer();
  entry.row_begin = attend.row_begin();
  entry.row_count = attend.row_count();
  entry.head_offset = attend.head_offset();
  entry.num_heads = attend.num_heads();
  entry.timeout_us = attend.timeout_us();
  return entry;
}

}  // namespace

RingStream::RingStream(std::unique_ptr<SharedMemory> memory, uint64_t boot_id,
                       std::chrono::milliseconds timeout, uint64_t message_bytes,
                       const wire::ThreadTeamOptions& copies)
    : memory_(std::move(memory)),
      boot_id_(boot_id),
      timeout_(timeout),
      message_bytes_(std::min(message_bytes, memory_->arena_bytes() / kPiecesInArena)),
      copier_(copies) {}

absl::Status RingStream::device_status() const {
  if (memory_->device() != nullptr) return absl::OkStatus();
  return memory_->device_status().ok() ? absl::UnavailableError("device memory: none was wanted")
                                       : memory_->device_status();
}

RingStream::~RingStream() { Close().IgnoreError(); }

// ------------------------------------------------------------------------------------- Sending

bool RingStream::PlaceMessage(std::span<const std::byte> tails, v1::AttendStreamRequest* request,
                              InFlight* flight, wire::SubmissionEntry* entry) {
  constexpr size_t kPlaceBytes = 64;  // of request->shared
  TensorPlacement& room = flight->room;
  const size_t message_at = wire::AlignShared(tails.size());
  room.in = memory_->Allocate(message_at + request->ByteSizeLong() + kPlaceBytes);
  room.out = memory_->Allocate(kReplyRoom);
  if (room.in.data() == nullptr || room.out.empty()) return false;
  if (!tails.empty()) {
    copier_.Copy(tails, room.in.data());
    request->mutable_shared()->set_in_offset(memory_->OffsetOf(room.in.data()));
    request->mutable_shared()->set_in_length(tails.size());
  }
  std::byte* const message = room.in.data() + message_at;
  entry->row_count = static_cast<uint32_t>(request->ByteSizeLong());
  request->SerializeWithCachedSizesToArray(reinterpret_cast<uint8_t*>(message));
  entry->kind = wire::kEntryMessage;
  entry->num_heads = static_cast<uint32_t>(kReplyRoom);
  entry->in_offset = memory_->OffsetOf(message);
  entry->out_offset = memory_->OffsetOf(room.out.data());
  return true;
}

// A chained request is not begun before the one before it is answered. Others may overtake.
absl::Status RingStream::CheckChain(const PendingReply& pending, bool is_attend) const {
  const bool in_order = std::all_of(in_flight_.begin(), in_flight_.end(), [&](const auto& other) {
    const PendingReply& before = *other.second.pending;
    return before.chained == pending.chained &&
           (!before.chained || before.stream == pending.stream);
  });
  if (in_order || !is_attend) return absl::OkStatus();
  return absl::FailedPreconditionError("chained: calls of another kind or stream are under way");
}

void RingStream::Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
                      const std::shared_ptr<PendingReply>& pending) {
  if (left()) return Refuse(pending.get());
  pending->asked = request->body_case();
  const Deadline deadline = Clock::now() + timeout_;
  MutexLock lock(mutex_);
  const bool is_attend = request->body_case() == v1::AttendStreamRequest::kAttend;
  absl::Status status = broken_;
  if (status.ok()) status = CheckDevicePlaces(*memory_, inputs, *pending);
  if (status.ok()) status = CheckChain(*pending, is_attend);
  while (status.ok()) {
    if (closing_) {
      status = absl::UnavailableError("the session has ended");
      break;
    }
    const uint64_t tag = next_tag_;
    InFlight flight;
    flight.pending = pending;
    wire::SubmissionEntry entry{};
    if (is_attend) entry = EntryOf(request->attend());
    request->set_tag(tag);
    entry.tag = tag;
    const bool placed = is_attend
                            ? PlaceTensors(memory_.get(), &copier_, inputs, *pending, &flight.room)
                            : PlaceMessage(inputs.kv, request, &flight, &entry);
    if (is_attend) {
      entry.in_offset = flight.room.in_offset;
      entry.out_offset = flight.room.out_offset;
      if (flight.room.on_device) entry.flags |= wire::kEntryOnDevice;
    }
    if (placed && pending->chained && !flight.room.on_device) {
      FreeTensors(memory_.get(), &flight.room);
      status = absl::FailedPreconditionError("chained: the tensors are not in device memory");
      break;
    }
    if (placed && memory_->Submit(entry, pending->stream, pending->chained)) {
      ++next_tag_;
      in_flight_[tag] = std::move(flight);
      return;
    }
    FreeTensors(memory_.get(), &flight.room);
    if (flight.room.on_device && !memory_->device_status().ok()) {
      status = memory_->device_status();
      break;
    }
    if (in_flight_.empty()) {
      status = absl::ResourceExhaustedError("the request does not fit into the shared memory");
      break;
    }
    status = TakeOne(&lock, deadline);  // what completes makes room
  }
  pending->status = status;
  pending->done = true;
}

// ------------------------------------------------------------------------------------- Waiting

// Takes one completion, or waits for another thread that is about to.
absl::Status RingStream::TakeOne(MutexLock* lock, Deadline deadline) {
  if (polling_) {
    changed_.WaitUntil(*lock, deadline);
    if (broken_.ok() && Clock::now() >= deadline) {
      Break(absl::DeadlineExceededError("no reply in time; the session was disconnected"));
    }
    return broken_;
  }
  polling_ = true;
  mutex_.Unlock();
  wire::CompletionEntry entry;
  absl::Status status = memory_->Wait(&entry, deadline - Clock::now());
  mutex_.Lock();
  polling_ = false;
  if (status.ok()) status = Finish(entry);
  if (absl::IsDeadlineExceeded(status)) {
    status = absl::DeadlineExceededError("no reply in time; the session was disconnected");
  }
  if (!status.ok()) Break(status);
  changed_.NotifyAll();
  return status;
}

void RingStream::TakeMessage(std::string_view bytes, PendingReply* pending) {
  if (!pending->reply.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    pending->status = absl::DataLossError("a reply is not an AttendStreamReply");
  } else if (pending->reply.has_error()) {
    const v1::StepError& error = pending->reply.error();
    pending->status = MakeStatus(error.code(), error.message(), error.detail());
  } else if (pending->asked == v1::AttendStreamRequest::kAttend) {
    // Its outputs have not been written.
    pending->status = absl::DataLossError("an attend was completed with a message");
  } else {
    pending->status = CheckAnswer(pending->asked, pending->reply.body_case());
  }
}

// A status that is not OK means that the ring cannot be used any more.
absl::Status RingStream::Finish(const wire::CompletionEntry& entry) {
  if (entry.boot_id != boot_id_) return RestartedError(boot_id_, entry.boot_id);
  const auto found = in_flight_.find(entry.tag);
  if (found == in_flight_.end()) return absl::DataLossError("a reply to nothing");
  InFlight flight = std::move(found->second);
  in_flight_.erase(found);
  PendingReply& pending = *flight.pending;
  const bool is_attend = pending.asked == v1::AttendStreamRequest::kAttend;
  if (entry.kind == wire::kEntryMessage) {
    TakeMessage(memory_->Message(entry), &pending);
  } else if (entry.kind != wire::kEntryAttend || !is_attend) {
    pending.status = absl::DataLossError(
        absl::StrCat("a request was completed by an entry of kind ", int{entry.kind}));
  } else {
    v1::Timings* const timings = pending.reply.mutable_timings();
    timings->set_queue_us(entry.queue_us);
    timings->set_plan_us(entry.plan_us);
    timings->set_kernel_us(entry.kernel_us);
    timings->set_write_us(entry.write_us);
    timings->set_launch_requests(entry.launch_requests);
    timings->set_launch_layers(entry.launch_layers);
    timings->set_launch_clients(entry.launch_clients);
    timings->set_plan_reused((entry.flags & wire::kEntryPlanReused) != 0);
    TakeOutputs(flight.room, &copier_, pending);
  }
  FreeTensors(memory_.get(), &flight.room);
  pending.done = true;
  return absl::OkStatus();
}

// Fails everything under way; blocks are not reused, since the server may
// still be writing into them.
void RingStream::Break(const absl::Status& status) {
  if (broken_.ok()) broken_ = status;
  memory_->Disconnect();
  memory_->ReleaseStreams();
  for (auto& [tag, flight] : in_flight_) {
    flight.pending->status = broken_;
    flight.pending->done = true;
  }
  in_flight_.clear();
  changed_.NotifyAll();
}

absl::Status RingStream::Wait(PendingReply* pending) {
  if (left()) return WaitElsewhere(pending);
  const Deadline deadline = Clock::now() + timeout_;
  MutexLock lock(mutex_);
  while (!pending->done) TakeOne(&lock, deadline).IgnoreError();
  return pending->status;
}

absl::Status RingStream::Close() {
  if (left()) return absl::OkStatus();
  const Deadline deadline = Clock::now() + timeout_;
  MutexLock lock(mutex_);
  const bool first = !std::exchange(closing_, true);
  while (!in_flight_.empty()) TakeOne(&lock, deadline).IgnoreError();
  if (first && broken_.ok()) memory_->Close(timeout_);
  return broken_;
}

}  // namespace mla::client
