#include "client/cpp/shared_memory/shared_memory.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "client/cpp/shared_memory/socket_owner.h"
#include "proto/wire/futex.h"

namespace mla::client {
namespace {

using std::chrono::steady_clock;

// A sleeper looks at the connection at least this often.
constexpr int64_t kLongestSleepNanos = 100'000'000;
constexpr int kSpinsPerClock = 32;
constexpr uint32_t kMostRingEntries = 65536;
// An arena may exceed the requested size by this much: all its pages are mapped at once.
constexpr uint64_t kMostRounding = 2 << 20;
// At most this number of connections is tried when the server closes them without a reply.
constexpr int kAttempts = 5;
constexpr steady_clock::duration kLeastWait = std::chrono::milliseconds(1);

template <typename T>
std::atomic_ref<T> Atomic(T& word) {
  return std::atomic_ref<T>(word);
}

// The server does not do as the protocol says: it is another version, or none of ours.
absl::Status Mismatch(const char* field, const std::string& got, const std::string& expected) {
  return absl::UnimplementedError(
      absl::StrCat("shared memory: ", field, ": got ", got, ", must be ", expected));
}

timeval Timeval(steady_clock::duration duration) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
  return {us / 1'000'000, us % 1'000'000};
}

// True once there is something to read, or the end; false when the deadline comes first.
bool WaitReadable(int socket, steady_clock::time_point deadline) {
  pollfd ready{socket, POLLIN, 0};
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - steady_clock::now());
    const int count = poll(&ready, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (count >= 0 || errno != EINTR) return count == 1;
  }
}

enum class Received { kReply, kClosed, kOther };

// Reads the connect_reply and the descriptors that come with it, or -1 for missing ones: the
// region's, then its device memory's.
Received Receive(int socket, wire::ConnectReply* connect_reply, std::array<int, 2>* descriptors) {
  iovec part{connect_reply, sizeof(*connect_reply)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(*descriptors))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  descriptors->fill(-1);
  const ssize_t got = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    std::memcpy(descriptors->data(), CMSG_DATA(header),
                std::min(sizeof(*descriptors), header->cmsg_len - CMSG_LEN(0)));
  }
  if (got == 0 || (got < 0 && errno == ECONNRESET)) return Received::kClosed;
  return got == static_cast<ssize_t>(sizeof(*connect_reply)) ? Received::kReply : Received::kOther;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Connect(
    const std::string& shm_path, const SharedMemoryOptions& options) {
  std::unique_ptr<SharedMemory> channel(new SharedMemory(options));
  MLA_RETURN_IF_ERROR(channel->Handshake(shm_path));
  return channel;
}

absl::Status SharedMemory::Handshake(const std::string& shm_path) {
  if (shm_path.size() >= sizeof(sockaddr_un::sun_path) ||
      options_.tenant.size() >= wire::kHandshakeTextBytes) {
    return absl::InvalidArgumentError("shared memory: path or tenant too long");
  }
  const auto deadline =
      steady_clock::now() + std::chrono::milliseconds(options_.connect_timeout_ms);
  Descriptors descriptors;
  bool closed = true;
  absl::Status status;
  // A server with too many connections may close one before it has read the request.
  for (int attempt = 0; attempt < kAttempts && closed; ++attempt) {
    status = Dial(shm_path, deadline);
    if (!status.ok()) return status;
    status = Exchange(shm_path, deadline, &descriptors, &closed);
  }
  return status.ok() ? TakeReply(&descriptors) : status;
}

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Attach(
    int socket, const SharedMemoryOptions& options) {
  std::unique_ptr<SharedMemory> channel(new SharedMemory(options));
  channel->socket_ = socket;
  Descriptors descriptors;
  bool closed = false;
  const auto deadline = steady_clock::now() + std::chrono::milliseconds(options.connect_timeout_ms);
  absl::Status status = channel->Exchange("a connected socket", deadline, &descriptors, &closed);
  if (status.ok()) status = channel->TakeReply(&descriptors);
  if (!status.ok()) return status;
  return channel;
}

absl::Status SharedMemory::TakeReply(Descriptors* received) {
  Descriptors& descriptors = *received;
  if (connect_reply_.code != 0) {
    descriptors.Close();
    return absl::Status(
        static_cast<absl::StatusCode>(connect_reply_.code),
        std::string(connect_reply_.message,
                    strnlen(connect_reply_.message, sizeof(connect_reply_.message))));
  }
  absl::Status status = Map(std::exchange(descriptors.region, -1));
  if (status.ok() && options_.device_mib > 0 && options_.ring) MapDevice(descriptors.device);
  if (status.ok() && options_.pins && options_.ring) Pin();
  descriptors.Close();
  return status;
}

