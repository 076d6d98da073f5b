#include "server/shared_memory/command_ring.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/pauses.h"
#include "proto/wire/futex.h"
#include "server/grpc/grpc_status.h"
#include "server/logging/logging.h"

namespace mla::server {
namespace {

// A sleeping ring checks its stop word at least this often.
constexpr int64_t kLongestSleepNanos = 200'000'000;
constexpr int kSpinsPerClock = 32;

static_assert(wire::kEntryDTypeFp8 == v1::DTYPE_F8_E4M3);

template <typename T>
std::atomic_ref<T> Atomic(T& word) {
  return std::atomic_ref<T>(word);
}

// Each word is read once, so that the client cannot change it after its check.
wire::SubmissionEntry CopyOnce(wire::SubmissionEntry* from) {
  std::array<uint64_t, sizeof(wire::SubmissionEntry) / sizeof(uint64_t)> words;
  auto* const shared = reinterpret_cast<uint64_t*>(from);
  for (size_t i = 0; i < words.size(); ++i) {
    words[i] = Atomic(shared[i]).load(std::memory_order_relaxed);
  }
  wire::SubmissionEntry entry;
  std::memcpy(&entry, words.data(), sizeof(entry));
  return entry;
}

// Rewrites an error about `end_step.lengths`, because in a ring's entry the room for the reply is
// given by a different field.
absl::Status InTermsOfEntry(const AttendMessage& message) {
  ErrorDetail detail = DetailOf(message.answer);
  if (detail.field != "end_step.lengths") return message.answer;
  detail.field = "num_heads";
  detail.got = absl::StrCat(message.reply_area.size(), " bytes");
  return MakeError(message.answer.code(), message.answer.message(), detail);
}

}  // namespace

CommandRing::CommandRing(CommandRingOptions options, std::shared_ptr<SharedRegion> region)
    : options_(std::move(options)),
      region_(std::move(region)),
      mask_(options_.entries - 1),
      header_(reinterpret_cast<wire::RingHeader*>(region_->data())),
      submissions_(
          reinterpret_cast<wire::SubmissionEntry*>(region_->data() + wire::SubmissionsOffset())),
      completions_(reinterpret_cast<wire::CompletionEntry*>(
          region_->data() + wire::CompletionsOffset(options_.entries))),
      words_(header_, completions_, options_.entries),
      builder_(options_.engine, options_.tenant, options_.team, options_.tracer),
      requests_(options_.metrics->ForTenant(options_.tenant)),
      goes_ahead_(options_.engine->limits().ahead_us > 0 &&
                  options_.engine->backend_info().waits_for_words),
      request_arena_(InitialBlock(&request_block_)),
      replies_(region_, options_.entries, options_.boot_id) {
  returned_.reserve(options_.entries);
  header_->magic = wire::kHandshakeMagic;
  header_->entries = options_.entries;
  header_->submissions_offset = wire::SubmissionsOffset();
  header_->completions_offset = wire::CompletionsOffset(options_.entries);
  header_->replies_offset = wire::RepliesOffset(options_.entries);
  header_->chains = 1;
  if (region_->device() != nullptr) LayOutDevice();
  options_.metrics->wire().rings.fetch_add(1);
}

void CommandRing::LayOutDevice() {
  const kernels::SharedDeviceMemory::Export& from = region_->device()->exported();
  std::byte* const device_part = region_->data() + wire::RingBytes(options_.entries);
  wire::DeviceHeader header{};
  header.magic = wire::kHandshakeMagic;
  header.chains = 1;
  header.nvidia = from.nvidia ? 1 : 0;
  header.kind = from.descriptor >= 0 ? wire::kDeviceDescriptor : wire::kDeviceHandle;
  header.bytes = region_->device()->bytes().size();
  if (goes_ahead_) header.words = words_.Enable(region_->device());
  std::copy(from.device_uuid.begin(), from.device_uuid.end(), header.uuid);
  std::copy(from.memory.begin(), from.memory.end(), header.memory);
  std::memcpy(device_part, &header, sizeof(header));
  static_assert(kernels::SharedDeviceMemory::kHandleBytes == wire::kDeviceHandleBytes);
  std::memcpy(device_part + sizeof(header), from.events.data(), from.events.size_bytes());
}

absl::Status CommandRing::Start() {
  try {
    thread_ = std::thread([this] { Run(); });
  } catch (const std::system_error& error) {
    return absl::UnavailableError(absl::StrCat("no thread for the ring: ", error.what()));
  }
  return absl::OkStatus();
}

void CommandRing::Stop() {
  if (std::exchange(stopped_, true)) return;
  stop_ = true;
  Atomic(header_->submit_doorbell).fetch_add(1);
  wire::FutexWake(&header_->submit_doorbell);
  if (thread_.joinable()) thread_.join();
  if (std::exchange(held_.any, false) && !held_.ahead) held_.message->Unref();
  options_.engine->CloseStream(builder_.stream());
  {
    const MutexLock lock(returned_mutex_);
    for (AttendMessage* message : returned_) message->Unref();
    returned_.clear();
  }
  words_.StoreLater();
  Atomic(header_->closed).store(1);
  Atomic(header_->complete_doorbell).fetch_add(1);
  wire::FutexWake(&header_->complete_doorbell);
  options_.metrics->wire().rings.fetch_sub(1);
}

// ------------------------------------------------------------------------------------- Polling

void CommandRing::Run() {
  const int64_t spin_ns = int64_t{options_.spin_us} * 1000;
  int64_t last_work_ns = SteadyNanos();
  while (!stop_.load(std::memory_order_relaxed)) {
    if (!cut_ && TakeSubmission()) {
      last_work_ns = 0;  // the clock is read only when there is nothing to do
      continue;
    }
    const int64_t now = SteadyNanos();
    if ((held_.any || AwaitsAhead()) && !cut_) {
      AwaitDevice(now);
      continue;
    }
    if (last_work_ns == 0) last_work_ns = now;
    if (cut_ || now - last_work_ns >= spin_ns) {
      Sleep();
      last_work_ns = 0;
      continue;
    }
    for (int i = 0; i < kSpinsPerClock; ++i) {
      wire::SpinPause();
      if (Published()) break;
    }
  }
}

// Waits between two checks of the event that holds entries up: spins while the client's GPU
// probably works on it, and sleeps after that.
void CommandRing::AwaitDevice(int64_t now) const {
  const int64_t waited = now - held_.since_ns;
  if (waited < int64_t{options_.spin_us} * 1000) {
    wire::SpinPause();
  } else {
    Nap(std::chrono::nanoseconds(waited));
    options_.metrics->wire().device_sleeps.fetch_add(1, std::memory_order_relaxed);
  }
}

// An unchained entry may end a step, so it must wait for calls whose launch may still be late.
bool CommandRing::AwaitsAhead() const {
  return ahead_.load(std::memory_order_acquire) > 0 && Published();
}

bool CommandRing::Chained(const wire::SubmissionEntry& entry) {
  return entry.kind == wire::kEntryAttend && (entry.flags & wire::kEntryChained) != 0;
}

bool CommandRing::OnDevice(const wire::SubmissionEntry& entry) const {
  return entry.kind == wire::kEntryAttend && (entry.flags & wire::kEntryOnDevice) != 0 &&
         region_->device() != nullptr;
}

absl::StatusOr<bool> CommandRing::HeldIsReady() const {
  if (held_.ready.word != nullptr) return held_.ready.Reached();
  return region_->device()->Done(held_.event);
}

// Returns false if the client's GPU has not finished its work for the held entry.
bool CommandRing::ServeHeld() {
  const absl::StatusOr<bool> done = HeldIsReady();
  if (done.ok() && *done) {
    held_.any = false;
    options_.metrics->wire().device_polling_ns.fetch_add(
        static_cast<uint64_t>(SteadyNanos() - held_.since_ns), std::memory_order_relaxed);
    // The engine has the request, or TakeReturned will submit it again.
    if (held_.ahead) return true;
    if (held_.unprepared) Prepare();
    // The ring can submit the next entry while this one is computed.
    held_.message->leave_launch = MayGoAhead() && Published();
    if (MayGoAhead() && ahead_.load(std::memory_order_acquire) > 0) {
      // If an earlier request turns out to be late, the engine hands this one back, too.
      held_.message->attend.ready = held_.ready;
      ahead_.fetch_add(1);
    }
    Submit(held_.message, std::move(held_.prepared));
    return true;
  }
  if (done.ok() && SteadyNanos() < held_.until_ns) {
    HandOverAhead();
    return false;
  }
  held_.any = false;
  if (held_.ahead) return true;
  if (done.ok()) {
    RefuseUnready(held_.message);
  } else {
    Refuse(held_.message, MakeError(absl::StatusCode::kInternal, done.status().message(),
                                    {.field = "device", .reason = "device_event"}));
  }
  return true;
}

void CommandRing::RefuseUnready(AttendMessage* message) {
  Refuse(message, MakeError(absl::StatusCode::kDeadlineExceeded,
                            "the GPU work before this request did not end in time",
                            {.field = "device",
                             .got = absl::StrCat(options_.device_wait_ms, " ms"),
                             .limit = "shm.device_wait_ms, or the request's timeout",
                             .reason = "device_not_ready"}));
}

// Entries whose tensors lie in the client's own memory cannot go ahead: the host may have to read
// them.
bool CommandRing::MayGoAhead() const {
  return goes_ahead_ && held_.ready.word != nullptr && OnDevice(held_.entry);
}

// Lets the launch wait on the device instead of the host waiting for it.
void CommandRing::HandOverAhead() {
  if (std::exchange(held_.offered, true) || !held_.prepared.ok() || !MayGoAhead()) return;
  held_.message->attend.ready = held_.ready;
  held_.message->leave_launch = true;
  held_.ahead = true;  // set first, because the request may come back before Submit returns
  ahead_.fetch_add(1);
  if (builder_.Submit(held_.message).ok()) return;
  held_.ahead = false;
  ahead_.fetch_sub(1);
  held_.message->attend.ready = {};
}

void CommandRing::NoteReturned(AttendMessage* message) {
  {
    const MutexLock lock(returned_mutex_);
    returned_.push_back(message);
    any_returned_ = true;
  }
  WakeRing();
}

void CommandRing::WakeRing() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Atomic(header_->server_waits).load(std::memory_order_relaxed) == 0) return;
  Atomic(header_->submit_doorbell).fetch_add(1);
  wire::FutexWake(&header_->submit_doorbell);
}

