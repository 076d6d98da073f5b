#include "client/cpp/streams/ring_stream.h"

#include <algorithm>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/streams/errors.h"

namespace mla::client {
namespace {

using Clock = std::chrono::steady_clock;

// Room for a reply with the lengths of thousands of sequences, which does not fit the ring's slots.
constexpr uint64_t kReplyRoom = 65536;
// Pause between two checks of a server for which streams wait.
constexpr std::chrono::milliseconds kWatchPause{20};

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

RingStream::RingStream(std::unique_ptr<RingMemory> memory, uint64_t boot_id,
                       std::chrono::milliseconds timeout, uint64_t message_bytes,
                       const wire::ThreadTeamOptions& copies)
    : memory_(std::move(memory)),
      boot_id_(boot_id),
      timeout_(timeout),
      message_bytes_(std::min(message_bytes, memory_->arena_bytes() / kPiecesInArena)),
      copier_(copies) {}

absl::Status RingStream::device_status() const {
  if (memory_->has_device_memory()) return absl::OkStatus();
  return memory_->device_status().ok() ? absl::UnavailableError("device memory: none was wanted")
                                       : memory_->device_status();
}

RingStream::~RingStream() {
  Close().IgnoreError();
  StopWatch();
}

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
  room.in_offset = memory_->OffsetOf(room.in.data());
  room.in_bytes = message_at + entry->row_count;
  return true;
}

// The server begins a chained request only when the one before it is answered. Requests that are
// not chained may overtake it, except messages, which the server takes in their turn.
absl::Status RingStream::CheckChain(const PendingReply& pending, bool is_attend) const {
  const bool in_order =
      pending.chained
          ? attends_.awaited == 0 && (attends_.chained == 0 || attends_.stream == pending.stream)
          : attends_.chained == 0;
  if (in_order || !is_attend) return absl::OkStatus();
  return absl::FailedPreconditionError("chained: calls of another kind or stream are under way");
}

void RingStream::Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
                      const std::shared_ptr<PendingReply>& pending) {
  if (left()) return Refuse(pending.get());
  SendUntil(Clock::now() + timeout_, Late::kBreaks, request, inputs, pending);
}

absl::Status RingStream::SendMessage(v1::AttendStreamRequest* request,
                                     std::span<const std::byte> tails, Deadline until,
                                     const std::shared_ptr<PendingReply>& pending) {
  SendUntil(until, Late::kReturns, request, {.kv = tails, .q = {}, .lists = {}}, pending);
  const MutexLock lock(mutex_);
  return pending->done ? pending->status : absl::OkStatus();
}

void RingStream::SendUntil(Deadline deadline, Late late, v1::AttendStreamRequest* request,
                           const InputTensors& inputs,
                           const std::shared_ptr<PendingReply>& pending) {
  pending->asked = request->body_case();
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
    const bool stays = flight.room.in.empty() && flight.room.out.empty();
    if (placed && pending->chained &&
        !(flight.room.on_device || (stays && memory_->pinned().ok()))) {
      FreeTensors(memory_.get(), &flight.room);
      status = absl::FailedPreconditionError(
          "chained: the tensors are neither in device memory nor where a pinned region has them");
      break;
    }
    if (placed && pending->chained) status = StartWatch();
    if (!status.ok()) break;
    if (placed && SubmitNext(&entry, &flight)) return;
    FreeTensors(memory_.get(), &flight.room);
    if ((flight.room.on_device || pending->chained) && !memory_->device_status().ok()) {
      status = memory_->device_status();
      break;
    }
    if (in_flight_.empty()) {
      status = absl::ResourceExhaustedError("the request does not fit into the shared memory");
      break;
    }
    status = TakeOne(&lock, deadline, late);  // what completes makes room
  }
  pending->status = status;
  pending->done = true;
}

bool RingStream::SubmitNext(wire::SubmissionEntry* entry, InFlight* flight) {
  const PendingReply& pending = *flight->pending;
  entry->tag = next_tag_;
  const RingPlaces places{flight->room.in_offset, flight->room.in_bytes, flight->room.out_bytes};
  if (!memory_->Submit(*entry, places, pending.stream, pending.chained)) return false;
  ++next_tag_;
  if (pending.chained) NoteChained(flight);
  Add(entry->tag, std::move(*flight));
  return true;
}

void RingStream::Add(uint64_t tag, InFlight flight) {
  const PendingReply& pending = *flight.pending;
  if (pending.asked == v1::AttendStreamRequest::kAttend) {
    ++(pending.chained ? attends_.chained : attends_.awaited);
    if (pending.chained) attends_.stream = pending.stream;
  }
  in_flight_[tag] = std::move(flight);
}

