#include "client/cpp/stream.h"

#include <grpcpp/channel.h>
#include <grpcpp/generic/generic_stub.h>

#include <utility>

#include "client/cpp/errors.h"
#include "proto/attend_codec.h"

namespace mla::client {
namespace {

using Stub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

constexpr char kMethod[] = "/mla.v1.Attention/Attend";

grpc::Slice ViewOf(std::span<const std::byte> bytes) {
  return grpc::Slice(bytes.data(), bytes.size(), grpc::Slice::STATIC_SLICE);
}

grpc::Slice HeaderOf(const v1::AttendStreamRequest& request, size_t payload_size) {
  char attend[wire::kMaxAttendHeaderBytes];
  const size_t length = wire::EncodeAttend(request, payload_size, attend);
  if (length > 0) return grpc::Slice(attend, length);
  std::string header;
  wire::EncodeHeader(request, payload_size, &header);
  return grpc::Slice(header);
}

}  // namespace

Stream::Stream(std::shared_ptr<grpc::Channel> channel, const std::string& tenant, uint64_t boot_id,
               std::chrono::milliseconds timeout, uint64_t message_bytes)
    : boot_id_(boot_id),
      timeout_(timeout),
      message_bytes_(message_bytes),
      channel_(std::move(channel)) {
  if (!tenant.empty()) context_.AddMetadata("mla-tenant", tenant);
  Stub(channel_).PrepareBidiStreamingCall(&context_, kMethod, {}, this);
  // Reads and writes start from the caller's threads; the hold keeps OnDone away until Close.
  AddHold();
  StartCall();
}

Stream::~Stream() { Close().IgnoreError(); }

void Stream::Send(v1::AttendStreamRequest* request, std::span<const std::byte> first,
                  std::span<const std::byte> second, const std::shared_ptr<PendingReply>& pending) {
  const uint64_t tag = next_tag_.fetch_add(1, std::memory_order_relaxed);
  request->set_tag(tag);
  grpc::Slice slices[3] = {HeaderOf(*request, first.size() + second.size())};
  size_t count = 1;
  if (!first.empty()) slices[count++] = ViewOf(first);
  if (!second.empty()) slices[count++] = ViewOf(second);
  grpc::ByteBuffer message(slices, count);
  bool write = false, read = false;
  {
    const std::lock_guard lock(mutex_);
    if (done_ || half_closed_ || !broken_.ok()) {
      pending->status = !broken_.ok()         ? broken_
                        : !final_status_.ok() ? final_status_
                                              : absl::UnavailableError("the session has ended");
      pending->done = done_ || !broken_.ok();
      // Otherwise the stream is about to end, and its status will say why.
      if (!pending->done) pending_.emplace(tag, pending);
      return;
    }
    pending_.emplace(tag, pending);
    write = !std::exchange(writing_, true);
    read = !std::exchange(reading_, true);
    if (write) {
      outgoing_.Swap(&message);
    } else {
      queue_.push_back(std::move(message));
    }
    ++starting_;
  }
  // Outside the lock, which the reply's arrival must not find taken. The write first: the server
  // waits for it.
  if (write) StartWrite(&outgoing_);
  if (read) StartRead(&incoming_);
  const std::lock_guard lock(mutex_);
  --starting_;
  if (!writing_) StartNextWrite();
}

// REQUIRES: mutex_ held, no write under way. gRPC starts the write in this call but reports its
// end from another stack, so the mutex may be held.
void Stream::StartNextWrite() {
  if (!queue_.empty()) {
    writing_ = true;
    outgoing_.Swap(&queue_.front());
    queue_.pop_front();
    StartWrite(&outgoing_);
  } else if (closing_ && !half_closed_ && starting_ == 0) {
    half_closed_ = true;
    StartWritesDone();
    RemoveHold();
  }
}

void Stream::OnWriteDone(bool ok) {
  const std::lock_guard lock(mutex_);
  writing_ = false;
  outgoing_.Clear();
  if (!ok) queue_.clear();
  StartNextWrite();
}

// No reply will come any more: let the call end, which fails whatever is pending.
void Stream::EndSending() {
  const std::lock_guard lock(mutex_);
  queue_.clear();
  closing_ = true;
  if (!writing_) StartNextWrite();
}

// Parses incoming_ into reply_ and payload_.
absl::Status Stream::Take(uint64_t* tag) {
  slices_.clear();
  if (!incoming_.Dump(&slices_).ok()) return absl::DataLossError("a reply cannot be decompressed");
  fragments_.clear();
  for (const grpc::Slice& slice : slices_) {
    fragments_.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
  }
  if (wire::ScanAttendReply(fragments_, &reply_, &payload_)) {
    *tag = reply_.tag();
    return absl::OkStatus();
  }
  absl::Status status = wire::ScanMessage(fragments_, &header_bytes_, &payload_);
  if (status.ok() && !reply_.ParseFromString(header_bytes_)) {
    status = absl::DataLossError("a reply is not an AttendStreamReply");
  }
  *tag = reply_.tag();
  return status;
}

void Stream::CopyPayload(PendingReply* pending) const {
  const size_t expected = pending->o.size() + pending->lse.size();
  if (reply_.has_error()) {
    pending->status =
        MakeStatus(reply_.error().code(), reply_.error().message(), reply_.error().detail());
  } else if (payload_.size != expected) {
    pending->status = absl::DataLossError("a reply's tensors have another size than asked for");
  } else {
    wire::GatherBytes(fragments_, payload_.offset, pending->o.size(), pending->o.data());
    wire::GatherBytes(fragments_, payload_.offset + pending->o.size(), pending->lse.size(),
                      pending->lse.data());
  }
}

void Stream::OnReadDone(bool ok) {
  if (!ok) return EndSending();
  uint64_t tag = 0;
  absl::Status status = Take(&tag);
  if (status.ok() && reply_.boot_id() != boot_id_) {
    status = RestartedError(boot_id_, reply_.boot_id());
  }
  std::shared_ptr<PendingReply> pending;
  {
    const std::lock_guard lock(mutex_);
    if (!status.ok()) broken_ = status;
    if (const auto found = pending_.find(tag); status.ok() && found != pending_.end()) {
      pending = std::move(found->second);
      pending_.erase(found);
    }
  }
  if (!status.ok()) {
    Cut();
    return EndSending();
  }
  if (pending != nullptr) {
    CopyPayload(pending.get());
    pending->reply.Swap(&reply_);
    {
      const std::lock_guard lock(mutex_);
      pending->done = true;
    }
    // Without the lock, which the waiter would only run into. OnDone, and so the end of this
    // object, waits for this call.
    changed_.notify_all();
  }
  slices_.clear();
  incoming_.Clear();
  bool read = false;
  {
    const std::lock_guard lock(mutex_);
    read = reading_ = !pending_.empty();
  }
  if (read) StartRead(&incoming_);
}

void Stream::OnDone(const grpc::Status& status) {
  const std::lock_guard lock(mutex_);
  final_status_ = FromGrpc(status, context_);
  const absl::Status why = !broken_.ok()         ? broken_
                           : !final_status_.ok() ? final_status_
                                                 : absl::UnavailableError("the stream has ended");
  for (auto& [tag, pending] : pending_) {
    pending->status = why;
    pending->done = true;
  }
  pending_.clear();
  queue_.clear();
  done_ = true;
  changed_.notify_all();
}

absl::Status Stream::Wait(PendingReply* pending) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, timeout_, [&] { return pending->done; })) {
    broken_ = absl::DeadlineExceededError("no reply in time; the session was cut");
    lock.unlock();
    Cut();
    Close().IgnoreError();
    lock.lock();
    changed_.wait(lock, [&] { return pending->done; });
  }
  return pending->status;
}

absl::Status Stream::Close() {
  std::unique_lock lock(mutex_);
  if (!std::exchange(closing_, true) && !writing_) StartNextWrite();
  if (!changed_.wait_for(lock, timeout_, [&] { return done_; })) {
    lock.unlock();
    Cut();
    lock.lock();
    changed_.wait(lock, [&] { return done_; });
  }
  return final_status_;
}

}  // namespace mla::client
