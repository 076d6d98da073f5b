#include "client/cpp/ucx/ucx_memory.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "proto/wire/futex.h"

namespace mla::client {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kSpinsPerClock = 32;
constexpr uint32_t kMostRingEntries = 4096;
constexpr uint64_t kMostRounding = 2 << 20;  // of an arena beyond the wanted size
// UCX's descriptor misses events in some versions; a sleep that missed one takes this long.
constexpr milliseconds kLongestSleep{5};
// A sleep is at most this long while the word of a chained entry must be looked at.
constexpr std::chrono::microseconds kChainPause{20};
// The pump waits this long for a thread that waits.
constexpr std::chrono::milliseconds kPumpPause{1};

absl::Status Mismatch(const char* field, uint64_t got, const std::string& expected) {
  return absl::UnimplementedError(
      absl::StrCat("UCX ring: ", field, ": got ", got, ", must be ", expected));
}

absl::Status CheckRing(const UcxRing& ring) {
  if (ring.token.size() != wire::kUcxTokenBytes) {
    return Mismatch("token bytes", ring.token.size(), absl::StrCat(wire::kUcxTokenBytes));
  }
  if (!ring.secret.empty() && ring.secret.size() != wire::kUcxSecretBytes) {
    return Mismatch("secret bytes", ring.secret.size(), absl::StrCat(wire::kUcxSecretBytes));
  }
  if (!ring.secret.empty() && !ring.arena_key.empty()) {
    return Mismatch("arena_key bytes", ring.arena_key.size(), "0 with a secret");
  }
  if (ring.entries == 0 || ring.entries > kMostRingEntries || !std::has_single_bit(ring.entries)) {
    return Mismatch("ring_entries", ring.entries,
                    absl::StrCat("a power of two up to ", kMostRingEntries));
  }
  const bool on_device = !ring.device_key.empty();
  const uint64_t arena =
      wire::RingBytes(ring.entries) + (on_device ? wire::DevicePartBytes(ring.entries) : 0);
  if (ring.arena_offset != arena) {
    return Mismatch("arena_offset", ring.arena_offset, absl::StrCat(arena));
  }
  const uint64_t size = ring.region_bytes;
  if (size < arena || size - arena < ring.arena_bytes ||
      size - arena - ring.arena_bytes > kMostRounding) {
    return Mismatch("region_bytes", size,
                    absl::StrCat(ring.arena_bytes, " next to the ring, as it was asked for"));
  }
  return absl::OkStatus();
}

}  // namespace

UcxMemory::UcxMemory(const UcxMemoryOptions& options)
    : options_(options), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

absl::StatusOr<std::unique_ptr<UcxMemory>> UcxMemory::Open(const UcxMemoryOptions& options) {
  MLA_ASSIGN_OR_RETURN(const wire::UcxApi api, wire::OpenUcxApi(options.library));
  return Open(api, options);
}

absl::StatusOr<std::unique_ptr<UcxMemory>> UcxMemory::Open(const wire::UcxApi& api,
                                                           const UcxMemoryOptions& options) {
  std::unique_ptr<UcxMemory> memory(new UcxMemory(options));
  if (memory->wake_ < 0) return absl::ResourceExhaustedError("UCX ring: no descriptor is left");
  const MutexLock lock(memory->mutex_);
  MLA_ASSIGN_OR_RETURN(memory->link_, wire::UcxLink::Open(api, options.link, memory.get()));
  memory->address_ = memory->link_->address();
  memory->handles_losses_ = memory->link_->handles_losses();
  memory->event_ = memory->link_->event_descriptor();
  return memory;
}