void CommandRing::TakeReturned() {
  while (any_returned_ && !stop_) {
    AttendMessage* message = nullptr;
    {
      const MutexLock lock(returned_mutex_);
      message = returned_.front();
      returned_.erase(returned_.begin());
      any_returned_ = !returned_.empty();
    }
    message->attend.ready = {};
    message->leave_launch = false;
    if (held_.any && held_.message == message) {
      held_.ahead = false;
    } else if (words_.Ready(message->ring_index).Reached()) {  // which has come since
      Submit(message, absl::OkStatus());
    } else {
      RefuseUnready(message);
    }
    ahead_.fetch_sub(1, std::memory_order_release);  // the engine has it before the next entry
  }
}

bool CommandRing::TakeSubmission() {
  if (words_.HasLater()) words_.StoreLater();
  if (any_returned_) TakeReturned();
  if (held_.any) return ServeHeld();
  if (!Published()) return false;
  const wire::SubmissionEntry entry = CopyOnce(&submissions_[taken_ & mask_]);
  if (ahead_.load(std::memory_order_acquire) > 0 && !(Chained(entry) && OnDevice(entry))) {
    return false;
  }
  ++taken_;
  if (!WithinBounds()) return true;
  if (!OnDevice(entry) && !Chained(entry)) {
    Serve(entry);
    return true;
  }
  Hold(entry);
  return ServeHeld();
}

