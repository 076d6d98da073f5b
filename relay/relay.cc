#include "relay/relay.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/wire/futex.h"
#include "relay/crowding.h"

namespace mla::relay {
namespace {

using Clock = std::chrono::steady_clock;

// Longest sleep of either thread. UCX's descriptor misses events in some versions, which then wait
// for this long.
constexpr int kLongestSleepMillis = 20;
constexpr int kSpinsPerClock = 32;
// A relay that has handed on a request stays awake for its completion for that long, and lets
// others have its core: a wake-up of another thread takes some of this.
constexpr std::chrono::microseconds kAnswerWait{50};
constexpr std::chrono::milliseconds kReportPause{100};

absl::Status Broken(const char* field, const std::string& got, const std::string& limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("a frame's ", field, ": got ", got, ", must be ", limit));
}

bool OnDevice(const wire::SubmissionEntry& entry) {
  return entry.kind == wire::kEntryAttend && (entry.flags & wire::kEntryOnDevice) != 0;
}

}  // namespace

Relay::Relay(RelayOptions options, client::RingMemory* memory)
    : options_(std::move(options)),
      memory_(memory),
      mask_(memory->ring_entries() - 1),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      may_complete_(!options_.device),
      slots_(memory->ring_entries()) {}

absl::StatusOr<std::unique_ptr<Relay>> Relay::Open(const wire::UcxApi& api, RelayOptions options,
                                                   client::RingMemory* memory) {
  std::unique_ptr<Relay> relay(new Relay(std::move(options), memory));
  if (relay->wake_ < 0) return absl::ResourceExhaustedError("no descriptor is left");
  const MutexLock lock(relay->mutex_);
  wire::UcxLinkOptions link_options = relay->options_.link;
  if (relay->options_.between_hosts && relay->options_.device && memory->has_device_memory()) {
    link_options.transports += memory->device()->nvidia() ? ",cuda_ipc" : ",rocm_ipc";
  }
  MLA_ASSIGN_OR_RETURN(relay->link_, wire::UcxLink::Open(api, link_options, relay.get()));
  if (relay->options_.secret.has_value()) {
    relay->link_->Encrypt(*relay->options_.secret, wire::FrameSeal::Sender::kServer);
  }
  if (relay->options_.batches) relay->link_->BatchFrames();
  if (relay->options_.device) MLA_RETURN_IF_ERROR(relay->CheckDevice());
  // Payloads take slower ways without it.
  relay->link_->Register(memory->region()).IgnoreError();
  return relay;
}

Relay::~Relay() {
  {
    const MutexLock lock(mutex_);
    link_.reset();
  }
  if (wake_ >= 0) close(wake_);
}

std::string Relay::address() {
  const MutexLock lock(mutex_);
  return link_->address();
}

bool Relay::handles_losses() {
  const MutexLock lock(mutex_);
  return link_->handles_losses();
}

absl::StatusOr<wire::UcxTarget> Relay::Offer() {
  const MutexLock lock(mutex_);
  return link_->Offer(memory_->region().last(memory_->arena_bytes()));
}

absl::StatusOr<wire::UcxTarget> Relay::OfferDevice() {
  const MutexLock lock(mutex_);
  return link_->Offer(device_tensors(), device_kind());
}

absl::Status Relay::CheckDevice() {
  if (!options_.link.puts) return absl::FailedPreconditionError("device memory needs puts");
  if (!memory_->has_device_memory()) {
    const absl::Status why = memory_->device_status();
    return why.ok() ? absl::FailedPreconditionError("the ring has no device memory") : why;
  }
  MLA_RETURN_IF_ERROR(link_->Knows(device_kind()));
  MLA_RETURN_IF_ERROR(memory_->device()->Bind());
  return memory_->device()->ShowRemoteWrites();
}

std::span<std::byte> Relay::device_tensors() const {
  const std::span<std::byte> all = memory_->device()->tensors();
  return all.first(std::min<uint64_t>(all.size(), memory_->arena_bytes()));
}

wire::UcxMemoryKind Relay::device_kind() const {
  return memory_->device()->nvidia() ? wire::UcxMemoryKind::kCuda : wire::UcxMemoryKind::kRocm;
}

absl::Status Relay::Connect(std::string_view client) {
  const MutexLock lock(mutex_);
  return link_->Connect(client);
}

absl::Status Relay::status() {
  const MutexLock lock(mutex_);
  return status_.ok() ? link_->status() : status_;
}

RelayCounts Relay::counts() {
  const MutexLock lock(mutex_);
  return counts_;
}