void SharedMemory::Descriptors::Close() {
  for (int* descriptor : {&region, &device}) {
    if (*descriptor >= 0) close(std::exchange(*descriptor, -1));
  }
}

absl::Status SharedMemory::Dial(const std::string& path,
                                std::chrono::steady_clock::time_point deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  if (socket_ >= 0) close(socket_);
  socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  // Bounds connect as well, which waits while the listener's queue is full.
  const timeval left = Timeval(std::max(deadline - steady_clock::now(), kLeastWait));
  if (socket_ < 0 || setsockopt(socket_, SOL_SOCKET, SO_SNDTIMEO, &left, sizeof(left)) != 0 ||
      connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "shared memory: ", path, ": ",
        errno == EAGAIN ? "the server does not accept connections in time" : std::strerror(errno)));
  }
  return CheckSocketPeer(socket_, path, TrustedUsersWith(options_.server_uid));
}

// Sends the request and reads the reply, with the descriptor that comes with it. `*closed` says
// whether the server ended the connection without a reply.
absl::Status SharedMemory::Exchange(const std::string& path,
                                    std::chrono::steady_clock::time_point deadline,
                                    Descriptors* descriptors, bool* closed) {
  *closed = false;
  wire::ConnectRequest connect_request{};
  connect_request.magic = wire::kHandshakeMagic;
  connect_request.version = wire::kHandshakeVersion;
  connect_request.flags = options_.ring ? wire::kWantRing : 0;
  connect_request.bytes = options_.bytes;
  connect_request.spin_us = options_.server_spin_us;
  if (options_.ring && options_.device_mib > 0) {
    connect_request.flags |= wire::kWantDevice;
    connect_request.device_mib = options_.device_mib;
  }
  options_.tenant.copy(connect_request.tenant, sizeof(connect_request.tenant) - 1);
  const auto no_reply = [&path](const char* why) {
    return absl::UnavailableError(absl::StrCat("shared memory: ", path, ": no reply: ", why));
  };
  if (send(socket_, &connect_request, sizeof(connect_request), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(sizeof(connect_request))) {
    *closed = errno == EPIPE || errno == ECONNRESET;
    return no_reply(std::strerror(errno));
  }
  if (!WaitReadable(socket_, deadline)) return no_reply("timeout");
  std::array<int, 2> received{};
  const Received how = Receive(socket_, &connect_reply_, &received);
  *descriptors = {received[0], received[1]};
  switch (how) {
    case Received::kClosed:
      *closed = true;
      return no_reply("the server closed the connection");
    case Received::kOther:
      break;
    case Received::kReply:
      if (connect_reply_.magic == wire::kHandshakeMagic &&
          connect_reply_.version == wire::kHandshakeVersion) {
        return absl::OkStatus();
      }
  }
  descriptors->Close();
  return no_reply("not one of this protocol");
}

// The memory must be sealed, and as large as the connect_reply says: otherwise an access could end
// this process.
absl::Status SharedMemory::CheckRegion(int descriptor) const {
  struct stat about {};
  if (descriptor < 0 || fstat(descriptor, &about) != 0) {
    return Mismatch("region", "no memory", "the region's descriptor");
  }
  const int seals = fcntl(descriptor, F_GET_SEALS);
  constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kSeals) != kSeals) {
    return Mismatch("region", "memory that can be resized", "sealed memory");
  }
  const uint64_t size = connect_reply_.region_bytes, arena = connect_reply_.arena_offset;
  if (static_cast<uint64_t>(about.st_size) != size) {
    return Mismatch("region_bytes", absl::StrCat(size), absl::StrCat(about.st_size));
  }
  const uint32_t entries = connect_reply_.ring_entries;
  if (options_.ring != (entries > 0) || entries > kMostRingEntries ||
      (entries > 0 && !std::has_single_bit(entries))) {
    return Mismatch("ring_entries", absl::StrCat(entries),
                    options_.ring ? absl::StrCat("a power of two up to ", kMostRingEntries) : "0");
  }
  if (has_device() && (options_.device_mib == 0 || entries == 0)) {
    return Mismatch("flags", absl::StrCat(connect_reply_.flags), "no device memory");
  }
  const uint64_t expected = (entries > 0 ? wire::RingBytes(entries) : 0) +
                            (has_device() ? wire::DevicePartBytes(entries) : 0);
  if (arena != expected)
    return Mismatch("arena_offset", absl::StrCat(arena), absl::StrCat(expected));
  if (arena > size || size - arena < options_.bytes ||
      size - arena - options_.bytes > kMostRounding) {
    return Mismatch("region_bytes", absl::StrCat(size),
                    absl::StrCat(options_.bytes, " next to the ring, as it was asked for"));
  }
  return absl::OkStatus();
}