void CommandRing::Hold(const wire::SubmissionEntry& entry) {
  int64_t wait_ns = options_.device_wait_ms * 1'000'000;
  if (entry.timeout_us > 0) wait_ns = std::min(wait_ns, int64_t{entry.timeout_us} * 1000);
  const int64_t now = SteadyNanos();
  held_ = {};
  held_.any = true;
  held_.message = TakeMessage(entry);
  held_.event = (taken_ - 1) & mask_;
  held_.since_ns = now;
  held_.until_ns = now + wait_ns;
  held_.entry = entry;
  if (Chained(entry)) held_.ready = words_.Ready(taken_ - 1);
  held_.unprepared = Chained(entry) && !OnDevice(entry) && wire::HostReads(entry);
  if (held_.unprepared) {
    held_.message->attend.done = words_.Done(taken_ - 1);
  } else {
    Prepare();  // while the client's GPU is at work
  }
}

void CommandRing::Prepare() {
  held_.unprepared = false;
  held_.prepared = PrepareAttend(held_.entry, held_.message);
  if (Chained(held_.entry)) held_.message->attend.done = words_.Done(taken_ - 1);
}

bool CommandRing::Published() const {
  return Atomic(submissions_[taken_ & mask_].sequence).load(std::memory_order_acquire) ==
         wire::PublishedSequence(taken_);
}