RingStream::InFlight RingStream::Remove(std::map<uint64_t, InFlight>::iterator flight) {
  InFlight removed = std::move(flight->second);
  in_flight_.erase(flight);
  if (removed.pending->asked == v1::AttendStreamRequest::kAttend) {
    --(removed.pending->chained ? attends_.chained : attends_.awaited);
  }
  return removed;
}

void RingStream::NoteChained(InFlight* flight) {
  flight->deadline = Clock::now() + timeout_;
  if (!std::exchange(watched_, true)) watch_.NotifyOne();
}

absl::Status RingStream::CheckSend(const PendingReply& pending) {
  if (!broken_.ok()) return broken_;
  if (closing_) return absl::UnavailableError("the session has ended");
  return CheckChain(pending, true);
}

absl::Status RingStream::SendPlaced(wire::SubmissionEntry entry, const RingPlaces& places,
                                    std::span<const DeviceCopy> in, std::span<const DeviceCopy> out,
                                    std::chrono::milliseconds room,
                                    const std::shared_ptr<PendingReply>& pending) {
  pending->asked = v1::AttendStreamRequest::kAttend;
  const bool on_device = (entry.flags & wire::kEntryOnDevice) != 0;
  if (on_device && !memory_->has_device_memory()) return device_status();
  if (pending->chained && !on_device && !memory_->pinned().ok()) return memory_->pinned();
  MutexLock lock(mutex_);
  absl::Status status = CheckSend(*pending);
  if (status.ok() && pending->chained) status = StartWatch();
  Deadline until;  // set when it is first needed
  while (status.ok()) {
    if (memory_->in_flight() < memory_->ring_entries()) {
      InFlight flight;
      flight.pending = pending;
      flight.room.in_offset = places.in_offset;
      flight.room.in_bytes = places.in_bytes;
      flight.room.out_bytes = places.out_bytes;
      if (!in.empty()) status = memory_->device()->Copy(in, pending->stream);
      if (!status.ok()) return status;
      if (!SubmitNext(&entry, &flight)) return memory_->device_status();
      return out.empty() ? status : memory_->device()->Copy(out, pending->stream);
    }
    if (until == Deadline()) until = Clock::now() + room;
    status = TakeOne(&lock, until, Late::kReturns);
    if (status.ok()) status = CheckSend(*pending);
  }
  return status;
}

absl::StatusOr<RingMemory::GraphEntry> RingStream::Capture(wire::SubmissionEntry entry,
                                                           std::span<const DeviceCopy> in,
                                                           std::span<const DeviceCopy> out,
                                                           void* stream) {
  const bool on_device = (entry.flags & wire::kEntryOnDevice) != 0;
  if (on_device && !memory_->has_device_memory()) return device_status();
  if (!on_device && !memory_->pinned().ok()) return memory_->pinned();
  const MutexLock lock(mutex_);
  if (!broken_.ok()) return broken_;
  absl::Status status = memory_->device()->Copy(in, stream);
  if (!status.ok()) return status;
  MLA_ASSIGN_OR_RETURN(void* const node, memory_->CaptureTurn(stream));
  if (!out.empty()) status = memory_->device()->Copy(out, stream);
  if (!status.ok()) return status;
  entry.flags |= wire::kEntryChained;
  return RingMemory::GraphEntry{entry, node};
}

absl::Status RingStream::Replay(std::span<const RingMemory::GraphEntry> calls, uint64_t step_id,
                                void* exec, void* stream, Deadline until,
                                std::span<const std::shared_ptr<PendingReply>> pending) {
  if (calls.empty()) return absl::OkStatus();
  if (calls.size() > memory_->ring_entries()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "graph: ", calls.size(), " calls, and the ring has ", memory_->ring_entries(), " entries"));
  }
  std::vector<RingMemory::GraphEntry> entries(calls.begin(), calls.end());
  MutexLock lock(mutex_);
  absl::Status status = CheckSend(*pending[0]);
  if (status.ok()) status = StartWatch();
  while (status.ok() && memory_->in_flight() + entries.size() > memory_->ring_entries()) {
    status = TakeOne(&lock, until, Late::kReturns);
    if (status.ok()) status = CheckSend(*pending[0]);
  }
  if (!status.ok()) return status;
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i].entry.step_id = step_id;
    entries[i].entry.tag = next_tag_ + i;
  }
  status = memory_->SubmitGraph(entries, exec, stream);
  if (!status.ok()) return status;
  for (size_t i = 0; i < entries.size(); ++i) {
    InFlight flight;
    flight.pending = pending[i];
    NoteChained(&flight);
    Add(next_tag_++, std::move(flight));
  }
  return status;
}