absl::Status UcxMemory::Connect(const UcxRing& ring) {
  MLA_RETURN_IF_ERROR(CheckRing(ring));
  if (options_.device_memory == ring.device_key.empty()) {
    return absl::UnimplementedError(options_.device_memory
                                        ? "UCX ring: the server puts nothing into memory of a GPU"
                                        : "UCX ring: device_key: got one that was not asked for");
  }
  std::memcpy(token_.data(), ring.token.data(), token_.size());
  entries_ = ring.entries;
  slots_ = std::vector<Slot>(entries_);
  void* const mapping = mmap(nullptr, ring.region_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapping == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("UCX ring: cannot map: ", std::strerror(errno)));
  }
  SetRegion({static_cast<std::byte*>(mapping), ring.region_bytes}, ring.arena_offset);
  MutexLock lock(mutex_);
  link_->Register(region()).IgnoreError();  // payloads take slower ways without it
  if (!ring.secret.empty()) {
    wire::UcxSecret secret;
    std::memcpy(secret.data(), ring.secret.data(), secret.size());
    link_->Encrypt(secret, wire::FrameSeal::Sender::kClient);
  }
  if (ring.batches) link_->BatchFrames();
  MLA_RETURN_IF_ERROR(link_->Connect(ring.worker_address));
  MLA_RETURN_IF_ERROR(ExchangeKeys(ring));
  if (options_.pins) {
    auto chains = UcxChains::Open(region(), entries_, options_.device);
    pinned_ = chains.status();
    if (chains.ok()) chains_ = *std::move(chains);
    if (chains_ != nullptr) device_ = chains_->device();
  }
  try {
    pump_ = std::thread([this] { Pump(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("UCX ring: no thread: ", error.what()));
  }
  return absl::OkStatus();
}

absl::Status UcxMemory::ExchangeKeys(const UcxRing& ring) {
  if (!options_.link.puts || ring.arena_key.empty()) {
    return options_.device_memory ? absl::UnimplementedError("UCX ring: the server takes no puts")
                                  : absl::OkStatus();
  }
  if (options_.device_memory) {
    MLA_RETURN_IF_ERROR(
        link_->Reach({ring.device_address, ring.device_bytes, std::string(ring.device_key)},
                     wire::UcxRemote::kDevice));
    device_bytes_ = std::min(ring.device_bytes, arena_bytes());
  }
  MLA_RETURN_IF_ERROR(
      link_->Reach({ring.arena_address, arena_bytes(), std::string(ring.arena_key)}));
  MLA_ASSIGN_OR_RETURN(wire::UcxTarget arena, link_->Offer(region().last(arena_bytes())));
  key_ = std::move(arena.key);
  const wire::UcxKeyFrame frame{token_, arena.address, arena.bytes};
  ++sending_;
  return link_->Send(std::as_bytes(std::span<const wire::UcxKeyFrame, 1>(&frame, 1)),
                     std::as_bytes(std::span<const char>(key_)), 0);
}

UcxMemory::~UcxMemory() {
  GiveUp();
  give_up_ = nullptr;  // from here on SetEnded is not called
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.NotifyAll();
  }
  if (pump_.joinable()) pump_.join();
  {
    const MutexLock lock(mutex_);
    link_.reset();  // before the memory that they use
    chains_.reset();
  }
  if (region().data() != nullptr) munmap(region().data(), region().size());
  if (wake_ >= 0) close(wake_);
}

// ----------------------------------------------------------------------------------------- Ending

void UcxMemory::SetEnded(const absl::Status& why) {
  const MutexLock lock(mutex_);
  if (why_ended_.ok()) {
    why_ended_ = why.ok() ? absl::UnavailableError("the server has ended the UCX ring") : why;
  }
  ended_there_ = true;
  ended_.store(true, std::memory_order_release);
  changed_.NotifyAll();
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) return;  // it is full, so no thread sleeps
}

void UcxMemory::GiveUp() {
  if (!gave_up_.exchange(true) && give_up_) give_up_();
}

void UcxMemory::Disconnect() {
  ended_.store(true, std::memory_order_release);
  GiveUp();
}

void UcxMemory::Close(milliseconds timeout) {
  GiveUp();
  MutexLock lock(mutex_);
  changed_.WaitFor(lock, timeout,
                   [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return ended_there_; });
  ended_.store(true, std::memory_order_release);
}

absl::Status UcxMemory::EndStatus() {
  const MutexLock lock(mutex_);
  return why_ended_.ok() ? absl::UnavailableError("the UCX ring has ended") : why_ended_;
}

// ------------------------------------------------------------------------------------------ Frames

absl::StatusOr<std::byte*> UcxMemory::Place(std::span<const std::byte> header, size_t bytes) {
  wire::UcxCompletionFrame frame;
  if (!wire::ReadFrame(header, token_, &frame)) {
    return absl::DataLossError("UCX ring: a frame of another connection");
  }
  const uint64_t ahead = frame.number - returned_.load(std::memory_order_acquire);
  Slot& slot = slots_[frame.number & (entries_ - 1)];
  if (ahead >= entries_ || frame.number >= entries_given_.load() ||
      slot.state != SlotState::kFree) {
    return absl::DataLossError(absl::StrCat("UCX ring: a completion to nothing: ", frame.number));
  }
  if (frame.place > region().size() || bytes > region().size() - frame.place) {
    return absl::DataLossError(absl::StrCat("UCX ring: place: got ", frame.place, " + ", bytes,
                                            ", must be within 0..", region().size()));
  }
  slot.state = SlotState::kArriving;
  slot.entry = frame.entry;
  return region().data() + frame.place;
}