uint64_t Relay::messages_sent() {
  const MutexLock lock(mutex_);
  return link_->messages_sent();
}

void Relay::Report() {
  const RelayCounts now = counts();
  if (options_.report && now != reported_) options_.report(now);
  reported_ = now;
}

void Relay::Fail(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

// -------------------------------------------------------------------------------------- Requests

absl::Status Relay::CheckPlaces(const wire::UcxRequestFrame& frame, size_t payload_bytes) const {
  const wire::SubmissionEntry& entry = frame.entry;
  const uint8_t elsewhere = entry.kind != wire::kEntryAttend ? 0
                            : options_.device                ? wire::kEntryChained
                                              : wire::kEntryOnDevice | wire::kEntryChained;
  if ((entry.flags & elsewhere) != 0) {
    return Broken("flags", absl::StrCat(int{entry.flags}),
                  options_.device ? "without 128" : "without 64 and 128");
  }
  const bool on_device = OnDevice(entry);
  if (on_device && payload_bytes > 0) {
    return Broken("payload", absl::StrCat(payload_bytes, " bytes"), "0 bytes: its tensors are put");
  }
  const uint64_t arena = on_device ? 0 : arena_offset();
  const uint64_t size = on_device ? device_tensors().size() : memory_->region().size();
  const auto holds = [&](uint64_t offset, uint64_t bytes) {
    return bytes == 0 || (offset >= arena && offset <= size && bytes <= size - offset);
  };
  const std::string limit = absl::StrCat("within ", arena, "..", size);
  if (!holds(frame.place, payload_bytes)) {
    return Broken("place", absl::StrCat(frame.place, " + ", payload_bytes), limit);
  }
  if (!holds(entry.out_offset, frame.out_bytes)) {
    return Broken("out_bytes", absl::StrCat(entry.out_offset, " + ", frame.out_bytes), limit);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::byte*> Relay::PlaceKey(std::span<const std::byte> header, size_t bytes) {
  wire::UcxKeyFrame frame;
  if (!wire::ReadFrame(header, options_.token, &frame)) {
    return absl::PermissionDeniedError("a frame of another connection");
  }
  if (!options_.link.puts || key_state_ != KeyState::kNone) {
    return Broken("key", "one more", options_.link.puts ? "the only one" : "none without puts");
  }
  if (bytes == 0 || bytes > wire::kUcxMostKeyBytes) {
    return Broken("key", absl::StrCat(bytes, " bytes"),
                  absl::StrCat("1..", wire::kUcxMostKeyBytes));
  }
  if (frame.bytes != memory_->arena_bytes()) {
    return Broken("bytes", absl::StrCat(frame.bytes), absl::StrCat(memory_->arena_bytes()));
  }
  key_state_ = KeyState::kArriving;
  client_ = {frame.address, frame.bytes, std::string(bytes, '\0')};
  return reinterpret_cast<std::byte*>(client_.key.data());
}

absl::StatusOr<std::byte*> Relay::Place(std::span<const std::byte> header, size_t bytes) {
  if (header.size() == sizeof(wire::UcxKeyFrame)) return PlaceKey(header, bytes);
  wire::UcxRequestFrame frame;
  if (!wire::ReadFrame(header, options_.token, &frame)) {
    return absl::PermissionDeniedError("a frame of another connection");
  }
  const uint64_t ahead = frame.number - next_;  // large for earlier ones
  Slot& slot = slots_[frame.number & mask_];
  if (ahead > mask_ || slot.state != SlotState::kFree) {
    return Broken("number", absl::StrCat(frame.number),
                  absl::StrCat("one of ", mask_ + 1, " from ", next_, " on, once each"));
  }
  MLA_RETURN_IF_ERROR(CheckPlaces(frame, bytes));
  slot.state = SlotState::kArriving;
  slot.frame = frame;
  ++counts_.received_frames;
  counts_.received_bytes += bytes;
  return memory_->region().data() + (bytes > 0 ? frame.place : 0);
}

void Relay::OnArrived(std::span<const std::byte> header) {
  if (header.size() == sizeof(wire::UcxKeyFrame)) {
    key_state_ = KeyState::kArrived;
    return;
  }
  wire::UcxRequestFrame frame;
  if (!wire::ReadFrame(header, options_.token, &frame)) return;  // Place has checked it
  slots_[frame.number & mask_].state = SlotState::kArrived;
  SubmitArrived();
}

// In the order of their numbers: a step's messages must not overtake each other.
void Relay::SubmitArrived() {
  for (;;) {
    Slot& slot = slots_[next_ & mask_];
    if (slot.state != SlotState::kArrived) return;
    const wire::SubmissionEntry& entry = slot.frame.entry;
    if (entry.kind == wire::kEntryAttend) {
      outputs_[entry.tag] = {entry.out_offset, slot.frame.out_bytes, OnDevice(entry)};
    }
    if (OnDevice(entry)) {
      if (absl::Status s = memory_->device()->ShowRemoteWrites(); !s.ok()) return Fail(s);
    }
    if (!memory_->Submit(entry, {}, nullptr, false)) {
      const absl::Status device = memory_->device_status();
      if (OnDevice(entry) && !device.ok()) return Fail(device);
      return Fail(
          absl::ResourceExhaustedError("more requests in flight than the ring has entries"));
    }
    slot.state = SlotState::kFree;
    ++next_;
    handed_on_.fetch_add(1);
  }
}

// ----------------------------------------------------------------------------------- Completions

bool Relay::CompleteAll(const wire::CompletionEntry* first) {
  wire::CompletionEntry entry;
  bool any = first != nullptr;
  if (!any && !may_complete_) return false;
  link_->Hold();
  if (any) Complete(*first);
  while (sending_.load() <= mask_ && memory_->Poll(&entry)) {
    Complete(entry);
    any = true;
  }
  if (const absl::Status sent = link_->SendHeld(); !sent.ok()) Fail(sent);
  return any;
}

void Relay::Complete(const wire::CompletionEntry& entry) {
  answered_.fetch_add(1);
  wire::UcxCompletionFrame frame{};
  frame.token = options_.token;
  frame.number = completed_++;
  frame.entry = entry;
  std::span<const std::byte> payload;
  bool on_device = false;
  const auto outputs = outputs_.find(entry.tag);
  if (entry.kind == wire::kEntryMessage) {
    const std::string_view message = memory_->Message(entry);
    const auto bytes = std::as_bytes(std::span<const char>(message));
    auto copy = std::make_unique<std::vector<std::byte>>(bytes.begin(), bytes.end());
    payload = *copy;
    frame.place = entry.message_offset;
    messages_[frame.number] = std::move(copy);
  } else if (outputs != outputs_.end() && outputs->second.on_device) {
    on_device = true;
    frame.place = arena_offset() + outputs->second.offset;
    payload = device_tensors().subspan(outputs->second.offset, outputs->second.bytes);
  } else if (outputs != outputs_.end()) {
    frame.place = outputs->second.offset;
    payload = memory_->region().subspan(frame.place, outputs->second.bytes);
  }
  if (outputs != outputs_.end()) outputs_.erase(outputs);
  sending_.fetch_add(1);
  if (absl::Status sent = SendOutputs(frame, payload, on_device); !sent.ok()) Fail(sent);
}

absl::Status Relay::SendOutputs(const wire::UcxCompletionFrame& frame,
                                std::span<const std::byte> payload, bool on_device) {
  const auto header = std::as_bytes(std::span<const wire::UcxCompletionFrame, 1>(&frame, 1));
  ++counts_.sent_frames;
  const uint64_t arena = arena_offset();
  if (on_device && !payload.empty()) {
    counts_.put_bytes += payload.size();
    return link_->Put(header, payload, frame.place - arena, frame.number, wire::UcxRemote::kArena,
                      device_kind());
  }
  if (!link_->reaches() || payload.size() < wire::UcxLink::kLeastPutBytes || frame.place < arena) {
    counts_.sent_bytes += payload.size();
    return link_->Send(header, payload, frame.number);
  }
  counts_.put_bytes += payload.size();
  return link_->Put(header, payload, frame.place - arena, frame.number);
}

void Relay::OnSent(uint64_t number) {
  messages_.erase(number);
  sending_.fetch_sub(1);
}

// --------------------------------------------------------------------------------------- Running

bool Relay::Progress() {
  const MutexLock lock(mutex_);
  const bool moved = link_->Progress();
  Fail(link_->status());
  // Not in the callback of its frame, in which UCX takes no keys.
  if (key_state_ == KeyState::kArrived && status_.ok()) {
    key_state_ = KeyState::kUsed;
    Fail(link_->Reach(client_));
    may_complete_ = true;
  }
  return moved;
}

bool Relay::Step() {
  bool moved = Progress();
  const MutexLock lock(mutex_);
  moved |= CompleteAll(nullptr);
  return moved;
}

bool Relay::Round() {
  bool moved = Progress();
  if (!Awaits() || watching_.load(std::memory_order_acquire)) return moved;
  const MutexLock lock(mutex_);
  if (!CompleteAll(nullptr)) return moved;
  link_->Progress();  // most frames are gone after that
  return true;
}

void Relay::HandOver() {
  const MutexLock lock(turn_mutex_);
  if (watching_ || !Awaits()) return;
  watching_.store(true, std::memory_order_release);
  turn_changed_.NotifyOne();
}

bool Relay::AwaitTurn() {
  MutexLock lock(turn_mutex_);
  if (!Awaits()) watching_.store(false, std::memory_order_release);
  turn_changed_.Wait(lock, [this] { return watching_ || stop_; });
  return !stop_;
}

// The loop of the second thread. A client that takes no frames gets no more of them, and the ring
// holds what comes.
void Relay::SendCompletions() {
  if (options_.device) {
    const absl::Status bound = memory_->device()->Bind();
    const MutexLock lock(mutex_);
    Fail(bound);
  }
  while (AwaitTurn()) {
    if (sending_.load() > mask_ || !may_complete_) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      continue;
    }
    wire::CompletionEntry entry;
    const absl::Status status =
        memory_->Wait(&entry, std::chrono::milliseconds(kLongestSleepMillis));
    if (absl::IsDeadlineExceeded(status)) continue;
    wanted_.fetch_add(1);
    {
      const MutexLock lock(mutex_);
      wanted_.fetch_sub(1);
      if (status.ok()) {
        CompleteAll(&entry);
        link_->Progress();  // most frames are gone after that
      } else {
        Fail(status);
      }
    }
    if (!status.ok() || sending_.load() > 0) Wake();
    if (!status.ok()) return;
  }
}

// While nothing is awaited, the ring's end shows only if one looks.
void Relay::LookAtRing() {
  if (watching_.load(std::memory_order_acquire) || memory_->Connected()) return;
  wire::CompletionEntry entry;
  const absl::Status status = memory_->Wait(&entry, std::chrono::nanoseconds(0));
  const MutexLock lock(mutex_);
  if (status.ok()) {
    CompleteAll(&entry);
  } else if (!absl::IsDeadlineExceeded(status)) {
    Fail(status);
  }
}

void Relay::Wake() const {
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) return;  // it is full, so Run is awake
}

// Returns true if the events of the link will end a sleep.
bool Relay::MaySleep() {
  const MutexLock lock(mutex_);
  return status_.ok() && link_->Arm();
}

absl::Status Relay::Run(int control) {
  std::thread completions([this] { SendCompletions(); });
  int event = -1;
  {
    const MutexLock lock(mutex_);
    event = link_->event_descriptor();
  }
  pollfd events[] = {{control, POLLIN, 0}, {wake_, POLLIN, 0}, {event, POLLIN, 0}};
  // Each look at a transport may be a system call.
  const int spins = options_.spin.count() > 0 ? kSpinsPerClock : 1;
  Clock::time_point last_work = Clock::now(), looked = last_work, reported = last_work;
  Crowding crowding;
  absl::Status ended;
  for (;;) {
    // A relay that is to spin does so on a crowded core, too.
    const bool crowded = options_.spin.count() == 0 && crowding.IsCrowded(Clock::now());
    bool moved = false;
    for (int i = 0; i < spins && !moved; ++i) {
      moved = Round();
      if (!moved) wire::SpinPause();
      if (!crowded && wanted_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
    }
    if (ended = status(); !ended.ok()) break;
    Clock::time_point now = Clock::now();
    if (!moved && !crowded) {
      const Clock::time_point begin = now;
      std::this_thread::yield();  // the ring may need this core
      now = Clock::now();
      crowding.NoteYield(begin, now);
    }
    if (moved) last_work = now;
    if (now - reported >= kReportPause) {
      reported = now;
      Report();
    }
    const bool waits = Awaits() && !crowded;
    const auto awake = waits ? std::max(options_.spin, kAnswerWait) : options_.spin;
    const bool sleeps = now - last_work >= awake && MaySleep();
    if (sleeps) HandOver();
    if (!sleeps && now - looked < std::chrono::milliseconds(kLongestSleepMillis)) continue;
    if (now - looked >= std::chrono::milliseconds(kLongestSleepMillis)) LookAtRing();
    looked = now;
    poll(events, std::size(events), sleeps ? kLongestSleepMillis : 0);
    if (events[0].revents != 0) break;
    uint64_t wakes = 0;
    if (events[1].revents != 0 && read(wake_, &wakes, sizeof(wakes)) < 0) continue;
  }
  {
    const MutexLock lock(turn_mutex_);
    stop_ = true;
    turn_changed_.NotifyOne();
  }
  completions.join();
  Report();
  return ended;
}

}  // namespace mla::relay
