#include "server/attend/attend_stream.h"

#include <grpcpp/server_context.h>

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "proto/wire/attend_codec.h"
#include "server/attend/attention_service.h"
#include "server/grpc/grpc_status.h"
#include "server/grpc/identity.h"
#include "server/grpc/request_validator.h"

namespace mla::server {
namespace {

// This amount is counted in addition to a message's tensors, so that tiny messages are bounded too.
constexpr size_t kMessageOverhead = 1024;

// Bounds of the slices of messages whose queries are read in place. A slice adds to the cost of a
// launch, so queries in small pieces are gathered before submission.
constexpr size_t kSlicesOfAny = 4;
constexpr size_t kBytesPerSlice = 2048;
// A stream's list keeps room for this number of slices between messages.
constexpr size_t kSlicesKept = 1024;

void ReleaseMessage(void* message) { static_cast<AttendMessage*>(message)->Unref(); }

// Returns a slice of the message's memory that keeps the message alive until gRPC releases the
// slice.
grpc::Slice PayloadSlice(AttendMessage* message, std::byte* data, size_t size) {
  message->Ref();
  return grpc::Slice(data, size, ReleaseMessage, message);
}

}  // namespace

AttendStream::AttendStream(const WireContext& shared, AttentionService* service,
                           std::unique_ptr<StreamCall> call, scheduler::TenantRef tenant,
                           bool in_place)
    : shared_(shared),
      service_(service),
      call_(std::move(call)),
      tenant_(std::move(tenant)),
      builder_(shared.engine, tenant_->name(), shared.team, shared.tracer,
               TraceOf(call_->context())),
      requests_(shared.metrics->ForTenant(tenant_->name())),
      in_place_(in_place) {
  shared_.metrics->wire().streams.fetch_add(1);
}

// ------------------------------------------------------------------------------------- Reading

void AttendStream::Start() {
  call_->Serve(this);
  ReadNext();
}

void AttendStream::ReadNext() { call_->StartRead(&incoming_); }

void AttendStream::OnReadDone(bool ok) {
  if (!ok) {
    {
      const MutexLock lock(mutex_);
      reader_ = Reader::kDone;
    }
    MaybeFinish();
    return;
  }
  const size_t length = incoming_.Length();
  shared_.metrics->wire().received_bytes.fetch_add(length, std::memory_order_relaxed);
  // Copying, or a launch that this thread runs, must not keep other clients' messages waiting. A
  // stream that is alone keeps this thread: another one has cold caches.
  if (call_->poller().Alternates(this)) call_->poller().HandOver();
  if (!ScanHeader()) return MaybeFinish();
  Continue();
}

void AttendStream::Resume() {
  StreamCall* const call = call_.get();
  call->Hold();  // when the reader is done, another thread may finish the stream
  bool cancelled = false;
  {
    const MutexLock lock(mutex_);
    cancelled = cancelled_;
    reader_ = cancelled ? Reader::kDone : Reader::kReading;
  }
  if (cancelled) {
    MaybeFinish();
  } else {
    Continue();
  }
  call->Release();
}

// Serves the scanned message, then decides how the reader continues.
void AttendStream::Continue() {
  const bool handled = Handle();
  bool read = false, stalled = false, done = false;
  {
    const MutexLock lock(mutex_);
    if (cancelled_ || broken_) {
      reader_ = Reader::kDone;
      done = true;
    } else if (!handled) {
      reader_ = Reader::kStalled;
      stalled = true;
    } else if (inflight_bytes_ >= static_cast<size_t>(shared_.wire.inflight_bytes)) {
      reader_ = Reader::kPaused;
    } else {
      read = true;
    }
  }
  // From here on another thread may be serving the stream if it is paused or stalled.
  if (done) return MaybeFinish();
  if (stalled) return service_->OnStalled(this);
  if (read) ReadNext();
}

// Splits incoming_ into header_ and payload_. Returns false if the stream was broken.
bool AttendStream::ScanHeader() {
  if (incoming_.Length() > static_cast<size_t>(shared_.wire.message_bytes)) {
    const std::string limit = absl::StrCat("at most ", shared_.wire.message_bytes, " bytes");
    const auto what = absl::StrCat("message: got ", incoming_.Length(), " bytes, ", limit);
    return BreakMalformed(absl::ResourceExhaustedError(what), "message_size", limit);
  }
  slices_.clear();
  if (!incoming_.Dump(&slices_).ok())
    return BreakMalformed(absl::InvalidArgumentError("message: cannot be decompressed"));
  fragments_.clear();
  for (const grpc::Slice& slice : slices_) {
    fragments_.emplace_back(reinterpret_cast<const std::byte*>(slice.begin()), slice.size());
  }
  if (wire::ScanAttend(fragments_, &header_, &payload_)) return true;
  if (absl::Status status = wire::ScanMessage(fragments_, &header_bytes_, &payload_,
                                              MostHeaderBytes(shared_.engine->limits()));
      !status.ok()) {
    return BreakMalformed(status);
  }
  return header_.ParseFromString(header_bytes_) ||
         BreakMalformed(absl::InvalidArgumentError("message: not an AttendStreamRequest"));
}

bool AttendStream::BreakMalformed(const absl::Status& status, std::string_view reason,
                                  std::string_view limit) {
  Break(MakeError(status.code(), status.message(),
                  {.field = "message",
                   .got = absl::StrCat(incoming_.Length(), " bytes"),
                   .limit = std::string(limit),
                   .reason = std::string(reason)}));
  return false;
}

void AttendStream::Break(const absl::Status& status) {
  // Converted before anything can finish the stream, which sends the detail after the status.
  const grpc::Status answer = ToGrpcStatus(status, &call_->context());
  const MutexLock lock(mutex_);
  broken_ = true;
  reader_ = Reader::kDone;
  final_status_ = answer;
}

bool AttendStream::Handle() {
  AttendMessage* message = shared_.pool->Take();
  message->owner = this;
  message->stream = builder_.stream();
  message->tenant = tenant_.get();
  message->tag = header_.tag();
  bool stalled = false;
  absl::Status status = Prepare(message, &stalled);
  if (stalled) {
    message->Unref();
    return false;
  }
  message->reserved_bytes = kMessageOverhead + message->input.size() + message->output.size();
  {
    const MutexLock lock(mutex_);
    inflight_bytes_ += message->reserved_bytes;
    ++pending_;
  }
  if (status.ok()) status = builder_.Submit(message);
  if (!status.ok()) {
    shared_.metrics->CountRejected(DetailOf(status).reason);
    message->answer = std::move(status);
    OnAnswered(message);
  }
  // They were not needed any more after the tensors were gathered, but answering came first.
  slices_.clear();
  if (slices_.capacity() > kSlicesKept) slices_.shrink_to_fit();
  if (fragments_.capacity() > kSlicesKept) std::vector<wire::Fragment>().swap(fragments_);
  incoming_.Clear();
  return true;
}

absl::Status AttendStream::Prepare(AttendMessage* message, bool* stalled) {
  if (header_.body_case() == v1::AttendStreamRequest::kAttend) {
    if (header_.has_shared()) return PrepareShared(message, stalled);
    absl::Status status = builder_.PrepareAttend(
        header_.attend(), static_cast<int64_t>(payload_.size), shared_.wire.message_bytes, message);
    return status.ok() && message->IsSized() ? TakeStaging(message, stalled) : status;
  }
  if (AttendRequestBuilder::HasPayload(header_)) return PreparePayload(message);
  if (payload_.size != 0 || header_.has_shared()) {
    const bool payload = payload_.size != 0;
    return RefuseField(payload ? "payload" : "shared",
                       payload ? absl::StrCat(payload_.size, " bytes") : "a place in a region",
                       "absent unless the body is attend, begin_step with rotations, or end_step "
                       "with tails",
                       "payload_size");
  }
  return builder_.Prepare(header_, message);
}

absl::Status AttendStream::PreparePayload(AttendMessage* message) {
  if (header_.has_shared()) {
    absl::Status status =
        builder_.FindRegion(shared_.regions, header_.shared(), payload_.size, message);
    return status.ok() ? builder_.PreparePayloadIn(*message->region, header_, message) : status;
  }
  return builder_.Prepare(
      header_, payload_.size,
      [this](size_t offset, std::span<std::byte> to) {
        shared_.team->Gather(fragments_, payload_.offset + offset, to.size(), to.data());
      },
      message);
}

// Tensors in a region stay where they are: only index lists are copied.
absl::Status AttendStream::PrepareShared(AttendMessage* message, bool* stalled) {
  const v1::SharedTensors& where = header_.shared();
  absl::Status status = builder_.FindRegion(shared_.regions, where, payload_.size, message);
  if (!status.ok()) return status;
  status = builder_.PrepareAttend(header_.attend(), kTensorsElsewhere,
                                  std::numeric_limits<int64_t>::max(), message);
  if (!status.ok() || !message->IsSized()) return status;
  const wire::AttendLayout layout = message->SentLayout();
  const uint64_t in = layout.inputs.bytes(), out = layout.outputs.bytes();
  if (where.in_length() != in || where.out_length() != out) {
    const bool is_in = where.in_length() != in;
    return RefuseField(is_in ? "shared.in_length" : "shared.out_length",
                       absl::StrCat(is_in ? where.in_length() : where.out_length()),
                       absl::StrCat(is_in ? in : out, " bytes"), "payload_size");
  }
  status = message->PointInto(TensorMemory::Of(*message->region), layout, where.in_offset(),
                              where.out_offset(), "shared.");
  if (status.ok()) status = builder_.StageShared(shared_.pool.get(), message, stalled);
  if (!status.ok() || *stalled) return status;
  WireCounters& counters = shared_.metrics->wire();
  counters.shared_received_bytes.fetch_add(in, std::memory_order_relaxed);
  counters.shared_sent_bytes.fetch_add(out, std::memory_order_relaxed);
  return absl::OkStatus();
}

bool AttendStream::ReadsInPlace(const AttendMessage& message) const {
  const scheduler::AttendArgs& args = message.attend;
  const auto q_bytes = static_cast<size_t>(message.sizes.q_bytes);
  // Rows of PROJECTED are short, and each is read by the products of many columns.
  if (args.profile == scheduler::Profile::kProjected) return false;
  return in_place_ && args.num_heads == args.sized_for.num_heads &&
         fragments_.size() <= kSlicesOfAny + q_bytes / kBytesPerSlice;
}

// Lets the engine read the queries in gRPC's memory: the message keeps its slices until OnAnswered.
void AttendStream::KeepInPlace(AttendMessage* message) {
  int64_t begin = 0;
  for (const wire::Fragment& fragment : fragments_) {
    if (fragment.empty()) continue;
    message->fragments.push_back({fragment.data(), begin});
    begin += static_cast<int64_t>(fragment.size());
  }
  // Swapping moves no elements, so pointers into them stay valid.
  message->slices.swap(slices_);
  message->attend.q_fragments = message->fragments;
  message->attend.q_fragments_offset =
      static_cast<int64_t>(payload_.offset) + message->sizes.kv_sent();
}

// Takes memory of the tensors and copies them in: the only copy on their way to the engine. Queries
// that the backend reads in place are not copied, but they are counted: their slices are memory,
// too.
absl::Status AttendStream::TakeStaging(AttendMessage* message, bool* stalled) {
  const AttendSizes& sizes = message->sizes;
  const auto kv_bytes = static_cast<size_t>(sizes.kv_sent());
  const auto q_bytes = static_cast<size_t>(sizes.q_sent());
  const auto list_bytes = static_cast<size_t>(sizes.list_bytes);
  const StagedLayout staged = message->Staged();
  const wire::AttendLayout& layout = staged.tensors;
  absl::Status status =
      shared_.pool->TakeStaging(layout.inputs.bytes(), layout.outputs.bytes(), message, stalled);
  if (!status.ok() || *stalled) return status;
  scheduler::AttendArgs& args = message->attend;
  std::byte *const in = message->input.data(), *const sent_fp8 = in + staged.sent_fp8;
  if (sizes.kv_fp8.vectors > 0) {
    shared_.team->Gather(fragments_, payload_.offset, kv_bytes, sent_fp8);
    status = message->DecodeKv(sent_fp8, in);
  } else if (kv_bytes > 0) {
    shared_.team->Gather(fragments_, payload_.offset, kv_bytes, in);
    args.kv = in;
  }
  size_t copied = kv_bytes + list_bytes;
  std::byte* const q = in + layout.q;
  if (sizes.q_fp8.vectors > 0) {
    shared_.team->Gather(fragments_, payload_.offset + kv_bytes, q_bytes, sent_fp8);
    if (status.ok()) status = message->DecodeQueries(sent_fp8, q);
    copied += q_bytes;
  } else if (q_bytes > 0 && ReadsInPlace(*message)) {
    KeepInPlace(message);
  } else if (q_bytes > 0) {
    shared_.team->Gather(fragments_, payload_.offset + kv_bytes, q_bytes, q);
    args.q = q;
    copied += q_bytes;
  }
  message->PointOutputs(message->output.data(), layout);
  shared_.metrics->wire().copied_bytes.fetch_add(copied, std::memory_order_relaxed);
  if (!status.ok() || list_bytes == 0) return status;
  const size_t lists = layout.lists + message->Lists().offset();
  std::byte* const sent = in + (sizes.selects ? staged.index_inputs : lists);
  shared_.team->Gather(fragments_, payload_.offset + kv_bytes + q_bytes, list_bytes, sent);
  if (sizes.selects) args.index_inputs = sent;
  return builder_.CheckLists(in + layout.lists, message);
}

// ------------------------------------------------------------------------------------- Writing

void AttendStream::OnAnswered(AttendMessage* message) {
  requests_->Count(message->answer.code());
  message->answered_ns = SteadyNanos();
  message->next = nullptr;
  builder_.Release(message);
  // The launch has read the queries, so their memory is returned to gRPC now. The outputs stay
  // until the client has read them.
  message->attend.q_fragments = {};
  message->fragments.clear();
  message->slices.clear();
  {
    const MutexLock lock(mutex_);
    if (writing_ || cancelled_ || broken_) {
      (queue_tail_ != nullptr ? queue_tail_->next : queue_head_) = message;
      queue_tail_ = message;
      return;
    }
    writing_ = true;
    writing_message_ = message;
    write_started_ns_ = message->answered_ns;
  }
  Write(message);
}

// The payload's slices point into the output memory, so sending copies nothing.
void AttendStream::Write(AttendMessage* message) {
  message->FillReply(shared_.boot_id, &reply_);
  grpc::Slice slices[4];
  size_t count = 1;
  size_t payload = 0;
  if (message->answer.ok() && message->output) {
    const AttendSizes& sizes = message->sizes;
    const wire::AttendLayout layout = message->SentLayout();
    const auto add = [&](size_t place, int64_t bytes) {
      if (bytes == 0) return;
      slices[count++] =
          PayloadSlice(message, message->output.data() + place, static_cast<size_t>(bytes));
      payload += static_cast<size_t>(bytes);
    };
    // One slice is enough if no padding lies between these tensors.
    const bool whole = layout.lse == static_cast<size_t>(sizes.o_bytes);
    add(0, whole ? sizes.o_bytes + sizes.lse_bytes : sizes.o_bytes);
    add(layout.lse, whole ? 0 : sizes.lse_bytes);
    add(layout.lists_out, sizes.lists_out_bytes);
  }
  char header[wire::kMaxAttendHeaderBytes];
  const size_t length = wire::EncodeAttendReply(reply_, payload, header);
  if (length > 0) {
    slices[0] = grpc::Slice(header, length);
  } else {
    wire::EncodeHeader(reply_, payload, &reply_header_);
    slices[0] = grpc::Slice(reply_header_);
  }
  grpc::ByteBuffer buffer(slices, count);
  shared_.metrics->wire().sent_bytes.fetch_add(buffer.Length(), std::memory_order_relaxed);
  outgoing_.Swap(&buffer);
  call_->StartWrite(outgoing_);
}

// Returns the message's bytes to the bound of bytes in flight.
void AttendStream::ReleaseBytes(AttendMessage* message) {
  inflight_bytes_ -= message->reserved_bytes;
  --pending_;
  message->Unref();
}

void AttendStream::OnWriteDone(bool ok) {
  AttendMessage* next = nullptr;
  bool read = false;
  outgoing_.Clear();
  {
    const MutexLock lock(mutex_);
    const int64_t now = SteadyNanos();
    shared_.metrics->wire().write_blocked_ns.fetch_add(
        static_cast<uint64_t>(now - write_started_ns_), std::memory_order_relaxed);
    builder_.NoteWritten(*writing_message_);
    ReleaseBytes(std::exchange(writing_message_, nullptr));
    if (!ok) cancelled_ = true;
    if (!cancelled_ && !broken_ && queue_head_ != nullptr) {
      next = queue_head_;
      queue_head_ = next->next;
      if (queue_head_ == nullptr) queue_tail_ = nullptr;
      writing_message_ = next;
      write_started_ns_ = now;
    } else {
      writing_ = false;
    }
    if (reader_ == Reader::kPaused) {
      if (cancelled_) {
        reader_ = Reader::kDone;
      } else if (inflight_bytes_ < static_cast<size_t>(shared_.wire.inflight_bytes)) {
        reader_ = Reader::kReading;
        read = true;
      }
    }
  }
  if (read) ReadNext();
  if (next != nullptr) {
    Write(next);
  } else {
    MaybeFinish();
  }
}

// -------------------------------------------------------------------------------------- Ending

void AttendStream::DisconnectIfSlow(int64_t now_ns) {
  {
    const MutexLock lock(mutex_);
    if (!writing_ || cancelled_ || finished_ ||
        now_ns - write_started_ns_ < shared_.wire.slow_reader_ms * 1000000) {
      return;
    }
    cancelled_ = true;
  }
  shared_.metrics->wire().streams_disconnected.fetch_add(1);
  call_->context().TryCancel();
}

void AttendStream::OnCancel() {
  {
    const MutexLock lock(mutex_);
    cancelled_ = true;
    // OnReadDone(false) ends a reader that is reading, and Resume ends a stalled one.
    if (reader_ == Reader::kPaused) reader_ = Reader::kDone;
  }
  MaybeFinish();
}

// Finishes the stream if its reader is done and no message is left to answer or write. Must not be
// called from OnAnswered.
void AttendStream::MaybeFinish() {
  bool close = false;
  {
    const MutexLock lock(mutex_);
    if (reader_ != Reader::kDone || finished_) return;
    if (!cancelled_ && !broken_ && pending_ > 0) return;
    close = !std::exchange(closing_, true);
  }
  if (close) return service_->OnEnding(this);
  grpc::Status status;
  {
    const MutexLock lock(mutex_);
    if (!closed_ || finished_) return;
    while (!writing_ && queue_head_ != nullptr) {
      AttendMessage* dropped = queue_head_;
      queue_head_ = dropped->next;
      ReleaseBytes(dropped);
    }
    if (writing_ || pending_ > 0) return;
    queue_tail_ = nullptr;
    finished_ = true;
    status = final_status_;
    if (cancelled_ && !broken_) status = {grpc::StatusCode::CANCELLED, "stream disconnected"};
  }
  call_->Finish(status);
}

void AttendStream::Close() {
  shared_.engine->CloseStream(builder_.stream());
  StreamCall* const call = call_.get();
  call->Hold();  // when the stream is closed, another thread may finish it
  {
    const MutexLock lock(mutex_);
    closed_ = true;
  }
  MaybeFinish();
  call->Release();
}

void AttendStream::OnDone() {
  shared_.metrics->wire().streams.fetch_sub(1);
  service_->OnGone(this);
  delete this;
}

}  // namespace mla::server