void UcxMemory::OnArrived(std::span<const std::byte> header) {
  wire::UcxCompletionFrame frame;
  if (!wire::ReadFrame(header, token_, &frame)) return;  // Place has checked it
  ++arrived_;
  if (chains_ != nullptr) chains_->Complete(frame.entry.tag);
  slots_[frame.number & (entries_ - 1)].state.store(SlotState::kArrived, std::memory_order_release);
}

void UcxMemory::OnSent(uint64_t) { --sending_; }

bool UcxMemory::GoesToDevice(const wire::SubmissionEntry& entry, const RingPlaces& places) const {
  const uint64_t arena = region().size() - arena_bytes();
  const auto lies = [&](uint64_t offset, uint64_t bytes) {
    return bytes == 0 || (offset >= arena && offset - arena <= device_bytes_ &&
                          bytes <= device_bytes_ - (offset - arena));
  };
  return device_bytes_ > 0 && wire::MayLieOnDevice(entry) &&
         places.in_bytes >= wire::UcxLink::kLeastPutBytes &&
         lies(places.in_offset, places.in_bytes) && lies(entry.out_offset, places.out_bytes);
}

absl::Status UcxMemory::SendRequest(const wire::UcxRequestFrame& frame, const RingPlaces& places) {
  const auto header = std::as_bytes(std::span<const wire::UcxRequestFrame, 1>(&frame, 1));
  const auto payload = region().subspan(frame.place, places.in_bytes);
  const uint64_t arena = region().size() - arena_bytes();
  if ((frame.entry.flags & wire::kEntryOnDevice) != 0) {
    return link_->Put(header, region().subspan(places.in_offset, places.in_bytes),
                      places.in_offset - arena, frame.number, wire::UcxRemote::kDevice);
  }
  if (!link_->reaches() || payload.size() < wire::UcxLink::kLeastPutBytes || frame.place < arena) {
    return link_->Send(header, payload, frame.number);
  }
  return link_->Put(header, payload, frame.place - arena, frame.number);
}

bool UcxMemory::Submit(wire::SubmissionEntry entry, const RingPlaces& places, void* stream,
                       bool chained) {
  if (in_flight() >= entries_ || (entry.flags & wire::kEntryOnDevice) != 0) return false;
  if (chained && device_ == nullptr) return false;
  if (entry.kind == wire::kEntryAttend) entry.flags &= ~wire::kEntryChained;  // it does not travel
  wire::UcxRequestFrame frame{};
  frame.token = token_;
  frame.number = submitted_.load();
  frame.place = places.in_bytes > 0 ? places.in_offset : 0;
  frame.out_bytes = entry.kind == wire::kEntryAttend ? places.out_bytes : 0;
  frame.entry = entry;
  if (GoesToDevice(entry, places)) {
    const uint64_t arena = region().size() - arena_bytes();
    frame.place = 0;
    frame.entry.flags |= wire::kEntryOnDevice;
    frame.entry.in_offset = places.in_offset - arena;
    frame.entry.out_offset = places.out_bytes > 0 ? entry.out_offset - arena : 0;
  }
  // Without the lock, because a driver may wait for the stream's earlier work.
  absl::Status turn;
  if (chained) turn = chains_->PassTurn(frame.number, returned_, stream);
  const MutexLock lock(mutex_);
  if (chained) {
    chain_status_.Update(turn);
    if (!chain_status_.ok()) return false;
    chains_->Expect(frame.number, entry.tag);
    chain_end_ = frame.number + 1;
  }
  submitted_.store(frame.number + 1);
  queue_.push_back({frame, places, chained});
  if (holds_) return true;
  SendReady();
  if (std::exchange(parked_, false) || chained) changed_.NotifyAll();
  return true;
}

void UcxMemory::Hold() {
  const MutexLock lock(mutex_);
  holds_ = true;
}

void UcxMemory::SendHeld() {
  const MutexLock lock(mutex_);
  if (!std::exchange(holds_, false)) return;
  SendReady();
  parked_ = false;
  changed_.NotifyAll();
}

uint64_t UcxMemory::messages_sent() const {
  const MutexLock lock(mutex_);
  return link_->messages_sent();
}

bool UcxMemory::pump_rests() const {
  const MutexLock lock(mutex_);
  return parked_;
}

bool UcxMemory::SendReady() {
  if (queue_.empty()) return false;
  bool moved = false;
  link_->Hold();
  for (; !queue_.empty(); queue_.pop_front(), moved = true) {
    const Queued& next = queue_.front();
    // The server takes messages in their turn, so they need not wait for the chain before them.
    const bool may_leave =
        next.chained ? chains_->Ready(next.frame.number)
                     : next.frame.entry.kind == wire::kEntryMessage || arrived_ >= chain_end_;
    if (!may_leave) break;
    entries_given_.store(next.frame.number + 1);
    ++sending_;
    if (const absl::Status sent = SendRequest(next.frame, next.places); !sent.ok()) {
      NoteFailure(sent);
    }
  }
  if (const absl::Status sent = link_->SendHeld(); !sent.ok()) NoteFailure(sent);
  return moved;
}

