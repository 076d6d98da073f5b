#include "client/cpp/streams/shared_stream.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace mla::client {

SharedStream::SharedStream(std::unique_ptr<SharedMemory> memory, std::shared_ptr<StepStream> stream,
                           std::chrono::milliseconds timeout, const wire::ThreadTeamOptions& copies)
    : memory_(std::move(memory)),
      stream_(std::move(stream)),
      timeout_(timeout),
      message_bytes_(std::min(stream_->message_bytes(), memory_->arena_bytes() / kPiecesInArena)),
      copier_(copies) {}

SharedStream::~SharedStream() { Close().IgnoreError(); }

void SharedStream::Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
                        const std::shared_ptr<PendingReply>& pending) {
  if (left()) return Refuse(pending.get());
  if (request->body_case() != v1::AttendStreamRequest::kAttend && inputs.size() == 0) {
    stream_->Send(request, {}, pending);
    return;
  }
  const auto flight = std::make_shared<InFlight>();
  flight->pending = pending;
  flight->message = std::make_shared<PendingReply>();
  while (!PlaceTensors(memory_.get(), &copier_, inputs, *pending, &flight->room)) {
    std::shared_ptr<InFlight> oldest;
    {
      const MutexLock lock(mutex_);
      if (!in_flight_.empty()) oldest = in_flight_.front();
    }
    if (oldest == nullptr) {
      const MutexLock lock(mutex_);
      pending->status =
          absl::ResourceExhaustedError("the request does not fit into the shared memory");
      pending->done = true;
      return;
    }
    Finish(oldest).IgnoreError();  // its own caller sees the status
  }
  v1::SharedTensors* const shared = request->mutable_shared();
  const std::string_view handle = memory_->handle();
  shared->set_handle(handle.data(), handle.size());
  shared->set_in_offset(flight->room.in_offset);
  shared->set_in_length(flight->room.in_bytes);
  shared->set_out_offset(flight->room.out_offset);
  shared->set_out_length(flight->room.out_bytes);
  {
    const MutexLock lock(mutex_);
    in_flight_.push_back(flight);
  }
  stream_->Send(request, {}, flight->message);
}

// Waits for the reply, moves it to the caller's and gives the blocks back, once.
absl::Status SharedStream::Finish(const std::shared_ptr<InFlight>& flight) {
  const absl::Status status = stream_->Wait(flight->message.get());
  const MutexLock lock(mutex_);
  PendingReply& pending = *flight->pending;
  if (pending.done) return pending.status;
  if (status.ok()) TakeOutputs(flight->room, &copier_, pending);
  pending.reply.Swap(&flight->message->reply);
  pending.status = status;
  pending.done = true;
  // Without any reply the stream is broken, and the server may still be writing into the blocks.
  if (status.ok() || pending.reply.has_error()) FreeTensors(memory_.get(), &flight->room);
  in_flight_.remove(flight);
  return status;
}

// Null: no attend, or finished already, which the stream sees as well.
std::shared_ptr<SharedStream::InFlight> SharedStream::FlightOf(const PendingReply* pending) {
  const MutexLock lock(mutex_);
  for (const auto& flight : in_flight_) {
    if (flight->pending.get() == pending) return flight;
  }
  return nullptr;
}

absl::Status SharedStream::Wait(PendingReply* pending) {
  if (left()) return WaitElsewhere(pending);
  const auto flight = FlightOf(pending);
  return flight == nullptr ? stream_->Wait(pending) : Finish(flight);
}

bool SharedStream::Ready(PendingReply* pending) {
  if (left()) return true;  // Wait says why
  const auto flight = FlightOf(pending);
  return stream_->Ready(flight == nullptr ? pending : flight->message.get());
}

absl::Status SharedStream::Close() {
  if (left()) return absl::OkStatus();
  const absl::Status status = stream_->Close();
  const MutexLock lock(mutex_);
  if (!std::exchange(closed_, true)) memory_->Close(timeout_);
  return status;
}

}  // namespace mla::client