// The server and this client must agree on where the ring's parts lie.
absl::Status SharedMemory::CheckRing() const {
  const uint64_t entries = connect_reply_.ring_entries;
  const std::tuple<const char*, uint64_t, uint64_t> kFields[] = {
      {"magic", header_->magic, wire::kHandshakeMagic},
      {"entries", header_->entries, entries},
      {"submissions_offset", header_->submissions_offset, wire::SubmissionsOffset()},
      {"completions_offset", header_->completions_offset, wire::CompletionsOffset(entries)},
      {"replies_offset", header_->replies_offset, wire::RepliesOffset(entries)}};
  for (const auto& [field, got, expected] : kFields) {
    if (got != expected) return Mismatch(field, absl::StrCat(got), absl::StrCat(expected));
  }
  return absl::OkStatus();
}

absl::Status SharedMemory::Map(int descriptor) {
  if (absl::Status status = CheckRegion(descriptor); !status.ok()) {
    if (descriptor >= 0) close(descriptor);
    return status;
  }
  void* const mapping = mmap(nullptr, connect_reply_.region_bytes, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_POPULATE, descriptor, 0);
  close(descriptor);
  if (mapping == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("shared memory: cannot map: ", std::strerror(errno)));
  }
  SetRegion({static_cast<std::byte*>(mapping), connect_reply_.region_bytes},
            connect_reply_.arena_offset);
  guard_.emplace(&socket_, region());
  if (connect_reply_.ring_entries == 0) return absl::OkStatus();
  header_ = reinterpret_cast<wire::RingHeader*>(region().data());
  submissions_ =
      reinterpret_cast<wire::SubmissionEntry*>(region().data() + wire::SubmissionsOffset());
  completions_ = reinterpret_cast<wire::CompletionEntry*>(
      region().data() + wire::CompletionsOffset(connect_reply_.ring_entries));
  return CheckRing();
}

// A client without device memory sends its tensors another way, so this fails nothing.
void SharedMemory::MapDevice(int descriptor) {
  if (!has_device()) {
    const std::string why(connect_reply_.message,
                          strnlen(connect_reply_.message, sizeof(connect_reply_.message)));
    device_status_ = absl::UnavailableError(
        absl::StrCat("device memory: ", why.empty() ? "the server offers none" : why));
    return;
  }
  const uint32_t entries = connect_reply_.ring_entries;
  auto mapped =
      DeviceRegion::Map(region().subspan(wire::RingBytes(entries), wire::DevicePartBytes(entries)),
                        descriptor, entries, options_.device);
  device_status_ = mapped.status();
  if (mapped.ok()) device_ = *std::move(mapped);
}

// This fails nothing either: a client whose memory is not pinned waits for its calls with a thread.
void SharedMemory::Pin() {
  if (device_ == nullptr && options_.device_mib == 0) {
    auto made = DeviceRegion::WithoutMemory(options_.device);
    pinned_ = made.status();
    if (made.ok()) device_ = *std::move(made);
  } else {
    pinned_ = device_status_;
  }
  if (pinned_.ok() && Atomic(header_->chains).load() == 0) {
    pinned_ = absl::UnimplementedError("shared memory: the server takes no chains there");
  }
  if (pinned_.ok()) pinned_ = MapWords(region());
}

SharedMemory::~SharedMemory() {
  guard_.reset();
  device_.reset();  // before the server frees the memory that it maps
  if (socket_ >= 0) close(socket_);
  if (region().data() != nullptr) munmap(region().data(), region().size());
}

void SharedMemory::Close(std::chrono::milliseconds timeout) {
  shutdown(socket_, SHUT_WR);
  pollfd state{socket_, POLLIN | POLLRDHUP, 0};
  constexpr int64_t kLongest = std::numeric_limits<int>::max();
  poll(&state, 1, static_cast<int>(std::clamp<int64_t>(timeout.count(), 0, kLongest)));
}

