// The command ring, driven by hand: how the server treats clients that break its rules, stop or
// die.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <span>
#include <thread>

#include "client/cpp/shared_memory/shared_memory.h"
#include "mla/v1/attention.pb.h"
#include "proto/wire/futex.h"
#include "proto/wire/ring_layout.h"
#include "tests/integration/shared_memory/shared_memory_harness.h"
#include "tests/integration/test_server.h"
#include "tests/integration/worker.h"

namespace mla::integration {
namespace {

using absl::StatusCode;
using client::ClientOptions;
using client::SharedMemory;

// A ring driven by hand, so that its rules can be broken.
class RingTest : public testing::Test {
 protected:
  RingTest() : client_(server_.Connect(Over(ClientOptions::Transport::kRing))) {
    worker_.emplace(client_.get(), Dims(), "m", 1);
    ring_ = Region(server_, true);
    header_ = reinterpret_cast<wire::RingHeader*>(ring_->region().data());
    submissions_ = reinterpret_cast<wire::SubmissionEntry*>(ring_->region().data() +
                                                            wire::SubmissionsOffset());
  }

  // A request that the server refuses at once.
  static wire::SubmissionEntry Refused(uint64_t tag) {
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryAttend;
    entry.tag = tag;
    entry.step_id = 999;
    return entry;
  }

  // Publishes entry `index` without using the client library's own count.
  void Publish(uint64_t index, const wire::SubmissionEntry& entry) {
    wire::SubmissionEntry& slot = submissions_[index & (ring_->ring_entries() - 1)];
    slot = entry;
    std::atomic_ref(slot.sequence).store(wire::PublishedSequence(index));
    std::atomic_ref(header_->submit_doorbell).fetch_add(1);
    wire::FutexWake(&header_->submit_doorbell);
  }

  // Submits through the client library and returns the refusal.
  v1::StepError ErrorOf(const wire::SubmissionEntry& entry) {
    EXPECT_TRUE(ring_->Submit(entry));
    wire::CompletionEntry done;
    EXPECT_EQ(ring_->Wait(&done, std::chrono::seconds(5)), absl::OkStatus());
    v1::AttendStreamReply reply;
    EXPECT_TRUE(reply.ParseFromString(std::string(ring_->Message(done))));
    EXPECT_TRUE(reply.has_error());
    return reply.error();
  }

  // An entry of a message whose bytes lie in `block`.
  wire::SubmissionEntry Message(const v1::AttendStreamRequest& request,
                                std::span<std::byte> block) const {
    const std::string bytes = request.SerializeAsString();
    std::memcpy(block.data(), bytes.data(), bytes.size());
    wire::SubmissionEntry entry{};
    entry.kind = wire::kEntryMessage;
    entry.row_count = static_cast<uint32_t>(bytes.size());
    entry.in_offset = ring_->OffsetOf(block.data());
    return entry;
  }

  // An entry that begins step 4711 with two rows of the sequence; its bytes lie in `block`.
  wire::SubmissionEntry Begin(const Track& track, std::span<std::byte> block) {
    v1::AttendStreamRequest request;
    v1::BeginStep* begin = request.mutable_begin_step();
    begin->set_step_id(4711);
    begin->set_model_id("m");
    v1::StepSequence* rows = begin->add_sequences();
    rows->set_sequence_id(track.sequence.id());
    rows->set_epoch(track.sequence.epoch());
    rows->set_rows(2);
    return Message(request, block);
  }

  // One row of step 4711, without its KV row: ABSORBED, q and o in `block`.
  wire::SubmissionEntry Attend(std::span<std::byte> block) const {
    wire::SubmissionEntry attend{};
    attend.kind = wire::kEntryAttend;
    attend.profile = v1::PROFILE_ABSORBED;
    attend.step_id = 4711;
    attend.row_count = 1;
    attend.num_heads = 4;
    attend.in_offset = attend.out_offset = ring_->OffsetOf(block.data());
    return attend;
  }