// ------------------------------------------------------------------------------------ Watching

absl::Status RingStream::StartWatch() {
  if (watcher_.joinable()) return absl::OkStatus();
  try {
    watcher_ = std::thread([this] { Watch(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("chained: no thread to look after the server: ", error.what()));
  }
  return absl::OkStatus();
}

void RingStream::Watch() {
  MutexLock lock(mutex_);
  while (!unwatched_) {
    if (watched_) {
      watch_.WaitFor(lock, kWatchPause);
      LookAround();
    } else {
      watch_.Wait(lock);
    }
  }
}

// If a thread waits for a completion, it notices the end by itself.
void RingStream::LookAround() {
  wire::CompletionEntry entry;
  absl::Status status;
  while (!polling_ && status.ok() && memory_->Poll(&entry)) {
    status = Finish(entry);
    changed_.NotifyAll();
  }
  watched_ = false;
  Deadline first = Deadline::max();
  for (const auto& [tag, flight] : in_flight_) {
    if (!flight.pending->chained) continue;
    watched_ = true;
    first = std::min(first, flight.deadline);
  }
  if (!watched_) return;
  if (status.ok() && !memory_->Connected()) {
    status = absl::UnavailableError("the shared memory has ended");
  } else if (status.ok() && Clock::now() >= first) {
    status = absl::DeadlineExceededError("no reply in time; the session was disconnected");
  }
  if (!status.ok()) Break(status);
}

void RingStream::StopWatch() {
  {
    const MutexLock lock(mutex_);
    unwatched_ = true;
    watch_.NotifyOne();
  }
  if (watcher_.joinable()) watcher_.join();
}

// ------------------------------------------------------------------------------------- Waiting

// Takes one completion, or waits for another thread that is about to.
absl::Status RingStream::TakeOne(MutexLock* lock, Deadline deadline, Late late) {
  const absl::Status missed = absl::DeadlineExceededError("no reply in time");
  if (polling_) {
    changed_.WaitUntil(*lock, deadline);
    if (broken_.ok() && Clock::now() >= deadline) {
      if (late == Late::kReturns) return missed;
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
  if (absl::IsDeadlineExceeded(status) && late == Late::kReturns) {
    changed_.NotifyAll();  // another one polls
    return missed;
  }
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

// Returns an error if the ring cannot be used after this.
absl::Status RingStream::Finish(const wire::CompletionEntry& entry) {
  if (entry.boot_id != boot_id_) return RestartedError(boot_id_, entry.boot_id);
  const auto found = in_flight_.find(entry.tag);
  if (found == in_flight_.end()) return absl::DataLossError("a reply to nothing");
  InFlight flight = Remove(found);
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
  attends_ = {};
  changed_.NotifyAll();
}

void RingStream::Hold() {
  if (!left()) memory_->Hold();
}

void RingStream::SendHeld() {
  if (!left()) memory_->SendHeld();
}

absl::Status RingStream::Wait(PendingReply* pending) {
  if (left()) return WaitElsewhere(pending);
  memory_->SendHeld();
  const Deadline deadline = Clock::now() + timeout_;
  MutexLock lock(mutex_);
  while (!pending->done) TakeOne(&lock, deadline).IgnoreError();
  return pending->status;
}

bool RingStream::Ready(PendingReply* pending) {
  if (left()) return true;  // Wait says why
  MutexLock lock(mutex_);
  while (!pending->done && !polling_ && TakeOne(&lock, Clock::now(), Late::kReturns).ok()) {
  }
  return pending->done;
}

bool RingStream::WaitUntil(PendingReply* pending, Deadline until) {
  memory_->SendHeld();
  MutexLock lock(mutex_);
  // Takes what has come even if the time is up: a caller may have been away for longer than that.
  while (!pending->done && TakeOne(&lock, until, Late::kReturns).ok()) {
  }
  return pending->done;
}

absl::Status RingStream::broken() {
  const MutexLock lock(mutex_);
  if (!broken_.ok()) return broken_;
  return memory_->Connected() ? absl::OkStatus()
                              : absl::UnavailableError("the shared memory has ended");
}

void RingStream::End(std::chrono::milliseconds wait) {
  const Deadline deadline = Clock::now() + wait;
  MutexLock lock(mutex_);
  closing_ = true;
  while (!in_flight_.empty() && Clock::now() < deadline) {
    TakeOne(&lock, deadline, Late::kReturns).IgnoreError();
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  if (broken_.ok() && left.count() > 0) memory_->Close(left);
  Break(absl::UnavailableError("the session has ended"));
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