void SharedMemory::Disconnect() { shutdown(socket_, SHUT_RDWR); }

// --------------------------------------------------------------------------------------- Ring

absl::Status SharedMemory::MapWords(std::span<std::byte> memory) {
  absl::Status s = device_->MapWords(memory);
  if (s.ok() && device_->Nearby(0) != nullptr) Atomic(header_->nearby).store(1);
  words_mapped_ = s.ok();
  return s;
}

DeviceRegion::Turn SharedMemory::TurnOf(uint64_t index) const {
  const uint32_t slot = index & (connect_reply_.ring_entries - 1);
  const uint32_t value = wire::PublishedSequence(index);
  uint32_t* const nearby = device_->Nearby(0);
  if (nearby == nullptr) {
    return {{{{&header_->ready, value}, {}}}, {&completions_[slot].done, value}};
  }
  return {{{{nearby, value}, {&header_->ready, value}}},
          {device_->Nearby(wire::NearbyDoneOffset(slot)), value}};
}

// Call it before a chained entry of this index.
absl::Status SharedMemory::BeginChain(uint64_t index, void* stream) {
  absl::Status s;
  if (!words_mapped_) s = MapWords(region().first(wire::RingBytes(connect_reply_.ring_entries)));
  if (!device_->chains() || returned_.load(std::memory_order_acquire) < chain_end_) return s;
  const uint32_t before = wire::PublishedSequence(index) - 1;
  if (s.ok() && index - chain_end_ >= options_.words_last) s = ForgetWords(before);
  Atomic(header_->ready).store(before, std::memory_order_release);
  uint32_t* const nearby = device_->Nearby(0);
  return s.ok() && nearby != nullptr ? device_->StoreWord(nearby, before, stream) : s;
}

// Before the entry of this index is published.
absl::Status SharedMemory::RecordEvent(uint64_t index, void* stream, bool chained) {
  const uint32_t slot = index & (connect_reply_.ring_entries - 1);
  if (!chained) return device_->Record(slot, stream);
  absl::Status s = BeginChain(index, stream);
  if (!device_->chains()) {
    if (s.ok()) s = device_->Record(slot, stream);
    return s.ok() ? device_->AwaitWord(&completions_[slot].sequence, wire::PublishedSequence(index),
                                       stream)
                  : s;
  }
  if (s.ok()) s = device_->PassTurn(TurnOf(index), stream);
  chain_end_ = index + 1;
  return s;
}

absl::StatusOr<void*> SharedMemory::CaptureTurn(void* stream) {
  if (device_ == nullptr) return device_status_;
  if (!device_->chains()) return absl::UnimplementedError("chained: the server has no such words");
  if (!words_mapped_) {
    MLA_RETURN_IF_ERROR(MapWords(region().first(wire::RingBytes(connect_reply_.ring_entries))));
  }
  return device_->CaptureTurn(TurnOf(submitted_), stream);
}

absl::Status SharedMemory::SubmitGraph(std::span<const GraphEntry> entries, void* exec,
                                       void* stream) {
  absl::Status s = BeginChain(submitted_, stream);
  for (size_t i = 0; i < entries.size() && s.ok(); ++i) {
    s = device_->SetTurn(TurnOf(submitted_ + i), exec, entries[i].node);
  }
  if (!s.ok()) return s;
  chain_end_ = submitted_ + entries.size();
  for (const GraphEntry& entry : entries) Publish(entry.entry);
  return s;
}

// Streams do not wait for any of them, because no entry is in flight.
absl::Status SharedMemory::ForgetWords(uint32_t value) {
  const uint32_t entries = connect_reply_.ring_entries;
  for (uint32_t slot = 0; slot < entries; ++slot) {
    Atomic(completions_[slot].done).store(value, std::memory_order_release);
  }
  return device_->SetNearby(entries, value);
}