bool CommandRing::IsIdle() const {
  return !any_returned_ && !words_.HasLater() && !Published() &&
         !stop_.load(std::memory_order_relaxed);
}

// Checks that a completion slot will be free for the submission just taken.
bool CommandRing::WithinBounds() {
  const uint64_t client_taken = Atomic(header_->completions_taken).load(std::memory_order_acquire);
  if (client_taken < client_taken_ || client_taken > completed_.load(std::memory_order_acquire)) {
    Disconnect("completions_taken");
    return false;
  }
  client_taken_ = client_taken;
  if (taken_ - client_taken > options_.entries) {
    Disconnect("overflow");
    return false;
  }
  return true;
}

void CommandRing::Sleep() {
  const uint32_t doorbell = Atomic(header_->submit_doorbell).load();
  Atomic(header_->server_waits).store(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool idle = cut_ || IsIdle();
  if (!stop_ && idle) {
    wire::FutexWait(&header_->submit_doorbell, doorbell, kLongestSleepNanos);
  }
  Atomic(header_->server_waits).store(0);
}

void CommandRing::Disconnect(const char* why) {
  cut_ = true;
  options_.metrics->wire().rings_disconnected.fetch_add(1);
  Log(LogLevel::kWarning, "ring_disconnected", {{"tenant", options_.tenant}, {"why", why}});
  if (options_.on_disconnect) options_.on_disconnect();
}

// ---------------------------------------------------------------------------------- Completing

void CommandRing::OnAnswered(AttendMessage* message) {
  if (message->handed_back != scheduler::HandedBack::kNo) return NoteReturned(message);
  const kernels::WordValue& done = message->attend.done;  // of a chained entry
  const bool later = done.word != nullptr && words_.Store(done, message->signalled);
  const bool ahead = message->attend.ready.word != nullptr;
  requests_->Count(message->answer.code());
  builder_.Release(message);
  if (!message->answer.ok()) message->answer = InTermsOfEntry(*message);
  {
    const MutexLock lock(completion_mutex_);
    Complete(*message);
  }
  builder_.NoteWritten(*message);
  message->Unref();
  if (ahead) ahead_.fetch_sub(1, std::memory_order_release);
  WakeClient();
  if (later) WakeRing();
}

// WithinBounds has made sure that there is a free slot.
void CommandRing::Complete(const AttendMessage& message) {
  const uint64_t index = completed_.load(std::memory_order_relaxed);
  const wire::CompletionEntry entry = replies_.Make(message, index & mask_);
  wire::CompletionEntry& slot = completions_[index & mask_];
  std::memcpy(reinterpret_cast<char*>(&slot) + sizeof(slot.sequence),
              reinterpret_cast<const char*>(&entry) + sizeof(entry.sequence),
              sizeof(entry) - sizeof(entry.sequence) - sizeof(entry.done));
  completed_.store(index + 1, std::memory_order_release);
  Atomic(slot.sequence).store(wire::PublishedSequence(index), std::memory_order_release);
}

void CommandRing::WakeClient() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Atomic(header_->client_waits).load(std::memory_order_relaxed) == 0) return;
  Atomic(header_->complete_doorbell).fetch_add(1);
  wire::FutexWake(&header_->complete_doorbell);
}

