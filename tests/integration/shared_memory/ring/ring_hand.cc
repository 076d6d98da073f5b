#include "tests/integration/shared_memory/ring/ring_hand.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "proto/wire/futex.h"

namespace mla::integration {

RingHand::RingHand(std::span<std::byte> region, uint32_t entries)
    : region_(region),
      entries_(entries),
      header_(reinterpret_cast<wire::RingHeader*>(region.data())),
      submissions_(
          reinterpret_cast<wire::SubmissionEntry*>(region.data() + wire::SubmissionsOffset())),
      completions_(reinterpret_cast<wire::CompletionEntry*>(region.data() +
                                                            wire::CompletionsOffset(entries))) {}

void RingHand::Submit(const wire::SubmissionEntry& entry) {
  wire::SubmissionEntry& slot = submissions_[published_ % entries_];
  std::memcpy(reinterpret_cast<char*>(&slot) + sizeof(slot.sequence),
              reinterpret_cast<const char*>(&entry) + sizeof(entry.sequence),
              sizeof(entry) - sizeof(entry.sequence));
  std::atomic_ref(slot.sequence).store(wire::PublishedSequence(published_));
  ++published_;
  std::atomic_ref(header_->submit_doorbell).fetch_add(1);
  wire::FutexWake(&header_->submit_doorbell);
}

void RingHand::SubmitMessage(const v1::AttendStreamRequest& request, uint64_t at, uint64_t room_at,
                             uint32_t room) {
  const std::string bytes = request.SerializeAsString();
  std::memcpy(region_.data() + at, bytes.data(), bytes.size());
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryMessage;
  entry.row_count = static_cast<uint32_t>(bytes.size());
  entry.in_offset = at;
  entry.num_heads = room;
  entry.out_offset = room_at;
  Submit(entry);
}

std::optional<wire::CompletionEntry> RingHand::Poll(bool keep) {
  wire::CompletionEntry& slot = completions_[taken_ % entries_];
  if (std::atomic_ref(slot.sequence).load() != wire::PublishedSequence(taken_)) {
    return std::nullopt;
  }
  ++taken_;
  const wire::CompletionEntry done = slot;
  if (!keep) std::atomic_ref(header_->completions_taken).store(taken_);
  return done;
}

std::optional<wire::CompletionEntry> RingHand::Wait(std::chrono::milliseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  do {
    if (const auto done = Poll()) return done;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (std::chrono::steady_clock::now() < end);
  return std::nullopt;
}

std::optional<v1::AttendStreamReply> RingHand::Message(const wire::CompletionEntry& done) const {
  if (done.kind != wire::kEntryMessage || done.message_offset > region_.size() ||
      done.message_length > region_.size() - done.message_offset) {
    return std::nullopt;
  }
  v1::AttendStreamReply reply;
  if (!reply.ParseFromArray(region_.data() + done.message_offset,
                            static_cast<int>(done.message_length))) {
    return std::nullopt;
  }
  return reply;
}

ShmConnection::ShmConnection(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return;
  path.copy(address.sun_path, path.size());
  socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return;
  close(socket_);
  socket_ = -1;
}

ShmConnection::~ShmConnection() {
  if (region_.data() != nullptr) munmap(region_.data(), region_.size());
  if (descriptor_ >= 0) close(descriptor_);
  if (socket_ >= 0) close(socket_);
}

wire::ConnectRequest ShmConnection::Request(const std::string& tenant, uint64_t bytes, bool ring) {
  wire::ConnectRequest request{};
  request.magic = wire::kHandshakeMagic;
  request.version = wire::kHandshakeVersion;
  request.flags = ring ? wire::kWantRing : 0;
  request.bytes = bytes;
  tenant.copy(request.tenant, sizeof(request.tenant) - 1);
  return request;
}

bool ShmConnection::Send(const void* data, size_t size) const {
  return send(socket_, data, size, MSG_NOSIGNAL) == static_cast<ssize_t>(size);
}

std::optional<wire::ConnectReply> ShmConnection::Receive(std::chrono::milliseconds timeout) {
  pollfd ready{socket_, POLLIN, 0};
  if (poll(&ready, 1, static_cast<int>(timeout.count())) != 1) return std::nullopt;
  iovec part{&reply_, sizeof(reply_)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t got = recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
  const cmsghdr* const first = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (first != nullptr && descriptor_ < 0) {
    std::memcpy(&descriptor_, CMSG_DATA(first), sizeof(descriptor_));
    void* const at =
        mmap(nullptr, reply_.region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (at != MAP_FAILED) region_ = {static_cast<std::byte*>(at), reply_.region_bytes};
  }
  if (got != static_cast<ssize_t>(sizeof(reply_))) return std::nullopt;
  return reply_;
}

bool ShmConnection::Ended(std::chrono::milliseconds timeout) const {
  pollfd state{socket_, POLLIN | POLLRDHUP, 0};
  return poll(&state, 1, static_cast<int>(timeout.count())) == 1 &&
         (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

std::span<std::byte> ShmConnection::Open(const std::string& tenant, uint64_t bytes, bool ring) {
  const wire::ConnectRequest request = Request(tenant, bytes, ring);
  if (!connected() || !Send(&request, sizeof(request))) return {};
  const auto reply = Receive(std::chrono::seconds(10));
  return reply.has_value() && reply->code == 0 ? region_ : std::span<std::byte>();
}

}  // namespace mla::integration