  // Returns true if the server has disconnected the ring.
  bool IsDisconnected() const {
    for (int i = 0; i < 500; ++i) {
      if (std::atomic_ref(header_->closed).load() == 1) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  // Waits until `count` requests are answered, without taking a completion.
  bool Answered(uint64_t count) const {
    auto* const completions = reinterpret_cast<wire::CompletionEntry*>(
        ring_->region().data() + wire::CompletionsOffset(ring_->ring_entries()));
    wire::CompletionEntry& last = completions[(count - 1) & (ring_->ring_entries() - 1)];
    for (int i = 0; i < 500; ++i) {
      if (std::atomic_ref(last.sequence).load() == wire::PublishedSequence(count - 1)) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  // Expects that another client's work goes on, and that nothing remains of the broken ring.
  void ExpectOthersUnaffected() {
    Track track = *worker_->Open();
    EXPECT_EQ(worker_->Step({&track}, {3}, v1::PROFILE_ABSORBED), absl::OkStatus());
    EXPECT_TRUE(Becomes(*client_, [](const v1::GetStatsReply& stats) {
      return stats.rings() == 1 && stats.shared_regions() == 1 && stats.open_steps() == 0 &&
             stats.requests_waiting() == 0;
    }));
  }

  // The server waits for missing rows for as long as a test takes.
  TestServer server_{[](server::Config& config) { config.limits.kv_wait_ms = 20000; }};
  std::unique_ptr<client::Client> client_;
  std::optional<Worker> worker_;
  std::unique_ptr<SharedMemory> ring_;
  wire::RingHeader* header_ = nullptr;
  wire::SubmissionEntry* submissions_ = nullptr;
};

TEST_F(RingTest, HalfWrittenEntriesAreNotRead) {
  submissions_[0] = Refused(5);  // everything except the sequence word
  std::atomic_ref(header_->submit_doorbell).fetch_add(1);
  wire::FutexWake(&header_->submit_doorbell);
  wire::CompletionEntry entry;
  EXPECT_EQ(ring_->Wait(&entry, std::chrono::milliseconds(100)).code(),
            StatusCode::kDeadlineExceeded);
  std::atomic_ref(submissions_[0].sequence).store(7);  // fits no turn of the ring
  EXPECT_EQ(ring_->Wait(&entry, std::chrono::milliseconds(100)).code(),
            StatusCode::kDeadlineExceeded);
  Publish(0, Refused(5));
  ASSERT_EQ(ring_->Wait(&entry, std::chrono::seconds(5)), absl::OkStatus());
  EXPECT_EQ(entry.tag, 5u);
  v1::AttendStreamReply reply;
  ASSERT_TRUE(reply.ParseFromString(std::string(ring_->Message(entry))));
  EXPECT_EQ(reply.error().code(), static_cast<int>(StatusCode::kNotFound));
  EXPECT_EQ(reply.error().detail().reason(), "step_not_found");
}

TEST_F(RingTest, UnknownKindsAndBadMessagesAreErrors) {
  wire::SubmissionEntry unknown{};
  unknown.kind = 77;
  wire::SubmissionEntry outside{};
  outside.kind = wire::kEntryMessage;
  outside.row_count = 100;
  outside.in_offset = ring_->region().size() - 10;
  wire::SubmissionEntry over_the_ring = outside;
  over_the_ring.in_offset = 0;  // the ring's own words are not in the arena
  wire::SubmissionEntry garbage = outside;
  garbage.in_offset = ring_->region().size() - 4096;
  std::memset(ring_->region().data() + garbage.in_offset, 0xff, 100);
  const char* const fields[] = {"kind", "in_offset", "in_offset", "message"};
  int i = 0;
  for (const wire::SubmissionEntry& entry : {unknown, outside, over_the_ring, garbage}) {
    const v1::StepError error = ErrorOf(entry);
    EXPECT_EQ(error.code(), static_cast<int>(StatusCode::kInvalidArgument));
    EXPECT_EQ(error.detail().field(), fields[i++]);
  }
}

TEST_F(RingTest, PlacesOfTensorsAreChecked) {
  Track track = *worker_->Open();
  const auto block = ring_->Allocate(4096);
  ASSERT_TRUE(ring_->Submit(Begin(track, block)));
  wire::CompletionEntry done;
  ASSERT_EQ(ring_->Wait(&done, std::chrono::seconds(5)), absl::OkStatus());
  const uint64_t size = ring_->region().size();
  const uint64_t good = ring_->OffsetOf(block.data());
  for (const uint64_t bad :
       {uint64_t{0}, uint64_t{wire::SubmissionsOffset()}, size - ring_->arena_bytes() - 64,
        good + 4, size - 64, size, size + (uint64_t{1} << 40), UINT64_MAX - 63}) {
    wire::SubmissionEntry attend = Attend(block);
    attend.in_offset = bad;
    EXPECT_EQ(ErrorOf(attend).detail().field(), "in_offset") << bad;
    attend = Attend(block);
    attend.out_offset = bad;
    EXPECT_EQ(ErrorOf(attend).detail().field(), "out_offset") << bad;
  }
}

TEST_F(RingTest, MessagesCarryNoTensors) {
  const auto block = ring_->Allocate(4096);
  v1::AttendStreamRequest request;
  request.mutable_end_step()->set_step_id(1);
  request.set_payload("x");
  EXPECT_EQ(ErrorOf(Message(request, block)).detail().field(), "message");
}

TEST_F(RingTest, LongMessagesAreRefused) {
  // Longer than a BeginStep of limits.max_step_sequences can be, so it is not even parsed.
  constexpr uint32_t kMost = 4096 + 128 + 64 * 32;
  ring_ = Region(server_, true, "", 4 << 20);
  const auto large = ring_->Allocate(3 << 20);
  wire::SubmissionEntry entry{};
  entry.kind = wire::kEntryMessage;
  entry.in_offset = ring_->OffsetOf(large.data());
  for (const uint32_t bytes : {kMost + 1, uint32_t{1} << 20, uint32_t{2} << 20}) {
    entry.row_count = bytes;
    EXPECT_EQ(ErrorOf(entry).detail().field(), "in_offset") << bytes;
  }
  entry.row_count = kMost;  // zeros are not a message either
  EXPECT_EQ(ErrorOf(entry).detail().field(), "message");
}

TEST_F(RingTest, OverflowEndsTheConnection) {
  // The client library refuses entries that would overflow.
  for (uint32_t i = 0; i < ring_->ring_entries(); ++i) ASSERT_TRUE(ring_->Submit(Refused(i)));
  EXPECT_FALSE(ring_->Submit(Refused(0)));
  ASSERT_TRUE(Answered(ring_->ring_entries()));
  // A client that sends one nevertheless, without having taken a completion, is disconnected.
  Publish(ring_->ring_entries(), Refused(1));
  EXPECT_TRUE(IsDisconnected());
  ExpectOthersUnaffected();
}

TEST_F(RingTest, AForgedCountOfCompletionsEndsTheConnection) {
  std::atomic_ref(header_->completions_taken).store(1'000'000);
  Publish(0, Refused(1));
  EXPECT_TRUE(IsDisconnected());
  ExpectOthersUnaffected();
}

TEST_F(RingTest, CompletionsThatAreGivenBackTwiceEndTheConnection) {
  for (uint64_t i = 0; i < 5; ++i) {
    EXPECT_EQ(ErrorOf(Refused(i)).detail().reason(), "step_not_found");
  }
  // The count decreases, so free entries would be taken twice.
  std::atomic_ref(header_->completions_taken).store(1);
  Publish(5, Refused(5));
  EXPECT_TRUE(IsDisconnected());
  ExpectOthersUnaffected();
}

TEST_F(RingTest, CompletionsThatDoNotExistYetCannotBeGivenBack) {
  Track track = *worker_->Open();
  const auto block = ring_->Allocate(4096);
  Publish(0, Begin(track, block));
  ASSERT_TRUE(Answered(1));
  Publish(1, Attend(block));  // waits for its row
  ASSERT_TRUE(Becomes(*client_, [](const auto& s) { return s.requests_waiting() == 1; }));
  std::atomic_ref(header_->completions_taken).store(2);
  Publish(2, Refused(2));
  EXPECT_TRUE(IsDisconnected());
  ExpectOthersUnaffected();
}

TEST_F(RingTest, ClientThatStopsReadingHoldsNobodyUp) {
  for (uint32_t i = 0; i < ring_->ring_entries(); ++i) ASSERT_TRUE(ring_->Submit(Refused(i)));
  // An unanswered entry counts towards the tenant's limit of queued requests, which the worker
  // shares.
  ASSERT_TRUE(Answered(ring_->ring_entries()));
  Track track = *worker_->Open();
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(worker_->Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
  }
}

TEST_F(RingTest, DyingClientLeavesNothing) {
  // A step with an entry in flight that waits for rows that never come.
  Track track = *worker_->Open();
  const auto block = ring_->Allocate(4096);
  ASSERT_TRUE(ring_->Submit(Begin(track, block)));
  wire::CompletionEntry done;
  ASSERT_EQ(ring_->Wait(&done, std::chrono::seconds(5)), absl::OkStatus());
  wire::SubmissionEntry attend = Attend(block);
  attend.row_begin = 1;  // row 0 is missing, too
  ASSERT_TRUE(ring_->Submit(attend));
  EXPECT_TRUE(Becomes(*client_, [](const auto& s) { return s.open_steps() == 1; }));
  ring_.reset();
  ExpectOthersUnaffected();
  EXPECT_EQ(worker_->Step({&track}, {2}, v1::PROFILE_ABSORBED), absl::OkStatus());
}

TEST_F(RingTest, ServerRestartEndsTheRing) {
  server_.Restart();
  EXPECT_TRUE(IsDisconnected());
  EXPECT_FALSE(client_->OpenSequence("m").ok());
}

// Talks to the listener without the library.
class ListenerTest : public testing::Test {
 protected:
  ListenerTest() : client_(server_.Connect(Over(ClientOptions::Transport::kInline))) {}
  ~ListenerTest() override {
    for (const int one : open_) close(one);
  }

  int ConnectRaw() {
    const int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    open_.push_back(connection);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    ShmPathOf(server_).copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(connect(connection, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    const timeval timeout{10, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    return connection;
  }

  static wire::ConnectRequest Handshake() {
    wire::ConnectRequest connect_request{};
    connect_request.magic = wire::kHandshakeMagic;
    connect_request.version = wire::kHandshakeVersion;
    connect_request.bytes = 1 << 20;
    return connect_request;
  }

  // Returns the reply's bytes, or 0 if the connection was ended; `memory` gets the descriptor, if
  // any.
  ssize_t Answer(int connection, wire::ConnectReply* connect_reply, int* memory) {
    iovec part{connect_reply, sizeof(*connect_reply)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = recvmsg(connection, &message, MSG_CMSG_CLOEXEC);
    *memory = -1;
    if (const cmsghdr* const first = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr) {
      std::memcpy(memory, CMSG_DATA(first), sizeof(*memory));
      open_.push_back(*memory);
    }
    return got;
  }

  TestServer server_;
  std::unique_ptr<client::Client> client_;
  std::vector<int> open_;
};

TEST_F(ListenerTest, OnlyItsOwnersMayConnect) {
  struct stat listener {};
  ASSERT_EQ(stat(ShmPathOf(server_).c_str(), &listener), 0);
  EXPECT_TRUE(S_ISSOCK(listener.st_mode));
  EXPECT_EQ(listener.st_mode & 0177, 0u);
}

TEST_F(ListenerTest, MemoryCannotBeResizedUnderTheServer) {
  const int connection = ConnectRaw();
  const wire::ConnectRequest connect_request = Handshake();
  ASSERT_EQ(send(connection, &connect_request, sizeof(connect_request), 0),
            static_cast<ssize_t>(sizeof(connect_request)));
  wire::ConnectReply connect_reply{};
  int memory = -1;
  ASSERT_EQ(Answer(connection, &connect_reply, &memory),
            static_cast<ssize_t>(sizeof(connect_reply)));
  ASSERT_EQ(connect_reply.code, 0);
  ASSERT_GE(memory, 0);
  EXPECT_EQ(ftruncate(memory, 0), -1);
  EXPECT_EQ(ftruncate(memory, 64 << 20), -1);
  EXPECT_EQ(fcntl(memory, F_ADD_SEALS, F_SEAL_WRITE), -1);  // nor sealed further
  const int seals = fcntl(memory, F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
            F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
}

TEST_F(ListenerTest, GarbageEndsTheConnection) {
  wire::ConnectRequest other = Handshake();
  other.magic ^= 1;
  const std::string wrong(reinterpret_cast<const char*>(&other), sizeof(other));
  other = Handshake();
  const std::string right(reinterpret_cast<const char*>(&other), sizeof(other));
  const std::string short_bytes = right.substr(0, right.size() - 1), long_bytes = right + "x";
  for (const std::string& bytes : {short_bytes, long_bytes, wrong}) {
    const int connection = ConnectRaw();
    ASSERT_EQ(send(connection, bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
    wire::ConnectReply connect_reply{};
    int memory = -1;
    EXPECT_EQ(Answer(connection, &connect_reply, &memory), 0) << bytes.size();
  }
  other = Handshake();
  other.version += 1;
  const int connection = ConnectRaw();
  ASSERT_EQ(send(connection, &other, sizeof(other), 0), static_cast<ssize_t>(sizeof(other)));
  wire::ConnectReply connect_reply{};
  int memory = -1;
  EXPECT_EQ(Answer(connection, &connect_reply, &memory),
            static_cast<ssize_t>(sizeof(connect_reply)));
  EXPECT_EQ(connect_reply.code, static_cast<int>(StatusCode::kUnimplemented));
  EXPECT_EQ(memory, -1);
  EXPECT_EQ(client_->GetStats()->shared_regions(), 0u);
}

TEST_F(ListenerTest, AnythingAfterTheHandshakeEndsTheRegion) {
  const int connection = ConnectRaw();
  const wire::ConnectRequest connect_request = Handshake();
  ASSERT_EQ(send(connection, &connect_request, sizeof(connect_request), 0),
            static_cast<ssize_t>(sizeof(connect_request)));
  wire::ConnectReply connect_reply{};
  int memory = -1;
  ASSERT_GT(Answer(connection, &connect_reply, &memory), 0);
  EXPECT_EQ(client_->GetStats()->shared_regions(), 1u);
  ASSERT_EQ(send(connection, &connect_request, sizeof(connect_request), 0),
            static_cast<ssize_t>(sizeof(connect_request)));
  EXPECT_LE(Answer(connection, &connect_reply, &memory),
            0);  // ended, or reset because of unread bytes
  EXPECT_TRUE(Becomes(*client_, [](const auto& s) { return s.shared_regions() == 0; }));
}

}  // namespace
}  // namespace mla::integration
