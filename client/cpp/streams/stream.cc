#include "client/cpp/streams/stream.h"

#include <grpcpp/channel.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "client/cpp/streams/errors.h"
#include "proto/wire/attend_codec.h"

namespace mla::client {
namespace {

constexpr char kMethod[] = "/mla.v1.Attention/Attend";

// A message of this size leaves with the call that sends it.
constexpr size_t kSocketBytes = size_t{192} << 10;
// The sender of a request usually waits for it, and polls by itself, long before this.
constexpr auto kPumpDelay = std::chrono::microseconds(500);
// After this time a waiting thread takes over from the pump.
constexpr auto kPumpTurn = std::chrono::milliseconds(1);
// A cancelled request checks at this interval if gRPC has released its tensors: no event reports
// that.
constexpr auto kBorrowCheck = std::chrono::milliseconds(5);

// Tags of operations; at most one operation of each kind is under way.
enum Operation : uintptr_t { kRead = 1, kWritten, kHalfClosed, kFinished };
void* TagOf(Operation operation) { return reinterpret_cast<void*>(operation); }

using Borrowed = std::shared_ptr<PendingReply>;

void EndBorrow(void* borrowed) {
  const std::unique_ptr<Borrowed> ended(static_cast<Borrowed*>(borrowed));
  (*ended)->borrowed.fetch_sub(1, std::memory_order_release);
}

// Returns a view of the caller's memory. A cancelled call leaves what is on its way to the socket
// there.
grpc::Slice BorrowedSlice(std::span<const std::byte> bytes, const Borrowed& pending) {
  pending->borrowed.fetch_add(1, std::memory_order_relaxed);
  return grpc::Slice(const_cast<std::byte*>(bytes.data()), bytes.size(), EndBorrow,
                     new Borrowed(pending));
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

std::chrono::microseconds DefaultStreamSpin(int32_t cpus) {
  return std::chrono::microseconds(cpus < 4 ? 0 : 200);
}

Stream::Stream(std::shared_ptr<grpc::Channel> channel, const StreamOptions& options)
    : options_(options), channel_(std::move(channel)) {
  if (!options_.tenant.empty()) context_.AddMetadata("mla-tenant", options_.tenant);
  call_ = grpc::GenericStub(channel_).PrepareCall(&context_, kMethod, &queue_);
  // Counts as a write: gRPC starts the call with the same operation.
  writing_ = true;
  call_->StartCall(TagOf(kWritten));
}

Stream::~Stream() {
  Close().IgnoreError();
  {
    const MutexLock lock(mutex_);
    stop_pump_ = true;
    pump_wanted_.NotifyAll();
  }
  if (pump_.joinable()) pump_.join();
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

// ------------------------------------------------------------------------------------- Polling

// Handles one event, if one comes in time.
bool Stream::PollOnce(Clock::time_point deadline, bool spin) {
  using Queue = grpc::CompletionQueue;
  void* tag = nullptr;
  bool ok = false;
  Queue::NextStatus status = Queue::TIMEOUT;
  if (spin && options_.spin.count() > 0) {
    const auto end = std::min(Clock::now() + options_.spin, deadline);
    do {
      status = queue_.AsyncNext(&tag, &ok, gpr_inf_past(GPR_CLOCK_MONOTONIC));
    } while (status == Queue::TIMEOUT && Clock::now() < end);
  }
  if (status == Queue::TIMEOUT) {
    // Bounded so that the sum below cannot overflow; callers try again.
    const auto rest = std::clamp<Clock::duration>(deadline - Clock::now(), Clock::duration::zero(),
                                                  std::chrono::hours(1));
    status =
        queue_.AsyncNext(&tag, &ok,
                         std::chrono::system_clock::now() +
                             std::chrono::duration_cast<std::chrono::system_clock::duration>(rest));
  }
  if (status != Queue::GOT_EVENT) return false;
  switch (static_cast<Operation>(reinterpret_cast<uintptr_t>(tag))) {
    case kRead:
      OnReadDone(ok);
      break;
    case kWritten:
      OnWriteDone(ok);
      break;
    case kFinished:
      OnFinished();
      break;
    case kHalfClosed:
      break;
  }
  return true;
}

// Waits until `done`, which the mutex guards: by polling, if no other thread does. False: too late.
template <typename Done>
bool Stream::PollUntil(MutexLock* lock, Clock::time_point deadline, Done done) {
  ++waiting_;
  while (!done() && Clock::now() < deadline) {
    if (polling_) {
      changed_.WaitUntil(*lock, deadline);
      continue;
    }
    polling_ = true;
    while (!done() && Clock::now() < deadline) {
      mutex_.Unlock();
      PollOnce(deadline, true);
      mutex_.Lock();
    }
    polling_ = false;
    changed_.NotifyAll();
  }
  --waiting_;
  return done();
}

// Handles the events that have come, until `done` returns true, unless another thread handles them.
template <typename Done>
void Stream::PollWhatIsThere(MutexLock* lock, Done done) {
  if (polling_ || done()) return;
  polling_ = true;
  for (bool more = true; more && !done();) {
    lock->Unlock();
    more = PollOnce(Clock::time_point(), false);
    lock->Lock();
  }
  polling_ = false;
  changed_.NotifyAll();
}

// Polls while there are requests under way and no thread waits for them.
void Stream::Pump() {
  MutexLock lock(mutex_);
  while (!stop_pump_) {
    if (!pumping_) {
      pump_wanted_.Wait(lock);
      continue;
    }
    pump_wanted_.WaitFor(lock, kPumpDelay);
    pumping_ = !pending_.empty() && !done_;
    if (polling_ || waiting_ > 0) continue;
    polling_ = true;
    while (!stop_pump_ && waiting_ == 0 && !pending_.empty()) {
      lock.Unlock();
      PollOnce(Clock::now() + kPumpTurn, false);
      lock.Lock();
    }
    polling_ = false;
    changed_.NotifyAll();
  }
}

// Called when a request of `bytes` is handed to gRPC. Wakes the pump if that call may not send all
// of it, or if several requests are under way.
void Stream::WakePump(size_t bytes) {
  if (pumping_ || (bytes < kSocketBytes && unsent_.empty() && pending_.size() < 2)) return;
  pumping_ = true;
  if (pump_.joinable()) {
    pump_wanted_.NotifyAll();
  } else {
    try {
      pump_ = std::thread([this] { Pump(); });
    } catch (const std::system_error&) {
      pumping_ = false;  // no thread to be had: requests move on when a caller waits for one
    }
  }
}

// ------------------------------------------------------------------------------------- Sending

void Stream::Send(v1::AttendStreamRequest* request, const InputTensors& inputs,
                  const std::shared_ptr<PendingReply>& pending) {
  if (left()) return Refuse(pending.get());
  pending->asked = request->body_case();
  const uint64_t tag = next_tag_.fetch_add(1, std::memory_order_relaxed);
  request->set_tag(tag);
  grpc::Slice slices[4] = {HeaderOf(*request, inputs.size())};
  size_t count = 1;
  for (const auto& tensor : {inputs.kv, inputs.q, inputs.lists}) {
    if (!tensor.empty()) slices[count++] = BorrowedSlice(tensor, pending);
  }
  grpc::ByteBuffer message(slices, count);
  MutexLock lock(mutex_);
  // Most often the write is over and no thread has checked yet.
  PollWhatIsThere(&lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !writing_; });
  if (done_ || half_closed_ || finishing_ || !broken_.ok()) {
    pending->status = !broken_.ok()         ? broken_
                      : !final_status_.ok() ? final_status_
                                            : absl::UnavailableError("the session has ended");
    pending->done = done_ || !broken_.ok();
    // Otherwise the stream is about to end, and its status will say why.
    if (!pending->done) pending_.emplace(tag, pending);
    return;
  }
  pending_.emplace(tag, pending);
  const bool write = !std::exchange(writing_, true);
  const bool read = !std::exchange(reading_, true);
  if (!write) unsent_.emplace_back().Swap(&message);
  WakePump(inputs.size());
  lock.Unlock();
  // These writes start outside the lock, because the polling thread must not find it taken. The
  // write comes first, because the server waits for it.
  if (write) call_->Write(message, TagOf(kWritten));
  if (read) call_->Read(&incoming_, TagOf(kRead));
}

void Stream::StartNextWrite() {
  if (!unsent_.empty()) {
    writing_ = true;
    grpc::ByteBuffer message;
    message.Swap(&unsent_.front());
    unsent_.pop_front();
    call_->Write(message, TagOf(kWritten));
  } else if (closing_ && !half_closed_ && !finishing_) {
    half_closed_ = true;
    call_->WritesDone(TagOf(kHalfClosed));
    if (!reading_) StartFinish();
  }
}

void Stream::OnWriteDone(bool ok) {
  const MutexLock lock(mutex_);
  writing_ = false;
  if (!ok) unsent_.clear();
  StartNextWrite();
}

// ------------------------------------------------------------------------------------- Reading

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
  const size_t results = pending->o.size() + pending->lse.size();
  const size_t expected = results + pending->chosen.size();
  if (reply_.has_error()) {
    pending->status =
        MakeStatus(reply_.error().code(), reply_.error().message(), reply_.error().detail());
  } else if (absl::Status answers = CheckAnswer(pending->asked, reply_.body_case());
             !answers.ok()) {
    pending->status = std::move(answers);
  } else if (payload_.size != expected) {
    pending->status = absl::DataLossError("a reply's tensors have another size than asked for");
  } else {
    wire::GatherBytes(fragments_, payload_.offset, pending->o.size(), pending->o.data());
    wire::GatherBytes(fragments_, payload_.offset + pending->o.size(), pending->lse.size(),
                      pending->lse.data());
    wire::GatherBytes(fragments_, payload_.offset + results, pending->chosen.size(),
                      pending->chosen.data());
  }
}

void Stream::OnReadDone(bool ok) {
  uint64_t tag = 0;
  absl::Status status;
  if (ok) status = Take(&tag);
  if (ok && status.ok() && reply_.boot_id() != options_.boot_id) {
    status = options_.why_replaced ? options_.why_replaced(reply_.boot_id())
                                   : RestartedError(options_.boot_id, reply_.boot_id());
  }
  std::shared_ptr<PendingReply> pending;
  {
    const MutexLock lock(mutex_);
    if (!ok || !status.ok()) {
      reading_ = false;
      unsent_.clear();
      if (ok) {
        Break(std::move(status));
      } else {
        StartFinish();
      }
      return;
    }
    if (const auto found = pending_.find(tag); found != pending_.end()) {
      pending = std::move(found->second);
      pending_.erase(found);
    }
  }
  if (pending != nullptr) {
    CopyPayload(pending.get());
    pending->reply.Swap(&reply_);
  }
  slices_.clear();
  incoming_.Clear();
  const MutexLock lock(mutex_);
  if (pending != nullptr) {
    pending->done = true;
    changed_.NotifyAll();
  }
  if (!pending_.empty()) {
    call_->Read(&incoming_, TagOf(kRead));
    return;
  }
  reading_ = false;
  if (half_closed_) StartFinish();
}

// -------------------------------------------------------------------------------------- Ending

void Stream::StartFinish() {
  if (!std::exchange(finishing_, true)) call_->Finish(&result_, TagOf(kFinished));
}

// Cancels the call. Pending requests fail with `why`.
void Stream::Break(absl::Status why) {
  if (broken_.ok()) broken_ = std::move(why);
  context_.TryCancel();
  if (!reading_) StartFinish();
}

void Stream::Cancel(const absl::Status& why) {
  if (left()) return;
  const MutexLock lock(mutex_);
  if (!done_) Break(why);
}

void Stream::OnFinished() {
  const MutexLock lock(mutex_);
  final_status_ = FromGrpc(result_, context_);
  const absl::Status why = !broken_.ok()         ? broken_
                           : !final_status_.ok() ? final_status_
                                                 : absl::UnavailableError("the stream has ended");
  for (auto& [tag, pending] : pending_) {
    pending->status = why;
    pending->done = true;
  }
  pending_.clear();
  unsent_.clear();
  done_ = true;
  changed_.NotifyAll();
}

absl::Status Stream::Wait(PendingReply* pending) {
  if (left()) return WaitElsewhere(pending);
  MutexLock lock(mutex_);
  const auto done = [&] { return pending->done; };
  if (!PollUntil(&lock, Clock::now() + options_.timeout, done)) {
    Break(absl::DeadlineExceededError("no reply in time; the session was disconnected"));
    PollUntil(&lock, Clock::time_point::max(), done);
  }
  // A request whose outputs have arrived has been read to the end.
  const auto returned = [&] { return pending->borrowed.load(std::memory_order_acquire) == 0; };
  while (!pending->status.ok() && !PollUntil(&lock, Clock::now() + kBorrowCheck, returned)) {
  }
  return pending->status;
}

bool Stream::Ready(PendingReply* pending) {
  if (left()) return true;  // Wait says why
  MutexLock lock(mutex_);
  PollWhatIsThere(&lock, [&] { return pending->done; });
  return pending->done;
}

absl::Status Stream::Close() {
  if (left()) return absl::OkStatus();
  MutexLock lock(mutex_);
  const auto done = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return done_; };
  if (!std::exchange(closing_, true) && !writing_) StartNextWrite();
  if (!PollUntil(&lock, Clock::now() + options_.timeout, done)) {
    Break(absl::DeadlineExceededError("the session did not end in time"));
    PollUntil(&lock, Clock::time_point::max(), done);
  }
  return final_status_;
}

}  // namespace mla::client