void SharedMemory::ReleaseStreams() {
  if (!words_mapped_ || std::exchange(released_, true)) return;
  std::vector<DeviceRegion::Word> nearby;
  // Completions of messages between chained entries say nothing of those; words only go on.
  const uint64_t entries = connect_reply_.ring_entries;
  for (uint64_t index = submitted_ - std::min(submitted_, entries); index < submitted_; ++index) {
    const uint64_t number = index & (entries - 1);
    const uint32_t value = wire::PublishedSequence(index);
    wire::CompletionEntry& slot = completions_[number];
    for (uint32_t* word : {&slot.sequence, &slot.done}) {
      Atomic(*word).store(value, std::memory_order_release);
    }
    uint32_t* const word = device_->Nearby(wire::NearbyDoneOffset(number));
    if (word != nullptr) nearby.push_back({word, value});
  }
  // If this fails, the device is lost, together with the streams that wait there.
  device_->ReleaseNearby(nearby).IgnoreError();
}

bool SharedMemory::Submit(wire::SubmissionEntry entry, void* stream, bool chained) {
  if (in_flight() >= connect_reply_.ring_entries) return false;
  const bool on_device = (entry.flags & wire::kEntryOnDevice) != 0;
  if (entry.kind == wire::kEntryAttend && (on_device || chained)) {
    if (!on_device && !pinned_.ok()) return false;
    // An event that could not be recorded says nothing: the server would read too early.
    if (device_ == nullptr) return false;
    if (chained && device_->chains()) entry.flags |= wire::kEntryChained;
    device_status_.Update(RecordEvent(submitted_, stream, chained));
    if (!device_status_.ok()) return false;
  }
  Publish(entry);
  return true;
}

void SharedMemory::Publish(const wire::SubmissionEntry& entry) {
  wire::SubmissionEntry& slot = submissions_[submitted_ & (connect_reply_.ring_entries - 1)];
  std::memcpy(reinterpret_cast<char*>(&slot) + sizeof(slot.sequence),
              reinterpret_cast<const char*>(&entry) + sizeof(entry.sequence),
              sizeof(entry) - sizeof(entry.sequence));
  Atomic(slot.sequence).store(wire::PublishedSequence(submitted_), std::memory_order_release);
  ++submitted_;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (Atomic(header_->server_waits).load(std::memory_order_relaxed) != 0) {
    Atomic(header_->submit_doorbell).fetch_add(1);
    wire::FutexWake(&header_->submit_doorbell);
  }
}

bool SharedMemory::Ready() const {
  wire::CompletionEntry& slot = completions_[taken_ & (connect_reply_.ring_entries - 1)];
  return Atomic(slot.sequence).load(std::memory_order_acquire) == wire::PublishedSequence(taken_);
}

// The previous completion's slots may be written again from here on.
void SharedMemory::GiveBack() {
  if (!held_) return;
  held_ = false;
  Atomic(header_->completions_taken).store(taken_, std::memory_order_release);
  returned_.store(taken_, std::memory_order_release);
}

bool SharedMemory::Poll(wire::CompletionEntry* entry) {
  GiveBack();
  if (!Ready()) return false;
  *entry = completions_[taken_ & (connect_reply_.ring_entries - 1)];
  ++taken_;
  held_ = true;
  if (entry->kind != wire::kEntryMessage) GiveBack();
  return true;
}

bool SharedMemory::Connected() const {
  if (Atomic(header_->closed).load() != 0) return false;
  pollfd state{socket_, POLLIN | POLLRDHUP, 0};
  return poll(&state, 1, 0) == 0;
}

absl::Status SharedMemory::Wait(wire::CompletionEntry* entry, std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  if (Poll(entry)) return absl::OkStatus();
  const auto start = Clock::now();
  const auto spin_end = start + std::min<std::chrono::nanoseconds>(
                                    std::chrono::microseconds(options_.spin_us), timeout);
  while (Clock::now() < spin_end) {
    for (int i = 0; i < kSpinsPerClock; ++i) {
      if (Ready()) {
        Poll(entry);
        return absl::OkStatus();
      }
      wire::SpinPause();
    }
  }
  for (;;) {
    const uint32_t doorbell = Atomic(header_->complete_doorbell).load();
    Atomic(header_->client_waits).store(1);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const int64_t rest_ns = (timeout - (Clock::now() - start)).count();
    if (!Ready() && rest_ns > 0) {
      wire::FutexWait(&header_->complete_doorbell, doorbell, std::min(rest_ns, kLongestSleepNanos));
    }
    Atomic(header_->client_waits).store(0);
    if (Poll(entry)) return absl::OkStatus();
    // Checked last, because completions from before the end can still be taken.
    if (!Connected() && !Ready()) return absl::UnavailableError("the shared memory has ended");
    if (rest_ns <= 0) return absl::DeadlineExceededError("no completion in time");
  }
}

}  // namespace mla::client