absl::Status UcxMemory::device_status() const {
  if (device_ == nullptr) return pinned_;
  const MutexLock lock(mutex_);
  return chain_status_;
}

void UcxMemory::ReleaseStreams() {
  const MutexLock lock(mutex_);
  queue_.clear();
  if (chains_ != nullptr) chains_->Release();
}

// A failure shows as the end of the ring, to the thread that waits.
void UcxMemory::NoteFailure(const absl::Status& status) {
  why_ended_.Update(status);
  ended_.store(true, std::memory_order_release);
}

// -------------------------------------------------------------------------------------- Progress

bool UcxMemory::Progress() {
  const MutexLock lock(mutex_);
  bool moved = link_->Progress();
  moved |= SendReady();
  if (!link_->status().ok()) NoteFailure(link_->status());
  return moved;
}

// Sleeps until UCX has something to do, at most for this time.
void UcxMemory::Sleep(std::chrono::nanoseconds longest) {
  auto wait = std::min<std::chrono::nanoseconds>(longest, kLongestSleep);
  {
    const MutexLock lock(mutex_);
    if (!queue_.empty()) wait = std::min<std::chrono::nanoseconds>(wait, kChainPause);
    if (!link_->Arm()) return;
  }
  const timespec time{0, static_cast<long>(std::max<int64_t>(wait.count(), 0))};
  pollfd waits[] = {{wake_, POLLIN, 0}, {event_, POLLIN, 0}};
  ppoll(waits, std::size(waits), &time, nullptr);
  uint64_t wakes = 0;
  if (waits[0].revents != 0 && read(wake_, &wakes, sizeof(wakes)) < 0) return;
}

// Moves what is under way while no thread waits. Stays awake for a while, so that calls in a row
// need not wake it.
void UcxMemory::Pump() {
  MutexLock lock(mutex_);
  auto last_work = Clock::now();
  while (!stop_) {
    const auto now = Clock::now();
    if (HasWork() && !ended_) last_work = now;
    if (now - last_work > options_.pump_rest) {
      // The call that wakes it clears the flag, so from then on pump_rests() is false.
      parked_ = true;
      changed_.Wait(lock,
                    [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !parked_ || stop_; });
      last_work = Clock::now();
      continue;
    }
    changed_.WaitFor(lock, kPumpPause);
    while (waiting_.load() == 0 && !stop_ && HasWork() && !ended_) {
      lock.Unlock();
      if (!Progress()) Sleep(kPumpPause);
      lock.Lock();
    }
  }
}

bool UcxMemory::Ready() const {
  return slots_[taken_ & (entries_ - 1)].state.load(std::memory_order_acquire) ==
         SlotState::kArrived;
}

// The previous completion's places may be written again from here on.
void UcxMemory::GiveBack() {
  if (!held_) return;
  held_ = false;
  returned_.store(taken_, std::memory_order_release);
}

bool UcxMemory::Poll(wire::CompletionEntry* entry) {
  GiveBack();
  if (!Ready()) return false;
  Slot& slot = slots_[taken_ & (entries_ - 1)];
  *entry = slot.entry;
  slot.state.store(SlotState::kFree, std::memory_order_release);
  ++taken_;
  held_ = true;
  if (entry->kind != wire::kEntryMessage) GiveBack();
  return true;
}

absl::Status UcxMemory::Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds timeout) {
  const auto start = Clock::now();
  // Each look at a transport may be a system call.
  const int spins = options_.spin.count() > 0 ? kSpinsPerClock : 1;
  waiting_.fetch_add(1);
  absl::Status status;
  for (auto last_work = start;;) {
    bool moved = false;
    for (int i = 0; i < spins && !moved && !Ready(); ++i) {
      moved = Progress();
      if (!moved) wire::SpinPause();
    }
    if (Poll(entry)) break;
    const auto now = Clock::now();
    if (moved) last_work = now;
    const auto rest = timeout - (now - start);
    if (!Connected() && !Ready()) {
      status = EndStatus();
      break;
    }
    if (rest.count() <= 0) {
      status = absl::DeadlineExceededError("no completion in time");
      break;
    }
    if (now - last_work >= options_.spin) Sleep(rest);
  }
  waiting_.fetch_sub(1);
  return status;
}

}  // namespace mla::client