// ----------------------------------------------------------------------------------------- Entries

AttendMessage* CommandRing::TakeMessage(const wire::SubmissionEntry& entry) {
  AttendMessage* const message = options_.pool->Take();
  message->owner = this;
  message->stream = builder_.stream();
  message->submitter = this;
  message->tag = entry.tag;
  message->ring_index = taken_ - 1;
  return message;
}

void CommandRing::Serve(const wire::SubmissionEntry& entry) {
  AttendMessage* const message = TakeMessage(entry);
  absl::Status status;
  switch (entry.kind) {
    case wire::kEntryAttend:
      status = PrepareAttend(entry, message);
      break;
    case wire::kEntryMessage:
      status = PrepareMessage(entry, message);
      break;
    default:
      status = RefuseField("kind", absl::StrCat(int{entry.kind}), "1 (attend) or 2 (message)",
                           "unknown_value");
  }
  Submit(message, std::move(status));
}

void CommandRing::Submit(AttendMessage* message, absl::Status prepared) {
  if (prepared.ok()) prepared = builder_.Submit(message);
  if (!prepared.ok()) Refuse(message, std::move(prepared));  // otherwise the engine has it
}

void CommandRing::Refuse(AttendMessage* message, absl::Status status) {
  options_.metrics->CountRejected(DetailOf(status).reason);
  message->handed_back = scheduler::HandedBack::kNo;  // the client gets this answer
  message->answer = std::move(status);
  OnAnswered(message);
}

absl::Status CommandRing::PrepareAttend(const wire::SubmissionEntry& entry,
                                        AttendMessage* message) {
  attend_.set_step_id(entry.step_id);
  attend_.set_layer(entry.layer);
  attend_.set_row_begin(entry.row_begin);
  attend_.set_row_count(entry.row_count);
  attend_.set_head_offset(entry.head_offset);
  attend_.set_num_heads(entry.num_heads);
  attend_.set_profile(static_cast<v1::Profile>(entry.profile));
  attend_.set_has_kv((entry.flags & wire::kEntryHasKv) != 0);
  attend_.set_want_lse((entry.flags & wire::kEntryWantLse) != 0);
  attend_.set_q_dtype(static_cast<v1::DType>(entry.dtypes & 15));
  attend_.set_o_dtype(static_cast<v1::DType>(entry.dtypes >> 4));
  attend_.set_kv_row_dtype((entry.flags & wire::kEntryFp8Kv) != 0 ? v1::DTYPE_F8_E4M3
                                                                  : v1::DTYPE_UNSPECIFIED);
  attend_.set_timeout_us(entry.timeout_us);
  attend_.set_lists((entry.flags & wire::kEntrySelects) != 0    ? v1::INDEX_LISTS_SERVER
                    : (entry.flags & wire::kEntryHasLists) != 0 ? v1::INDEX_LISTS_FIXED
                                                                : v1::INDEX_LISTS_UNSPECIFIED);
  attend_.set_want_lists((entry.flags & wire::kEntryWantLists) != 0);
  absl::Status status = builder_.PrepareAttend(attend_, kTensorsElsewhere,
                                               std::numeric_limits<int64_t>::max(), message);
  if (!status.ok() || !message->IsSized()) return status;
  const wire::AttendLayout layout = message->SentLayout();
  if ((entry.flags & wire::kEntryOnDevice) == 0) {
    status = message->PointInto(TensorMemory::Of(*region_), layout, entry.in_offset,
                                entry.out_offset, "");
  } else if (region_->device() != nullptr) {
    status =
        message->PointIntoDevice(*region_->device(), layout, entry.in_offset, entry.out_offset);
  } else {
    status = RefuseField("flags", absl::StrCat(int{entry.flags}),
                         "without 64 on a ring without device memory");
  }
  bool stalled = false;
  if (status.ok()) status = builder_.StageShared(options_.pool.get(), message, &stalled);
  if (stalled) {
    // The ring's thread has other entries to serve, so it does not wait for memory. The client can
    // try again once one of its tenant's requests is answered, which frees memory.
    return MakeError(absl::StatusCode::kResourceExhausted,
                     "in_offset: no staging memory is free at present",
                     {.field = "in_offset",
                      .limit = "staging memory for index lists and for tensors of 8 bits",
                      .reason = "staging_full",
                      .retry_after_ms = 1});
  }
  if (!status.ok()) return status;
  WireCounters& counters = options_.metrics->wire();
  counters.shared_received_bytes.fetch_add(layout.inputs.bytes(), std::memory_order_relaxed);
  counters.shared_sent_bytes.fetch_add(layout.outputs.bytes(), std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status CommandRing::PrepareMessage(const wire::SubmissionEntry& entry,
                                         AttendMessage* message) {
  const size_t length = entry.row_count;
  const size_t limit = MostHeaderBytes(options_.engine->limits());
  if (length > limit || !region_->Holds(entry.in_offset, length)) {
    return RefuseField("in_offset", absl::StrCat(entry.in_offset, " + ", length),
                       absl::StrCat("a message of at most ", limit, " bytes within the arena"));
  }
  const size_t room = entry.num_heads;
  if (room > 0) {
    if (!region_->Holds(entry.out_offset, room)) {
      return RefuseField("out_offset", absl::StrCat(entry.out_offset, " + ", room),
                         absl::StrCat("room for the reply within ", region_->arena_offset(), "..",
                                      region_->size()));
    }
    message->reply_area = {region_->data() + entry.out_offset, room};
  }
  message_bytes_.assign(reinterpret_cast<const char*>(region_->data()) + entry.in_offset, length);
  request_arena_.Reset();
  auto* const request =
      google::protobuf::Arena::CreateMessage<v1::AttendStreamRequest>(&request_arena_);
  const bool parsed = request->ParseFromString(message_bytes_) && request->payload().empty();
  // Tails and rotations lie in the arena, so messages with them may set `shared`, whose region need
  // not be named.
  const bool has_payload = parsed && AttendRequestBuilder::HasPayload(*request);
  if (!parsed || (request->has_shared() && !has_payload)) {
    return RefuseField("message", absl::StrCat(length, " other bytes"),
                       "an AttendStreamRequest without tensors", "malformed");
  }
  message->tag = request->tag();
  absl::Status status = has_payload ? builder_.PreparePayloadIn(*region_, *request, message)
                                    : builder_.Prepare(*request, message);
  // Only the engine knows how large the step's reply is.
  if (message->kind == scheduler::RequestKind::kEndStep) {
    message->end.lengths_max = LengthsWithin(std::max(wire::kReplySlotBytes, room));
  }
  return status;
}

}  // namespace mla::server
